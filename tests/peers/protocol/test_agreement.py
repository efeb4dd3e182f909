"""Whether members of a round hold the same, alone: whom one waits for before one signs."""

from __future__ import annotations

from collections.abc import Collection

import pytest

from peers.log.header import Header
from peers.presence.presence import Presence
from peers.protocol.acceptor import Acceptor
from peers.protocol.agreement import SILENCE, Agreement
from peers.protocol.certifier import OPEN_LIMIT
from peers.protocol.desk import Desk
from peers.protocol.messages import Complete, Prepared, Waiting
from peers.values.wire import digest_of
from tests.peers.builders import PAYLOAD, PAYLOADS, SETTINGS, TIMING, attempt, beat, first_log, sends
from tests.simulator.simulated_keys import SimulatedKeys

LOG = first_log()
OTHER = digest_of(b"another payload")
MEMBERS = "abcde"
HEADER = LOG.next_header([LOG.expected(name) for name in "abc"], PAYLOAD)
SIGNATURE = bytes(64)


def complete(number: int = 1, entry: bytes = HEADER.digest) -> Complete:
    return Complete(attempt=attempt(LOG, number), payload=PAYLOAD, missed=(), entry=entry, signature=SIGNATURE)


class Scene:
    """b, whose payload is whole, in attempts of a with four others."""

    def __init__(self) -> None:
        self.presence = Presence("b", 10.0, 40.0, bar=20.0, now=0.0)
        self.desk = Desk("b", SETTINGS, PAYLOADS, 0.0, incarnation=0, keys=SimulatedKeys("b"))
        self.acceptor = Acceptor()
        self.agreement = Agreement(self.desk, self.presence, self.acceptor)
        self.beats = 0
        self.see()

    def see(self, names: str = "acde", unreached: Collection[str] = ()) -> None:
        self.beats += 1
        seen = [beat(name, LOG, sequence=self.beats) for name in names]
        said = {"unreached": tuple(unreached)}
        self.presence.membership.observe([one.model_copy(update=said) for one in seen], self.desk.now)

    def passes(self, seconds: float) -> None:
        self.desk.now += seconds
        self.presence.now = self.desk.now
        self.see()

    def prepared(self, payload: bytes = PAYLOAD, number: int = 1) -> Prepared:
        return Prepared(attempt=attempt(LOG, number), payload=payload, missed=(), entry=payload)

    def hears(self, names: str, payload: bytes = PAYLOAD, number: int = 1) -> None:
        for name in names:
            self.agreement.hear(name, self.prepared(payload, number), None, MEMBERS)

    def signs(self, number: int = 1) -> Header:
        """b signs what it holds."""
        self.acceptor.hold(attempt(LOG, number), HEADER, (), SIGNATURE)
        return HEADER

    def hears_signed(self, name: str, number: int = 1, entry: bytes = HEADER.digest) -> bool:
        return self.agreement.hear(name, complete(number, entry), attempt(LOG, number), MEMBERS)

    def is_reached(self, number: int = 1, members: Collection[str] = MEMBERS) -> bool:
        return self.agreement.is_reached(self.prepared(number=number), tuple(members), 7)


def test_all_must_say_the_same() -> None:
    scene = Scene()
    assert not scene.is_reached()
    effects = scene.desk.take_effects()
    assert [to for to, _ in sends(effects, Prepared)] == ["a", "c", "d", "e"]
    assert [(to, one.missing, one.moved) for to, one in sends(effects, Waiting)] == [("a", ("a", "c", "d", "e"), 7)]
    scene.hears("acd")
    assert not scene.is_reached()
    assert not scene.desk.take_effects(), "it is said again after a while"
    scene.hears("e")
    assert scene.is_reached()


def signs_without(scene: Scene, number: int, silent: str) -> int:
    """All but one say in an attempt that they have the same. Return how many seconds that one is waited for."""
    scene.hears("".join(peer for peer in "acde" if peer != silent), number=number)
    for seconds in range(100):
        if scene.is_reached(number):
            return seconds
        scene.passes(TIMING.resend)
    raise AssertionError("it is waited for, for ever")


def test_who_says_nothing_is_not_waited_for_for_long_and_less_in_the_next_rounds() -> None:
    """What it would say may not come here; but it must not cost each round as much."""
    scene = Scene()
    assert signs_without(scene, 1, "e") == SILENCE + 1
    assert signs_without(scene, 2, "e") == 2
    assert signs_without(scene, 3, "d") == SILENCE + 1, "it is another one's silence"
    assert signs_without(scene, 4, "e") == SILENCE + 1, "it has spoken in time"


def test_who_speaks_when_others_have_signed_is_waited_for_no_longer() -> None:
    """Regression: whoever spoke last cost each round as much."""
    scene = Scene()
    signs_without(scene, 1, "e")
    at = attempt(LOG)
    scene.acceptor.hold(at, LOG.next_header([LOG.expected(name) for name in MEMBERS], PAYLOAD), (), bytes(64))
    scene.agreement.hear("e", scene.prepared(), at, MEMBERS)
    assert signs_without(scene, 2, "e") == 2


def test_who_says_something_else_is_waited_for_however_long() -> None:
    scene = Scene()
    scene.hears("acd")
    scene.hears("e", OTHER)
    assert not scene.is_reached()
    scene.passes(100.0)
    assert not scene.is_reached()


def test_who_is_gone_or_says_that_it_cannot_talk_to_us_is_not_waited_for() -> None:
    scene = Scene()
    scene.hears("acd")
    scene.presence.membership.unreachable("e")
    assert scene.is_reached()
    scene = Scene()
    scene.hears("acd")
    scene.see("e", unreached=("b",))
    assert scene.is_reached()


def test_many_do_not_ask_each_other() -> None:
    members = tuple(f"peer{number}" for number in range(OPEN_LIMIT + 1))
    assert Scene().is_reached(members=members)
    assert not Scene().is_reached(members=("a", "b", "c"))


def test_whoever_has_signed_tells_who_asks() -> None:
    """Regression: whose signature was lost, or was meant for the leader alone, was waited for."""
    scene, at = Scene(), attempt(LOG)
    said, _ = scene.acceptor.hold(at, HEADER, (), SIGNATURE)
    scene.agreement.hear("c", scene.prepared(), at, MEMBERS)
    assert sends(scene.desk.take_effects(), Complete) == [("c", said)]
    scene.agreement.hear("c", said, at, MEMBERS)
    scene.agreement.hear("c", scene.prepared(number=2), attempt(LOG, 2), MEMBERS)
    assert not scene.desk.take_effects()


def test_an_entry_is_concluded_once_all_members_say_the_same_of_the_attempt() -> None:
    scene = Scene()
    agreement = scene.agreement
    assert scene.hears_signed("c"), "before we hold it"
    assert agreement.concluded(attempt(LOG), "abc") is None
    header = scene.signs()
    assert agreement.concluded(attempt(LOG), "abc") is None
    scene.hears_signed("a")
    assert agreement.concluded(attempt(LOG), "abc") == header
    assert agreement.signatures(attempt(LOG), "abc") == dict.fromkeys("abc", SIGNATURE)
    assert agreement.concluded(attempt(LOG), "") is None, "an attempt that is not open"
    assert agreement.concluded(attempt(LOG, 2), "abc") is None, "a later attempt"


def test_one_that_says_something_else_concludes_nothing() -> None:
    scene = Scene()
    scene.signs()
    scene.hears_signed("a", entry=OTHER)
    assert scene.agreement.concluded(attempt(LOG), "ab") is None
    assert not scene.hears_signed("a"), "nobody takes back what it said of an attempt"
    assert scene.hears_signed("a", number=2)


@pytest.mark.parametrize("is_member", [True, False])
def test_what_others_than_members_say_is_forgotten_at_once(is_member: bool) -> None:
    """Regression: whatever anybody said who was alive was kept, at 32 positions."""
    scene, members = Scene(), "bc" if is_member else "b"
    said = scene.prepared()
    scene.agreement.hear("c", said, None, members)
    assert scene.is_reached(members="bc") == is_member
    assert scene.agreement.hear("c", complete(), None, members) == is_member
    assert ("c" in scene.agreement.signatures(said.attempt, "bc")) == is_member


def test_of_many_members_nothing_is_remembered() -> None:
    scene, many = Scene(), tuple(f"peer{number}" for number in range(OPEN_LIMIT + 1))
    assert not scene.agreement.hear("peer0", complete(), None, many)
    assert not scene.agreement.signatures(attempt(LOG), many)
