"""A leader that lies can't choose who has a say: ways in which a minority of liars tried to become most (R12).

And what the honest make of peers that are there and do nothing: they wait for nobody for long.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from peers.log.certificate import Group
from peers.log.settings import RunSettings, Timing
from peers.messages.messages import Begin, Message, Propose, Ready
from peers.protocol.events import Event, HeartbeatsSeen, TrainingDone, TrainingProgress
from tests.simulation.test_malice import QUICK
from tests.simulation.test_weaknesses import SETTINGS
from tests.simulator.liars import Lie, remade
from tests.simulator.links import Faults
from tests.simulator.malice import KINDS, Deceit, plant
from tests.simulator.simulated_peer import SimulatedPeer
from tests.simulator.simulation import Swarm

FIVE, SEVEN = ("peer0", "peer1"), ("peer0", "peer1", "peer2")
"""The liars among so many: nearly half, and the first who could lead."""


class Watched(Swarm):
    """A swarm of honest peers and liars, whose honest peers' logs are looked at after each entry."""

    captures: tuple[str, ...] = ()

    def watch(self, liars: Sequence[str]) -> None:
        def look(name: str) -> None:
            peer = self.peers[name]
            voters = peer.peer.log.voters
            if peer.is_honest and 2 * len(set(voters) & set(liars)) > len(voters):
                self.captures += (f"{self.now:.0f} s: {name} has the voters {', '.join(voters)}",)

        self.on_apply = look


def swarm_of(
    peers: int,
    liars: Sequence[str] = (),
    kind: str = "keeps few",
    timing: Timing = QUICK,
    seed: int = 1,
    entries: int = 1,
    **more: object,
) -> Watched:
    """Peers of which some tell a lie once there are so many entries. They train for five seconds, or twelve."""
    settings: RunSettings = replace(SETTINGS, inner_steps=5, samples_per_lease=10, minimum_peers=peers, timing=timing)
    faults = Faults()
    swarm = Watched(seed, settings, faults, one_child=False, speeds=(1.0, 0.9, 0.4), **more)  # type: ignore[arg-type]
    if liars:
        plant(swarm, tuple(Deceit(name, kind, entries) for name in liars))
    swarm.watch(liars)
    for number in range(peers):
        swarm.start(f"peer{number}")
    return swarm


def goes_on(swarm: Watched, entries: int, seconds: float) -> None:
    """The honest make so many entries more in this time, and the liars do not become most of the voters."""
    goal = swarm.longest + entries
    assert swarm.run(seconds, until=lambda: swarm.longest >= goal), f"{swarm.longest} of {goal} entries"
    assert not swarm.captures


# Liars that lead -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("liars", [FIVE, ("peer1", "peer2"), SEVEN], ids=len)
def test_a_leader_that_says_that_all_whom_it_does_not_need_are_gone_makes_no_entry(liars: Sequence[str]) -> None:
    swarm = swarm_of(2 * len(liars) + 1, liars)
    goes_on(swarm, 10, 1500.0)
    assert {len(one.peer.log.voters) for one in swarm.honest} == {2 * len(liars) + 1}


class CallsItAMinority(Lie):
    """Its rounds are those of a minority: of itself, its ally, and one of the others."""

    def says(self, to: str, message: Message) -> Iterator[tuple[str, Message]]:
        if isinstance(message, Begin) and self.log.last is not None:
            yield to, remade(message, round=remade(message.round, group=self._group()))
        elif isinstance(message, Propose) and message.justify is None:
            yield to, remade(message, group=self._group())
        else:
            yield to, message

    def _group(self) -> Group:
        names = [*self.allies, *self.victims[:1]]
        return tuple((peer, self.log.incarnations.get(peer, 0)) for peer in sorted(names))


@pytest.mark.parametrize("liars", [FIVE, ("peer3", "peer4")], ids=str)
def test_a_round_that_is_named_a_minoritys_takes_nobody_along(
    monkeypatch: pytest.MonkeyPatch, liars: Sequence[str]
) -> None:
    monkeypatch.setitem(KINDS, "calls it a minority", CallsItAMinority)
    goes_on(swarm_of(5, liars, "calls it a minority"), 10, 1500.0)


class StallsFirst(CallsItAMinority):
    """And it begins none of them before the partition grace is over."""

    _ticks = 0

    def volunteers(self) -> Iterator[tuple[str, Message]]:
        self._ticks = self._ticks + 1 if self.log.leader_of(0) == self.me else 0
        yield from ()

    def says(self, to: str, message: Message) -> Iterator[tuple[str, Message]]:
        if not isinstance(message, Begin | Propose) or self._ticks > QUICK.partition_grace + 3:
            yield from super().says(to, message)


@pytest.mark.thorough
def test_most_who_call_themselves_a_minority_take_nobody_along(monkeypatch: pytest.MonkeyPatch) -> None:
    """A leader that stalls for the partition grace goes on alone with its ally and one of the honest."""
    monkeypatch.setitem(KINDS, "stalls first", StallsFirst)
    swarm = swarm_of(5, FIVE, "stalls first", seed=1, entries=3)
    swarm.run(1000.0)
    assert not swarm.captures


# What liars can bring about ------------------------------------------------------------------------------------
def test_an_ally_that_refuses_connections_takes_nobody_its_say() -> None:
    swarm = swarm_of(5, FIVE, entries=8)
    assert swarm.run(200.0, until=lambda: swarm.longest >= 2)
    swarm.faults = replace(swarm.faults, broken=(("peer1", "peer3"), ("peer1", "peer4")))
    goes_on(swarm, 30, 1500.0)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["refuses all", "leaves out", "reaches nobody"])
@pytest.mark.parametrize("liars", [FIVE, SEVEN], ids=len)
def test_who_is_kept_out_by_liars_keeps_its_say(kind: str, liars: Sequence[str]) -> None:
    swarm = swarm_of(2 * len(liars) + 1, liars, kind, entries=3)
    swarm.run(900.0)
    assert not swarm.captures


def test_peers_that_boast_of_their_speed_take_nobody_its_say() -> None:
    swarm = swarm_of(5, FIVE, entries=6)
    sequence = 0

    def boast() -> None:
        nonlocal sequence
        sequence += 1
        for one in swarm.honest:
            if (base := swarm.peers["peer0"].heartbeat) is not None:
                made = {"sequence": sequence, "speed": 1e9, "trouble": "", "unreached": ()}
                strangers = tuple(base.model_copy(update={"peer": f"zz{number}", **made}) for number in range(4))
                swarm.handle(one, HeartbeatsSeen(strangers))
        swarm.at(2.0, boast)

    assert swarm.run(60.0, until=lambda: swarm.longest >= 2)
    boast()
    swarm.run(300.0)
    assert not swarm.captures


def test_a_peer_that_is_behind_since_entries_come_fast_keeps_its_say() -> None:
    swarm = swarm_of(5, FIVE)
    for peer in swarm.peers.values():
        peer.speed *= 10.0
    goes_on(swarm, 10, 1500.0)


# Peers that are there and do nothing ---------------------------------------------------------------------------
def hang(swarm: Swarm, names: set[str]) -> None:
    """The workers of these peers show nothing any more; their peer processes go on."""
    handle = swarm.handle

    def told(peer: SimulatedPeer, event: Event) -> None:
        if not (peer.name in names and isinstance(event, TrainingDone | TrainingProgress)):
            handle(peer, event)

    swarm.handle = told  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("peers", "hung", "at_once"),
    [
        (4, 2, False),
        (5, 2, True),
        *(pytest.param(*each, marks=pytest.mark.thorough) for each in ((5, 3, False), (6, 4, False))),
        *(pytest.param(*each, marks=pytest.mark.thorough) for each in ((4, 1, True), (7, 3, True))),
    ],
)
def test_peers_whose_workers_hang_hold_the_others_up_for_a_bounded_time(peers: int, hung: int, at_once: bool) -> None:
    """They know themselves that they can do nothing. Regression: 2,400 s where it was half of them."""
    swarm, names = swarm_of(peers, timing=Timing()), set[str]()
    hang(swarm, names)
    assert swarm.run(300.0, until=lambda: swarm.longest >= 3)
    for number in range(hung):
        names.add(f"peer{peers - 1 - number}")
        if not at_once:
            swarm.run(120.0)
    goes_on(swarm, 3, 200.0)
    assert all(one.peer.lineage.doubt is None for one in swarm.honest), "as most of those who can take part"


@pytest.mark.parametrize(("peers", "hung"), [(4, 3), (5, 3), (5, 4)])
def test_what_befalls_most_leaves_the_run_to_nobody(peers: int, hung: int) -> None:
    """Regression: all whose source of text was down said farewell, and whoever had it went on alone, certified."""
    swarm, names = swarm_of(peers, timing=Timing()), set[str]()
    hang(swarm, names)
    assert swarm.run(300.0, until=lambda: swarm.longest >= 3)
    names |= {f"peer{number}" for number in range(hung)}
    swarm.run(300.0)
    assert all(len(one.peer.log.voters) == peers for one in swarm.honest)
    for name in sorted(names):  # they are started again when it is there
        swarm.kill(name)
    names.clear()
    for number in range(hung):
        swarm.start(f"peer{number}")
    goes_on(swarm, 3, 200.0)


def test_a_peer_that_comes_to_itself_again_counts_again() -> None:
    swarm, names = swarm_of(4, timing=Timing()), {"peer3"}
    hang(swarm, names)
    swarm.run(300.0)
    assert all("peer3" not in one.peer.log.voters for one in swarm.honest[:3])
    names.clear()
    swarm.kill("peer3")
    swarm.start("peer3")
    assert swarm.run(300.0, until=lambda: all("peer3" in one.peer.log.voters for one in swarm.honest))


@pytest.mark.parametrize(("peers", "late"), [(5, 2), (6, 3)])
def test_voters_that_are_always_late_hold_nobody_up(peers: int, late: int) -> None:
    swarm = swarm_of(peers, timing=Timing())
    later = swarm.later

    def told_later(peer: SimulatedPeer, event: Event, seconds: float) -> None:
        is_late = isinstance(event, TrainingDone) and int(peer.name[-1]) >= peers - late
        later(peer, event, 4.0 * seconds if is_late else seconds)

    swarm.later = told_later  # type: ignore[method-assign]
    goes_on(swarm, 10, 600.0)


class Silent(Lie):
    """It is at work for ever, and never ready."""

    def says(self, to: str, message: Message) -> Iterator[tuple[str, Message]]:
        if not isinstance(message, Ready):
            yield to, message


@pytest.mark.parametrize("liars", [("peer4",), ("peer3", "peer4")], ids=len)
def test_voters_that_never_take_part_hold_nobody_up(monkeypatch: pytest.MonkeyPatch, liars: Sequence[str]) -> None:
    monkeypatch.setitem(KINDS, "silent", Silent)
    goes_on(swarm_of(5, liars, "silent", timing=Timing()), 10, 600.0)
