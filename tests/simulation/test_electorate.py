"""A leader that lies can't choose who has a say: ways in which liars that are less than half tried to become most.

And what the honest make of peers that are there and do nothing: they wait for nobody for long.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
from tests.simulator.leading_lies import KeepsFew

from peers.log.settings import RunSettings, Timing
from peers.presence.heartbeat import TAIL, Heartbeat
from peers.protocol.events import Event, HeartbeatsSeen, TrainingDone, TrainingProgress
from peers.protocol.gathering import Gathering
from peers.protocol.leader import Leader
from peers.protocol.messages import Excluded, LeaseRequest, Message, Ready
from peers.protocol.rounds import Attempt, Round
from tests.simulation.test_malice import QUICK
from tests.simulation.test_weaknesses import SETTINGS
from tests.simulator.liars import Lie
from tests.simulator.links import Faults
from tests.simulator.malice import KINDS, Deceit, plant
from tests.simulator.simulated_peer import SimulatedPeer
from tests.simulator.simulation import Swarm

FIVE, SEVEN = ("peer0", "peer1"), ("peer0", "peer1", "peer2")
"""The liars among so many: nearly half, and the first who could lead."""
FOREVER = float("inf")


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
        plant(swarm, tuple(Deceit(name, (kind,), entries, FOREVER) for name in liars))
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


@pytest.mark.parametrize("liars", [FIVE, ("peer3", "peer4")], ids=str)
def test_a_round_that_is_named_a_minoritys_certifies_nothing(
    monkeypatch: pytest.MonkeyPatch, liars: Sequence[str]
) -> None:
    make = Leader._new_round

    def named_alone(self: Leader, name: Attempt) -> Round:
        round = make(self, name)
        if self._me not in liars or self._log.last is None or name.alone:
            return round
        gone = tuple(peer for peer in self._log.voters if peer not in round.peers)
        return round.model_copy(update={"name": name.model_copy(update={"alone": True}), "gone": gone})

    monkeypatch.setattr(Leader, "_new_round", named_alone)
    goes_on(swarm_of(5, liars), 10, 1500.0)


def test_most_who_call_themselves_a_minority_take_nobody_along(monkeypatch: pytest.MonkeyPatch) -> None:
    """A leader that stalls for the partition grace goes on alone with its ally and one of the honest."""

    def lies(self: Gathering) -> bool:
        return self._me in FIVE and self._log.last is not None and self._log.last.index >= 2

    enough, cut_off = Gathering._enough, Gathering._is_cut_off
    monkeypatch.setattr(Gathering, "_enough", lambda self, peers: not lies(self) and enough(self, peers))

    def is_cut_off(self: Gathering, now: float, live: dict[str, Heartbeat]) -> bool:
        waited = now - self.awaited.times.first
        return waited > QUICK.partition_grace + 3 if lies(self) else cut_off(self, now, live)

    monkeypatch.setattr(Gathering, "_is_cut_off", is_cut_off)
    monkeypatch.setattr(
        Gathering,
        "_may_go_on_alone",
        lambda self, peers: self._log.is_majority([(p, self._ready[p].incarnation) for p in peers]),
    )
    swarm = swarm_of(5, FIVE, seed=1, entries=3)
    swarm.run(1000.0)
    assert not swarm.captures


# What liars can bring about ------------------------------------------------------------------------------------
def test_an_ally_that_refuses_connections_takes_nobody_its_say() -> None:
    swarm = swarm_of(5, FIVE, entries=8)
    assert swarm.run(200.0, until=lambda: swarm.longest >= 2)
    swarm.faults = replace(swarm.faults, broken=(("peer1", "peer3"), ("peer1", "peer4")))
    goes_on(swarm, 30, 1500.0)


class Pushes(KeepsFew):
    """It says to all whom it does not need that they are left out, and its ally that it does not reach them."""

    @property
    def victims(self) -> list[str]:
        return sorted(set(self.liar.log.voters) - set(self.liar.allies))[1:]

    def beats(self, to: str, heartbeat: Heartbeat) -> Heartbeat:
        unreached = tuple(sorted(victim[-TAIL:] for victim in self.victims))
        is_ally = self.liar.name == self.liar.allies[-1]
        return heartbeat.model_copy(update={"unreached": unreached}) if is_ally else heartbeat

    def hears(self, sender: str, message: object) -> Iterator[tuple[str, Message]]:
        if isinstance(message, Ready | LeaseRequest) and sender in self.victims:
            yield sender, Excluded(position=message.position, reason="no data can be exchanged")


@pytest.mark.parametrize("liars", [FIVE, SEVEN], ids=len)
def test_who_is_told_that_it_is_left_out_keeps_its_say(monkeypatch: pytest.MonkeyPatch, liars: Sequence[str]) -> None:
    monkeypatch.setitem(KINDS, "pushes", Pushes)
    swarm = swarm_of(2 * len(liars) + 1, liars, "pushes", entries=3)
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
                made = {"sequence": sequence, "speed": 1e9, "vote": "", "trouble": "", "unreached": ()}
                strangers = tuple(base.model_copy(update={"peer": f"zz{number}", **made}) for number in range(4))
                swarm.handle(one, HeartbeatsSeen(strangers))
        swarm.at(2.0, boast)

    assert swarm.run(60.0, until=lambda: swarm.longest >= 2)
    boast()
    swarm.run(300.0)
    assert not swarm.captures


def test_whoever_is_behind_since_entries_come_fast_keeps_its_say() -> None:
    swarm = swarm_of(5, FIVE)
    for peer in swarm.peers.values():
        peer.speed *= 10.0
    goes_on(swarm, 10, 1500.0)


# Peers that are there and do nothing ---------------------------------------------------------------------------
def hang(swarm: Swarm, names: set[str]) -> None:
    """The workers of these peers show nothing any more; their peer processes go on."""
    soon, later = swarm.soon, swarm.later

    def is_lost(peer: SimulatedPeer, event: Event) -> bool:
        return peer.name in names and isinstance(event, TrainingDone | TrainingProgress)

    def told_soon(peer: SimulatedPeer, event: Event, delays: float = 1.0) -> None:
        if not is_lost(peer, event):
            soon(peer, event, delays)

    def told_later(peer: SimulatedPeer, event: Event, seconds: float) -> None:
        if not is_lost(peer, event):
            later(peer, event, seconds)

    swarm.soon, swarm.later = told_soon, told_later  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("peers", "hung", "at_once"),
    [(4, 2, False), (5, 3, False), (6, 4, False), (4, 1, True), (5, 2, True), (7, 3, True)],
)
def test_whose_workers_hang_holds_the_others_up_for_a_bounded_time(peers: int, hung: int, at_once: bool) -> None:
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


def test_whoever_comes_to_itself_again_counts_again() -> None:
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
