"""The replica alone (R14, R19, R21): entries in order, and the ways back to where the others are."""

from __future__ import annotations

import pytest

from peers.errors import LocalProtocolError
from peers.log.certificate import Support
from peers.log.header import Header, Member
from peers.log.lineage import RECENT_ENTRIES, Branch, Lineage
from peers.log.state import LogState
from peers.messages.messages import Certified
from peers.presence.heartbeat import PeerState
from peers.presence.presence import Presence
from peers.protocol.belief import Belief
from peers.protocol.catching_up import Search
from peers.protocol.effects import Apply, Dropped, FetchLineage, FetchSnapshot, Note, Send, TokensLost
from peers.protocol.events import Applied, Digested, LineageSeen, SignedHeadsSeen, SnapshotFailed, SnapshotRestored
from peers.protocol.internal import EntryMade, FarBehind, NoneAhead
from peers.protocol.replica import PASSED_ON, Replica, ReplicaState
from peers.values.signed_heads import SignedHead, SignedHeads
from peers.values.wire import digest_of
from tests.peers.builders import context, of
from tests.peers.heartbeats import beat
from tests.peers.logs import CERTIFIED, LOG, PAYLOAD, SETTINGS, STATE, TOKENS, departed, first_log, member, next_header
from tests.simulator.simulated_keys import SimulatedKeys

NEXT = digest_of(b"the state after the entry")


def roster_of(log: LogState) -> tuple[Member, ...]:
    return log.last.roster if log.last else ()


def after(log: LogState, payload: bytes = PAYLOAD) -> LogState:
    """All that have a lease have trained it."""
    roster = [one.model_copy(update={"samples": log.leases[one.peer]}) for one in roster_of(log)]
    return log.append(next_header(log, roster, payload)) if roster else first_log()


class Place:
    """b's replica, at some place in the log, beside a and c."""

    def __init__(self, log: LogState = LOG) -> None:
        self.context = context("b")
        self.presence = Presence("b", 10.0, 40.0, 0.0, self.context.is_farewell)
        self.replica = Replica(self.context, self.presence, Lineage(log), STATE)
        self.belief = Belief(self.context, self.presence, self.replica)
        self.search = Search(self.context, self.presence, self.replica, self.belief)
        self.beats = 0

    def see(self, log: LogState, names: str = "ac", state: PeerState = PeerState.TRAINING) -> None:
        self.beats += 1
        self.presence.membership.observe([beat(name, log, state, self.beats) for name in names], self.context.now)

    def step(self, log: LogState) -> None:
        assert log.last is not None
        self.replica.take(EntryMade(log.last, None, keeps_work=False))
        self.replica.take(Applied(log.last))
        self.replica.take(Digested(log.last, NEXT))
        self.context.take_effects()


def told(header: Header) -> Certified:
    return Certified(header=header, certificate=None)


def test_an_entry_is_applied_and_then_has_a_digest() -> None:
    place, log = Place(), after(LOG)
    assert log.last is not None
    place.replica.take(EntryMade(log.last, None, keeps_work=True))
    assert of(place.context.take_effects(), Apply) == [Apply(log.last, True)]
    assert (place.replica.log, place.replica.settled) == (log, LOG)
    place.replica.take(Applied(log.last))
    assert not place.replica.is_settled, "heartbeats name the place before, until the digest is there"
    place.replica.take(Digested(log.last, NEXT))
    assert place.replica.is_settled
    assert place.replica.state_digest == NEXT


@pytest.mark.parametrize(("size", "is_news"), [(PASSED_ON, False), (PASSED_ON + 1, True)])
def test_an_entry_of_many_is_news_for_a_moment(size: int, is_news: bool) -> None:
    """Its commit is on its way to all: whoever asks meanwhile need not be told by its leader, too."""
    roster = [member(f"peer{place:02}", 20 * place, 20 * place + 20) for place in range(size)]
    first = LOG.append(next_header(LOG, roster))
    second = after(first)
    assert first.last is not None
    assert second.last is not None
    place = Place()
    place.step(first)
    assert place.replica.is_news(first.last) == is_news
    place.context.now += SETTINGS.timing.resend
    assert not place.replica.is_news(first.last)
    place.step(second)
    assert not place.replica.is_news(first.last), "an older one never is"
    assert place.replica.is_news(second.last) == is_news


def test_a_digest_of_another_entry_is_a_bug_of_ours() -> None:
    place, log = Place(), after(LOG)
    assert log.last is not None
    with pytest.raises(LocalProtocolError, match="is not the last applied one"):
        place.replica.take(Digested(log.last, NEXT))


def test_nobody_is_followed_who_is_not_further_on_unless_it_was_asked() -> None:
    place, first = Place(), after(LOG).last
    assert first is not None
    place.see(LOG, "a")
    alone = Support(False, 1)
    assert place.belief.entry("a", told(first), alone, sender_was_asked=False) is None
    behind = place.belief.entry("a", told(first), alone, sender_was_asked=True)
    assert behind is not None
    assert behind.donors == ("a",)
    assert place.belief.entry("z", told(first), alone, sender_was_asked=True) is None, "it is not heard"


def test_a_certified_entry_is_followed_whoever_shows_it_and_its_members_have_the_payload() -> None:
    place, first = Place(), after(LOG).last
    assert first is not None
    place.see(LOG)
    behind = place.belief.entry("z", told(first), CERTIFIED, sender_was_asked=False)
    assert behind is not None
    assert behind.donors == ("a", "c")


def far_from(log: LogState, entries: int) -> LogState:
    for _ in range(entries):
        log = after(log)
    return log


def test_far_behind_it_looks_at_a_log_then_takes_a_state_and_then_replays() -> None:
    place, log = Place(), far_from(LOG, SETTINGS.snapshot_every + 1)
    place.see(log)
    place.search.look()
    assert of(place.context.take_effects(), FetchLineage) == [FetchLineage("c", SETTINGS.snapshot_every + 1, ("a",))]
    far = place.search.on_seen(LineageSeen("c", Branch(LOG, log), Branch(LOG, LOG)))
    assert far == FarBehind("c", 1)
    place.replica.take(far)
    assert of(place.context.take_effects(), FetchSnapshot) == [FetchSnapshot("c", ("a",), 1)]
    place.replica.take(SnapshotRestored("c", first_log().last, NEXT))
    assert place.replica.state is ReplicaState.LEVEL
    assert place.replica.log.position == first_log().position
    place.context.take_effects()
    place.search.fetched()
    place.search.look()
    assert of(place.context.take_effects(), Send), "it has a snapshot: from here on it asks what followed"


@pytest.mark.parametrize(
    ("theirs", "least"), [(PeerState.TRAINING, 1000 - RECENT_ENTRIES // 2), (PeerState.ARCHIVING, 1)]
)
def test_a_snapshot_must_be_so_new_that_what_followed_is_known(theirs: PeerState, least: int) -> None:
    """Archives know everything."""
    place, log = Place(), far_from(LOG, 3)
    place.presence.membership.observe([beat("c", log, theirs, 9, index=1000)], 0.0)
    far = place.search.far_behind()
    assert far is not None
    assert far.least == least


def gone_on_alone(place: Place, theirs: str, elsewhere: str = "", further: str = "") -> FarBehind | None:
    """z shows a branch that too few have signed after the first entry; these peers are where it says, or elsewhere."""
    before = first_log()
    alone, beyond = far_from(before, SETTINGS.snapshot_every + 1), far_from(before, 2 * SETTINGS.snapshot_every)
    place.see(before, names=elsewhere)
    place.see(alone, names=theirs)
    place.see(beyond, names=further)
    place.presence.membership.observe([beat("z", alone, PeerState.ARCHIVING, 9)], 0.0)
    place.search.weigh("z")
    heads = {log.position.index: log.position.head for log in (LOG, before, alone)}
    branch = Branch(LOG, alone, heads=heads, doubts=(before,))
    return place.search.on_seen(LineageSeen("z", branch, Branch(LOG, place.replica.log)))


@pytest.mark.parametrize(
    ("theirs", "elsewhere", "further", "is_followed"),
    [
        ("", "ac", "", False),
        ("", "a", "", False),
        ("ac", "", "", True),
        ("a", "c", "", False),
        ("a", "", "c", False),
        ("", "", "", True),
    ],
    ids=["two", "one, and we", "nobody", "one of two, and we", "one may be", "only we"],
)
def test_what_too_few_have_signed_is_not_followed_while_most_are_elsewhere(
    theirs: str, elsewhere: str, further: str, is_followed: bool
) -> None:
    """Regression: a member of the roster that went on alone, and showed it, took the others along. We count, too."""
    place = Place()
    place.step(first_log())
    assert (gone_on_alone(place, theirs, elsewhere, further) is not None) is is_followed


def test_those_who_go_on_where_nobody_is_left_are_no_minority() -> None:
    place, log = Place(), first_log()
    place.step(log)
    assert not place.replica.is_of_minority
    place.replica.lineage.doubt = LOG
    assert not place.replica.is_of_minority, "there was nobody before the first entry"
    log_of_others = LOG.append(next_header(LOG, [member("z", 0, 20)], NEXT))
    place.replica.lineage.doubt = log_of_others
    assert place.replica.is_of_minority
    departure, farewell = departed("z", 1)
    leaving = beat("z", log_of_others, PeerState.LEAVING, 5, departure=departure, farewell=farewell)
    place.presence.membership.observe([leaving], 0.0)
    assert not place.replica.is_of_minority, "all have left"


def founding(place: Place, theirs: str, proof: Support) -> FarBehind | None:
    """c shows that it has founded the run with others, and trained more."""
    other = LOG.append(
        next_header(LOG, [member(name, 20 * place, 20 * place + 20) for place, name in enumerate("cxyz")], NEXT)
    )
    place.see(other, names=theirs)
    place.search.weigh("c")
    ours = Branch(LOG, place.replica.log, {0: (b"ours", CERTIFIED)})
    branch = Branch(LOG, other, {0: (b"theirs", proof)}, {0: LOG.position.head, 1: other.position.head})
    return place.search.on_seen(LineageSeen("c", branch, ours))


@pytest.mark.parametrize(("with_us", "theirs", "moves"), [("a", "c", False), ("", "cz", True), ("", "c", True)])
def test_of_two_foundings_the_one_with_more_live_peers_counts(with_us: str, theirs: str, moves: bool) -> None:
    """Regression: twelve entries of invented members took a whole swarm away."""
    for proof in (CERTIFIED, Support(is_certified=False, signers=0)):
        place = Place()
        place.step(first_log())
        place.see(first_log(), names=with_us)
        far = founding(place, theirs, proof)
        assert (far is not None) is (moves and proof.is_certified)


# Signed heads ---------------------------------------------------------------------------------------------------
def heard(place: Place, index: int, head: bytes) -> None:
    """An archive has signed this head."""
    signed = SignedHead.sign("tiny", index, head, "z", SimulatedKeys("z"))
    place.replica.hear_signed(SignedHeadsSeen(SignedHeads("tiny", ("z",)).with_heads([signed])))


OTHER = LOG.append(next_header(LOG, [member("c", 0, 20)], NEXT))
"""Another founding."""


@pytest.mark.parametrize(("signed", "moves"), [(OTHER, True), (first_log(), False)], ids=["theirs", "ours"])
def test_of_two_foundings_the_signed_one_counts_whoever_lives_there(signed: LogState, moves: bool) -> None:
    place = Place()
    place.step(first_log())
    place.see(first_log(), names="a" if moves else "")
    heard(place, 1, signed.position.head)
    other, proof = "c" if moves else "cz", Support(is_certified=False, signers=0)
    place.see(OTHER, names=other)
    place.search.weigh("c")
    ours = Branch(LOG, place.replica.log, {0: (b"ours", CERTIFIED)}, {1: first_log().position.head})
    theirs = Branch(LOG, OTHER, {0: (b"theirs", proof)}, {1: OTHER.position.head}, doubts=(LOG,) if moves else ())
    assert (place.search.on_seen(LineageSeen("c", theirs, ours)) is not None) is moves
    assert (place.replica.contradiction is not None) is moves


def test_a_newcomer_takes_no_log_that_has_not_come_to_a_signed_head() -> None:
    """Regression: it took a second founding that was merely shorter."""
    place, proof = Place(), Support(is_certified=True, signers=1)
    heard(place, 9, bytes(32))
    theirs = Branch(LOG, OTHER, {0: (b"theirs", proof)}, {1: OTHER.position.head})

    def is_taken() -> bool:
        place.see(OTHER, names="c")
        place.search.weigh("c")
        return place.search.on_seen(LineageSeen("c", theirs, Branch(LOG, LOG))) is not None

    assert not is_taken()
    heard(place, 1, OTHER.position.head)
    assert is_taken()


def test_who_is_astray_says_so_and_looks_at_those_that_it_had_passed_over() -> None:
    place = Place()
    place.step(first_log())
    place.step(after(first_log()))
    place.see(OTHER, names="c")
    place.presence.branches.pass_over("c")
    assert place.replica.claimant is None
    place.context.take_effects()
    heard(place, 1, OTHER.position.head)
    assert place.replica.claimant == "c"
    [note] = of(place.context.take_effects(), Note)
    assert note == Note(
        "info",
        "the archive z has signed another outer step 1 than this peer's: looking for a log with the signed one",
    )
    heard(place, 1, OTHER.position.head)
    assert not of(place.context.take_effects(), Note), "once"


def test_whoever_is_astray_follows_nobody_from_entry_to_entry() -> None:
    """Somebody could lead it on for ever."""
    place = Place()
    place.step(first_log())
    place.step(after(first_log()))
    heard(place, 1, OTHER.position.head)
    place.see(far_from(place.replica.log, 2))
    place.context.take_effects()
    place.search.look()
    effects = place.context.take_effects()
    assert of(effects, FetchLineage)
    assert not of(effects, Send)


def test_what_an_archive_has_signed_long_ago_is_held_against_the_log_on_the_disk() -> None:
    place = Place()
    place.step(first_log())
    for _ in range(RECENT_ENTRIES):
        place.step(after(place.replica.log))
    head = SignedHead.sign("tiny", 1, bytes(32), "z", SimulatedKeys("z"))
    signed = SignedHeads("tiny", ("z",)).with_heads([head])
    place.replica.hear_signed(SignedHeadsSeen(signed))
    assert place.replica.contradiction is None, "it cannot be known"
    place.replica.hear_signed(SignedHeadsSeen(signed, {1: first_log().position.head}))
    assert place.replica.contradiction == head


def test_an_entry_in_place_of_a_signed_one_is_not_followed() -> None:
    place, second = Place(), after(first_log())
    place.step(first_log())
    place.see(second)
    header = second.last
    assert header is not None
    heard(place, 2, bytes(32))
    assert place.belief.entry("a", told(header), Support(True, 2), sender_was_asked=False) is None
    assert "the archive z has signed another outer step 2" in of(place.context.take_effects(), Dropped)[0].reason
    heard(place, 2, second.position.head)
    assert place.belief.entry("a", told(header), Support(True, 2), sender_was_asked=False) is not None


def test_a_newcomer_that_knows_of_a_signed_head_looks_at_a_whole_log_first() -> None:
    place, first = Place(), first_log()
    place.see(first)
    header = first.last
    assert header is not None
    heard(place, 1, bytes(32))
    place.search.look()
    effects = place.context.take_effects()
    assert of(effects, FetchLineage)
    assert not of(effects, Send)
    assert place.belief.entry("a", told(header), Support(True, 2), sender_was_asked=True) is None
    donor = of(effects, FetchLineage)[0].donor
    theirs = Branch(LOG, first, {0: (b"theirs", CERTIFIED)}, {1: first.position.head})
    assert place.search.on_seen(LineageSeen(donor, theirs, Branch(LOG, LOG))) is None, "not the one"
    heard(place, 1, first.position.head)
    place.search.weigh("a")
    assert place.search.on_seen(LineageSeen("a", theirs, Branch(LOG, LOG))) is not None
    assert place.belief.entry("a", told(header), Support(True, 2), sender_was_asked=True) is not None, (
        "it is signed itself"
    )


def test_a_donor_that_failed_is_asked_again_only_if_there_is_no_other() -> None:
    place, log = Place(), far_from(LOG, SETTINGS.snapshot_every + 1)
    place.see(log)
    for donor, unhelpful in (("c", {"c"}), ("a", {"c"})):
        place.replica.take(FarBehind(donor))
        place.replica.take(SnapshotFailed(donor, "gone"))
        assert place.presence.branches.unhelpful == unhelpful


def in_doubt(others: str = "c") -> Place:
    """Too few went on from somewhere in our log. These are where we are; a is further back than we remember."""
    place = Place()
    place.step(first_log())
    for _ in range(RECENT_ENTRIES):
        place.step(after(place.replica.log))
    place.replica.lineage.doubt = first_log()
    place.see(place.replica.log, others)
    place.see(LOG.at(first_log().last), "a")
    assert place.replica.claimant == "a", "it may be where most went on"
    return place


def test_nobody_goes_back_to_the_state_of_one_that_is_further_back_before_it_has_seen_its_log() -> None:
    """Regression: where nobody had the payload that came next, a peer took the state of a straggler on its own log."""
    place = in_doubt()
    assert place.search.far_behind() is None
    place.see(far_from(place.replica.log, SETTINGS.snapshot_every), "c")
    far = place.search.far_behind()
    assert far is not None
    assert far.donor == "c"


def test_the_only_one_that_is_further_on_is_asked_again_though_others_are_further_back() -> None:
    """Regression: to ask nobody for a while, and go on alone, seemed better: there was a straggler to be looked at."""
    place = in_doubt("")
    place.see(far_from(place.replica.log, SETTINGS.snapshot_every + 1), "c")
    place.replica.take(FarBehind("c"))
    place.replica.take(SnapshotFailed("c", "gone"))
    assert place.presence.branches.unhelpful == frozenset()


def test_who_leaves_a_lineage_loses_its_own_tokens_in_it() -> None:
    place = Place()
    place.step(after(LOG))
    other = LOG.append(next_header(LOG, roster_of(first_log()), NEXT))
    place.replica.take(FarBehind("a"))
    place.replica.take(SnapshotRestored("a", other.last, NEXT, (other.position.head,)))
    [lost] = of(place.context.take_effects(), TokensLost)
    assert (lost.what, lost.tokens) == ("entries", TOKENS)


def test_what_it_caught_up_with_may_be_gone() -> None:
    place, log = Place(), after(LOG)
    place.see(after(log))
    assert log.last is not None
    behind = place.belief.entry("a", told(log.last), support=Support(True, 2), sender_was_asked=False)
    assert behind is not None
    place.replica.take(behind)
    place.replica.take(NoneAhead())
    assert (place.replica.state, place.replica.replaying) == (ReplicaState.LEVEL, None)
