"""Following a run whose state is in several fragments: snapshots of whole cycles, and cycle after cycle from others."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest

from peers.errors import RemoteProtocolError
from peers.log.header import NO_PAYLOAD, Header
from peers.log.state import LogState
from peers.network.channel import PeerRefusedError
from peers.presence.heartbeat import Heartbeat
from peers.transfer.buffers import PayloadBuffers
from peers.transfer.following import CannotFollowError, Following, step
from peers.transfer.lineage_fetch import serve_headers
from peers.transfer.payloads import PAYLOAD, PayloadRequest, serve_payloads
from peers.transfer.snapshots import DIGESTS_LIMIT, Snapshot, _ask_offer, serve_snapshots
from peers.values.chunks import ChunkedPayload, chunk_digests, digest_of_chunks, digest_of_state
from peers.values.manifest import Amendment
from peers.values.wire import digest_of, pack
from peers.values.workload import BadBlocksError, Blocked, Blocks
from tests.peers.fakes import BLOCK, GARBAGE, FakeTransport, FakeWorkload
from tests.peers.heartbeats import beat
from tests.peers.log.test_cycles import FRAGMENTS, LOG, entry
from tests.peers.logs import RUN, SETTINGS, chain_of, next_header

STREAMING = replace(SETTINGS, fragments=FRAGMENTS, timing=replace(SETTINGS.timing, partition_grace=0.0))
GENESIS = bytes(32 * FRAGMENTS)


class Fragment:
    """As many blocks as its number says, and one more."""

    def __init__(self, number: int) -> None:
        self.block_count = 2 + number
        self.format_count = 1

    def byte_range(self, first_block: int, last_block: int, format: int = 0) -> tuple[int, int]:
        return BLOCK * first_block, BLOCK * last_block

    def check(self, blocks: Blocks, first_block: int) -> None:
        if bytes(blocks).startswith(GARBAGE):
            raise BadBlocksError("code -128")


PARTS: Sequence[Blocked] = [Fragment(number) for number in range(FRAGMENTS)]


def payload(index: int, fragment: int, is_garbage: bool = False) -> ChunkedPayload:
    blocks = [(b"%d %d %d;" % (index, fragment, block)).ljust(BLOCK) for block in range(PARTS[fragment].block_count)]
    if is_garbage:
        blocks[0] = GARBAGE
    return ChunkedPayload.cut(memoryview(b"".join(blocks)), BLOCK)


class FragmentedWorkload(FakeWorkload):
    """Of each fragment's state there is a digest."""

    def __init__(self) -> None:
        super().__init__(GENESIS)
        self.applied: list[tuple[int, int]] = []
        self.amendments: list[Amendment | None] = []

    @property
    def fragments(self) -> Sequence[Blocked]:
        return PARTS

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
        self.state = stepped(self.state, fragment, bytes(payload))
        self.applied.append((index, fragment))
        self.amendments.append(amendment)


def stepped(state: bytes, fragment: int, payload: bytes) -> bytes:
    start, stop = 32 * fragment, 32 * (fragment + 1)
    return state[:start] + digest_of(state[start:stop] + payload) + state[stop:]


class Run:
    """Some cycles, with their logs, payloads and states. Nobody has trained the first fragment of the second cycle."""

    def __init__(self, cycles: int, garbage: tuple[int, int] | None = None) -> None:
        self.logs, self.states, self.headers = [LOG], [GENESIS], list[Header]()
        self.payloads: dict[int, list[ChunkedPayload]] = {fragment: [] for fragment in range(FRAGMENTS)}
        for index in range(cycles):
            log, state = self.logs[-1], self.states[-1]
            for fragment in range(FRAGMENTS):
                made = payload(index, fragment, garbage == (index, fragment))
                if (index, fragment) == (1, 0):
                    view = log.of(0)
                    absent = [view.expected(name).model_copy(update={"tokens": 0}) for name in "abc"]
                    self.headers.append(next_header(view, absent, NO_PAYLOAD))
                else:
                    self.headers.append(entry(log, fragment, payload=made.digest))
                    self.payloads[fragment].append(made)
                    state = stepped(state, fragment, bytes(made.data))
                log = log.append(self.headers[-1])
            self.logs.append(log)
            self.states.append(state)

    def snapshot(self, index: int) -> Snapshot:
        digests, log = chunk_digests([self.states[index]]), self.logs[index]
        return Snapshot(log.last, digest_of_chunks(digests), digests, memoryview(self.states[index]), log.ends)


class Donor:
    """Is at the end of a run, and froze its state after one cycle."""

    def __init__(self, run: Run, frozen: int) -> None:
        self.run, self.frozen, self.at = run, run.snapshot(frozen), run.logs[frozen]
        self.transport = FakeTransport()
        self.buffers = PayloadBuffers.of_each(PARTS, 1 << 30)
        for fragment, payloads in run.payloads.items():
            for one in payloads:
                self.buffers[fragment].kept.keep(one)

    def is_member(self, peer: str) -> bool:
        return False

    async def newest(self, least: int) -> Snapshot:
        return self.frozen

    def held(self, head: bytes) -> Snapshot | None:
        return self.frozen if head == self.at.position.head else None

    async def serve(self) -> FakeTransport:
        await serve_snapshots(self.transport, {RUN: self})
        await serve_headers(self.transport, {RUN: chain_of(self.run.headers, LOG).stretch})
        await serve_payloads(self.transport, {RUN: self.buffers})
        return self.transport


class Swarm(FakeTransport):
    """What a follower sees of the swarm."""

    def __init__(self) -> None:
        super().__init__("follower")
        self.ends: dict[str, tuple[LogState, bytes]] = {}
        self.workload = FragmentedWorkload()
        self.following = Following(self, self.workload, STREAMING)

    async def add(self, name: str, donor: Donor) -> Donor:
        self.donors[name] = await donor.serve()
        self.ends[name] = donor.run.logs[-1], digest_of_state([donor.run.states[-1]])
        return donor

    async def connect(self, peer_id: str, addresses: tuple[str, ...]) -> bool:
        return True

    async def heartbeats(self, run_id: str) -> list[Heartbeat]:
        return [beat(name, log, state_digest=state) for name, (log, state) in self.ends.items()]


def test_a_snapshot_of_whole_cycles_and_then_cycle_after_cycle() -> None:
    async def scenario() -> None:
        swarm, run = Swarm(), Run(5)
        for name in "ab":
            await swarm.add(name, Donor(run, frozen=1))
        await swarm.following.begin()
        assert (swarm.following.log, swarm.workload.state) == (run.logs[1], run.states[1])
        for index in range(2, 6):
            found = await swarm.following.advance()
            assert found == (run.logs[index].last, digest_of_state([run.states[index]]))
            assert (swarm.following.log, swarm.workload.state) == (run.logs[index], run.states[index])
        assert await swarm.following.advance() is None
        assert swarm.workload.applied == [
            (index, fragment) for index in range(1, 5) for fragment in range(FRAGMENTS) if (index, fragment) != (1, 0)
        ]
        assert swarm.following.past.headers(0, 9) == run.headers
        assert swarm.following.past.state_digest_at(4) == digest_of_state([run.states[5]])

    asyncio.run(scenario())


@pytest.mark.parametrize("fragment", range(FRAGMENTS))
def test_nothing_is_applied_of_a_cycle_with_a_bad_payload(fragment: int) -> None:
    async def scenario() -> None:
        swarm, run = Swarm(), Run(4, garbage=(2, fragment))
        await swarm.add("a", Donor(run, frozen=1))
        await swarm.following.begin()
        await swarm.following.advance()
        with pytest.raises(CannotFollowError, match="code -128"):
            await swarm.following.advance()
        assert (swarm.following.log, swarm.workload.state) == (run.logs[2], run.states[2])

    asyncio.run(scenario())


def test_a_payload_of_another_length_changes_nothing() -> None:
    workload = FragmentedWorkload()
    short = {0: bytes(payload(0, 0).data), 1: bytes(payload(0, 1).data)[:-1]}
    with pytest.raises(BadBlocksError, match="no payload of fragment 1"):
        asyncio.run(step(workload, 0, short, None))
    assert workload.state == GENESIS


def test_a_snapshot_must_be_of_a_cycles_end() -> None:
    async def scenario() -> None:
        run = Run(2)
        for ends in ((), run.logs[2].ends[:-1], (*run.logs[2].ends[:-1], digest_of(b"another"))):
            swarm = Swarm()
            donor = await swarm.add("a", Donor(run, frozen=2))
            donor.frozen.ends = ends
            with pytest.raises(RemoteProtocolError, match="end of a cycle"):
                await _ask_offer(swarm, "a", LOG, 0, DIGESTS_LIMIT, None)

    asyncio.run(scenario())


def test_there_is_no_payload_of_a_fragment_that_is_not_there() -> None:
    async def scenario() -> None:
        swarm, run = Swarm(), Run(1)
        await swarm.add("a", Donor(run, frozen=1))
        wanted = run.payloads[1][0].digest
        for fragment in (0, FRAGMENTS):
            request = pack(PayloadRequest(run=RUN, fragment=fragment, payload=wanted, first=0, last=0))
            with pytest.raises(PeerRefusedError, match="not kept"):
                await swarm.pull("a", PAYLOAD, request, 1 << 20, 1.0)

    asyncio.run(scenario())


def test_one_amendment_is_in_force_for_all_fragments_of_a_cycle() -> None:
    async def scenario() -> None:
        workload, amendment = (
            FragmentedWorkload(),
            Amendment(number=1, content=b"0.4", signature=bytes(64)),
        )
        whole = {fragment: bytes(payload(0, fragment).data) for fragment in range(FRAGMENTS)}
        await step(workload, 0, whole, None)
        await step(workload, 1, whole, amendment)
        assert workload.amendments == [None] * FRAGMENTS + [amendment] * FRAGMENTS

    asyncio.run(scenario())
