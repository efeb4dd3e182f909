"""What a peer says is lost of what it trained."""

from __future__ import annotations

import pytest

from peers.log.folder import RunLog
from peers.protocol.effects import Effect, TokensLost
from peers.protocol.events import PayloadFetched, PayloadNotFetched, SnapshotRestored, TrainingProgress, Undelivered
from peers.protocol.peer import Peer
from peers.values.workload import Progress
from tests.peers.builders import PAYLOADS, of
from tests.peers.log.test_lineage import THEIRS, digests, kept
from tests.peers.logs import LOG, SETTINGS, STATE, TOKENS, next_header
from tests.peers.protocol.test_peer import OTHER, ahead_by, at_second, fetching, told
from tests.simulator.simulated_keys import SimulatedKeys


def lost(effects: list[Effect]) -> list[tuple[str, int]]:
    return [(loss.what, loss.tokens) for loss in of(effects, TokensLost)]


def test_our_tokens_in_the_entries_of_a_lineage_that_we_leave_are_lost() -> None:
    """The other lineage has another first entry. Of ours the tokens of a and c are theirs to count."""
    rig = fetching(at_second().trained())
    assert lost(rig.effects) == [("work", TOKENS)]
    (loss,) = of(rig.do(SnapshotRestored("c", THEIRS[-1], OTHER, digests(THEIRS))), TokensLost)
    assert (loss.what, loss.tokens) == ("entries", TOKENS)
    assert loss.reason == "our entries from 0 on are not in the lineage of c"


def test_nothing_in_the_log_is_lost_to_who_only_was_far_behind() -> None:
    rig = fetching(at_second().trained())
    assert rig.peer.log.last is not None
    entry = rig.peer.log.last
    last = ahead_by(rig, 1).last
    assert last is not None
    assert lost(rig.do(SnapshotRestored("c", last, OTHER, (entry.digest, last.digest)))) == []


@pytest.mark.parametrize(("steps", "tokens"), [(1, 10), (3, 30), (99, 100)])
def test_what_was_trained_of_a_lease_is_lost_with_it(steps: int, tokens: int) -> None:
    """Of ten inner steps, each on two samples of five tokens."""
    rig = at_second()
    rig.do(TrainingProgress(Progress(steps, 1.0, 1.0)))
    assert lost(fetching(rig).effects) == [("work", tokens)]


def test_nothing_is_lost_before_anything_was_trained() -> None:
    assert lost(fetching(at_second()).effects) == []


def test_what_is_kept_for_a_later_entry_is_not_lost_until_that_is_made_without_it() -> None:
    rig = at_second().trained()
    missed = told(rig)
    assert lost([*rig.effects, *rig.do(PayloadFetched(missed)), *rig.step(missed)]) == []
    missed = told(rig)
    assert lost(rig.effects) == [("work", TOKENS)]
    assert lost(rig.do(PayloadFetched(missed))) == [], "once"


def test_what_is_kept_is_lost_if_nobody_has_the_payload_and_nobody_is_left() -> None:
    rig = at_second().trained()
    told(rig)
    for name in "ac":
        rig.do(Undelivered(name))
    assert rig.peer.replica.replaying is not None
    assert lost(rig.do(PayloadNotFetched(rig.peer.replica.replaying, "gone"))) == [("work", TOKENS)]


@pytest.mark.parametrize(("counted", "expected"), [(TOKENS, []), (1, []), (0, [("work", TOKENS)])])
def test_work_in_an_entry_that_was_made_without_us_counts_if_any_of_it_is_there(
    counted: int, expected: list[tuple[str, int]]
) -> None:
    """The others took us for dead when they had our blocks."""
    rig = at_second().trained().averaging()
    roster = [one.model_copy(update={"tokens": counted}) if one.peer == "b" else one for one in rig.roster()]
    header = next_header(rig.peer.log, roster, OTHER)
    rig.see(rig.peer.log.append(header))
    assert lost(rig.hear("c", rig.commit(header))) == expected


def test_work_in_the_entry_that_we_applied_is_not_lost() -> None:
    rig = at_second().trained().averaging().holding().applying()
    assert lost(rig.effects) == []
    assert rig.peer.log.last is not None
    assert rig.peer.log.last.tokens_of("b") == TOKENS


def test_a_minority_that_starts_again_says_so() -> None:
    log = RunLog(LOG)
    lineage = log.lineage(kept(log, "a"))
    peer = Peer("a", SETTINGS, PAYLOADS, STATE, 0.0, 1, SimulatedKeys("a"), lineage)
    assert peer.replica.is_of_minority
    assert (peer.log, peer.settled) == (lineage.log, lineage.log)
