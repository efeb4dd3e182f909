"""Which of two branches of the log is better, and what one vouches for."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest

from peers.log.certificate import Certificate, CertificateError, Support
from peers.log.header import Header
from peers.log.lineage import Branch, Walk
from peers.log.state import LogError, LogState
from peers.values.signed_heads import SignedHead, SignedHeads
from peers.values.wire import digest_of
from tests.peers.logs import LOG, RUN, certificate, first_log, member, next_header
from tests.simulator.simulated_keys import SimulatedKeys

VERIFY = SimulatedKeys("b").verify
START = first_log()


def next_of(log: LogState, payload: bytes = b"payload", peers: str = "abc", state: bytes = b"state") -> Header:
    roster = [log.expected(peer) for peer in log.roster if peer in peers] or [member("a", 0, 20)]
    return next_header(log.in_state(digest_of(state)), roster, digest_of(payload))


def walked(*entries: tuple[Header, Certificate | None], start: LogState = START) -> Branch:
    walk = Walk(start, VERIFY)
    for header, proof in entries:
        walk.take(header, proof)
    return walk.branch()


def branch(by: str, payload: bytes = b"payload", peers: str = "abc", start: LogState = START) -> Branch:
    """One more entry, signed by these of a, b and c: by one of them as a minority."""
    header = next_of(start, payload, peers)
    return walked((header, certificate(start, header, by) if by else None), start=start)


def test_it_names_its_places_and_the_states_there() -> None:
    first = next_of(START)
    second = next_of(START.append(first), state=b"after")
    middle = START.append(first)
    whole = walked((first, certificate(START, first, "ab")), (second, certificate(middle, second, "ab")))
    assert whole.heads == {1: START.position.head, 2: first.digest, 3: second.digest}
    assert whole.states == {1: digest_of(b"state"), 2: digest_of(b"after")}
    assert all(whole.has(log.position) for log in (START, START.append(first), whole.end))
    alone = walked((first, None))
    assert alone.states == {}, "whoever signs nothing names no state"
    assert alone.claimed == {1: digest_of(b"state")}
    assert alone.until(START).claimed == {}, "what is not followed claims nothing"
    assert not whole.has(whole.end.append(next_of(whole.end)).position)


@pytest.mark.parametrize(("by", "certified"), [("abc", True), ("ab", True), ("a", False), ("", False)])
def test_what_a_minority_has_signed_is_a_doubt(by: str, certified: bool) -> None:
    made = branch(by)
    [(_, proof)] = made.first.values()
    assert proof == Support(certified, len(by))
    assert made.doubts == (() if certified else (START,))


def test_what_does_not_follow_or_is_signed_falsely_ends_it() -> None:
    header = next_of(START)
    with pytest.raises(LogError, match="previous"):
        walked((header.model_copy(update={"previous": bytes(32)}), None))
    shown = certificate(START, header, "ab")
    [signer, *others] = shown.signers
    false = signer.model_copy(update={"signature": bytes(64)})
    with pytest.raises(CertificateError, match="is not its own"):
        walked((header, shown.model_copy(update={"signers": (false, *others)})))
    with pytest.raises(CertificateError, match="too few"):
        walked((header, shown.model_copy(update={"signers": (signer,)})))


def test_a_branch_ends_where_one_does_not_believe_it_any_more() -> None:
    first = next_of(START)
    middle = START.append(first)
    second = next_of(middle)
    certified = certificate(START, first, "abc")
    made = walked((first, certified), (second, None))
    until = made.until(middle)
    assert until == replace(walked((first, certified)), end=middle)
    assert walked((first, None)).until(START).first == {}


# Which is better ------------------------------------------------------------------------------------------------
BY_DIGEST = sorted((b"one", b"two"), key=lambda payload: next_of(START, payload).digest)


@pytest.mark.parametrize(
    ("better", "worse"),
    [
        (branch("ab", b"one", "ab"), branch("c", b"two")),
        (branch("b", b"one", "ab"), branch("", b"two", "abc")),
        (branch("b", b"one", "abc"), branch("c", b"two", "ab")),
        (branch("b", BY_DIGEST[0]), branch("c", BY_DIGEST[1])),
    ],
    ids=["certified", "more have signed", "more tokens", "the smaller digest"],
)
def test_of_two_branches_one_is_better(better: Branch, worse: Branch) -> None:
    assert better.is_better_than(worse)
    assert not worse.is_better_than(better)


def test_a_certified_entry_outweighs_any_number_of_tokens() -> None:
    """The two who trained are cut off from the three who can certify, and go on much faster."""
    alone = branch("c", b"alone")
    for _ in range(5):
        header = next_of(alone.end)
        alone = alone.followed_by(walked((header, None), start=alone.end))
    certified = branch("ab", b"certified", "ab")
    assert alone.end.lineage_tokens > certified.end.lineage_tokens
    assert certified.is_better_than(alone)


def test_of_two_foundings_the_one_with_more_tokens_is_better() -> None:
    """Whoever founds a run is its first roster: how many have signed says nothing of them."""
    few, many = next_of(LOG, b"few"), first_log().last
    assert many is not None
    one, more = (
        walked((few, certificate(LOG, few, "a")), start=LOG),
        walked((many, certificate(LOG, many, "abc")), start=LOG),
    )
    assert more.is_better_than(one)
    longer = one
    for _ in range(5):
        longer = longer.followed_by(walked((next_of(longer.end), None), start=longer.end))
    assert longer.is_better_than(more)


def test_a_founding_that_nobody_has_signed_is_worth_nothing() -> None:
    nobody = walked((next_of(LOG, b"nobody"), None), start=LOG)
    for _ in range(20):
        nobody = nobody.followed_by(walked((next_of(nobody.end), None), start=nobody.end))
    header = first_log().last
    assert header is not None
    real = walked((header, certificate(LOG, header, "ab")), start=LOG)
    assert real.is_better_than(nobody)
    assert (real.is_certified, nobody.is_certified, real.splits_from(nobody)) == (True, False, True)


def test_who_has_what_we_have_and_more_is_further_on() -> None:
    nothing = Branch(START, START)
    more = branch("abc")
    assert more.is_better_than(nothing)
    assert not nothing.is_better_than(more)
    assert not more.is_better_than(more)


def test_what_went_before_is_part_of_it() -> None:
    first = branch("abc")
    second = branch("a", start=first.end)
    whole = first.followed_by(second)
    entries: Iterable[Branch] = (first, second)
    assert whole.heads == {index: head for one in entries for index, head in one.heads.items()}
    assert (whole.start, whole.end, whole.first, whole.doubts) == (START, second.end, first.first, (first.end,))
    assert second.preceded_by(1, [START.position.head, bytes(32)]).heads == whole.heads


def test_a_doubt_of_ours_is_theirs_where_they_branch_off_later() -> None:
    here = START.append(next_of(START))
    certified = branch("ab", start=here)
    assert certified.doubt_before(2) is None
    assert certified.doubt_before(2, START) == START
    assert certified.doubt_before(2, here) is None, "from there they went on otherwise"
    assert branch("a", start=here).doubt_before(3, START) == here, "theirs is newer"


# Signed heads ---------------------------------------------------------------------------------------------------
def signing(*heads: tuple[int, bytes]) -> SignedHeads:
    signed = (SignedHead.sign(RUN, index, head, "z", SimulatedKeys("z")) for index, head in heads)
    return SignedHeads(RUN, ("z",)).with_heads(signed)


def head_of(made: Branch) -> tuple[int, bytes]:
    return made.end.position.index, made.end.position.head


def test_what_an_archive_has_signed_comes_before_all_else() -> None:
    certified, alone = branch("ab", b"certified", "ab"), branch("c", b"alone")
    by_archive = signing(head_of(alone))
    assert alone.is_better_than(certified, by_archive)
    assert not certified.is_better_than(alone, by_archive)
    assert certified.contradiction(by_archive) is not None
    assert alone.contradiction(by_archive) is None


def test_what_has_not_come_to_a_signed_head_is_behind() -> None:
    """Of two such the one is better that was without archives."""
    certified, alone = branch("ab", b"certified", "ab"), branch("c", b"alone")
    further_on = signing((9, bytes(32)))
    assert certified.is_better_than(alone, further_on)
    assert certified.standing(further_on) == alone.standing(further_on) == 0


def test_what_was_signed_before_two_branches_split_says_nothing_of_them() -> None:
    certified, alone = branch("ab", b"certified", "ab"), branch("c", b"alone")
    before = signing((START.position.index, START.position.head), (1, bytes(32)))
    assert certified.is_better_than(alone, before)


def test_nobody_goes_on_to_where_an_archive_has_signed_something_else() -> None:
    more = branch("abc")
    assert more.is_better_than(Branch(START, START), signing(head_of(more)))
    assert not more.is_better_than(Branch(START, START), signing((2, bytes(32))))
