"""Room for snapshots: two are held whatever strangers ask for, and joiners get new ones all the same."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress

import pytest

from peers.network.channel import RefusalError
from peers.transfer.snapshots import LEAVE, Snapshot
from tests.peers.fakes import at_once
from tests.peers.logs import log_at
from tests.peers.transfer.test_freezing import EVERY, HELD, Frozen


@pytest.fixture(autouse=True)
def _without_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asyncio, "to_thread", at_once)


def test_no_more_snapshots_are_held_than_there_is_memory_for() -> None:
    """A stranger asks for a newer one after each entry, and goes on with the older ones."""

    async def scenario() -> None:
        frozen = Frozen()
        asked = list[Snapshot]()
        for _ in range(6):
            with suppress(RefusalError):
                asked.append(await frozen.snapshotter.newest(frozen.peer.log.position.index))
            for snapshot in asked:
                snapshot.used_at = frozen.seconds
            frozen.step()
        assert sum(map(frozen.holds, asked)) == HELD

    asyncio.run(scenario())


def test_slow_pulls_keep_their_snapshots_and_no_more_than_two() -> None:
    """Regression: after a minute of one slow pull its snapshot counted as unused, and went on to take memory."""

    async def scenario() -> None:
        frozen, open_pulls = Frozen(), list[Snapshot]()

        async def pull(snapshot: Snapshot) -> None:
            with suppress(TimeoutError):
                async with snapshot.being_read():
                    open_pulls.append(snapshot)
                    await asyncio.Event().wait()
            open_pulls.remove(snapshot)

        tasks, most = list[asyncio.Task[None]](), 0
        for number in range(2 * int(LEAVE / 61.0)):
            with suppress(RefusalError):
                snapshot = await frozen.snapshotter.newest(frozen.peer.log.position.index)
                tasks.append(asyncio.create_task(pull(snapshot)))
            for _ in range(5):  # what was broken off ends
                await asyncio.sleep(0)
            assert len(open_pulls) <= HELD
            assert number > 2 or frozen.holds(open_pulls[0]), "a minute is no long time"
            most = max(most, len(open_pulls))
            frozen.seconds += 61.0
            frozen.step()
        assert most == HELD
        assert len(tasks) > HELD, "those before were broken off"
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(scenario())


def test_whoever_is_refused_hears_why() -> None:
    async def scenario() -> None:
        frozen = Frozen()
        for _ in range(HELD):
            frozen.fetch_from(await frozen.snapshotter.newest(frozen.peer.log.position.index))
            frozen.step()
        with pytest.raises(RefusalError, match="as many snapshots as there is room for"):
            await frozen.snapshotter.newest(frozen.peer.log.position.index)
        assert (await frozen.snapshotter.newest(0)).index == 1, "an older one is given at once"

    asyncio.run(scenario())


def test_joiners_find_the_same_snapshot_everywhere_whatever_strangers_have_asked_for() -> None:
    async def scenario() -> None:
        frozen = Frozen()
        frozen.step(log_at(EVERY))
        await frozen.snapshotter.freeze_if_due()
        frozen.step()
        assert (await frozen.snapshotter.newest(EVERY + 1)).index == EVERY + 1
        assert (await frozen.snapshotter.newest(1)).index == EVERY

    asyncio.run(scenario())


def test_what_was_asked_for_gives_way_at_a_chosen_entry() -> None:
    async def scenario() -> None:
        frozen = Frozen()
        frozen.step(log_at(EVERY))
        await frozen.snapshotter.freeze_if_due()
        (first,) = frozen.told
        frozen.step()
        asked = await frozen.snapshotter.newest(EVERY + 1)
        for snapshot in (first, asked):
            frozen.fetch_from(snapshot)
        frozen.step(log_at(2 * EVERY))
        await frozen.snapshotter.freeze_if_due()
        assert [snapshot.index for snapshot in frozen.told] == [EVERY, 2 * EVERY]
        assert frozen.holds(first)
        assert not frozen.holds(asked)

    asyncio.run(scenario())


def test_a_snapshot_without_room_is_no_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """Regression: four lines in 20 seconds told volunteers of something harmless."""

    async def scenario() -> None:
        frozen = Frozen()
        for place in range(1, 4):
            frozen.step(log_at(place * EVERY))
            await frozen.snapshotter.freeze_if_due()
            frozen.fetch_from(frozen.told[0])
            frozen.fetch_from(frozen.told[-1])
        assert [snapshot.index for snapshot in frozen.told] == [EVERY, 2 * EVERY]

    with caplog.at_level(logging.DEBUG, "peers.transfer.snapshots"):
        asyncio.run(scenario())
    [line] = [record for record in caplog.records if "made no snapshot" in record.message]
    assert line.levelno == logging.DEBUG
    assert "another peer still fetches an older one" in line.message


@pytest.mark.parametrize("cycle", [1.0, 30.0, LEAVE])
def test_a_joiner_gets_a_new_snapshot_while_strangers_fetch_whatever_there_is(cycle: float) -> None:
    """Strangers that come again and again ask for the newest after each entry and let go of none. A joiner comes at any
    time, fetches a little after each entry for as long as a slow link may take, and has lost nothing meanwhile."""

    async def scenario() -> None:
        frozen = Frozen()
        strangers, ages, index = set[Snapshot](), list[int](), 1
        joining: tuple[Snapshot, float] | None = None
        while len(ages) < 4:
            index += 1
            frozen.seconds += cycle
            frozen.step()
            await frozen.snapshotter.freeze_if_due()
            if joining is None:
                joining = await frozen.snapshotter.newest(1), frozen.seconds + LEAVE
                ages.append(index - joining[0].index)
            snapshot, done_at = joining
            assert frozen.holds(snapshot), "the joiner has to begin anew"
            frozen.fetch_from(snapshot)
            if frozen.seconds >= done_at:
                joining = None
            with suppress(RefusalError):
                strangers.add(await frozen.snapshotter.newest(index))
            for one in filter(frozen.holds, strangers):
                frozen.fetch_from(one)
            strangers = set(filter(frozen.holds, strangers))
        assert max(ages) <= 2 * EVERY + LEAVE / cycle

    asyncio.run(scenario())
