"""Questions and answers on one stream: many at once, each gets its own answer, and nothing hangs when it breaks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peers.errors import RemoteProtocolError
from peers.network.channel import STALL_TIMEOUT, Channel, PeerRefusedError, PeerUnreachableError, RefusalError
from peers.network.link import ASKED_AT_ONCE, HELD_BYTES, Answer, _Caller, _Question, _Verdict, answer_calls
from peers.values.wire import MESSAGE_LIMIT, pack, unpack
from tests.peers.network.test_channel import channels, send_raw
from tests.peers.network.test_throttle import now, simulate

ERRORS = (RemoteProtocolError, EOFError, OSError)


async def echo(sender: str, name: str, payload: bytes) -> bytes:
    if name == "refuse":
        raise RefusalError("not today")
    return name.encode() + payload


@asynccontextmanager
async def asking(
    other: Callable[[Channel], Awaitable[None]],
) -> AsyncIterator[tuple[_Caller, Channel, asyncio.Task[None]]]:
    """A caller, its channel, and what becomes of the other end."""
    left, right = await channels()
    answering = asyncio.ensure_future(other(right))
    await left.send_prelude(b"", 0)
    await left.read_verdict()
    caller = _Caller(left)
    running = asyncio.create_task(caller.run())
    try:
        yield caller, left, asyncio.ensure_future(answering)
    finally:
        left.close()
        right.close()
        answering.cancel()
        await asyncio.gather(running, answering, return_exceptions=True)


def answering(answer: Answer) -> Callable[[Channel], Awaitable[None]]:
    return lambda channel: answer_calls(channel, answer)


async def settle() -> None:
    await asyncio.sleep(0.001)


def test_many_questions_get_their_own_answers() -> None:
    waiting: list[asyncio.Future[None]] = []

    async def in_reverse(sender: str, name: str, payload: bytes) -> bytes:
        waiting.append(asyncio.get_running_loop().create_future())
        if len(waiting) == ASKED_AT_ONCE:
            for future in reversed(waiting):
                future.set_result(None)
        await waiting[int(name)]
        return await echo(sender, name, payload)

    async def scenario() -> None:
        async with asking(answering(in_reverse)) as (caller, _, _):
            questions = [(str(number), bytes(number)) for number in range(ASKED_AT_ONCE)]
            answers = await asyncio.gather(*(caller.ask(*question) for question in questions))
            assert answers == [name.encode() + payload for name, payload in questions]

    simulate(scenario())


def test_a_refusal_is_one_questions_only() -> None:
    async def scenario() -> None:
        async with asking(answering(echo)) as (caller, _, _):
            assert await caller.ask("again", bytes(MESSAGE_LIMIT - 5)) == b"again" + bytes(MESSAGE_LIMIT - 5)
            refused, answered = await asyncio.gather(
                caller.ask("refuse", b""), caller.ask("a", b"b"), return_exceptions=True
            )
            assert isinstance(refused, PeerRefusedError)
            assert refused.reason == "not today"
            assert answered == b"ab"
            with pytest.raises(PeerRefusedError, match="exceeds"):
                await caller.ask("too long an answer", bytes(MESSAGE_LIMIT))
            assert await caller.ask("c", b"") == b"c"

    simulate(scenario())


def test_when_the_connection_breaks_every_question_fails_and_every_later_one_at_once() -> None:
    async def never(sender: str, name: str, payload: bytes) -> bytes:
        await asyncio.Event().wait()
        return b""

    async def scenario() -> None:
        async with asking(answering(never)) as (caller, channel, answers):
            questions = [asyncio.create_task(caller.ask("question", b"")) for _ in range(3)]
            await settle()
            answers.cancel()
            channel.close()
            for outcome in await asyncio.gather(*questions, return_exceptions=True):
                assert isinstance(outcome, PeerUnreachableError)
            began = now()
            with pytest.raises(PeerUnreachableError, match="broke"):
                await caller.ask("too late", b"")
            assert now() == began

    simulate(scenario())


def test_an_answering_end_whose_asker_goes_away_stops_answering() -> None:
    stopped = asyncio.Event()

    async def never(sender: str, name: str, payload: bytes) -> bytes:
        try:
            await asyncio.Event().wait()
        finally:
            stopped.set()
        return b""

    async def scenario() -> None:
        async with asking(answering(never)) as (caller, channel, answers):
            question = asyncio.create_task(caller.ask("question", b""))
            await settle()
            channel.close()
            with pytest.raises(EOFError):
                await answers
            assert stopped.is_set()
            with suppress(PeerUnreachableError):
                await question

    simulate(scenario())


def test_who_stops_waiting_leaves_no_half_of_a_question_behind() -> None:
    """Regression: a time limit in the middle of a question made the next one part of it."""

    async def reads_late(channel: Channel) -> None:
        await channel.read_prelude()
        await channel.accept()
        await asyncio.sleep(10.0)
        await answer_on(channel)

    async def answer_on(channel: Channel) -> None:
        while frame := await channel.read_frame_header():
            payload = bytearray(frame[1])
            await channel.read_data(payload)
            question = unpack(_Question, frame[0])
            answer = await echo("", question.name, bytes(payload))
            await channel.send_message(pack(_Verdict(number=question.number, is_answered=True)), answer)

    async def scenario() -> None:
        async with asking(reads_late) as (caller, channel, _):
            for _ in range(3):
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(caller.ask("given up", bytes(MESSAGE_LIMIT - 100)), 1.0)
            assert channel._writer.transport.get_write_buffer_size()
            assert await caller.ask("next", b" one") == b"next one"

    simulate(scenario())


def test_who_asks_and_reads_no_answers_is_cut_off() -> None:
    async def long_answer(sender: str, name: str, payload: bytes) -> bytes:
        return bytes(MESSAGE_LIMIT)

    async def scenario() -> None:
        left, right = await channels()
        answers = asyncio.create_task(answer_calls(right, long_answer))
        await left.send_prelude(b"", 0)
        for number in range(5):
            await left.send_message(pack(_Question(number=number, name="question")), b"")
        began = now()
        with pytest.raises(ERRORS):
            await answers
        assert now() - began == pytest.approx(STALL_TIMEOUT, abs=1.0)
        left.close()

    simulate(scenario())


def test_questions_are_read_while_there_is_memory_for_them() -> None:
    asked: list[str] = []
    go_on = asyncio.Event()

    async def slow(sender: str, name: str, payload: bytes) -> bytes:
        asked.append(name)
        await go_on.wait()
        return b""

    async def scenario() -> None:
        async with asking(answering(slow)) as (caller, _, _):
            payload = bytes(MESSAGE_LIMIT)
            questions = [asyncio.create_task(caller.ask(str(number), payload)) for number in range(9)]
            await settle()
            assert len(asked) == HELD_BYTES // MESSAGE_LIMIT + 1
            go_on.set()
            assert await asyncio.gather(*questions) == [b""] * 9

    simulate(scenario())


@pytest.mark.parametrize("end", ["asks", "answers"])
def test_a_message_out_of_bounds_is_refused_before_it_is_read(end: str) -> None:
    async def scenario() -> None:
        left, right = await channels()
        await left.send_prelude(b"", 0)
        if end == "answers":
            ours = asyncio.create_task(answer_calls(right, echo))
        else:
            await right.read_prelude()
            ours = asyncio.create_task(_Caller(right).run())
        header = pack(_Question(number=1, name="x") if end == "answers" else _Verdict(number=1, is_answered=True))
        await send_raw(left, (len(header)).to_bytes(4, "big") + (MESSAGE_LIMIT + 1).to_bytes(8, "big") + header)
        with pytest.raises(RemoteProtocolError, match=str(MESSAGE_LIMIT + 1)):
            await ours
        left.close()
        right.close()

    simulate(scenario())


@given(st.binary(max_size=100))
def test_garbage_ends_the_conversation_at_either_end(garbage: bytes) -> None:
    async def scenario() -> None:
        left, right = await channels()
        await left.send_prelude(b"", 0)
        await send_raw(left, garbage)
        left.close()
        with pytest.raises(ERRORS):
            await answer_calls(right, echo)
        right.close()
        left, right = await channels()
        await send_raw(left, garbage)
        left.close()
        with pytest.raises(ERRORS):
            await _Caller(right).run()
        right.close()

    simulate(scenario())


def test_an_answer_that_nobody_waits_for_is_nothing() -> None:
    async def scenario() -> None:
        async def answers(channel: Channel) -> None:
            await channel.read_prelude()
            await channel.accept()
            await channel.send_message(pack(_Verdict(number=77, is_answered=True)), b"unasked")
            await channel.read_frame_header()
            await channel.send_message(pack(_Verdict(number=1, is_answered=True)), b"asked")

        async with asking(answers) as (caller, _, _):
            await settle()
            assert await caller.ask("question", b"") == b"asked"

    simulate(scenario())
