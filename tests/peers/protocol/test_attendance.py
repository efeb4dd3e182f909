"""The peers that are here: whether they are a quorum, when they go on alone (R8), and who may found a run (R13)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from peers.log.certificate import Support
from peers.log.lineage import Lineage
from peers.messages.messages import Certified, Propose
from peers.presence.heartbeat import PeerState
from peers.presence.presence import Presence
from peers.protocol.attendance import NEARLY, Attendance
from peers.protocol.belief import Belief
from peers.protocol.effects import Apply
from peers.protocol.events import PayloadAssembled
from peers.protocol.replica import Replica
from tests.peers.builders import ahead, at_second, context, of, roster, sends
from tests.peers.heartbeats import beat
from tests.peers.logs import LOG, PAYLOAD, SETTINGS, TIMING, first_log

GRACE = SETTINGS.timing.partition_grace


def attendance(
    seconds: float, live: str = "", incarnation: int = 0, goes_on_alone: bool = True, is_behind: bool = False
) -> Attendance:
    """Return what b sees that has been ready at the second entry for so long, while these were there."""
    here = context("b", replace(SETTINGS, goes_on_alone=goes_on_alone))
    presence = Presence("b", 10.0, 40.0, 0.0, here.is_farewell)
    log = first_log()
    seen = Attendance(here, presence, log)
    for second in range(int(seconds) + 1):
        here.now = presence.now = float(second)
        beats = [beat(name, log, PeerState.READY, second + 1, incarnation=incarnation) for name in live]
        presence.membership.observe(beats, here.now)
        seen.look(0.0, True, is_behind)
    return seen


@pytest.mark.parametrize(
    ("more", "is_alone", "joins"),
    [
        ({"seconds": GRACE - 1}, False, True),
        ({"seconds": GRACE}, True, True),
        ({"seconds": NEARLY * GRACE - 1}, False, False),
        ({"seconds": GRACE, "live": "a"}, False, False),
        ({"seconds": GRACE, "is_behind": True}, False, False),
        ({"seconds": GRACE, "goes_on_alone": False}, False, False),
        ({"seconds": GRACE, "live": "ac", "incarnation": 7, "goes_on_alone": False}, True, True),
    ],
    ids=["nearly", "alone", "too early", "a quorum", "others are ahead", "its owner waits", "all have started again"],
)
def test_r8_a_peer_goes_on_alone_when_no_quorum_was_here_for_the_partition_grace(
    more: dict[str, Any], is_alone: bool, joins: bool
) -> None:
    """It joins others a little earlier, since clocks differ; its owner decides, unless most are here by their names."""
    seen = attendance(**more)
    assert (seen.is_alone, seen.joins_alone) == (is_alone, joins)


def test_r8_more_than_half_of_those_here_decide_and_all_of_them_are_the_group() -> None:
    here = attendance(GRACE, "ac", incarnation=7)
    assert here.group == (("a", 7), ("b", 0), ("c", 7))
    assert here.is_enough({"a": 7, "c": 7})
    assert not here.is_enough({"a": 7}), "most voters are here by name: there can be one such group only"
    assert here.left_out((("a", 7), ("b", 0))) == ("c",)


@pytest.mark.parametrize(
    ("live", "members", "signers", "is_followed"),
    [
        ("a", "a", 1, True),
        ("ac", "ac", 2, True),
        ("ac", "a", 1, False),
        ("a", "a", 0, False),
        ("z", "a", 0, True),
    ],
    ids=["alone", "both went along", "c went elsewhere", "nobody has signed", "no voter lives"],
)
def test_r21_an_uncertified_entry_is_followed_where_it_is_signed_and_the_others_are_no_quorum(
    live: str, members: str, signers: int, is_followed: bool
) -> None:
    """b is behind, so that all that live are further on."""
    here, log = context("b"), first_log()
    presence = Presence("b", 10.0, 40.0, 0.0, here.is_farewell)
    belief = Belief(here, presence, Replica(here, presence, Lineage(log), log.state))
    presence.membership.observe([beat(name, ahead(log), PeerState.TRAINING) for name in live], 0.0)
    gone = tuple(peer for peer in log.voters if peer not in members)
    header = log.next_header(roster(log, members), PAYLOAD, members[0], gone=gone)
    shown = Certified(header=header, certificate=None)
    found = belief.entry("a" if "a" in live else live, shown, Support(False, signers), sender_was_asked=True)
    assert (found is not None) is is_followed


def test_r8_where_most_are_here_by_name_no_other_group_is_joined() -> None:
    """Voters that are not heard here do not make it most: two such groups could be at once."""
    seen = attendance(GRACE, "ac", incarnation=7, goes_on_alone=False)
    del seen.at_work["a"], seen.at_work["c"]
    assert seen.joins_alone
    assert not seen.joins((("a", 7), ("b", 0), ("c", 7)))


def test_r8_a_lone_survivor_makes_an_entry_that_says_so() -> None:
    """It takes the say of all voters outside it, and its certificate is one of a minority."""
    rig = at_second().trained()
    rig.waits(int(GRACE), others="")
    assert rig.peer.exchange is None
    rig.waits(int(TIMING.heartbeat_expiry) + 2, others="")
    exchange = rig.whole().peer.exchange
    assert exchange is not None
    assert exchange.round.group == (("b", 0),)
    outcome = exchange.outcome()
    assert outcome is not None
    effects = rig.do(PayloadAssembled(exchange.name, outcome.payload)) + rig.waits(2, others="")
    assert not sends(effects, Propose), "it tells itself alone"
    (apply,) = of(effects, Apply)
    assert apply.certificate is not None
    assert apply.certificate.choice.alone
    assert (apply.header.peers, rig.peer.log.voters) == (("b",), ("b",))


@pytest.mark.parametrize(
    ("founders", "waiting", "archives", "is_believed"),
    [
        ("xyz", "abc", "", True),
        ("x", "ab", "", False),
        ("xy", "ab", "", False),
        ("x", "a", "", True),
        ("x", "a", "d", True),
    ],
)
def test_r13_few_found_no_run_while_enough_wait_to_do_so(
    founders: str, waiting: str, archives: str, is_believed: bool
) -> None:
    settings = replace(SETTINGS, minimum_peers=3)
    here = context("me", settings)
    presence = Presence("me", 10.0, 40.0, 0.0, here.is_farewell)
    belief = Belief(here, presence, Replica(here, presence, Lineage(LOG), LOG.state))
    presence.membership.observe([beat(name, LOG, PeerState.READY) for name in waiting], 0.0)
    presence.membership.observe([beat(name, LOG, PeerState.ARCHIVING) for name in archives], 0.0)
    presence.membership.observe([beat(name, first_log()) for name in founders], 0.0)
    here.now = presence.now = settings.timing.heartbeat_expiry
    assert belief.may_found(len(founders)) is is_believed


def test_r13_few_found_no_run_while_others_do_not_answer_for_a_moment_or_cannot_have_been_heard_of() -> None:
    """Regression: one lost message to one of those who waited, and a liar's own founding was believed."""
    settings = replace(SETTINGS, minimum_peers=3)
    here = context("me", settings)
    presence = Presence("me", 10.0, 40.0, 0.0, here.is_farewell)
    belief = Belief(here, presence, Replica(here, presence, Lineage(LOG), LOG.state))
    assert not belief.may_found(1), "we have just started"
    presence.membership.observe([beat(name, LOG, PeerState.READY) for name in "ab"], 0.0)
    here.now = presence.now = settings.timing.heartbeat_expiry
    presence.membership.unreachable("a")
    assert not belief.may_found(1)
    here.now = presence.now = settings.timing.partition_grace + 1
    assert belief.may_found(1), "nobody has been heard of for long"
