"""The swarm's network on hivemind: its DHT for finding each other, its libp2p for messages and bulk data.

Failures of peers leave here as PeerUnreachableError or PeerRefusedError, and nothing that a peer sends can do more than
have its message or stream dropped and a line logged.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, TypeAlias

from peers import metrics
from peers.errors import DilocoPeerError, LocalProtocolError, RemoteProtocolError
from peers.hivemind_daemon import Daemon
from peers.hivemind_node import NETWORK_ERRORS, HivemindNode, to_peer_id
from peers.reach import Reach
from peers.streams import (
    Channel,
    PeerRefusedError,
    PeerUnreachableError,
    RefusalError,
    Serve,
    pull,
    serve_pull,
)
from peers.throttle import UNLIMITED, Caps, Throttle
from peers.wire import MESSAGE_LIMIT, printable

logger = logging.getLogger(__name__)

CallHandler: TypeAlias = Callable[[str, bytes], Awaitable[bytes]]
"""(sender, payload) -> answer; RefusalError refuses."""

PROTOCOL_PREFIX = "/diloco-peer/1"
OPEN_TIMEOUT = 15.0  # seconds to reach a peer
CONVERSATION_TIMEOUT = 3600.0  # seconds that a peer may take for one stream; nobody reads a byte a minute for ever
ANSWER, REFUSAL = b"\x01", b"\x00"


class HivemindTransport(HivemindNode):
    """One peer's connection to the swarm. Made by `create`; `close` ends it."""

    def __init__(self, daemon: Daemon, node: Any, addresses: tuple[str, ...]) -> None:
        super().__init__(daemon, node, addresses)
        self._serving: set[asyncio.Task[None]] = set()
        self._upload = self._download = UNLIMITED
        self.no_round = asyncio.Event()
        """Whether bulk data that is in no hurry may have the link to itself."""
        self.no_round.set()

    def cap(self, caps: Caps) -> None:
        """Let all streams together use no more than this of the link."""
        self._upload, self._download = Throttle(caps.upload), Throttle(caps.download)

    async def close(self) -> None:
        for task in self._serving:
            task.cancel()
        try:
            await asyncio.gather(*self._serving, return_exceptions=True)
        finally:
            await super().close()

    async def call(self, peer_id: str, name: str, payload: bytes, timeout: float) -> bytes:
        """Ask one peer; at most MESSAGE_LIMIT bytes there and back.

        Raises: PeerUnreachableError, PeerRefusedError; LocalProtocolError when the payload is too large.
        """
        if len(payload) > MESSAGE_LIMIT:
            raise LocalProtocolError(f"a message of {len(payload)} bytes exceeds the limit of {MESSAGE_LIMIT}")
        with _peer_errors(peer_id):
            async with asyncio.timeout(timeout):
                answer: bytes = await self._daemon._client.call_unary_handler(
                    to_peer_id(peer_id), f"{PROTOCOL_PREFIX}/call/{name}", payload
                )
        verdict, content = answer[:1], answer[1:]
        if verdict == REFUSAL:
            raise PeerRefusedError(peer_id, printable(content.decode(errors="replace")))
        if verdict != ANSWER or len(content) > MESSAGE_LIMIT:
            raise PeerUnreachableError(peer_id, "its answer is malformed")
        return content

    async def on_call(self, name: str, handler: CallHandler) -> None:
        """Answer `call`s of this name."""

        async def answer(payload: bytes, sender_id: Any) -> bytes:
            sender = str(sender_id)
            try:
                if len(payload) > MESSAGE_LIMIT:
                    raise RemoteProtocolError(sender, f"its {name} message of {len(payload)} bytes is too large")
                return ANSWER + await handler(sender, payload)
            except RefusalError as refusal:
                return REFUSAL + str(refusal).encode(errors="replace")
            except RemoteProtocolError as error:
                logger.warning("dropped a %s message: %s", name, error)
                return REFUSAL + error.message.encode(errors="replace")
            except DilocoPeerError as error:
                logger.error("cannot answer a %s message of %s: %s", name, sender, error)
                return REFUSAL + b"internal error"
            except Exception:
                logger.exception("the handler of %s failed", name)
                return REFUSAL + b"internal error"

        await self._daemon._client.add_unary_handler(f"{PROTOCOL_PREFIX}/call/{name}", answer)

    def reach_of(self, peer_id: str) -> Reach | None:
        """Return how bulk data reaches a peer; None: it is not known."""
        return None

    async def pull(
        self, peer_id: str, name: str, header: bytes, max_bytes: int, timeout: float
    ) -> tuple[bytes, bytearray]:
        """Fetch data from a peer: header and data of its answer.

        Raises: PeerUnreachableError, PeerRefusedError.
        """
        async with self.stream(peer_id, f"pull/{name}") as channel, asyncio.timeout(timeout):
            return await pull(channel, header, max_bytes)

    async def on_pull(self, name: str, serve: Serve, gives_way: bool = False) -> None:
        """Answer `pull`s of this name; what `gives_way` is sent while no round is under way, or slowly."""

        async def answer(channel: Channel) -> None:
            if gives_way:
                channel.give_way(self.no_round)
            await serve_pull(channel, serve)

        await self.on_stream(f"pull/{name}", answer)

    @asynccontextmanager
    async def stream(self, peer_id: str, protocol: str) -> AsyncIterator[Channel]:
        """A byte stream to a peer that answers this protocol.

        Raises: PeerUnreachableError, PeerRefusedError, also for what goes wrong inside.
        """
        with _peer_errors(peer_id):
            async with asyncio.timeout(OPEN_TIMEOUT):
                _, reader, writer = await self._daemon.call_binary_stream_handler(
                    to_peer_id(peer_id), f"{PROTOCOL_PREFIX}/{protocol}"
                )
            channel = Channel(peer_id, reader, writer, self._upload, self._download)
            try:
                yield channel
            finally:
                channel.close()

    async def on_stream(self, protocol: str, conversation: Callable[[Channel], Awaitable[None]]) -> None:
        """Have this conversation with whoever opens a stream of this protocol."""

        async def serve(info: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            self._serving.add(task)
            channel = Channel(str(info.peer_id), reader, writer, self._upload, self._download)
            try:
                async with asyncio.timeout(CONVERSATION_TIMEOUT):
                    await conversation(channel)
            except asyncio.CancelledError:  # by close(); asyncio 3.11 logs a traceback for cancelled stream handlers
                logger.debug("stopped serving a %s stream of %s", protocol, channel.peer)
            except RemoteProtocolError as error:
                metrics.DROPPED.labels("stream").inc()
                logger.warning("dropped a %s stream: %s", protocol, error)
            except NETWORK_ERRORS as error:
                logger.debug("a %s stream of %s broke: %r", protocol, channel.peer, error)
            except Exception:
                logger.exception("the handler of %s failed", protocol)
            finally:
                channel.close()
                self._serving.discard(task)

        await self._daemon.add_binary_stream_handler(f"{PROTOCOL_PREFIX}/{protocol}", serve)


@contextmanager
def _peer_errors(peer_id: str) -> Iterator[None]:
    """Whatever goes wrong on the way to a peer is, to the caller, that peer's failure."""
    try:
        yield
    except RemoteProtocolError as error:
        logger.warning("dropped a stream: %s", error)
        raise PeerUnreachableError(peer_id, error.message) from error
    except TimeoutError as error:
        raise PeerUnreachableError(peer_id, "no answer in time") from error
    except NETWORK_ERRORS as error:
        raise PeerUnreachableError(peer_id, str(error) or type(error).__name__) from error
