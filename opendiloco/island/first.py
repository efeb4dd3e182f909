"""The first machine's side: it waits for the other machines of its volunteer, and sees that they fit."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import logging
import os
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress

from opendiloco.errors import IslandError
from opendiloco.island.environment import Placement
from opendiloco.island.frames import BUFFER, Ended, Frame, Hello, Kind, Place, Reason, parse, read_frame, write_frame
from opendiloco.island.greeting import GREETING_SECONDS, SECRET_BYTES, end_key, key_of, proof, tell_end, versions
from opendiloco.island.remote import RemoteNode
from opendiloco.island.store import PATIENCE, StoreClient, store_client
from opendiloco.workers.nodes import LOOPBACK, Nodes
from peers.errors import DilocoPeerError
from peers.links.sockets import listen

logger = logging.getLogger(__name__)

EVERYWHERE = ("0.0.0.0", "::")
STRANGERS_AT_ONCE = 64
"""Connections of whoever has not shown the secret yet; another one costs the oldest its place."""
LOOK_SECONDS = 0.5
"""Between two looks into torchrun's store, whether somebody has left."""
WARNINGS = 3
"""Wrong proofs that the log tells of."""


class _Gathering:
    """Who has come so far."""

    def __init__(self, placement: Placement, run: str, secret: bytes, on_leave: Callable[[], None], peer: str) -> None:
        self.nodes: dict[int, RemoteNode] = {}
        self.complete: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._servers = list[asyncio.Server]()
        self._strangers = OrderedDict[
            asyncio.StreamWriter, None
        ]()  # whoever has not shown the secret yet, oldest first
        self._wrong = 0
        self._placement = placement
        self._run = run
        self._secret = secret
        self._on_leave = on_leave
        self._peer = peer

    async def listen(self) -> int:
        """Wait for machines; return the port."""
        listeners = listen(_interfaces(self._placement.host), 0)
        port: int = listeners[0].getsockname()[1]
        self._servers = [await asyncio.start_server(self.greet, sock=sock, limit=BUFFER) for sock in listeners]
        return port

    def close(self) -> None:
        """Let nobody in any more."""
        for server in self._servers:
            server.close()
        for stranger in self._strangers:
            stranger.transport.abort()

    async def all_are_here(self, store: StoreClient) -> None:
        """Wait for them. A machine that is still waiting when this fails learns so from the store.

        Raises: IslandError when they do not come, or one does not fit.
        """
        listening = asyncio.create_task(self._heed_leavers(store))
        try:
            await asyncio.wait_for(self.complete, PATIENCE.total_seconds())
        except asyncio.CancelledError:
            await tell_end(store, self._secret, Ended(by="node 0"))
            raise
        except (IslandError, TimeoutError) as error:
            problem = error if isinstance(error, IslandError) else self._missing()
            await tell_end(store, self._secret, Ended(by="node 0", reason=Reason.of(problem)))
            raise problem from error
        finally:
            listening.cancel()
        self.close()

    def _missing(self) -> IslandError:
        missing = sorted(set(range(1, self._placement.size)) - self.nodes.keys())
        return IslandError(
            f"{len(missing)} of {self._placement.size} machines have not come: node {missing[0]} first.",
            "See what torchrun says there; its first machine must be reachable on any port.",
        )

    async def _heed_leavers(self, store: StoreClient) -> None:
        """Leave when a machine is asked to before it is let in."""
        with suppress(IslandError):
            while not await store.has(end_key(self._secret)):
                await asyncio.sleep(LOOK_SECONDS)
            ended = parse(Ended, (await store.get(end_key(self._secret))).encode())
            logger.info("%s is asked to leave before all machines are here: this volunteer leaves", ended.by)
            self._on_leave()

    async def greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Let a machine in, if it is one of ours; what is wrong with one of ours ends the gathering."""
        if len(self._strangers) >= STRANGERS_AT_ONCE:
            self._strangers.popitem(last=False)[0].transport.abort()
        self._strangers[writer] = None
        try:
            hello, own_proof = await self._exchange_proofs(reader, writer)
        except (IslandError, TimeoutError) as error:
            logger.debug("somebody who is no machine of this volunteer has come: %s", error)
            writer.transport.abort()
            return
        finally:
            self._strangers.pop(writer, None)
        problem = self._problem(hello)
        if problem is not None:
            write_frame(writer, Frame(Kind.REFUSED, 0, 0, Reason.of(problem).packed()))
            writer.close()
            if not self.complete.done():
                self.complete.set_exception(problem)
            return
        write_frame(writer, Frame(Kind.WELCOME, 0, 0, own_proof))
        self.nodes[hello.rank] = RemoteNode(hello, reader, writer, self._on_leave, self._peer)
        logger.info("%d of %d machines are here", 1 + len(self.nodes), self._placement.size)
        if len(self.nodes) == self._placement.size - 1 and not self.complete.done():
            self.complete.set_result(None)

    async def _exchange_proofs(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> tuple[Hello, bytes]:
        """Return what a machine says, and what shows it that we know the secret.

        Raises: IslandError and TimeoutError when it does not show that.
        """
        challenge = os.urandom(SECRET_BYTES)
        write_frame(writer, Frame(Kind.CHALLENGE, 0, 0, challenge))
        async with asyncio.timeout(GREETING_SECONDS):
            hello = parse(Hello, (await read_frame(reader, Kind.HELLO)).body)
        if hmac.compare_digest(hello.proof.encode(), proof(self._secret, challenge).encode()):
            return hello, proof(self._secret, challenge + bytes.fromhex(hello.challenge)).encode()
        self._wrong += 1
        if self._wrong <= WARNINGS:
            logger.warning("somebody who does not know torchrun's store wanted to be a machine of this volunteer")
        raise IslandError("it does not know the secret in torchrun's store.")

    def _problem(self, hello: Hello) -> IslandError | None:
        """Return why a machine does not fit."""
        if hello.run != self._run:
            return IslandError(
                f"node {hello.rank} wants to join the run {hello.run}, node 0 the run {self._run}.",
                "Give the same --run on all machines.",
            )
        for name, own in versions().items():
            if hello.versions.get(name) != own:
                return IslandError(
                    f"node {hello.rank} has {name} {hello.versions.get(name)}, node 0 has {own}.",
                    "Install the same versions on all machines: pip install -c constraints.txt diloco-peer.",
                )
        if hello.rank >= self._placement.size or hello.rank in self.nodes:
            return IslandError(f"RANK = {hello.rank} has come twice, or is too large.", "Start torchrun again.")
        return None


@asynccontextmanager
async def gathered(
    placement: Placement, run: str, on_leave: Callable[[], None], peer: str = ""
) -> AsyncIterator[Nodes]:
    """Wait for all machines of this volunteer, whose id is `peer`; when the context ends, they do, too.

    `on_leave` is called when somebody on another machine asks the volunteer to leave, also while others are missing.

    Raises: IslandError when they do not come, or one does not fit.
    """
    secret = os.urandom(SECRET_BYTES)
    gathering = _Gathering(placement, run, secret, on_leave, peer)
    failure: Reason | None = None
    try:
        async with store_client(placement.host, placement.port) as store:
            place = Place(port=await gathering.listen(), secret=secret.hex())
            await store.set(key_of(placement.job), place.packed().decode())
            await gathering.all_are_here(store)
        nodes = [gathering.nodes[rank] for rank in sorted(gathering.nodes)]
        yield Nodes(nodes, placement.host, placement.port)
    except DilocoPeerError as error:
        failure = Reason(message=f"node 0 has ended: {error.message}", remedy=error.remedy)
        raise
    finally:
        gathering.close()
        await asyncio.gather(*(node.close(failure) for node in gathering.nodes.values()))
        with suppress(asyncio.InvalidStateError):
            gathering.complete.cancel()


def _interfaces(host: str) -> Sequence[str]:
    """Return where to listen: on the loopback interface if torchrun's store is there; else everywhere, since a name may
    stand for one address here and for another one elsewhere."""
    if host == "localhost":
        return (LOOPBACK,)
    try:
        return (host,) if ipaddress.ip_address(host).is_loopback else EVERYWHERE
    except ValueError:
        return EVERYWHERE
