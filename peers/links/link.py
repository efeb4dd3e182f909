"""All connections with one peer. They stay open, and warm, from one conversation to the next."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

from peers.errors import RemoteProtocolError
from peers.links.calls import CALLS, Caller
from peers.links.connection import Connection
from peers.reach import Reach
from peers.streams import Channel, PeerRefusedError, PeerUnreachableError
from peers.throttle import Throttle

logger = logging.getLogger(__name__)

CONNECTIONS = 64  # that either side may have for its own conversations
OPEN_TIMEOUT = 15.0  # seconds that a conversation waits for a connection
PROTOCOL_BYTES = 255
BEST_FIRST = tuple(Reach)
Serve = Callable[[str, Channel], Awaitable[None]]
"""(protocol, channel): have the conversation that the other side has opened."""


class Link:
    """What connects us with `peer`. `dial_more` gets so many more connections that are ours."""

    def __init__(
        self,
        peer: str,
        serve: Serve,
        dial_more: Callable[[int], Awaitable[None]],
        start: Callable[[Awaitable[None]], object],
        caps: Callable[[], tuple[Throttle, Throttle]],
        on_change: Callable[[], None],
    ) -> None:
        self.peer = peer
        self._serve = serve
        self._dial_more = dial_more
        self._start = start
        self._caps = caps
        self._on_change = on_change
        self._connections: set[Connection] = set()
        self._idle: list[Connection] = []  # of ours; the one used last at the end, since it is the warmest
        self._wanted = self._dialling = 0  # conversations that wait for a connection, and connections to come
        self._changed = asyncio.Event()
        self._caller: Caller | None = None
        self._calling = asyncio.Lock()

    @property
    def is_up(self) -> bool:
        return bool(self._connections)

    @property
    def reach(self) -> Reach:
        """The best of its connections' ways."""
        return min((one.reach for one in self._connections), key=BEST_FIRST.index, default=Reach.NONE)

    @property
    def ours(self) -> int:
        """Connections on which we open conversations."""
        return sum(one.is_ours for one in self._connections)

    def add(self, connection: Connection) -> None:
        """Use a new connection. One too many is closed."""
        if sum(one.is_ours == connection.is_ours for one in self._connections) >= CONNECTIONS:
            connection.close()
            return
        self._connections.add(connection)
        connection.on_lost(lambda: self._lost(connection))
        if connection.is_ours:
            self._idle.insert(0, connection)
        else:
            self._start(self._listen(connection))
        self._notify()

    async def wait_until_up(self, seconds: float) -> None:
        """Wait for a connection that the other side makes, for so long at most."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not self.is_up:
                    await self._changed.wait()

    def close(self) -> None:
        for connection in list(self._connections):
            connection.close()

    def _lost(self, connection: Connection) -> None:
        self._connections.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
        self._on_change()

    # Conversations that they open -----------------------------------------------------------------------------
    async def _listen(self, connection: Connection) -> None:
        """Have one conversation after another, until the connection breaks, or a conversation does."""
        try:
            while True:
                length = (await connection.reads.read(1, None))[0]
                protocol = (await connection.reads.read(length, OPEN_TIMEOUT)).decode(errors="replace")
                await self._serve(protocol, self._channel(connection, protocol))
        except (OSError, EOFError, TimeoutError, RemoteProtocolError) as error:
            logger.debug("a connection of %s ended: %r", self.peer, error)
        finally:
            connection.close()

    # Conversations that we open -------------------------------------------------------------------------------
    @asynccontextmanager
    async def conversation(self, protocol: str) -> AsyncIterator[Channel]:
        """Open a conversation on a connection of ours; it must be at its end when the context ends without an error.

        Raises: PeerUnreachableError when there is no connection in time.
        """
        connection, is_over = await self._take(), False
        name = protocol.encode()
        connection.writer.write(bytes([len(name)]) + name)
        try:
            yield self._channel(connection, protocol)
            is_over = True
        except PeerRefusedError:
            is_over = True
            raise
        finally:
            if is_over and connection.is_open:
                self._idle.append(connection)
                self._notify()
            else:
                connection.close()

    def _channel(self, connection: Connection, protocol: str) -> Channel:
        """Messages are small, and never wait for bulk data; all else keeps to the volunteer's limits."""
        return connection.channel() if protocol == CALLS else connection.channel(*self._caps())

    async def _take(self) -> Connection:
        self._wanted += 1
        try:
            async with asyncio.timeout(OPEN_TIMEOUT):
                while not self._idle:
                    if not self.is_up:
                        raise PeerUnreachableError(self.peer, "the link is down")
                    changed = self._changed
                    missing = min(self._wanted, CONNECTIONS - self.ours) - self._dialling
                    if missing > 0:
                        self._dialling += missing
                        self._start(self._dial(missing))
                    await changed.wait()
        except TimeoutError:
            raise PeerUnreachableError(self.peer, "no connection in time") from None
        finally:
            self._wanted -= 1
        return self._idle.pop()

    async def _dial(self, count: int) -> None:
        try:
            await self._dial_more(count)
        except (PeerUnreachableError, RemoteProtocolError, OSError) as error:
            logger.debug("no more connections with %s: %r", self.peer, error)
        finally:
            self._dialling -= count
            self._notify()

    # Messages -------------------------------------------------------------------------------------------------
    async def call(self, name: str, payload: bytes, timeout: float) -> bytes:
        """Raises: PeerUnreachableError, PeerRefusedError."""
        try:
            async with asyncio.timeout(timeout):
                return await (await self._calls()).ask(name, payload)
        except TimeoutError:
            raise PeerUnreachableError(self.peer, "no answer in time") from None

    async def _calls(self) -> Caller:
        async with self._calling:
            if self._caller is None:
                opened = asyncio.get_running_loop().create_future()
                self._start(self._keep_calling(opened))
                await opened
            assert self._caller is not None
            return self._caller

    async def _keep_calling(self, opened: asyncio.Future[None]) -> None:
        try:
            async with self.conversation(CALLS) as channel:
                await channel.send_prelude(b"", 0)
                await channel.read_verdict()
                self._caller = Caller(channel)
                opened.set_result(None)
                await self._caller.run()
                raise EOFError("the other side ended it")
        except (OSError, EOFError, TimeoutError, RemoteProtocolError, PeerUnreachableError) as error:
            if not opened.done():
                opened.set_exception(PeerUnreachableError(self.peer, str(error) or type(error).__name__))
        finally:
            self._caller = None
            if not opened.done():
                opened.cancel()
