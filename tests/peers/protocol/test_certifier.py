"""What proves an entry to a peer, and what does not."""

from __future__ import annotations

import pytest

from peers.log.certificate import Certificate, Proof
from peers.protocol.acceptor import MEMORY, Memory
from peers.protocol.certifier import FANOUT, OPEN_LIMIT, Certifier, told_by
from peers.protocol.effects import Apply, Dropped, FetchPayload
from peers.protocol.messages import Abort, Commit, Complete
from peers.protocol.states import State
from peers.values.wire import digest_of
from tests.peers.builders import (
    LOG,
    PAYLOAD,
    RUN,
    TIMING,
    Rig,
    attempt,
    commit,
    first_log,
    of,
    round_of,
    sends,
    vote,
)
from tests.simulator.simulated_keys import SimulatedKeys


def at_second() -> Rig:
    """b has applied the first entry, and trains."""
    return Rig().joined().trained().averaging().holding().applying().applied()


def holding() -> Rig:
    return at_second().trained().averaging().holding()


# Who is believed -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("sender", ["a", "c"])
def test_whoever_has_the_certificate_is_believed_that_what_we_hold_is_committed(sender: str) -> None:
    rig = holding()
    header = rig.next_header()
    assert of(rig.hear(sender, rig.commit(header, by="ac")), Apply) == [Apply(header)]
    assert rig.peer.lineage.entries[-1] == header


def waiting(rig: Rig, seconds: float) -> Rig:
    """Ready for so long, while all others are here."""
    until = rig.now + seconds
    while rig.now < until:
        rig.tick()
        rig.see()
    return rig


def test_nobody_goes_on_alone_with_a_leader_while_most_are_here() -> None:
    """Else a leader that lies would make any entry of its own, and need no more signatures than one."""
    rig = waiting(at_second().trained(), TIMING.partition_grace / 2)
    begin = rig.begin()
    alone = begin.attempt.model_copy(update={"alone": True})
    said = begin.model_copy(update={"attempt": alone, "round": round_of(alone, rig.roster())})
    assert [dropped.what for dropped in of(rig.hear("a", said), Dropped)] == ["begin"]
    assert rig.is_in(State.READY)


def test_with_too_few_signatures_the_leader_of_our_attempt_alone_is_believed() -> None:
    """It is the only judge of whether a minority goes on; nobody else's minority is ours. Of a majority's attempt not
    even the leader is believed without signatures."""
    for is_alone in (False, True):
        rig = waiting(at_second().trained(), TIMING.partition_grace)
        begin = rig.begin()
        ours = begin.attempt.model_copy(update={"alone": is_alone})
        roster = [one.model_copy(update={"incarnation": int(is_alone and one.peer != "b")}) for one in rig.roster()]
        rig.hear("a", begin.model_copy(update={"attempt": ours, "round": round_of(ours, roster)}))
        header = rig.holding().peer.log.in_state(rig.peer.state_digest).next_header(roster, PAYLOAD)
        for sender, at in (("c", attempt(rig.peer.log, 2, "c")), ("c", ours), ("z", ours)):
            assert not of(rig.hear(sender, commit(rig.peer.log, header, at, by="c")), Apply)
        assert not of(rig.hear("a", Commit(header=header, certificate=None)), Apply)
        believed = rig.hear("a", commit(rig.peer.log, header, ours, by="b"))
        assert of(believed, Apply) == ([Apply(header)] if is_alone else [])


def test_what_a_minority_hands_on_keeps_the_weight_that_it_had() -> None:
    """Regression: an entry that most had signed was handed on by a minority, and gave way to an older one."""
    rig = holding()
    held = rig.peer.slot.acceptor.held
    assert held is not None
    rig.hear("a", Abort(attempt=held.attempt, reason="over"))
    alone = rig.attempt(4).model_copy(update={"alone": True})
    rig.hear("a", rig.adopt(4, held).model_copy(update={"attempt": alone}))
    (_, complete), *_ = sends(rig.effects, Complete)
    assert complete.attempt == alone
    assert rig.peer.slot.acceptor.held == held


def test_false_signatures_are_none() -> None:
    rig = holding()
    header = rig.next_header()
    good = commit(rig.peer.log, header, attempt(rig.peer.log, 2, "c"), by="ac").certificate
    assert good is not None
    first, second = good.votes
    swapped = (first.model_copy(update={"signature": second.signature}), second)
    forged = good.model_copy(update={"votes": swapped})
    assert not of(rig.hear("c", Commit(header=header, certificate=forged)), Apply)
    assert of(rig.hear("c", Commit(header=header, certificate=good)), Apply)


def test_what_is_certified_is_followed_whoever_tells_it() -> None:
    rig = at_second()
    rig.see(rig.peer.log.append(rig.next_header()))
    header = rig.next_header()
    assert of(rig.hear("c", rig.commit(header, by="ac")), FetchPayload)


def test_a_minoritys_entry_is_not_followed_while_most_are_here() -> None:
    """Else one liar, with nothing but its own signature, would take everybody along."""
    rig = at_second()
    header = rig.next_header()
    rig.see(rig.peer.log.append(header), others="c")
    assert not of(rig.hear("c", rig.commit(header, by="c")), FetchPayload)
    assert rig.is_in(State.TRAINING)


def test_a_minoritys_entry_is_followed_where_too_few_are_here() -> None:
    rig = at_second()
    header = rig.next_header()
    rig.tick(2 * TIMING.heartbeat_expiry)  # a is gone
    rig.see(rig.peer.log.append(header), others="c")
    assert of(rig.hear("c", rig.commit(header, by="c")), FetchPayload)


@pytest.mark.parametrize("is_alone", [False, True])
def test_what_a_minority_handed_on_gives_way_to_what_may_be_committed(is_alone: bool) -> None:
    """Of two attempts of majorities the later one counts."""
    rig = holding()
    held = rig.peer.slot.acceptor.held
    assert held is not None
    rig.hear("a", Abort(attempt=held.attempt, reason="over"))
    other = rig.held(5, "c", payload=digest_of(b"another"))
    other = other.model_copy(update={"attempt": other.attempt.model_copy(update={"alone": is_alone})})
    effects = rig.hear("a", rig.adopt(6, other))
    assert bool(of(effects, FetchPayload)) is not is_alone


# What is signed ------------------------------------------------------------------------------------------------
def test_who_says_it_is_complete_has_signed_the_entry() -> None:
    rig = holding()
    (_, complete), *_ = sends(rig.effects, Complete)
    assert complete.signature == vote(rig.next_header(), rig.attempt(), "b")


def test_the_leaders_commit_proves_itself() -> None:
    rig = holding()
    header, log = rig.next_header(), rig.peer.log
    rig.hear("a", rig.commit(header, by="abc"))
    followed = rig.peer.lineage.after(log.position)
    assert followed is not None
    certifier = Certifier(SimulatedKeys("z"), log, dict)
    assert certifier.proof(*followed) == Proof(True, 2)


def test_nothing_is_proven_by_nothing() -> None:
    log = first_log()
    header = log.next_header([log.expected(peer) for peer in "abc"], PAYLOAD)
    certifier = Certifier(SimulatedKeys("a"), log, dict)
    assert certifier.proof(header, None) is None
    empty = Certificate(number=1, leader="a", alone=False, votes=(), farewells=())
    assert certifier.proof(header, empty) == Proof(False, 0)


# Who is told ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("size", [1, OPEN_LIMIT, OPEN_LIMIT + 1, 100, 1000])
def test_each_member_of_a_large_attempt_is_told_by_one_other(size: int) -> None:
    members = tuple(f"peer{number}" for number in range(size))
    leader = members[size // 2]
    told = [peer for member in members for peer in told_by(member, leader, members)]
    assert sorted(told) == sorted(set(members) - {leader} if size > OPEN_LIMIT else ())
    assert max(len(told_by(member, leader, members)) for member in members) <= FANOUT
    assert told_by("stranger", leader, members) == ()


# Memory --------------------------------------------------------------------------------------------------------
def memory() -> Memory:
    return Memory("a", RUN, 7, SimulatedKeys("a"))


def test_promises_are_kept_by_position() -> None:
    kept = memory()
    kept.at(LOG.position).pledge("b")
    assert kept.at(first_log().position).pledged_to is None
    assert kept.at(LOG.position).pledged_to == "b"
    assert kept.incarnation == 7


def test_whoever_begins_anew_is_another_from_then_on() -> None:
    kept = memory()
    kept.at(LOG.position).pledge("b")
    kept.begin_anew()
    assert kept.incarnation == 8
    assert kept.at(LOG.position).pledged_to == "b", "and keeps its promises all the same"


def test_who_comes_back_to_where_it_may_have_forgotten_something_is_another() -> None:
    kept = memory()
    position = LOG.position
    places = [
        position.model_copy(update={"index": index, "head": index.to_bytes(32, "big")}) for index in range(MEMORY)
    ]
    for place in places:
        kept.at(place).pledge("b")
    assert kept.at(places[0]).pledged_to == "b"
    kept.at(first_log().position.model_copy(update={"index": 2 * MEMORY}))  # place 1 goes
    assert kept.incarnation == 7
    kept.at(places[1])
    assert (kept.incarnation, kept.at(places[1]).pledged_to) == (8, None)


def test_a_departure_is_after_all_that_was_held() -> None:
    kept, log = memory(), first_log()
    header = log.next_header([log.expected(peer) for peer in "abc"], PAYLOAD)
    assert kept.goodbye(log.position).departure == 0
    kept.at(log.position).pledge("b")
    assert kept.goodbye(log.position).departure == 0
    kept.at(log.position).hold(attempt(log), header, (), bytes(64))
    assert kept.goodbye(LOG.position).departure == 2
