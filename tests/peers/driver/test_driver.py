"""The driver around one peer, with a transport and a training side that do what the test says."""

from __future__ import annotations

import asyncio
import logging
import re
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest
from prometheus_client import REGISTRY

from peers.driver import driver as driver_module
from peers.driver import outgoing
from peers.driver import traffic as incoming
from peers.driver.driver import Driver
from peers.driver.outgoing import CHUNKS, StreamHeader
from peers.errors import DilocoPeerError, LocalProtocolError
from peers.log.certificate import Ballot, Phase, certify
from peers.log.header import Header
from peers.messages.averages import Origin
from peers.messages.messages import Message, Part, Propose, Ready, Unread, Vote
from peers.messages.packing import Packer, open_envelope, unpack_message
from peers.messages.rounds import RoundName
from peers.network.channel import Channel
from peers.network.transport import HivemindTransport
from peers.presence.heartbeat import PeerState
from peers.protocol.effects import Apply, OpenRound, ReduceChunk, SendChunk, TokensLost, Train
from peers.protocol.events import (
    ContributionArrived,
    Received,
    ReducedArrived,
    Tick,
)
from peers.protocol.exchange import Exchange
from peers.protocol.parts import Reducers
from peers.protocol.states import State
from peers.transfer.buffers import PayloadBuffers, _RoundBuffers, offer
from peers.transfer.payloads import PAYLOAD, serve_payloads
from peers.values.chunks import ChunkedPayload
from peers.values.identity import Identity
from peers.values.manifest import Amendment
from peers.values.wire import digest_of, unpack
from peers.values.workload import (
    Blocks,
    InnerLoop,
    OnCaptured,
    Progress,
    Reduction,
    Trained,
    captures_nothing,
)
from tests.peers.fakes import BLOCK, FakeTransport, FakeWorkload, at_once
from tests.peers.founder import LEASE, Founder
from tests.peers.logs import LOG, RUN, SETTINGS, STATE, choice_of, votes
from tests.peers.rounds import SIZE, TOKENS, round_name


class SlowChannel:
    """Takes a stream's header, and then nothing more."""

    def __init__(self, streaming: Counter[tuple[str, RoundName]], peer: str) -> None:
        self.streaming = streaming
        self.peer = peer
        self.round: RoundName | None = None

    async def send_prelude(self, header: bytes, length: int) -> None:
        self.round = unpack(StreamHeader, header).round_name
        self.streaming[self.peer, self.round] += 1
        await asyncio.Event().wait()

    async def read_verdict(self) -> None:
        """The header is being read."""
        await asyncio.Event().wait()

    def close(self) -> None:
        if self.round:
            self.streaming[self.peer, self.round] -= 1


class SlowTransport(FakeTransport):
    """Streams never end; messages arrive unless they are said to be too large."""

    addresses = ()

    def __init__(self, rig: Founder) -> None:
        super().__init__()
        self.sent: list[tuple[str, Message | Unread | None]] = []
        self._packer = Packer(rig.peer)
        self.streaming: Counter[tuple[str, RoundName]] = Counter()
        self.too_large = False
        self.dht = SimpleNamespace(expect_answers_within=lambda seconds: None)  # everybody answers at once

    @property
    def streams(self) -> set[tuple[str, RoundName]]:
        """To whom streams are open now, and of which rounds."""
        return {stream for stream, count in self.streaming.items() if count}

    def stream(self, peer_id: str, protocol: str) -> AbstractAsyncContextManager[Channel]:
        @asynccontextmanager
        async def stream() -> AsyncIterator[Channel]:
            assert protocol == CHUNKS
            channel = SlowChannel(self.streaming, peer_id)
            try:
                yield cast(Channel, channel)
            finally:
                channel.close()

        return stream()

    async def on_stream(self, protocol: str, conversation: Callable[[Channel], Awaitable[None]]) -> None:
        raise NotImplementedError

    async def call(self, peer_id: str, name: str, payload: bytes, timeout: float) -> bytes:
        if self.too_large:
            raise LocalProtocolError("a message of 2000000 bytes exceeds the limit of 1048576")
        _, position, _ = open_envelope(RUN, payload)
        self.sent.append((peer_id, unpack_message(RUN, payload, self._packer.log_at(position))))
        return b""

    def messages(self, kind: type[Any]) -> list[tuple[str, Any]]:
        return [(to, message) for to, message in self.sent if isinstance(message, kind)]


class FussyWorkload(FakeWorkload):
    """Quantizes at once; cannot average what contains the block of a spoiler."""

    def __init__(self) -> None:
        super().__init__()
        self.applied: list[bytes] = []
        self.may_end_training = asyncio.Event()
        self.trained = bytes(SIZE.bytes)

    async def run_inner_loop(
        self, work: InnerLoop, on_progress: Callable[[Progress], None], on_captured: OnCaptured = captures_nothing
    ) -> Trained:
        await self.may_end_training.wait()
        return Trained(work.samples, 100, 1.0)

    async def contribution(self, fragment: int = 0, format: int = 0) -> bytes:
        return self.trained

    async def reduce(self, reduction: Reduction) -> bytes:
        if any(bytes(blocks).startswith(b"spoilt") for blocks, _ in reduction.contributions):
            raise DilocoPeerError("the weighted values overflow")
        return bytes(len(reduction.contributions[0][0]))

    async def apply(
        self,
        payload: Blocks,
        index: int,
        fragment: int = 0,
        keeps_work: bool = False,
        counts: bool = True,
        *,
        amendment: Amendment | None = None,
    ) -> None:
        self.applied.append(bytes(payload))


class DriverOf(Driver):
    """Runs the peer of a rig, on the rig's clock."""

    def __init__(self, transport: SlowTransport) -> None:
        self.workload = FussyWorkload()
        super().__init__(Identity.generate(), cast(HivemindTransport, transport), self.workload, SETTINGS, STATE)
        [self.buffers] = self.rounds._buffers
        offer(bytes(SIZE.bytes), self.buffers, lambda chunk, data, format: 1.0)

    def carry_on(self, rig: Founder) -> None:
        """Begin what the rig's last event asked for."""
        for effect in rig.effects:
            if isinstance(effect, OpenRound | SendChunk):
                self._effects.carry_out(effect)
        self.rounds.follow()

    @property
    def exchange(self) -> Exchange:
        assert self.peer.exchange is not None
        return self.peer.exchange

    @property
    def round(self) -> RoundName:
        return self.exchange.name

    @property
    def parts(self) -> dict[str, range]:
        """Who averages which chunks."""
        return Reducers(self.exchange.round).parts

    @property
    def current(self) -> _RoundBuffers:
        current = self.buffers.round(self.round)
        assert current is not None
        return current

    def receive(self, sender: str, chunk: int, data: bytes) -> None:
        """Blocks that passed the door."""
        self.current.contributions[chunk][sender] = data
        self.handle(ContributionArrived(self.round, sender, chunk))

    def receive_average(self, sender: str, chunk: int, data: bytes) -> None:
        digest, origin = self.buffers.store(self.round, chunk, data), Origin(reducer=sender, signature=bytes(64))
        self.handle(ReducedArrived(self.round, sender, chunk, (), digest, origin))

    async def gather(self) -> None:
        """All that the others owe b comes in."""
        for sender, part in self.parts.items():
            for chunk in part:
                if sender == "b":
                    self.receive("a", chunk, bytes(BLOCK))
                    self.receive("c", chunk, bytes(BLOCK))
                else:
                    self.receive_average(sender, chunk, b"%d" % chunk * BLOCK)
        await quiet()
        assert self.exchange.is_whole


@asynccontextmanager
async def driving(rig: Founder, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[DriverOf, SlowTransport]]:
    monkeypatch.setattr(driver_module, "now", lambda: rig.now)
    monkeypatch.setattr(driver_module, "Peer", lambda *settings: rig.peer)
    monkeypatch.setattr(asyncio, "to_thread", at_once)
    for module in (outgoing, incoming):
        monkeypatch.setattr(module, "CLOSING_TIME", 0.0)  # these streams never end properly
    transport = SlowTransport(rig)
    driver = DriverOf(transport)
    async with asyncio.TaskGroup() as driver._tasks:
        driver.carry_on(rig)
        yield driver, transport
        for task in list(driver._running):
            task.cancel()


async def quiet() -> None:
    """Let everything go on until it waits."""
    for _ in range(50):
        await asyncio.sleep(0)


def counted(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(f"diloco_peer_{name}_total", labels) or 0.0


def test_a_contribution_that_has_no_average_is_absent(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Regression: blocks with scales that only the sum could not bear ended every peer that reduced them."""
    before = counted("dropped", what="contribution")

    async def scenario() -> None:
        rig = Founder().exchanging()
        async with driving(rig, monkeypatch) as (driver, _):
            await quiet()
            chunk = driver.parts["b"][0]
            driver.receive("a", chunk, bytes(BLOCK))
            driver.receive("c", chunk, b"spoilt" + bytes(BLOCK - 6))
            await quiet()
            assert driver.exchange.averages.ours[chunk].absent == ("c",)
            assert rig.is_in(State.AVERAGING)

    with caplog.at_level(logging.INFO):
        asyncio.run(scenario())
    assert counted("dropped", what="contribution") == before + 1
    assert "dropped a contribution from peer c: the weighted values overflow" in caplog.text


def test_our_own_unusable_numbers_are_our_own_error(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with driving(Founder().exchanging(), monkeypatch) as (driver, _):
            await quiet()
            driver.buffers.own = b"spoilt! " * (SIZE.bytes // 8)
            for sender in "ac":
                driver.receive(sender, driver.parts["b"][0], bytes(BLOCK))
            await quiet()

    with pytest.raises(ExceptionGroup) as caught:
        asyncio.run(scenario())
    assert "overflow" in str(caught.value.exceptions[0])


def test_streams_end_with_their_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: they went on beside those of the next attempt, for up to an hour."""

    async def scenario() -> None:
        rig = Founder().ready()
        first, second = rig.begin(1), rig.begin(2)
        rig.do(Received("a", first))
        async with driving(rig, monkeypatch) as (driver, transport):
            await quiet()
            assert transport.streams == {("a", first.round.name), ("c", first.round.name)}
            driver.handle(Received("a", second))
            await quiet()
            assert driver.round == second.round.name
            assert transport.streams == {("a", second.round.name), ("c", second.round.name)}

    asyncio.run(scenario())


def test_a_round_ends_in_an_entry_whose_payload_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        rig = Founder().exchanging()
        async with driving(rig, monkeypatch) as (driver, transport):
            await driver.gather()
            ((to, part), *_) = transport.messages(Part)
            assert (to, [averaged.chunk for averaged in part.averages]) == ("a", list(driver.parts["b"]))
            name, outcome = driver.round, driver.exchange.outcome()
            assert outcome is not None
            kept = driver.buffers.kept.get(outcome.payload)
            assert kept is not None
            mine = driver.parts["b"]
            data = b"".join(bytes(BLOCK) if chunk in mine else b"%d" % chunk * BLOCK for chunk in range(SIZE.chunks))
            assert kept.data == data
            header = rig.header(outcome.payload)
            vote_for(driver, header, outcome.marks)
            await quiet()
            assert {vote.choice.phase for _, vote in transport.messages(Vote)} == {Phase.PREPARE, Phase.COMMIT}
            assert driver.workload.applied == [data]
            assert transport.streams == {("a", name), ("c", name)}, "they have not taken our averages yet"

    asyncio.run(scenario())


def vote_for(driver: DriverOf, header: Header, marks: bytes) -> None:
    """a proposes this, and a and c vote for it."""
    ballot, name = driver.round.ballot, driver.round
    propose = Propose(ballot=ballot, header=header, group=(), justify=None, round=name, marks=marks)
    driver.handle(Received("a", propose))
    for phase in Phase:
        choice = choice_of(header, phase=phase)
        for (peer, incarnation), signature in votes(choice, header, [("a", 0), ("c", 0)]).items():
            vote = Vote(position=LOG.position, incarnation=incarnation, choice=choice, signature=signature)
            driver.handle(Received(peer, vote))


def test_what_was_trained_is_quantized_before_the_round_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """All links would be idle meanwhile."""

    async def scenario() -> None:
        rig, quantized = Founder().training(), b"trained!" * (SIZE.bytes // 8)
        async with driving(rig, monkeypatch) as (driver, transport):
            driver.workload.trained = quantized
            driver._effects.carry_out(Train(0, (LEASE,), 10, 0))
            await quiet()
            assert rig.is_in(State.TRAINING)
            driver.workload.may_end_training.set()
            await quiet()
            assert rig.is_in(State.READY)
            driver.workload.trained = b"another!" * (SIZE.bytes // 8)
            ((_, ready), *_) = transport.messages(Ready)
            assert driver.buffers.tree is not None
            assert ready.commitment.root == driver.buffers.tree.root
            driver.handle(Received("a", rig.begin(ours=ready.commitment.contribution)))
            assert driver.buffers.read(driver.round, 0, is_averaged=False) == quantized[:BLOCK]
            await quiet()
            assert transport.streams == {("a", driver.round), ("c", driver.round)}

    asyncio.run(scenario())


def test_a_reduction_of_a_round_that_is_over_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        rig = Founder().exchanging()
        async with driving(rig, monkeypatch) as (driver, _):
            await quiet()
            members = tuple((peer, TOKENS) for peer in "abc")
            driver._effects.carry_out(ReduceChunk(round_name(9, position=LOG.position), 2, members, ()))
            await quiet()
            assert driver.exchange.averages.ours == {}
            assert rig.is_in(State.AVERAGING)

    asyncio.run(scenario())


def test_what_is_in_no_hurry_gives_way_to_a_round_and_not_to_one_that_has_come_to_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Regression: it did, while those who were left waited for others, who could hardly join."""

    async def scenario() -> None:
        rig = Founder().exchanging()
        async with driving(rig, monkeypatch) as (driver, transport):
            assert not transport.no_round.is_set()
            rig.see(PeerState.READY, view=1)
            driver.handle(Tick())
            assert rig.is_in(State.READY), "a quorum has reached the next view (R2)"
            assert transport.no_round.is_set()

    asyncio.run(scenario())


# Payloads of entries that were missed ---------------------------------------------------------------------------------
def some_payload() -> ChunkedPayload:
    chunks = [b"%d" % chunk * BLOCK for chunk in range(SIZE.chunks)]
    return ChunkedPayload(memoryview(b"".join(chunks)), tuple(map(digest_of, chunks)))


async def donor(payload: ChunkedPayload) -> SlowTransport:
    """The way to a peer that keeps this payload."""
    transport = SlowTransport(Founder())
    buffers = PayloadBuffers(FakeWorkload())
    buffers.kept.keep(payload)
    await serve_payloads(transport, {RUN: [buffers]})
    assert PAYLOAD in transport.serve
    return transport


def prepared(rig: Founder, payload: bytes) -> Propose:
    """a proposes again what was prepared, of a round without b."""
    header = rig.header(payload)
    choice = choice_of(header, phase=Phase.PREPARE)
    signers = [("a", 0), ("c", 0)]
    justify = certify(LOG, header, choice, (), votes(choice, header, signers), {})
    assert justify is not None
    ballot = Ballot(view=0, attempt=2)
    return Propose(ballot=ballot, header=header, group=(), justify=justify, round=None)


def test_the_payload_of_a_prepared_entry_is_fetched_from_its_voters(monkeypatch: pytest.MonkeyPatch) -> None:
    before = counted("payloads_fetched")

    async def scenario() -> None:
        rig, payload = Founder().ready(), some_payload()
        async with driving(rig, monkeypatch) as (driver, transport):
            transport.donors["c"] = await donor(payload)
            driver.handle(Received("a", prepared(rig, payload.digest)))
            await quiet()
            assert {vote.choice.phase for _, vote in transport.messages(Vote)} == {Phase.PREPARE}
            assert driver.buffers.kept.get(payload.digest) is not None

    asyncio.run(scenario())
    assert counted("payloads_fetched") == before + 1


def test_voters_that_cannot_be_reached_are_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        rig = Founder().ready()
        async with driving(rig, monkeypatch) as (driver, transport):
            driver.handle(Received("a", prepared(rig, some_payload().digest)))
            await quiet()
            assert transport.messages(Vote) == []

    with caplog.at_level(logging.INFO):
        asyncio.run(scenario())
    lines = [line for line in caplog.messages if line.startswith("could not fetch the payload of entry 0: ")]
    assert {"peer a did not answer", "peer c did not answer"} <= set(re.split(r": |; ", lines[0])), "in any order"


def test_an_entry_whose_payload_is_not_here_is_not_applied(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        rig = Founder().ready()
        async with driving(rig, monkeypatch) as (driver, _):
            driver._effects.carry_out(Apply(rig.header(some_payload().digest)))
            await quiet()

    with pytest.raises(ExceptionGroup) as caught:
        asyncio.run(scenario())
    (error,) = caught.value.exceptions
    assert isinstance(error, LocalProtocolError)
    assert "entry 0 is to be applied, but its payload is not here" in str(error)


def test_what_is_lost_is_counted_and_named(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    before = counted("tokens_lost", what="entries")

    async def scenario() -> None:
        async with driving(Founder(), monkeypatch) as (driver, _):
            driver._effects.carry_out(TokensLost("entries", 300, "our entries from 7 on are not in the lineage of a"))

    with caplog.at_level(logging.INFO):
        asyncio.run(scenario())
    assert counted("tokens_lost", what="entries") == before + 300
    assert "300 trained tokens are lost: our entries from 7 on are not in the lineage of a" in caplog.messages


def test_a_message_too_large_to_be_sent_is_named_and_nothing_ends(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Regression: what others had put into the log could make our messages too large, which ended us."""

    async def scenario() -> None:
        rig = Founder().ready()
        async with driving(rig, monkeypatch) as (driver, transport):
            transport.too_large = True
            rig.now += 2.0
            driver.handle(Tick())
            await quiet()
            assert rig.is_in(State.READY)

    with caplog.at_level(logging.ERROR):
        asyncio.run(scenario())
    assert "cannot send to a: a message of 2000000 bytes exceeds" in caplog.text


def test_it_leaves_though_the_network_never_takes_a_handler(monkeypatch: pytest.MonkeyPatch) -> None:
    """As libp2p's daemon does when it is ended together with us."""

    class DeadTransport(SlowTransport):
        async def on_call(self, name: str, handler: object) -> None:
            await asyncio.Event().wait()

    async def scenario() -> None:
        rig = Founder()
        monkeypatch.setattr(driver_module, "Peer", lambda *settings: rig.peer)
        driver = DriverOf(DeadTransport(rig))
        running = asyncio.create_task(driver.run())
        await quiet()
        driver.leave()
        await asyncio.wait_for(running, 30)

    asyncio.run(scenario())
