"""Reading from a connection straight into the memory that the bytes are for.

asyncio's StreamReader copies every byte three times on its way. Here the kernel writes into the caller's memory; only
what comes while nobody waits, a few KiB, is put aside. The rest stays with the kernel, which slows the sender down.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from contextlib import suppress

READ_AHEAD = 4096  # bytes; most headers fit in
LOW_WATER = 1 << 17
"""Bytes that must have come before we are woken, in the midst of something long: a long link gives them in thousands of
small pieces, and to be woken for each would cost more than to decrypt them."""
RECORD = 17 << 10  # bytes that TLS may have taken in, and not given to us yet: one record, with what it adds


class DirectReads(asyncio.BufferedProtocol):
    """Takes over the reading end of a connection, for good; its StreamWriter stays. One read at a time.

    Reads raise asyncio.IncompleteReadError when the stream ends before, TimeoutError when no byte comes for `patience`
    seconds (in the midst of something long, twice as many), and OSError when the connection breaks.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        early = bytes(reader._buffer)  # type: ignore[attr-defined]  # read() would wait if there is nothing
        reader._buffer.clear()  # type: ignore[attr-defined]
        self._ahead = memoryview(bytearray(max(READ_AHEAD, len(early))))
        self._ahead[: len(early)] = early
        self._ahead_count = len(early)
        self._memory = memoryview(b"")  # what is being filled
        self._count = 0
        self._needed = 0  # bytes ahead, for the read that waits
        self.on_lost: Callable[[], None] = lambda: None
        self._ready: asyncio.Future[None] | None = None
        self._watch: asyncio.TimerHandle | None = None
        self._last_at = 0.0  # when a byte came, or the read began
        self._error = reader.exception()
        self._has_ended = reader.at_eof() or self._error is not None
        self._transport: asyncio.Transport = writer.transport  # type: ignore[assignment]  # it reads, too
        self._writing = self._transport.get_protocol()
        self._transport.set_protocol(self)
        self._socket = self._transport.get_extra_info("socket")
        self._can_wait = self._transport.get_extra_info("sslcontext") is not None  # over TCP, that is
        self._low_water = 1
        self._take(0)

    @property
    def has_ended(self) -> bool:
        """Whether nothing will come any more."""
        return self._has_ended

    @property
    def has_unread(self) -> bool:
        """Whether something came that nobody has read."""
        return self._ahead_count > 0

    async def read(self, count: int, patience: float | None) -> bytes:
        """So many bytes."""
        if count > len(self._ahead):
            data = bytearray(count)
            await self.fill(memoryview(data), patience)
            return bytes(data)
        if self._ahead_count < count:
            self._needed = count
            await self._wait(patience)
        return self._take(count)

    async def fill(self, memory: memoryview, patience: float | None) -> None:
        """Fill memory of single bytes."""
        early = self._take(min(self._ahead_count, len(memory)))
        memory[: len(early)] = early
        if len(early) < len(memory):
            self._memory, self._count = memory, len(early)
            self._choose_low_water()
            try:
                await self._wait(patience)
            finally:
                self._memory, self._count = memoryview(b""), 0
                self._choose_low_water()

    def _choose_low_water(self) -> None:
        """Be woken when so much has come as certainly comes, or for every byte."""
        self._wake_after(max(1, min(LOW_WATER, len(self._memory) - self._count - RECORD)))

    def _wake_after(self, wanted: int) -> None:
        if wanted != self._low_water and self._can_wait:
            self._low_water = wanted
            with suppress(OSError):
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, wanted)

    def _take(self, count: int) -> bytes:
        """From what was put aside."""
        taken = bytes(self._ahead[:count])
        self._ahead_count -= count
        self._ahead[: self._ahead_count] = bytes(self._ahead[count : count + self._ahead_count])
        if self._ahead_count < len(self._ahead):
            self._transport.resume_reading()
        else:
            self._transport.pause_reading()
        return taken

    # Waiting --------------------------------------------------------------------------------------------------
    async def _wait(self, patience: float | None) -> None:
        if self._has_ended:
            raise self._error or self._incomplete()
        loop = asyncio.get_running_loop()
        self._ready, self._last_at = loop.create_future(), loop.time()
        if patience is not None:
            self._watch = loop.call_later(patience, self._be_patient, patience)
        try:
            await self._ready
        finally:
            self._ready = None
            if self._watch is not None:
                self._watch.cancel()
                self._watch = None

    def _be_patient(self, patience: float) -> None:
        loop = asyncio.get_running_loop()
        silent = loop.time() - self._last_at
        if silent < patience:
            self._watch = loop.call_later(patience - silent, self._be_patient, patience)
        elif self._low_water > 1:  # bytes may have come, but too few to wake us: the next one will
            self._wake_after(1)
            self._last_at = loop.time()
            self._watch = loop.call_later(patience, self._be_patient, patience)
        else:
            self._end(TimeoutError(f"no byte came for {patience:g} s"))

    def _end(self, error: Exception | None = None) -> None:
        """Of the read that waits, if one does."""
        if self._ready is None or self._ready.done():
            return
        if error is None:
            self._ready.set_result(None)
        else:
            self._ready.set_exception(error)

    def _incomplete(self) -> asyncio.IncompleteReadError:
        if self._memory:
            return asyncio.IncompleteReadError(bytes(self._memory[: self._count]), len(self._memory))
        return asyncio.IncompleteReadError(bytes(self._ahead[: self._ahead_count]), self._needed)

    # What the transport calls ---------------------------------------------------------------------------------
    def get_buffer(self, sizehint: int) -> memoryview:
        return self._memory[self._count :] or self._ahead[self._ahead_count :]

    def buffer_updated(self, nbytes: int) -> None:
        self._last_at = asyncio.get_running_loop().time()
        if self._count < len(self._memory):
            self._count += nbytes
            is_enough = self._count == len(self._memory)
            self._choose_low_water()
        else:
            self._ahead_count += nbytes
            is_enough = not self._memory and self._ahead_count >= self._needed
            if self._ahead_count == len(self._ahead):
                self._transport.pause_reading()
        if is_enough:
            self._end()

    def eof_received(self) -> bool:
        """Whether we may go on writing. TLS has no half-closed connections."""
        self._has_ended = True
        self._end(self._incomplete())
        return self._transport.get_extra_info("sslcontext") is None

    def connection_lost(self, error: Exception | None) -> None:
        self._has_ended, self._error = True, error
        self._end(error or self._incomplete())
        self._writing.connection_lost(error)
        self.on_lost()

    def pause_writing(self) -> None:
        self._writing.pause_writing()

    def resume_writing(self) -> None:
        self._writing.resume_writing()
