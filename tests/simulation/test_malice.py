"""Swarms in which some peers lie: random lives, and each kind of lie by itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import NamedTuple

import pytest

from peers.log import state as electorate
from peers.log.settings import Timing
from peers.presence.heartbeat import Heartbeat, PeerState
from peers.protocol.pacemaker import death
from peers.transfer.snapshots import Offered, Vouched
from tests.simulation.test_schedules import SETTINGS
from tests.simulator.claims import GivesNoLease
from tests.simulator.history import InvariantError
from tests.simulator.liars import Liar
from tests.simulator.malice import KINDS, LEADERS, REDUCERS, Deceit, plant, promised
from tests.simulator.schedules import (
    CALM,
    EVENLY,
    FAST,
    IMPATIENT,
    LONGEST_TRAINING,
    TIMINGS,
    Life,
    draw_life,
    live,
    report,
)
from tests.simulator.simulation import Swarm

SEEDS = 10
LEADER = "peer1"
"""The second entry's, and those after it."""
QUICK = Timing(grace=10.0, round_timeout=8.0, partition_grace=60.0)
"""What breaks is broken for ever: this says so soon."""


def life_with(kind: str, timing: Timing = TIMINGS[0], liars: Sequence[str] = ()) -> Life:
    """Return five peers on a good network, of which one lies: the leader, if it is a leader's lie."""
    names = liars or ((LEADER,) if kind in LEADERS else ("peer3",))
    return Life(1, 5, CALM, (), timing, liars=tuple(Deceit(name, kind) for name in names))


@pytest.mark.thorough
def test_random_lives_with_liars() -> None:
    """`make lives` has hundreds."""
    for seed in range(SEEDS):
        life = draw_life(seed, kinds=tuple(KINDS))
        try:
            live(life)
        except Exception:
            pytest.fail(report(life))


def test_lives_with_liars_are_drawn_from_all_there_is() -> None:
    lives = [draw_life(seed, kinds=tuple(KINDS)) for seed in range(400)]
    assert draw_life(3, kinds=tuple(KINDS)) == lives[3]
    assert {liar.kind for life in lives for liar in life.liars} == set(KINDS)
    blows = {blow.kind for life in lives for blow in life.blows}
    assert blows == {"kill", "lose", "leave", "cut off", "deafen", "stop"}
    assert {life.timing for life in lives} == {*TIMINGS, IMPATIENT}
    assert {life.pace for life in lives} == {1.0, FAST}
    assert {liar.entries == 0 for life in lives for liar in life.liars} == {True, False}, "at the founding, and later"
    for life in lives:
        liars, victims = {liar.peer for liar in life.liars}, {blow.peer for blow in life.blows}
        assert liars
        assert not liars & victims
        assert 2 * len(liars) < life.peers - len(victims), "whatever befalls the honest, they are more than half"
    assert any(2 * len(life.liars) + 1 == life.peers for life in lives), "sybils up to just below half"


class Lived(NamedTuple):
    """What came of a life: how often peer3 spoke, in how long, and the entries of the longest log."""

    messages: int
    seconds: float
    entries: int


@cache
def lived(life: Life) -> Lived:
    """Live a life, once for all tests that want it. Raises: InvariantError."""
    swarm = live(life)
    return Lived(swarm.messages["peer3"], swarm.now, max(len(one.peer.lineage.entries) for one in swarm.peers.values()))


def messages_a_second(life: Life) -> float:
    """Return how often peer3 spoke. Raises: InvariantError."""
    once = lived(life)
    return once.messages / once.seconds


class Pauses:
    """How long a swarm takes from entry to entry."""

    def __init__(self, swarm: Swarm) -> None:
        self._swarm = swarm
        self._made: dict[int, float] = {}
        swarm.on_apply = lambda name: self._note()

    def _note(self) -> None:
        self._made.setdefault(self._swarm.longest, self._swarm.now)

    @property
    def longest(self) -> float:
        """The longest one after the founding, that which goes on included."""
        return max(later - earlier for earlier, later in pairwise([*self._made.values(), self._swarm.now]))


@pytest.mark.parametrize("kind", ["never proposes", "mute leader", "slow leader", "begins again"])
@pytest.mark.parametrize(("peers", "liars"), [(3, 1), (5, 2)])
def test_liars_that_lead_one_after_another_cost_no_more_than_is_promised(kind: str, peers: int, liars: int) -> None:
    swarm = Swarm(1, replace(SETTINGS, timing=Timing()), unevenness=EVENLY)
    plant(swarm, tuple(Deceit(f"peer{number}", kind) for number in range(1, liars + 1)))
    pauses = Pauses(swarm)
    for number in range(peers):
        swarm.start(f"peer{number}")
    bound = promised(Timing(), LONGEST_TRAINING, liars)
    assert swarm.run(3 * bound, until=lambda: swarm.longest >= 4)
    assert pauses.longest <= bound


def longest_pause(life: Life) -> float:
    watched: list[Pauses] = []
    live(life, lambda swarm: watched.append(Pauses(swarm)))
    return watched[0].longest


@pytest.mark.thorough
def test_in_random_lives_no_entry_takes_longer_than_is_promised() -> None:
    for seed in range(1000, 1004):
        life = replace(draw_life(seed, kinds=tuple(KINDS)), blows=())
        bound = promised(life.timing, LONGEST_TRAINING, len(life.liars))
        assert longest_pause(life) <= bound, f"seed {seed}"


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.thorough) if kind in REDUCERS else kind for kind in KINDS]
)
def test_an_honest_majority_withstands(kind: str) -> None:
    assert messages_a_second(life_with(kind)) > 0


@pytest.mark.parametrize("kind", ["invented lock", "two proposals", "makes absent", "false speed"])
def test_who_leads_and_lies_is_withstood_with_short_limits(kind: str) -> None:
    """Regression: a claim to hold an entry was believed; and a leader that named all others absent made an entry that
    counted nobody else."""
    live(life_with(kind, QUICK, ("peer3" if kind == "invented lock" else LEADER,)))


@cache
def entries_beside(kind: str | None, timing: Timing = SETTINGS.timing) -> int:
    """Return how many entries five peers make in twenty minutes, one of which lies for all that time."""
    swarm = Swarm(1, replace(SETTINGS, timing=timing), unevenness=EVENLY)
    if kind is not None:
        plant(swarm, (Deceit("peer3", kind),))
    for number in range(5):
        swarm.start(f"peer{number}")
    swarm.run(1200.0)
    return swarm.longest


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["mute", "trickles", "starves", "silent voter", "makes absent", "seems ready"])
def test_who_is_late_on_purpose_costs_no_more_than_an_exchange_and_an_heir(kind: str) -> None:
    """Regression: one member had leader after leader end its attempts. Trainings take some seconds here, as long as an
    exchange may; so this is half of the entries, where it would be a tenth of those of a real run."""
    assert entries_beside(kind) >= 0.45 * entries_beside(None)


@pytest.mark.thorough
def test_a_voter_that_whispers_costs_no_more_than_a_round() -> None:
    """Regression: members that heard its messages signed nothing that takes its say, and the leader never heard it: one
    of five cost a fifth of all entries, for as long as it went on."""
    assert entries_beside("whispers", Timing()) >= entries_beside(None, Timing()) - 1


@pytest.mark.parametrize("seed", [880143, 880101])
def test_who_signs_another_average_for_each_keeps_nobody_from_an_entry(seed: int) -> None:
    """Regression: each held an entry of its own, which its author and the author's allies may have signed, too."""
    live(draw_life(seed, kinds=("many averages",)))


@pytest.mark.parametrize("kind", ["many begins", "invented roots", "tells some"])
@pytest.mark.parametrize(
    ("peers", "liar"),
    [
        (3, "peer0"),
        (5, "peer1"),
        *(pytest.param(*each, marks=pytest.mark.thorough) for each in ((3, "peer1"), (7, "peer2"))),
    ],
)
def test_a_leader_that_tells_each_something_else_makes_no_two_entries(kind: str, peers: int, liar: str) -> None:
    """Regression: all came to the same payload, and each half of the members to an entry of its own, certified."""
    swarm = Swarm(1, replace(SETTINGS, timing=Timing(), minimum_peers=peers), speeds=(1.0,), unevenness=EVENLY)
    plant(swarm, (Deceit(liar, kind, 2),))
    for number in range(peers):
        swarm.start(f"peer{number}")
    assert swarm.run(1000.0, until=lambda: swarm.longest >= 10)


@pytest.mark.parametrize("kind", ["keeps few", "leaves out"])
@pytest.mark.parametrize(("peers", "liars"), [(5, 2), pytest.param(11, 5, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("first", [0, pytest.param(1, marks=pytest.mark.thorough)])
def test_liars_of_whom_one_leads_do_not_become_the_majority(kind: str, peers: int, liars: int, first: int) -> None:
    """Regression: with one entry, of as few as make a majority, allies that were nearly half became more than half of
    its roster, and certified all that followed by themselves."""
    names = [f"peer{number}" for number in range(first, first + liars)]
    live(replace(life_with(kind, QUICK, names), peers=peers))


FOUNDING = (Deceit("peer0", "refuses all", 0),)


def test_who_refuses_all_at_the_founding_keeps_nobody_from_it() -> None:
    """Regression: a liar that founded a run alone led those who waited, though they did not believe its founding."""
    live(replace(life_with("refuses all", QUICK), liars=FOUNDING))


@pytest.mark.parametrize(
    "kind",
    [
        "gives no lease",
        *(pytest.param(kind, marks=pytest.mark.thorough) for kind in ("other leases", "one lease for all")),
    ],
)
def test_whoever_gives_false_leases_at_the_founding_keeps_nobody_from_it(kind: str) -> None:
    """Regression: five honest peers of which all are needed to found the run went from it to another leader and back,
    each of whom refused the samples that the other had given; or they waited for samples for ever."""
    liar, timing = Deceit("peer0", kind, 0), replace(TIMINGS[1], grace=10.0)
    live(Life(101, 6, replace(CALM, longest_delay=0.05), (), timing, pace=FAST, liars=(liar,)))


@pytest.mark.parametrize(
    ("said", "every"),
    [({"unreached": tuple(f"peer{name:04}" for name in range(1, 5))}, 1), ({"index": 1}, 30), ({"index": 1}, 1)],
    ids=["it reaches nobody", "it has founded, now and then", "it has founded"],
)
def test_whatever_a_founder_says_of_itself_it_is_given_up(
    said: dict[str, object], every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: the time for which others wait for its samples began anew, or never ended."""

    class Says(GivesNoLease):
        beats_told = 0

        def beats(self, to: str, heartbeat: Heartbeat) -> Heartbeat:
            self.beats_told += 1
            more = said if self.beats_told % every == 0 else {}
            return heartbeat.model_copy(update={"state": PeerState.TRAINING, **more})

    monkeypatch.setitem(KINDS, "says", Says)
    swarm = Swarm(1, replace(SETTINGS, timing=Timing(), minimum_peers=3), unevenness=EVENLY)
    plant(swarm, (Deceit("peer0", "says", 0),))
    for number in range(5):
        swarm.start(f"peer{number}")
    limit = 2 * promised(Timing(), LONGEST_TRAINING, 1)
    assert swarm.run(limit, until=lambda: swarm.longest >= 2)


def test_nobody_founds_a_run_alone_while_others_wait_to_do_so() -> None:
    """Regression: whoever founds a run alone certifies that by its own signature."""
    live(replace(life_with("unasked certificates", QUICK), liars=(Deceit("peer0", "unasked certificates", 0),)))


@pytest.mark.parametrize("kind", ["mute", "wrong blocks", "mute leader", "never proposes", "silent voter"])
def test_a_leader_that_comes_to_no_entry_is_given_up_for_longer_than_another_needs(kind: str) -> None:
    """Regression: with short rounds it was asked again after 16 seconds, in the midst of the next leader's attempt; and
    one that lacks its own blocks, or sends such as no encoder makes, began again and again."""
    assert messages_a_second(life_with(kind, TIMINGS[0], (LEADER,))) > 0


def test_a_leader_that_refuses_the_samples_it_gave_founds_no_run() -> None:
    """Regression: whoever was refused asked it again, for ever."""
    live(replace(life_with("one lease for all"), liars=(Deceit("peer0", "one lease for all", 0),)))


def test_liars_that_claim_the_heaviest_log_in_turn_keep_no_newcomer_out() -> None:
    """Regression: whenever another one was asked, its time began anew, and no honest peer was ever asked."""
    swarm = Swarm(0, replace(SETTINGS, timing=Timing(), snapshot_every=1000), unevenness=EVENLY)
    liars = ("peer0", "peer3")
    plant(swarm, tuple(Deceit(name, "claims in turn") for name in liars))
    for number in range(5):
        swarm.start(f"peer{number}")
    swarm.run(100.0, until=lambda: swarm.longest >= 3)
    swarm.start("late")
    late = swarm.peers["late"].peer
    limit = (len(liars) + 1) * death(Timing()) + 60.0
    assert swarm.run(limit, until=lambda: late.log.position.index >= swarm.longest - 1)


def test_a_leader_that_gives_no_samples_keeps_no_newcomer_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: it did so for as long as it led."""
    monkeypatch.setattr(electorate, "TERM", 8)
    swarm = Swarm(0, replace(SETTINGS, timing=Timing()), unevenness=EVENLY)
    plant(swarm, (Deceit(LEADER, "keeps newcomers out"),))
    for number in range(4):
        swarm.start(f"peer{number}")
    assert swarm.run(200.0, until=lambda: swarm.longest >= 3)
    swarm.start("late")
    goal = electorate.TERM + 4
    swarm.run(1000.0, until=lambda: swarm.longest >= goal)
    assert swarm.history.counted["late"]


@pytest.mark.thorough
def test_the_same_seed_gives_the_same_life() -> None:
    def trace() -> list[str]:
        return [" ".join(map(str, line)) for line in live(draw_life(5, kinds=("mixtures",)), traced=True).trace]

    first = trace()
    assert len(first) > 100
    assert trace() == first


@pytest.mark.parametrize("kind", ["replays", "mixtures", "unasked certificates", "many readys"])
def test_lies_are_told_besides_the_truth(kind: str) -> None:
    """What cannot be packed would be withstood by anybody. A lie may hold up the others: it is entries that count."""
    assert messages_an_entry(life_with(kind)) > messages_an_entry(life_with("false rate"))


def messages_an_entry(life: Life) -> float:
    """Return how often peer3 spoke for each entry that was made."""
    once = lived(life)
    return once.messages / once.entries


# Planted faults ------------------------------------------------------------------------------------------------
def believe_the_liar(vouched: Vouched, offered: Mapping[str, Offered]) -> list[str]:
    """A joiner that takes anybody's state."""
    return [next((donor for donor in offered if donor == "peer3"), next(iter(offered)))]


def test_a_false_state_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Vouched, "choose", believe_the_liar)

    def kill_one(swarm: Swarm) -> None:
        swarm.at(60.0, lambda: swarm.kill("peer4"))
        swarm.at(65.0, lambda: swarm.disk_of("peer4").lose())  # else it replays what it missed, and takes no state
        swarm.at(70.0, lambda: swarm.start("peer4"))

    with pytest.raises(InvariantError, match="another state"):
        live(life_with("false snapshot"), kill_one)


def test_a_liar_that_falls_over_its_own_lies_harms_nobody() -> None:
    swarms: list[Swarm] = []

    def stumble(swarm: Swarm) -> None:
        swarms.append(swarm)
        swarm.at(30.0, lambda: setattr(swarm.peers["peer3"], "take_in", lambda event: 1 // 0))

    live(life_with("mute"), stumble)
    [swarm] = swarms
    assert any("stumbles" in line for line in swarm.trace)
    assert isinstance(swarm.peers["peer3"], Liar)
