"""Messages over a link: a conversation that lasts, with many questions under way at once.

asker     prelude "" ──►   ◄── verdict   frame (number, name), payload … ──►
answerer                                 ◄── frame (number, verdict), answer …
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Annotated, TypeAlias

from pydantic import Field

from peers.errors import RemoteProtocolError
from peers.network.channel import Channel, PeerRefusedError, PeerUnreachableError, RefusalError
from peers.values.wire import MESSAGE_LIMIT, Count, Value, pack, printable, unpack_from

CALLS = "calls"
ASKED_AT_ONCE = 64
HELD_BYTES = 4 << 20  # of questions that are not answered yet, before more are read

Answer: TypeAlias = Callable[[str, str, bytes], Awaitable[bytes]]
"""(sender, name, payload) -> answer; RefusalError refuses."""


class Question(Value):
    number: Count
    name: Annotated[str, Field(strict=True, max_length=64)]


class Verdict(Value):
    number: Count
    is_answered: Annotated[bool, Field(strict=True)]


class Caller:
    """The asking end. Once its channel has broken every question fails."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._number = 0
        self._waiting: dict[int, asyncio.Future[bytes | PeerUnreachableError]] = {}
        self._writing = asyncio.Lock()
        self._is_over = False

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
                    reason = printable(data.decode(errors="replace"))
                    waiting.set_result(PeerRefusedError(self._channel.peer, reason))
            raise EOFError("the other side ended it")
        finally:
            self._is_over = True
            for future in self._waiting.values():
                if not future.done():
                    future.set_result(self._broken())
            self._waiting.clear()

    async def ask(self, name: str, payload: bytes) -> bytes:
        """Raises: PeerUnreachableError, PeerRefusedError."""
        if self._is_over:
            raise self._broken()
        self._number += 1
        number = self._number
        self._waiting[number] = asyncio.get_running_loop().create_future()
        answer = self._waiting[number]
        try:
            async with self._writing:
                await self._channel.send_message(pack(Question(number=number, name=name)), payload)
            outcome = await answer
        except (OSError, EOFError) as error:
            raise PeerUnreachableError(self._channel.peer, str(error) or type(error).__name__) from error
        finally:
            self._waiting.pop(number, None)
        if isinstance(outcome, PeerUnreachableError):
            raise outcome
        return outcome

    def _broken(self) -> PeerUnreachableError:
        return PeerUnreachableError(self._channel.peer, "the connection broke")


async def answer_calls(channel: Channel, answer: Answer) -> None:
    """The answering end. Raises what ends the connection: EOFError when the asker goes away."""
    await channel.read_prelude()
    await channel.accept()
    writing = asyncio.Lock()
    replies: dict[asyncio.Task[None], int] = {}  # with the length of each question

    async def reply(question: Question, payload: bytes) -> None:
        try:
            is_answered, data = True, await answer(channel.peer, question.name, payload)
            if len(data) > MESSAGE_LIMIT:
                raise RefusalError(f"its answer of {len(data)} bytes exceeds {MESSAGE_LIMIT}")
        except RefusalError as refusal:
            is_answered, data = False, str(refusal).encode(errors="replace")
        async with writing:
            try:
                await channel.send_message(pack(Verdict(number=question.number, is_answered=is_answered)), data)
            except (OSError, TimeoutError):
                channel.close()  # gone, or it asks and does not read; the reading end ends with it

    try:
        while frame := await channel.read_frame_header():
            question = unpack_from(channel.peer, Question, frame[0])
            while len(replies) >= ASKED_AT_ONCE or sum(replies.values()) > HELD_BYTES:
                await asyncio.wait(replies, return_when=asyncio.FIRST_COMPLETED)
            payload = await _read(channel, frame[1])
            task = asyncio.create_task(reply(question, payload))
            replies[task] = len(payload)
            task.add_done_callback(replies.pop)
        raise EOFError("the asker ended it")
    finally:
        unfinished = list(replies)
        for task in unfinished:
            task.cancel()
        await asyncio.gather(*unfinished, return_exceptions=True)


async def _read(channel: Channel, length: int) -> bytes:
    if length > MESSAGE_LIMIT:
        raise RemoteProtocolError(channel.peer, f"its message of {length} bytes exceeds {MESSAGE_LIMIT}")
    data = bytearray(length)
    if length:
        await channel.read_frame_data(data)
    return bytes(data)
