"""The wall: what a founder of a run was promised, one story each, with the default timing.

Each story broke the agreement that was there before. The bounds are those of docs/protocol.md.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import combinations

import pytest

from peers.log.certificate import Ballot
from peers.log.header import Member, Position
from peers.log.settings import RunSettings, Timing
from peers.log.state import Quorum
from peers.messages.messages import Begin, Message, Ready
from peers.messages.rounds import Round, RoundName
from peers.protocol.effects import SendChunk, TokensLost
from peers.protocol.pacemaker import MARGIN, death
from peers.protocol.planning import MemberLink, shares
from peers.values.chunks import payloads_moved
from peers.values.signed_heads import SignedHead, SignedHeads
from peers.values.wire import digest_of
from tests.simulator.liars import Lie
from tests.simulator.links import Faults, Rate
from tests.simulator.malice import KINDS, Deceit, plant
from tests.simulator.simulated_keys import SimulatedKeys
from tests.simulator.simulated_workload import BLOCK_BYTES
from tests.simulator.simulation import Swarm

TIMING = Timing()
MINUTE = 60.0
BLOCKS = 14
"""In a payload, and as many chunks."""
LONGEST_ROUND = 5.0  # seconds, here
T0 = TIMING.grace + MARGIN * LONGEST_ROUND
"""Seconds of a view timer: 25."""
USUAL = (0.9, 1.1)  # of the usual time, that a training takes
EVEN = (0.98, 1.02)
"""The same where a training takes minutes, so that nobody is late by more than the grace, and links alone decide."""


def settings(minimum_peers: int = 1, inner_steps: int = 10, quorum: Quorum = Quorum.MAJORITY) -> RunSettings:
    """Return a run whose trainings take as many seconds as inner steps."""
    samples = 2 * inner_steps
    return RunSettings("wall", digest_of(b"wall"), inner_steps, samples, 10, minimum_peers, TIMING, quorum=quorum)


def swarm_of(number: int, run: RunSettings, faults: Faults | None = None, deceits: Sequence[Deceit] = ()) -> Swarm:
    """Return peers that have made three entries together, if they could."""
    swarm = Swarm(1, run, faults or Faults(), block_count=BLOCKS)
    swarm.training_time = lambda steps: steps * swarm.random.uniform(*USUAL)  # type: ignore[method-assign]
    if deceits:
        plant(swarm, tuple(deceits))
    for name in range(number):
        swarm.start(f"peer{name:02}")
    assert swarm.run(3 * MINUTE + 3 * run.inner_steps, until=lambda: swarm.longest >= 3)
    return swarm


class Entries:
    """The entries of a swarm from now on: who counts in each, and who averages in the rounds behind them."""

    def __init__(self, swarm: Swarm) -> None:
        self.counted = Counter[str]()
        """In how many entries each peer counts."""
        self.reduced = Counter[str]()
        """In how many rounds each peer averages something."""
        self._swarm = swarm
        self._first = swarm.longest
        self._seen: set[bytes] = set()
        self._begun: set[RoundName] = set()
        self._on_message = swarm.on_message
        swarm.on_apply, swarm.on_message = self._see, self._hear

    def _see(self, name: str) -> None:
        header = self._swarm.peers[name].peer.log.last
        if header is not None and header.digest not in self._seen:
            self._seen.add(header.digest)
            self.counted.update(member.peer for member in header.roster if member.tokens)

    def _hear(self, sender: str, to: str, message: Message) -> Message | None:
        if isinstance(message, Begin) and message.round.name not in self._begun:
            self._begun.add(message.round.name)
            self.reduced.update(share.member.peer for share in message.round.shares if share.chunks)
        return self._on_message(sender, to, message)

    @property
    def made(self) -> int:
        return self._swarm.longest - self._first


# A volunteer that starts again ---------------------------------------------------------------------------------
def restarted(peers: int, restarts: int, has_archive: bool) -> Swarm:
    """Kill each of a few volunteers so often, one after another, amid its training or its round."""
    swarm = swarm_of(peers, settings(minimum_peers=peers))
    for number in range(restarts):
        if has_archive:
            sign(swarm)
        name = f"peer{number % peers:02}"
        swarm.run(7.0 + number)
        swarm.kill(name)
        swarm.run(5.0)
        swarm.start(name)
        goal = swarm.longest + 2
        assert swarm.run(5 * MINUTE, until=lambda goal=goal: swarm.longest >= goal)  # type: ignore[misc]
    return swarm


def sign(swarm: Swarm) -> None:
    """Have the run's archive sign the newest head."""
    heads = max((peer.entries.heads for peer in swarm.living), key=len)
    signed = SignedHead.sign("wall", len(heads) - 1, heads[-1], "archive", SimulatedKeys("archive"))
    swarm.signed = SignedHeads("wall", ("archive",), swarm.signed.heads).with_heads([signed])


@pytest.mark.parametrize("has_archive", [False, True], ids=["no archive", "an archive"])
@pytest.mark.parametrize("restarts", [1, 2, 3])
@pytest.mark.parametrize("peers", [1, 2])
def test_a_lone_volunteer_that_starts_again_goes_on_with_its_lineage(
    peers: int, restarts: int, has_archive: bool
) -> None:
    swarm = restarted(peers, restarts, has_archive)  # which raises if there is a second lineage
    assert all(one.peer.lineage.doubt is None for one in swarm.living), "all of it is certified"
    lost = [what for line in swarm.trace for what in line if isinstance(what, TokensLost) and what.what == "entries"]
    assert not lost


# Slow links ----------------------------------------------------------------------------------------------------
SLOW = "peer05"
FAST = Rate(up=BLOCKS * BLOCK_BYTES, down=BLOCKS * BLOCK_BYTES)
"""A link that carries a payload each way in a second."""
MINUTES_EACH = Rate(up=BLOCK_BYTES / 150, down=BLOCK_BYTES / 150)
"""A link that takes minutes for each chunk."""


def boasts(sender: str, to: str, message: Message) -> Message:
    """Have the slow one say that its link carries very much."""
    is_claim = sender == SLOW and isinstance(message, Ready)
    return message.model_copy(update={"rate": 2**40}) if is_claim else message


def entries_in_half_an_hour(slow: Rate, is_liar: bool = False) -> Entries:
    """Return what six peers come to in half an hour, with trainings of three minutes. One has such a link."""
    fast = Faults(rates=tuple((f"peer{name:02}", FAST) for name in range(6)))
    swarm = swarm_of(6, settings(inner_steps=180), fast)
    swarm.training_time = lambda steps: steps * swarm.random.uniform(*EVEN)  # type: ignore[method-assign]
    swarm.faults = Faults(rates=(*fast.rates, (SLOW, slow)))
    if is_liar:
        swarm.on_message = boasts
    entries = Entries(swarm)
    swarm.run(30 * MINUTE)
    return entries


@pytest.fixture(scope="module")
def usual_entries() -> Entries:
    return entries_in_half_an_hour(FAST)


@pytest.mark.thorough
@pytest.mark.parametrize("is_liar", [False, True], ids=["honest", "a liar"])
def test_one_slow_link_costs_the_others_a_tenth_of_their_entries_at_most(is_liar: bool, usual_entries: Entries) -> None:
    """Before, each entry took six minutes, for ever."""
    entries = entries_in_half_an_hour(MINUTES_EACH, is_liar)
    assert entries.made >= 0.9 * usual_entries.made
    counted, usual = (min(one.counted[f"peer{name:02}"] for name in range(5)) for one in (entries, usual_entries))
    assert counted >= 0.9 * usual, "some are late by chance: with fast links, too"


@pytest.mark.thorough
def test_a_link_that_is_slower_than_others_but_fast_enough_counts(usual_entries: Entries) -> None:
    """It takes four seconds for a payload: longer than any other, and no longer than an exchange may."""
    entries = entries_in_half_an_hour(Rate(up=FAST.up / 4, down=FAST.down / 4))
    assert entries.made >= 0.9 * usual_entries.made
    assert entries.counted[SLOW] >= 0.9 * entries.made


# Broken pairs --------------------------------------------------------------------------------------------------
def broken_pairs(peers: Sequence[str], share: float, seed: int) -> tuple[tuple[str, str], ...]:
    """Return this share of all pairs, drawn by chance."""
    draw = random.Random(seed)
    return tuple(pair for pair in combinations(peers, 2) if draw.random() < share)


@pytest.mark.parametrize(("peers", "share"), [(100, 0.05), (300, 0.02)])
def test_broken_pairs_put_no_more_than_twice_a_fair_share_on_any_link(peers: int, share: float) -> None:
    """Before, one link of a hundred carried 98 payloads."""
    names = [f"peer{number:03}" for number in range(peers)]
    for seed in range(5):
        broken = broken_pairs(names, share, seed)
        unreached: dict[str, set[str]] = {name: set() for name in names}
        for one, other in broken:
            unreached[one].add(other)
            unreached[other].add(one)
        links = {name: MemberLink(rate=10**6, unreached=frozenset(unreached[name])) for name in names}
        roster = [Member(peer=name, tokens=100, samples=()) for name in names]
        round = Round(name=round_name(names[0]), shares=shares(roster, links, chunks=4 * peers))
        fair = payloads_moved(peers, 1 / peers)
        moved = [payloads_moved(peers, share.chunks / round.chunks) for share in round.shares]
        assert max(moved) <= 2 * fair, f"seed {seed}"


def round_name(leader: str) -> RoundName:
    position = Position(index=7, head=digest_of(b"head"), fragment=0)
    return RoundName(position=position, ballot=Ballot(view=0, attempt=1), leader=leader)


@pytest.mark.thorough
def test_in_a_swarm_with_broken_pairs_all_count_and_no_link_is_overworked() -> None:
    names = [f"peer{number:02}" for number in range(20)]
    rates = tuple((name, Rate(up=40 * BLOCK_BYTES, down=40 * BLOCK_BYTES)) for name in names)  # a payload a second
    faults = Faults(broken=broken_pairs(names, 0.05, 3), rates=rates)
    swarm = Swarm(1, settings(inner_steps=20), faults, block_count=40)
    swarm.training_time = lambda steps: steps * swarm.random.uniform(*USUAL)  # type: ignore[method-assign]
    for name in names:
        swarm.start(name)
    assert swarm.run(5 * MINUTE, until=lambda: swarm.longest >= 4)
    swarm.links.count_anew()
    entries = Entries(swarm)
    assert swarm.run(10 * MINUTE, until=lambda: entries.made >= 8)
    counted = sum(entries.counted[name] for name in names)
    assert counted >= 0.85 * len(names) * entries.made, "a member that does not hear the leader is out while it leads"
    payload = 40 * BLOCK_BYTES
    _, busiest = swarm.links.busiest(payload)
    assert busiest <= 2 * swarm.links.fair_share(payload)


# Liars among the members ---------------------------------------------------------------------------------------
def test_whom_a_liar_starves_counts_all_the_same() -> None:
    """Before, the victim counted in 15 % of the entries, and the liar in all."""
    swarm = swarm_of(5, settings(inner_steps=20), deceits=[Deceit("peer03", "starves", 2)])
    entries = Entries(swarm)
    swarm.run(20 * MINUTE)
    assert entries.made >= 30
    honest = ("peer00", "peer01", "peer02", "peer04")
    assert min(entries.counted[name] for name in honest) >= 0.9 * entries.made


def of_five(kind: str | None) -> Entries:
    """Return what five peers come to, of which one tells a lie."""
    swarm = swarm_of(5, settings(inner_steps=20), deceits=[Deceit("peer03", kind, 3)] if kind else [])
    entries = Entries(swarm)
    swarm.run(15 * MINUTE)
    return entries


@pytest.mark.thorough
def test_who_says_that_it_reaches_nobody_changes_nothing_but_its_own_part() -> None:
    """Before, the leader became the only one that averages; and by heartbeats alone three honest peers were split."""
    usual, with_liar = of_five(None), of_five("reaches nobody")
    assert with_liar.made >= usual.made - 1
    for name in ("peer00", "peer01", "peer02", "peer04"):
        assert with_liar.counted[name] >= usual.counted[name] - 1
        assert with_liar.reduced[name] >= 0.8 * usual.reduced[name]


class Silent(Lie):
    """It gives signs of life, and says nothing."""

    def says(self, to: str, message: Message) -> Iterator[tuple[str, Message]]:
        yield from ()

    def gives(self, send: SendChunk, data: bytes) -> None:
        return None


def test_where_the_leader_dies_and_a_member_is_silent_the_next_entry_comes_within_two_view_timers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before, it came after 1,235 seconds."""
    monkeypatch.setitem(KINDS, "silent", Silent)
    swarm = swarm_of(5, settings(minimum_peers=5))
    leader = swarm.peers["peer00"].peer.log.leader_of(0)
    silent = next(name for name in sorted(swarm.peers) if name != leader)
    dead = list[float]()
    swarm.on_chunk = lambda sender, send: sender != silent or not dead

    def hook(sender: str, to: str, message: Message) -> Message | None:
        if sender == silent and to != silent:
            return None if dead else message
        if message.kind == "vote" and sender == leader and not dead:
            dead.append(swarm.now)
            swarm.at(0.0, lambda: swarm.kill(leader))
        return message

    swarm.on_message = hook
    assert swarm.run(MINUTE, until=lambda: bool(dead))
    before = swarm.longest
    assert swarm.run(death(TIMING) + 2 * T0, until=lambda: swarm.longest > before)


def test_silent_allies_that_lead_one_after_another_cost_a_view_timer_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seventeen members, of which eight, nearly half. Before: 1,315 seconds."""
    monkeypatch.setitem(KINDS, "silent", Silent)
    allies = [Deceit(f"peer{number:02}", "silent", 3) for number in range(1, 9)]
    swarm = swarm_of(17, settings(minimum_peers=17), deceits=allies)
    before, promised = swarm.longest, 8 * T0 + death(TIMING) + MINUTE
    assert swarm.run(promised, until=lambda: swarm.longest > before)
    first, goal = swarm.now, swarm.longest + 4
    assert swarm.run(4 * MINUTE, until=lambda: swarm.longest >= goal), f"the log moves the ring on, from {first:.0f} s"


@pytest.mark.thorough
def test_allies_that_begin_and_stall_one_after_another_cost_two_view_timers_each_and_their_exchanges() -> None:
    """The bound of R2, whatever seconds their Begins name. Seventeen members, of which eight."""
    allies = [Deceit(f"peer{number:02}", "never proposes", 3) for number in range(1, 9)]
    swarm = swarm_of(17, settings(minimum_peers=17), deceits=allies)
    exchanges = sum(MARGIN * min(TIMING.round_timeout, 2**k * MARGIN * LONGEST_ROUND) for k in range(8))
    before, promised = swarm.longest, 8 * 2 * T0 + exchanges + death(TIMING) + MINUTE
    assert swarm.run(promised, until=lambda: swarm.longest > before)


# Forks ---------------------------------------------------------------------------------------------------------
FORKS = [0, *(pytest.param(seed, marks=pytest.mark.thorough) for seed in (1, 2, 3, 4))]
"""Seeds of stories with a leader that makes two proposals."""


def of_five_from_the_start(seed: int, quorum: Quorum, liar: str) -> Swarm:
    """Return five peers with two entries. From now on one of them proposes two entries when it leads."""
    swarm = Swarm(seed, settings(minimum_peers=5, quorum=quorum), one_child=False, block_count=BLOCKS)
    swarm.training_time = lambda steps: steps * swarm.random.uniform(*USUAL)  # type: ignore[method-assign]
    plant(swarm, (Deceit(liar, "two proposals", 2),))
    for name in range(5):
        swarm.start(f"peer{name:02}")
    assert swarm.run(2 * MINUTE, until=lambda: swarm.longest >= 2)
    return swarm


@cache
def with_two_proposals(seed: int, quorum: Quorum) -> tuple[Swarm, str]:
    """Return what five come to in some minutes, whose leader proposes two entries; and the leader."""
    honest = of_five_from_the_start(seed, quorum, "nobody")  # who leads is the same: it has no lie to tell yet
    liar = honest.peers["peer00"].peer.log.leader_of(0)
    assert liar is not None
    swarm = of_five_from_the_start(seed, quorum, liar)
    swarm.run(10 * MINUTE)
    return swarm, liar


@pytest.mark.parametrize("seed", FORKS)
def test_who_leads_two_halves_to_two_entries_is_convicted(seed: int) -> None:
    """Five voters and a majority: one liar is enough for a fork. All end on one branch, without it."""
    swarm, liar = with_two_proposals(seed, Quorum.MAJORITY)
    assert all(liar in one.peer.log.excluded for one in swarm.honest)
    assert swarm.run(5 * MINUTE, until=lambda: len({one.peer.log.position.head for one in swarm.honest}) == 1)


@pytest.mark.parametrize("seed", FORKS)
def test_with_two_thirds_one_liar_of_five_makes_no_fork(seed: int) -> None:
    swarm, _ = with_two_proposals(seed, Quorum.TWO_THIRDS)  # which raises if there is one
    assert swarm.longest > 10


@pytest.mark.thorough
def test_that_the_story_of_two_proposals_makes_forks() -> None:
    assert any(with_two_proposals(seed, Quorum.MAJORITY)[0].history.forks for seed in range(5))


def test_a_run_by_majority_without_liars_makes_none() -> None:
    swarm = swarm_of(5, replace(settings(minimum_peers=5), quorum=Quorum.TWO_THIRDS))
    before = swarm.longest
    swarm.run(5 * MINUTE)
    assert swarm.longest - before > 15
