"""Ways in which the protocol was broken once, as an attacker would do it, or a user with bad luck.

Each test says what ought to be true. One that is found to fail is marked as expected to, until somebody mends it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest

from peers.log.certificate import ballot
from peers.log.header import Header, Member
from peers.log.lineage import Walk
from peers.log.settings import RunSettings, Timing
from peers.log.state import LogError
from peers.presence.heartbeat import Heartbeat, PeerState
from peers.protocol.effects import FetchSnapshot
from peers.protocol.events import Event, HeartbeatsSeen, PayloadFetched, Received, ReducedArrived, TrainingDone
from peers.protocol.messages import Accuse, Begin, Commit, Complete, Message, Ready
from peers.protocol.rounds import Attempt, Held
from peers.protocol.states import State
from peers.transfer.snapshots import Offered, SnapshotOffer, Vouched
from peers.values.chunks import Payload
from peers.values.manifest import Amendment
from peers.values.wire import digest_of
from tests.simulation.test_broken_links import Tally
from tests.simulator.history import InvariantError
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
    assert one.index <= swarm.peers[first].index


def test_a_member_that_forgot_what_it_held_does_not_outvote_it() -> None:
    """L and M commit entry p + 1, M is killed and starts again among those who were cut off before entry p."""
    swarm = at_work(swarm_of(5, 1), 2)
    roster = swarm.living[0].peer.log.roster
    reach(len(roster) == 5, "five in the roster")
    leader, member, deafened, *others = roster
    for side, name in enumerate(others, 2):
        swarm.side[name] = side
    reach(swarm.run(200.0, until=lambda: len(swarm.peers[leader].peer.log.voters) == 3), "three who vote")
    p = swarm.longest

    def lose(sender: str, to: str, message: Message) -> Message | None:
        """`deafened` is cut off when it holds entry p, `member` never hears that what it holds is committed."""
        if isinstance(message, Commit) and message.header.index == p and (sender, to) == (leader, deafened):
            swarm.side[deafened] = 1
            return None
        if isinstance(message, Complete) and sender != to:
            return None if (message.attempt.position.index, to) in ((p, deafened), (p + 1, member)) else message
        return None if isinstance(message, Commit) and message.header.index == p + 1 else message

    swarm.on_message = lose
    went_on = swarm.run(200.0, until=lambda: all(swarm.peers[name].index == p + 1 for name in (leader, member)))
    reach(went_on, "entry p of three")
    killed: list[str] = []

    def kill_the_holder(name: str) -> None:
        if name == leader and swarm.peers[leader].index == p + 2 and not killed:
            killed.append(member)
            swarm.side[leader] = 9
            swarm.kill(member)

    swarm.on_apply = kill_the_holder
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
    wrong = swarm.peers[swarm.living[0].peer.log.roster[0]]
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
    swarm.run(1000.0)
    reach(bool(flipped), "an entry that is applied wrongly")
    assert not any(count for name, count in fetches.items() if name != wrong.name)
    assert swarm.longest - before > 20


# Claims --------------------------------------------------------------------------------------------------------
def test_a_stranger_commits_nothing() -> None:
    swarm = at_work(swarm_of(5), 2)
    log = swarm.peers["peer3"].peer.log.in_state(swarm.peers["peer3"].peer.state_digest)
    own = Member(peer=STRANGER, tokens=200, samples=log.grants[0])
    header = log.next_header((own,), digest_of(b"any payload"))
    beat = heartbeat_of_a_stranger(PeerState.READY, log.position.index + 1, header.digest, log.lineage_tokens)
    for one in swarm.living:
        for event in (
            HeartbeatsSeen((beat,)),
            Received(STRANGER, Commit(header=header, certificate=None)),
            PayloadFetched(header),
        ):
            one.peer.handle(event, one.time(swarm.now))
        assert one.peer.log.position == log.position


def test_a_member_can_invent_no_entry_that_it_holds() -> None:
    swarm = swarm_of(5)
    liar, invented = swarm.peers["peer4"], list[Header]()

    def claim(sender: str, to: str, message: Message) -> Message:
        if sender != liar.name or not isinstance(message, Ready) or message.position.index < 2:
            return message
        log = liar.peer.log.in_state(message.state_digest)
        payload = Payload.cut(memoryview(b"\x07" * liar.buffers.size.bytes), 8)
        liar.buffers.kept.keep(payload)
        own = Member(peer=liar.name, tokens=message.tokens, samples=message.samples)
        invented.append(log.next_header((own,), payload.digest))
        attempt = Attempt(position=log.position, number=2**61, leader=STRANGER)
        text = ballot(invented[-1], attempt.name, message.incarnation).text
        held = Held(attempt=attempt, header=invented[-1], signature=SimulatedKeys(liar.name).sign(text))
        return message.model_copy(update={"held": held})

    swarm.on_message = claim
    swarm.run(300.0, until=lambda: swarm.longest >= 5)
    reach(bool(invented), "a Ready of the liar's")
    entries = {entry.digest for one in swarm.living for entry in one.peer.lineage.entries}
    assert not entries & {header.digest for header in invented}


def test_an_invented_weight_stops_nobodys_training() -> None:
    swarm = at_work(swarm_of(5), 2)
    beat = heartbeat_of_a_stranger(PeerState.ARCHIVING, 1, digest_of(b"invented"), 2**61)
    for one in swarm.living:
        one.peer.handle(HeartbeatsSeen((beat,)), one.time(swarm.now))
        assert one.peer.state is State.TRAINING


def test_one_liar_is_not_believed_against_fifteen_donors() -> None:
    log = SETTINGS.empty_log

    def entry(peer: str) -> Header:
        return log.next_header((Member(peer=peer, tokens=200, samples=log.grants[0]),), digest_of(peer.encode()))

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


# Lies in rounds ------------------------------------------------------------------------------------------------
@dataclass
class Attack:
    """What the last of six does in rounds from the first minute on."""

    on_message: Callable[[Swarm, str, str, str, Message], Message | None] | None = None
    blocks: Callable[[bytes, str], bytes] | None = None
    names_all_absent: bool = False


def accuse(swarm: Swarm, liar: str, sender: str, to: str, message: Message) -> Message:
    """Accuse every other member as soon as a round begins."""
    if isinstance(message, Begin) and to == liar and sender != liar:
        for victim in set(message.round.remaining) - {liar, sender}:
            lie = Accuse(attempt=message.attempt, accused=victim, reason="bad blocks")
            swarm.send(swarm.peers[liar], sender, lie)
    return message


def differing(data: bytes, to: str) -> bytes:
    """Another average for each member."""
    return digest_of(to.encode() + data)[: len(data)].ljust(len(data), b"x")


def counted(attack: Attack, seconds: float = 900.0) -> Counter[str]:
    """The tokens that count of each peer."""
    swarm = swarm_of(6, 1, replace(SETTINGS, timing=Timing(), minimum_peers=1), one_child=False)
    swarm.run(60.0)
    liar, send_chunk, soon = "peer5", swarm.send_chunk, swarm.soon
    tally = Tally(swarm)

    def others() -> tuple[str, ...]:
        exchange = swarm.peers[liar].peer.exchange
        return tuple(peer for peer in exchange.round.peers if peer != liar) if exchange else ()

    def send(sender: SimulatedPeer, send: object, data: bytes) -> None:
        if sender.name == liar and send.reduced:  # type: ignore[attr-defined]
            data = attack.blocks(data, send.to) if attack.blocks else data  # type: ignore[attr-defined]
            send = replace(send, absent=others()) if attack.names_all_absent else send  # type: ignore[type-var]
        send_chunk(sender, send, data)  # type: ignore[arg-type]

    def believe_it_oneself(peer: SimulatedPeer, event: Event, delays: float = 1.0) -> None:
        if attack.names_all_absent and peer.name == liar and isinstance(event, ReducedArrived) and event.sender == liar:
            event = replace(event, absent=others())
        soon(peer, event, delays)

    swarm.send_chunk = send  # type: ignore[method-assign]
    swarm.soon = believe_it_oneself  # type: ignore[method-assign]
    if lie := attack.on_message:
        swarm.on_message = lambda sender, to, message: lie(swarm, liar, sender, to, message)
    swarm.run(seconds)
    return tally.tokens


@pytest.fixture(scope="module")
def unharmed() -> int:
    """What the honest count of whom least counts, if all are honest."""
    tokens = counted(Attack())
    return min(tokens[f"peer{number}"] for number in range(5))


ATTACKS = {
    "accuses everybody": Attack(on_message=accuse),
    "gives each another average": Attack(blocks=differing),
    "names all others absent": Attack(names_all_absent=True),
}


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS)
def test_a_liar_costs_the_honest_little(attack: Attack, unharmed: int) -> None:
    tokens = counted(attack)
    assert min(tokens[f"peer{number}"] for number in range(5)) >= 0.8 * unharmed


@pytest.mark.parametrize("seed", [15486, 16407, 16358])
def test_lives_that_once_failed(seed: int) -> None:
    """Foundings that went on with two while the others said Ready again; a leader that was given up as it began."""
    live(draw_life(seed))
