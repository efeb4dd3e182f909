"""Ways in which the protocol was broken once, as an attacker would do it, or a user with bad luck.

Each test says what ought to be true. One that is found to fail is marked as expected to, until somebody mends it.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest

from peers.log.certificate import Phase
from peers.log.header import Header, Member
from peers.log.lineage import Walk
from peers.log.settings import RunSettings, Timing
from peers.log.state import LogError
from peers.messages.messages import Certified, LeaseRequest, Message, Ready, Vote
from peers.presence.heartbeat import Heartbeat, PeerState
from peers.protocol.effects import FetchSnapshot
from peers.protocol.events import Event, HeartbeatsSeen, PayloadFetched, Received, TrainingDone
from peers.protocol.states import State
from peers.transfer.snapshots import Offered, SnapshotOffer, Vouched
from peers.values.manifest import Amendment
from peers.values.wire import digest_of
from tests.simulation.test_broken_links import Tally
from tests.simulator.history import InvariantError
from tests.simulator.liars import FAR, Liar, Lie, Said, remade
from tests.simulator.malice import Deceit, plant
from tests.simulator.schedules import agreed, draw_life, live
from tests.simulator.simulated_keys import SimulatedKeys
from tests.simulator.simulated_peer import SimulatedPeer
from tests.simulator.simulation import Swarm

TIMING = Timing(grace=30.0, round_timeout=8.0, partition_grace=400.0)
SETTINGS = RunSettings("simulated", digest_of(b"manifest"), 10, 20, 10, 3, TIMING)
STRANGER = "zzz"


def broken(reason: str) -> pytest.MarkDecorator:
    """It fails as this says, and in no other way."""
    return pytest.mark.xfail(strict=True, raises=(AssertionError, InvariantError), reason=reason)


class SceneError(Exception):
    """The swarm did not get to where the test begins."""


def reach(is_there: bool, what: str) -> None:
    if not is_there:
        raise SceneError(what)


def swarm_of(number: int, seed: int = 1, settings: RunSettings = SETTINGS, one_child: bool = True) -> Swarm:
    """Peers that train for about as long as each other, and have made an entry together."""
    swarm = Swarm(seed, settings, one_child=one_child)
    swarm.training_time = lambda steps: steps * swarm.random.uniform(0.8, 1.2)  # type: ignore[method-assign]
    for name in range(number):
        swarm.start(f"peer{name}")
    reach(swarm.run(200.0, until=lambda: swarm.longest >= 1 and agreed(swarm)), "a first entry")
    return swarm


def at_work(swarm: Swarm, index: int) -> Swarm:
    """All train at one position, at least that far on."""

    def is_calm() -> bool:
        all_train = all(one.peer.state is State.TRAINING for one in swarm.living)
        return agreed(swarm) and swarm.longest >= index and all_train

    reach(swarm.run(300.0, until=is_calm), f"all at work at {index}")
    return swarm


def heartbeat_of_a_stranger(state: PeerState, index: int, head: bytes, tokens: int) -> Heartbeat:
    return Heartbeat.model_construct(
        run="simulated",
        peer=STRANGER,
        incarnation=1,
        sequence=1,
        state=state,
        index=index,
        head=head,
        state_digest=digest_of(b"its own"),
        lineage_tokens=tokens,
        speed=1.0,
        unreached=(),
        trouble="",
    )


# Leaving and starting again ------------------------------------------------------------------------------------
def test_who_was_late_does_not_outvote_what_those_who_left_have_committed() -> None:
    """Two of three make an entry without the third, which is late, and leave politely meanwhile."""
    swarm = swarm_of(3, 1)
    late, first, second = "peer2", "peer0", "peer1"
    base, later = swarm.longest, swarm.later

    def train_long(peer: SimulatedPeer, event: Event, seconds: float) -> None:
        later(peer, event, seconds + 200.0 * (isinstance(event, TrainingDone) and peer.name == late))

    swarm.later = train_long  # type: ignore[method-assign]
    one = swarm.peers[late]
    reach(swarm.run(200.0, until=lambda: one.peer.state is State.TRAINING and one.index >= base), "the late one trains")

    def is_round_of_two() -> bool:
        exchanges = [swarm.peers[name].peer.exchange for name in (first, second)]
        are_two = all(exchange and exchange.round.peers == (first, second) for exchange in exchanges)
        return are_two and one.peer.state is State.TRAINING

    reach(swarm.run(300.0, until=is_round_of_two), "a round of two")
    swarm.leave(first)
    swarm.leave(second)
    swarm.run(TIMING.partition_grace - 50.0)
    theirs = swarm.peers[first].peer.log.position
    assert one.peer.lineage.head_at(theirs.index) == theirs.head, "it goes on from what they have committed"


def test_a_member_that_forgot_its_votes_does_not_outvote_what_they_committed() -> None:
    """L and M commit entry p + 1, M is killed and starts again among those who were cut off before entry p."""
    swarm = at_work(swarm_of(5, 1), 2)
    log = swarm.living[0].peer.log
    reach(len(log.roster) == 5, "five in the roster")
    leader = log.leader_of(0)
    assert leader is not None
    member, deafened, *others = [name for name in log.roster if name != leader]
    for side, name in enumerate(others, 2):
        swarm.side[name] = side
    reach(swarm.run(200.0, until=lambda: len(swarm.peers[leader].peer.log.voters) == 3), "three who vote")
    p = swarm.longest

    def lose(sender: str, to: str, message: Message) -> Message | None:
        """`deafened` is cut off when it is bound to entry p; `member` never hears that entry p + 1 is committed."""
        index = message.position.index
        if commits(message) and index == p and to == deafened:
            swarm.side[deafened] = 1
            return None
        return None if commits(message) and index == p + 1 and to == member else message

    swarm.on_message = lose
    went_on = swarm.run(200.0, until=lambda: all(swarm.peers[name].index == p + 1 for name in (leader, member)))
    reach(went_on, "entry p of three")
    killed: list[str] = []

    def kill_the_voter(name: str) -> None:
        if name == leader and swarm.peers[leader].index == p + 2 and not killed:
            killed.append(member)
            swarm.side[leader] = 9
            swarm.kill(member)

    swarm.on_apply = kill_the_voter
    reach(swarm.run(200.0, until=lambda: bool(killed)), "entry p + 1 of two")
    swarm.on_message = lambda sender, to, message: message
    swarm.start(member)
    swarm.side[member] = 1
    swarm.run(60.0, until=lambda: swarm.peers[member].peer.state is State.READY)
    for name in others:
        swarm.side[name] = 1
    swarm.run(300.0, until=lambda: swarm.peers[deafened].index >= p + 2)
    swarm.heal()
    swarm.run(120.0)


def commits(message: Message) -> bool:
    """Return whether a message may commit an entry."""
    if isinstance(message, Certified):
        return message.certificate is None or message.certificate.choice.phase is Phase.COMMIT
    return isinstance(message, Vote) and message.choice.phase is Phase.COMMIT


def test_a_polite_restart_costs_no_more_than_a_crash() -> None:
    def seconds_to_the_next_entry(restart: Callable[[Swarm, str], None]) -> float:
        timing = replace(TIMING, partition_grace=60.0)
        settings = replace(SETTINGS, timing=timing, minimum_peers=1)
        swarm = at_work(swarm_of(2, 1, settings, one_child=False), 3)
        began, before = swarm.now, swarm.longest
        restart(swarm, "peer1")
        swarm.run(3.0)
        swarm.start("peer1")
        reach(swarm.run(900.0, until=lambda: swarm.longest > before), "another entry")
        return swarm.now - began

    assert seconds_to_the_next_entry(Swarm.leave) <= seconds_to_the_next_entry(Swarm.kill) + TIMING.heartbeat_expiry


# A wrong state -------------------------------------------------------------------------------------------------
def test_one_flipped_bit_in_the_leaders_state_costs_nobody_else_anything() -> None:
    settings = replace(SETTINGS, timing=replace(TIMING, partition_grace=60.0))
    swarm = at_work(swarm_of(5, 1, settings, one_child=False), 2)
    leader = swarm.living[0].peer.log.leader_of(0)
    assert leader is not None
    wrong = swarm.peers[leader]
    swarm.history.check = lambda *state: None  # type: ignore[method-assign]  # of which there are two now
    apply, flipped = wrong.workload.apply, list[bytes]()

    def flip_once(payload: bytes, amendment: Amendment | None = None) -> bytes:
        state = apply(payload, amendment)
        if not flipped:
            flipped.append(state)
            wrong.workload.state = state = digest_of(state + b"flipped")
        return state

    wrong.workload.apply = flip_once  # type: ignore[method-assign]
    fetches = Counter[str]()
    for one in swarm.living:

        def count(effect: object, one: SimulatedPeer = one, carry: object = one.carry_out) -> None:
            fetches[one.name] += isinstance(effect, FetchSnapshot)
            carry(effect)  # type: ignore[operator]

        one.carry_out = count  # type: ignore[method-assign]
    before = swarm.longest
    assert swarm.run(1000.0, until=lambda: swarm.longest - before > 20)
    reach(bool(flipped), "an entry that is applied wrongly")
    assert not any(count for name, count in fetches.items() if name != wrong.name)


# Claims --------------------------------------------------------------------------------------------------------
def test_a_stranger_commits_nothing() -> None:
    swarm = at_work(swarm_of(5), 2)
    log = swarm.peers["peer3"].peer.log.in_state(swarm.peers["peer3"].peer.state_digest)
    own = Member(peer=STRANGER, tokens=200, samples=log.grants[0])
    header = log.next_header((own,), digest_of(b"any payload"), STRANGER)
    beat = heartbeat_of_a_stranger(PeerState.READY, log.position.index + 1, header.digest, log.lineage_tokens)
    for one in swarm.living:
        for event in (
            HeartbeatsSeen((beat,)),
            Received(STRANGER, Certified(header=header, certificate=None)),
            PayloadFetched(header),
        ):
            one.peer.handle(event, one.time(swarm.now))
        assert one.peer.log.position == log.position


def test_a_member_can_invent_no_entry_that_it_is_bound_to() -> None:
    swarm = Swarm(1, SETTINGS, one_child=False)
    plant(swarm, (Deceit("peer4", "invented lock", 1),))
    for name in range(5):
        swarm.start(f"peer{name}")
    claimed = list[Header]()

    def on_message(sender: str, to: str, message: Message) -> Message:
        lock = getattr(message, "lock", None)
        if sender == "peer4" and lock is not None:
            claimed.append(lock.header)
        return message

    swarm.on_message = on_message
    assert swarm.run(300.0, until=lambda: swarm.longest >= 5)
    reach(bool(claimed), "a Ready of the liar's")
    entries = {entry.digest for one in swarm.honest for entry in one.peer.lineage.entries}
    assert not entries & {header.digest for header in claimed}


def test_an_invented_weight_stops_nobodys_training() -> None:
    swarm = at_work(swarm_of(5), 2)
    beat = heartbeat_of_a_stranger(PeerState.ARCHIVING, 1, digest_of(b"invented"), 2**61)
    for one in swarm.living:
        one.peer.handle(HeartbeatsSeen((beat,)), one.time(swarm.now))
        assert one.peer.state is State.TRAINING


def test_one_liar_is_not_believed_against_fifteen_donors() -> None:
    log = SETTINGS.empty_log

    def entry(peer: str) -> Header:
        member = Member(peer=peer, tokens=200, samples=log.grants[0])
        return log.next_header((member,), digest_of(peer.encode()), peer)

    def offered(header: Header, state: bytes) -> Offered:
        offer = SnapshotOffer(last=header, bytes=8, state_digest=digest_of(state))
        return Offered(offer, log.at(header).position, (bytes(1),))

    honest, invented = entry("a"), entry(STRANGER).model_copy(update={"lineage_tokens": 2**61, "index": 5000})
    offers = {f"donor{number}": offered(honest, b"right") for number in range(15)}
    offers[STRANGER] = offered(invented, b"wrong")
    walk = Walk(log, SimulatedKeys("a").verify)
    walk.take(honest, None)
    with pytest.raises(LogError):
        walk.take(invented, None)
    assert STRANGER not in Vouched(walk.branch()).choose(offers)


class EmptyReady(Lie):
    """It takes no lease, and says Ready with nothing: it has no say, and would have one."""

    def says(self, to: str, message: Message) -> Said:
        if not isinstance(message, LeaseRequest | Ready):
            yield to, message

    def volunteers(self) -> Said:
        yield from self.to_all(
            Ready(
                position=self.log.position,
                view=self.peer.round.pacemaker.view,
                incarnation=self.peer.incarnation,
                state_digest=self.peer.state_digest,
                tokens=0,
                samples=(),
                wants=0,
                commitment=None,
                round=None,
                rate=0,
                seen=(),
                relayed=(),
                unreached=(),
                lock=None,
            )
        )


class SecondReady(Lie):
    """It says Ready once as it should, and then with a lease that no entry can give it."""

    def says(self, to: str, message: Message) -> Said:
        yield to, message
        if isinstance(message, Ready):
            yield to, remade(message, wants=FAR)


@pytest.mark.parametrize("lie", [EmptyReady, pytest.param(SecondReady, marks=pytest.mark.thorough)])
def test_r14_no_peers_ready_voids_the_rounds_of_all(lie: type[Lie]) -> None:
    """An honest leader took it into its round, no entry could follow, and no member entered it."""

    def entries(kind: type[Lie]) -> int:
        swarm = swarm_of(4)
        swarm.peer_of = lambda name, here, clock: Liar(name, here, clock, kind, random.Random(1))
        swarm.start("peer4")
        before = swarm.longest
        swarm.run(400.0)
        return swarm.longest - before

    assert entries(lie) >= 0.8 * entries(Lie)


# Lies in rounds ------------------------------------------------------------------------------------------------
def counted(lie: str | None, seconds: float = 900.0) -> Counter[str]:
    """Return the tokens that count of each of six peers, the last of which lies from the third entry on."""
    swarm = Swarm(1, replace(SETTINGS, timing=Timing(), minimum_peers=1), one_child=False, block_count=14)
    swarm.training_time = lambda steps: steps * swarm.random.uniform(0.8, 1.2)  # type: ignore[method-assign]
    if lie is not None:
        plant(swarm, (Deceit("peer5", lie, 2),))
    for name in range(6):
        swarm.start(f"peer{name}")
    reach(swarm.run(400.0, until=lambda: swarm.longest >= 3), "three entries")
    tally = Tally(swarm)
    swarm.run(seconds)
    return tally.tokens


@pytest.fixture(scope="module")
def unharmed() -> int:
    """Return what the one of five counts that counts least, if all are honest."""
    tokens = counted(None)
    return min(tokens[f"peer{number}"] for number in range(5))


@pytest.mark.parametrize(
    ("lie", "share"),
    [
        pytest.param("jumps views", 0.9, marks=pytest.mark.thorough),
        *(pytest.param(lie, 0.7, marks=pytest.mark.thorough) for lie in ("wrong blocks", "many averages")),
        *(pytest.param(lie, 0.7, marks=pytest.mark.thorough) for lie in ("makes absent", "starves")),
        # Each round takes the time of an exchange and of an heir: longer than these trainings.
        pytest.param("trickles", 0.4, marks=pytest.mark.thorough),
    ],
)
def test_a_liar_costs_the_honest_little(lie: str, share: float, unharmed: int) -> None:
    tokens = counted(lie)
    assert min(tokens[f"peer{number}"] for number in range(5)) >= share * unharmed


@pytest.mark.parametrize(
    ("seed", "fragments"),
    [
        *((15486, 1), (16407, 1), (16358, 1)),
        *(pytest.param(*each, marks=pytest.mark.thorough) for each in ((10746, 1), (3500076, 3), (4003118, 3))),
    ],
)
def test_lives_that_once_failed(seed: int, fragments: int) -> None:
    """Foundings that went on with two while the others said Ready again; a leader that was given up as it began; a
    founding by fewer than the minimum, which those left out did not believe; a member of a minority that put its
    entry's certificate together itself, and never looked for the payload elsewhere; an entry whose payload lay on the
    disk alone, where a vote long before had put it."""
    live(draw_life(seed, fragments))
