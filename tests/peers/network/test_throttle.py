"""Caps and measurements, on a clock that jumps ahead whenever everybody waits."""

from __future__ import annotations

import asyncio
import math
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

import pytest

from peers.network.channel import STALL_TIMEOUT
from peers.network.throttle import (
    BURST,
    INTERVAL,
    INTERVALS,
    KNOWN_FOR,
    PATIENCE,
    PIECE,
    ROUNDS,
    SHARE,
    Caps,
    LinkTime,
    RateMeter,
    Throttle,
)

MEGABYTE = 1_000_000
CHUNK_BYTES = 1 << 19
T = TypeVar("T")


class Skipping(selectors.SelectSelector):
    """Instead of waiting, says how long it would have waited."""

    def __init__(self) -> None:
        super().__init__()
        self.skipped = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        events = super().select(0)
        if not events:
            assert timeout is not None, "everybody waits, and nothing will ever happen"
            self.skipped += max(timeout, 0.0)
        return events


class SimulatedLoop(asyncio.SelectorEventLoop):
    """Time passes only while everybody waits, and then at once."""

    def __init__(self) -> None:
        self._skipping = Skipping()
        super().__init__(self._skipping)

    def time(self) -> float:
        return self._skipping.skipped


def simulate(scenario: Coroutine[Any, Any, T]) -> T:
    """Like asyncio.run, in no time."""
    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        return runner.run(scenario)


def now() -> float:
    return asyncio.get_running_loop().time()


# Throttle -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("callers", [1, 5])
@pytest.mark.parametrize(
    ("rate", "piece"),
    [(20_000, 1000), (20_000, PIECE), (MEGABYTE, 1000), (MEGABYTE, PIECE), (100 * MEGABYTE, PIECE)],
)
def test_the_rate_is_kept_within_five_percent(rate: float, piece: int, callers: int) -> None:
    async def scenario() -> None:
        throttle, pieces = Throttle(rate), max(1, round(20 * rate / piece / callers))

        async def send() -> None:
            for _ in range(pieces):
                await throttle.take(piece)

        await asyncio.sleep(100.0)  # somebody who was idle has saved up nothing worth speaking of
        began = now()
        await asyncio.gather(*(send() for _ in range(callers)))
        assert pieces * piece * callers / (now() - began) == pytest.approx(rate, rel=0.05)

    simulate(scenario())


def test_no_second_carries_more_than_the_cap_and_a_burst() -> None:
    """Whatever the pauses between: who was idle may save up a twentieth of a second, and no more."""

    async def scenario() -> None:
        throttle, passed = Throttle(MEGABYTE), list[tuple[float, int]]()
        for pause in (0.0, 0.01, 0.1, 3600.0, 0.0, 1.0):
            await asyncio.sleep(pause)
            for _ in range(500):
                await throttle.take(5000)
                passed.append((now(), 5000))
        for place, (start, _) in enumerate(passed):
            second = sum(count for at, count in passed[place : place + 250] if at < start + 1.0)
            assert second <= (1.0 + BURST) * MEGABYTE + 5000

    simulate(scenario())


def test_without_a_cap_nothing_waits() -> None:
    async def scenario() -> None:
        for _ in range(1000):
            await Throttle(None).take(1 << 40)
        assert now() == 0.0

    simulate(scenario())


def test_waiting_callers_are_served_in_turn() -> None:
    async def scenario() -> None:
        throttle, served = Throttle(1000), list[tuple[int, float]]()

        async def send(number: int) -> None:
            await throttle.take(1000)
            served.append((number, round(now(), 1)))

        await asyncio.gather(*(send(number) for number in range(4)))
        assert served == [(0, 1.0), (1, 2.0), (2, 3.0), (3, 4.0)]

    simulate(scenario())


# RateMeter ------------------------------------------------------------------------------------------------------
class Meter(RateMeter):
    """With a clock of its own."""

    def __init__(self) -> None:
        self.now = 0.0
        super().__init__(lambda: self.now)

    def carry(self, rate: float, seconds: float, piece: int = 10_000) -> None:
        """That many bytes a second arrive, one piece after another."""
        for _ in range(round(rate * seconds / piece)):
            self.now += piece / rate
            self.passed(piece)


def test_time_in_which_a_round_waits_does_not_count() -> None:
    """Regression: one member that gave nothing made rounds longer, so that all links seemed slower, so that the next
    round waited longer for it: up to the manifest's time limit."""
    meter, steady = Meter(), Meter()
    for one in (meter, steady):
        one.begin_round()
        one.carry(MEGABYTE, 3.0)
    meter.now += 100.0
    for one in (meter, steady):
        one.carry(MEGABYTE, 3.0)
    assert meter.rate == pytest.approx(steady.rate, rel=0.05)


def test_outside_of_rounds_nothing_is_measured() -> None:
    meter = Meter()
    assert meter.rate == 0
    meter.carry(MEGABYTE, 3.0)
    assert meter.rate == 0
    meter.begin_round()
    assert meter.rate == 0


@pytest.mark.parametrize("seconds", [0.5, 5.0])
def test_a_steady_rate_is_measured(seconds: float) -> None:
    meter = Meter()
    meter.now = 1000.0
    meter.begin_round()
    meter.carry(MEGABYTE, seconds)
    assert meter.rate == pytest.approx(MEGABYTE, rel=0.05)


def test_the_last_round_alone_shows_that_a_link_has_become_slower() -> None:
    meter = Meter()
    assert meter.last == 0
    for rate in (10 * MEGABYTE, MEGABYTE):
        meter.begin_round()
        meter.carry(rate, 3.0)
    assert meter.last == pytest.approx(MEGABYTE, rel=0.05)
    assert meter.rate == pytest.approx(10 * MEGABYTE, rel=0.05)
    meter.begin_round()
    assert meter.last == pytest.approx(MEGABYTE, rel=0.05), "the present round has carried nothing yet"


def test_a_few_bytes_count_over_the_time_that_they_took() -> None:
    """A contribution in a thin format passes in less than half a second."""
    meter = Meter()
    meter.begin_round()
    meter.now += 0.3  # until the first of them goes out
    for _ in range(10):
        meter.now += 0.01
        meter.passed(MEGABYTE // 100, 0.01)
    assert meter.last == pytest.approx(MEGABYTE, rel=0.05)


def test_a_measurement_after_the_last_round_counts_more_than_it() -> None:
    meter = Meter()
    meter.now = 1.0
    meter.begin_round()
    meter.carry(MEGABYTE, 3.0)
    meter.knows(5 * MEGABYTE)
    assert meter.last == 5 * MEGABYTE
    meter.now += 1.0
    meter.begin_round()
    meter.carry(MEGABYTE, 3.0)
    assert meter.last == pytest.approx(MEGABYTE, rel=0.05)


def test_a_round_that_waits_for_one_slow_link_does_not_make_the_others_seem_slow() -> None:
    """Regression: after a round in which a thin uplink took twenty times as long, most links seemed to need as long."""
    meter = Meter()
    meter.begin_round()
    meter.carry(10 * MEGABYTE, 2.5)
    meter.carry(MEGABYTE / 2, 40.0)
    assert meter.rate == pytest.approx(10 * MEGABYTE, rel=0.05)


@pytest.mark.parametrize("streams", [1, 4])
def test_a_slow_link_is_not_taken_for_a_fast_one(streams: int) -> None:
    """Regression: two chunks that arrived within half a second, after many without any, counted as that rate."""
    meter = Meter()
    meter.begin_round()
    rate = 250_000  # 2 Mbit/s
    for _ in range(20):
        meter.now += streams * CHUNK_BYTES / rate
        for _ in range(streams):  # which share the link, and so end together
            meter.passed(CHUNK_BYTES, streams * CHUNK_BYTES / rate)
    assert rate * 0.8 < meter.rate < rate * 1.3


def test_the_best_quarter_of_a_round_counts() -> None:
    """A link that waits for slower ones carries more than it was seen to carry on the whole."""
    meter = Meter()
    meter.begin_round()
    for rate in (MEGABYTE, 10 * MEGABYTE, MEGABYTE):
        meter.now += 1.0
        meter.carry(rate, 4.0)
    assert meter.rate == pytest.approx(10 * MEGABYTE, rel=0.05)


def test_a_round_of_hours_is_no_harder_to_remember() -> None:
    """Regression: the rate was looked up in all half seconds of the round, by every stream four times a second."""
    meter = Meter()
    meter.begin_round()
    meter.carry(MEGABYTE, 3600.0, piece=MEGABYTE)
    meter.carry(10 * MEGABYTE, 3600.0, piece=10 * MEGABYTE)
    assert meter.rate == pytest.approx(10 * MEGABYTE, rel=0.05)
    assert len(meter._intervals) <= INTERVALS
    meter.begin_round()
    meter.carry(MEGABYTE, 3.0)
    assert meter.rate == pytest.approx(10 * MEGABYTE, rel=0.05)
    for _ in range(ROUNDS):
        meter.begin_round()
        meter.carry(MEGABYTE, 3.0)
    assert meter.rate == pytest.approx(MEGABYTE, rel=0.05)


def test_a_moment_in_which_much_was_read_is_no_rate() -> None:
    """Regression: what had come while a process got no turn was read at once, and counted as what its link carries."""
    meter = Meter()
    meter.begin_round()
    meter.carry(MEGABYTE, 10.0)
    meter.now += 0.4
    meter.passed(MEGABYTE * 2 // 5)
    meter.carry(MEGABYTE, 10.0)
    assert meter.rate == pytest.approx(MEGABYTE, rel=0.05)


def test_a_rate_that_was_measured_without_a_round_counts_for_an_hour() -> None:
    """However little of it rounds ask for; and one round that looks faster is none."""
    meter = Meter()
    meter.now = 1000.0
    assert meter.known_for == math.inf
    meter.knows(10 * MEGABYTE)
    for rate in (MEGABYTE, 20 * MEGABYTE, MEGABYTE):
        meter.begin_round()
        meter.carry(rate, 1.0)
    assert meter.known_for == pytest.approx(3.0)
    assert meter.rate == 10 * MEGABYTE
    meter.now += KNOWN_FOR
    assert meter.rate == pytest.approx(20 * MEGABYTE, rel=0.05)


def test_a_link_carries_no_less_than_it_usually_did() -> None:
    """Whoever it was measured with may have had the slower link."""
    meter = Meter()
    meter.knows(MEGABYTE)
    for _ in range(ROUNDS):
        meter.begin_round()
        meter.carry(10 * MEGABYTE, 1.0)
    assert meter.rate == pytest.approx(10 * MEGABYTE, rel=0.05)


def test_links_get_slower_too() -> None:
    meter = Meter()
    meter.begin_round()
    meter.carry(10 * MEGABYTE, 1.0)
    for _ in range(ROUNDS - 1):
        meter.begin_round()
        meter.carry(MEGABYTE, 1.0)
    assert meter.rate == pytest.approx(10 * MEGABYTE, rel=0.05)
    meter.begin_round()
    meter.carry(MEGABYTE, 1.0)
    assert meter.rate == pytest.approx(MEGABYTE, rel=0.05)


def test_what_was_under_way_when_the_round_began_is_no_rate() -> None:
    """Chunks that lay in buffers while this peer was late arrive all at once."""
    meter = Meter()
    meter.begin_round()
    meter.now += 1e-4
    meter.passed(CHUNK_BYTES)
    meter.carry(MEGABYTE, 5.0)
    assert meter.rate <= MEGABYTE + CHUNK_BYTES / INTERVAL


def test_a_round_in_which_nothing_moved_does_not_hide_what_is_known() -> None:
    meter = Meter()
    meter.begin_round()
    meter.carry(MEGABYTE, 1.0)
    meter.begin_round()
    meter.now += 60.0
    assert meter.rate == pytest.approx(MEGABYTE, rel=0.05)


def test_caps_are_told_in_what_people_know_of_their_link() -> None:
    assert Caps.of_megabits(8.0, None) == Caps(upload=1e6, download=None)
    assert Caps() == Caps.of_megabits(None, None)


@pytest.mark.parametrize(
    ("caps", "seen", "carries"),
    [
        (Caps(), (20.0, 30.0), 20.0),
        (Caps(upload=10.0), (20.0, 30.0), 10.0),
        (Caps(upload=10.0, download=5.0), (20.0, 30.0), 5.0),
        (Caps(upload=10.0), (4.0, 30.0), 4.0),
        (Caps(upload=10.0), (0.0, 0.0), 0.0),
    ],
)
def test_no_link_is_taken_to_carry_more_than_its_caps(caps: Caps, seen: tuple[float, float], carries: float) -> None:
    """Regression: three donors with 100 Mbit/s each measured up to 190, and the one with most was dealt two thirds."""
    assert caps.of_both(*seen) == carries


# Giving way -----------------------------------------------------------------------------------------------------
def busy_link(rate: float = 0.0) -> LinkTime:
    link = LinkTime(now)
    link.rate = rate
    link.clear()
    return link


def test_bytes_that_are_in_no_hurry_pass_at_once_while_nothing_else_is_under_way() -> None:
    async def scenario() -> None:
        await LinkTime(now).give_way(PIECE)
        assert now() == 0.0

    simulate(scenario())


def test_bytes_that_are_in_no_hurry_wait_for_the_end_of_a_round() -> None:
    async def scenario() -> None:
        link = busy_link(rate=1e9)
        asyncio.get_running_loop().call_later(2.0, link.set)
        await link.give_way(PIECE)
        assert now() == 2.0

    simulate(scenario())


def test_nothing_gives_way_for_ever() -> None:
    """A reader takes a stream on which nothing comes for dead."""

    async def scenario() -> None:
        link = busy_link()
        for piece in range(1, 4):
            await link.give_way(PIECE)
            assert now() == piece * PATIENCE

    simulate(scenario())
    assert PATIENCE < STALL_TIMEOUT / 2


def test_on_a_link_that_is_always_busy_all_that_gives_way_has_a_share_of_it_together() -> None:
    """Whoever joins a run with several fragments would starve otherwise: a round is always under way."""

    async def scenario() -> None:
        link = busy_link(rate=10e6)
        passed = 0

        async def send() -> None:
            nonlocal passed
            while now() < 120.0:
                await link.give_way(PIECE)
                passed += PIECE

        async def rounds() -> None:
            while now() < 120.0:  # one after the other
                link.set()
                link.clear()
                await asyncio.sleep(1.0)

        async with asyncio.timeout(200), asyncio.TaskGroup() as group:
            group.create_task(rounds())
            await asyncio.sleep(20.0)
            for _ in range(4):
                group.create_task(send())
        assert passed == pytest.approx(100.0 * SHARE * link.rate, rel=0.1)

    simulate(scenario())


def test_a_crowd_that_has_gone_leaves_no_debt() -> None:
    """Regression: whoever came after many readers had to wait for what all of them had been promised."""

    async def scenario() -> None:
        link = busy_link(rate=1e6)
        await asyncio.sleep(60.0)
        for _ in range(100):
            link.patience(PIECE)
        await asyncio.sleep(PATIENCE)
        assert link.patience(PIECE) == pytest.approx(PIECE / (SHARE * link.rate))

    simulate(scenario())


def test_a_link_that_is_mostly_free_is_left_to_its_rounds_while_there_are_any() -> None:
    async def scenario() -> None:
        link = LinkTime(now)
        link.rate = 10e6
        for _ in range(20):
            link.clear()
            assert link.patience(PIECE) == PATIENCE
            await asyncio.sleep(4.0)
            link.set()
            await asyncio.sleep(6.0)

    simulate(scenario())
