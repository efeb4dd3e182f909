"""Bulk data: only what the protocol waits for is let in, and only a settled state goes out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any

import pytest

from peers import bulk as bulk_module
from peers.bulk import ALREADY_HERE, BLOCKS, SNAPSHOT, STRANGERS, BlocksHeader, Bulk, SnapshotHeader, pull_snapshot
from peers.errors import RemoteProtocolError
from peers.events import Applied, BadBlocks, Event, OpenRound, PushContribution, PushReduced, Quantized
from peers.identity import Identity
from peers.leases import SampleRange
from peers.messages import Commit
from peers.peer import Peer
from peers.states import State
from peers.streams import Accept, Arrived, Buffer, RefusalError, Serve
from peers.wire import digest_of, pack, unpack
from peers.workload import BadBlocksError, Progress, SnapshotError, Trained
from tests.peers.builders import LOG, Rig, attempt, beat
from tests.peers.test_peer import at_second

GARBAGE = b"garbage!" * 2
DONOR = Identity.generate()
RESTORED = digest_of(b"restored")


class FakeTransport:
    """Keeps what is registered and what is pushed; pulls are answered with `answer`."""

    def __init__(self) -> None:
        self.pushed: list[tuple[str, str, bytes, bytes]] = []
        self.answer: tuple[bytes, bytearray] = (b"", bytearray())
        self.accept: Accept
        self.arrived: Arrived
        self.serve: Serve

    async def push(self, peer_id: str, name: str, header: bytes, data: Buffer, timeout: float) -> None:
        self.pushed.append((peer_id, name, header, bytes(data)))

    async def on_push(self, name: str, accept: Accept, arrived: Arrived) -> None:
        assert name == BLOCKS
        self.accept, self.arrived = accept, arrived

    async def pull(
        self, peer_id: str, name: str, header: bytes, max_bytes: int, timeout: float
    ) -> tuple[bytes, bytearray]:
        assert name == SNAPSHOT
        return self.answer

    async def on_pull(self, name: str, serve: Serve) -> None:
        assert name == SNAPSHOT
        self.serve = serve

    async def give(self, sender: str) -> tuple[bytes, Buffer]:
        """What a peer that pulls gets, once all of it is sent."""
        async with self.serve(sender, b"") as answer:
            return answer


class FakeWorkload:
    """Seven blocks of eight bytes; `state` is what a snapshot would say."""

    block_count = 7
    snapshot_limit = 100

    def __init__(self) -> None:
        self.state = b"mine"

    def byte_range(self, first_block: int, last_block: int) -> tuple[int, int]:
        return 8 * first_block, 8 * last_block

    def check(self, blocks: bytes, first_block: int) -> None:
        if blocks == GARBAGE:
            raise BadBlocksError("code -128")

    async def snapshot(self) -> bytes:
        return self.state

    async def restore(self, snapshot: bytes, state_digest: bytes) -> None:
        if digest_of(snapshot) != state_digest:
            raise SnapshotError("not that state")
        self.state = snapshot

    async def train(
        self, index: int, samples: tuple[SampleRange, ...], steps: int, on_progress: Callable[[Progress], None]
    ) -> Trained:
        raise NotImplementedError

    async def contribution(self) -> bytes:
        raise NotImplementedError

    async def reduce(self, contributions: Sequence[tuple[bytes, int]], first_block: int) -> bytes:
        raise NotImplementedError

    async def apply(self, payload: bytes) -> bytes:
        raise NotImplementedError

    async def state_digest(self) -> bytes:
        raise NotImplementedError


class Host:
    """b in its second round, with its bulk data on a transport that is none."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.events: list[Event] = []
        self.changed = asyncio.Condition()
        self.transport, self.workload = FakeTransport(), FakeWorkload()
        self.bulk = Bulk(rig.peer, self.transport, self.workload, self)
        for effect in rig.effects:
            if isinstance(effect, OpenRound):
                self.bulk.buffers.open(effect)

    @classmethod
    async def create(cls, rig: Rig | None = None) -> Host:
        host = cls(rig or at_second().trained().averaging())
        await host.bulk.serve()
        return host

    def handle(self, event: Event) -> None:
        self.events.append(event)
        self.rig.do(event)

    async def until(self, condition: Callable[[Peer], bool]) -> None:
        async with self.changed:
            await self.changed.wait_for(lambda: condition(self.rig.peer))

    async def notify(self) -> None:
        async with self.changed:
            self.changed.notify_all()

    def signed_heartbeat(self) -> bytes:
        return signed(self.rig.peer)


def signed(peer: Peer, **changes: Any) -> bytes:
    return beat(DONOR.peer_id, peer.log, **{"state_digest": peer.state_digest, **changes}).sign(DONOR)


def header(rig: Rig, part: int, reduced: bool = False, number: int = 1) -> bytes:
    return pack(BlocksHeader(attempt=attempt(rig.peer.log, number), part=part, reduced=reduced))


def test_blocks_that_are_waited_for_come_in_once() -> None:
    async def scenario() -> None:
        host = await Host.create()
        wanted = header(host.rig, 1)
        buffer = host.transport.accept("a", wanted, 16)
        assert isinstance(buffer, bytearray)
        assert len(buffer) == 16
        host.transport.arrived("a", wanted, buffer)
        assert host.transport.accept("a", wanted, 16) == ALREADY_HERE
        with pytest.raises(RefusalError, match=ALREADY_HERE):
            host.transport.arrived("a", wanted, bytearray(b"another!another!"))
        current = host.bulk.buffers.current(attempt(host.rig.peer.log))
        assert current is not None
        assert current.contributions == {"a": bytes(16)}

    asyncio.run(scenario())


def test_reduced_blocks_come_from_their_owner() -> None:
    async def scenario() -> None:
        host = await Host.create()
        assert host.transport.accept("a", header(host.rig, 2, reduced=True), 24) == ALREADY_HERE
        buffer = host.transport.accept("c", header(host.rig, 2, reduced=True), 24)
        assert isinstance(buffer, bytearray)
        host.transport.arrived("c", header(host.rig, 2, reduced=True), buffer)
        assert host.rig.peer.exchange is not None
        assert host.rig.peer.exchange.missing() == ("a", "c"), "c still owes its contribution"

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("sender", "part", "number", "length", "reason"),
    [
        ("a", 1, 2, 16, "not in attempt"),
        ("a", 0, 1, 16, ALREADY_HERE),
        ("z", 1, 1, 16, ALREADY_HERE),
        ("a", 1, 1, 17, "17 bytes, expected 16"),
        ("a", 1, 1, 2**40, "expected 16"),
    ],
    ids=["another attempt", "another's part", "a stranger", "one byte more", "a terabyte"],
)
def test_unsolicited_blocks_are_refused(sender: str, part: int, number: int, length: int, reason: str) -> None:
    async def scenario() -> None:
        host = await Host.create()
        verdict = host.transport.accept(sender, header(host.rig, part, number=number), length)
        assert isinstance(verdict, str)
        assert reason in verdict

    asyncio.run(scenario())


def test_nothing_comes_in_between_rounds() -> None:
    async def scenario() -> None:
        host = await Host.create(at_second())
        assert "not in attempt" in str(host.transport.accept("a", header(host.rig, 1), 16))
        with pytest.raises(RefusalError, match="is over"):
            host.transport.arrived("a", header(host.rig, 1), bytearray(16))

    asyncio.run(scenario())


def test_garbage_is_dropped_and_its_sender_named() -> None:
    async def scenario() -> None:
        host = await Host.create()
        with pytest.raises(RefusalError, match="code -128"):
            host.transport.arrived("a", header(host.rig, 1), bytearray(GARBAGE))
        assert host.events == [BadBlocks(attempt(host.rig.peer.log), "a", "code -128")]
        assert isinstance(host.transport.accept("a", header(host.rig, 1), 16), bytearray), "a may do better"

    asyncio.run(scenario())


def test_pushes_of_the_same_blocks_share_their_memory() -> None:
    """Regression: a member that pushed one part a thousand times at once took a thousand times its memory."""

    async def scenario() -> None:
        host = await Host.create()
        wanted = header(host.rig, 1)
        buffers = [host.transport.accept("a", wanted, 16) for _ in range(3)]
        assert buffers[0] is buffers[1] is buffers[2]
        assert host.transport.accept("c", wanted, 16) is not buffers[0]
        with pytest.raises(RefusalError, match="code -128"):
            host.transport.arrived("a", wanted, bytearray(GARBAGE))
        assert host.transport.accept("a", wanted, 16) is not buffers[0]

    asyncio.run(scenario())


def test_a_header_that_is_none_is_the_senders_mistake() -> None:
    async def scenario() -> None:
        host = await Host.create()
        for call in (host.transport.accept, host.transport.arrived):
            with pytest.raises(RemoteProtocolError, match="peer a: "):
                call("a", b"nonsense", 1)  # type: ignore[arg-type]

    asyncio.run(scenario())


def test_our_own_blocks_go_out() -> None:
    async def scenario() -> None:
        host = await Host.create()
        at = attempt(host.rig.peer.log)
        current = host.bulk.buffers.current(at)
        assert current is not None
        current.own, current.parts[1] = bytes(range(56)), b"averaged averaged"
        host.handle(Quantized(at))
        await host.bulk.push(PushContribution(at, 2, "c"))
        await host.bulk.push(PushReduced(at, 1, "a"))
        assert host.transport.pushed == [
            ("c", BLOCKS, header(host.rig, 2), bytes(range(32, 56))),
            ("a", BLOCKS, header(host.rig, 1, reduced=True), b"averaged averaged"),
        ]
        with pytest.raises(KeyError):
            await host.bulk.push(PushReduced(attempt(host.rig.peer.log, 9), 1, "a"))

    asyncio.run(scenario())


# Snapshots -----------------------------------------------------------------------------------------------------
def answer(rig: Rig, **changes: object) -> tuple[bytes, bytearray]:
    packed = SnapshotHeader(last=rig.peer.log.last, heartbeat=signed(rig.peer, **changes))
    return pack(packed), bytearray(b"restored")


def test_a_snapshot_is_what_its_donor_signed() -> None:
    async def scenario() -> None:
        transport, donor = FakeTransport(), at_second()
        transport.answer = answer(donor, state_digest=RESTORED)
        fetched = await pull_snapshot(transport, DONOR.peer_id, LOG, 100)
        assert fetched == (donor.peer.log.last, RESTORED, b"restored")

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "lie",
    [{"index": 7}, {"head": bytes(32)}, {"lineage_tokens": 10**9}],
    ids=lambda lie: next(iter(lie)),
)
def test_a_snapshot_from_elsewhere_than_its_donor_says_is_refused(lie: dict[str, object]) -> None:
    async def scenario() -> None:
        transport = FakeTransport()
        transport.answer = answer(at_second(), **lie)
        with pytest.raises(SnapshotError, match="not the one that the donor signed"):
            await pull_snapshot(transport, DONOR.peer_id, LOG, 100)

    asyncio.run(scenario())


def test_a_snapshot_signed_by_another_is_refused() -> None:
    async def scenario() -> None:
        transport = FakeTransport()
        transport.answer = answer(at_second())
        with pytest.raises(SnapshotError):
            await pull_snapshot(transport, Identity.generate().peer_id, LOG, 100)

    asyncio.run(scenario())


@pytest.mark.parametrize("packed", [b"", b"nonsense", pack(SnapshotHeader(last=None, heartbeat=b"nonsense"))])
def test_a_snapshot_without_a_header_is_the_donors_mistake(packed: bytes) -> None:
    async def scenario() -> None:
        transport = FakeTransport()
        transport.answer = (packed, bytearray())
        with pytest.raises(RemoteProtocolError):
            await pull_snapshot(transport, DONOR.peer_id, LOG, 100)

    asyncio.run(scenario())


def test_bytes_that_are_not_the_state_change_nothing() -> None:
    async def scenario() -> None:
        host = await Host.create(at_second())
        host.transport.answer = answer(at_second(), state_digest=digest_of(b"another state"))
        with pytest.raises(SnapshotError, match="not that state"):
            await host.bulk.fetch_snapshot(DONOR.peer_id)
        assert host.workload.state == b"mine"
        host.transport.answer = answer(at_second(), state_digest=RESTORED)
        await host.bulk.fetch_snapshot(DONOR.peer_id)
        assert host.workload.state == b"restored"

    asyncio.run(scenario())


def test_a_donor_in_an_outer_step_finishes_it_first() -> None:
    async def scenario() -> None:
        host = await Host.create(at_second().trained().averaging().holding().applying())
        serving = asyncio.ensure_future(host.transport.give("z"))
        await asyncio.sleep(0)
        assert not serving.done()
        finish_applying(host)
        await host.notify()
        packed, snapshot = await serving
        assert (packed_log(packed), snapshot) == (host.rig.peer.log.last, b"mine")

    asyncio.run(scenario())


def test_an_outer_step_that_began_while_we_waited_for_the_lock_is_finished_first() -> None:
    """Regression: the snapshot was of the old state, and its header of the new position."""

    async def scenario() -> None:
        rig = at_second().trained().averaging().holding()
        host = await Host.create(rig)
        async with host.bulk.state_lock:
            serving = asyncio.ensure_future(host.transport.give("z"))
            for _ in range(3):
                await asyncio.sleep(0)
            rig.hear("a", Commit(header=rig.next_header()))
            assert rig.peer.state is State.APPLYING
        for _ in range(3):
            await asyncio.sleep(0)
        assert not serving.done()
        async with host.bulk.state_lock:
            finish_applying(host)
            host.workload.state = b"after the step"
        await host.notify()
        packed, snapshot = await serving
        assert (packed_log(packed), snapshot) == (rig.peer.log.last, b"after the step")

    asyncio.run(scenario())


def test_those_who_fetch_at_once_share_one_copy() -> None:
    """Regression: each of any number of strangers got a copy of its own."""

    async def scenario() -> None:
        host = await Host.create(at_second())
        async with host.transport.serve("a", b"") as (_, first), host.transport.serve("c", b"") as (_, second):
            assert first is second
            with pytest.raises(RefusalError, match="another copy"):
                await host.transport.give("a")
        host.workload.state = b"new"
        assert (await host.transport.give("a"))[1] == b"new", "nobody held the old copy any more"

    asyncio.run(scenario())


def test_strangers_do_not_keep_joiners_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk_module, "SETTLE_TIMEOUT", 0.01)

    async def scenario() -> None:
        host = await Host.create(at_second())
        async with AsyncExitStack() as stack:
            for number in range(STRANGERS):
                await stack.enter_async_context(host.transport.serve(f"stranger{number}", b""))
            with pytest.raises(RefusalError, match="too many"):
                await host.transport.give("one more")
            assert await host.transport.give("a")
        assert await host.transport.give("one more")

    asyncio.run(scenario())


def test_a_donor_that_never_settles_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk_module, "SETTLE_TIMEOUT", 0.01)

    async def scenario() -> None:
        host = await Host.create(at_second().trained().averaging().holding().applying())
        with pytest.raises(RefusalError, match="no settled state"):
            await host.transport.give("z")

    asyncio.run(scenario())


def finish_applying(host: Host) -> None:
    last = host.rig.peer.log.last
    assert last is not None
    host.handle(Applied(last, digest_of(b"after the step")))


def packed_log(packed: bytes) -> object:
    return unpack(SnapshotHeader, packed).last
