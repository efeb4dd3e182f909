"""Bulk data on a byte stream between two peers: framing, permission before data, confirmation after it.

A stream starts with a prelude (magic, version, header length, data length) and the header. The other side reads no data
before it has answered with a verdict, so that nothing is allocated for data that nobody asked for:

    pull     prelude header ──►   ◄── verdict, prelude header data   digest ──►
    chunks   prelude header, frame header data, frame header data … ──►   ◄── verdict, then one for each frame

What was pulled is confirmed with its BLAKE3 digest, each frame with a verdict, and whoever sent the last bytes waits
for the other side to close: libp2p's daemon may lose the tail of a stream that is closed right after it was written.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, suppress
from typing import TypeAlias

from blake3 import blake3

from peers.errors import DilocoPeerError, LocalProtocolError, RemoteProtocolError
from peers.network.direct_reads import DirectReads
from peers.network.throttle import UNLIMITED, GivingWay, LinkTime, Throttle
from peers.values.wire import DIGEST_BYTES, MESSAGE_LIMIT, printable

Buffer: TypeAlias = bytes | bytearray | memoryview
Serve: TypeAlias = Callable[[str, bytes], AbstractAsyncContextManager[tuple[bytes, Buffer]]]
"""(sender, header) -> header and data of the answer, for as long as they are sent; RefusalError refuses."""

MAGIC = b"DLCP"
VERSION = 1
PRELUDE = struct.Struct(">4sBIQ")  # magic, version, header length, data length
HEADER_LIMIT = MESSAGE_LIMIT  # bytes; a snapshot's header carries the log's last one
FRAME = struct.Struct(">IQ")  # header length, data length
LAST_FRAME = 0xFFFFFFFF  # in place of a header's length: no frame follows
FRAME_HEADER_LIMIT = 1 << 17  # bytes; who is absent from a chunk, of 1,000 peers
BYTES_UNDER_WAY = 768 << 10  # sent and not confirmed, on one stream: more would leave one stream's share for the end
FRAMES_UNDER_WAY = 64  # of these
ACCEPTED, REFUSED = b"\x01", b"\x00"
REASON_LENGTH = struct.Struct(">H")
REASON_BYTES = 500
STALL_TIMEOUT = 30.0  # seconds without a byte after which the other side counts as gone
ANSWER_TIMEOUT = 600.0  # seconds: all that is under way to a slow peer must first arrive; the dead are seen otherwise
DISCARDED_AT_ONCE = 1 << 16  # bytes
CLOSE_TIMEOUT = 5.0  # seconds in which the other side should close


class PeerUnreachableError(DilocoPeerError):
    """A peer gave no usable answer: dead, cut off, too slow, or talking nonsense."""

    exit_code = 4

    what_happened = "did not answer"

    def __init__(self, peer: str, reason: str) -> None:
        super().__init__(f"peer {peer} {self.what_happened}: {reason}")
        self.peer = peer
        self.reason = reason


class PeerRefusedError(PeerUnreachableError):
    """A peer is alive and does not want what we sent, or have what we asked for; `reason` is in its own words."""

    what_happened = "refused"


class RefusalError(Exception):
    """Raised by our own handlers to tell the caller no, and why."""


class Channel:
    """One end of a stream to `peer`. Reading raises RemoteProtocolError, TimeoutError, EOFError or OSError."""

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
        """`stays_open`: another conversation follows on the same connection, so nobody waits for its end.

        `opening` goes before the prelude, and with it: see `ChunkSender._write`.
        """
        self.peer = peer
        self._upload = upload
        self._download = download
        self._reads = reader if isinstance(reader, DirectReads) else DirectReads(reader, writer)
        self._writer = writer
        self._stays_open = stays_open
        self._opening = opening
        self.is_finished = False
        """Whether whoever opened the conversation has had all of it. Else no other one follows on the connection."""
        self.was_refused = False
        """Whether the other side has said no, after which neither side sends anything."""

    async def send_prelude(self, header: bytes, length: int) -> None:
        if len(header) > HEADER_LIMIT:
            raise LocalProtocolError(f"a stream header of {len(header)} bytes exceeds {HEADER_LIMIT}")
        self._writer.write(self._opening + PRELUDE.pack(MAGIC, VERSION, len(header), length) + header)
        self._opening = b""
        await self._flush()

    async def read_prelude(self) -> tuple[bytes, int]:
        """Return header and data length."""
        async with asyncio.timeout(STALL_TIMEOUT):  # for all of it, not for each byte
            magic, version, header_length, length = PRELUDE.unpack(await self._read(PRELUDE.size))
        if magic == MAGIC and version != VERSION:
            raise RemoteProtocolError(self.peer, f"its streams are of version {version}; ours are of version {VERSION}")
        if magic != MAGIC or header_length > HEADER_LIMIT:
            raise RemoteProtocolError(self.peer, "its stream does not start with a valid prelude")
        return await self._read(header_length), length

    async def accept(self) -> None:
        self._writer.write(ACCEPTED)
        await self._flush()

    async def refuse(self, reason: str) -> None:
        """Say no. The last bytes that we send."""
        await self._say_no(reason)
        await self.wait_closed()

    async def _say_no(self, reason: str) -> None:
        text = reason.encode(errors="replace")[:REASON_BYTES]
        self._writer.write(REFUSED + REASON_LENGTH.pack(len(text)) + text)
        await self._flush()

    async def refuse_all(self, reason: str) -> None:
        """Say no to a stream whose data comes all the same. Nothing else can follow on its connection.

        Raises: EOFError, when the other side has closed it, or has had the time to.
        """
        await self._say_no(reason)
        nowhere = memoryview(bytearray(DISCARDED_AT_ONCE))
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_TIMEOUT):
                while not self._reads.has_ended:
                    await self._reads.fill(nowhere, None)
        raise EOFError("a refused stream is over")

    async def read_verdict(self) -> None:
        """Raises: PeerRefusedError."""
        verdict = await self._read(1)
        if verdict == ACCEPTED:
            return
        if verdict != REFUSED:
            raise RemoteProtocolError(self.peer, "its verdict is neither yes nor no")
        (length,) = REASON_LENGTH.unpack(await self._read(REASON_LENGTH.size))
        if length > REASON_BYTES:
            raise RemoteProtocolError(self.peer, f"its reason of {length} bytes exceeds {REASON_BYTES}")
        text = await self._read(length)
        self.was_refused = True
        raise PeerRefusedError(self.peer, printable(text.decode(errors="replace")))

    async def send_frame(self, header: bytes, data: Buffer) -> None:
        self._writer.write(FRAME.pack(len(header), memoryview(data).nbytes) + header)
        async for _ in self._written(data):
            pass

    async def send_message(self, header: bytes, data: bytes) -> None:
        """Send a small frame at once: who gives up waiting for the other side to read leaves no half of one behind."""
        self._writer.write(FRAME.pack(len(header), len(data)) + header + data)
        await self._flush()

    async def read_frame_header(self) -> tuple[bytes, int] | None:
        """Header and data length of the next frame, whenever it comes; None after the last one."""
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
        """Say that no frame follows."""
        self._writer.write(FRAME.pack(LAST_FRAME, 0))
        await self._flush()

    async def read_frame_data(self, data: bytearray) -> None:
        """Fill `data`, which has the frame's length."""
        async for _ in self._filled(data):
            pass

    async def answer_frame(self, is_taken: bool) -> None:
        self._writer.write(ACCEPTED if is_taken else REFUSED)
        await self._flush()

    async def read_answer(self) -> bool:
        answer = await self._reads.read(1, ANSWER_TIMEOUT)
        if answer not in (ACCEPTED, REFUSED):
            raise RemoteProtocolError(self.peer, "its answer to a frame is neither yes nor no")
        return answer == ACCEPTED

    async def send_data(self, data: Buffer) -> bytes:
        """Write all of it; returns its digest."""
        hasher = blake3()
        async for piece in self._written(data):
            hasher.update(piece)
        return hasher.digest()

    async def read_data(self, buffer: bytearray | memoryview) -> bytes:
        """Fill the buffer; returns the digest of what is in it."""
        hasher = blake3()
        async for piece in self._filled(buffer):
            hasher.update(piece)
        return hasher.digest()

    async def send_digest(self, digest: bytes) -> None:
        """Confirm what was received. The last bytes that we send."""
        self._writer.write(digest)
        await self._flush()
        await self.wait_closed()

    async def read_digest(self, expected: bytes) -> None:
        if await self._read(DIGEST_BYTES) != expected:
            raise RemoteProtocolError(self.peer, "it confirmed other bytes than we sent")

    async def wait_closed(self) -> None:
        """Give the other side time to read our last bytes and close, unless the connection stays open."""
        if self._stays_open:
            return
        with suppress(TimeoutError, asyncio.IncompleteReadError):
            await self._reads.read(1, CLOSE_TIMEOUT)
            raise RemoteProtocolError(self.peer, "it sent more than its prelude announced")

    def give_way(self, link: LinkTime) -> None:
        """From now on send data while the link is free, and else slowly."""
        self._upload = GivingWay(self._upload, link)

    def close(self) -> None:
        """What was written and not sent yet is never sent: from Python 3.12 on it is the caller's own memory."""
        if self._stays_open or self._writer.transport.get_write_buffer_size():
            self._writer.transport.abort()
        else:
            self._writer.close()

    async def _written(self, data: Buffer) -> AsyncIterator[memoryview]:
        """Write all of it, piece by piece."""
        view = memoryview(data).cast("B")
        for start in range(0, len(view), self._upload.piece):
            piece = view[start : start + self._upload.piece]
            await self._upload.take(len(piece))
            self._writer.write(piece)
            await self._flush()
            yield piece

    async def _filled(self, buffer: bytearray | memoryview) -> AsyncIterator[memoryview]:
        """Fill the buffer, piece by piece."""
        view = memoryview(buffer).cast("B")
        for start in range(0, len(view), self._download.reading_piece):
            piece = view[start : start + self._download.reading_piece]
            try:
                await self._reads.fill(piece, STALL_TIMEOUT)
            except asyncio.IncompleteReadError as error:
                came = start + len(error.partial)
                raise EOFError(f"the stream ended after {came} of {len(view)} bytes") from error
            await self._download.take(len(piece))
            yield piece

    async def _read(self, count: int) -> bytes:
        return await self._reads.read(count, STALL_TIMEOUT)

    async def _flush(self) -> None:
        if self._writer.transport.get_write_buffer_size():
            async with asyncio.timeout(STALL_TIMEOUT):
                await self._writer.drain()
        else:  # which raises where the connection is gone: writing to it does not
            await self._writer.drain()


async def pull(channel: Channel, header: bytes, max_bytes: int) -> tuple[bytes, bytearray]:
    """Ask for data: header and data of the answer. Raises also: PeerRefusedError."""
    await channel.send_prelude(header, 0)
    await channel.read_verdict()
    answer, length = await channel.read_prelude()
    if length > max_bytes:
        raise RemoteProtocolError(channel.peer, f"its answer of {length} bytes exceeds the limit of {max_bytes}")
    data = bytearray(length)
    await channel.send_digest(await channel.read_data(data))
    channel.is_finished = True
    return answer, data


async def serve_pull(channel: Channel, serve: Serve) -> None:
    """The other end of `pull`."""
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
        await channel.read_digest(await channel.send_data(data))
