"""Chunks of a round: ours go out until they are confirmed, and only what the protocol waits for comes in."""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import REGISTRY

from peers.driver import outgoing
from peers.driver.outgoing import CHUNKS, CLOSING_TIME, StreamHeader
from peers.driver.traffic import ADMISSION_TIMEOUT, Scout, Traffic
from peers.errors import RemoteProtocolError
from peers.messages.averages import Origin
from peers.messages.rounds import Round, RoundName
from peers.network.channel import FRAME, FRAMES_UNDER_WAY, Channel, PeerRefusedError, PeerUnreachableError
from peers.network.throttle import FEWEST, MOST, Caps
from peers.network.transport import HivemindTransport
from peers.protocol.effects import Effect, OpenRound, SendChunk
from peers.protocol.events import (
    BadBlocks,
    ChunkSent,
    ChunksUnsent,
    ContributionArrived,
    ReducedArrived,
)
from peers.protocol.exchange import Exchange, ExchangeEvent
from peers.transfer.averages import ChunkHeader
from peers.transfer.buffers import PayloadBuffers, offer
from peers.values.wire import Buffer, pack, unpack
from tests.peers.fakes import BLOCK, GARBAGE, PROOF, FakeWorkload, trust_all
from tests.peers.network.test_channel import BROKEN, rest_of, send_raw
from tests.peers.network.test_throttle import now, simulate
from tests.peers.rounds import SIZE, InRound, commitment, round_among, round_name

DEADLINE = 60.0  # seconds of simulated time
OWN = b"".join(bytes([chunk]) * BLOCK for chunk in range(SIZE.chunks))
"""What b brings. In a round of a, b and c, a averages the chunks 0 and 1, b 2 and 3, and c 4 and 5."""
FIRST, SECOND = (round_among("abc", each=2, name=round_name(attempt)) for attempt in (1, 2))


async def stream_of(near: str, far: str) -> tuple[Channel, Channel]:
    """The end whose peer is `near`, and the other one."""
    left, right = socket.socketpair()
    return (
        Channel(near, *await asyncio.open_unix_connection(sock=left)),
        Channel(far, *await asyncio.open_unix_connection(sock=right)),
    )


class Member:
    """Another member at the other end of our streams. `answer` says what it thinks of a chunk; or it breaks off."""

    def __init__(self, changed: Callable[[], None]) -> None:
        self.received: list[tuple[RoundName, ChunkHeader, bytes]] = []
        self.opened: list[RoundName] = []
        self.ended: list[RoundName] = []
        self.finished: list[RoundName] = []  # of those, the ones that were ended properly
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.may_open = asyncio.Event()
        self.may_open.set()
        self.answer: Callable[[ChunkHeader], bool] = lambda header: True
        self.refusal: str | None = None
        self._changed = changed

    @property
    def chunks(self) -> list[tuple[int, bool]]:
        return [(header.chunk, header.reduced) for _, header, _ in self.received]

    def has_ended(self, round: RoundName) -> Callable[[], bool]:
        """Whether no stream of this round is open."""
        return lambda: round in self.opened and self.opened.count(round) == self.ended.count(round)

    async def talk(self, channel: Channel) -> None:
        header, _ = await channel.read_prelude()
        round = unpack(StreamHeader, header).round_name
        if self.refusal is not None:
            await channel.refuse(self.refusal)
            return
        await channel.accept()
        self.opened.append(round)
        with suppress(OSError, EOFError):
            await self._take(channel, round)
        self.ended.append(round)
        self._changed()

    async def _take(self, channel: Channel, round: RoundName) -> None:
        while announced := await channel.read_frame_header():
            header = unpack(ChunkHeader, announced[0])
            data = bytearray(announced[1])
            await channel.read_data(data)
            taken = self.answer(header)
            self.received.append((round, header, bytes(data)))
            self._changed()
            await self.may_answer.wait()
            await channel.answer_frame(taken)
            self._changed()
        if not channel._reads.has_ended:
            self.finished.append(round)


class Wire:
    """The streams between b and the others."""

    caps = Caps()

    def __init__(self, changed: Callable[[], None]) -> None:
        self.members = {name: Member(changed) for name in "ac"}
        self.serving: Callable[[Channel], Awaitable[None]]
        self._ends: list[asyncio.Task[None]] = []

    async def on_stream(self, protocol: str, conversation: Callable[[Channel], Awaitable[None]]) -> None:
        assert protocol == CHUNKS
        self.serving = conversation

    @asynccontextmanager
    async def stream(self, peer_id: str, protocol: str) -> AsyncIterator[Channel]:
        assert protocol == CHUNKS
        if peer_id not in self.members:
            raise PeerUnreachableError(peer_id, "no answer in time")
        await self.members[peer_id].may_open.wait()
        near, far = await stream_of(peer_id, "b")
        self._ends.append(asyncio.create_task(self._hold(far, self.members[peer_id].talk)))
        try:
            yield near
        except (RemoteProtocolError, TimeoutError, EOFError, OSError) as error:
            raise PeerUnreachableError(peer_id, str(error)) from error
        finally:
            near.close()

    @asynccontextmanager
    async def from_peer(self, sender: str) -> AsyncIterator[tuple[Channel, asyncio.Task[None]]]:
        """The sender's end of a stream to b, and what becomes of it at b."""
        theirs, ours = await stream_of("b", sender)
        serving = asyncio.create_task(self._hold(ours, self.serving))
        self._ends.append(serving)
        try:
            yield theirs, serving
        finally:
            theirs.close()
            with suppress(RemoteProtocolError, EOFError, OSError, asyncio.CancelledError):
                await serving

    @staticmethod
    async def _hold(channel: Channel, conversation: Callable[[Channel], Awaitable[None]]) -> None:
        try:
            await conversation(channel)
        finally:
            channel.close()

    async def close(self) -> None:
        for end in self._ends:
            end.cancel()
        await asyncio.gather(*self._ends, return_exceptions=True)


class Host:
    """b in a round, with its data on socket pairs."""

    def __init__(self) -> None:
        self.peer = InRound("b")
        self.events: list[ExchangeEvent] = []
        self.wire = Wire(self.notify)
        self.buffers = PayloadBuffers(FakeWorkload())
        me = cast(Any, self)
        self.traffic = Traffic(cast(HivemindTransport, self.wire), FakeWorkload(), [self.buffers], me)
        self._waiting: list[asyncio.Future[None]] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._held_back: list[SendChunk] = []

    @classmethod
    @asynccontextmanager
    async def running(cls, round: Round | None = FIRST) -> AsyncIterator[Host]:
        host = cls()
        if round is not None:
            host.begin(round)
        await host.traffic.serve()
        try:
            async with asyncio.timeout(DEADLINE):
                yield host
        finally:
            for task in host._tasks:
                task.cancel()
            for outcome in await asyncio.gather(*host._tasks, return_exceptions=True):
                assert outcome is None or isinstance(outcome, asyncio.CancelledError), outcome
            await host.wire.close()

    @property
    def exchange(self) -> Exchange:
        assert self.peer.exchange is not None
        return self.peer.exchange

    @property
    def round(self) -> RoundName:
        return self.exchange.name

    @property
    def contributions(self) -> dict[tuple[int, str], Buffer]:
        """What others have sent us to be averaged."""
        current = self.buffers.round(self.round)
        assert current is not None
        return {(chunk, peer): data for chunk, row in current.contributions.items() for peer, data in row.items()}

    def seen(self, kind: type[Any]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    def begin(self, round: Round) -> None:
        self._carry_out(self.peer.begin(round))

    def end(self) -> None:
        """The round is over."""
        self.peer.exchange = None
        self._carry_out([])

    def tick(self, now: float) -> None:
        self._carry_out(self.exchange.tick(now, "abc"))

    def handle(self, event: ExchangeEvent) -> None:
        self.events.append(event)
        self._carry_out(self.peer.handle(event))

    def start(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        self._tasks.append(asyncio.create_task(work))
        return self._tasks[-1]

    async def until(self, condition: Callable[[InRound], bool]) -> None:
        await self.when(lambda: condition(self.peer))

    async def when(self, condition: Callable[[], bool]) -> None:
        """Look again after every event, here or at another member."""
        while not condition():
            self._waiting.append(asyncio.get_running_loop().create_future())
            await self._waiting[-1]

    def notify(self) -> None:
        waiting, self._waiting = self._waiting, []
        for waiter in waiting:
            if not waiter.done():
                waiter.set_result(None)

    def quantized(self) -> None:
        """Our own blocks are ready and go out; until the test says so, they are held back."""
        offer(OWN, self.buffers, lambda chunk, data, format: 1.0)
        for send in self._held_back:
            self.traffic.send(send)
        self._held_back.clear()

    def averaged(self, chunk: int, absent: tuple[str, ...] = ()) -> None:
        """b has averaged a chunk of its part."""
        self.buffers.store(self.round, chunk, b"%d" % chunk * BLOCK)
        self.handle(ReducedArrived(self.round, "b", chunk, absent))

    def _carry_out(self, effects: list[Effect]) -> None:
        """As the driver does it."""
        for effect in effects:
            if isinstance(effect, OpenRound):
                trust_all(self.exchange)
                self.buffers.open(effect.round.name)
                self.traffic.begin(effect.round.name, len(effect.round.peers) - 1)
            elif isinstance(effect, SendChunk) and not effect.reduced and not self.buffers.own:
                self._held_back.append(effect)
            elif isinstance(effect, SendChunk):
                self.traffic.send(effect)
        if self.peer.exchange is None:
            self.buffers.close()
        self.traffic.tidy([self.round] if self.peer.exchange else [])
        self.notify()


def own(host: Host, chunk: int) -> ChunkHeader:
    """What b says of its own blocks."""
    signature = commitment(host.exchange.round, "b").signature
    return ChunkHeader(chunk=chunk, reduced=False, absent=(), proof=host.buffers.proof(chunk), signature=signature)


async def quiet() -> None:
    """Let everything go on until it waits."""
    await asyncio.sleep(0.01)


# Out ------------------------------------------------------------------------------------------------------------
def test_our_own_blocks_go_to_who_reduces_them() -> None:
    async def scenario() -> None:
        async with Host.running() as host:
            host.quantized()
            await host.when(lambda: len(host.seen(ChunkSent)) == 4)
            for name, chunks in (("a", (0, 1)), ("c", (4, 5))):
                received = sorted(host.wire.members[name].received, key=lambda item: item[1].chunk)
                assert received == [(host.round, own(host, chunk), bytes([chunk]) * BLOCK) for chunk in chunks]
            assert set(host.events) == {
                ChunkSent(host.round, peer, chunk, False) for peer, chunk in (("a", 0), ("a", 1), ("c", 4), ("c", 5))
            }
            assert host.exchange.tick(1.0, "abc") == [], "all is confirmed"

    simulate(scenario())


def test_what_we_averaged_goes_to_all_with_the_names_of_the_absent() -> None:
    async def scenario() -> None:
        async with Host.running() as host:
            host.averaged(2, absent=("c",))
            await host.when(lambda: len(host.seen(ChunkSent)) == 2)
            for member in host.wire.members.values():
                averaged = host.exchange.averages.ours[2]
                header = ChunkHeader(chunk=2, reduced=True, absent=("c",), origin=averaged.origin)
                assert member.received == [(host.round, header, b"2" * BLOCK)]

    simulate(scenario())


def test_a_few_streams_carry_all_chunks_of_a_round() -> None:
    async def scenario() -> None:
        async with Host.running() as host:
            host.quantized()
            for chunk in (2, 3):
                host.averaged(chunk)
                await host.when(lambda: len(host.seen(ChunkSent)) % 2 == 0)
            await host.when(lambda: len(host.seen(ChunkSent)) == 8)
            for member in host.wire.members.values():
                assert len(member.received) == 4
                assert len(member.opened) <= FEWEST

    simulate(scenario())


def test_what_hangs_on_one_stream_goes_out_on_another() -> None:
    """Regression: one connection that waited for a lost packet held up the round of all for seconds."""

    async def scenario() -> None:
        async with Host.running() as host:
            host.traffic.knows(1e6, 1e6)
            c, hung = host.wire.members["c"], list[ChunkHeader]()

            def answer_all_but_the_first(header: ChunkHeader) -> bool:
                c.may_answer = asyncio.Event()
                if hung:
                    c.may_answer.set()
                hung.append(header)
                return True

            c.answer = answer_all_but_the_first
            host.quantized()
            await host.when(lambda: len(host.seen(ChunkSent)) == 4)
            assert sorted(c.chunks) == sorted([*((chunk, False) for chunk in (4, 5)), (hung[0].chunk, False)])

    simulate(scenario())


def test_what_hangs_on_the_only_stream_that_was_needed_goes_out_on_another() -> None:
    """Regression: streams that had not had a chunk yet did not look for what hangs."""

    async def scenario() -> None:
        async with Host.running() as host:
            host.traffic.knows(1e6, 1e6)
            c = host.wire.members["c"]

            def answer_all_but_the_first(header: ChunkHeader) -> bool:
                c.may_answer = asyncio.Event()
                if c.received:
                    c.may_answer.set()
                return True

            c.answer = answer_all_but_the_first
            host.averaged(2)
            await host.when(lambda: len(host.seen(ChunkSent)) == 2)
            assert c.chunks == [(2, True), (2, True)]
            before = host.traffic._outgoing[0]._flights["c"].usual
            assert before > 1.0
            host.traffic.begin(host.round, 2)
            assert host.traffic._outgoing[0]._usual["c"] == before, "it is patient from the beginning"

    simulate(scenario())


def test_a_stream_that_breaks_off_is_reported_and_what_it_owed_sent_again() -> None:
    async def scenario() -> None:
        async with Host.running() as host:
            c = host.wire.members["c"]

            def break_off(header: ChunkHeader) -> bool:
                raise EOFError

            c.answer = break_off
            host.quantized()
            await host.when(lambda: sum(len(event.chunks) for event in host.seen(ChunksUnsent)) == 2)
            assert {event.peer for event in host.seen(ChunksUnsent)} == {"c"}
            assert sorted(chunk for event in host.seen(ChunksUnsent) for chunk in event.chunks) == [4, 5]
            c.answer = lambda header: True
            host.tick(1.0)
            await host.when(lambda: len(host.seen(ChunkSent)) == 4)
            assert sorted(c.chunks) == [(4, False), (5, False)]

    simulate(scenario())


def test_what_was_confirmed_before_a_stream_broke_off_is_not_sent_again() -> None:
    async def scenario() -> None:
        async with Host.running() as host:
            a, kept = host.wire.members["a"], list[ChunkHeader]()

            def take_one(header: ChunkHeader) -> bool:
                if kept:
                    raise EOFError
                kept.append(header)
                return True

            a.answer = take_one
            host.quantized()
            await host.when(lambda: bool(host.seen(ChunksUnsent)))
            a.answer = lambda header: True
            host.tick(1.0)
            await host.when(lambda: len(host.seen(ChunkSent)) == 4)
            assert Counter(a.chunks) == {(0, False): 1, (1, False): 1}

    simulate(scenario())


def test_a_member_that_refuses_or_cannot_be_reached_is_tried_again() -> None:
    async def scenario() -> None:
        async with Host.running() as host:
            host.wire.members["a"].refusal = "this peer is not in round 1.1 with the sender"
            c = host.wire.members.pop("c")
            host.quantized()
            await host.when(lambda: sum(len(event.chunks) for event in host.seen(ChunksUnsent)) == 4)
            assert host.seen(ChunkSent) == []
            host.wire.members["a"].refusal, host.wire.members["c"] = None, c
            host.tick(1.0)
            await host.when(lambda: len(host.seen(ChunkSent)) == 4)

    simulate(scenario())


def test_a_chunk_that_a_member_has_no_use_for_yet_is_sent_again() -> None:
    async def scenario() -> None:
        async with Host.running() as host:
            c = host.wire.members["c"]
            c.answer = lambda header: header.chunk != 5
            host.quantized()
            await host.when(lambda: len(host.seen(ChunkSent)) == 3 and bool(host.seen(ChunksUnsent)))
            assert host.seen(ChunksUnsent) == [ChunksUnsent(host.round, "c", (5,), False)]
            c.answer = lambda header: True
            host.tick(1.0)
            await host.when(lambda: len(host.seen(ChunkSent)) == 4)
            assert Counter(c.chunks) == {(4, False): 1, (5, False): 2}

    simulate(scenario())


def test_streams_end_with_their_round() -> None:
    """Regression: they went on beside those of the next attempt, for up to an hour."""

    async def scenario() -> None:
        async with Host.running() as host:
            round = host.round
            host.quantized()
            await host.when(lambda: len(host.seen(ChunkSent)) == 4)
            assert all(not member.ended for member in host.wire.members.values())
            host.end()
            for member in host.wire.members.values():
                await host.when(member.has_ended(round))
            host.traffic.send(SendChunk(round, "a", 0, False))
            await quiet()
            assert len(host.wire.members["a"].received) == 2, "nothing more goes out"

    simulate(scenario())


@pytest.mark.parametrize("is_whole", [True, False])
def test_averages_that_a_slow_member_lacks_are_given_after_the_round(is_whole: bool) -> None:
    """Regression: the last of four members fetched the whole payload again, for a few chunks that it lacked."""

    async def scenario() -> None:
        async with Host.running() as host:
            round, slow, quick = host.round, host.wire.members["a"], host.wire.members["c"]
            slow.may_open.clear()
            host.quantized()
            for chunk in (2, 3):
                host.averaged(chunk)
            await host.when(lambda: len(quick.received) == 4)
            if is_whole:
                for chunk in (0, 1, 4, 5):
                    host.buffers.store(round, chunk, b"%d" % chunk * BLOCK)
                host.buffers.assemble(round)
            host.end()
            slow.may_open.set()
            if is_whole:
                await host.when(slow.has_ended(round))
            await asyncio.wait(host._tasks)
            assert sorted(slow.chunks) == ([(2, True), (3, True)] if is_whole else [])
            assert all(data == b"%d" % header.chunk * BLOCK for _, header, data in slow.received)

    simulate(scenario())


def test_averages_are_given_until_the_next_round_begins() -> None:
    async def scenario() -> None:
        async with Host.running() as host:
            slow = host.wire.members["a"]
            slow.may_open.clear()
            for chunk in range(6):
                host.buffers.store(host.round, chunk, b"%d" % chunk * BLOCK)
            host.averaged(2)
            host.buffers.assemble(host.round)
            host.end()
            host.begin(SECOND)
            slow.may_open.set()
            await quiet()
            assert slow.received == []

    simulate(scenario())


def test_streams_end_properly_with_their_round_so_that_others_can_follow() -> None:
    async def scenario() -> None:
        async with Host.running() as host:
            round = host.round
            host.quantized()
            await host.when(lambda: len(host.seen(ChunkSent)) == 4)
            began = now()
            host.end()
            for member in host.wire.members.values():
                await host.when(member.has_ended(round))
                assert member.finished == member.ended
            assert now() - began < CLOSING_TIME

    simulate(scenario())


def test_who_does_not_let_a_stream_end_is_cut_off() -> None:
    async def scenario() -> None:
        async with Host.running() as host:
            a, c = host.wire.members["a"], host.wire.members["c"]
            c.may_answer.clear()
            host.quantized()
            await host.when(lambda: len(host.seen(ChunkSent)) == 2 and len(c.received) > 0)
            began = now()
            host.end()
            await asyncio.wait(host._tasks)
            assert now() - began == pytest.approx(CLOSING_TIME, abs=0.1)
            assert a.finished
            assert not c.finished
            c.may_answer.set()

    simulate(scenario())


def test_one_of_many_streams_that_breaks_leaves_the_others_their_work() -> None:
    """Regression: all that waited for the member was taken for unsent, and the others had nothing to do."""
    count = 100

    async def scenario() -> None:
        async with Host.running() as host:
            a, broken = host.wire.members["a"], list[ChunkHeader]()

            def break_one(header: ChunkHeader) -> bool:
                if not broken:
                    broken.append(header)
                    raise EOFError
                return True

            a.answer = break_one
            offer(OWN, host.buffers, lambda chunk, data, format: 1.0)
            for _ in range(count):
                host.traffic.send(SendChunk(host.round, "a", 0, False))
            await host.when(lambda: len(host.seen(ChunkSent)) + unsent(host) >= count)
            assert 1 <= unsent(host) <= FRAMES_UNDER_WAY + 1

    def unsent(host: Host) -> int:
        return sum(len(event.chunks) for event in host.seen(ChunksUnsent))

    simulate(scenario())


def test_streams_to_all_members_together_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outgoing, "STREAMS", 10)

    async def scenario() -> None:
        async with Host.running() as host:
            host.traffic.uplink.lanes.count = MOST
            offer(OWN, host.buffers, lambda chunk, data, format: 1.0)
            host.traffic.send(SendChunk(host.round, "a", 0, False))
            assert len(host.traffic._outgoing[0]._senders["a"]) == SIZE.chunks, "no more than there are chunks"
            host.traffic.send(SendChunk(host.round, "c", 4, False))
            assert len(host.traffic._outgoing[0]._senders["c"]) == 5
            monkeypatch.setattr(outgoing, "STREAMS", 1)
            host.traffic._outgoing[0]._senders["c"].clear()
            host.traffic.send(SendChunk(host.round, "c", 4, False))
            assert len(host.traffic._outgoing[0]._senders["c"]) == FEWEST

    simulate(scenario())


def test_streams_of_one_round_carry_nothing_of_the_next() -> None:
    async def scenario() -> None:
        async with Host.running() as host:
            first = host.round
            host.quantized()
            await host.when(lambda: len(host.seen(ChunkSent)) == 4)
            host.begin(SECOND)
            assert host.round != first
            host.quantized()
            await host.when(lambda: len(host.seen(ChunkSent)) == 8)
            for member in host.wire.members.values():
                assert Counter(round for round, _, _ in member.received) == {first: 2, host.round: 2}
                await host.when(member.has_ended(first))
                assert not member.has_ended(host.round)()

    simulate(scenario())


# In -------------------------------------------------------------------------------------------------------------
class Sender:
    """Another member's end of a stream to b."""

    def __init__(self, channel: Channel, round: RoundName) -> None:
        self.channel = channel
        self.round = round

    async def open(self) -> None:
        """Raises: PeerRefusedError."""
        await self.channel.send_prelude(pack(StreamHeader(round_name=self.round)), 0)
        await self.channel.read_verdict()

    async def send(self, chunk: int, data: bytes, reduced: bool = False, absent: tuple[str, ...] = ()) -> bool:
        """Whether b is done with the chunk."""
        proof = None if reduced else PROOF
        origin = Origin(reducer="aabbcc"[chunk], signature=bytes(64)) if reduced else None
        header = ChunkHeader(chunk=chunk, reduced=reduced, absent=absent, proof=proof, origin=origin)
        await self.channel.send_frame(pack(header), data)
        return await self.channel.read_answer()


@asynccontextmanager
async def sending(host: Host, sender: str, round: RoundName | None = None) -> AsyncIterator[Sender]:
    async with host.wire.from_peer(sender) as (channel, _):
        one = Sender(channel, round or host.round)
        await one.open()
        yield one


def test_blocks_that_are_waited_for_come_in_once() -> None:
    async def scenario() -> None:
        async with Host.running() as host, sending(host, "a") as a:
            assert await a.send(2, b"A" * BLOCK)
            assert host.events == [ContributionArrived(host.round, "a", 2)]
            assert await a.send(2, b"another!" * (BLOCK // 8)), "it needs not come again"
            assert host.contributions == {(2, "a"): b"A" * BLOCK}
            assert len(host.events) == 1

    simulate(scenario())


def test_averages_come_from_any_member_and_once() -> None:
    async def scenario() -> None:
        async with Host.running() as host, sending(host, "a") as a, sending(host, "c") as c:
            assert await a.send(4, b"4" * BLOCK, reduced=True)
            assert await c.send(5, b"5" * BLOCK, reduced=True)
            assert host.events == [ReducedArrived(host.round, "a", 4, ()), ReducedArrived(host.round, "c", 5, ())]
            assert host.buffers.read(host.round, 4, is_averaged=True) == b"4" * BLOCK
            assert await c.send(4, b"5" * BLOCK, reduced=True), "it needs not come again"
            assert host.buffers.read(host.round, 4, is_averaged=True) == b"4" * BLOCK
            assert len(host.events) == 2

    simulate(scenario())


@pytest.mark.parametrize("chunk", [0, 5], ids=["its own part", "another's part"])
def test_blocks_that_nobody_waits_for_are_not_stored(chunk: int) -> None:
    async def scenario() -> None:
        async with Host.running() as host, sending(host, "a") as a:
            assert not await a.send(chunk, b"x" * BLOCK)
            assert (host.contributions, host.events) == ({}, [])

    simulate(scenario())


def test_a_stream_of_a_stranger_is_refused_at_once() -> None:
    async def scenario() -> None:
        async with Host.running() as host:
            began = now()
            with pytest.raises(PeerRefusedError, match="not in round"):
                async with sending(host, "z"):
                    pytest.fail("it was let in")
            assert now() - began < 1.0

    simulate(scenario())


def test_a_stream_of_another_round_is_refused_when_it_does_not_begin_in_time() -> None:
    async def scenario() -> None:
        async with Host.running() as host:
            began = now()
            with pytest.raises(PeerRefusedError, match="not in round"):
                async with sending(host, "a", round_name(7)):
                    pytest.fail("it was let in")
            assert ADMISSION_TIMEOUT <= now() - began < ADMISSION_TIMEOUT + 1.0

    simulate(scenario())


def test_a_member_may_be_ahead_of_us_in_beginning_a_round() -> None:
    """Its leader may have told it first; what it sends is neither lost nor stored before."""

    async def scenario() -> None:
        async with Host.running(None) as host:

            async def early() -> bool:
                async with sending(host, "c", FIRST.name) as c:
                    return await c.send(2, b"C" * BLOCK)

            ahead = asyncio.create_task(early())
            await quiet()
            assert not ahead.done()
            host.begin(FIRST)
            assert await ahead
            assert host.contributions == {(2, "c"): b"C" * BLOCK}

    simulate(scenario())


def test_a_stream_of_an_earlier_round_is_cut_off_when_it_does_not_end() -> None:
    async def scenario() -> None:
        async with Host.running() as host:
            first = host.round
            async with host.wire.from_peer("a") as (channel, serving):
                await Sender(channel, first).open()
                began = now()
                host.end()
                await asyncio.wait([serving])
                assert now() - began == pytest.approx(CLOSING_TIME, abs=0.1)

    simulate(scenario())


def test_a_connection_that_goes_on_to_the_next_round_is_not_cut_off_with_the_last() -> None:
    """Regression: the task that served a stream of the last round was cancelled, whatever it served by then."""

    async def scenario() -> None:
        async with Host.running() as host:
            first = host.round
            ends = [await stream_of("b", "a") for _ in range(2)]

            async def connection() -> None:
                for _, ours in ends:
                    await host.wire.serving(ours)

            serving = asyncio.create_task(connection())
            one = Sender(ends[0][0], first)
            await one.open()
            host.end()
            await one.channel.send_last_frame()
            host.begin(SECOND)
            other = Sender(ends[1][0], host.round)
            await other.open()
            await asyncio.sleep(2 * CLOSING_TIME)
            assert not serving.done()
            assert await other.send(2, b"A" * BLOCK)
            await other.channel.send_last_frame()
            await serving
            for near, far in ends:
                near.close()
                far.close()

    simulate(scenario())


def test_garbage_is_dropped_and_its_sender_named() -> None:
    async def scenario() -> None:
        async with Host.running() as host, sending(host, "a") as a, sending(host, "c") as c:
            assert not await a.send(2, GARBAGE)
            assert not await c.send(4, GARBAGE, reduced=True)
            mine, theirs = host.seen(BadBlocks)
            assert mine.evidence.data == GARBAGE
            assert replace(mine, evidence=None) == BadBlocks(host.round, "a", 2, "code -128")
            assert theirs == BadBlocks(host.round, "c", 4, "code -128", reduced=True)
            assert host.contributions == {}
            assert host.buffers.read(host.round, 4, is_averaged=True) == bytes(BLOCK)
            assert await a.send(2, b"A" * BLOCK), "it comes too late"
            assert host.contributions == {}

    simulate(scenario())


@pytest.mark.parametrize(
    ("chunk", "length", "reason"),
    [
        (SIZE.chunks, BLOCK, f"no chunk {SIZE.chunks}"),
        (2**61, BLOCK, "no chunk"),
        (2, BLOCK + 1, f"has {BLOCK + 1} bytes, not {BLOCK}"),
        (2, BLOCK - 1, f"not {BLOCK}"),
        (2, 0, f"not {BLOCK}"),
        (2, 2**40, f"not {BLOCK}"),
    ],
    ids=["one chunk more", "far away", "one byte more", "one byte less", "nothing", "a terabyte"],
)
def test_frames_out_of_bounds_end_the_stream_before_data_is_read(chunk: int, length: int, reason: str) -> None:
    async def scenario() -> None:
        async with Host.running() as host, host.wire.from_peer("a") as (channel, serving):
            await Sender(channel, host.round).open()
            header = pack(ChunkHeader(chunk=chunk, reduced=False, absent=()))
            await send_raw(channel, FRAME.pack(len(header), length) + header)
            with pytest.raises(RemoteProtocolError, match=reason) as caught:
                await serving
            assert caught.value.peer == "a"
            assert (host.contributions, host.events) == ({}, [])

    simulate(scenario())


@pytest.mark.parametrize("at_stream", [True, False], ids=["of the stream", "of a frame"])
def test_a_header_that_is_none_is_the_senders_mistake(at_stream: bool) -> None:
    async def scenario() -> None:
        async with Host.running() as host, host.wire.from_peer("a") as (channel, serving):
            if at_stream:
                await channel.send_prelude(b"nonsense", 0)
            else:
                await Sender(channel, host.round).open()
                await send_raw(channel, FRAME.pack(8, BLOCK) + b"nonsense")
            with pytest.raises(RemoteProtocolError, match="peer a: "):
                await serving

    simulate(scenario())


@given(st.binary(max_size=200), st.booleans())
def test_garbage_stores_nothing(garbage: bytes, is_open: bool) -> None:
    async def scenario() -> None:
        async with Host.running() as host, host.wire.from_peer("a") as (channel, serving):
            if is_open:
                await Sender(channel, host.round).open()
            await send_raw(channel, garbage)
            channel.close()
            (outcome,) = await asyncio.gather(serving, return_exceptions=True)
            assert outcome is None or isinstance(outcome, BROKEN)
            assert (host.contributions, host.events) == ({}, [])

    simulate(scenario())


def test_a_member_cannot_take_memory_by_opening_many_streams() -> None:
    """Regression: a member that pushed one part a thousand times at once took a thousand times its memory."""

    async def scenario() -> None:
        async with Host.running() as host:
            let_in = list[Channel]()
            try:
                for _ in range(2 * MOST):
                    theirs, ours = await stream_of("b", "a")
                    host.wire._ends.append(asyncio.create_task(Wire._hold(ours, host.wire.serving)))
                    await Sender(theirs, host.round).open()
                    let_in.append(theirs)
            except PeerUnreachableError:
                pass
            finally:
                for channel in let_in:
                    channel.close()
            assert len(let_in) <= MOST

    simulate(scenario())


def test_streams_that_come_in_end_with_their_round() -> None:
    async def scenario() -> None:
        async with Host.running() as host, host.wire.from_peer("a") as (channel, serving):
            await Sender(channel, host.round).open()
            host.end()
            with pytest.raises(asyncio.CancelledError):
                await serving
            assert await rest_of(channel) == b""

    simulate(scenario())


def test_a_link_is_measured_both_ways() -> None:
    def counted() -> list[float]:
        directions = ("sent", "received")
        return [REGISTRY.get_sample_value("diloco_peer_round_bytes_total", {"direction": d}) or 0 for d in directions]

    async def scenario() -> None:
        before = counted()
        async with Host.running() as host, sending(host, "a") as a:
            assert host.traffic.rate == 0
            host.quantized()
            await host.when(lambda: len(host.seen(ChunkSent)) == 4)
            assert host.traffic.rate == 0, "nothing has come in yet"
            assert await a.send(2, b"A" * BLOCK)
            assert host.traffic.rate > 1
            sent = sum(
                host.buffers.chunk_bytes(said.chunk)[1] - host.buffers.chunk_bytes(said.chunk)[0]
                for said in host.seen(ChunkSent)
            )
            assert (host.traffic.uplink.sent_bytes, host.traffic.received_bytes) == (sent, BLOCK)
            assert [now - then for now, then in zip(counted(), before, strict=True)] == [sent, BLOCK], "for Prometheus"
            host.wire.caps = Caps(upload=1.0)
            assert host.traffic.rate == 1, "more than the owner allows, the link does not carry"

    simulate(scenario())


def test_a_link_is_not_taken_for_that_of_a_peer_with_a_thin_one() -> None:
    """Regression: a member that had measured with the one thin uplink of its swarm was dealt nothing to average."""
    rates = {"thin": (6e6, 6e5), "b": (1e7, 9e6), "c": (9e6, 1e7), "lies": (1e12, 1e12)}
    known = list[tuple[float, float]]()

    @asynccontextmanager
    async def stream(peer: str, what: str) -> AsyncIterator[str]:
        if peer == "gone":
            raise PeerUnreachableError(peer, "it does not answer")
        yield peer

    async def ask(channel: Any) -> tuple[float, float]:
        return rates[channel]

    async def scenario() -> None:
        transport: Any = SimpleNamespace(no_round=asyncio.Event(), stream=stream)
        traffic: Any = SimpleNamespace(knows=lambda *rates: known.append(rates))
        scout = Scout(transport, traffic, cast(Any, None))
        scout._rater.ask = ask  # type: ignore[method-assign]
        await scout._measure(["thin", "b", "c"])
        await scout._measure(["gone", "thin"])
        await scout._measure(["b", "lies", "c"])
        await scout._measure(["gone"])

    simulate(scenario())
    assert known == [(9e6, 9e6), (6e6, 6e5), (1e7, 1e7)]
