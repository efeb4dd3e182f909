"""Swarms on a simulated clock: seeded random lives, and the hard moments by hand.

The simulator itself checks after every step that no position has two states or two successors, and that no sample is
trained twice. The planted faults show that it would notice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import count

import pytest

from peers.averaging import Averaging
from peers.events import Apply, Dropped, Effect, PushContribution, PushReduced, Send
from peers.history import InvariantError
from peers.leader import Leader
from peers.leases import SampleRange
from peers.messages import Commit, Complete, Message, Ready, pack_message, unpack_message
from peers.schedules import agreed, schedule
from peers.settings import RunSettings, Timing
from peers.simulation import Faults, SimulatedPeer, Swarm
from peers.states import State
from peers.wire import digest_of

TIMING = Timing(grace=30.0, round_timeout=8.0, partition_grace=400.0)
SETTINGS = RunSettings("simulated", digest_of(b"manifest"), 10, 20, 10, 3, TIMING)
BATCH = 15


@pytest.mark.parametrize("first", range(0, 150, BATCH))
def test_random_lives(first: int) -> None:
    for seed in range(first, first + BATCH):
        swarms: list[Swarm] = []
        try:
            schedule(seed, swarms.append)
        except Exception as error:
            trace = "\n".join(str(line) for line in swarms[0].trace[-60:])
            pytest.fail(f"seed {seed}: {type(error).__name__}: {error}\n{trace}")


def test_the_same_seed_gives_the_same_life() -> None:
    first, second = schedule(7), schedule(7)
    assert len(first.trace) > 100
    assert [str(line) for line in first.trace] == [str(line) for line in second.trace]
    assert schedule(8).trace != first.trace


@dataclass
class Watched(Swarm):
    """A swarm in which somebody watches what goes over the wire, and may let it be lost."""

    on_message: Callable[[str, str, Message], bool] = field(default=lambda sender, to, message: True)
    rewrite: Callable[[str, Message], Message] = field(default=lambda sender, message: message)
    on_push: Callable[[str, PushContribution | PushReduced], bool] = field(default=lambda sender, push: True)
    on_apply: Callable[[str], None] = field(default=lambda peer: None)

    def _send(self, sender: SimulatedPeer, to: str, data: bytes) -> None:
        message = self.rewrite(sender.peer.me, unpack_message(self.settings.run, data))
        if self.on_message(sender.peer.me, to, message):
            super()._send(sender, to, pack_message(self.settings.run, message))

    def _push(self, sender: SimulatedPeer, push: PushContribution | PushReduced) -> None:
        if self.on_push(sender.peer.me, push):
            super()._push(sender, push)

    def _carry_out(self, simulated: SimulatedPeer, effect: Effect) -> None:
        super()._carry_out(simulated, effect)
        if isinstance(effect, Apply):
            self.on_apply(simulated.peer.me)


def swarm_of(count: int, seed: int = 1, settings: RunSettings = SETTINGS, one_child: bool = True) -> Watched:
    """A swarm that has made its first entry, on a good network."""
    swarm = Watched(seed, settings, one_child=one_child)
    for number in range(count):
        swarm.start(f"peer{number}")
    assert swarm.run(200.0, until=lambda: swarm.longest >= 1 and agreed(swarm))
    return swarm


def goes_on(swarm: Swarm, entries: int = 2) -> None:
    """Everybody who lives makes progress, together."""
    goal = swarm.longest + entries
    if not swarm.run(1000.0, until=lambda: swarm.longest >= goal and agreed(swarm)):
        raise InvariantError(f"no progress: longest {swarm.longest}, wanted {goal}")


def leader_dies_at_commit(seed: int, heirs: int) -> Watched:
    """The leader commits, tells `heirs` of the other members, and dies."""
    swarm = swarm_of(5, seed)
    told: set[str] = set()

    def on_message(sender: str, to: str, message: Message) -> bool:
        if not isinstance(message, Commit) or len(swarm.living) < 5:
            return True
        told.add(to)
        if len(told) > heirs:
            swarm.at(0.0, lambda: swarm.kill(sender))
            return False
        return True

    swarm.on_message = on_message
    assert swarm.run(300.0, until=lambda: len(swarm.living) == 4)
    goes_on(swarm)
    return swarm


@pytest.mark.parametrize("heirs", [0, 1])
@pytest.mark.parametrize("seed", range(3))
def test_leader_dies_having_told_one_member_or_none(seed: int, heirs: int) -> None:
    swarm = leader_dies_at_commit(seed, heirs)
    assert all(simulated.peer.log.position.index == swarm.longest for simulated in swarm.living)


def mute_leader(seed: int) -> Watched:
    """The leader averages its part and tells nobody, so that nobody else can be complete; then it dies."""
    swarm = swarm_of(5, seed)
    leader = swarm.living[0].peer.log.roster[0]
    swarm.on_push = lambda sender, push: sender != leader or isinstance(push, PushContribution)
    swarm.on_apply = lambda peer: swarm.kill(peer) if peer == leader else None
    swarm.run(60.0, until=lambda: len(swarm.living) == 4)
    swarm.kill(leader)
    goes_on(swarm)
    return swarm


def first_to_apply_dies(seed: int) -> Watched:
    """Nobody hears of a commit, and whoever takes the outer step first is dead before it can say a word."""
    swarm = swarm_of(5, seed)
    swarm.on_apply = lambda peer: swarm.kill(peer) if len(swarm.living) == 5 else None
    swarm.on_message = lambda sender, to, message: not (isinstance(message, Commit) and len(swarm.living) == 5)
    swarm.run(300.0, until=lambda: len(swarm.living) == 4)
    goes_on(swarm)
    return swarm


@pytest.mark.parametrize("life", [mute_leader, first_to_apply_dies])
def test_what_only_the_dead_knew(life: Callable[[int], Watched]) -> None:
    for seed in range(5):
        assert len(life(seed).living) == 4


def test_a_reducer_dies_while_blocks_come_in() -> None:
    swarm = swarm_of(5)
    victim = "peer3"

    def on_push(sender: str, push: PushContribution | PushReduced) -> bool:
        if push.to == victim:
            swarm.at(0.0, lambda: swarm.kill(victim))
        return True

    swarm.on_push = on_push
    goes_on(swarm)
    assert len(swarm.living) == 4
    last = swarm.living[0].peer.log.last
    assert last is not None
    assert set(last.peers) == {"peer0", "peer1", "peer2", "peer4"}


def test_a_polite_leaver_finishes_the_round() -> None:
    swarm = swarm_of(4)
    leaver = swarm.peers["peer2"]
    assert swarm.run(100.0, until=lambda: leaver.peer.state is State.AVERAGING)
    before = leaver.peer.log.position.index
    swarm.leave("peer2")
    assert swarm.run(20.0, until=lambda: leaver.peer.state is State.LEFT)
    assert leaver.peer.log.position.index == before + 1
    assert "peer2" in leaver.peer.log.roster
    goes_on(swarm)
    assert "peer2" not in swarm.living[0].peer.log.roster


def test_a_minority_that_was_cut_off_rejoins() -> None:
    swarm = swarm_of(5)
    minority = [swarm.peers[name] for name in ("peer0", "peer4")]
    for simulated in minority:
        swarm.cut_off(simulated.peer.me)
    cut_at = swarm.longest
    assert swarm.run(300.0, until=lambda: swarm.longest >= cut_at + 3)
    assert all(simulated.peer.log.position.index <= cut_at + 1 for simulated in minority)
    swarm.heal()
    goes_on(swarm, 3)
    assert len(swarm.living[0].peer.log.roster) == 5


def test_two_lineages_become_the_heavier_one() -> None:
    timing = replace(TIMING, partition_grace=20.0)
    swarm = swarm_of(5, settings=replace(SETTINGS, timing=timing), one_child=False)
    for name in ("peer0", "peer1"):
        swarm.cut_off(name)
    light, heavy = swarm.peers["peer0"].peer, swarm.peers["peer2"].peer
    forked_at = swarm.longest
    assert swarm.run(400.0, until=lambda: min(light.log.position.index, heavy.log.position.index) >= forked_at + 3)
    winner = max((light, heavy), key=lambda peer: peer.log.lineage_tokens)
    lineages = {light.log.position.head, heavy.log.position.head}
    assert len(lineages) == 2
    heads = [winner.log.position.head]
    swarm.heal()
    assert swarm.run(200.0, until=lambda: agreed(swarm))
    goes_on(swarm, 3)
    assert heads[0] in ancestors(swarm, winner.log.position.head)
    assert len(winner.log.roster) == 5


def ancestors(swarm: Swarm, head: bytes) -> set[bytes]:
    """Everything that a lineage has passed, told by the samples trained: a lineage's only grow."""
    samples = swarm.history.trained[head]
    return {digest for digest, before in swarm.history.trained.items() if before <= samples}


def test_suspicion_alone_costs_attempts_and_no_more() -> None:
    swarm = swarm_of(5)
    swarm.faults = Faults(loss=0.1, duplication=0.1, push_failure=0.1, longest_delay=1.0, suspicion=0.2)
    swarm.run(300.0)
    swarm.faults = Faults()
    goes_on(swarm)


def too_many_tokens(ready: Ready) -> Ready:
    return ready.model_copy(update={"tokens": 2**62 - 1})


def scattered_samples(ready: Ready) -> Ready:
    first = ready.samples[0].start
    return ready.model_copy(update={"samples": tuple(SampleRange(first + 2 * n, first + 2 * n + 1) for n in range(9))})


NUMBERS = count(1000, 1000)


def ever_higher_numbers(ready: Ready) -> Ready:
    return ready.model_copy(update={"last_attempt": next(NUMBERS)})


@pytest.mark.parametrize("lie", [too_many_tokens, scattered_samples, ever_higher_numbers])
def test_a_liar_stops_nobody(lie: Callable[[Ready], Ready]) -> None:
    swarm = swarm_of(5)
    liar = swarm.peers["peer2"]

    def rewrite(sender: str, message: Message) -> Message:
        return lie(message) if sender == liar.peer.me and isinstance(message, Ready) and message.samples else message

    swarm.rewrite = rewrite
    goal = swarm.longest + 5
    honest = [simulated for simulated in swarm.living if simulated is not liar]
    assert swarm.run(1000.0, until=lambda: min(one.peer.log.position.index for one in honest) >= goal)
    assert len(swarm.living) == 5
    assert any(isinstance(what, Dropped) and what.peer == "peer2" for line in swarm.trace for what in line)


# Planted faults ------------------------------------------------------------------------------------------------
def commit_at_once(self: Leader, sender: str, complete: Complete, now: float) -> list[Effect]:
    """A leader that does not wait until everybody is complete."""
    if not self._is_running(complete.attempt) or self._running is None:
        return []
    adopted = self._running.adopted
    header = adopted.header if adopted else self._log.next_header(self._running.roster, complete.payload)
    return [Send(peer, Commit(header=header)) for peer in self._members()]


def forget_what_is_held(self: Averaging) -> None:
    """A member that goes back on its word when the leader dies."""
    self._held = None
    pristine_back_to_ready(self)


def apply_at_once(self: Averaging, payload: bytes) -> None:
    """A member that takes its step as soon as it has the payload."""
    pristine_hold(self, payload)
    if self._held:
        self._commit(self.me, self._held.header)


pristine_back_to_ready = Averaging._back_to_ready
pristine_hold = Averaging._hold


@pytest.mark.parametrize(
    ("owner", "name", "fault", "life"),
    [
        (Leader, "on_complete", commit_at_once, mute_leader),
        (Averaging, "_hold", apply_at_once, mute_leader),
        (Averaging, "_back_to_ready", forget_what_is_held, first_to_apply_dies),
    ],
    ids=["commit at once", "apply at once", "forget what is held"],
)
def test_planted_faults_are_noticed(
    owner: type,
    name: str,
    fault: Callable[..., object],
    life: Callable[[int], Watched],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(owner, name, fault)
    with pytest.raises(InvariantError, match="two entries at index"):
        life(1)
