"""The state of a peer for joiners: only a settled one goes out, and nothing is taken over unchecked."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any

import pytest

from peers import snapshots as snapshots_module
from peers.errors import RemoteProtocolError
from peers.events import Applied, Event
from peers.identity import Identity
from peers.leases import SampleRange
from peers.messages import Commit
from peers.peer import Peer
from peers.snapshots import SNAPSHOT, STRANGERS, SnapshotHeader, Snapshots, pull_snapshot
from peers.states import State
from peers.streams import Buffer, RefusalError, Serve
from peers.wire import digest_of, pack, unpack
from peers.workload import BadBlocksError, Blocks, Progress, SnapshotError, Trained
from tests.peers.builders import LOG, SIZE, Rig, beat
from tests.peers.test_peer import at_second

BLOCK = SIZE.bytes // SIZE.chunks
GARBAGE = b"garbage!" * (BLOCK // 8)
DONOR = Identity.generate()
RESTORED = digest_of(b"restored")
BEFORE = (digest_of(b"the entry before"),)


class FakeTransport:
    """Keeps what is registered; pulls are answered with `answer`."""

    def __init__(self) -> None:
        self.answer: tuple[bytes, bytearray] = (b"", bytearray())
        self.serve: dict[str, Serve] = {}

    async def pull(
        self, peer_id: str, name: str, header: bytes, max_bytes: int, timeout: float
    ) -> tuple[bytes, bytearray]:
        assert name == SNAPSHOT
        return self.answer

    async def on_pull(self, name: str, serve: Serve) -> None:
        self.serve[name] = serve

    async def give(self, sender: str) -> tuple[bytes, Buffer]:
        """What a peer that pulls gets, once all of it is sent."""
        async with self.serve[SNAPSHOT](sender, b"") as answer:
            return answer


class FakeWorkload:
    """As many blocks as the payloads of the tests' rounds have chunks; `state` is what a snapshot would say."""

    block_count = SIZE.chunks
    snapshot_limit = 100

    def __init__(self) -> None:
        self.state = b"mine"

    def byte_range(self, first_block: int, last_block: int) -> tuple[int, int]:
        return BLOCK * first_block, BLOCK * last_block

    def check(self, blocks: Blocks, first_block: int) -> None:
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

    async def reduce(self, contributions: Sequence[tuple[Blocks, int]], first_block: int) -> bytes:
        raise NotImplementedError

    async def apply(self, payload: Blocks, keeps_work: bool = False) -> bytes:
        raise NotImplementedError

    async def state_digest(self) -> bytes:
        raise NotImplementedError


class Host:
    """b, with its snapshots on a transport that is none."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.changed = asyncio.Condition()
        self.transport, self.workload = FakeTransport(), FakeWorkload()
        self.snapshots = Snapshots(rig.peer, self.transport, self.workload, self)

    @classmethod
    async def create(cls, rig: Rig) -> Host:
        host = cls(rig)
        await host.snapshots.serve()
        return host

    def handle(self, event: Event) -> None:
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


def answer(rig: Rig, **changes: object) -> tuple[bytes, bytearray]:
    return pack(header_of(rig, **changes)), bytearray(b"restored")


def header_of(rig: Rig, **changes: object) -> SnapshotHeader:
    return SnapshotHeader(last=rig.peer.log.last, before=BEFORE, heartbeat=signed(rig.peer, **changes))


def test_a_snapshot_is_what_its_donor_signed() -> None:
    async def scenario() -> None:
        transport, donor = FakeTransport(), at_second()
        transport.answer = answer(donor, state_digest=RESTORED)
        fetched = await pull_snapshot(transport, DONOR.peer_id, LOG, 100)
        assert fetched == (header_of(donor, state_digest=RESTORED), RESTORED, b"restored")

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


@pytest.mark.parametrize(
    "packed", [b"", b"nonsense", pack(SnapshotHeader(last=None, before=(), heartbeat=b"nonsense"))]
)
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
            await host.snapshots.fetch(DONOR.peer_id)
        assert host.workload.state == b"mine"
        host.transport.answer = answer(at_second(), state_digest=RESTORED)
        await host.snapshots.fetch(DONOR.peer_id)
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
        first, _ = host.rig.peer.lineage.entries
        assert unpack(SnapshotHeader, packed).before == (first.digest,)

    asyncio.run(scenario())


def test_an_outer_step_that_began_while_we_waited_for_the_lock_is_finished_first() -> None:
    """Regression: the snapshot was of the old state, and its header of the new position."""

    async def scenario() -> None:
        rig = at_second().trained().averaging().holding()
        host = await Host.create(rig)
        async with host.snapshots.state_lock:
            serving = asyncio.ensure_future(host.transport.give("z"))
            for _ in range(3):
                await asyncio.sleep(0)
            rig.hear("a", Commit(header=rig.next_header()))
            assert rig.peer.state is State.APPLYING
        for _ in range(3):
            await asyncio.sleep(0)
        assert not serving.done()
        async with host.snapshots.state_lock:
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
        async with (
            host.transport.serve[SNAPSHOT]("a", b"") as (_, first),
            host.transport.serve[SNAPSHOT]("c", b"") as (_, second),
        ):
            assert first is second
            with pytest.raises(RefusalError, match="another copy"):
                await host.transport.give("a")
        host.workload.state = b"new"
        assert (await host.transport.give("a"))[1] == b"new", "nobody held the old copy any more"

    asyncio.run(scenario())


def test_strangers_do_not_keep_joiners_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots_module, "SETTLE_TIMEOUT", 0.01)

    async def scenario() -> None:
        host = await Host.create(at_second())
        async with AsyncExitStack() as stack:
            for number in range(STRANGERS):
                await stack.enter_async_context(host.transport.serve[SNAPSHOT](f"stranger{number}", b""))
            with pytest.raises(RefusalError, match="too many"):
                await host.transport.give("one more")
            assert await host.transport.give("a")
        assert await host.transport.give("one more")

    asyncio.run(scenario())


def test_a_donor_that_never_settles_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots_module, "SETTLE_TIMEOUT", 0.01)

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
