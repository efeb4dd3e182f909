"""A peer's own snapshots: of settled states only, at the places and by the peers that are chosen, or when asked."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import TypeVar, cast

import pytest

from peers.log.state import LogState
from peers.network.channel import RefusalError
from peers.protocol.peer import Peer
from peers.transfer import snapshots as freezing_module
from peers.transfer.snapshots import IN_USE, SNAPSHOT_PEERS, FrozenSnapshot, Snapshot, Snapshotter, _is_chosen
from peers.transfer.storage import MemoryFile, Storage
from peers.values.chunks import digest_of_state
from peers.values.wire import digest_of
from tests.peers.fakes import FakeWorkload, at_once
from tests.peers.logs import LOG, SETTINGS, first_log, log_at, member, next_header

EVERY = SETTINGS.snapshot_every
HELD = 2
T = TypeVar("T")


@pytest.fixture(autouse=True)
def _without_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asyncio, "to_thread", at_once)


class FullStorage(Storage):
    def snapshot(self, size: int) -> MemoryFile:
        raise OSError("no space left on device")


class Donor:
    """A peer as a snapshotter sees it: its applied log, and the places in it where theta and momentum have a digest."""

    me = "b"
    settings = SETTINGS

    def __init__(self, log: LogState) -> None:
        self.log = self.settled = log
        self.state_digest = b""

    @property
    def is_at_cycles_end(self) -> bool:
        return self.log == self.settled and not self.log.made

    def is_live(self, peer: str) -> bool:
        return True


class Frozen:
    """A peer after the first entry, and its snapshots. Its state says at which entry it is."""

    def __init__(self, storage: Storage | None = None, log: LogState | None = None) -> None:
        self.peer = Donor(log or first_log())
        self.changed = asyncio.Condition()
        self.workload = FakeWorkload()
        self.told: list[FrozenSnapshot] = []
        self.seconds = 1000.0
        peer = cast(Peer, self.peer)
        self.snapshotter = Snapshotter(
            peer, self.workload, storage or Storage(), self, self.told.append, lambda: self.seconds
        )
        self.settle()

    def settle(self) -> None:
        self.workload.state = b"state %d" % self.peer.log.position.index
        self.peer.settled, self.peer.state_digest = self.peer.log, digest_of_state([self.workload.state])

    def begin_step(self) -> None:
        """The next entry is being applied."""
        members = [self.peer.log.expected(name) for name in "abc"]
        self.peer.log = self.peer.log.append(next_header(self.peer.log, members))

    def step(self, log: LogState | None = None) -> None:
        """The next entry is applied; or that of a log far off."""
        if log is None:
            self.begin_step()
        else:
            self.peer.log = log
        self.settle()

    @property
    def head(self) -> bytes:
        return self.peer.log.position.head

    def holds(self, snapshot: Snapshot) -> bool:
        return self.snapshotter.held(self.peer.log.at(snapshot.last).position.head) is snapshot

    def fetch_from(self, snapshot: Snapshot) -> None:
        """Somebody fetches a part of it, if it is still here."""
        if self.holds(snapshot):
            snapshot.used_at = self.seconds

    async def until(self, condition: Callable[[Peer], bool]) -> None:
        async with self.changed:
            await self.changed.wait_for(lambda: condition(cast(Peer, self.peer)))

    def start(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        return asyncio.create_task(work)

    async def finish_step(self) -> None:
        self.settle()
        async with self.changed:
            self.changed.notify_all()


async def quiet() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0)


async def in_time(work: asyncio.Future[T]) -> T:
    async with asyncio.timeout(120.0):
        return await work


# Chosen places and peers ----------------------------------------------------------------------------------------
def test_in_a_small_swarm_everybody_freezes_every_so_many_entries() -> None:
    for index in range(1, 2 * EVERY + 1):
        assert _is_chosen("b", log_at(index), EVERY) is (index in (EVERY, 2 * EVERY))


def test_who_is_late_for_the_entry_freezes_it_too_in_a_small_swarm() -> None:
    assert _is_chosen("z", log_at(EVERY), EVERY)


def test_in_a_large_swarm_a_few_freeze_in_turn() -> None:
    names = "abcdefghijklmnopqrst"
    turns = []
    for turn in range(1, 6):
        log = log_at(2 * turn, names)
        turns.append({name for name in names if _is_chosen(name, log, 2)})
        assert not _is_chosen("Z", log, 2), "who was not there"
    assert [len(chosen) for chosen in turns] == [SNAPSHOT_PEERS] * 5
    assert set.union(*turns[:3]) == set(names), "everybody's turn comes"


def test_at_a_chosen_entry_the_state_is_frozen_and_training_may_change_it() -> None:
    async def scenario() -> None:
        frozen = Frozen()
        await frozen.snapshotter.freeze_if_due()
        frozen.step()
        await frozen.snapshotter.freeze_if_due()
        assert frozen.told == [], "these are no chosen entries"
        frozen.step(log_at(EVERY))
        await frozen.snapshotter.freeze_if_due()
        (snapshot,) = frozen.told
        frozen.workload.state = b"changed"
        assert bytes(snapshot.data) == b"state %d" % EVERY
        assert (snapshot.last, snapshot.state_digest) == (frozen.peer.log.last, frozen.peer.state_digest)
        assert frozen.snapshotter.held(frozen.head) is snapshot
        assert await frozen.snapshotter.newest(EVERY) is snapshot

    asyncio.run(scenario())


def test_one_place_is_frozen_once() -> None:
    async def scenario() -> None:
        frozen = Frozen()
        frozen.step(log_at(EVERY))
        await asyncio.gather(*(frozen.snapshotter.freeze_if_due() for _ in range(3)))
        assert len(frozen.told) == 1

    asyncio.run(scenario())


def test_if_the_next_entry_comes_first_nothing_is_frozen() -> None:
    """Regression: that one was, at a place that others had not chosen."""

    async def scenario() -> None:
        frozen = Frozen()
        frozen.step(log_at(EVERY))
        async with frozen.snapshotter.changing():
            freezing = asyncio.ensure_future(frozen.snapshotter.freeze_if_due())
            await quiet()
            frozen.step(log_at(EVERY + 1))
        await in_time(freezing)
        assert frozen.told == []

    asyncio.run(scenario())


def test_a_copy_keeps_a_change_of_the_state_waiting_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        frozen, going_on = Frozen(), asyncio.Event()
        frozen.step(log_at(EVERY))
        copy_state = frozen.workload.copy_state

        async def copy_slowly(out: memoryview) -> None:
            await going_on.wait()
            await copy_state(out)

        async def change() -> None:
            async with frozen.snapshotter.changing():
                frozen.step()

        monkeypatch.setattr(frozen.workload, "copy_state", copy_slowly)
        freezing = asyncio.ensure_future(frozen.snapshotter.freeze_if_due())
        await in_time(asyncio.ensure_future(until(frozen.snapshotter._copy_lock.locked)))
        changing = asyncio.ensure_future(change())
        async with frozen.snapshotter.state_lock:  # as whoever takes the pseudo-gradient
            assert not changing.done()
        going_on.set()
        await in_time(asyncio.gather(freezing, changing))
        assert [snapshot.index for snapshot in frozen.told] == [EVERY]

    asyncio.run(scenario())


# Holding --------------------------------------------------------------------------------------------------------
def test_an_older_snapshot_is_held_while_it_is_fetched_and_no_longer() -> None:
    async def scenario() -> None:
        frozen = Frozen()
        frozen.step(log_at(EVERY))
        await frozen.snapshotter.freeze_if_due()
        (first,), first_head = frozen.told, frozen.head
        frozen.fetch_from(first)
        frozen.step(log_at(2 * EVERY))
        await frozen.snapshotter.freeze_if_due()
        assert frozen.snapshotter.held(first_head) is first
        assert await frozen.snapshotter.newest(0) is frozen.told[1]
        frozen.seconds += IN_USE
        frozen.step(log_at(3 * EVERY))
        await frozen.snapshotter.freeze_if_due()
        assert frozen.snapshotter.held(first_head) is None

    asyncio.run(scenario())


def test_with_enough_snapshots_in_use_no_other_is_frozen() -> None:
    """Each takes as much memory as the state."""

    async def scenario() -> None:
        frozen = Frozen()
        for turn in range(1, HELD + 2):
            frozen.step(log_at(turn * EVERY))
            await frozen.snapshotter.freeze_if_due()
            frozen.fetch_from(frozen.told[-1])
        assert len(frozen.told) == HELD

    asyncio.run(scenario())


def test_the_newest_is_found_though_an_older_one_was_fetched_since() -> None:
    """Regression: who was refused fetched an older state, replayed, and could then give the newer one to nobody."""

    async def scenario() -> None:
        frozen = Frozen()
        frozen.step(log_at(EVERY))
        await frozen.snapshotter.freeze_if_due()
        (newer,) = frozen.told
        frozen.fetch_from(newer)
        older = Frozen()
        frozen.snapshotter.hold(await frozen_at(older, log_at(2)))
        async with asyncio.timeout(120.0):
            assert await frozen.snapshotter.newest(EVERY) is newer

    asyncio.run(scenario())


async def frozen_at(frozen: Frozen, log: LogState) -> FrozenSnapshot:
    frozen.step(log)
    snapshot = await frozen.snapshotter.newest(log.position.index)
    assert isinstance(snapshot, FrozenSnapshot)
    return snapshot


# The first -----------------------------------------------------------------------------------------------------
def test_amid_a_cycle_of_several_entries_there_is_a_snapshot_for_whoever_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: before the first chosen entry, and after each restart, a joiner was refused until the cycle's end."""
    monkeypatch.setattr(freezing_module, "SETTLE_TIMEOUT", 0.01)

    async def scenario() -> None:
        log = replace(LOG, fragments=2)
        members = [member(name, 20 * place, 20 * place + 20) for place, name in enumerate("abc")]
        first = [one.model_copy(update={"samples": ()}) for one in members]
        log = log.append(next_header(log, first))
        frozen = Frozen(log=log.append(next_header(log.of(1), members)))
        await frozen.snapshotter.freeze_if_due()
        frozen.step(frozen.peer.log.append(next_header(frozen.peer.log.of(0), first)))
        assert not frozen.peer.is_at_cycles_end
        assert (await frozen.snapshotter.newest(1)).index == 1
        assert frozen.told == [], "it is no checkpoint"

    asyncio.run(scenario())


def test_a_peer_that_holds_a_snapshot_freezes_no_other_before_the_next_chosen_entry() -> None:
    async def scenario() -> None:
        frozen = Frozen()
        await frozen.snapshotter.freeze_if_due()
        frozen.step()
        await frozen.snapshotter.freeze_if_due()
        assert (await frozen.snapshotter.newest(1)).index == 1

    asyncio.run(scenario())


# On demand ------------------------------------------------------------------------------------------------------
def test_who_has_frozen_nothing_does_so_when_asked() -> None:
    async def scenario() -> None:
        frozen = Frozen()
        snapshot = await frozen.snapshotter.newest(0)
        assert (snapshot.index, bytes(snapshot.data)) == (1, b"state 1")
        frozen.step()
        assert await frozen.snapshotter.newest(0) is snapshot, "one that is held will do"
        newer = await frozen.snapshotter.newest(2)
        assert (newer.index, bytes(newer.data)) == (2, b"state 2")
        with pytest.raises(RefusalError, match="has not reached outer step 3; ask a peer that has"):
            await frozen.snapshotter.newest(3)

    asyncio.run(scenario())


def test_those_who_ask_at_once_share_one_snapshot() -> None:
    async def scenario() -> None:
        frozen = Frozen()
        first, second, third = await asyncio.gather(*(frozen.snapshotter.newest(0) for _ in range(3)))
        assert first is second is third

    asyncio.run(scenario())


def test_a_donor_in_an_outer_step_finishes_it_first() -> None:
    async def scenario() -> None:
        frozen = Frozen()
        frozen.begin_step()
        asked = asyncio.ensure_future(frozen.snapshotter.newest(0))
        await quiet()
        assert not asked.done()
        await frozen.finish_step()
        snapshot = await in_time(asked)
        assert (snapshot.last, bytes(snapshot.data)) == (frozen.peer.log.last, b"state 2")

    asyncio.run(scenario())


def test_an_outer_step_that_began_while_we_waited_for_the_lock_is_finished_first() -> None:
    """Regression: the snapshot was of the old state, and its header of the new position."""

    async def scenario() -> None:
        frozen = Frozen()
        async with frozen.snapshotter.changing():
            asked = asyncio.ensure_future(frozen.snapshotter.newest(0))
            await quiet()
            frozen.begin_step()
        await quiet()
        assert not asked.done()
        async with frozen.snapshotter.changing():
            await frozen.finish_step()
        snapshot = await in_time(asked)
        assert (snapshot.last, bytes(snapshot.data)) == (frozen.peer.log.last, b"state 2")

    asyncio.run(scenario())


def test_a_donor_that_never_settles_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(freezing_module, "SETTLE_TIMEOUT", 0.01)

    async def scenario() -> None:
        frozen = Frozen()
        frozen.begin_step()
        with pytest.raises(RefusalError, match="made when the outer step under way ends"):
            await frozen.snapshotter.newest(0)

    asyncio.run(scenario())


def test_a_state_that_is_not_what_its_digest_says_is_not_given(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        frozen = Frozen()
        frozen.peer.state_digest = digest_of(b"another")
        with pytest.raises(RefusalError, match="cannot make a snapshot"):
            await frozen.snapshotter.newest(0)
        assert frozen.told == []

    with caplog.at_level(logging.WARNING):
        asyncio.run(scenario())
    assert "is not the one that its digest names" in caplog.text


def test_without_room_it_refuses(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        frozen = Frozen(FullStorage())
        with pytest.raises(RefusalError, match="cannot make a snapshot"):
            await frozen.snapshotter.newest(0)

    with caplog.at_level(logging.WARNING):
        asyncio.run(scenario())
    assert "no space left on device" in caplog.text


def test_what_somebody_asks_for_is_no_checkpoint() -> None:
    """Regression: a stranger had each volunteer write one after each entry, and drop the payloads before."""

    async def scenario() -> None:
        frozen = Frozen()
        await frozen.snapshotter.newest(0)
        assert frozen.told == []
        frozen.step(log_at(EVERY))
        snapshot = await frozen.snapshotter.newest(EVERY)
        assert frozen.told == [snapshot], "at a chosen entry it is one, whoever comes first"

    asyncio.run(scenario())
