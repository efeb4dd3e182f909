"""Messages over a link: a conversation that lasts, with many questions under way at once.

asker     prelude "" ──►   ◄── verdict   frame (number, name), payload … ──►
answerer                                 ◄── frame (number, verdict), answer …
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Annotated, TypeAlias

from pydantic import Field

from peers.errors import RemoteProtocolError
from peers.streams import Channel, PeerRefusedError, PeerUnreachableError, RefusalError
from peers.wire import MESSAGE_LIMIT, Count, Value, pack, printable, unpack_from

logger = logging.getLogger(__name__)

CALLS = "calls"
ASKED_AT_ONCE = 64

Answer: TypeAlias = Callable[[str, str, bytes], Awaitable[bytes]]
"""(sender, name, payload) -> answer; RefusalError refuses."""


class Question(Value):
    number: Count
    name: Annotated[str, Field(strict=True, max_length=64)]


class Verdict(Value):
    number: Count
    is_answered: Annotated[bool, Field(strict=True)]


class Caller:
    """The asking end. Ends when its channel breaks: then `closed` is set and every question fails."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._number = 0
        self._waiting: dict[int, asyncio.Future[bytes]] = {}
        self._writing = asyncio.Lock()

    async def run(self) -> None:
        """Take in answers until the channel breaks, and then raise what broke it."""
        try:
            while frame := await self._channel.read_frame_header():
                verdict = unpack_from(self._channel.peer, Verdict, frame[0])
                data = await _read(self._channel, frame[1])
                waiting = self._waiting.pop(verdict.number, None)
                if waiting is None or waiting.done():
                    continue
                if verdict.is_answered:
                    waiting.set_result(data)
                else:
                    waiting.set_exception(
                        PeerRefusedError(self._channel.peer, printable(data.decode(errors="replace")))
                    )
        finally:
            for future in self._waiting.values():
                if not future.done():
                    future.set_exception(PeerUnreachableError(self._channel.peer, "the connection broke"))
            self._waiting.clear()

    async def ask(self, name: str, payload: bytes) -> bytes:
        """Raises: PeerUnreachableError, PeerRefusedError."""
        self._number += 1
        number = self._number
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        try:
            async with self._writing:
                await self._channel.send_frame(pack(Question(number=number, name=name)), payload)
            return await answer
        except (OSError, EOFError) as error:
            raise PeerUnreachableError(self._channel.peer, str(error) or type(error).__name__) from error
        finally:
            self._waiting.pop(number, None)


async def answer_calls(channel: Channel, answer: Answer) -> None:
    """The answering end, until the asker goes away."""
    await channel.read_prelude()
    await channel.accept()
    places, writing = asyncio.Semaphore(ASKED_AT_ONCE), asyncio.Lock()

    async def reply(question: Question, payload: bytes) -> None:
        try:
            is_answered, data = True, await answer(channel.peer, question.name, payload)
        except RefusalError as refusal:
            is_answered, data = False, str(refusal).encode(errors="replace")
        finally:
            places.release()
        async with writing:
            with suppress(OSError, TimeoutError):  # the connection is gone: its reading end says so
                await channel.send_frame(pack(Verdict(number=question.number, is_answered=is_answered)), data)

    replies: set[asyncio.Task[None]] = set()
    try:
        while frame := await channel.read_frame_header():
            question = unpack_from(channel.peer, Question, frame[0])
            payload = await _read(channel, frame[1])
            await places.acquire()
            task = asyncio.create_task(reply(question, payload))
            replies.add(task)
            task.add_done_callback(replies.discard)
    finally:
        for task in replies:
            task.cancel()
        await asyncio.gather(*replies, return_exceptions=True)


async def _read(channel: Channel, length: int) -> bytes:
    if length > MESSAGE_LIMIT:
        raise RemoteProtocolError(channel.peer, f"its message of {length} bytes exceeds {MESSAGE_LIMIT}")
    data = bytearray(length)
    if length:
        await channel.read_frame_data(data)
    return bytes(data)
