"""Swarms in which some pairs can't talk, links are slow, and peers are slow or stall on purpose: with the manifest's
default timing, unless a test says otherwise. What counts in the end, and how many rounds it costs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest

from peers.log.header import Header
from peers.log.settings import RunSettings, Timing
from peers.messages.messages import Begin, Message, Ready, Vote
from peers.protocol.effects import Note, SendChunk, Trouble
from peers.protocol.states import State
from peers.values.wire import digest_of
from tests.simulator.history import InvariantError
from tests.simulator.links import Faults, Pair, Rate
from tests.simulator.simulated_workload import BLOCK_BYTES
from tests.simulator.simulation import REACH_DELAY, Swarm

TIMING = Timing()
SETTINGS = RunSettings("simulated", digest_of(b"manifest"), 10, 20, 10, 1, TIMING)
MINUTE = 60.0
BLOCKS = 7
"""In a payload, and as many chunks: some for each who reduces. Most of what a simulation takes is spent on chunks."""
MANY_BLOCKS = 64
"""As many chunks as payloads have: where a link carries them one after another."""


class Tally:
    """What the entries of a swarm count, by peer; each entry once."""

    def __init__(self, swarm: Swarm) -> None:
        self.swarm = swarm
        self.tokens = Counter[str]()
        self.headers: dict[bytes, Header] = {}
        swarm.on_apply = self.see

    def see(self, name: str) -> None:
        header = self.swarm.peers[name].peer.log.last
        if header is not None and header.digest not in self.headers:
            self.headers[header.digest] = header
            for peer in header.peers:
                self.tokens[peer] += header.tokens_of(peer)

    def lineages(self) -> int:
        """Entries that have another one beside them."""
        return len(self.headers) - len({header.previous for header in self.headers.values()})


def swarm_of(
    number: int,
    faults: Faults | None = None,
    settings: RunSettings = SETTINGS,
    block_count: int = BLOCKS,
    one_child: bool = True,
) -> Swarm:
    """Return a swarm whose peers train for about as long as each other. Where no rates are given, each link carries a
    payload in a second."""
    rate = Rate(up=block_count * BLOCK_BYTES, down=block_count * BLOCK_BYTES)
    rates = tuple((f"peer{name}", rate) for name in range(number))
    swarm = Swarm(1, settings, with_rates(faults or Faults(), rates), one_child=one_child, block_count=block_count)
    swarm.training_time = lambda steps: steps * swarm.random.uniform(0.8, 1.2)  # type: ignore[method-assign]
    for name in range(number):
        swarm.start(f"peer{name}")
    return swarm


def with_rates(faults: Faults, rates: tuple[tuple[str, Rate], ...]) -> Faults:
    """Return the same faults, with these links where they say nothing of them."""
    return faults if faults.rates else replace(faults, rates=rates)


def broken_now(swarm: Swarm, *pairs: Pair) -> None:
    """From now on nothing passes between these, and no other pairs are broken."""
    swarm.faults = replace(swarm.faults, broken=pairs)


def counted(number: int, faults: Faults, seconds: float = 600.0) -> tuple[int, Counter[str], Swarm]:
    """Entries and tokens of each peer in so much time, after the first minute."""
    swarm = swarm_of(number, faults)
    swarm.run(MINUTE)
    tally, before = Tally(swarm), swarm.longest
    swarm.run(seconds)
    assert tally.lineages() == 0
    return swarm.longest - before, tally.tokens, swarm


def troubles(swarm: Swarm) -> list[tuple[float, str, str]]:
    """When each peer was told which trouble."""
    told = [(line[0], line[1], what) for line in swarm.trace for what in line if isinstance(what, Trouble)]
    return [(float(str(time)), str(name), what.reason) for time, name, what in told]


# Pairs that can't talk -----------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def unbroken() -> int:
    """The entries of a swarm of six, all of whom reach each other."""
    return counted(6, Faults())[0]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("broken", "minutes"),
    [
        ((("peer3", "peer5"),), 10),
        ((("peer0", "peer5"),), 10),
        ((("peer0", "peer1"), ("peer2", "peer3")), 32),
    ],
    ids=["two that need not lead", "the first to lead", "two pairs"],
)
def test_pairs_that_cant_talk_cost_little(broken: tuple[Pair, ...], minutes: int, unbroken: int) -> None:
    """Regression: 34 rounds instead of 113, and both of a pair counted nothing for ever. Each is out for a term while
    the other leads (R1); else each lacks the chunks that the other averages. All six have led after 96 entries, in half
    an hour."""
    entries, tokens, _ = counted(6, Faults(broken=broken), minutes * MINUTE)
    assert entries >= 0.75 * unbroken * minutes / 10
    assert min(tokens[f"peer{name}"] for name in range(6)) >= 0.5 * max(tokens.values())


@pytest.mark.parametrize(
    ("way", "entries", "counted"),
    [(("peer1", "peer0"), 40, "peer0"), (("peer0", "peer1"), 10, "peer1")],
    ids=["to the fast one", "to the slow one"],
)
def test_two_whose_blocks_go_one_way_only_go_on_with_the_work_of_one(way: Pair, entries: int, counted: str) -> None:
    """Messages pass both ways. The work of the peer whose blocks do not arrive can't count, and the other's does. If
    that is the lesser part both refuse it until each has led a view in vain (R5): that costs two view timers, as it
    would for ever if less than half could never count."""
    rates = tuple((f"peer{name}", Rate(up=BLOCKS * BLOCK_BYTES, down=BLOCKS * BLOCK_BYTES)) for name in range(2))
    settings = replace(SETTINGS, minimum_peers=2)
    swarm = Swarm(1, settings, Faults(rates=rates), block_count=BLOCKS, speeds=(1.0, 0.2))
    for name in range(2):
        swarm.start(f"peer{name}")
    assert swarm.run(5 * MINUTE, until=lambda: swarm.longest >= 4)
    tally, before = Tally(swarm), swarm.longest
    swarm.on_chunk = lambda sender, send: (sender, send.to) != way
    swarm.run(20 * MINUTE)
    assert swarm.longest - before >= entries
    assert tally.tokens[counted] >= 0.8 * sum(tally.tokens.values())


def test_two_groups_that_one_peer_reaches_make_one_lineage() -> None:
    """The larger group and the peer between them are most; the others are told that they are few."""
    swarm = swarm_of(6)
    swarm.run(MINUTE)
    broken_now(swarm, *((one, other) for one in ("peer0", "peer1") for other in ("peer2", "peer3", "peer4")))
    before = swarm.longest
    swarm.run(10 * MINUTE)
    assert swarm.longest - before > 20
    certified = {one.peer.log.position.head for one in swarm.living if one.peer.lineage.doubt is None}
    assert len(certified) <= 2, "one lineage, of which some may be an entry behind"


@pytest.mark.thorough
def test_relayed_pairs_carry_little(unbroken: int) -> None:
    """A peer that many reach through a relay only averages nothing, if others can share the work fairly."""
    relayed = (("peer0", "peer1"), ("peer0", "peer2"))
    swarm = swarm_of(6, Faults(relayed=relayed))
    swarm.run(MINUTE)
    detours = Counter[bool]()

    def on_chunk(sender: str, send: SendChunk) -> bool:
        detours[(sender, send.to) in relayed or (send.to, sender) in relayed] += 1
        return True

    swarm.on_chunk = on_chunk
    before = swarm.longest
    swarm.run(600.0)
    assert detours[True] <= 0.15 * detours.total()
    assert swarm.longest - before >= 0.75 * unbroken


def test_all_are_relayed_and_all_count() -> None:
    names = [f"peer{number}" for number in range(4)]
    relayed = tuple((one, other) for one in names for other in names if one < other)
    entries, tokens, _ = counted(4, Faults(relayed=relayed))
    assert entries > 30
    assert min(tokens[name] for name in names) >= 0.85 * max(tokens.values())


def test_a_pair_that_breaks_in_the_middle_of_a_round_costs_a_short_delay() -> None:
    swarm = swarm_of(5)
    swarm.run(MINUTE)
    tally = Tally(swarm)
    assert swarm.run(100.0, until=lambda: swarm.peers["peer3"].peer.state is State.AVERAGING)
    before, began = swarm.longest, swarm.now
    broken_now(swarm, ("peer2", "peer3"))
    assert swarm.run(100.0, until=lambda: swarm.longest > before)
    assert swarm.now - began <= REACH_DELAY + TIMING.heartbeat_expiry + 5, "no time limit runs out"
    swarm.run(200.0)
    assert len(swarm.living[0].peer.log.roster) == 5
    assert tally.lineages() == 0


# Who can't take part is told, and stops -------------------------------------------------------------------------
def trains(swarm: Swarm, name: str) -> bool:
    return swarm.peers[name].peer.trainer.is_training


def test_who_reaches_nobody_is_told_and_stops_and_comes_back() -> None:
    swarm = swarm_of(4, block_count=MANY_BLOCKS)
    swarm.run(MINUTE)
    names = [name for name in swarm.peers if name != "peer2"]
    broken_now(swarm, *(("peer2", name) for name in names))
    broke = swarm.now
    assert swarm.run(MINUTE, until=lambda: bool(swarm.peers["peer2"].peer.hindrances.reported_reason)), (
        "told within a minute"
    )
    assert "cannot reach the leader" in troubles(swarm)[-1][2]
    swarm.run(5.0)
    assert not trains(swarm, "peer2")
    goal = swarm.longest + 5
    assert swarm.run(200.0, until=lambda: swarm.longest >= goal), "the others go on"
    assert not trains(swarm, "peer2")
    assert swarm.now > broke
    broken_now(swarm)
    assert swarm.run(
        5 * MINUTE,
        until=lambda: (
            len(swarm.peers["peer0"].peer.log.roster) == 4 and not swarm.peers["peer2"].peer.hindrances.reported_reason
        ),
    ), "it looks whether its work can count, and is in the next entry"


def test_two_who_cant_talk_are_told_and_come_together_again() -> None:
    """Regression: each formed a lineage of its own, and nobody was told."""
    swarm = swarm_of(2, one_child=False)
    swarm.run(MINUTE)
    broken_now(swarm, ("peer0", "peer1"))
    assert swarm.run(3 * MINUTE, until=lambda: all(one.peer.hindrances.reported_reason for one in swarm.living))
    swarm.run(2 * MINUTE)
    broken_now(swarm)
    assert swarm.run(3 * MINUTE, until=lambda: {len(one.peer.log.roster) for one in swarm.living} == {2}), (
        "together again, in one lineage"
    )
    assert len({one.peer.log.position.index for one in swarm.living}) == 1


def test_who_cant_reach_the_others_and_founds_a_run_alone_joins_theirs_later() -> None:
    broken = tuple(("peer0", f"peer{name}") for name in range(1, 4))
    swarm = swarm_of(4, Faults(broken=broken, suspicion=0.1), one_child=False)
    swarm.run(5 * MINUTE)
    assert swarm.peers["peer1"].index > 0
    broken_now(swarm)
    assert swarm.run(5 * MINUTE, until=lambda: {len(one.peer.log.roster) for one in swarm.living} == {4})


def test_two_pairs_of_four_that_cant_talk_leave_nobody_out() -> None:
    """Regression: one of them was left out, since a reducer had to be reached by all."""
    swarm = swarm_of(4)
    swarm.run(MINUTE)
    broken_now(swarm, ("peer0", "peer1"), ("peer2", "peer3"))
    swarm.run(MINUTE)
    tally = Tally(swarm)
    swarm.run(10 * MINUTE)
    assert len(tally.tokens) == 4
    assert min(tally.tokens.values()) >= 0.25 * max(tally.tokens.values()), "each is out while the other one leads"
    assert tally.lineages() == 0


@pytest.mark.thorough
@pytest.mark.parametrize(("speed", "counts"), [(0.12, True), (0.05, False)])
def test_who_is_too_slow_is_told_and_stops(speed: float, counts: bool) -> None:
    """Regression: with less than about a sixteenth of the fastest speed a volunteer trained for ever for nothing."""
    settings = replace(SETTINGS, inner_steps=16, samples_per_lease=32)
    swarm = swarm_of(4, settings=settings)
    swarm.training_time = lambda steps: 20 * steps * swarm.random.uniform(0.9, 1.1)  # type: ignore[method-assign]
    slow = swarm.peers["peer3"]
    slow.speed = speed
    tally = Tally(swarm)
    swarm.run(MINUTE)
    assert bool(slow.peer.hindrances.reported_reason) is not counts, "reported_reason within a minute"
    trained = 0
    for _ in range(80):
        swarm.run(100.0)
        trained += trains(swarm, "peer3")
    assert bool(tally.tokens["peer3"]) is counts
    if not counts:
        assert trained < 40, "now and then it finds out whether it has become faster"
        assert [reason for _, name, reason in troubles(swarm) if name == "peer3" and "tokens a second" in reason]


# Slow links, and who stalls ------------------------------------------------------------------------------------
@pytest.mark.thorough
def test_a_slow_link_is_measured_and_then_counts() -> None:
    """Regression: one whose link needed longer than the limit was never measured, and cost all two thirds of the
    rounds."""
    timing, seconds = Timing(grace=30.0, round_timeout=30.0, partition_grace=60.0), 8.0
    rate = Rate(up=MANY_BLOCKS * BLOCK_BYTES / seconds)
    links = Faults(rates=tuple((f"peer{name}", rate) for name in range(5)))
    swarm = swarm_of(5, links, replace(SETTINGS, timing=timing), MANY_BLOCKS)
    tally = Tally(swarm)
    swarm.run(2000.0)
    assert swarm.longest >= 0.8 * 2000 / (12 + 3 * seconds)
    assert tally.tokens["peer4"] >= 0.8 * tally.tokens["peer0"]
    assert tally.lineages() == 0


def claims(rate: int | None) -> Callable[[str, str, Message], Message]:
    def hook(sender: str, to: str, message: Message) -> Message:
        is_claim = rate is not None and sender == "peer5" and isinstance(message, Ready)
        return message.model_copy(update={"rate": rate}) if is_claim else message

    return hook


@pytest.mark.thorough
@pytest.mark.parametrize(("rate", "both"), [(None, False), (1, True), (10**15, True)])
def test_who_stalls_on_purpose_costs_little(rate: int | None, both: bool) -> None:
    """Regression: with the default timing the honest ones became lineages of one member each. Now a round waits for the
    liar's blocks until six tenths of its time are over."""
    swarm = swarm_of(6)
    swarm.run(MINUTE)
    swarm.on_message = claims(rate)
    swarm.on_chunk = lambda sender, send: sender != "peer5" and not (both and send.to == "peer5")
    tally, before = Tally(swarm), swarm.longest
    swarm.run(2000.0)
    assert tally.lineages() == 0
    assert {len(header.roster) for header in tally.headers.values()} <= {5, 6}
    assert swarm.longest - before >= 0.75 * 2000 / (13 + 20), "a training, an exchange's time, and most of an heir's"


@pytest.mark.thorough
def test_a_leader_that_never_begins_makes_nobody_a_lineage_of_one() -> None:
    """It says that it trains, for ever."""
    swarm = swarm_of(5)
    swarm.run(MINUTE)
    leader = swarm.living[0].peer.log.leader_of(0)
    swarm.on_message = lambda sender, to, message: (
        None if isinstance(message, Begin) and sender == leader != to else message
    )
    tally, before = Tally(swarm), swarm.longest
    swarm.run(3000.0)
    assert tally.lineages() == 0
    assert swarm.longest - before > 50


# Handshakes ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("peers", "handshakes"), [(5, 6), pytest.param(17, 8, marks=pytest.mark.thorough)])
def test_handshakes_cost_six_delays_and_eight_above_sixteen(peers: int, handshakes: int) -> None:
    """Ready, Begin, Part, Propose and two votes; in a large swarm the leader passes on each certificate."""
    delay = 2.0
    swarm = swarm_of(peers, block_count=max(BLOCKS, 2 * peers))
    swarm.run(MINUTE)
    before = swarm.longest
    swarm._delay = lambda: delay  # type: ignore[method-assign]
    done: dict[str, float] = {}
    assert swarm.run(200.0, until=lambda: swarm.longest > before + 1)
    entry = swarm.longest
    applied: dict[str, float] = {}

    def on_apply(name: str) -> None:
        if swarm.peers[name].peer.log.position.index == entry + 1:
            applied[name] = swarm.now

    def on_effect(name: str) -> None:
        one = swarm.peers[name].peer
        if one.state is State.READY and one.log.position.index == entry:
            done.setdefault(name, swarm.now)

    swarm.on_apply, swarm.on_effect = on_apply, on_effect
    assert swarm.run(200.0, until=lambda: len(applied) == peers)
    bytes_take = 3 * delay  # blocks to the reducer, which takes as long to average them, and averages back
    assert max(applied.values()) - max(done.values()) <= bytes_take + handshakes * delay + 0.1


def test_nothing_is_a_note_of_failure_in_a_calm_swarm() -> None:
    swarm = swarm_of(5)
    swarm.run(300.0)
    notes = [what.text for line in swarm.trace for what in line if isinstance(what, Note)]
    assert not [text for text in notes if "failed" in text]
    if troubles(swarm):
        raise InvariantError(f"trouble where there is none: {troubles(swarm)}")


def test_a_leader_with_a_slow_link_leads_all_the_same() -> None:
    """Regression: it had heard of all others, applied the entry as a member, and was leader no more."""
    swarm = swarm_of(5)
    swarm.run(MINUTE)
    leader = swarm.living[0].peer.log.leader_of(0)
    assert leader is not None
    swarm.faults = replace(swarm.faults, slow=(leader,))
    before, views = swarm.longest, set[int]()

    def on_message(sender: str, to: str, message: Message) -> Message:
        if isinstance(message, Vote):
            views.add(message.choice.ballot.view)
        return message

    swarm.on_message = on_message
    swarm.run(300.0)
    assert swarm.longest - before > 10
    assert views == {0}


@pytest.mark.thorough
def test_a_pair_of_which_one_hears_the_other_counts() -> None:
    """What the second sends reaches the first, and nothing comes back."""
    swarm = swarm_of(5)
    swarm.run(MINUTE)
    swarm.faults = replace(swarm.faults, one_way=(("peer3", "peer4"),))
    swarm.run(MINUTE)
    tally, before = Tally(swarm), swarm.longest
    swarm.run(10 * MINUTE)
    assert swarm.longest - before > 30
    assert min(tally.tokens[f"peer{name}"] for name in range(5)) >= 0.5 * max(tally.tokens.values())
    assert tally.lineages() == 0


def test_members_that_are_far_apart_make_entries_as_others_do() -> None:
    """Half a second each way between two of them."""
    names = [f"peer{name}" for name in range(4)]
    swarm = swarm_of(4, Faults(delays=tuple(((one, other), 0.5) for one in names for other in names if one < other)))
    swarm.run(10 * MINUTE)
    assert swarm.longest >= 25
