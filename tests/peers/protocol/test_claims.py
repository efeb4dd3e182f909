"""What may have been committed, by what peers have signed; and which entries a member takes over."""

from __future__ import annotations

import pytest

from peers.log.header import Header
from peers.log.state import LogState
from peers.presence.heartbeat import PeerState
from peers.presence.presence import VAIN
from peers.protocol.certifier import Certifier
from peers.protocol.claims import AT_ONCE, Claims, Founding, committed_since
from peers.protocol.effects import Dropped
from peers.protocol.events import HeartbeatsSeen, ReachSeen
from peers.protocol.messages import Abort, Adopt, Ready
from peers.protocol.rounds import Disclaimer, Holder, Stance
from peers.protocol.states import State
from peers.values.wire import Reach, digest_of
from tests.peers.builders import (
    LOG,
    PAYLOAD,
    SETTINGS,
    Rig,
    attempt,
    beat,
    first_log,
    holders_of,
    holding,
    member,
    of,
    ready,
)
from tests.simulator.simulated_keys import SimulatedKeys

VOTERS = "abcde"
FIVE = LOG.append(LOG.next_header([member(name, 20 * n, 20 * n + 20) for n, name in enumerate(VOTERS)], PAYLOAD))
HEADER = FIVE.next_header([FIVE.expected("a")], PAYLOAD)


def holder(peer: str, number: int, alone: bool = False) -> Holder:
    which = attempt(FIVE, number).model_copy(update={"alone": alone})
    return Holder(peer=peer, attempt=which, signature=bytes(64))


def since(claims: str, present: str, departed: str = "", starts: dict[str, int] | None = None) -> int | None:
    """`claims`: who has signed it in which attempt, as in `a5 b3`."""
    holders = [holder(claim[0], int(claim[1:])) for claim in claims.split()]
    here = dict.fromkeys(present, 0) | (starts or {})
    found = committed_since(FIVE, HEADER, holders, here, departed)
    return found.number if found else None


@pytest.mark.parametrize(
    ("claims", "present", "expected"),
    [
        ("a5", "abcde", None),
        ("a5 b5", "abcde", None),
        ("a5 b5 c5", "abcde", 5),
        ("a5", "abc", 5),
        ("a5", "abcd", None),
        ("a5 b3", "abcd", 3),
        ("a9 b5 c5", "abcde", 5),
        ("a9 b7 c3 d1", "abcde", 3),
        ("z9", "abcde", None),
        ("z9 a5", "abc", 5),
        ("z9", "ab", 9),
    ],
)
def test_an_entry_is_not_committed_if_most_have_not_signed_it(claims: str, present: str, expected: int | None) -> None:
    assert since(claims, present) == expected


def test_who_has_forgotten_is_not_against_it() -> None:
    assert since("a5", "abcd", starts={"d": 7}) == 5


def test_who_has_left_before_is_nobody() -> None:
    """Of the three that remain two have not signed it."""
    assert since("a5", "abc", departed="de") is None
    assert since("a5", "ab", departed="de") == 5


def test_a_minoritys_attempt_is_before_all_others() -> None:
    found = committed_since(FIVE, HEADER, [holder("a", 9, alone=True), holder("b", 2)], dict.fromkeys("abc", 0))
    assert found == attempt(FIVE, 2)


def test_a_founding_is_one_of_its_own_members_and_of_enough() -> None:
    header = LOG.next_header([member("a", 0, 20)], PAYLOAD)
    mine = holder("a", 1).model_copy(update={"attempt": attempt(LOG)})
    assert committed_since(LOG, header, [mine], {"b": 0, "c": 0}, founding=Founding(1)) is not None
    assert committed_since(LOG, header, [mine], {"b": 0, "c": 0}, founding=Founding(2)) is None


def test_of_a_founding_by_too_few_all_who_are_here_have_a_say() -> None:
    """So whoever holds it gives it up in the end, or all take it over: else neither would ever happen."""
    header = LOG.next_header([member(peer, 20 * n, 20 * n + 20) for n, peer in enumerate("abcd")], PAYLOAD)
    held = [holder(peer, 1).model_copy(update={"attempt": attempt(LOG)}) for peer in "abcd"]
    here = dict.fromkeys("abcdef", 0)
    assert committed_since(LOG, header, held, here, founding=Founding(6)) is not None
    assert committed_since(LOG, header, held[:3], here, founding=Founding(6)) is None


def test_founders_of_whom_nobody_has_heard_do_not_count() -> None:
    """They may be made up."""
    header = LOG.next_header([member(peer, 20 * n, 20 * n + 20) for n, peer in enumerate("auvw")], PAYLOAD)
    held = [holder("a", 1).model_copy(update={"attempt": attempt(LOG)})]
    here = dict.fromkeys("abc", 0)
    assert committed_since(LOG, header, held, here, founding=Founding(3, met="abc")) is None
    assert committed_since(LOG, header, held, here, founding=Founding(3, met="abcuv")) is not None, "they are gone"


# What the leader knows -----------------------------------------------------------------------------------------
class Counting(SimulatedKeys):
    """Counts the signatures that are checked."""

    checked = 0

    def verify(self, peer: str, text: bytes, signature: bytes) -> bool:
        self.checked += 1
        return super().verify(peer, text, signature)


def made_up(number: int, *newcomers: str) -> Header:
    roster = [FIVE.expected("a"), *(FIVE.expected(peer, place) for place, peer in enumerate(newcomers))]
    return FIVE.next_header(roster, digest_of(str(number).encode()))


def says(peer: str, header: Header, number: int = 1) -> Ready:
    return ready(FIVE, peer, held=holding(header, attempt(FIVE, number), peer))


def claims_of(keys: Counting) -> Claims:
    return Claims(FIVE, Certifier(keys, FIVE, dict))


def test_what_has_been_checked_is_not_checked_again() -> None:
    keys = Counting("a")
    claims, said = claims_of(keys), {peer: says(peer, HEADER) for peer in "bc"}
    for _ in range(3):
        assert list(claims.proven(said)) == [HEADER]
    assert keys.checked == 2
    claims.proven(said | {"c": says("c", HEADER, 2)})
    assert keys.checked == 3


def test_whoever_makes_up_many_entries_has_few_looked_at_and_hides_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """What most hold comes first; and nothing is remembered that nobody holds any more."""
    looked: list[Header] = []

    def look(log: LogState, header: Header) -> bool:
        looked.append(header)
        return True

    monkeypatch.setattr("peers.protocol.claims.follows", look)
    claims, crowd = claims_of(Counting("a")), [f"peer{number:02}" for number in range(3 * AT_ONCE)]
    of_most, of_one = made_up(7, "y", "z"), made_up(8, "z")

    def inventions(first: int) -> dict[str, Ready]:
        return {peer: says(peer, made_up(first + number, peer)) for number, peer in enumerate(crowd)}

    for turn in range(3):
        proven = claims.proven(inventions(100 * turn + 100) | {peer: says(peer, of_most) for peer in "yz"})
        assert [holder.peer for holder in proven[of_most]] == ["y", "z"]
        assert len(looked) <= AT_ONCE * (turn + 1)
        assert len(claims._follows) == len(crowd) + 1
    assert looked.count(of_most) == 1
    for turn in range(3):
        proven = claims.proven(inventions(2000 * turn + 2000) | {"z": says("z", of_one)})
    assert of_one in proven, "whatever stays comes before what is new, though one alone holds it"


def test_who_could_not_sign_an_entry_holds_it_for_nobody_but_itself() -> None:
    """Regression: a peer that was in neither roster had taken an entry over; its leader named it among those who hold
    it, and no member believed a signature of whom the log does not know."""
    claims = claims_of(Counting("a"))
    assert [holder.peer for holder in claims.proven({peer: says(peer, HEADER) for peer in "bz"})[HEADER]] == ["b"]
    assert not claims.proven({"z": says("z", HEADER)})


def test_an_entry_that_too_many_are_against_is_not_weighed(monkeypatch: pytest.MonkeyPatch) -> None:
    claims = claims_of(Counting("a"))
    said = {peer: says(peer, made_up(number)) for number, peer in enumerate("ab")} | {
        peer: ready(FIVE, peer) for peer in "cde"
    }
    monkeypatch.setattr("peers.protocol.claims.committed_since", None)
    assert claims.weightiest(said, {}, (), Founding()) is None


@pytest.mark.parametrize(("holding_it", "here"), [("a", "bc"), ("ab", "cd"), ("abc", "de")])
def test_an_entry_that_may_have_been_committed_is_weighed(holding_it: str, here: str) -> None:
    said = {peer: says(peer, HEADER) for peer in holding_it} | {peer: ready(FIVE, peer) for peer in here}
    claim = claims_of(Counting("a")).weightiest(said, {}, (), Founding())
    assert claim is not None
    assert [holder.peer for holder in claim.holders] == list(holding_it)


# A member ------------------------------------------------------------------------------------------------------
def at_second() -> Rig:
    """b has applied the first entry, and trains."""
    return Rig().joined().trained().averaging().holding().applying().applied()


def takes(rig: Rig, adopt: Adopt) -> bool:
    rig.hear("a", adopt)
    return rig.is_in(State.AVERAGING)


def test_nobody_takes_over_what_one_of_three_has_signed() -> None:
    rig = at_second().trained()
    for holders in ("c", "a"):
        assert not takes(rig, rig.adopt(1, rig.held(0), holders))
    assert "a" not in rig.peer.presence.distrusted, "it may see others than we do"
    assert takes(rig, rig.adopt(1, rig.held(0), "ac"))


def test_where_somebody_is_gone_fewer_signatures_are_enough() -> None:
    rig = at_second().trained()
    while rig.peer.is_live("c"):
        rig.tick(SETTINGS.timing.heartbeat)
        rig.see(others="a")
    assert takes(rig, rig.adopt(1, rig.held(0), "a"))


def test_a_leader_that_says_it_reaches_nobody_is_not_believed_sooner() -> None:
    """Regression: then nobody but the member itself counted as against what it made up."""
    rig = at_second().trained()
    says = beat("a", rig.peer.log, PeerState.READY, 100).model_copy(update={"unreached": ("c",)})
    rig.do(HeartbeatsSeen((says,)))
    assert not takes(rig, rig.adopt(1, rig.held(0), "a"))


def test_who_cannot_talk_to_the_leader_can_not_tell_it_that_it_holds_nothing() -> None:
    rig = at_second().trained()
    says = beat("c", rig.peer.log, PeerState.READY, 100).model_copy(update={"unreached": ("a",)})
    rig.do(HeartbeatsSeen((says,)))
    assert takes(rig, rig.adopt(1, rig.held(0), "a"))


def test_who_is_on_its_way_to_here_may_hold_nothing() -> None:
    """Rounds may be faster than heartbeats: then most seem to be where the log was a moment ago."""
    rig = at_second().trained()
    rig.do(HeartbeatsSeen((beat("a", rig.peer.log, PeerState.READY, 100), beat("c", LOG, PeerState.AVERAGING, 100))))
    assert not takes(rig, rig.adopt(1, rig.held(0), "a"))


def test_who_is_further_on_may_have_made_another_entry_here() -> None:
    """Regression: liars could have a laggard sign what they made up, while all others were further on. Whoever says so
    in vain, again and again, keeps nobody from anything."""
    rig = at_second().trained()
    ahead = beat("c", rig.peer.log, PeerState.TRAINING, 100).model_copy(update={"index": 9, "head": bytes(32)})
    rig.do(HeartbeatsSeen((ahead,)))
    assert not takes(rig, rig.adopt(1, rig.held(0), "a"))
    for _ in range(VAIN):
        rig.peer.presence.pass_over("c")
    assert takes(rig, rig.adopt(1, rig.held(0), "a"))


def test_who_is_cut_off_from_us_may_hold_anything() -> None:
    rig = at_second().trained()
    rig.do(ReachSeen({"c": Reach.NONE}, {}, frozenset()))
    assert takes(rig, rig.adopt(1, rig.held(0), "a"))


def test_a_leader_is_believed_in_the_end() -> None:
    rig = at_second().trained()
    rig.peer.slot._patience.is_over = lambda leader: False  # type: ignore[method-assign]
    assert not takes(rig, rig.adopt(1, rig.held(0), "c"))
    while rig.now < rig.peer.slot._ready_since + rig.peer._desk.schedule.hopeless:
        rig.tick()
        rig.see()
    assert takes(rig, rig.adopt(1, rig.held(0), "c"))


@pytest.mark.parametrize("forged", ["another's", "twice", "of another attempt"])
def test_who_hands_on_what_nobody_has_signed_is_given_up(forged: str) -> None:
    rig = at_second().trained()
    held = rig.held(0)
    adopt = rig.adopt(1, held, "ac")
    first, second = adopt.holders
    holders = {
        "another's": (first, second.model_copy(update={"signature": first.signature})),
        "twice": (first, first),
        "of another attempt": (first, second.model_copy(update={"attempt": rig.attempt(2)})),
    }
    assert not takes(rig, adopt.model_copy(update={"holders": holders[forged]}))
    assert [dropped.what for dropped in of(rig.effects, Dropped)] == ["adopt"]
    assert "a" in rig.peer.presence.distrusted


def test_what_nobody_holds_is_taken_over_only_where_a_fragment_is_skipped() -> None:
    rig = at_second().trained()
    assert not takes(rig, rig.adopt(1, rig.held(0), ""))


def test_one_late_signature_does_not_displace_what_we_hold() -> None:
    """Of two that are said to hold another entry, one names a later attempt than ours, and one an earlier."""
    rig = at_second().trained().averaging().holding()
    held = rig.peer.slot.acceptor.held
    assert held is not None
    other = rig.held(9, payload=first_log().position.head)
    early = holders_of(other.model_copy(update={"attempt": rig.attempt(0)}), "c")
    adopt = rig.adopt(2, other, "a").model_copy(update={"holders": (*holders_of(other, "a"), *early)})
    rig.hear("a", adopt)
    assert rig.peer.slot.adopting is None
    assert rig.peer.slot.acceptor.held == held


def stance(rig: Rig, peer: str, number: int, held: bytes | None = None, incarnation: int = 0) -> Disclaimer:
    """What a peer has signed before it takes part in this attempt."""
    position = rig.peer.log.position
    said = Stance(position=position, peer=peer, incarnation=incarnation, last_attempt=number - 1, held=held)
    signature = SimulatedKeys(peer).sign(said.text)
    return Disclaimer(peer=peer, last_attempt=number - 1, held=held, signature=signature)


@pytest.mark.parametrize(
    ("what", "joins"),
    [
        ("two of three", True),
        ("one of three", False),
        ("one says it twice", False),
        ("one holds it, too", False),
        ("one holds another", True),
        ("one has forgotten", False),
        ("of an attempt before", False),
        ("another's signature", False),
        ("one is lost", False),
    ],
)
def test_who_holds_an_entry_gives_it_up_when_others_show_that_it_was_not_committed(what: str, joins: bool) -> None:
    """It does not take the leader's word for it."""
    rig = at_second().trained().averaging().holding()
    held = rig.peer.slot.acceptor.held
    assert held is not None
    rig.hear("a", Abort(attempt=rig.attempt(), reason="over"))
    a, c = stance(rig, "a", 2), stance(rig, "c", 2)
    shown = {
        "two of three": (a, c),
        "one of three": (a,),
        "one says it twice": (a, a),
        "one holds it, too": (a, stance(rig, "c", 2, held.header.digest)),
        "one holds another": (a, stance(rig, "c", 2, bytes(32))),
        "one has forgotten": (a, stance(rig, "c", 2, incarnation=5)),
        "of an attempt before": (a, stance(rig, "c", 1)),
        "another's signature": (a, c.model_copy(update={"signature": a.signature})),
    }
    begin = rig.begin(2, lost="c" * (what == "one is lost"))
    begin = begin.model_copy(update={"disclaimers": shown.get(what, (a, c))})
    rig.hear("a", begin)
    assert rig.is_in(State.AVERAGING) is joins
    assert rig.peer.slot.acceptor.held == held, "until there is something else to hold"
