"""The traffic of a month: counted, kept, and held to limits. The clock here is invented."""

from __future__ import annotations

import asyncio
import errno
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from opendiloco.owner import monthly
from opendiloco.owner.facts import Facts
from opendiloco.owner.monthly import LEAST_SHARE, MonthlyTraffic
from peers.metrics import MONTH_BYTES

GB = 10**9
MIDDLE = datetime(2026, 11, 16, tzinfo=UTC)
"""15 days before the month's end."""


class Machine:
    """Volunteers of one state folder, by their names, and a clock that the test moves."""

    def __init__(self, state: Path, now: datetime = MIDDLE) -> None:
        self.state, self.now = state, now

    def traffic(self, up: float | None = None, down: float | None = None, peer: str = "a") -> MonthlyTraffic:
        folder = self.state / f"run-{peer}" / peer
        folder.mkdir(parents=True, exist_ok=True)
        return MonthlyTraffic(folder, (up and up * GB, down and down * GB), lambda: self.now)

    def move(self, traffic: MonthlyTraffic, up: float = 0.0, down: float = 0.0) -> MonthlyTraffic:
        """Have a session of the volunteer move so much."""

        async def session() -> None:
            async with traffic.counting(lambda: (int(up * GB), int(down * GB))):
                pass

        asyncio.run(session())
        return traffic


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def moved(traffic: MonthlyTraffic) -> list[float]:
    return [use.moved / GB for use in traffic.uses()]


def test_a_month_is_counted_over_restarts_and_volunteers_and_ends_by_utc(machine: Machine) -> None:
    machine.move(machine.traffic(), 3, 5)
    again = machine.move(machine.traffic(), 1, 2)
    assert moved(again) == [4, 7]
    other = machine.move(machine.traffic(peer="b"), 10)
    assert moved(other) == [14, 7]
    assert MONTH_BYTES.labels("sent")._value.get() == 14 * GB
    machine.now = datetime(2026, 11, 30, 23, 59, 59, tzinfo=UTC)
    assert moved(other) == [14, 7]
    machine.now += timedelta(seconds=1)
    assert moved(other) == [0, 0]
    assert moved(machine.move(machine.traffic(), 1)) == [1, 0]


def test_the_count_is_written_now_and_then(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A crash loses the bytes of no more than a minute."""
    assert monthly.KEEP_SECONDS <= 60
    monkeypatch.setattr(monthly, "KEEP_SECONDS", 0.0)
    traffic = machine.traffic()

    async def session() -> None:
        async with traffic.counting(lambda: (2 * GB, GB)), asyncio.timeout(20):
            while moved(machine.traffic()) != [2, 1]:
                await asyncio.sleep(0)

    asyncio.run(session())


@pytest.mark.parametrize("content", [b"", b"{}x", b'{"months": {"2026-11": [-1, 2]}}', b'{"months": 3}'])
def test_a_file_with_anything_else_is_passed_over_and_named(
    machine: Machine, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    machine.traffic()
    file = machine.state / "run-a" / "a" / monthly.FILE_NAME
    file.write_bytes(content)
    assert moved(machine.move(machine.traffic(), 1)) == [1, 0]
    assert f"{file} cannot be read" in caplog.text
    assert moved(machine.traffic()) == [1, 0]


def test_a_disk_that_is_full_is_told_of_once(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(monthly, "write_whole", fail)
    traffic = machine.move(machine.move(machine.traffic(), 1), 1)
    assert caplog.text.count("No space left on device. Free some space.") == 1
    assert moved(traffic) == [2, 0]


@pytest.mark.parametrize(
    ("up", "share", "says"),
    [
        (1, 1.0, ""),
        (10, 90 / 150, "near the limit: up 160 GB by 2026-12-01 at this pace"),
        (89, 11 / (89 * 15), "near the limit: up 1.42 TB by 2026-12-01 at this pace"),
        (101, LEAST_SHARE, "near the limit: up 1.62 TB by 2026-12-01 at this pace"),
    ],
    ids=["far from it", "the pace is too high", "nearly spent", "spent"],
)
def test_near_a_limit_contributions_get_the_share_that_it_leaves(
    machine: Machine, up: float, share: float, says: str
) -> None:
    traffic = machine.move(machine.traffic(up=100), up, 2)
    assert traffic.share() == pytest.approx(share)
    assert traffic.lines() == [
        f"this month (UTC): up {up} GB of 100 GB · down 2 GB",
        *([says] if says else []),
    ]
    assert max(map(len, traffic.lines())) <= 80


def test_the_pace_is_that_of_a_day_and_a_limit_is_near_from_nine_tenths_on(machine: Machine) -> None:
    """A machine that has moved nothing for days does not overrun."""
    traffic = machine.move(machine.traffic(up=100), up=89)
    machine.now += timedelta(days=10)
    assert traffic.share() == 1.0
    machine.move(traffic, up=1)
    machine.now += timedelta(days=4)
    assert traffic.share() == monthly.NEAR
    assert traffic.lines()[1].endswith("up 90 GB by 2026-12-01 at this pace")


def test_what_is_downloaded_makes_no_contribution_thinner(machine: Machine) -> None:
    """A joiner's download of the state is no pace, and contributions only go up. Regression: a spent limit on downloads
    came without a warning."""
    traffic = machine.move(machine.traffic(up=100, down=100), down=89)
    assert (traffic.share(), len(traffic.lines())) == (1.0, 1)
    machine.move(traffic, down=1)
    assert traffic.share() == 1.0
    assert traffic.lines()[1:] == ["near the limit: down 1.44 TB by 2026-12-01 at this pace"]


def test_a_clock_that_was_wrong_for_a_while_loses_no_month(machine: Machine) -> None:
    traffic = machine.move(machine.traffic(), 97)
    machine.now -= timedelta(days=40)
    assert moved(machine.move(traffic, 1)) == [1, 0]
    machine.now += timedelta(days=40)
    assert moved(machine.traffic()) == [97, 0]


def test_a_limit_that_is_overrun_leaves_the_least_share_until_the_last_second(machine: Machine) -> None:
    traffic = machine.move(machine.traffic(up=1), 2)
    machine.now = datetime(2026, 11, 30, 23, 59, 59, 999_999, tzinfo=UTC)
    assert traffic.share() == LEAST_SHARE


def test_without_limits_nothing_is_said_and_nothing_pauses(machine: Machine) -> None:
    traffic = machine.move(machine.traffic(), 1e6, 1e6)
    assert (traffic.lines(), traffic.conditions(), traffic.share()) == ([], (), 1.0)


@pytest.mark.parametrize("direction", ["up", "down"])
def test_a_spent_limit_pauses_until_the_month_is_over(machine: Machine, direction: str) -> None:
    def reason(traffic: MonthlyTraffic) -> str | None:
        [condition] = traffic.conditions()
        assert (condition.name, condition.is_long) == (f"monthly-{direction}load", True)
        return condition.reason(Facts(datetime(2026, 1, 1)))

    def limit() -> MonthlyTraffic:
        return machine.traffic(up=100) if direction == "up" else machine.traffic(down=100)

    traffic = machine.move(limit(), **{direction: 97.9})
    assert reason(traffic) is None
    traffic = machine.move(limit(), **{direction: 0.1})
    said = f"the month's limit on {direction}loads is spent, until 2026-12-01 00:00 UTC"
    assert reason(traffic) == said
    assert reason(limit()) == said, "also after a restart"
    machine.now = datetime(2026, 12, 1, tzinfo=UTC)
    assert reason(traffic) is None
