"""One reducer's averages of one chunk are all the same, or two of its signatures show that they are not."""

from __future__ import annotations

import pytest

from peers.protocol.averages import MARK_BYTES, MARKED, Averages
from peers.protocol.comparison import Comparison
from peers.protocol.exchange import Exchange
from peers.protocol.messages import Accuse, Begin, Compare, Marked
from peers.protocol.rounds import Round
from peers.protocol.signed_averages import Averaged, Origin
from peers.values.wire import digest_of, field_names
from tests.peers.builders import attempt, first_log, judge, sends
from tests.peers.protocol.test_exchange import AT, SECOND, round_among
from tests.simulator.simulated_keys import SimulatedKeys

OURS, THEIRS = digest_of(b"ours"), digest_of(b"theirs")
LOG = first_log()


ROUND = round_among("abc")
BEGIN = Begin(attempt=AT, round=ROUND, seconds=60.0, open=False, commitments=())


def averages(me: str = "a", round: Round = ROUND) -> Averages:
    return Averages(me, AT, SimulatedKeys(me), terms=round.terms)


def signed_by(reducer: str, digest: bytes, chunk: int = 1, absent: tuple[str, ...] = ()) -> Averaged:
    signer = averages(reducer)
    signer.sign(chunk, digest, absent)
    origin = signer.origin(chunk)
    assert origin is not None
    return Averaged(chunk=chunk, digest=digest, absent=absent, origin=origin)


def having(*kept: Averaged) -> Averages:
    mine = averages()
    for one in kept:
        assert mine.is_signed(one.chunk, one.digest, one.absent, one.origin)
        mine.keep(one.chunk, one.digest, one.absent, one.origin)
    return mine


def convicts(mine: Averages, accused: str, shown: Averaged) -> bool:
    """Whether the leader, which has these averages, believes an accusation."""
    exchange = Exchange("a", AT, ROUND, keys=SimulatedKeys("a"))
    exchange.averages = mine
    comparison = Comparison("a", BEGIN, judge(LOG, lambda: exchange), 1.0)
    return comparison.convicts("c", Accuse(attempt=AT, accused=accused, reason="two averages", average=shown))


def test_two_averages_of_one_chunk_convict_their_reducer() -> None:
    mine = having(signed_by("b", OURS))
    assert convicts(mine, "b", signed_by("b", THEIRS))
    assert convicts(mine, "b", signed_by("b", OURS, absent=("c",))), "whose blocks lack is signed, too"


FALSE = {
    "the same": signed_by("b", OURS),
    "another's": signed_by("c", THEIRS),
    "of another chunk": signed_by("b", THEIRS, chunk=2),
    "not signed": Averaged(chunk=1, digest=THEIRS, absent=(), origin=Origin(reducer="b", signature=bytes(64))),
}


@pytest.mark.parametrize("shown", FALSE.values(), ids=FALSE)
def test_nothing_else_convicts(shown: Averaged) -> None:
    mine = having(signed_by("b", OURS))
    assert not convicts(mine, "b", shown)
    assert not convicts(mine, "c", shown)


def test_what_another_start_has_signed_convicts_nobody() -> None:
    later = Averages("b", AT, SimulatedKeys("b"), {"b": 7})
    later.sign(1, THEIRS, ())
    shown = later.signed(1)
    assert shown is not None
    assert not convicts(having(signed_by("b", OURS)), "b", shown)


def test_what_is_signed_in_another_round_is_not_signed_in_this_one() -> None:
    later = Averages("b", SECOND, SimulatedKeys("b"))
    later.sign(1, THEIRS, ())
    origin = later.origin(1)
    assert origin is not None
    assert not averages().is_signed(1, THEIRS, (), origin)


def other_rounds() -> dict[str, dict[str, object]]:
    """What a leader may tell another member of the same round."""
    first, *others = ROUND.shares
    heavier = first.model_copy(update={"member": first.member.model_copy(update={"tokens": 1})})
    return {"nothing else": {}, "contributions": {"committed": OURS}, "tokens": {"shares": (heavier, *others)}}


@pytest.mark.parametrize("what", other_rounds())
def test_an_average_is_taken_only_from_whoever_knows_the_same_of_the_round(what: str) -> None:
    """Regression: a leader that told each member of other contributions had honest ones find each other's averages
    wrong afterwards."""
    exchange = Exchange("a", AT, ROUND, keys=SimulatedKeys("a"))
    told = {name: getattr(ROUND, name) for name in field_names(Round)} | {"lost": ("c",)}
    reducer = averages("b", Round.model_validate(told | other_rounds()[what]))
    reducer.sign(1, OURS, ())
    assert exchange.is_vouched_for(1, OURS, (), reducer.origin(1)) == (what == "nothing else")


def test_marks_show_where_payloads_differ() -> None:
    same, ours, theirs = signed_by("b", OURS, 0), signed_by("b", OURS, 3), signed_by("b", THEIRS, 3)
    leader, member = having(same, ours), having(same, theirs)
    assert len(leader.marks()) == 2 * MARK_BYTES
    assert member.difference(leader.marks()) == theirs
    assert leader.difference(leader.marks()) is None
    assert member.difference(b"") == same, "who says nothing is told the first"


def test_the_marks_of_many_chunks_fit_into_a_message() -> None:
    """Regression: to say that of a payload of 34 G values raised an error."""
    large = having()
    large._signed = dict.fromkeys(range(2 * MARKED + 1), signed_by("b", OURS))
    compare = Compare(attempt=AT, marks=large.marks())
    assert compare.marks is not None
    assert large.difference(compare.marks) is None


def test_a_member_shows_its_leader_what_differs_and_nobody_else() -> None:
    exchange = Exchange("c", AT, round_among("abc"), keys=SimulatedKeys("c"))
    shown = signed_by("b", THEIRS)
    exchange.averages.keep(shown.chunk, shown.digest, shown.absent, shown.origin)
    compare = Compare(attempt=AT, marks=having(signed_by("b", OURS)).marks())
    ((to, accuse),) = sends(exchange.hear("a", compare), Accuse)
    assert (to, accuse.accused, accuse.average) == ("a", "b", shown)
    assert exchange.hear("b", compare) == []
    assert exchange.hear("a", Compare(attempt=attempt(LOG, 7), marks=b"")) == []
    assert exchange.hear("a", Compare(attempt=AT, marks=exchange.averages.marks())) == []


def test_a_member_tells_its_leader_what_its_averages_are_known_by() -> None:
    exchange = Exchange("c", AT, ROUND, keys=SimulatedKeys("c"))
    shown = signed_by("b", THEIRS)
    exchange.averages.keep(shown.chunk, shown.digest, shown.absent, shown.origin)
    ask = Compare(attempt=AT, marks=None)
    assert sends(exchange.hear("a", ask), Marked) == [("a", Marked(attempt=AT, marks=having(shown).marks()))]
    assert exchange.hear("b", ask) == []


@pytest.mark.parametrize(
    ("lost", "reducer", "is_good"),
    [("", "b", True), ("", "a", False), ("", "c", False), ("", "z", False), ("b", "b", True), ("b", "c", True)],
)
def test_only_those_vouch_for_an_average_who_were_to_make_it(lost: str, reducer: str, is_good: bool) -> None:
    """Of a, b, c each reduces one chunk; what b leaves behind falls to c."""
    exchange = Exchange("a", AT, round_among("abc"), keys=SimulatedKeys("a"))
    if lost:
        exchange.go_on(SECOND, exchange.round.without(lost))
    assert exchange.is_vouched_for(1, OURS, (), signed_by(reducer, OURS).origin) == is_good
    assert not exchange.is_vouched_for(1, THEIRS, (), signed_by(reducer, OURS).origin)
    assert not exchange.is_vouched_for(1, OURS, (), None)
    assert not exchange.is_vouched_for(99, OURS, (), signed_by(reducer, OURS).origin)
