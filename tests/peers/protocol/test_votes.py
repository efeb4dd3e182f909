"""What members have signed, alone: what a certificate shows of it, and what that costs."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace

from peers.log.certificate import Certificate, Vote
from peers.log.header import MEMBER_LIMIT, Header
from peers.log.lineage import Branch, Walk
from peers.log.state import LogState
from peers.protocol.effects import Apply, FetchPayload
from peers.protocol.events import HeartbeatsSeen, LineageSeen, PayloadFetched
from peers.protocol.faults import TwoVotes
from peers.protocol.messages import Commit, Prove
from peers.protocol.rounds import Attempt, Round
from peers.protocol.votes import PLACES, Polls, Votes, signed_both
from peers.values.wire import digest_of
from tests.peers.builders import (
    COURT,
    PAYLOAD,
    attempt,
    beat,
    commit,
    complete,
    first_log,
    of,
    round_of,
    sends,
    vote,
)
from tests.peers.protocol.test_peer import at_second
from tests.simulator.simulated_keys import SimulatedKeys

LOG = first_log()
VERIFY = SimulatedKeys("b").verify
ATTEMPT = attempt(LOG)
OTHER = digest_of(b"another payload")


class Scene:
    """b has heard c say what it has signed."""

    def __init__(self) -> None:
        self.checked = 0
        self.round: Round = round_of(ATTEMPT, [LOG.expected(name) for name in "abc"])
        self.votes = Votes(LOG, self.verify)
        assert self.hear(PAYLOAD) is None

    def hear(self, payload: bytes, peer: str = "c", at: Attempt = ATTEMPT) -> TwoVotes | None:
        return self.votes.hear(peer, complete(self.header(payload), at, peer), None)

    def verify(self, peer: str, text: bytes, signature: bytes) -> bool:
        self.checked += 1
        return SimulatedKeys("b").verify(peer, text, signature)

    def header(self, payload: bytes) -> Header:
        return LOG.next_header(self.round.roster, payload)

    def commit(self, payload: bytes, votes: tuple[Vote, ...]) -> Commit:
        number, leader, alone = ATTEMPT.name
        certificate = Certificate(number=number, leader=leader, alone=alone, votes=votes, farewells=())
        return Commit(header=self.header(payload), certificate=certificate)

    def signed(self, payload: bytes, peers: str) -> tuple[Vote, ...]:
        header = self.header(payload)
        return tuple(Vote(place="abc".index(peer), signature=vote(header, ATTEMPT, peer)) for peer in peers)


def test_a_certificate_shows_who_has_signed_another_entry() -> None:
    scene = Scene()
    assert not scene.votes.compare(scene.commit(PAYLOAD, scene.signed(PAYLOAD, "abc")))
    assert scene.checked == 0, "nothing is to be shown"
    [proof] = scene.votes.compare(scene.commit(OTHER, scene.signed(OTHER, "abc")))
    assert proof.accused == "c"


def test_a_vote_that_comes_when_the_entry_is_made_is_compared_with_its_certificate() -> None:
    """Regression: what came then was not looked at any more."""
    scene = Scene()
    made = scene.commit(PAYLOAD, scene.signed(PAYLOAD, "ac"))
    assert made.certificate is not None
    scene.votes.made(made.header, made.certificate)
    assert scene.hear(PAYLOAD) is None
    assert scene.hear(OTHER, "b") is None, "its signature is not shown"
    assert scene.hear(OTHER, at=attempt(LOG, 2)) is None, "in a later attempt one may"
    proof = scene.hear(OTHER)
    assert proof is not None
    assert proof.convicts(COURT)
    forged = complete(scene.header(OTHER), ATTEMPT, "a").model_copy(update={"signature": bytes(64)})
    assert scene.votes.hear("a", forged, None) is None
    assert scene.votes.hear("z", complete(scene.header(OTHER), ATTEMPT, "z"), None) is None, "it has no say"


def test_what_is_heard_of_a_place_after_it_is_compared_there() -> None:
    """Regression: the votes of a place were forgotten with it."""
    rig = at_second().trained().averaging()
    first, late = (rig.complete("c", payload=payload) for payload in (PAYLOAD, OTHER))
    rig.hear("c", first)
    rig.holding().applying()
    assert first.position != rig.peer.log.position
    rig.hear("c", first)
    assert not rig.peer.presence.standing.barred(rig.now)
    rig.hear("c", late)
    assert rig.peer.presence.standing.barred(rig.now) == {"c"}


def test_votes_are_remembered_at_a_few_places() -> None:
    polls, log, logs = Polls(VERIFY), LOG, []
    for _ in range(PLACES + 2):
        logs.append(log)
        log = log.append(log.next_header([log.expected(name) for name in "abc"], PAYLOAD))
        votes = polls.open(logs[-1])
        assert polls.at(logs[-1].position) is votes is polls.open(logs[-1])
    assert [polls.at(log.position) is None for log in logs] == [True] + [False] * (PLACES + 1)


def test_the_votes_of_a_cycle_with_many_fragments_are_all_remembered() -> None:
    """Regression: those of the first fragments were forgotten as soon as the cycle began."""
    polls, log = Polls(VERIFY), replace(LOG, fragments=2 * PLACES)
    votes = [polls.open(log.of(fragment)) for fragment in log.pending]
    assert [polls.at(log.of(fragment).position) for fragment in log.pending] == votes


def test_of_what_was_said_at_a_place_little_is_kept() -> None:
    """Regression: a Complete may name a thousand peers, and those of eight places were kept as they came."""
    scene = Scene()
    said = complete(scene.header(PAYLOAD), ATTEMPT, "b")
    heard = weakref.ref(said)
    scene.votes.hear("b", said, None)
    del said
    gc.collect()
    assert heard() is None


def test_a_false_certificate_of_what_is_followed_is_forgotten() -> None:
    """Regression: where most are gone an entry of one voter is followed, whatever its certificate is. One that names
    places that are none ended its receiver as soon as its author said that it had signed another entry."""
    rig = at_second()
    log = rig.peer.log
    while len(rig.peer.presence.live()) > 1:
        rig.tick()
        rig.sequence += 1
        further = beat("a", log, sequence=rig.sequence).model_copy(update={"index": log.position.index + 1})
        rig.do(HeartbeatsSeen((further,)))
    one, other = (log.next_header([log.expected("a")], payload) for payload in (PAYLOAD, OTHER))
    false = Certificate(number=1, leader="a", alone=False, votes=(Vote(place=7, signature=bytes(64)),), farewells=())
    assert of(rig.hear("a", Commit(header=one, certificate=false)), FetchPayload)
    [apply] = of(rig.do(PayloadFetched(one)), Apply)
    assert apply.certificate is None
    rig.hear("a", complete(other, attempt(log), "a"))


def test_whoever_makes_a_certificate_up_has_little_of_it_checked() -> None:
    """Regression: a message of 460 bytes, with one place a thousand times, made its receiver check 2,000 signatures."""
    scene = Scene()
    false = Vote(place=2, signature=bytes(64))
    for votes in ((false,) * MEMBER_LIMIT, (*scene.signed(OTHER, "a"), false), scene.signed(OTHER, "ccc")):
        assert not scene.votes.compare(scene.commit(OTHER, votes))
    assert scene.checked <= 3


def branch_of(log: LogState, payload: bytes, by: str, at: Attempt) -> Branch:
    """What follows at a peer that has an entry of this payload, with these signatures."""
    header = log.next_header([log.expected(name) for name in "abc"], payload)
    walk = Walk(log, VERIFY)
    walk.take(header, commit(log, header, at, by).certificate)
    return walk.branch()


def test_two_certificates_of_one_attempt_show_who_has_signed_both() -> None:
    ours, theirs = branch_of(LOG, PAYLOAD, "bc", ATTEMPT), branch_of(LOG, OTHER, "ac", ATTEMPT)
    [proof] = signed_both(ours, theirs)
    assert proof.accused == "c"
    assert all(VERIFY("c", said.text, said.signature) for said in proof.said)
    assert not list(signed_both(ours, ours))
    assert not list(signed_both(ours, branch_of(LOG, OTHER, "ac", attempt(LOG, 2)))), "in a later attempt one may"


def test_a_log_that_ends_within_a_cycle_proves_nothing_and_harms_nobody() -> None:
    """Regression: a donor that told one fragment's entry after a fork, signed by nobody, ended whoever compared."""
    log = replace(LOG, fragments=2)
    unsigned = Certificate(number=1, leader="a", alone=False, votes=(), farewells=())

    def branch(payload: bytes, fragments: int) -> Branch:
        walk = Walk(log, VERIFY)
        for fragment in range(fragments):
            here = walk.end.of(fragment)
            walk.take(here.next_header([here.expected(name) for name in "abc"], payload), unsigned)
        return walk.branch().until(walk.whole) if walk.end.made else walk.branch()

    ours, theirs = branch(PAYLOAD, 2), branch(OTHER, 1)
    assert (dict(theirs.first), dict(theirs.certificates)) == ({}, {})
    assert not list(signed_both(ours, theirs))
    at_second().do(LineageSeen("a", theirs, ours))


def test_whoever_has_certified_both_branches_is_shown_to_the_leader() -> None:
    """Regression: each side of such a fork had one of the certificates, and nobody compared them."""
    rig = at_second()
    log, at = rig.peer.log, attempt(rig.peer.log)
    rig.do(LineageSeen("a", branch_of(log, OTHER, "ac", at), branch_of(log, PAYLOAD, "bc", at)))
    assert rig.peer.presence.standing.barred(rig.now) == {"c"}
    rig.trained()
    assert [(to, shown.fault) for to, shown in sends(rig.effects, Prove)] == [("a", "votes")]
