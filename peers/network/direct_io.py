"""Connections without copies: TLS decrypted straight into the memory that the bytes are for, and reads into it.

asyncio's own TLS copies what comes in once more, calls back for each record of 16 KiB, and moves all that waits to be
sent whenever a part of it has been; its StreamReader copies every byte three times. Bulk data costs a third more
processor time there. Here the kernel writes into the caller's memory; only what comes while nobody waits, a few KiB, is
put aside. The rest stays with the kernel, which slows the sender down.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from typing import cast

CIPHERTEXT = 1 << 18  # bytes that are taken from the kernel at once
HANDSHAKE_BYTES = 1 << 14  # that are taken at once, before it is known who is there
TO_SEND = 1 << 16  # bytes that are encrypted at once: they are sent while they are in the processor's cache
HIGH_WATER = 1 << 19  # bytes that wait for the kernel at most
_ciphertext = memoryview(bytearray(CIPHERTEXT))
"""What the kernel gave last. All connections of a process take turns."""

READ_AHEAD = 4096  # bytes; most headers fit in
LOW_WATER = 1 << 17
"""Bytes that must have come before we are woken, in the midst of something long: a long link gives them in thousands of
small pieces, and to be woken for each would cost more than to decrypt them."""
RECORD = 17 << 10  # bytes that TLS may have taken in, and not given to us yet: one record, with what it adds


async def start_tls(sock: socket.socket, context: ssl.SSLContext, server_side: bool) -> TlsTransport:
    """Have the handshake, and take the socket over. Raises: OSError; ssl.SSLError is one, too."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = context.wrap_bio(incoming, outgoing, server_side=server_side)
    loop = asyncio.get_running_loop()
    while True:
        try:
            tls.do_handshake()
        except ssl.SSLWantReadError:
            await loop.sock_sendall(sock, outgoing.read())
            if not (data := await loop.sock_recv(sock, HANDSHAKE_BYTES)):
                raise ConnectionResetError("the other side has ended the TLS handshake") from None
            incoming.write(data)
        except ssl.SSLError:
            with suppress(OSError):
                sock.send(outgoing.read())  # what is wrong, if that can be told
            raise
        else:
            await loop.sock_sendall(sock, outgoing.read())
            return TlsTransport(sock, tls, incoming, outgoing)


class TlsTransport(asyncio.Transport):
    """What asyncio's streams and protocols need of a connection. It is closed without a farewell: frames have an end.

    It has no protocol at first, and begins to read when it is told to resume.
    """

    def __init__(
        self, sock: socket.socket, tls: ssl.SSLObject, incoming: ssl.MemoryBIO, outgoing: ssl.MemoryBIO
    ) -> None:
        super().__init__({"socket": sock, "ssl_object": tls, "sslcontext": tls.context})
        self._loop = asyncio.get_running_loop()
        self._socket = sock
        self.tls = tls
        self._incoming, self._outgoing = incoming, outgoing
        self._protocol = asyncio.BufferedProtocol()
        self._unsent = memoryview(b"")  # taken from `outgoing`
        self._is_reading = self._is_watched = False
        self._is_to_send = self._is_waiting_to_send = self._has_paused_writer = False
        self._is_closed = False

    def get_protocol(self) -> asyncio.BaseProtocol:
        return self._protocol

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        """Of those that are told when to read, only a BufferedProtocol may be."""
        self._protocol = cast(asyncio.BufferedProtocol, protocol)

    # In -------------------------------------------------------------------------------------------------------
    def pause_reading(self) -> None:
        """The socket is watched until something comes: most pauses are over before."""
        self._is_reading = False

    def resume_reading(self) -> None:
        if self._is_reading or self._is_closed:
            return
        self._is_reading = True
        if not self._is_watched:
            self._is_watched = True
            self._loop.add_reader(self._socket, self._take_in)
        if self._incoming.pending or self.tls.pending():  # what was left when it was paused
            self._loop.call_soon(self._decrypt)

    def _take_in(self) -> None:
        if not self._is_reading:
            self._is_watched = False
            self._loop.remove_reader(self._socket)
            return
        try:
            count = self._socket.recv_into(_ciphertext)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self._end(error)
            return
        if count:
            self._incoming.write(_ciphertext[:count])
        else:
            self._incoming.write_eof()
        self._decrypt()
        self._send_now()  # what TLS has to answer

    def _decrypt(self) -> None:
        """Give the protocol all whole records that are here, until it has enough."""
        while self._is_reading:
            memory = memoryview(self._protocol.get_buffer(-1))
            count, end = 0, None
            try:
                while count < len(memory):
                    if not (record := cast(int, self.tls.read(len(memory) - count, memory[count:]))):
                        raise ssl.SSLEOFError
                    count += record
            except ssl.SSLWantReadError:
                pass
            except ssl.SSLError as error:
                end = error
            if count:
                self._protocol.buffer_updated(count)
            if isinstance(end, ssl.SSLEOFError):
                self._protocol.eof_received()
                self._end(None)
            elif end is not None:
                self._end(end)
            if count < len(memory):
                return

    # Out ------------------------------------------------------------------------------------------------------
    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._is_closed:
            return  # as asyncio's: who writes to what is gone hears of it when draining
        view = memoryview(data).cast("B")
        try:
            for start in range(0, len(view), TO_SEND):
                self.tls.write(view[start : start + TO_SEND])
                if self._outgoing.pending >= TO_SEND:
                    self._send_now()
        except ssl.SSLError as error:
            self._end(error)
        if self._outgoing.pending and not (self._is_to_send or self._is_waiting_to_send):
            self._is_to_send = True  # with what else is written before anything else happens
            self._loop.call_soon(self._send_now)
        if not self._has_paused_writer and self.get_write_buffer_size() > HIGH_WATER:
            self._has_paused_writer = True
            self._protocol.pause_writing()

    def _send_now(self) -> None:
        self._is_to_send = False
        if self._outgoing.pending and not self._is_waiting_to_send and not self._is_closed:
            self._send()

    def _send(self) -> None:
        """Give the kernel what is encrypted, and what it does not take when it has room again."""
        try:
            while self._unsent or self._outgoing.pending:
                self._unsent = self._unsent or memoryview(self._outgoing.read())
                self._unsent = self._unsent[self._socket.send(self._unsent) :]
        except (BlockingIOError, InterruptedError):
            if not self._is_waiting_to_send:
                self._is_waiting_to_send = True
                self._loop.add_writer(self._socket, self._send)
        except OSError as error:
            self._end(error)
        else:
            if self._is_waiting_to_send:
                self._is_waiting_to_send = False
                self._loop.remove_writer(self._socket)
        if self._has_paused_writer and self.get_write_buffer_size() <= HIGH_WATER // 4:
            self._has_paused_writer = False
            self._protocol.resume_writing()

    def get_write_buffer_size(self) -> int:
        return len(self._unsent) + self._outgoing.pending

    # The end --------------------------------------------------------------------------------------------------
    def is_closing(self) -> bool:
        return self._is_closed

    def abort(self) -> None:
        """End it at once: what the kernel does not take now is lost."""
        self._send_now()
        self._end(None)

    close = abort

    def _end(self, error: OSError | None) -> None:
        if self._is_closed:
            return
        self._is_reading = False
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)
        self._is_closed = True
        self._unsent = memoryview(b"")
        self._loop.call_soon(self._say_it_is_over, error)

    def _say_it_is_over(self, error: OSError | None) -> None:
        try:
            self._protocol.connection_lost(error)
        finally:
            self._socket.close()


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
        self.on_lost: Callable[[], None] = lambda: None
        self._ready: asyncio.Future[None] | None = None
        self._watch: asyncio.TimerHandle | None = None
        self._last_at = 0.0  # when a byte came, or the read began
        self._error = reader.exception()
        self.has_ended = reader.at_eof() or self._error is not None
        self._transport: asyncio.Transport = writer.transport  # type: ignore[assignment]  # it reads, too
        self._writing = self._transport.get_protocol()
        self._transport.set_protocol(self)
        self._is_tls = self._transport.get_extra_info("sslcontext") is not None  # over TCP, that is
        self._low_water = 1
        self._take(0)

    @property
    def has_unread(self) -> bool:
        """Whether something came that nobody has read."""
        return self._ahead_count > 0

    async def read(self, count: int, patience: float | None) -> bytes:
        data = bytearray(count)
        await self.fill(memoryview(data), patience)
        return bytes(data)

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
        if wanted != self._low_water and self._is_tls:
            self._low_water = wanted
            with suppress(OSError):
                sock = self._transport.get_extra_info("socket")
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, wanted)

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
        if self.has_ended:
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
        return asyncio.IncompleteReadError(bytes(self._memory[: self._count]), len(self._memory))

    # What the transport calls ---------------------------------------------------------------------------------
    def get_buffer(self, sizehint: int) -> memoryview:
        return self._memory[self._count :] or self._ahead[self._ahead_count :]

    def buffer_updated(self, nbytes: int) -> None:
        self._last_at = asyncio.get_running_loop().time()
        if self._count < len(self._memory):
            self._count += nbytes
            self._choose_low_water()
            if self._count == len(self._memory):
                self._end()
        else:
            self._ahead_count += nbytes
            if self._ahead_count == len(self._ahead):
                self._transport.pause_reading()

    def eof_received(self) -> bool:
        """Whether we may go on writing. TLS has no half-closed connections."""
        self.has_ended = True
        self._end(self._incomplete())
        return not self._is_tls

    def connection_lost(self, error: Exception | None) -> None:
        self.has_ended, self._error = True, error
        self._end(error or self._incomplete())
        self._writing.connection_lost(error)
        self.on_lost()

    def pause_writing(self) -> None:
        self._writing.pause_writing()

    def resume_writing(self) -> None:
        self._writing.resume_writing()
