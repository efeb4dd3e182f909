"""One peer in a cycle of several entries: what becomes of the others when one of them was made without it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from peers.log.header import NO_PAYLOAD, Header, Member
from peers.log.lineage import Lineage
from peers.log.settings import RunSettings
from peers.log.state import LogState, take_order
from peers.presence.heartbeat import PeerState
from peers.presence.presence import Presence
from peers.protocol.desk import Desk
from peers.protocol.effects import Apply, FetchPayload, StopTraining, TokensLost
from peers.protocol.events import (
    Applied,
    Captured,
    Digested,
    HeartbeatsSeen,
    PayloadFetched,
    PayloadNotFetched,
    TrainingDone,
    TrainingProgress,
)
from peers.protocol.internal import Behind, EntryMade, NobodyAhead
from peers.protocol.messages import Inquire, Ready
from peers.protocol.replica import Replica, ReplicaState
from peers.protocol.schedule import Schedule
from peers.protocol.slot import SlotState
from peers.protocol.states import State
from peers.values.leases import SampleRange
from peers.values.workload import Progress, Trained
from tests.peers.builders import (
    PAYLOAD,
    PAYLOADS,
    SETTINGS,
    STATE,
    TIMING,
    TOKENS,
    Rig,
    beat,
    commit,
    member,
    of,
    sends,
    trained,
)
from tests.simulator.simulated_keys import SimulatedKeys

TWO = replace(SETTINGS, fragments=2)
THREE = replace(SETTINGS, fragments=3, staleness=3)
CAPTURED = Trained((), TOKENS, 1.0)
OFFERS = tuple(Member(peer=name, tokens=TOKENS, samples=()) for name in "abc")


def entry(rig: Rig, fragment: int = 0) -> Header:
    return rig.peer.log.of(fragment).next_header(OFFERS, PAYLOAD)


def told_of_an_entry() -> tuple[Rig, Header]:
    """b trains, and is in a round of the first fragment; its leader has made the entry without it."""
    rig = Rig(settings=THREE).joined()
    rig.do(Captured(0, CAPTURED))
    rig.do(Captured(1, CAPTURED))
    rig.see(state=PeerState.READY)
    header = entry(rig)
    [fetch] = of(rig.hear("a", commit(rig.peer.log, header)), FetchPayload)
    assert fetch.donors == ("a", "c"), "of who is in the cycle heartbeats do not tell which entries it has"
    assert rig.is_in(State.REPLAYING)
    return rig, header


def test_an_entry_that_cannot_be_replayed_costs_neither_work_nor_promises() -> None:
    """Regression: who had heard of an entry from a leader that died forgot what it held of the cycle's others, and
    dropped what it trained: two of four were left that counted, and waited for ever."""
    rig, header = told_of_an_entry()
    before = dict(rig.peer.slots)
    effects = rig.do(PayloadNotFetched(header, "nobody has it"))
    assert not of(effects, StopTraining) + of(effects, TokensLost)
    assert rig.is_in(State.TRAINING)
    assert rig.peer.slots == before
    assert before[0].acceptor.pledged_to == "a"
    assert of(rig.hear("a", commit(rig.peer.log, header)), FetchPayload), "it is told again"


def test_an_entry_that_was_replayed_ends_its_slot_alone() -> None:
    rig, header = told_of_an_entry()
    others = [rig.peer.slots[fragment] for fragment in (1, 2)]
    rig.do(PayloadFetched(header))
    rig.do(Applied(header))
    assert list(rig.peer.slots.values()) == others
    assert others[0].state is SlotState.READY


def newcomer_behind(settings: RunSettings) -> tuple[Rig, list[Header], LogState]:
    """A peer that has just come, the entries of the first cycle, and the log after them, where others are."""
    rig = Rig(settings=settings)
    rig.see(state=PeerState.JOINING)
    end = rig.peer.log
    closing = [member(name, 20 * place, 20 * place + 20) for place, name in enumerate("abc")]
    rosters = [*[OFFERS] * (settings.fragments - 1), closing]
    headers = [end.of(fragment).next_header(roster, PAYLOAD) for fragment, roster in enumerate(rosters)]
    for header in headers:
        end = end.of(header.fragment).append(header)
    return rig, headers, end


def tell(rig: Rig, donor: str, header: Header, after: float = 0.0) -> list[tuple[str, Inquire]]:
    """The donor tells of an entry that is fetched and applied. Returns what is asked then."""
    told = commit(rig.peer.log.of(header.fragment), header)
    assert of(rig.hear(donor, told, after), FetchPayload)
    rig.do(PayloadFetched(header))
    return sends(rig.do(Applied(header)), Inquire)


def test_a_newcomer_asks_for_one_fragments_entry_after_the_other_at_once() -> None:
    """Regression: it asked once a heartbeat, and never came to where peers with shorter cycles were."""
    rig, headers, end = newcomer_behind(THREE)
    inquiries = sends(rig.see(end), Inquire)
    for header in headers:
        [(donor, inquiry)] = inquiries
        assert inquiry.position.fragment == header.fragment
        inquiries = tell(rig, donor, header)
    assert rig.peer.log.position.is_in_cycle_of(end.position)


def test_a_donor_that_tells_each_entry_at_the_last_moment_is_passed_over() -> None:
    """Its patience is that of the whole cycle: eight entries, eight seconds each, are more than a newcomer waits."""
    rig, headers, end = newcomer_behind(replace(SETTINGS, fragments=8))
    [(donor, _)] = sends(rig.see(end), Inquire)
    for header in headers:
        asked = {one for one, _ in tell(rig, donor, header, after=8.0) + sends(rig.see(end), Inquire)}
        if asked - {donor}:
            return
    raise AssertionError(f"nobody but {donor} was asked")


def test_the_time_that_payloads_take_is_not_the_donors() -> None:
    """A donor that tells at once is asked to the end, however long each payload takes to come."""
    rig, headers, end = newcomer_behind(replace(SETTINGS, fragments=8))
    [(donor, _)] = sends(rig.see(end), Inquire)
    for header in headers[:-1]:
        assert of(rig.hear(donor, commit(rig.peer.log.of(header.fragment), header)), FetchPayload)
        rig.now += 8.0
        rig.see(end)
        rig.do(PayloadFetched(header))
        assert {one for one, _ in sends(rig.do(Applied(header)), Inquire)} == {donor}


def test_claimants_that_take_turns_are_passed_over_each_by_itself() -> None:
    """Regression: the clock began anew whenever another one was asked, so that two liars kept a newcomer for ever."""
    rig, _, end = newcomer_behind(SETTINGS)
    asked = set[str]()
    while "d" not in asked:
        rig.sequence += 1
        claims = {"a": 3 + rig.sequence // 3 % 2, "c": 4 - rig.sequence // 3 % 2, "d": 1}
        said = [
            beat(peer, end, sequence=rig.sequence).model_copy(update={"lineage_tokens": tokens})
            for peer, tokens in claims.items()
        ]
        asked |= {to for to, _ in sends(rig.do(HeartbeatsSeen(tuple(said)), TIMING.heartbeat), Inquire)}
        assert rig.now <= 3 * Schedule(TIMING).death, "each has its own patience, and no more"
    assert asked == {"a", "c", "d"}


def test_who_was_passed_over_has_one_question_the_next_time() -> None:
    rig, _, end = newcomer_behind(SETTINGS)
    asked_at = []
    while rig.now < 2 * Schedule(TIMING).death + TIMING.heartbeat_expiry:
        rig.now += TIMING.heartbeat
        asked_at += [rig.now for _ in sends(rig.see(end, others="a"), Inquire)]
    late = [when for when in asked_at if when > asked_at[0] + Schedule(TIMING).death]
    assert len(asked_at) - len(late) == 1 + Schedule(TIMING).death // TIMING.heartbeat, "first it has its time"
    assert len(late) == 1


def replica_of_two(fragments: int = 2) -> tuple[Replica, Desk]:
    desk = Desk("b", TWO, PAYLOADS * 2, 0.0, incarnation=0, keys=SimulatedKeys("b"))
    log = replace(TWO, fragments=fragments).empty_log
    return Replica(desk, Presence("b", 10.0, 10.0, bar=10.0, now=0.0), Lineage(log), STATE), desk


def test_what_is_made_while_another_entry_cannot_be_replayed_is_applied() -> None:
    replica, desk = replica_of_two(fragments=3)
    first, second = (replica.log.of(fragment).next_header(OFFERS, PAYLOAD) for fragment in (0, 1))
    replica.take(Behind(first, None, ("a",)))
    replica.take(EntryMade(second, None, keeps_work=True))
    replica.take(NobodyAhead())
    assert replica.state is ReplicaState.APPLYING
    assert of(desk.take_effects(), Apply) == [Apply(second, True)]


class Late:
    """b among a and c, in cycles of three fragments. What others make it hears, fetches and applies."""

    def __init__(self) -> None:
        self.rig = Rig(settings=THREE).joined()
        self.rig.do(TrainingDone(trained(self.rig.lease)))
        self.makes("abc", range(3))
        self.rig.do(TrainingProgress(Progress(1, 1.0, 10.0)))

    def makes(self, names: str, fragments: Iterable[int], payload: bytes = PAYLOAD, missed: int = 0) -> None:
        """Entries of the present cycle are made of what these have trained, all of their leases. Of what b has trained
        so many chunks are `missed`."""
        rig = self.rig
        for fragment in fragments:
            log, header = rig.peer.log.of(fragment), self.next_header(names, fragment, payload, missed)
            self.see(further=1)
            rig.hear("a", commit(log, header))
            if payload != NO_PAYLOAD:
                rig.do(PayloadFetched(header))
            rig.do(Applied(header))
            if not rig.peer.log.made:
                assert rig.peer.log.last is not None
                rig.do(Digested(rig.peer.log.last, STATE))
            self.see()

    def next_header(self, names: str, fragment: int, payload: bytes = PAYLOAD, missed: int = 0) -> Header:
        """Return the entry that is made of what these have trained."""
        log = self.rig.peer.log.of(fragment)
        leases = log.leases or {name: (SampleRange(20 * place, 20 * place + 20),) for place, name in enumerate("abc")}
        offers = [
            Member(peer=name, tokens=TOKENS * (payload != NO_PAYLOAD), samples=leases[name] if log.closes else ())
            for name in take_order(log.roster, names)
        ]
        return log.next_header([one.lacking(missed if one.peer == "b" else 0) for one in offers], payload)

    def see(self, further: int = 0) -> None:
        """See where the others are: with b, or so many cycles further."""
        log, self.rig.sequence = self.rig.peer.log, self.rig.sequence + 1
        index = log.position.index + further
        seen = [beat(peer, log, sequence=self.rig.sequence).model_copy(update={"index": index}) for peer in "ac"]
        self.rig.do(HeartbeatsSeen(tuple(seen)))

    def says(self) -> dict[int, int]:
        """Return the tokens that b is ready with, by fragment."""
        return {ready.position.fragment: ready.tokens for _, ready in sends(self.rig.tick(), Ready)}


def test_what_comes_too_late_for_a_fragments_entry_goes_into_its_next_one_and_no_further() -> None:
    late = Late()
    late.makes("ac", [0])
    assert not sends(late.rig.do(Captured(0, CAPTURED)), Ready)
    assert late.rig.peer.keeps(0), "workers get the new values: they need not train it anew"
    late.makes("ac", [1, 2])
    assert late.rig.is_in(State.TRAINING)
    assert late.says() == {0: TOKENS}
    late.rig.do(Captured(1, CAPTURED))
    assert late.says() == {0: TOKENS, 1: TOKENS}, "that is in time for another cycle than its lease's"
    late.makes("abc", [0, 1])
    late.makes("ac", [2])
    assert late.rig.peer.log.age("b") == 2
    assert late.says() == {0: 0, 1: 0}, "it has its say, and gives nothing twice"


def test_what_is_in_an_entry_in_part_goes_into_no_other() -> None:
    """Regression: whoever was lost amid the exchange gave all of it once more, and some chunks counted twice."""
    late = Late()
    late.rig.do(Captured(0, CAPTURED))
    assert late.says() == {0: TOKENS}
    late.makes("abc", [0], missed=1)
    late.makes("ac", [1, 2])
    assert late.says() == {0: 0}


def test_a_late_worker_that_hangs_is_noticed_though_its_peer_is_ready() -> None:
    """It waits for none of the averages that take what it has learned."""
    late = Late()
    late.makes("ac", [0])
    late.rig.do(Captured(0, CAPTURED))
    late.makes("ac", [1, 2])
    for _ in range(int(TIMING.partition_grace) + 2):
        assert not late.rig.peer.trainer.is_stuck
        late.rig.tick()
        late.see()
        if late.rig.peer.trainer.is_stuck:
            return
    raise AssertionError("its worker has shown nothing for longer than ever")


def test_whoever_begins_an_old_lease_anew_waits_for_the_averages_of_the_cycle_that_it_begins_in() -> None:
    """Regression: its lease was late, so the time that an average took was its worker's. After a minute of that it gave
    its say up."""
    late = Late()
    late.makes("abc", range(3))  # no worker shows that it has begun with the next lease
    late.makes("ac", range(3))
    assert late.rig.peer.log.age("b") == 1
    late.rig.do(TrainingProgress(Progress(1, 1.0, 10.0)))
    late.rig.do(Captured(0, CAPTURED))
    for _ in range(int(TIMING.partition_grace) + 2):
        late.rig.tick()
        late.see()
        assert not late.rig.peer.trainer.is_stuck


def test_what_a_skipped_fragment_was_captured_for_is_captured_once_more() -> None:
    """Workers are told to go on with what they have: all of it is in their next capture."""
    late = Late()
    late.rig.do(Captured(0, CAPTURED))
    assert late.says() == {0: TOKENS}
    late.makes("ac", [0], NO_PAYLOAD)
    late.makes("ac", [1, 2])
    assert late.says() == {0: 0}


def test_of_a_fragment_that_was_skipped_before_it_was_captured_all_is_captured_once_more() -> None:
    """Regression: workers went on with what they had, as if nobody took it; and it went into the next entry, too."""
    late = Late()
    late.makes("ac", [0], NO_PAYLOAD)
    late.makes("ac", [1, 2])
    late.rig.do(Captured(0, CAPTURED))
    assert not late.rig.peer.keeps(0)
    assert late.says() == {0: 0}


def test_where_an_entry_was_missed_a_skipped_one_costs_nothing() -> None:
    """Workers have gone on from the new values: they capture no more what they had learned before."""
    late = Late()
    late.makes("ac", [0])
    late.rig.do(Captured(0, CAPTURED))
    late.makes("ac", [1, 2])
    late.makes("ac", [0], NO_PAYLOAD)
    late.makes("ac", [1, 2])
    assert late.says() == {0: TOKENS}


def test_a_new_lease_begins_with_nothing_captured() -> None:
    late = Late()
    late.makes("ac", [0])
    late.rig.do(Captured(0, CAPTURED))
    late.makes("abc", [1, 2])
    assert late.rig.is_in(State.TRAINING)
    assert not late.says()
    assert not late.rig.peer.keeps(0)


def test_whoever_begins_in_the_midst_of_a_cycle_waits_for_no_average_that_it_has_had() -> None:
    """Regression: workers that began when the cycle had the entry of their first fragment waited for that of the next
    cycle. So they were late for this one, whose closing entry may have needed them."""
    late = Late()
    rig = late.rig
    late.makes("ac", [0])
    late.see(further=1)
    header = late.next_header("ac", 2)
    rig.hear("a", commit(rig.peer.log.of(2), header))
    late.see()  # who has had it is gone
    rig.do(PayloadNotFetched(header, "nobody has it"))
    rig.tick()
    assert rig.is_in(State.TRAINING), "it begins anew with its lease"
    rig.do(TrainingProgress(Progress(1, 1.0, 10.0)))
    rig.do(Captured(0, CAPTURED))
    assert not rig.peer.keeps(0), "workers go on with what they have learned of it"
    rig.do(Captured(1, CAPTURED))
    assert late.says() == {1: TOKENS}
    late.makes("ac", [1, 2])
    assert late.says() == {0: 0, 1: TOKENS}, "what they have learned of it since is not counted twice"


def test_who_is_late_for_a_cycles_closing_entry_alone_has_its_say_in_the_others() -> None:
    """Regression: workers waited for the average of a fragment for which their peer did not say that it was ready."""
    late = Late()
    late.makes("ac", [2])
    assert late.rig.is_in(State.TRAINING)
    late.rig.do(Captured(0, CAPTURED))
    assert late.rig.peer.keeps(0)
    assert late.says() == {0: TOKENS}
