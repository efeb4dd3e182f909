"""Byte streams between two peers: framing, the receiver's acceptance or refusal, and confirmation of received data.

A stream starts with a prelude (magic, version, header length, data length) and the header. The other side reads data
only after it has answered with a verdict, so that no memory is allocated for data that it did not ask for:

    pull     prelude header ──►   ◄── verdict, prelude header data   digest ──►
    chunks   prelude header, frame header data, frame header data … ──►   ◄── verdict, then one for each frame

Pulled data is confirmed with its BLAKE3 digest, and each frame with a verdict. The side that sent the last bytes waits
for the other side to close: libp2p's daemon may lose the tail of a stream that is closed right after it was written.
"""

from __future__ import annotations

import asyncio
import struct
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from typing import Generic, Protocol, TypeAlias, TypeVar

from blake3 import blake3

from peers.errors import DilocoPeerError, LocalProtocolError, RemoteProtocolError
from peers.network.connection import DirectReads
from peers.network.throttle import UNLIMITED, LinkTime, Throttle
from peers.values.system import cancel_and_wait, now, start_task
from peers.values.wire import DIGEST_BYTES, MESSAGE_LIMIT, Buffer, printable

Serve: TypeAlias = Callable[[str, bytes], AbstractAsyncContextManager[tuple[bytes, Buffer]]]
"""(sender, header) -> a context with the answer's header and data, left when they are sent. Raises: RefusalError."""
MAGIC = b"DLCP"
VERSION = 1  # version of the stream format; increased when the format of the bytes after the prelude changes
PRELUDE = struct.Struct(">4sBIQ")  # magic, version, header length in bytes, data length in bytes
HEADER_LIMIT = MESSAGE_LIMIT  # bytes of a stream's header, at most, since that of a snapshot contains an entry's header
FRAME = struct.Struct(">IQ")  # a frame's header length and data length, in bytes
LAST_FRAME = 0xFFFFFFFF  # value of a frame's header length that marks the end of the frames
FRAME_HEADER_LIMIT = 1 << 17  # bytes of a frame's header, at most; enough to list 1,000 absent members of a chunk
BYTES_UNDER_WAY = 768 << 10
"""Bytes sent on one stream and not yet confirmed, at most. With a higher limit, streams would share the link unevenly,
and a round waits for its slowest stream."""
FRAMES_UNDER_WAY = 64  # frames sent and not confirmed on one stream, at most
ACCEPTED, REFUSED = b"\x01", b"\x00"
REASON_LENGTH = struct.Struct(">H")
REASON_BYTES = 500  # bytes of a refusal's reason, at most, since `printable` shows only so many characters
STALL_TIMEOUT = 30.0  # seconds without a byte after which the other peer counts as gone
ANSWER_TIMEOUT = 600.0  # seconds to wait for a frame's confirmation; a slow peer first receives all earlier frames
DISCARDED_AT_ONCE = 1 << 16  # bytes of a refused stream that are read and discarded at once, at most
CLOSE_TIMEOUT = 5.0  # seconds to wait for the other peer to close the stream

Item = TypeVar("Item")
Frame: TypeAlias = tuple[Item, bytes, Buffer]
"""A chunk for a stream: the sender's own key for it, header and data."""

PLACE_WAIT = 20.0  # seconds after which a pull is refused, if we answer as many pulls as we can at once until then
FEW_PLACES = 2
"""Pulls of one peer that are answered at once, at most, while we answer more than half of the pulls that we can
answer at once. It is two, because we may not know yet that the peer has given up one of its pulls."""
LONGEST_HELD = 600.0  # seconds, at most, for answering one pull; the peer that sent it waits as long for the data


class PeerUnreachableError(DilocoPeerError):
    """The error for a peer that gave no usable answer: dead, cut off or too slow, or with a malformed answer."""

    exit_code = 4
    what_happened = "did not answer"

    def __init__(self, peer: str, reason: str) -> None:
        super().__init__(f"peer {peer} {self.what_happened}: {reason}")
        self.peer = peer
        self.reason = reason


class PeerRefusedError(PeerUnreachableError):
    """The error for a live peer that refused our data or our request; `reason` is the peer's own text."""

    what_happened = "refused"


class RefusalError(Exception):
    """The exception with which our own handlers refuse a caller; its message is the reason sent to the caller."""


class Channel:
    """One end of a stream to `peer`. Its reads raise RemoteProtocolError, TimeoutError, EOFError or OSError."""

    def __init__(
        self,
        peer: str,
        reader: asyncio.StreamReader | DirectReads,
        writer: asyncio.StreamWriter,
        upload: Throttle = UNLIMITED,
        download: Throttle = UNLIMITED,
        stays_open: bool = False,
        opening: bytes = b"",
    ) -> None:
        """Create one end of a stream. With `stays_open` the connection is used again, so neither end waits for it to
        close. The bytes `opening` are sent just before the stream's first bytes, in the same write."""
        self.peer = peer
        self._upload = upload
        self._gives_way_to: LinkTime | None = None
        self._download = download
        self._reads = reader if isinstance(reader, DirectReads) else DirectReads(reader, writer)
        self._writer = writer
        self._stays_open = stays_open
        self._opening = opening
        self.is_finished = False
        """True once the side that opened the conversation has received all of it, or a refusal. Otherwise the
        connection cannot be used again."""

    async def send_prelude(self, header: bytes, length: int) -> None:
        if len(header) > HEADER_LIMIT:
            raise LocalProtocolError(f"a stream header of {len(header)} bytes exceeds {HEADER_LIMIT}")
        opening, self._opening = self._opening, b""
        await self._send(opening + PRELUDE.pack(MAGIC, VERSION, len(header), length) + header)

    async def read_prelude(self) -> tuple[bytes, int]:
        """Read the first message of a stream: its lengths (the prelude) and its header. Return the header, and the
        length in bytes of the data that follows."""
        async with asyncio.timeout(STALL_TIMEOUT):  # limits the time for the whole prelude, not for each byte
            magic, version, header_length, length = PRELUDE.unpack(await self._read(PRELUDE.size))
        if magic == MAGIC and version != VERSION:
            raise RemoteProtocolError(self.peer, f"its streams are of version {version}; ours are of version {VERSION}")
        if magic != MAGIC or header_length > HEADER_LIMIT:
            raise RemoteProtocolError(self.peer, "its stream does not start with a valid prelude")
        return await self._read(header_length), length

    async def accept(self) -> None:
        await self._send(ACCEPTED)

    async def refuse(self, reason: str) -> None:
        """Send a refusal with this reason, then wait for the peer to close the stream."""
        await self._send_refusal(reason)
        await self.wait_closed()

    async def _send_refusal(self, reason: str) -> None:
        text = reason.encode(errors="replace")[:REASON_BYTES]
        await self._send(REFUSED + REASON_LENGTH.pack(len(text)) + text)

    async def refuse_chunks(self, reason: str) -> None:
        """Send a refusal with this reason, and discard the chunks that the peer still sends until it closes the stream.

        Raises: EOFError when the peer has closed the stream, or has not closed it in time.
        """
        await self._send_refusal(reason)
        nowhere = memoryview(bytearray(DISCARDED_AT_ONCE))
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_TIMEOUT):
                while not self._reads.has_ended:
                    await self._reads.fill(nowhere, None)
        raise EOFError("a refused stream is over")

    async def read_verdict(self) -> None:
        """Wait until the peer accepts the stream. Raises: PeerRefusedError if the peer refuses it."""
        verdict = await self._read(1)
        if verdict == ACCEPTED:
            return
        if verdict != REFUSED:
            raise RemoteProtocolError(self.peer, "its verdict is neither acceptance nor refusal")
        (length,) = REASON_LENGTH.unpack(await self._read(REASON_LENGTH.size))
        if length > REASON_BYTES:
            raise RemoteProtocolError(self.peer, f"its reason of {length} bytes exceeds {REASON_BYTES}")
        text = await self._read(length)
        self.is_finished = True
        raise PeerRefusedError(self.peer, printable(text.decode(errors="replace")))

    async def send_frame(self, header: bytes, data: Buffer) -> None:
        self._writer.write(FRAME.pack(len(header), memoryview(data).nbytes) + header)
        await self.send_data(data)

    async def send_message(self, header: bytes, data: bytes) -> None:
        """Send a small frame in one write, so that a cancelled caller never leaves half a frame in the stream."""
        await self._send(FRAME.pack(len(header), len(data)) + header + data)

    async def read_frame_header(self) -> tuple[bytes, int] | None:
        """Wait for the next frame. Return its header, and its data length in bytes; None after the last frame."""
        try:
            header_length, length = FRAME.unpack(await self._reads.read(FRAME.size, None))
        except asyncio.IncompleteReadError as error:
            if error.partial:
                raise
            return None
        if header_length == LAST_FRAME:
            return None
        if header_length > FRAME_HEADER_LIMIT:
            raise RemoteProtocolError(
                self.peer, f"a frame header of {header_length} bytes exceeds {FRAME_HEADER_LIMIT}"
            )
        return await self._read(header_length), length

    async def send_last_frame(self) -> None:
        await self._send(FRAME.pack(LAST_FRAME, 0))

    async def answer_frame(self, is_taken: bool) -> None:
        await self._send(ACCEPTED if is_taken else REFUSED)

    async def read_answer(self) -> bool:
        answer = await self._reads.read(1, ANSWER_TIMEOUT)
        if answer not in (ACCEPTED, REFUSED):
            raise RemoteProtocolError(self.peer, "its answer to a frame is neither acceptance nor refusal")
        return answer == ACCEPTED

    async def send_digest(self, digest: bytes) -> None:
        """Send the digest of the received data to confirm it, then wait for the peer to close the stream."""
        await self._send(digest)
        await self.wait_closed()

    async def read_digest(self, expected: bytes) -> None:
        if await self._read(DIGEST_BYTES) != expected:
            raise RemoteProtocolError(self.peer, "it confirmed other bytes than we sent")

    async def wait_closed(self) -> None:
        """Wait up to CLOSE_TIMEOUT seconds for the peer to read our last bytes and close the stream. Return at once if
        another stream will use the same connection."""
        if self._stays_open:
            return
        with suppress(TimeoutError, asyncio.IncompleteReadError):
            await self._reads.read(1, CLOSE_TIMEOUT)
            raise RemoteProtocolError(self.peer, "it sent more than its prelude announced")

    def give_way(self, link: LinkTime) -> None:
        """Delay this stream's data, from now on, while a round uses `link`."""
        self._gives_way_to = link

    def close(self) -> None:
        """Close the stream, and drop unsent bytes: since Python 3.12 they are sent from the caller's own memory,
        which the caller may now reuse."""
        if self._writer.transport.get_write_buffer_size():
            self._writer.transport.abort()
        else:
            self._writer.close()

    async def send_data(self, data: Buffer, hasher: blake3 | None = None) -> None:
        view = memoryview(data).cast("B")
        for start in range(0, len(view), self._upload.piece):
            piece = view[start : start + self._upload.piece]
            if self._gives_way_to:
                await self._gives_way_to.give_way(len(piece))
            await self._upload.take(len(piece))
            await self._send(piece)
            if hasher:
                hasher.update(piece)

    async def read_data(self, buffer: bytearray | memoryview, hasher: blake3 | None = None) -> None:
        """Fill the buffer with the stream's data, no faster than our download cap allows."""
        view = memoryview(buffer).cast("B")
        for start in range(0, len(view), self._download.reading_piece):
            piece = view[start : start + self._download.reading_piece]
            try:
                await self._reads.fill(piece, STALL_TIMEOUT)
            except asyncio.IncompleteReadError as error:
                received = start + len(error.partial)
                raise EOFError(f"the stream ended after {received} of {len(view)} bytes") from error
            await self._download.take(len(piece))
            if hasher:
                hasher.update(piece)

    async def _read(self, count: int) -> bytes:
        return await self._reads.read(count, STALL_TIMEOUT)

    async def _send(self, data: bytes | memoryview) -> None:
        self._writer.write(data)
        async with asyncio.timeout(STALL_TIMEOUT):
            await self._writer.drain()  # unlike write(), drain() raises if the connection is gone


async def pull(channel: Channel, header: bytes, max_bytes: int) -> tuple[bytes, bytearray]:
    """Send a request. Return the answer's header, and its data of at most `max_bytes` bytes.

    Raises: PeerRefusedError, and the errors of `Channel`'s reads.
    """
    await channel.send_prelude(header, 0)
    await channel.read_verdict()
    answer, length = await channel.read_prelude()
    if length > max_bytes:
        raise RemoteProtocolError(channel.peer, f"its answer of {length} bytes exceeds the limit of {max_bytes}")
    data, hasher = bytearray(length), blake3()
    await channel.read_data(data, hasher)
    await channel.send_digest(hasher.digest())
    channel.is_finished = True
    return answer, data


async def serve_pull(channel: Channel, serve: Serve) -> None:
    """Answer one `pull` of the peer: refuse the request, or send the header and data that `serve` yields."""
    header, length = await channel.read_prelude()
    if length != 0:
        raise RemoteProtocolError(channel.peer, f"it announced {length} bytes of data with a request")
    async with AsyncExitStack() as stack:
        try:
            answer, data = await stack.enter_async_context(serve(channel.peer, header))
        except RefusalError as refusal:
            await channel.refuse(str(refusal))
            return
        await channel.accept()
        await channel.send_prelude(answer, memoryview(data).nbytes)
        hasher = blake3()
        await channel.send_data(data, hasher)
        await channel.read_digest(hasher.digest())


class ChunkSender(Generic[Item]):
    """The sending end of a stream of chunks. Chunks confirmed before the stream breaks need not be sent again."""

    def __init__(self, channel: Channel, under_way: Callable[[], int] = lambda: BYTES_UNDER_WAY) -> None:
        """Create a sender. `under_way` returns the limit of bytes that are sent and not yet confirmed. Two frames are
        allowed in any case, because with only one the stream would idle until each confirmation."""
        self._channel = channel
        self._under_way = under_way
        # Chunks written and not confirmed: item, size in bytes, and the time in seconds when writing began.
        self._sent: deque[tuple[Item, int, float]] = deque()
        self._has_room = asyncio.Event()
        self._has_room.set()
        self._written = asyncio.Semaphore(0)  # released once for each written frame, and once at the end of the stream

    @property
    def pending(self) -> list[Item]:
        """The items whose chunks were written and not confirmed."""
        return [item for item, _, _ in self._sent]

    async def run(
        self,
        header: bytes,
        following: Callable[[], Awaitable[Frame[Item] | None]],
        on_answer: Callable[[Item, bool, float], None],
    ) -> None:
        """Send the stream's header and the frames that `following` returns, until it returns None; await all answers.
        Call `on_answer` with each item, True if the receiver accepted it, and the seconds that it occupied the stream.

        The first frames follow the header at once: on a long link, waiting for the verdict would take as long as they
        do.

        Raises: PeerUnreachableError when the other side refuses, and errors of the stream.
        """
        reading = start_task(self._read_answers(on_answer))
        writing = start_task(self._write(header, following))
        try:
            done, _ = await asyncio.wait((reading, writing), return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
            await reading
            self._channel.is_finished = True
        finally:
            await cancel_and_wait(reading, writing)

    async def _write(self, header: bytes, following: Callable[[], Awaitable[Frame[Item] | None]]) -> None:
        """Write the header, then the frames that `following` returns. One packet has the header and the first frame.

        If BBR has not measured a delay for ten seconds, and the first packet is a small one, whose answer may have been
        delayed, it stops for 0.2 seconds to measure.
        """
        await self._channel.send_prelude(header, 0)
        while True:
            await self._has_room.wait()
            frame = await following()
            if frame is None:
                await self._channel.send_last_frame()
                self._written.release()
                return
            item, frame_header, data = frame
            self._sent.append((item, memoryview(data).nbytes, now()))
            self._look_for_room()
            await self._channel.send_frame(frame_header, data)
            self._written.release()

    async def _read_answers(self, on_answer: Callable[[Item, bool, float], None]) -> None:
        try:
            await self._channel.read_verdict()
        except PeerRefusedError as error:
            self._channel.is_finished = False  # frames are already sent, so the connection is not reusable
            raise PeerUnreachableError(error.peer, error.reason) from error
        answered_at = 0.0
        while True:
            await self._written.acquire()
            if not self._sent:
                return
            is_taken = await self._channel.read_answer()
            item, _, written_at = self._sent.popleft()
            self._look_for_room()
            began, answered_at = max(written_at, answered_at), now()
            on_answer(item, is_taken, answered_at - began)

    def _look_for_room(self) -> None:
        count = len(self._sent)
        if count < 2 or (count < FRAMES_UNDER_WAY and sum(size for _, size, _ in self._sent) < self._under_way()):
            self._has_room.set()
        else:
            self._has_room.clear()


class _Arrivals(Protocol):
    """The receiver of one stream's chunks, which supplies memory for each chunk, and accepts or rejects the chunk."""

    def expect(self, header: bytes, length: int) -> bytearray:
        """Return memory of this length for the next chunk's data. Raises: RemoteProtocolError to end the stream."""

    def arrived(self) -> bool:
        """Process the chunk whose data now fills the memory that `expect` returned. Return True unless the sender must
        send the chunk again."""


async def receive_chunks(channel: Channel, admit: Callable[[str, bytes], Awaitable[_Arrivals]]) -> None:
    """Receive the chunks of one stream, and answer each, until the sender ends or closes the stream.

    `admit` is called with the sender and the stream's header, and returns when the sender may begin; RefusalError
    refuses.
    """
    header, _ = await channel.read_prelude()
    try:
        arrivals = await admit(channel.peer, header)
    except RefusalError as refusal:
        await channel.refuse_chunks(str(refusal))
    await channel.accept()
    while frame := await channel.read_frame_header():
        await channel.read_data(arrivals.expect(*frame))
        await channel.answer_frame(arrivals.arrived())


class Places:
    """Limits on the number of pulls that are served at once: `count` in all, and `each` for one peer.

    While less than half of them are free, a peer may have only `FEW_PLACES`: otherwise a few slow peers would hold all
    of them for long.
    """

    def __init__(self, count: int, each: int) -> None:
        self._free = asyncio.Semaphore(count)
        self._count = count
        self._each = each
        self._taken: Counter[str] = Counter()

    @asynccontextmanager
    async def one_for(self, peer: str) -> AsyncIterator[None]:
        """Hold a place while serving one pull of a peer. Raises: RefusalError if the peer holds its share of places, or
        no place becomes free in time; TimeoutError if the place is held for too long."""
        is_scarce = 2 * (self._count - self._taken.total()) < self._count
        if self._taken[peer] >= (min(FEW_PLACES, self._each) if is_scarce else self._each):
            raise RefusalError("other parts are being sent to you; ask again when one has ended")
        self._taken[peer] += 1
        try:
            try:
                async with asyncio.timeout(PLACE_WAIT):
                    await self._free.acquire()
            except TimeoutError:
                raise RefusalError("too many peers are being served; ask again later") from None
            try:
                async with asyncio.timeout(LONGEST_HELD):
                    yield
            finally:
                self._free.release()
        finally:
            self._taken -= Counter({peer: 1})  # `-=` also removes a peer whose count is zero
