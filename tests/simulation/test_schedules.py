"""Swarms on a simulated clock: seeded random lives, and the hard moments by hand.

The simulator itself checks after every step that no position has two states or two successors, and that no sample is
trained twice; here we also watch that all vote for one header in a ballot. A planted fault shows that all this would be
noticed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import count

import pytest

from peers.log.certificate import Phase
from peers.log.header import Header
from peers.log.settings import RunSettings, Timing
from peers.log.state import Quorum
from peers.messages.messages import Begin, Certified, Message, Ready, Vote
from peers.messages.rounds import RoundName
from peers.protocol.effects import Dropped, Effect, FetchPayload, FetchSnapshot, SendChunk, TokensLost
from peers.protocol.events import Undelivered
from peers.protocol.states import State
from peers.values.leases import SampleRange, sample_count
from peers.values.wire import digest_of
from tests.simulator.history import InvariantError
from tests.simulator.links import Faults
from tests.simulator.schedules import CALM, Blow, Life, agreed, draw_life, failure, live, report, smallest
from tests.simulator.simulated_peer import SimulatedPeer
from tests.simulator.simulation import Swarm

TIMING = Timing(grace=30.0, round_timeout=8.0, partition_grace=400.0)
SETTINGS = RunSettings("simulated", digest_of(b"manifest"), 10, 20, 10, 3, TIMING)
SEEDS = 10
BLOCKS, MANY_BLOCKS = 7, 28
"""In a round; of many each member averages some, however slow its link is measured to be."""


class OneProposal:
    """Raises InvariantError when two peers vote for different headers in one ballot, of the whole run or of one group.
    `rounds` are the exchanges."""

    def __init__(self, swarm: Swarm) -> None:
        self.rounds: dict[int, set[RoundName]] = {}
        self._headers: dict[object, bytes] = {}
        self._on_message = swarm.on_message
        swarm.on_message = self.see

    def see(self, sender: str, to: str, message: Message) -> Message | None:
        if isinstance(message, Begin):
            self.rounds.setdefault(message.position.index, set()).add(message.round.name)
        if isinstance(message, Vote):
            ballot = str(message.position), message.choice.ballot.order, message.choice.group
            if self._headers.setdefault(ballot, message.choice.header) != message.choice.header:
                raise InvariantError(f"two headers in ballot {message.choice.ballot}")
        return self._on_message(sender, to, message)


def watched(swarm: Swarm) -> None:
    OneProposal(swarm)


# Random lives --------------------------------------------------------------------------------------------------
@pytest.mark.thorough
def test_random_lives() -> None:
    """`make lives` has thousands."""
    for seed in range(SEEDS):
        try:
            live(draw_life(seed), watched)
        except Exception:
            pytest.fail(report(draw_life(seed), watched))


def test_the_same_seed_gives_the_same_life() -> None:
    def trace(seed: int) -> list[str]:
        return [" ".join(map(str, line)) for line in live(draw_life(seed), traced=True).trace]

    first, second = trace(7), trace(7)
    assert len(first) > 100
    assert first == second
    assert trace(8) != first


def test_lives_are_drawn_from_all_there_is() -> None:
    lives = [draw_life(seed) for seed in range(60)]
    assert draw_life(3) == lives[3]
    assert {blow.kind for life in lives for blow in life.blows} == {
        *("kill", "lose", "leave", "cut off", "deafen", "stop")
    }
    assert {life.peers for life in lives} >= {2, 3, 12}
    for life in lives:
        mortal = {blow.peer for blow in life.blows if blow.kind in ("lose", "leave")}
        assert 2 * len(mortal) < life.peers, "who comes back has forgotten everything: only a minority may"


# Lives by hand -------------------------------------------------------------------------------------------------
def swarm_of(
    number: int, seed: int = 1, settings: RunSettings = SETTINGS, one_child: bool = True, block_count: int = BLOCKS
) -> Swarm:
    """A swarm that has made its first entry, on a good network. All train for about as long, so that nobody is late."""
    swarm = Swarm(seed, settings, one_child=one_child, block_count=block_count)
    swarm.training_time = lambda steps: steps * swarm.random.uniform(0.8, 1.2)  # type: ignore[method-assign]
    watched(swarm)
    for name in range(number):
        swarm.start(f"peer{name}")
    assert swarm.run(200.0, until=lambda: swarm.longest >= 1 and agreed(swarm))
    return swarm


def test_slow_peers_train_less_and_finish_with_the_others() -> None:
    """With whole leases for all, who has half the speed would miss every other entry."""
    swarm = Swarm(1, SETTINGS, speeds=(1.0, 0.5, 0.25))
    swarm.training_time = lambda steps: 10.0 * steps  # type: ignore[method-assign]
    watched(swarm)
    for name in ("peer0", "peer1", "peer2", "peer3"):
        swarm.start(name)
    goes_on(swarm, 5)
    last = swarm.peers["peer0"].peer.log.last
    assert last is not None
    whole = SETTINGS.samples_per_lease
    by_speed = {swarm.peers[member.peer].speed: sample_count(member.samples) for member in last.roster}
    assert by_speed == {1.0: whole, 0.5: whole // 2, 0.25: 3 * whole // 10}, "in whole inner steps"


def goes_on(swarm: Swarm, entries: int = 2) -> None:
    """Everybody who lives makes progress, together."""
    goal = swarm.longest + entries
    if not swarm.run(1000.0, until=lambda: swarm.longest >= goal and agreed(swarm)):
        raise InvariantError(f"no progress: longest {swarm.longest}, wanted {goal}")


def on_message(swarm: Swarm, hook: Callable[[str, str, Message], Message | None]) -> None:
    """See, change or stop messages, with the headers of a ballot still compared."""
    swarm.on_message = hook
    watched(swarm)


def leader_of(swarm: Swarm) -> SimulatedPeer:
    leader = swarm.living[0].peer.log.leader_of(0)
    assert leader is not None
    return swarm.peers[leader]


def entries_of(swarm: Swarm) -> list[Header]:
    """The headers that a living peer still knows, oldest first."""
    return list(max(swarm.living, key=lambda one: one.index).peer.lineage.entries)


def leader_dies_at_commit(heirs: int) -> Swarm:
    """The leader votes for what is prepared, tells `heirs` of the other members, and dies."""
    swarm = swarm_of(5, 0)
    leader, told = leader_of(swarm).name, set[str]()

    def hook(sender: str, to: str, message: Message) -> Message | None:
        if sender != leader or not commits(message):
            return message
        told.add(to)
        if len(told) <= heirs:
            return message
        swarm.at(0.0, lambda: swarm.kill(sender))
        return None

    on_message(swarm, hook)
    assert swarm.run(300.0, until=lambda: len(swarm.living) == 4)
    goes_on(swarm)
    return swarm


def commits(message: Message) -> bool:
    """Return whether a message may commit an entry."""
    if isinstance(message, Certified):
        return message.certificate is None or message.certificate.choice.phase is Phase.COMMIT
    return isinstance(message, Vote) and message.choice.phase is Phase.COMMIT


@pytest.mark.parametrize("heirs", [0, 1])
def test_leader_dies_having_told_one_member_or_none(heirs: int) -> None:
    swarm = leader_dies_at_commit(heirs)
    assert all(one.index == swarm.longest for one in swarm.living)


def mute_leader(seed: int) -> Swarm:
    """The leader averages its part and tells nobody, so that nobody else can be complete; then it dies."""
    swarm = swarm_of(5, seed)
    leader = leader_of(swarm).name
    swarm.on_chunk = lambda sender, send: sender != leader or not send.reduced
    swarm.on_apply = lambda name: swarm.kill(name) if name == leader else None
    swarm.run(60.0, until=lambda: len(swarm.living) == 4)
    swarm.kill(leader)
    goes_on(swarm)
    return swarm


def first_to_apply_dies(seed: int) -> Swarm:
    """Nobody but the leader hears of votes that commit, and the first to take the outer step is dead before it can say
    a word."""
    swarm = swarm_of(5, seed)
    leader = leader_of(swarm).name
    swarm.on_apply = lambda name: swarm.kill(name) if len(swarm.living) == 5 else None
    on_message(
        swarm,
        lambda sender, to, message: None if len(swarm.living) == 5 and commits(message) and to != leader else message,
    )
    swarm.run(300.0, until=lambda: len(swarm.living) == 4)
    goes_on(swarm)
    return swarm


@pytest.mark.parametrize("life", [mute_leader, first_to_apply_dies])
def test_what_only_the_dead_knew(life: Callable[[int], Swarm]) -> None:
    for seed in range(5):
        assert len(life(seed).living) == 4


def hangs_up(swarm: Swarm, name: str) -> None:
    """It is killed, and its connections break, when what it said last has arrived."""
    swarm.kill(name)
    for one in swarm.living:
        swarm.later(one, Undelivered(name), 0.2)


def reducer_dies_when(
    seed: int,
    is_time: Callable[[str, SendChunk], bool],
    names: int = 5,
    kill: Callable[[Swarm, str], None] = hangs_up,
) -> Swarm:
    """peer3 dies as soon as a chunk goes out at such a moment; the leader lives."""
    swarm = swarm_of(names, seed, block_count=MANY_BLOCKS)
    assert leader_of(swarm).name != "peer3"
    begun: list[str] = []

    def on_chunk(sender: str, send: SendChunk) -> bool:
        if not begun and is_time(sender, send):
            begun.append(sender)
            kill(swarm, "peer3")
        return True

    swarm.on_chunk = on_chunk
    assert swarm.run(300.0, until=lambda: bool(begun))
    return swarm


MOMENTS: dict[str, Callable[[str, SendChunk], bool]] = {
    "its first blocks": lambda sender, send: sender == "peer3" and not send.reduced,
    "blocks for it": lambda sender, send: send.to == "peer3" and not send.reduced,
    "its first average": lambda sender, send: sender == "peer3" and send.reduced,
    "its last average": lambda sender, send: sender == "peer3" and send.reduced and send.to == "peer4",
}


@pytest.mark.parametrize(
    "kill",
    [hangs_up, pytest.param(Swarm.kill, marks=pytest.mark.thorough)],
    ids=["connections break", "nobody is told"],
)
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_reducers_death_costs_no_round(moment: str, kill: Callable[[Swarm, str], None]) -> None:
    """The others go on with what has arrived, in the round that was begun, as soon as the death is noticed."""
    swarm = reducer_dies_when(0, MOMENTS[moment], kill=kill)
    entry, seen = swarm.longest, OneProposal(swarm)
    assert swarm.run(TIMING.heartbeat_expiry + 2 * TIMING.heartbeat + 5, until=lambda: swarm.longest > entry)
    assert len(seen.rounds.get(entry, ())) <= 1
    goes_on(swarm)
    assert len(swarm.living) == 4
    last = swarm.living[0].peer.log.last
    assert last is not None
    assert "peer3" not in last.peers


def test_blocks_of_the_dead_that_arrived_count() -> None:
    """All have its blocks, and nobody its average: the entry has its tokens, and its samples are trained."""
    swarm = reducer_dies_when(1, MOMENTS["its last average"])
    entry = swarm.longest
    assert swarm.run(60.0, until=lambda: swarm.longest > entry and agreed(swarm))
    header = next(header for header in entries_of(swarm) if header.index == entry)
    dead = next(member for member in header.roster if member.peer == "peer3")
    assert dead.tokens, "it had averaged a chunk, and so had sent its blocks to others"


def test_the_heir_dies_too() -> None:
    swarm = reducer_dies_when(2, MOMENTS["its first average"], names=7)
    entry, died = swarm.longest, list[str]()

    def hook(sender: str, to: str, message: Message) -> Message | None:
        if isinstance(message, Begin) and message.heirs and not died:
            died.append(message.heirs[0][1])
            swarm.at(0.5, lambda: swarm.kill(died[0]))
        return message

    on_message(swarm, hook)
    assert swarm.run(60.0, until=lambda: swarm.longest > entry)
    assert died
    goes_on(swarm)
    assert len(swarm.living) == 5


def test_the_leader_dies_amid_the_exchange_and_the_next_goes_on_with_the_round() -> None:
    swarm = swarm_of(5)
    leader = leader_of(swarm).name
    rounds: list[tuple[str, RoundName]] = []
    sent = count()

    def hook(sender: str, to: str, message: Message) -> Message | None:
        if isinstance(message, Begin) and message.position.index == entry:
            rounds.append((sender, message.round.name))
        return message

    def on_chunk(sender: str, send: SendChunk) -> bool:
        if sender == leader and next(sent) == 3:
            swarm.kill(leader)
        return True

    entry = swarm.longest
    on_message(swarm, hook)
    swarm.on_chunk = on_chunk
    assert swarm.run(200.0, until=lambda: swarm.longest > entry)
    assert {sender for sender, _ in rounds} > {leader}
    assert len({name for _, name in rounds}) == 1, "no block was exchanged for nothing"
    goes_on(swarm)


def test_a_polite_leaver_finishes_the_round() -> None:
    swarm = swarm_of(4)
    leaver = swarm.peers["peer2"]
    assert swarm.run(100.0, until=lambda: leaver.peer.state is State.AVERAGING)
    before = leaver.index
    swarm.leave("peer2")
    assert swarm.run(20.0, until=lambda: leaver.peer.state is State.LEFT)
    assert leaver.index == before + 1
    assert "peer2" in leaver.peer.log.roster
    goes_on(swarm)
    assert "peer2" not in swarm.living[0].peer.log.roster


class Fetches:
    """Which payloads and which states a peer of a swarm fetches."""

    def __init__(self, one: SimulatedPeer) -> None:
        self.payloads = 0
        self.snapshots = 0
        self._carry_out = one.carry_out
        one.carry_out = self.see  # type: ignore[method-assign]

    def see(self, effect: Effect) -> None:
        self.payloads += isinstance(effect, FetchPayload)
        self.snapshots += isinstance(effect, FetchSnapshot)
        self._carry_out(effect)


@pytest.mark.parametrize("missed", [1, 3, SETTINGS.snapshot_every, SETTINGS.snapshot_every + 2])
def test_who_missed_a_few_entries_replays_them_and_who_missed_more_takes_a_snapshot(missed: int) -> None:
    """It was cut off for so many entries; the others kept the payloads that long."""
    swarm = Swarm(3, SETTINGS, kept_bytes=10_000)
    for name in range(5):
        swarm.start(f"peer{name}")
    assert swarm.run(200.0, until=lambda: swarm.longest >= 1 and agreed(swarm))
    late = swarm.peers["peer4"]
    fetches = Fetches(late)
    swarm.cut_off("peer4")
    others = [one for one in swarm.living if one is not late]
    goal = late.index + missed
    assert swarm.run(1000.0, until=lambda: min(one.index for one in others) >= goal)
    missing = max(one.index for one in others) - late.index
    swarm.heal()
    goes_on(swarm)
    if missing <= SETTINGS.snapshot_every:
        assert fetches.payloads >= missing
        assert fetches.snapshots == 0
    else:
        assert fetches.snapshots == 1


def test_payloads_that_nobody_keeps_any_more_end_in_a_snapshot() -> None:
    swarm = Swarm(3, SETTINGS, kept_bytes=0)
    for name in range(5):
        swarm.start(f"peer{name}")
    assert swarm.run(200.0, until=lambda: swarm.longest >= 1 and agreed(swarm))
    late = swarm.peers["peer4"]
    fetches = Fetches(late)
    swarm.cut_off("peer4")
    goal = late.index + 6
    assert swarm.run(1000.0, until=lambda: swarm.longest >= goal)
    swarm.heal()
    goes_on(swarm)
    assert fetches.snapshots == 1


def test_a_minority_that_was_cut_off_rejoins() -> None:
    swarm = swarm_of(5)
    minority = [swarm.peers[name] for name in ("peer0", "peer4")]
    for one in minority:
        swarm.cut_off(one.name)
    cut_at = swarm.longest
    assert swarm.run(300.0, until=lambda: swarm.longest >= cut_at + 3)
    assert all(one.index <= cut_at + 1 for one in minority)
    swarm.heal()
    goes_on(swarm, 3)
    assert len(swarm.living[0].peer.log.roster) == 5


@pytest.mark.parametrize("what", ["deafen", "stop"])
def test_who_hears_nothing_for_a_while_comes_back(what: str) -> None:
    swarm = swarm_of(5)
    (swarm.deafen if what == "deafen" else swarm.stop)("peer2")
    goal = swarm.longest + 2
    assert swarm.run(300.0, until=lambda: swarm.longest >= goal)
    swarm.heal()
    goes_on(swarm, 3)
    assert len(swarm.living[0].peer.log.roster) == 5


def two_lineages() -> Swarm:
    """peer0 and peer1 have made three entries by themselves, and so have the other three."""
    timing = replace(TIMING, partition_grace=20.0)
    swarm = swarm_of(5, settings=replace(SETTINGS, timing=timing), one_child=False)
    for name in ("peer0", "peer1"):
        swarm.cut_off(name)
    goal = swarm.longest + 3
    assert swarm.run(400.0, until=lambda: min(one.index for one in swarm.living) >= goal)
    return swarm


def test_two_lineages_become_the_heavier_one() -> None:
    swarm = two_lineages()
    light, heavy = swarm.peers["peer0"].peer, swarm.peers["peer2"].peer
    winner = max((light, heavy), key=lambda peer: peer.log.lineage_tokens)
    lineages = {light.log.position.head, heavy.log.position.head}
    assert len(lineages) == 2
    heads = [winner.log.position.head]
    swarm.heal()
    assert swarm.run(200.0, until=lambda: agreed(swarm))
    goes_on(swarm, 3)
    assert heads[0] in ancestors(swarm, winner.log.position.head)
    assert len(winner.log.roster) == 5


def test_what_all_say_they_lost_is_all_that_the_lighter_lineage_had_trained() -> None:
    swarm = two_lineages()
    entries = {entry.digest: entry for one in swarm.living for entry in one.peer.lineage.entries}
    swarm.on_apply = lambda name: entries.update((one.digest, one) for one in swarm.peers[name].peer.lineage.entries)
    swarm.heal()
    assert swarm.run(200.0, until=lambda: agreed(swarm))
    goes_on(swarm)
    dropped, head = dict(entries), swarm.living[0].peer.log.position.head
    while head in dropped:
        head = dropped.pop(head).previous
    assert len(dropped) >= 3
    trained = Counter[str]()
    for header in dropped.values():
        trained.update({member.peer: member.tokens for member in header.roster})
    lost = Counter[str]()
    for _, name, *what in swarm.trace:
        lost.update(
            {str(name): loss.tokens for loss in what if isinstance(loss, TokensLost) and loss.what == "entries"}
        )
    assert lost == trained


def ancestors(swarm: Swarm, head: bytes) -> set[bytes]:
    """Everything that a lineage has passed, told by the samples trained: a lineage's only grow."""
    samples = swarm.history.trained[head]
    return {digest for digest, before in swarm.history.trained.items() if before <= samples}


def test_suspicion_alone_costs_attempts_and_no_more() -> None:
    swarm = swarm_of(5)
    swarm.faults = Faults(loss=0.1, duplication=0.1, stream_failure=0.1, longest_delay=1.0, suspicion=0.2)
    swarm.run(300.0)
    swarm.faults = CALM
    goes_on(swarm)


def test_a_slow_link_is_relieved_once_it_was_measured() -> None:
    """It reduces less and less, instead of being left out."""
    swarm = swarm_of(5)
    swarm.faults = Faults(slow=("peer2",))
    goes_on(swarm, 4)
    assert "peer2" in swarm.living[0].peer.log.roster


# Liars ---------------------------------------------------------------------------------------------------------
def too_many_tokens(ready: Ready) -> Ready:
    return ready.model_copy(update={"tokens": 2**62 - 1})


def scattered_samples(ready: Ready) -> Ready:
    first = ready.samples[0].start
    return ready.model_copy(update={"samples": tuple(SampleRange(first + 2 * n, first + 2 * n + 1) for n in range(9))})


NUMBERS = count(1000, 1000)


def ever_higher_numbers(ready: Ready) -> Ready:
    return ready.model_copy(update={"view": next(NUMBERS)})


def with_a_liar(lie: Callable[[Ready], Ready], seed: int = 1) -> Swarm:
    """peer2 lies whenever it says Ready."""
    swarm = swarm_of(5, seed)

    def hook(sender: str, to: str, message: Message) -> Message | None:
        return lie(message) if sender == "peer2" and isinstance(message, Ready) and message.samples else message

    on_message(swarm, hook)
    return swarm


def the_honest_go_on(swarm: Swarm, entries: int = 5) -> None:
    goal = swarm.longest + entries
    honest = [one for one in swarm.living if one.name != "peer2"]
    assert swarm.run(1000.0, until=lambda: min(one.index for one in honest) >= goal)
    assert len(swarm.living) == 5


def _long_training(chance: Callable[[float, float], float], steps: int) -> float:
    return steps * chance(2, 5)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "lie",
    [too_many_tokens, scattered_samples, ever_higher_numbers],
)
def test_a_liar_stops_nobody(lie: Callable[[Ready], Ready]) -> None:
    """Some train for much longer than others: meanwhile it says Ready again and again. How long they do is chance, so
    that one seed says little."""
    made = 0
    for seed in (1, 2, 3):
        swarm = with_a_liar(lie, seed)
        before, chance = swarm.longest, swarm.random.uniform
        swarm.training_time = partial(_long_training, chance)  # type: ignore[method-assign]
        swarm.run(1000.0)
        made += min(one.index for one in swarm.living if one.name != "peer2") - before
        assert len(swarm.living) == 5
        told = [what for line in swarm.trace for what in line if isinstance(what, Dropped) and what.peer == "peer2"]
        assert bool(told) == (lie is not ever_higher_numbers)
    assert made >= 3 * 18


@pytest.mark.parametrize("rate", [None, 2**62 - 1, 1])
def test_who_sends_nothing_stops_nobody_whatever_rate_it_states(rate: int | None) -> None:
    """It lives, says that it waits, and no block of it ever comes."""
    swarm = with_a_liar(lambda ready: ready if rate is None else ready.model_copy(update={"rate": rate}))
    swarm.on_chunk = lambda sender, send: sender != "peer2"
    the_honest_go_on(swarm)


# Planted faults ------------------------------------------------------------------------------------------------
def one_is_enough(self: Quorum, signers: int, voters: int) -> bool:
    """Voters that take one vote for a quorum."""
    return signers > 0


def parted(seed: int) -> Swarm:
    """Two of five are cut off for a minute: no minority may go on by then."""
    swarm = swarm_of(5, seed)
    for name in ("peer0", "peer4"):
        swarm.cut_off(name)
    swarm.run(60.0)
    return swarm


def dies_when_one_has_its_average(seed: int) -> Swarm:
    """peer3's first average reaches one member only, which is not the one that inherits its chunks."""
    swarm = swarm_of(5, seed, block_count=MANY_BLOCKS)
    reached: list[SendChunk] = []

    def on_chunk(sender: str, send: SendChunk) -> bool:
        if sender != "peer3" or not send.reduced:
            return True
        if send.to != "peer1" or reached:
            return False
        reached.append(send)
        swarm.at(1.0, lambda: hangs_up(swarm, "peer3"))
        return True

    swarm.on_chunk = on_chunk
    assert swarm.run(100.0, until=lambda: len(swarm.living) == 4)
    goes_on(swarm)
    return swarm


def test_what_one_member_alone_has_of_the_dead_is_what_all_get() -> None:
    for seed in range(5):
        assert len(dies_when_one_has_its_average(seed).living) == 4


def test_a_planted_fault_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of single voters are planted where all that can happen is tried: test_voting_exhaustively."""
    monkeypatch.setattr(Quorum, "is_enough", one_is_enough)
    with pytest.raises(InvariantError, match=r"two .*entries at index|two headers"):
        parted(1)


def with_more(life: Life) -> Life:
    """The same life, with more that befalls it."""
    more = tuple(Blow("stop", name, 10 + 7 * number, 3.0) for number, name in enumerate(("peer1", "peer2")))
    return replace(life, blows=more + life.blows, faults=Faults(loss=0.02, duplication=0.1, suspicion=0.01))


def dies_of_a_kill(self: Swarm, name: str) -> None:
    """Planted: the swarm does not survive a death."""
    raise InvariantError(f"{name} is dead")


def test_a_failing_life_is_shown_at_its_smallest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Swarm, "kill", dies_of_a_kill)
    blow = Blow("kill", "peer0", 5, 1.0)
    life = with_more(Life(4, 3, CALM, (blow,)))
    assert failure(life)
    least = smallest(life)
    assert least.blows == (blow,), "the others are not needed for it"
    assert least.faults == CALM
    shown = report(life)
    assert "InvariantError: peer0 is dead" in shown
    assert str(least) in shown
    assert "starts" in shown, "the trace leads there"
    assert " → " in shown, "with all that was said"


def test_a_life_that_fails_for_any_of_two_reasons_keeps_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Swarm, "kill", dies_of_a_kill)
    life = Life(4, 3, CALM, (Blow("kill", "peer0", 5, 1.0), Blow("kill", "peer0", 9, 1.0)))
    assert len(smallest(life).blows) == 1


def test_a_life_without_fault_has_no_failure() -> None:
    assert failure(Life(4, 3, CALM, (Blow("stop", "peer1", 10, 3.0),))) is None
