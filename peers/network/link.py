"""All connections with one peer, and messages over them. A connection carries one conversation (stream) after another.

Messages are one long conversation, with many questions under way at once:

asker     prelude "" ──►   ◄── verdict   frame (number, name), payload … ──►
answerer                                 ◄── frame (number, verdict), answer …
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Annotated, Any, TypeAlias

from pydantic import Field

from peers import metrics
from peers.errors import RemoteProtocolError
from peers.network.channel import Channel, PeerRefusedError, PeerUnreachableError, RefusalError
from peers.network.connection import Connection
from peers.network.throttle import MOST, UNLIMITED, Throttle
from peers.values.system import cancel_and_wait, start_task
from peers.values.wire import MESSAGE_LIMIT, Count, Reach, Value, pack, printable, unpack_from

logger = logging.getLogger(__name__)

CONNECTIONS = MOST + 8  # connections for one side's conversations (a round, messages, pulls), at most
DIAL_PAUSE = 1.0  # seconds to wait for a new connection after dialling, before dialling again
OPEN_TIMEOUT = 15.0
"""Seconds to get a connection for a conversation that we open, or to read the protocol's name if the peer opens it."""
BEST_FIRST = tuple(Reach)
Serve = Callable[[str, Channel], Awaitable[None]]
"""(protocol, channel): handles a conversation that the other side has opened."""

CALLS = "calls"
ASKED_AT_ONCE = 64  # unanswered questions on one connection, at which reading further questions pauses
HELD_BYTES = 4 << 20  # bytes of unanswered questions on one connection, above which reading pauses
Answer: TypeAlias = Callable[[str, str, bytes], Awaitable[bytes]]
"""(sender, name, payload) -> answer; RefusalError refuses."""


class Link:
    """All connections with `peer`. `dial_more(n)` makes n more connections, on which this side opens conversations."""

    def __init__(
        self,
        peer: str,
        serve: Serve,
        dial_more: Callable[[int], Awaitable[None]],
        start: Callable[[Coroutine[Any, Any, None]], object],
        caps: Callable[[], tuple[Throttle, Throttle]],
        on_change: Callable[[], None],
    ) -> None:
        self.peer = peer
        self._serve = serve
        self._dial_more = dial_more
        self._start = start
        self._caps = caps
        self._on_change = on_change
        self.connections: dict[Connection, None] = {}  # an ordered set: the oldest connection first
        self._idle: list[Connection] = []  # our unused connections; the last one was used last, and is reused first
        self._wanted = self._dialling = 0  # counts: conversations that wait for a connection; connections being dialled
        self._changed = asyncio.Event()
        self._caller: asyncio.Future[_Caller] | None = None

    @property
    def is_up(self) -> bool:
        return bool(self.connections)

    @property
    def reach(self) -> Reach:
        """The best reach of this link's connections; Reach.NONE without any."""
        return min((one.reach for one in self.connections), key=BEST_FIRST.index, default=Reach.NONE)

    @property
    def ours(self) -> int:
        """The number of connections on which this side opens conversations; on the others, the peer opens them."""
        return sum(one.is_ours for one in self.connections)

    def add(self, connection: Connection) -> None:
        """Add a connection. At most CONNECTIONS are for conversations that we open: a further one is closed at once. At
        most CONNECTIONS are for those that the peer opens: for a further one, the oldest of them is closed.

        A new certificate shows that the other side has started again, or is in another network. Then all earlier
        connections are closed, since they are dead and would not be noticed otherwise.
        """
        same_side = [one for one in self.connections if one.is_ours == connection.is_ours]
        is_full = len(same_side) >= CONNECTIONS
        if not connection.is_open or (is_full and connection.is_ours):  # a closed one would never call `on_lost`
            connection.close()
            return
        if is_full:
            self._end(same_side[0])
        self.connections[connection] = None
        connection.reads.on_lost = lambda: self._lost(connection)
        if connection.is_ours:
            self._idle.insert(0, connection)
        else:
            self._start(self._serve_all(connection))
        for other in list(self.connections):
            if other.certificate != connection.certificate:
                self._end(other)
        self._notify()

    async def wait_for(self, condition: Callable[[], bool], seconds: float) -> None:
        """Wait until the condition is true, or until `seconds` have passed."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not condition():
                    await self._changed.wait()

    def close(self) -> None:
        for connection in list(self.connections):
            self._end(connection)

    def _end(self, connection: Connection) -> None:
        connection.close()
        self._lost(connection)

    def _lost(self, connection: Connection) -> None:
        if connection not in self.connections:
            return
        del self.connections[connection]
        if connection in self._idle:
            self._idle.remove(connection)
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
        self._on_change()

    # Conversations that the peer opens ------------------------------------------------------------------------
    async def _serve_all(self, connection: Connection) -> None:
        """Handle the peer's conversations on a connection in turn, until the connection breaks or one of them fails."""
        try:
            while True:
                length = (await connection.reads.read(1, None))[0]
                # A conversation begins with its protocol's name. The timeout is for the whole name, not for each byte.
                async with asyncio.timeout(OPEN_TIMEOUT):
                    protocol = (await connection.reads.read(length, None)).decode(errors="replace")
                await self._serve(protocol, self._channel(connection, protocol))
        except (OSError, EOFError) as error:
            logger.debug("a connection of %s ended: %r", self.peer, error)
        except RemoteProtocolError as error:
            metrics.DROPPED.labels("stream").inc()
            logger.info("dropped a conversation: %s", error)
        except Exception:
            logger.exception("a conversation with %s failed", self.peer)
        finally:
            self._end(connection)

    # Conversations that we open -------------------------------------------------------------------------------
    @asynccontextmanager
    async def conversation(self, protocol: str) -> AsyncIterator[Channel]:
        """Open a conversation with the peer, and yield its channel. Its connection is reused if both sides finished the
        conversation, and closed otherwise.

        Raises: PeerUnreachableError when there is no connection in time.
        """
        name = protocol.encode()
        opening = bytes([len(name)]) + name
        try:
            async with asyncio.timeout(OPEN_TIMEOUT):
                # All calls share one conversation, which holds a connection. Open it before any other conversation, or
                # the first call would find no idle connection, and wait until one is dialled.
                if protocol != CALLS:
                    await self._calls()
                connection = await self._take()
        except TimeoutError:
            raise PeerUnreachableError(self.peer, "no connection in time") from None
        channel, is_over = self._channel(connection, protocol, opening), False
        try:
            yield channel
            is_over = channel.is_finished
        except PeerRefusedError:
            is_over = channel.is_finished
            raise
        finally:
            # Close a connection that has an unread byte: the next conversation would read it as part of an answer.
            if is_over and connection.is_open and not connection.reads.has_unread:
                self._idle.append(connection)
                self._notify()
            else:
                self._end(connection)

    def _channel(self, connection: Connection, protocol: str, opening: bytes = b"") -> Channel:
        """Return the channel of a conversation. Messages ignore the bandwidth caps, since they are small and urgent."""
        upload, download = (UNLIMITED, UNLIMITED) if protocol == CALLS else self._caps()
        return Channel(self.peer, connection.reads, connection.writer, upload, download, True, opening)

    async def _take(self) -> Connection:
        self._wanted += 1
        try:
            while (connection := self._take_idle()) is None:
                if not self.is_up:
                    raise PeerUnreachableError(self.peer, "the link is down")
                needed = min(self._wanted, CONNECTIONS - self.ours) - self._dialling
                if needed > 0:
                    self._dialling += needed
                    self._start(self._dial(needed))
                await self._changed.wait()
            return connection
        finally:
            self._wanted -= 1

    def _take_idle(self) -> Connection | None:
        """Return an idle connection of the best reach; None if there is none. Close idle connections of worse reach."""
        while self._idle:
            connection = self._idle.pop()
            best = min((one.reach for one in self.connections if one.is_ours), key=BEST_FIRST.index, default=None)
            if connection.is_open and connection.reach is best:
                return connection
            self._end(connection)
        return None

    async def _dial(self, count: int) -> None:
        had = self.ours
        try:
            try:
                await self._dial_more(count)
            except (PeerUnreachableError, RemoteProtocolError, OSError) as error:
                logger.debug("no more connections with %s: %r", self.peer, error)
            await self.wait_for(lambda: not self.is_up or self.ours > had, DIAL_PAUSE)
        finally:
            self._dialling -= count
            self._notify()

    # Messages -------------------------------------------------------------------------------------------------
    async def call(self, name: str, payload: bytes, timeout: float) -> bytes:
        """Send the peer a message, and return its answer, which must arrive within `timeout` seconds.

        Raises: PeerUnreachableError, PeerRefusedError.
        """
        try:
            async with asyncio.timeout(timeout):
                return await (await self._calls()).ask(name, payload)
        except TimeoutError:
            raise PeerUnreachableError(self.peer, "no answer in time") from None

    async def _calls(self) -> _Caller:
        if self._caller is None:
            self._caller = asyncio.get_running_loop().create_future()
            self._start(self._keep_calling(self._caller))
        return await asyncio.shield(self._caller)

    async def _keep_calling(self, opened: asyncio.Future[_Caller]) -> None:
        failure = PeerUnreachableError(self.peer, "the link is being closed")
        try:
            async with self.conversation(CALLS) as channel:
                await channel.send_prelude(b"", 0)
                await channel.read_verdict()
                caller = _Caller(channel)
                opened.set_result(caller)
                await caller.run()
        except PeerUnreachableError as error:
            failure = error
        except (OSError, EOFError, RemoteProtocolError) as error:
            failure = PeerUnreachableError(self.peer, str(error) or type(error).__name__)
        finally:
            self._caller = None
            if not opened.done():
                opened.set_exception(failure)
                opened.exception()  # marks the exception as seen, or asyncio would log it if no call waits


class _Question(Value):
    number: Count
    name: Annotated[str, Field(strict=True, max_length=64)]


class _Verdict(Value):
    number: Count
    is_answered: Annotated[bool, Field(strict=True)]


class _Caller:
    """The side of a channel that sends questions and reads answers. Once the channel breaks, each question fails."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[tuple[bool, bytes] | None]] = {}
        self._writing = asyncio.Lock()
        self._is_over = False

    async def run(self) -> None:
        """Read answers, and pass each to its waiting `ask`, until the channel breaks. Raises: the channel's error."""
        try:
            while frame := await self._channel.read_frame_header():
                verdict = unpack_from(self._channel.peer, _Verdict, frame[0])
                data = await _read(self._channel, frame[1])
                waiting = self._waiting.pop(verdict.number, None)
                if waiting is not None and not waiting.done():
                    waiting.set_result((verdict.is_answered, data))
            raise EOFError("the other side closed the connection")
        finally:
            self._is_over = True
            for future in self._waiting.values():
                if not future.done():
                    future.set_result(None)

    async def ask(self, name: str, payload: bytes) -> bytes:
        """Send the peer a question, and return its answer. Raises: PeerUnreachableError, PeerRefusedError."""
        peer, number = self._channel.peer, next(self._numbers)
        self._waiting[number] = asyncio.get_running_loop().create_future()
        answer = self._waiting[number]
        try:
            if self._is_over:
                raise ConnectionError("the connection broke")
            async with self._writing:
                await self._channel.send_message(pack(_Question(number=number, name=name)), payload)
            if (outcome := await answer) is None:
                raise ConnectionError("the connection broke")
        except OSError as error:
            raise PeerUnreachableError(peer, str(error) or type(error).__name__) from error
        finally:
            self._waiting.pop(number, None)
        is_answered, data = outcome
        if not is_answered:
            raise PeerRefusedError(peer, printable(data.decode(errors="replace")))
        return data


async def answer_calls(channel: Channel, answer: Answer) -> None:
    """Let `answer` answer the questions that a peer asks on a channel. Raises: EOFError when the channel ends; the
    channel's error if it breaks."""
    await channel.read_prelude()
    await channel.accept()
    writing = asyncio.Lock()
    replies: dict[asyncio.Task[None], int] = {}  # running replies, each with its question's size in bytes

    async def reply(question: _Question, payload: bytes) -> None:
        try:
            is_answered, data = True, await answer(channel.peer, question.name, payload)
            if len(data) > MESSAGE_LIMIT:
                raise RefusalError(f"its answer of {len(data)} bytes exceeds {MESSAGE_LIMIT}")
        except RefusalError as refusal:
            is_answered, data = False, str(refusal).encode(errors="replace")
        async with writing:
            try:
                await channel.send_message(pack(_Verdict(number=question.number, is_answered=is_answered)), data)
            except OSError:
                channel.close()  # the asker is gone or does not read; closing also ends the loop below

    try:
        while frame := await channel.read_frame_header():
            question = unpack_from(channel.peer, _Question, frame[0])
            while len(replies) >= ASKED_AT_ONCE or sum(replies.values()) > HELD_BYTES:
                await asyncio.wait(replies, return_when=asyncio.FIRST_COMPLETED)
            payload = await _read(channel, frame[1])
            task = start_task(reply(question, payload))
            replies[task] = len(payload)
            task.add_done_callback(replies.pop)
        raise EOFError("the asker closed the connection")
    finally:
        await cancel_and_wait(*replies)


async def _read(channel: Channel, length: int) -> bytes:
    if length > MESSAGE_LIMIT:
        raise RemoteProtocolError(channel.peer, f"its message of {length} bytes exceeds {MESSAGE_LIMIT}")
    data = bytearray(length)
    await channel.read_data(data)
    return bytes(data)
