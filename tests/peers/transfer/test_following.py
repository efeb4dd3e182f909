"""Following a run's log: a snapshot first, then what came since, from whoever has it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace

import pytest

from peers.errors import SwarmUnreachableError
from peers.log.header import Header
from peers.log.settings import RunSettings
from peers.log.state import LogState
from peers.network.channel import RefusalError
from peers.presence.heartbeat import Heartbeat, PeerState
from peers.transfer.buffers import PayloadBuffers
from peers.transfer.following import CannotFollowError, Following
from peers.transfer.lineage_fetch import serve_headers
from peers.transfer.payloads import PAYLOAD, serve_payloads
from peers.transfer.snapshots import Snapshot, serve_snapshots
from peers.values.chunks import ChunkedPayload, chunk_digests, digest_of_chunks, digest_of_state
from peers.values.identity import Identity
from peers.values.leases import SampleRange
from peers.values.manifest import Amendment
from peers.values.signed_heads import SignedHead, SignedHeads
from peers.values.wire import digest_of, pack
from peers.values.workload import Blocks
from tests.peers.fakes import BLOCK, Clock, FakeTransport, FakeWorkload
from tests.peers.heartbeats import beat
from tests.peers.logs import LOG, RUN, SETTINGS, chain_of, member, next_header
from tests.peers.rounds import SIZE
from tests.simulator.simulated_keys import SimulatedKeys

GENESIS = bytes(32)
NO_AMENDMENTS: Mapping[int, Amendment] = {}
UNSIGNED = replace(SETTINGS, timing=replace(SETTINGS.timing, partition_grace=0.0))
"""Nobody signs the entries of these runs, and nobody waits for signatures."""


def payload(index: int, lineage: bytes) -> ChunkedPayload:
    chunks = [(b"%d %s %d;" % (index, lineage, chunk)).ljust(BLOCK) for chunk in range(SIZE.chunks)]
    return ChunkedPayload(memoryview(b"".join(chunks)), tuple(map(digest_of, chunks)))


def after(state: bytes, payload: ChunkedPayload, amendment: Amendment | None = None) -> bytes:
    return digest_of(state + payload.digest + (pack(amendment) if amendment else b""))


class Run:
    """Some entries, with the logs, payloads and states that they make."""

    def __init__(
        self,
        entries: int,
        lineage: bytes = b"",
        tokens: int = 100,
        log: LogState = LOG,
        amendments: Mapping[int, Amendment] = NO_AMENDMENTS,
    ) -> None:
        self.logs, self.states, self.payloads = [log], [GENESIS], list[ChunkedPayload]()
        for index in range(entries):
            log, made = self.logs[-1], payload(index, lineage)
            roster = [member("a", *self._samples(log), tokens)]
            self.payloads.append(made)
            self.logs.append(log.append(next_header(log, roster, made.digest, amendment=amendments.get(index))))
            self.states.append(after(self.states[-1], made, log.amendment))

    @staticmethod
    def _samples(log: LogState) -> tuple[int, int]:
        (samples,) = log.leases.get("a", (SampleRange(0, 20),))
        return samples.start, samples.stop

    @property
    def headers(self) -> list[Header]:
        return [log.last for log in self.logs if log.last is not None]

    def snapshot(self, index: int) -> Snapshot:
        digests = chunk_digests([self.states[index]])
        return Snapshot(self.logs[index].last, digest_of_chunks(digests), digests, memoryview(self.states[index]))


class Donor:
    """Is at the end of a run, froze its state at one entry, and keeps the payloads of the last few."""

    def __init__(self, run: Run, frozen: int, kept: int = 1000) -> None:
        self.run = run
        self.frozen = run.snapshot(frozen)
        self.transport = FakeTransport()
        self.buffers = PayloadBuffers(FakeWorkload(), 1 << 30)
        for one in run.payloads[len(run.payloads) - min(kept, len(run.payloads)) :]:
            self.buffers.kept.keep(one)

    def is_member(self, peer: str) -> bool:
        return False

    async def newest(self, least: int) -> Snapshot:
        if least > self.frozen.index:
            if least >= len(self.run.logs):
                raise RefusalError(f"outer step {least} is not here yet")
            self.frozen = self.run.snapshot(len(self.run.logs) - 1)
        return self.frozen

    def held(self, head: bytes) -> Snapshot | None:
        return self.frozen if head == LOG.at(self.frozen.last).position.head else None

    async def serve(self) -> FakeTransport:
        await serve_snapshots(self.transport, {RUN: self})
        await serve_headers(self.transport, {RUN: chain_of(self.run.headers, self.run.logs[0]).stretch})
        await serve_payloads(self.transport, {RUN: [self.buffers]})
        return self.transport


class FollowedWorkload(FakeWorkload):
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
        chunks = [digest_of(payload[start : start + BLOCK]) for start in range(0, len(payload), BLOCK)]
        self.state = after(self.state, ChunkedPayload(memoryview(payload), tuple(chunks)), amendment)


class Swarm(FakeTransport):
    """What a follower sees of the swarm."""

    def __init__(self, settings: RunSettings = UNSIGNED) -> None:
        super().__init__("follower")
        self.beats: dict[str, Heartbeat] = {}
        self.connected: list[str] = []
        self.workload = FollowedWorkload(GENESIS)
        self.following = Following(self, self.workload, settings)

    async def add(self, name: str, donor: Donor, state: PeerState = PeerState.TRAINING) -> Donor:
        self.donors[name] = await donor.serve()
        log, digest = donor.run.logs[-1], donor.run.snapshot(len(donor.run.logs) - 1).state_digest
        self.beats[name] = beat(name, log, state, state_digest=digest)
        return donor

    async def connect(self, peer_id: str, addresses: tuple[str, ...]) -> bool:
        self.connected.append(peer_id)
        return True

    async def heartbeats(self, run_id: str) -> list[Heartbeat]:
        assert run_id == RUN
        return list(self.beats.values())

    def assert_is_at(self, run: Run, index: int) -> None:
        assert self.following.log == run.logs[index]
        assert self.workload.state == run.states[index]


def test_a_snapshot_and_then_entry_after_entry() -> None:
    async def scenario() -> None:
        swarm, run = Swarm(), Run(6)
        for name in "ab":
            await swarm.add(name, Donor(run, frozen=4))
        await swarm.following.begin()
        swarm.assert_is_at(run, 4)
        assert swarm.following.state_digest == digest_of_state([run.states[4]])
        for index in (5, 6):
            assert await swarm.following.advance() == (run.logs[index].last, digest_of_state([run.states[index]]))
            swarm.assert_is_at(run, index)
        assert await swarm.following.advance() is None
        assert sorted(swarm.connected) == ["a", "b"], "once each"

    asyncio.run(scenario())


@pytest.mark.parametrize("frozen", [1, 3, 4])
def test_a_follower_steps_with_what_the_log_amends(frozen: int) -> None:
    """Also one that begins with a snapshot in which an amendment is in force."""
    organiser = Identity.generate()
    settings = replace(UNSIGNED, organiser=organiser.peer_id)
    signed = {index: Amendment.sign(RUN, index, b"%g" % (0.4 / index), organiser) for index in (2, 4)}
    run = Run(7, log=settings.empty_log, amendments=signed)

    async def scenario() -> None:
        swarm = Swarm(settings)
        await swarm.add("a", Donor(run, frozen))
        await swarm.following.begin()
        for index in range(frozen + 1, 8):
            assert await swarm.following.advance() is not None
            swarm.assert_is_at(run, index)
        assert swarm.following.log.amendment == signed[4]

    asyncio.run(scenario())


def test_who_joins_or_leaves_has_nothing_to_give() -> None:
    async def scenario() -> None:
        swarm = Swarm()
        for state in (PeerState.JOINING, PeerState.LEAVING):
            await swarm.add(state, Donor(Run(2), frozen=2), state)
        with pytest.raises(SwarmUnreachableError, match="no peer trains in the run tiny now"):
            await swarm.following.begin()
        run = Run(3)
        await swarm.add("archive", Donor(run, frozen=2), PeerState.ARCHIVING)
        await swarm.following.begin()
        swarm.assert_is_at(run, 2)

    asyncio.run(scenario())


def test_the_heaviest_lineage_is_followed() -> None:
    async def scenario() -> None:
        swarm, light, heavy = Swarm(), Run(5, b"light", 10), Run(4, b"heavy", 100)
        for name in "abc":
            await swarm.add(name, Donor(light, frozen=4))
        await swarm.add("d", Donor(heavy, frozen=3))
        await swarm.following.begin()
        swarm.assert_is_at(heavy, 3)
        await swarm.following.advance()
        swarm.assert_is_at(heavy, 4)
        assert await swarm.following.advance() is None, "the longer lineage is the lighter one"

    asyncio.run(scenario())


def test_who_does_not_answer_or_lies_is_passed_over() -> None:
    async def lies(name: str, header: bytes, data: bytearray) -> bytearray:
        data[0] ^= 1
        return data

    async def scenario() -> None:
        swarm, run = Swarm(), Run(4)
        (await swarm.add("z", Donor(run, frozen=3))).transport.meddle = lies
        swarm.beats["gone"] = beat("gone", run.logs[-1])
        await swarm.add("a", Donor(run, frozen=3))
        await swarm.following.begin()
        await swarm.following.advance()
        swarm.assert_is_at(run, 4)

    asyncio.run(scenario())


def test_nobody_gives_a_state() -> None:
    async def scenario() -> None:
        swarm, run = Swarm(), Run(4)
        swarm.beats["gone"] = beat("gone", run.logs[-1])
        with pytest.raises(SwarmUnreachableError, match="no peer gave its state: gone: peer gone did not answer"):
            await swarm.following.begin()

    asyncio.run(scenario())


def test_payloads_that_nobody_keeps_end_it_where_it_is() -> None:
    async def scenario() -> None:
        swarm, run = Swarm(), Run(6)
        await swarm.add("a", Donor(run, frozen=1, kept=2))
        await swarm.following.begin()
        with pytest.raises(SwarmUnreachableError, match=r"what follows outer step 1: a: peer a refused.*not kept here"):
            await swarm.following.advance()
        swarm.assert_is_at(run, 1)
        await swarm.following.begin(least=2)
        swarm.assert_is_at(run, 6)

    asyncio.run(scenario())


def test_a_lineage_that_was_left_ends_it_too() -> None:
    async def scenario() -> None:
        swarm, light, heavy = Swarm(), Run(3, b"light", 10), Run(5, b"heavy", 100)
        await swarm.add("a", Donor(light, frozen=3))
        await swarm.following.begin()
        swarm.beats.clear()
        await swarm.add("b", Donor(heavy, frozen=5))
        with pytest.raises(CannotFollowError, match="b: entry 3: its previous does not follow") as caught:
            await swarm.following.advance()
        assert caught.value.least == 0
        swarm.assert_is_at(light, 3)

    asyncio.run(scenario())


@pytest.mark.parametrize("heaviest", ["ours", "theirs"])
def test_the_heaviest_says_from_where_on_a_snapshot_leads_further(heaviest: str) -> None:
    """Were the others to say so, it might be one that is older than what is here, again and again."""

    async def scenario() -> None:
        swarm, first = Swarm(), Run(2, b"ours", 60)
        await swarm.add("a", Donor(first, frozen=2))
        await swarm.following.begin()
        ours, theirs = Run(5, b"ours", 60), Run(5, b"theirs", 90)
        await swarm.add("a", Donor(ours, frozen=2, kept=0))
        await swarm.add("b", Donor(theirs, frozen=2))
        swarm.beats["a"] = beat("a", ours.logs[5], lineage_tokens=10**6 * (heaviest == "ours") + 300)
        with pytest.raises(CannotFollowError, match="what follows outer step 2") as caught:
            await swarm.following.advance()
        assert caught.value.least == (3 if heaviest == "ours" else 0)

    asyncio.run(scenario())


def test_a_lineage_that_is_heavier_though_not_longer() -> None:
    async def scenario() -> None:
        swarm, light, heavy = Swarm(), Run(3, b"light", 10), Run(3, b"heavy", 100)
        await swarm.add("a", Donor(light, frozen=3))
        await swarm.following.begin()
        await swarm.add("b", Donor(heavy, frozen=2))
        with pytest.raises(CannotFollowError, match="more training tokens in no more outer steps") as caught:
            await swarm.following.advance()
        await swarm.following.begin(caught.value.least)
        swarm.assert_is_at(heavy, 2)

    asyncio.run(scenario())


def test_a_payload_that_nobody_keeps_is_asked_for_once_of_each() -> None:
    async def scenario() -> None:
        swarm, run = Swarm(), Run(3)
        for name in "abc":
            await swarm.add(name, Donor(run, frozen=2, kept=0))
        await swarm.following.begin()
        swarm.pulls.clear()
        with pytest.raises(CannotFollowError):
            await swarm.following.advance()
        assert sorted(donor for donor, name, _ in swarm.pulls if name == PAYLOAD) == ["a", "b", "c"]

    asyncio.run(scenario())


def test_who_comes_back_from_elsewhere_is_connected_to_again() -> None:
    async def scenario() -> None:
        swarm, run = Swarm(), Run(3)
        await swarm.add("a", Donor(run, frozen=3))
        for addresses in (("/ip4/192.0.2.2/tcp/1",), ("/ip4/192.0.2.2/tcp/2",), ("/ip4/192.0.2.2/tcp/2",)):
            swarm.beats["a"] = beat("a", run.logs[3], addresses=addresses)
            await swarm.following.donors.live()
        assert swarm.connected == ["a", "a"]

    asyncio.run(scenario())


# Signed heads ---------------------------------------------------------------------------------------------------
def signed(run: Run, index: int) -> SignedHeads:
    head = SignedHead.sign(RUN, index, run.logs[index].position.head, "z", SimulatedKeys("z"))
    return SignedHeads(RUN, ("z",)).with_heads([head])


def test_of_two_foundings_the_signed_one_is_followed() -> None:
    async def scenario() -> None:
        swarm, ours, theirs = Swarm(), Run(6, b"ours", tokens=10), Run(9, b"theirs", tokens=100)
        swarm.signed = signed(ours, 4)
        for name in "xyz":
            await swarm.add(name, Donor(theirs, frozen=8))
        with pytest.raises(SwarmUnreachableError, match="the archive z has signed another outer step 4"):
            await swarm.following.begin()
        await swarm.add("a", Donor(ours, frozen=5))
        await swarm.following.begin()
        swarm.assert_is_at(ours, 5)
        assert await swarm.following.advance() is not None
        swarm.assert_is_at(ours, 6)
        assert await swarm.following.advance() is None, "what follows elsewhere is no better"

    asyncio.run(scenario())


def test_whoever_follows_another_log_than_the_signed_one_begins_anew() -> None:
    async def scenario() -> None:
        swarm, ours, theirs = Swarm(), Run(6, b"ours", tokens=10), Run(9, b"theirs", tokens=100)
        await swarm.add("x", Donor(theirs, frozen=7))
        await swarm.following.begin()
        swarm.signed = signed(ours, 4)
        with pytest.raises(
            CannotFollowError, match="has signed another outer step 4 than the one followed here"
        ) as error:
            await swarm.following.advance()
        with pytest.raises(SwarmUnreachableError):
            await swarm.following.begin(error.value.least)
        swarm.assert_is_at(theirs, 7)
        await swarm.add("a", Donor(ours, frozen=5))
        await swarm.following.begin(error.value.least)
        swarm.assert_is_at(ours, 5)

    asyncio.run(scenario())


def test_an_entry_in_place_of_a_signed_one_is_not_followed() -> None:
    async def scenario() -> None:
        swarm, theirs, other = Swarm(), Run(9, b"theirs"), Run(9, b"other")
        await swarm.add("x", Donor(theirs, frozen=7))
        await swarm.following.begin()
        swarm.signed = signed(other, 8)
        with pytest.raises(CannotFollowError, match="entry 7: the archive z has signed another outer step 8"):
            await swarm.following.advance()
        swarm.assert_is_at(theirs, 7)

    asyncio.run(scenario())


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock(1000.0)
    monkeypatch.setattr("peers.transfer.following.now", clock)
    return clock


def test_what_nobody_has_signed_is_followed_once_the_partition_grace_is_over(clock: Clock) -> None:
    """Regression: a peer that made up an entry led followers astray at once, until the certified one came."""

    async def scenario() -> None:
        swarm, run = Swarm(SETTINGS), Run(4)
        await swarm.add("a", Donor(run, frozen=2))
        await swarm.following.begin()
        for index in (2, 3):
            assert await swarm.following.advance() is None
            clock.now += SETTINGS.timing.partition_grace - 1
            assert await swarm.following.advance() is None
            swarm.assert_is_at(run, index)
            clock.now += 1
            assert await swarm.following.advance() is not None, "from each place it waits anew"
        swarm.assert_is_at(run, 4)

    asyncio.run(scenario())


def test_who_waits_for_signatures_still_moves_to_a_better_log(clock: Clock) -> None:
    async def scenario() -> None:
        swarm, light, heavy = Swarm(SETTINGS), Run(3, b"light", 10), Run(5, b"heavy", 100)
        await swarm.add("a", Donor(light, frozen=2))
        await swarm.following.begin()
        await swarm.add("b", Donor(heavy, frozen=4))
        with pytest.raises(CannotFollowError, match="b: entry 2: its previous does not follow") as caught:
            await swarm.following.advance()
        assert caught.value.least == 0

    asyncio.run(scenario())
