"""Chunks on a byte stream, one after another: each is confirmed by itself, so that what has arrived counts even if the
stream breaks off later."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from peers.network.channel import (
    BYTES_UNDER_WAY,
    FRAMES_UNDER_WAY,
    Buffer,
    Channel,
    PeerRefusedError,
    PeerUnreachableError,
    RefusalError,
)
from peers.values.system import now

Item = TypeVar("Item")


@dataclass(frozen=True)
class Frame(Generic[Item]):
    """What goes on the stream, and whatever the sender knows it by."""

    item: Item
    header: bytes
    data: Buffer


class ChunkSender(Generic[Item]):
    """The sending end. `pending` are the items that were written and not confirmed."""

    def __init__(self, channel: Channel, under_way: Callable[[], int] = lambda: BYTES_UNDER_WAY) -> None:
        """`under_way` returns from how many bytes on, sent and not confirmed, no third frame is sent. With one alone a
        stream would stand still until that is confirmed."""
        self._channel = channel
        self._under_way = under_way
        self._sizes: deque[int] = deque()  # of what is pending
        self._begun: deque[float] = deque()  # when the writing of each began
        self._has_room = asyncio.Event()
        self._has_room.set()
        self._written = asyncio.Semaphore(0)
        self._is_finished = False
        self.pending: deque[Item] = deque()

    async def run(
        self,
        header: bytes,
        following: Callable[[], Awaitable[Frame[Item] | None]],
        answered: Callable[[Item, bool, float], None],
    ) -> None:
        """Send what `following` gives until that is None, and wait until all of it is answered.

        `answered` is told of each item whether it is taken, and how many seconds of the stream it took.

        The first frames follow the header at once: on a long link, waiting for a yes would cost as much as they do.

        Raises: PeerUnreachableError when the other side says no, and whatever breaks the stream.
        """
        reading = asyncio.create_task(self._read_answers(answered))
        writing = asyncio.create_task(self._write(header, following))
        try:
            done, _ = await asyncio.wait((reading, writing), return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
            await reading
            self._channel.is_finished = True
        finally:
            for task in (reading, writing):
                task.cancel()
            await asyncio.gather(reading, writing, return_exceptions=True)

    async def _write(self, header: bytes, following: Callable[[], Awaitable[Frame[Item] | None]]) -> None:
        """The first frame goes with the prelude in one packet. When BBR has not measured a delay for ten seconds, and
        the first packet is a small one, whose answer may have been delayed, it stops for 0.2 seconds to measure."""
        await self._channel.send_prelude(header, 0)
        while True:
            await self._has_room.wait()
            frame = await following()
            if frame is None:
                await self._channel.send_last_frame()
                self._is_finished = True
                self._written.release()
                return
            self.pending.append(frame.item)
            self._sizes.append(memoryview(frame.data).nbytes)
            self._begun.append(now())
            self._look_for_room()
            await self._channel.send_frame(frame.header, frame.data)
            self._written.release()

    async def _read_answers(self, answered: Callable[[Item, bool, float], None]) -> None:
        try:
            await self._channel.read_verdict()
        except PeerRefusedError as error:  # frames are under way: the connection is of no more use
            raise PeerUnreachableError(error.peer, error.reason) from error
        answered_at = 0.0
        while True:
            await self._written.acquire()
            if self._is_finished and not self.pending:
                return
            is_taken = await self._channel.read_answer()
            self._sizes.popleft()
            self._look_for_room()
            began, answered_at = max(self._begun.popleft(), answered_at), now()
            answered(self.pending.popleft(), is_taken, answered_at - began)

    def _look_for_room(self) -> None:
        count = len(self._sizes)
        if count < 2 or (count < FRAMES_UNDER_WAY and sum(self._sizes) < self._under_way()):
            self._has_room.set()
        else:
            self._has_room.clear()


class Arrivals(Protocol):
    """What becomes of the chunks of one stream."""

    def expect(self, header: bytes, length: int) -> bytearray:
        """Memory of this length for the data of the next frame. Raises: RemoteProtocolError, which ends the stream."""

    def arrived(self) -> bool:
        """That memory is filled. Whether it is of use here, and needs not be sent again."""


async def receive_chunks(channel: Channel, admit: Callable[[str, bytes], Awaitable[Arrivals]]) -> None:
    """The receiving end, until the sender has sent its last frame or closes the stream.

    `admit` is asked with the sender and the stream's header, and returns when the sender may begin; RefusalError
    refuses.
    """
    header, _ = await channel.read_prelude()
    try:
        arrivals = await admit(channel.peer, header)
    except RefusalError as refusal:
        await channel.refuse_all(str(refusal))
    await channel.accept()
    while frame := await channel.read_frame_header():
        await channel.read_frame_data(arrivals.expect(*frame))
        await channel.answer_frame(arrivals.arrived())
