"""Who is there, alone: whom a peer believes, who is further on, and whom it takes for its leader."""

from __future__ import annotations

from typing import Any

import pytest

from peers.log.header import UNKNOWN_STATE, Fault
from peers.log.lineage import Branch, Lineage
from peers.log.state import LogState
from peers.presence.heartbeat import Heartbeat, PeerState
from peers.presence.presence import LINKS_PATIENCE, VAIN, Presence, state_told
from peers.values.leases import SampleRange
from peers.values.wire import Reach, digest_of
from tests.peers.builders import LOG, PAYLOAD, STATE, beat, first_log, member

EXPIRY, DISTRUST = 10.0, 40.0
AHEAD = first_log()


def seeing(log: LogState = AHEAD, names: str = "ac", **more: Any) -> Presence:
    """b, who hears of the others at this place in the log."""
    presence = Presence("b", EXPIRY, DISTRUST, bar=20.0, now=0.0)
    presence.membership.observe([beat(name, log, **more) for name in names], 0.0)
    return presence


def test_who_is_excluded_leads_nobody() -> None:
    """Nobody of the roster is here but us, so that any other might lead."""
    fault = Fault(peer="c", kind="averages", proof=bytes(32))
    log = AHEAD.append(AHEAD.next_header([AHEAD.expected(peer) for peer in "ab"], PAYLOAD, [fault]))
    presence = seeing(log, names="c")
    assert presence.elect(log, set()) == "b"
    assert presence.vote == "b"
    allowed = AHEAD.append(AHEAD.next_header([AHEAD.expected(peer) for peer in "ab"], PAYLOAD))
    assert seeing(allowed, names="c").elect(allowed, set()) == "c"


def here(patience: float = EXPIRY, now: float = 0.0, ours: int = 1, **more: Any) -> set[str]:
    presence = seeing(**more)
    presence.now = now
    return presence.voters_here(AHEAD, ours, patience)


@pytest.mark.parametrize("state", [PeerState.JOINING, PeerState.TRAINING, PeerState.READY, PeerState.AVERAGING])
def test_a_voter_that_is_heard_of_is_here_whatever_it_does(state: PeerState) -> None:
    assert here(state=state) == {"a", "c"}


@pytest.mark.parametrize(
    "more",
    [
        {"trouble": "the leader says that it leaves this peer out"},
        {"head": digest_of(b"another branch")},
        {"index": 2},
        {"index": 40, "head": digest_of(b"ahead")},
        {"unreached": ("peer0two", "peerfour")},
    ],
)
def test_what_liars_can_bring_about_takes_nobody_its_say(more: dict[str, Any]) -> None:
    """Regression: who said of itself that it had a trouble, or could not reach a member, had no say any more."""
    assert here(**more) == {"a", "c"}


def test_who_has_left_or_started_again_is_not_here_as_what_it_was() -> None:
    assert here(state=PeerState.LEAVING) == set()
    assert here(incarnation=1) == set()


def test_who_is_silent_is_here_for_as_long_as_one_is_patient() -> None:
    assert here(now=EXPIRY) == {"a", "c"}
    assert here(now=EXPIRY + 1) == set()
    assert here(now=EXPIRY + 1, patience=EXPIRY + 4) == {"a", "c"}


def test_we_are_here_as_the_start_that_has_a_say() -> None:
    assert here(ours=0) == {"a", "b", "c"}


def test_strangers_are_no_voters() -> None:
    assert here(names="acz") == {"a", "c"}


def claimant(presence: Presence, log: LogState) -> str | None:
    return presence.claimant(log, Lineage(log))


def test_who_says_that_it_has_trained_most_is_looked_at_first() -> None:
    assert claimant(seeing(), LOG) == "c", "the greater id of two that are as far"
    assert claimant(seeing(), AHEAD) is None
    assert claimant(seeing(names="a"), LOG) == "a"


def test_who_says_that_it_is_where_our_log_does_not_lead_is_looked_at_though_it_is_no_further() -> None:
    other = LOG.append(LOG.next_header(AHEAD.last.roster if AHEAD.last else (), b"\0" * 32))
    for theirs, ours in ((AHEAD, other), (other, AHEAD)):
        presence = seeing(theirs, names="a")
        assert claimant(presence, ours) == "a"
        assert not presence.is_behind(ours, Lineage(ours)), "it says nothing that is to be waited for"


def test_who_went_on_alone_and_is_far_ahead_looks_at_the_others_all_the_same() -> None:
    """Regression: it remembered no more what it had made where they are, and took that for its own; and counted them on
    both sides."""
    ours = LOG
    for _ in range(2):
        samples = ours.leases.get("b", (SampleRange(0, 20),))
        ours = ours.append(ours.next_header([member("b", samples[0].start, samples[0].stop)], b"\1" * 32))
    assert not Lineage(ours).lacks(1, AHEAD.position.head), "it does not know"
    presence = seeing(AHEAD)
    assert claimant(presence, ours) == "c"
    theirs = Branch(LOG, AHEAD, heads={1: AHEAD.position.head})
    assert presence.are_more_there(theirs, ours, Lineage(ours)) is True
    presence.membership.observe([beat("a", ours, sequence=2)], 0.0)
    assert claimant(presence, ours) is None, "somebody is where we are"


def test_who_has_said_in_vain_that_it_is_further_comes_last_for_longer_and_longer() -> None:
    presence = seeing(names="a")
    for seconds in (EXPIRY, 2 * EXPIRY, DISTRUST, DISTRUST):
        presence.pass_over("a")
        assert claimant(presence, LOG) is None
        presence.now += seconds - 0.1
        presence.membership.observe([beat("a", AHEAD, sequence=int(10 * presence.now))], presence.now)
        assert claimant(presence, LOG) is None
        presence.now += 0.1
        assert claimant(presence, LOG) == "a"


def test_a_few_that_claim_most_do_not_take_turns_for_ever() -> None:
    """Regression: six that each took a look of a minute were looked at one after the other, and nobody else ever."""
    presence, honest, looks = seeing(names=""), digest_of(b"honest"), 0
    liars = [f"liar{number}" for number in range(6)]
    while True:
        presence.now += 60.0
        claims = [beat(name, AHEAD, lineage_tokens=10**15, sequence=looks + 1) for name in liars]
        real = beat("a", AHEAD, head=honest, sequence=looks + 1)
        presence.membership.observe([*claims, real], presence.now)
        looked_at = claimant(presence, LOG)
        if looked_at == "a":
            break
        assert looked_at is not None
        presence.pass_over(looked_at)
        looks += 1
        assert looks <= VAIN * len(liars), "each of them is looked at twice at most before the others"


def test_leaders_that_failed_us_may_say_that_we_are_behind() -> None:
    """Whoever gave them all up, and stayed behind, must not go on alone."""
    presence = seeing()
    ahead: dict[str, Any] = {"index": 2, "head": digest_of(b"the next")}
    presence.membership.observe([beat(name, AHEAD, sequence=9, **ahead) for name in "ac"], 0.0)
    for name in "ac":
        presence.distrust(name)
    assert presence.is_behind(AHEAD, Lineage(AHEAD))


@pytest.mark.parametrize(
    ("names", "further", "waits"), [("ac", "ac", True), ("ac", "a", True), ("acd", "a", False), ("acd", "z", False)]
)
def test_half_of_the_roster_that_is_here_may_say_that_we_are_behind(names: str, further: str, waits: bool) -> None:
    roster = [member(name, 20 * place, 20 * place + 20) for place, name in enumerate("abcd")]
    log = LOG.append(LOG.next_header(roster, PAYLOAD))
    presence = Presence("b", EXPIRY, DISTRUST, bar=20.0, now=0.0)
    ahead: dict[str, Any] = {"index": 2, "head": digest_of(b"the next")}
    beats = [beat(name, log, **(ahead if name in further else {})) for name in {*names, *further}]
    presence.membership.observe(beats, 0.0)
    assert presence.is_behind(log, Lineage(log)) is waits


def test_who_joins_or_is_not_reached_has_nothing_to_give_and_who_failed_us_comes_last() -> None:
    assert claimant(seeing(state=PeerState.JOINING), LOG) is None
    presence = seeing()
    presence.reachability.observe({"c": Reach.NONE}, {})
    assert claimant(presence, LOG) == "a"
    presence.distrust("a")
    assert claimant(presence, LOG) == "a", "as long as there is nobody else"
    assert claimant(presence, AHEAD) is None
    assert presence.donors() == {"c"}
    both = seeing()
    both.distrust("c")
    assert claimant(both, LOG) == "a"
    both.gave_nothing("a")
    both.gave_nothing("c")
    assert claimant(both, LOG) is None
    presence.now = DISTRUST
    assert presence.distrusted == frozenset()
    presence.distrust("c")
    presence.ask_again("c")
    assert presence.distrusted == frozenset()


def test_who_says_in_vain_that_it_is_further_does_not_lead_those_who_are_not() -> None:
    """Regression: whoever had founded a run by itself led all who waited, and did not believe it."""
    presence = seeing(AHEAD, names="a")
    presence.membership.observe([beat("c", LOG)], 0.0)
    assert presence.elect(LOG, "b") == "a", "it may have what followed"
    presence.pass_over("a")
    presence.pass_over("a")
    assert presence.elect(LOG, "b") == "b"
    assert presence.elect(AHEAD, "b") == "a", "where it is, it may lead"


def test_who_gave_nothing_may_lead() -> None:
    presence = seeing()
    presence.gave_nothing("a")
    assert presence.donors() == {"c"}
    assert presence.elect(AHEAD, ()) == "a"
    presence.ask_again("a")
    assert presence.donors() == {"a", "c"}
    presence.gave_nothing("a")
    presence.now = DISTRUST
    assert presence.unhelpful == frozenset()


def test_the_dead_are_no_donors() -> None:
    presence = seeing()
    presence.now = EXPIRY + 1
    assert (presence.live(), claimant(presence, LOG), presence.is_live("a")) == ({}, None, False)


def test_the_first_of_the_last_roster_that_works_leads() -> None:
    assert seeing().elect(AHEAD, ()) == "a"
    assert seeing(names="c").elect(AHEAD, ()) == "c"
    assert seeing(names="c").elect(AHEAD, ("b",)) == "b", "we are at work, too, and before it in the roster"
    assert seeing(state=PeerState.JOINING).elect(AHEAD, ("b", "c")) == "b"
    assert seeing(LOG, state=PeerState.JOINING).elect(LOG, ()) == "a", "of those that join, before the first entry"
    assert seeing(names="c").elect(AHEAD, ("z",)) == "c", "nobody whom we do not hear"


def test_who_cannot_talk_with_others_leads_last() -> None:
    presence = seeing()
    presence.reachability.observe({"a": Reach.NONE}, {})
    assert presence.elect(AHEAD, ("b",)) == "c"


def voting(peer: str, log: LogState, vote: str) -> Heartbeat:
    """What a peer says later on. Names are as short in these tests as no peer's is."""
    return beat(peer, log, sequence=9).model_copy(update={"vote": vote})


def test_whoever_gives_a_leader_up_alone_stays_with_it() -> None:
    presence = seeing()
    presence.membership.observe([voting(name, AHEAD, "a") for name in "ac"], 0.0)
    presence.distrust("a")
    assert (presence.elect(AHEAD, ("b",)), presence.vote) == ("a", "b"), "for now; others learn of our vote"
    presence = seeing()
    presence.distrust("a")
    presence.membership.observe([voting("a", AHEAD, "a"), voting("c", AHEAD, "b")], 0.0)
    assert presence.elect(AHEAD, ("b",)) == "b", "two of three have given it up"


def test_votes_count_of_those_who_make_the_entry() -> None:
    presence = seeing()
    presence.membership.observe([voting(name, AHEAD, "c") for name in "defghi"], 0.0)
    assert presence.elect(AHEAD, ("b",)) == "a", "the roster says who leads, and nobody of it votes for c"
    presence.membership.observe([voting(name, AHEAD, "c") for name in "ac"], 0.0)
    assert presence.elect(AHEAD, ("b",)) == "c", "two of three do"
    presence.reachability.observe({"c": Reach.NONE}, {})
    assert presence.elect(AHEAD, ("b",)) == "a", "we can't reach c"


def test_before_the_first_entry_all_have_a_vote_and_it_is_of_one_place_in_the_log() -> None:
    presence = seeing(LOG, names="")
    presence.membership.observe([voting(name, LOG, "c") for name in "ac"], 0.0)
    assert presence.elect(LOG, ("b",)) == "c"
    assert presence.elect(AHEAD, ("b",)) == "a", "that was said of another place"


def test_before_the_first_entry_those_without_samples_vote_once_anybody_is_at_work() -> None:
    """Regression: the few that a liar gave samples stayed with it, and so did all others, since they had no vote."""
    presence = seeing(LOG, names="")
    presence.distrust("a")
    without = [voting(name, LOG, "c").model_copy(update={"state": PeerState.JOINING}) for name in "cde"]
    presence.membership.observe(without, 0.0)
    assert presence.elect(LOG, ()) == "b", "nobody is at work: each goes by itself"
    presence.membership.observe([voting("a", LOG, "a")], 0.0)
    assert presence.elect(LOG, ()) == "c", "three of five are for c"


def test_nobody_stays_with_a_leader_that_is_gone() -> None:
    presence = seeing(names="")
    presence.membership.observe([voting("c", AHEAD, "a")], 0.0)
    assert presence.elect(AHEAD, ("b",)) == "b"


def test_a_newcomer_first_looks_for_ways_to_those_who_live() -> None:
    presence = seeing()
    presence.reachability.observe({}, {}, frozenset({"c"}))
    assert presence.seeks_links
    presence.now = LINKS_PATIENCE
    assert not presence.seeks_links


def test_the_speeds_that_count_are_of_those_at_work_that_have_a_lease() -> None:
    """Regression: what a stranger said of its speed made everybody's leases the smallest."""
    presence, log = seeing(names=""), first_log()
    for peer, state, speed in (("a", PeerState.JOINING, 900.0), ("b", PeerState.TRAINING, 0.0)):
        presence.membership.observe([beat(peer, log, state, speed=speed)], 0.0)
    assert presence.speeds(log) == [], "it joins, and it does not know"
    presence.membership.observe([beat("c", log, speed=500.0), beat("stranger", log, speed=1e300)], 0.0)
    assert presence.speeds(log) == [500.0]
    assert presence.speeds(LOG) == [1e300, 500.0], "nobody has one yet"


def test_what_was_found_out_is_found_out_anew_when_what_it_depends_on_changes() -> None:
    presence = seeing()
    assert presence.elect(AHEAD, ()) == presence.elect(AHEAD, ()) == "a"
    assert presence.elect(LOG, ()) == "a"
    presence.distrust("a")
    assert presence.elect(AHEAD, ()) == "c"
    assert presence.elect(AHEAD, ("b",)) == "b"
    presence.now = DISTRUST + 1
    presence.membership.observe([beat("a", AHEAD, sequence=2), beat("c", AHEAD, sequence=2)], presence.now)
    assert presence.elect(AHEAD, ()) == "a", "it is believed again"
    assert claimant(presence, LOG) == "c"
    presence.reachability.observe({"c": Reach.NONE}, {})
    assert claimant(presence, LOG) == "a"
    assert claimant(presence, AHEAD) is None
    presence.membership.unreachable("a")
    assert claimant(presence, LOG) is None
    assert presence.elect(AHEAD, ()) == "c"


@pytest.mark.parametrize(
    ("speeds", "usual"),
    [((), 0.0), ((5.0,), 5.0), ((1e12, 5.0), 5.0), ((1e12, 5.0, 4.0), 5.0), ((1e12, 1e12, 3.0, 2.0), 3.0)],
)
def test_less_than_half_cannot_boast_for_all(speeds: tuple[float, ...], usual: float) -> None:
    """Regression: whoever was late once stopped, if it was much slower than one said that it is."""
    presence = seeing(names="")
    presence.membership.observe([beat(f"peer{n}", AHEAD, speed=speed) for n, speed in enumerate(speeds)], 0.0)
    assert presence.usual(LOG) == usual


def test_strangers_do_not_say_what_speed_is_usual() -> None:
    """Regression: as many as were at work kept whoever was late once from training for half an hour."""
    presence, log = seeing(names=""), first_log()
    presence.membership.observe([beat("c", log, speed=500.0)], 0.0)
    presence.membership.observe([beat(f"stranger{n}", log, speed=1e300) for n in range(3)], 0.0)
    assert presence.usual(log) == 500.0


FALSE = digest_of(b"false")


@pytest.mark.parametrize(
    ("beats", "told"),
    [
        ([beat("a", AHEAD), beat("b", AHEAD), beat("c", AHEAD, state_digest=FALSE)], STATE),
        ([beat("a", LOG), beat("b", LOG), beat("c", AHEAD, state_digest=FALSE)], UNKNOWN_STATE),
        ([beat("a", AHEAD), beat("c", AHEAD, state_digest=FALSE)], UNKNOWN_STATE),
        ([beat("a", AHEAD), beat("stranger", AHEAD, state_digest=FALSE)], STATE),
        ([beat("a", LOG)], UNKNOWN_STATE),
        ([beat("stranger", AHEAD, state_digest=FALSE), beat("a", AHEAD, incarnation=7)], None),
    ],
)
def test_most_of_the_roster_who_are_here_tell_what_the_state_is(beats: list[Heartbeat], told: bytes | None) -> None:
    assert state_told(Branch(LOG, AHEAD), beats, AHEAD) == told


def test_whoever_has_gone_on_from_a_place_had_the_state_that_its_next_entry_names() -> None:
    further = AHEAD.append(AHEAD.next_header([AHEAD.expected("a"), AHEAD.expected("b")], PAYLOAD))
    heads = {log.position.index: log.position.head for log in (AHEAD, further)}
    branch = Branch(LOG, further, heads=heads, claimed={AHEAD.position.index: FALSE})
    assert state_told(branch, [beat("a", AHEAD), beat("b", AHEAD), beat("c", further)], AHEAD) == STATE
    assert state_told(branch, [beat("a", AHEAD), beat("b", further), beat("c", further)], AHEAD) == FALSE
