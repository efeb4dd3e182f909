"""The way from outer step to outer step: fragments (R15), what becomes of work, and amendments (R18)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from peers.log.header import NO_PAYLOAD, Header, Member
from peers.log.state import LogState, take_order
from peers.messages.messages import Inquire, Ready, Vote
from peers.presence.heartbeat import PeerState
from peers.protocol.amending import Amending
from peers.protocol.effects import Apply, FetchPayload, Note, StopTraining, TokensLost
from peers.protocol.events import (
    AmendmentSeen,
    Applied,
    AverageRefuted,
    Captured,
    Digested,
    HeartbeatsSeen,
    PayloadFetched,
    PayloadNotFetched,
    TrainingDone,
    TrainingProgress,
)
from peers.protocol.pacemaker import death
from peers.protocol.states import State
from peers.protocol.voting import Refusal
from peers.values.identity import Identity
from peers.values.manifest import Amendment, LoggedAmendment
from peers.values.workload import Progress, Trained
from tests.peers.builders import LEASES, Rig, certified, of, propose, roster, sends, trained
from tests.peers.heartbeats import beat
from tests.peers.logs import LOG, PAYLOAD, RUN, SETTINGS, STATE, TIMING, TOKENS, next_header

THREE = replace(SETTINGS, fragments=3, staleness=3)
CAPTURED = Trained((), TOKENS, 1.0)
PROGRESS = TrainingProgress(Progress(1, 1.0, 10.0))


class Cycles:
    """c among a and b, in cycles of several fragments. The entries of the others it hears, fetches and applies."""

    def __init__(self, fragments: int = 3) -> None:
        self.rig = Rig("c", "ab", replace(THREE, fragments=fragments)).joined()

    def training(self) -> Cycles:
        """The first cycle is made, and it trains its second lease."""
        self.rig.do(TrainingDone(trained(LEASES["c"])))
        self.makes("abc", range(3))
        self.rig.do(PROGRESS)
        return self

    def header(self, names: str, fragment: int, payload: bytes = PAYLOAD) -> Header:
        """Return the entry that is made of what these have trained."""
        log = self.rig.peer.log.of(fragment)
        leases = log.leases or LEASES
        tokens = TOKENS * (payload != NO_PAYLOAD)
        members = [
            Member(peer=name, tokens=tokens, samples=leases[name] if log.closes else ())
            for name in take_order(log.roster, names)
        ]
        return next_header(log.in_state(STATE), members, payload)

    def tells(self, header: Header, sender: str = "a", after: float = 0.0) -> list[Any]:
        return self.rig.hear(sender, certified(self.log(header.fragment), header, by="ab"), after)

    def log(self, fragment: int) -> LogState:
        return self.rig.peer.log.of(fragment).in_state(STATE)

    def makes(self, names: str, fragments: Iterable[int], payload: bytes = PAYLOAD) -> None:
        """Entries of the present cycle are made of what these have trained."""
        rig = self.rig
        for fragment in fragments:
            header = self.header(names, fragment, payload)
            self.see(further=1)
            self.tells(header)
            if payload != NO_PAYLOAD:
                rig.do(PayloadFetched(header))
            rig.do(Applied(header))
            if not rig.peer.log.made:
                assert rig.peer.log.last is not None
                rig.do(Digested(rig.peer.log.last, STATE))
            self.see()

    def see(self, further: int = 0, state: PeerState = PeerState.TRAINING) -> None:
        """See the others where c is, or so many cycles further."""
        log, self.rig.sequence = self.rig.peer.log, self.rig.sequence + 1
        more = {"index": log.position.index + further, "lineage_tokens": log.lineage_tokens + further}
        seen = [beat(peer, log, state, self.rig.sequence, **more) for peer in "ab"]
        self.rig.do(HeartbeatsSeen(tuple(seen)))

    def says(self) -> dict[int, int]:
        """Return the tokens that c is ready with, by fragment."""
        return {ready.position.fragment: ready.tokens for _, ready in sends(self.rig.tick(), Ready)}


# Fragments (R15) -----------------------------------------------------------------------------------------------------
def test_r15_an_entry_that_was_replayed_ends_its_round_alone_and_one_that_cannot_be_costs_nothing() -> None:
    """Regression: who had heard of an entry from a leader that died forgot what it had voted for the cycle's others,
    and dropped what it trained."""
    cycles = Cycles()
    rig = cycles.rig
    for fragment in (0, 1):
        rig.do(Captured(fragment, CAPTURED))
    cycles.see(state=PeerState.READY)
    header, before = cycles.header("abc", 0), dict(rig.peer.rounds)
    assert of(cycles.tells(header), FetchPayload)
    effects = rig.do(PayloadNotFetched(header, "nobody has it"))
    assert not of(effects, StopTraining) + of(effects, TokensLost)
    assert (rig.peer.state, rig.peer.rounds) == (State.TRAINING, before)
    assert of(cycles.tells(header), FetchPayload), "it is told again"
    rig.do(PayloadFetched(header))
    rig.do(Applied(header))
    assert rig.peer.rounds == {fragment: before[fragment] for fragment in (1, 2)}


def test_r15_a_peer_that_is_behind_asks_for_one_fragments_entry_after_the_other_at_once() -> None:
    """Regression: it asked once a heartbeat, and never came to where peers with shorter cycles were."""
    cycles = Cycles()
    cycles.see(further=1)
    inquiries = sends(cycles.rig.effects, Inquire)
    for fragment in range(3):
        ((donor, inquiry),) = inquiries
        assert inquiry.position.fragment == fragment
        header = cycles.header("abc", fragment)
        cycles.tells(header, donor)
        cycles.rig.do(PayloadFetched(header))
        inquiries = sends(cycles.rig.do(Applied(header)), Inquire)
    assert cycles.rig.peer.log.position.index == 1


@pytest.mark.parametrize(("patience", "downloads"), [(8.0, 0.0), (0.0, 8.0)], ids=["a slow donor", "slow downloads"])
def test_r21_a_donor_has_a_deaths_time_for_a_whole_cycle_and_downloads_are_not_its_own(
    patience: float, downloads: float
) -> None:
    """Regression: one that told each entry at the last moment kept a newcomer behind for ever."""
    cycles, asked = Cycles(8), set[str]()
    cycles.see(further=1)
    (donor,) = {to for to, _ in sends(cycles.rig.effects, Inquire)}
    for fragment in range(7):
        header = cycles.header("abc", fragment)
        cycles.tells(header, donor, patience)
        cycles.rig.now += downloads
        cycles.see(further=1)
        cycles.rig.do(PayloadFetched(header))
        asked |= {to for to, _ in sends(cycles.rig.do(Applied(header)), Inquire)}
        cycles.see(further=1)
        asked |= {to for to, _ in sends(cycles.rig.effects, Inquire)}
    assert (asked == {donor}) is (patience == 0.0)
    assert death(TIMING) < 7 * 8.0


def test_r15_what_comes_too_late_for_a_fragments_entry_goes_into_its_next_one_and_no_further() -> None:
    cycles = Cycles().training()
    cycles.makes("ab", [0])
    assert not sends(cycles.rig.do(Captured(0, CAPTURED)), Ready)
    assert cycles.rig.peer.trainer.captures.keeps(0), "workers get the new values: they need not train it anew"
    cycles.makes("ab", [1, 2])
    assert cycles.rig.peer.state is State.TRAINING
    assert cycles.says() == {0: TOKENS}
    cycles.rig.do(Captured(1, CAPTURED))
    assert cycles.says() == {0: TOKENS, 1: TOKENS}, "in time for another cycle than its lease's"
    cycles.makes("abc", [0, 1])
    cycles.makes("ab", [2])
    assert cycles.rig.peer.log.age("c") == 2
    assert cycles.says() == {0: 0, 1: 0}, "it has its say, and gives nothing twice"


SKIPPED: dict[str, tuple[list[Any], dict[int, int]]] = {
    "after it was captured": (["capture", ("skip", 0), ("ab", 1, 2)], {0: 0}),
    "before it was captured": ([("skip", 0), ("ab", 1, 2), "capture"], {0: 0}),
    "after an entry was missed": (
        [("ab", 0), "capture", ("ab", 1, 2), ("skip", 0), ("ab", 1, 2)],
        {0: TOKENS},
    ),
    "not at all": (["capture", ("abc", 0), ("ab", 1, 2)], {0: 0}),
}


@pytest.mark.parametrize("when", SKIPPED)
def test_r15_nothing_of_a_skipped_fragment_counts_twice_or_is_lost(when: str) -> None:
    """Workers go on with what they have, and capture all of it once more; but not where they have gone on from a missed
    entry's values."""
    steps, said = SKIPPED[when]
    cycles = Cycles().training()
    for step in steps:
        if step == "capture":
            cycles.rig.do(Captured(0, CAPTURED))
        else:
            names, *fragments = step
            skips = names == "skip"
            cycles.makes("ab" if skips else names, fragments, NO_PAYLOAD if skips else PAYLOAD)
    assert cycles.says() == said


def test_r15_a_new_lease_begins_with_nothing_captured() -> None:
    cycles = Cycles().training()
    cycles.makes("ab", [0])
    cycles.rig.do(Captured(0, CAPTURED))
    cycles.makes("abc", [1, 2])
    assert cycles.rig.peer.state is State.TRAINING
    assert not cycles.says()
    assert not cycles.rig.peer.trainer.captures.keeps(0)


@pytest.mark.parametrize("begins_anew", [False, True])
def test_r12_a_late_worker_that_hangs_is_noticed_unless_it_waits_for_its_cycles_averages(begins_anew: bool) -> None:
    """Regression: a worker that had begun an old lease anew waited for an average, and its peer gave its say up."""
    cycles = Cycles().training()
    if begins_anew:
        cycles.makes("abc", range(3))  # no worker shows that it has begun with the next lease
        cycles.makes("ab", range(3))
        cycles.rig.do(PROGRESS)
        cycles.rig.do(Captured(0, CAPTURED))
    else:
        cycles.makes("ab", [0])
        cycles.rig.do(Captured(0, CAPTURED))
        cycles.makes("ab", [1, 2])
    was_stuck = False
    for _ in range(int(TIMING.partition_grace) + 2):
        cycles.rig.tick()
        cycles.see()
        was_stuck |= cycles.rig.peer.trainer.is_stuck
    assert was_stuck is not begins_anew


# The volunteer is told -----------------------------------------------------------------------------------------------
def test_an_average_that_is_wrong_is_told_to_the_volunteer() -> None:
    rig = Rig("c", "ab").joined().trained().exchanging()
    assert rig.peer.exchange is not None
    (note,) = of(rig.do(AverageRefuted(rig.peer.exchange.name, "a", 4)), Note)
    assert note.level == "warning"
    assert note.text.startswith("a averaged chunk 4")


# Amendments (R18) ----------------------------------------------------------------------------------------------------
ORGANISER, STRANGER = Identity.of_seed(bytes(32)), Identity.of_seed(bytes(31) + b"1")
AMENDABLE = replace(SETTINGS, organiser=ORGANISER.peer_id)


def amendment(number: int = 1, learning_rate: float = 0.4, by: Identity = ORGANISER) -> Amendment:
    return Amendment.sign(RUN, number, b"%g" % learning_rate, by)


def amended(taken_in: Amendment | None) -> LogState:
    log = AMENDABLE.empty_log
    return log.append(next_header(log, roster(LOG), amendment=taken_in))


def test_r18_the_newest_amendment_waits_until_the_log_has_it() -> None:
    known = Amending(AMENDABLE)
    assert known.proposed(amended(None)) is None
    assert known.hear(amendment(2))
    for other in (amendment(1), amendment(2, 0.5), None, amendment(3, by=STRANGER)):
        assert not known.hear(other), "older, second with its number, none, or forged"
    assert known.proposed(amended(None)) == known.proposed(amended(amendment(1))) == amendment(2)
    for newer in (amendment(2), amendment(2, 0.5), amendment(3)):
        assert known.proposed(amended(newer)) is None


@pytest.mark.parametrize("field", ["amendment", "proposed", None])
def test_r18_a_peer_hears_of_it_in_heartbeats_or_from_its_own_machine(field: str | None) -> None:
    def hears(rig: Rig, what: Amendment) -> None:
        rig.sequence += 1
        said: dict[str, Any] = {field: what} if field else {}
        told = beat("a", LOG, sequence=rig.sequence, **said)
        rig.do(HeartbeatsSeen((told,)) if field else AmendmentSeen(what))

    rig = Rig("c", "ab", AMENDABLE).joined()
    hears(rig, amendment(by=STRANGER))
    assert rig.peer.proposed_amendment is None
    hears(rig, amendment())
    assert rig.peer.proposed_amendment == amendment()
    assert any("the next outer step can take it in" in note.text for note in of(rig.effects, Note))
    hears(rig, amendment())
    assert not of(rig.effects, Note), "it is said once"


def test_r18_a_peer_warns_once_of_an_amendment_that_it_cannot_follow_and_keeps_the_one_before() -> None:
    settings = replace(AMENDABLE, why_not_followed=lambda given: "It is too new." * (given.number > 1))
    rig = Rig("c", "ab", settings).joined()
    rig.do(AmendmentSeen(amendment(1)))
    rig.do(AmendmentSeen(amendment(2)))
    assert [(note.level, note.text) for note in of(rig.effects, Note)] == [
        ("warning", "It is too new. This peer does not vote for it.")
    ]
    rig.do(AmendmentSeen(amendment(2)))
    assert not of(rig.effects, Note)
    assert rig.peer.proposed_amendment == amendment(1)


def test_r5_a_member_does_not_vote_for_an_amendment_that_it_cannot_follow() -> None:
    settings = replace(AMENDABLE, why_not_followed=lambda given: "It is too new.")
    rig = Rig("c", "ab", settings).joined().trained().exchanging().whole()
    assert rig.peer.exchange is not None
    header = rig.log.next_header(roster(rig.log), PAYLOAD, "a", amendment=amendment())
    effects = rig.hear("a", propose(header, round=rig.peer.exchange.round, marks=rig.marks))
    assert not sends(effects, Vote)
    assert Refusal.NOT_FOLLOWED.value in [ready.reason for _, ready in sends(effects, Ready)]


@pytest.mark.parametrize("by", [ORGANISER, STRANGER], ids=["signed", "forged"])
def test_r18_a_member_votes_for_what_the_organiser_has_signed_and_it_is_in_force_a_cycle_later(by: Identity) -> None:
    """It hears of it in the proposal alone."""
    rig = Rig("c", "ab", AMENDABLE).joined().trained().exchanging().whole()
    assert rig.peer.exchange is not None
    try:
        header = rig.log.next_header(roster(rig.log), PAYLOAD, "a", amendment=amendment(by=by))
    except ValueError:
        header = rig.next_header().model_copy(
            update={"amendments": (LoggedAmendment(amendment=amendment(by=by), cursor=0),)}
        )
    effects = rig.hear("a", propose(header, round=rig.peer.exchange.round, marks=rig.marks))
    assert bool(sends(effects, Vote)) is (by is ORGANISER)
    if by is ORGANISER:
        (apply,) = of(rig.committed(header), Apply)
        assert apply.amendment is None, "it was not in force in this cycle"
        assert rig.peer.log.amendment == amendment()
