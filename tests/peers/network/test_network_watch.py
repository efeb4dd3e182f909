"""A machine that slept, was offline, or is elsewhere is noticed, once, when something can be done about it."""

from __future__ import annotations

import asyncio
import re
import socket
from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peers.network import own_network
from peers.network.own_network import (
    INTERVAL,
    LONG_OFFLINE,
    LONG_SLEEP,
    _changes,
    _network_towards,
    _observe,
    watch_clock,
    watch_network,
)

MOVED = "it is in another network"
HOME, CAFE, HOME6 = "192.168.3.2 by 192.168.3.1", "10.7.0.9 by 10.7.0.1", "2001:db8:3::/64"


class Machine:
    """Is looked at once a second."""

    def __init__(self, *networks: str) -> None:
        self._looks: deque[tuple[float, frozenset[str]]] = deque()
        self._changes = _changes(iter(self._looks.popleft, None))
        self._clock = 1000.0
        self.changes = [change for change in [self.look(*networks)] if change]

    def look(self, *networks: str, after: float = INTERVAL) -> str:
        self._clock += after
        self._looks.append((self._clock, frozenset(networks)))
        return next(self._changes)

    def offline(self, seconds: float) -> None:
        for _ in range(int(seconds / INTERVAL)):
            assert not self.look()


def test_a_clock_that_is_set_is_named_and_so_is_its_return(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: a peer whose clock had jumped was told that no other could be reached."""
    monkeypatch.setattr(own_network, "INTERVAL", 0.0)
    caplog.set_level("INFO")
    offsets = iter([50.0, 50.1, 7250.0, 7250.2, 50.3, 40.0])

    with pytest.raises(RuntimeError):  # what StopIteration becomes in a coroutine
        asyncio.run(watch_clock(lambda: next(offsets)))
    said = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert [level for level, _ in said] == ["WARNING", "INFO", "WARNING"]
    assert "clock was set forward by 7200 s" in said[0][1]
    assert said[1][1] == "this machine's clock is right again"
    assert "clock was set back by 10 s" in said[2][1]


def test_where_nothing_changes_nothing_is_said() -> None:
    machine = Machine(HOME, HOME6)
    assert machine.changes == []
    assert not any(machine.look(HOME, HOME6, after=after) for after in (0.0, INTERVAL, LONG_SLEEP))


def test_sleep_is_noticed_once() -> None:
    machine = Machine(HOME)
    assert machine.look(HOME, after=3600 + INTERVAL) == "it slept for 3600 s"
    assert not machine.look(HOME)


def test_another_network_is_noticed_once() -> None:
    machine = Machine(HOME, HOME6)
    assert machine.look(CAFE) == MOVED
    assert not machine.look(CAFE)
    assert machine.look(HOME, HOME6) == MOVED


def test_a_laptop_is_carried_to_another_place() -> None:
    """It wakes with the old address, loses it, and gets the new one: it is told of what to redial when it can be."""
    machine = Machine(HOME)
    assert machine.look(HOME, after=3600 + INTERVAL) == "it slept for 3600 s"
    machine.offline(4)
    assert machine.look(CAFE) == MOVED


def test_who_wakes_without_a_network_is_told_when_there_is_one() -> None:
    machine = Machine(HOME)
    assert not machine.look(after=3600 + INTERVAL)
    machine.offline(3)
    assert machine.look(HOME) == "it slept for 3600 s"


@pytest.mark.parametrize(("seconds", "change"), [(LONG_OFFLINE - 2, ""), (12.0, "it had no network for 12 s")])
def test_the_same_network_again(seconds: float, change: str) -> None:
    """A short gap is TCP's to mend; after a long one it would wait as long again."""
    machine = Machine(HOME)
    machine.offline(seconds)
    assert machine.look(HOME) == change


def test_one_more_network_breaks_nothing() -> None:
    machine = Machine(HOME)
    assert not machine.look(HOME, HOME6)
    assert machine.look(HOME) == MOVED


def test_the_first_network_of_who_starts_offline_breaks_nothing() -> None:
    machine = Machine()
    machine.offline(3)
    assert not machine.look(HOME)


LOOKS = st.lists(
    st.tuples(st.floats(0, 4000), st.frozensets(st.sampled_from((HOME, CAFE, HOME6)))), min_size=2, max_size=30
)


@given(LOOKS)
def test_whatever_is_seen_all_sleep_is_told_of(looks: list[tuple[float, frozenset[str]]]) -> None:
    machine, told, slept = Machine(*looks[0][1]), 0.0, 0.0
    for after, networks in (*looks[1:], (INTERVAL, frozenset({HOME}))):
        slept += after - INTERVAL if after - INTERVAL >= LONG_SLEEP else 0.0
        change = machine.look(*networks, after=after)
        assert networks or not change
        told += float(seconds[1]) if (seconds := re.match(r"it slept for (\d+) s", change)) else 0.0
    assert told == pytest.approx(slept, abs=len(looks))


def test_changes_that_come_together_are_told_together() -> None:
    assert Machine(HOME).look(CAFE, after=3600 + INTERVAL) == f"it slept for 3600 s, {MOVED}"


def test_the_watch_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_network, "INTERVAL", 0.0)
    looks = iter([(0, frozenset({HOME})), (1, frozenset({CAFE}))])
    last = (2, frozenset({CAFE}))

    async def scenario() -> None:
        changed: asyncio.Queue[None] = asyncio.Queue()
        task = asyncio.create_task(watch_network(lambda: changed.put_nowait(None), lambda: next(looks, last)))
        async with asyncio.timeout(60):
            await changed.get()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert changed.empty()

    asyncio.run(scenario())


def test_this_machine_is_looked_at() -> None:
    (first, here), (second, still_here) = _observe(), _observe()
    assert here == still_here
    assert first <= second
    assert _network_towards("127.0.0.1") is not None
    assert _network_towards("no address") is None


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6")
def test_ipv6_networks_are_halves_of_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket.socket, "connect", lambda self, where: None)
    monkeypatch.setattr(socket.socket, "getsockname", lambda self: ("2001:db8:3::77:1", 5, 0, 0))
    assert _network_towards("2606:4700:4700::1111") == "2001:db8:3::/64"
