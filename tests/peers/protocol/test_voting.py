"""Votes, locks, certificates and the record of them, rule by rule; docs/protocol.md numbers the rules.

tests/simulation/test_voting_exhaustively.py explores what several voters can do together.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest

from peers.audit.proofs import contradict
from peers.log.certificate import (
    Ballot,
    Certificate,
    CertificateError,
    Choice,
    Departure,
    Electorate,
    Group,
    Phase,
    Support,
    digest_of_group,
    electorate,
    prove,
)
from peers.log.header import Header, Member, Position
from peers.log.state import COMMITTEE, LogState, Quorum, committee
from peers.messages.messages import Certified, Propose, Vote
from peers.protocol.voting import (
    POSITIONS,
    Cast,
    RecordError,
    Refusal,
    Tally,
    VoterState,
    VotingPlace,
    VotingRecord,
    vote_commit,
    vote_prepare,
)
from peers.values.wire import Value, WireError, digest_of, from_plain, pack, unpack
from tests.peers.logs import LOG, PAYLOAD, RUN, next_header
from tests.simulator.simulated_keys import SimulatedKeys

verify = SimulatedKeys("").verify


def log_of(peers: str, incarnation: int = 7, empty: LogState = LOG) -> LogState:
    roster = [
        Member(peer=peer, tokens=100, samples=empty.grants[place], incarnation=incarnation)
        for place, peer in enumerate(peers)
    ]
    return empty.append(next_header(empty, roster, PAYLOAD))


ABC = log_of("abc")


def header(number: int = 0, log: LogState = ABC, peers: str = "") -> Header:
    members = [log.expected(peer) for peer in peers or log.roster]
    return next_header(log, members, digest_of(bytes([number])))


A, B = header(0), header(1)


def ballot(view: int, attempt: int = 1) -> Ballot:
    return Ballot(view=view, attempt=attempt)


def place_of(peer: str, log: LogState = ABC) -> VotingPlace:
    return VotingPlace(log, SimulatedKeys(peer))


def choice(
    entry: Header, view: int, phase: Phase = Phase.PREPARE, justify: int | None = None, group: str = ""
) -> Choice:
    shown = None if justify is None else ballot(justify)
    return Choice(
        ballot=ballot(view), phase=phase, header=entry.digest, group=digest_of_group(named(group)), justify=shown
    )


def named(group: str) -> Group:
    return tuple((peer, 7) for peer in group)


def vote(peer: str, what: Choice, log: LogState = ABC, incarnation: int = 7) -> Vote:
    signature = SimulatedKeys(peer).sign(what.text(log.position, incarnation))
    return Vote(position=log.position, incarnation=incarnation, choice=what, signature=signature)


def certificate(
    entry: Header,
    what: Choice,
    signers: str,
    log: LogState = ABC,
    gone: str = "",
    group: str = "",
) -> Certificate | None:
    tally = Tally(place_of("a", log))
    for peer in signers:
        assert tally.hear(peer, vote(peer, what, log))
    farewells = {peer: (1, farewell(peer, 1)) for peer in gone}
    return tally.certificate(entry, what, farewells, named(group))


def prepared(entry: Header, view: int, signers: str = "ab", group: str = "", **more: Any) -> Certified:
    found = certificate(entry, choice(entry, view, group=group), signers, group=group, **more)
    assert found is not None
    return Certified(header=entry, certificate=found)


def proving(shown: Certified) -> Certificate:
    assert shown.certificate is not None
    return shown.certificate


def propose(entry: Header, view: int, justify: Certified | None = None, group: str = "") -> Propose:
    shown = justify.certificate if justify else None
    return Propose(ballot=ballot(view), header=entry, group=named(group), justify=shown, round=None)


def farewell(peer: str, index: int) -> bytes:
    departure = Departure(run=RUN, peer=peer, incarnation=7, index=index)
    return SimulatedKeys(peer).sign(departure.text)


FRESH = VoterState(position=ABC.position, incarnation=7)
C = place_of("c")


def cast(answer: Cast | Refusal) -> VoterState:
    assert isinstance(answer, Cast), answer
    return answer.state


def after(*steps: Propose | Certified) -> VoterState:
    """Voter c after it has voted for all of these."""
    state = FRESH
    for step in steps:
        state = cast(vote_prepare(state, step, C) if isinstance(step, Propose) else vote_commit(state, step, C))
    return state


# R5: vote 1 ------------------------------------------------------------------------------------------------------
def test_r5_a_fresh_voter_votes_for_what_is_proposed_and_says_it_again_in_the_same_bytes() -> None:
    first = vote_prepare(FRESH, propose(A, 1), C)
    assert isinstance(first, Cast)
    assert first.vote == vote("c", choice(A, 1))
    assert vote_prepare(first.state, propose(A, 1), C, Refusal.NO_PAYLOAD) == Cast(first.state, first.vote)


@pytest.mark.parametrize(
    ("before", "asked", "refusal"),
    [
        ([propose(A, 2)], propose(A, 1), Refusal.OLD_BALLOT),
        ([propose(A, 2)], propose(B, 2), Refusal.OTHER_VOTE),
        ([propose(A, 1)], propose(A, 1, group="ac"), Refusal.OTHER_VOTE),
        ([prepared(A, 2)], propose(B, 1), Refusal.OLD_BALLOT),
        ([], Propose(ballot=ballot(0, 0), header=A, group=(), justify=None, round=None), Refusal.OLD_BALLOT),
    ],
)
def test_r5_ballots_go_up_and_each_has_one_vote(
    before: Iterable[Propose | Certified], asked: Propose, refusal: Refusal
) -> None:
    assert vote_prepare(after(*before), asked, C) is refusal


@pytest.mark.parametrize(
    ("entry", "shown", "refusal"),
    [
        (B, None, Refusal.LOCKED),
        (B, prepared(B, 1), Refusal.LOCKED),
        (B, prepared(B, 2), Refusal.LOCKED),
        (B, prepared(B, 3), None),
        (A, None, Refusal.LOCKED),
        (A, prepared(A, 1), Refusal.LOCKED),
        (A, prepared(A, 2), None),
        (A, prepared(A, 3), None),
    ],
)
def test_r5_a_lock_gives_way_to_a_certificate_as_new_and_to_nothing_else(
    entry: Header, shown: Certified | None, refusal: Refusal | None
) -> None:
    """Also for the header that is locked: a vote names what was shown, which must not be older than the lock."""
    answer = vote_prepare(after(prepared(A, 2)), propose(entry, 4, shown), C)
    assert (answer if isinstance(answer, Refusal) else None) is refusal


@pytest.mark.parametrize(
    "shown",
    [
        pytest.param(prepared(A, 1), id="of another header"),
        pytest.param(prepared(B, 5), id="of a later ballot"),
        pytest.param(prepared(B, 4), id="of the same ballot"),
        pytest.param(prepared(B, 1, "a", group="a"), id="of a minority"),
        pytest.param(
            Certified(
                header=B,
                certificate=proving(prepared(B, 1)).model_copy(update={"choice": choice(B, 1, Phase.COMMIT)}),
            ),
            id="of phase 2",
        ),
        pytest.param(
            Certified(
                header=B,
                certificate=proving(prepared(B, 1)).model_copy(update={"signers": proving(prepared(B, 1)).signers[:1]}),
            ),
            id="of too few",
        ),
        pytest.param(
            Certified(header=B, certificate=proving(prepared(B, 1)).model_copy(update={"choice": choice(B, 2)})),
            id="with signatures of another ballot",
        ),
    ],
)
def test_r5_a_proposal_must_be_justified_by_a_prepare_certificate_of_its_header_in_an_older_ballot(
    shown: Certified,
) -> None:
    assert vote_prepare(FRESH, propose(B, 4, shown), C) is Refusal.BAD_CERTIFICATE


OBJECTIONS = list(Refusal)[list(Refusal).index(Refusal.NO_PAYLOAD) :]


@pytest.mark.parametrize("objection", OBJECTIONS)
def test_r5_what_the_round_has_against_a_proposal_is_the_reason(objection: Refusal) -> None:
    assert vote_prepare(FRESH, propose(A, 1), C, objection) is objection


@pytest.mark.parametrize("objection", OBJECTIONS)
def test_r5_what_a_quorum_has_agreed_to_is_not_looked_into_again(objection: Refusal) -> None:
    """Else a lock on a header that names a peer gone would hold all up when that peer comes back."""
    answer = vote_prepare(after(prepared(A, 1)), propose(A, 2, prepared(A, 1)), C, objection)
    assert (answer is objection) is (objection in (Refusal.NO_PAYLOAD, Refusal.NOT_ALONE))


def test_r5_only_what_follows_from_the_log_is_voted_for() -> None:
    wrong = A.model_copy(update={"lineage_tokens": 5})
    assert vote_prepare(FRESH, propose(wrong, 1), C) is Refusal.DOES_NOT_FOLLOW
    other_state = replace(C, log=ABC.in_state(digest_of(b"another state")))
    assert vote_prepare(FRESH, propose(A, 1), other_state) is Refusal.DOES_NOT_FOLLOW
    assert vote_prepare(FRESH, propose(header(log=log_of("abd")), 1), C) is Refusal.ELSEWHERE


# R6: vote 2 ------------------------------------------------------------------------------------------------------
def test_r6_a_prepare_certificate_is_locked_and_voted_for() -> None:
    answer = vote_commit(FRESH, prepared(A, 1), C)
    assert isinstance(answer, Cast)
    assert answer.vote == vote("c", choice(A, 1, Phase.COMMIT))
    assert answer.state.lock == prepared(A, 1)
    assert vote_commit(answer.state, prepared(A, 1, "bc"), C) == answer, "once and for all"


@pytest.mark.parametrize(
    ("before", "shown", "refusal"),
    [
        ([propose(A, 2)], prepared(A, 1), Refusal.OLD_BALLOT),
        ([prepared(A, 1)], prepared(B, 1), Refusal.OTHER_VOTE),
        ([propose(A, 1)], prepared(B, 1), None),
        ([prepared(A, 1)], prepared(B, 2), None),
    ],
)
def test_r6_vote_2_is_for_what_a_quorum_has_agreed_to_in_the_newest_ballot(
    before: Iterable[Propose | Certified], shown: Certified, refusal: Refusal | None
) -> None:
    answer = vote_commit(after(*before), shown, C)
    assert (answer if isinstance(answer, Refusal) else None) is refusal


def test_r6_what_is_no_prepare_certificate_locks_nobody() -> None:
    good = proving(prepared(A, 1))
    for changes in ({"choice": choice(A, 1, Phase.COMMIT)}, {"signers": good.signers[:1]}, {"choice": choice(B, 1)}):
        bad = Certified(header=A, certificate=good.model_copy(update=changes))
        assert vote_commit(FRESH, bad, C) is Refusal.NO_PREPARE


def test_r6_a_commit_certificate_is_no_prepare_certificate() -> None:
    committed = certificate(A, choice(A, 1, Phase.COMMIT), "ab")
    assert committed is not None
    shown = Certified(header=A, certificate=committed)
    assert vote_commit(FRESH, shown, C) is Refusal.NO_PREPARE
    assert vote_prepare(FRESH, propose(A, 2, shown), C) is Refusal.BAD_CERTIFICATE


def test_decisions_do_not_depend_on_who_signed_a_certificate() -> None:
    """As the exhaustive search takes for granted."""
    for first, second in (("ab", "bc"), ("ab", "abc")):
        locked = [cast(vote_commit(FRESH, prepared(A, 1, signers), C)) for signers in (first, second)]
        answers = [vote_prepare(state, propose(B, 3, prepared(B, 2, first)), C) for state in locked]
        answers += [vote_prepare(state, propose(B, 3, prepared(B, 2, second)), C) for state in locked]
        assert {answer.vote for answer in answers if isinstance(answer, Cast)} == {vote("c", choice(B, 3, justify=2))}


# R8: a minority's ballots ----------------------------------------------------------------------------------------
OURS = header(2, peers="c")


def test_r8_a_minority_decides_by_majority_and_certifies_nothing() -> None:
    shown = prepared(OURS, 1, "c", group="c")
    by_two_thirds = replace(ABC, quorum=Quorum.TWO_THIRDS)
    assert prove(proving(shown), by_two_thirds, OURS, verify, Phase.PREPARE) == Support(is_certified=False, signers=1)
    assert certificate(OURS, choice(OURS, 1), "c") is None, "of the whole run"
    assert certificate(OURS, choice(OURS, 1, group="bc"), "c", group="bc") is None
    newcomer = certificate(OURS, choice(OURS, 1, group="cz"), "cz", group="cz")
    assert newcomer is not None
    assert prove(newcomer, ABC, OURS, verify, Phase.PREPARE).signers == 1, "of the voters before"


def test_r8_a_minoritys_lock_binds_only_minorities() -> None:
    locked = after(prepared(OURS, 1, "c", group="c"))
    assert vote_prepare(locked, propose(header(3, peers="c"), 2, group="c"), C) is Refusal.LOCKED
    assert isinstance(vote_prepare(locked, propose(A, 2), C), Cast)


def test_r8_the_whole_runs_lock_binds_minorities_too_and_is_kept() -> None:
    locked = after(prepared(A, 1))
    assert vote_prepare(locked, propose(OURS, 2, group="c"), C) is Refusal.LOCKED
    newer = prepared(OURS, 2, "c", group="c")
    assert vote_prepare(locked, propose(OURS, 3, newer, group="c"), C) is Refusal.LOCKED


def test_r8_who_is_left_takes_over_what_was_prepared_though_its_members_are_gone() -> None:
    """So that it is on the branch of the others, if these had committed it and come back."""
    state = cast(vote_prepare(after(prepared(A, 1)), propose(A, 2, prepared(A, 1), group="c"), C))
    taken = certificate(A, choice(A, 2, justify=1, group="c"), "c", group="c")
    assert taken is not None
    state = cast(vote_commit(state, Certified(header=A, certificate=taken), C))
    assert state.lock == prepared(A, 1), "the heavier one"
    committed = certificate(A, choice(A, 2, Phase.COMMIT, group="c"), "c", group="c")
    assert committed is not None
    assert prove(committed, ABC, A, verify) == Support(is_certified=False, signers=1)


# R9: what convicts is tested in tests/peers/audit/test_proofs.py; here, that honest voters never give it ----------
@pytest.mark.parametrize(
    "steps",
    [
        [propose(A, 1), prepared(A, 1), propose(A, 2, prepared(A, 1)), prepared(A, 2)],
        [propose(A, 1), propose(B, 2), prepared(B, 2)],
        [prepared(A, 1), propose(B, 3, prepared(B, 2)), prepared(B, 3)],
        [prepared(A, 1), prepared(B, 2), propose(A, 4, prepared(A, 3))],
        [prepared(OURS, 1, "c", group="c"), propose(A, 2), prepared(A, 2)],
    ],
)
def test_r9_what_an_honest_voter_gives_never_contradicts_itself(steps: Iterable[Propose | Certified]) -> None:
    state, given = FRESH, list[Vote]()
    for step in steps:
        answer = vote_prepare(state, step, C) if isinstance(step, Propose) else vote_commit(state, step, C)
        assert isinstance(answer, Cast), answer
        state, given = answer.state, [*given, answer.vote]
    assert not any(contradict(one, other) for one, other in combinations(given, 2))


# R10: the disk ---------------------------------------------------------------------------------------------------
EMPTY = VotingRecord(run=RUN, peer="c", incarnation=7)


def position(index: int, fragment: int = 0) -> Position:
    return Position(index=index, head=digest_of(b"head %d" % index), fragment=fragment)


def state_at(index: int) -> VoterState:
    return VoterState(position=position(index), incarnation=7)


def test_r10_a_restarted_peer_goes_on_as_the_same_voter() -> None:
    record = EMPTY.after(after(propose(A, 1), prepared(A, 1)))
    again = VotingRecord.load(record.pack(), RUN, "c")
    assert again == record
    state = again.at(ABC.position)
    assert isinstance(state, VoterState)
    assert vote_prepare(state, propose(B, 2), C) is Refusal.LOCKED
    assert vote_commit(state, prepared(A, 1), C) == Cast(state, vote("c", choice(A, 1, Phase.COMMIT)))


def test_r10_a_record_of_few_voters_is_small() -> None:
    assert len(EMPTY.after(after(propose(A, 1), prepared(A, 1))).pack()) < 1500


@pytest.mark.parametrize(
    "data",
    [b"", EMPTY.pack()[:-1], EMPTY.pack() + b"\0", b"\0" + EMPTY.pack()[1:], digest_of(b"x") + b"x"],
    ids=["empty", "cut off", "too long", "flipped", "no record"],
)
def test_r10_a_damaged_record_is_not_used(data: bytes) -> None:
    with pytest.raises(RecordError):
        VotingRecord.load(data, RUN, "c")


def test_r10_a_record_of_another_peer_or_run_or_version_is_not_used() -> None:
    later = pack(EMPTY.model_copy(update={"version": 2}))
    for data, run, peer in ((EMPTY.pack(), RUN, "d"), (EMPTY.pack(), "x", "c"), (digest_of(later) + later, RUN, "c")):
        with pytest.raises(RecordError):
            VotingRecord.load(data, run, peer)


# R11: farewells, and what is forgotten ---------------------------------------------------------------------------
def test_r11_a_peer_that_has_left_votes_no_more_from_there_on() -> None:
    record, departure = EMPTY.after(state_at(3)).farewell()
    assert (departure.peer, departure.incarnation, departure.index) == ("c", 7, 4)
    assert record.at(position(4)) is Refusal.LEFT
    assert record.at(position(3)) == state_at(3), "others may be behind"
    assert record.farewell() == (record, departure)
    assert record.renewed(8).at(position(4)) == VoterState(position=position(4), incarnation=8)


def test_r11_what_is_forgotten_is_not_voted_on_again() -> None:
    record = EMPTY
    for index in range(POSITIONS + 3):
        record = record.after(state_at(index))
    assert record.forgotten == 3
    assert record.at(position(2)) is Refusal.FORGOTTEN
    assert record.at(position(3)) == state_at(3)
    assert record.departure == POSITIONS + 3


def test_r11_nothing_is_voted_for_where_a_certified_entry_is_known() -> None:
    record = EMPTY.after(after(prepared(A, 1))).closed(ABC.position)
    state = record.at(ABC.position)
    assert isinstance(state, VoterState)
    assert vote_prepare(state, propose(A, 5), C) is Refusal.CLOSED
    assert vote_commit(state, prepared(A, 5), C) is Refusal.CLOSED


# R12: who counts, and how many are enough ------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("peers", "signers", "gone", "majority", "two_thirds"),
    [
        ("a", "a", "", True, True),
        ("ab", "a", "", False, False),
        ("ab", "a", "b", True, True),
        ("abc", "ab", "", True, False),
        ("abc", "abc", "", True, True),
        ("abc", "a", "bc", True, True),
        ("abc", "ab", "c", True, True),
        ("abcd", "ab", "", False, False),
        ("abcd", "abc", "", True, True),
        ("abcd", "ab", "d", True, False),
        ("abcde", "abc", "", True, False),
        ("abcde", "ab", "de", True, False),
        ("ab", "", "ab", False, False),
    ],
)
def test_r12_a_quorum_of_those_that_have_not_left(
    peers: str, signers: str, gone: str, majority: bool, two_thirds: bool
) -> None:
    entry = header(0, log_of(peers))
    for quorum, is_enough in ((Quorum.MAJORITY, majority), (Quorum.TWO_THIRDS, two_thirds)):
        log = replace(log_of(peers), quorum=quorum)
        found = certificate(entry, choice(entry, 1, Phase.COMMIT), signers, log, gone)
        assert (found is not None) is is_enough
        if found is not None:
            found = unpack(Certificate, pack(found))
            assert prove(found, log, entry, verify) == Support(True, len(signers))


def test_r12_a_certificate_is_of_its_entry_and_its_voters_alone() -> None:
    good = certificate(A, choice(A, 1), "abc")
    assert good is not None
    forged = good.signers[0].model_copy(update={"signature": bytes(64)})
    far = good.signers[0].model_copy(update={"place": 3})
    left = certificate(header(0, log_of("ab")), choice(header(0, log_of("ab")), 1), "a", log_of("ab"), gone="b")
    assert left is not None
    later = left.farewells[0].model_copy(update={"index": 2, "place": 2})
    for changes in (
        {"signers": (*good.signers, good.signers[0])},
        {"signers": (far, *good.signers[1:])},
        {"signers": (forged, *good.signers[1:])},
        {"signers": good.signers[:2], "farewells": (later,)},
        {"choice": choice(B, 1)},
        {"choice": choice(A, 2)},
        {"choice": choice(A, 1, justify=0)},
        {"choice": choice(A, 1, group="abc")},
        {"group": named("abc")},
    ):
        with pytest.raises(CertificateError):
            prove(good.model_copy(update=changes), ABC, A, verify, Phase.PREPARE)
    with pytest.raises(CertificateError, match=r"another (entry|position)"):
        prove(good, log_of("abd"), A, verify, Phase.PREPARE)
    by_two_thirds = replace(ABC, quorum=Quorum.TWO_THIRDS)
    with pytest.raises(CertificateError, match="too few"):
        prove(good.model_copy(update={"signers": good.signers[:2]}), by_two_thirds, A, verify, Phase.PREPARE)


def test_r12_a_vote_of_another_incarnation_does_not_count() -> None:
    tally, what = Tally(C), choice(A, 1)
    for peer, incarnation in (("a", 7), ("b", 8), ("z", 7)):
        assert tally.hear(peer, vote(peer, what, incarnation=incarnation))
    assert tally.certificate(A, what, {}) is None


def test_r12_the_first_entry_is_founded_by_its_own_members() -> None:
    founding = ABC.last
    assert founding is not None
    log = replace(LOG, quorum=Quorum.TWO_THIRDS)
    assert electorate(log, founding) == Electorate((("a", 7), ("b", 7), ("c", 7)), Quorum.TWO_THIRDS)


def test_r12_of_more_than_a_committee_the_same_voters_are_chosen_everywhere() -> None:
    voters = tuple((f"p{number}", number) for number in range(300))
    chosen = committee(voters, b"seed")
    assert len(chosen) == COMMITTEE
    assert list(chosen) == [voter for voter in voters if voter in set(chosen)], "in the voters' order"
    assert set(committee(voters[::-1], b"seed")) == set(chosen)
    assert set(committee(voters, b"another")) != set(chosen)
    assert committee(voters[:COMMITTEE], b"seed") == voters[:COMMITTEE]


def test_r12_a_tally_keeps_the_newest_vote_of_each_peer() -> None:
    tally = Tally(C)
    assert tally.hear("b", vote("b", choice(A, 2)))
    for given in (
        vote("b", choice(A, 2)),
        vote("b", choice(B, 2)),
        vote("b", choice(A, 1)),
        vote("b", choice(A, 3)).model_copy(update={"signature": bytes(64)}),
        vote("b", choice(A, 3), log_of("abd")),
    ):
        assert not tally.hear("b", given)
    assert tally.hear("a", vote("a", choice(A, 2)))
    assert tally.certificate(A, choice(A, 2), {}) is not None
    assert tally.hear("b", vote("b", choice(B, 3)))
    assert tally.certificate(A, choice(A, 2), {}) is None
    assert tally.hear("b", vote("b", choice(B, 1, Phase.COMMIT))), "of the other phase"


# Bytes from the network --------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "value",
    [vote("a", choice(A, 2, justify=1)), propose(A, 2, prepared(A, 1)), prepared(A, 1), EMPTY],
    ids=lambda value: type(value).__name__,
)
def test_values_are_packed_and_unpacked(value: Value) -> None:
    assert unpack(type(value), pack(value)) == value


@pytest.mark.parametrize("phase", [0, 3, 1.0, "1", True, None])
def test_a_phase_is_an_integer(phase: object) -> None:
    with pytest.raises(WireError, match="phase"):
        from_plain(Choice, [[1, 2], phase, bytes(32), False, None])


def test_what_is_signed_differs_wherever_a_vote_does() -> None:
    texts = {
        what.text(at, incarnation)
        for what in (choice(A, 1), choice(B, 1), choice(A, 1, Phase.COMMIT), choice(A, 1, justify=0), choice(A, 2))
        for at in (position(1), position(1, 1), position(2))
        for incarnation in (7, 8)
    }
    assert len(texts) == 5 * 3 * 2


def test_r10_all_positions_of_a_cycle_of_many_fragments_are_remembered() -> None:
    """Regression: the 65th vote of a cycle made a healthy voter forget the first one, and begin anew."""
    head, record = digest_of(b"head"), VotingRecord(run="run", peer="a", incarnation=7)
    places = [Position(index=3, head=head, fragment=fragment) for fragment in range(256)]
    for position in places:
        record = record.after(VoterState(position=position, incarnation=7))
    assert all(isinstance(record.at(position), VoterState) for position in places)
