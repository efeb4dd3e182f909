"""Which proofs a peer remembers, and which of them an entry may name."""

from __future__ import annotations

from dataclasses import replace

import pytest

from peers.log.header import FAULT_LIMIT, Position
from peers.log.lineage import RECENT_ENTRIES, Lineage
from peers.log.state import LogState
from peers.protocol import docket as docket_module
from peers.protocol.commitment import commit_to
from peers.protocol.docket import KEPT, OF_ONE, Docket, FalseProofError
from peers.protocol.faults import TwoCommitments
from peers.values.chunks import Sum
from peers.values.wire import digest_of, pack
from tests.peers.builders import COURT, LOG, PAYLOAD, first_log, member
from tests.peers.builders import author as author_of
from tests.simulator.simulated_keys import SimulatedKeys

HERE = first_log()


def proof(peer: str = "c", position: Position = HERE.position, seed: int = 0) -> TwoCommitments:
    author = author_of(peer, 0, position)
    roots = [Sum(digest_of(b"%d %d" % (seed, which)), 1.0) for which in range(2)]
    first, second = (commit_to(root, author, SimulatedKeys(peer)) for root in roots)
    return TwoCommitments(author=author, first=first, second=second)


def lineage_of(log: LogState, entries: int = 0) -> Lineage:
    """A log that goes on for so many entries, in which everybody takes part."""
    lineage = Lineage(log)
    for number in range(entries):
        roster = [log.expected(peer) for peer in log.roster]
        header = log.next_header(roster, digest_of(b"%d" % number))
        log = log.append(header)
        lineage.append(header, log)
    return lineage


def taken(shown: TwoCommitments, lineage: Lineage) -> Docket:
    docket = Docket(COURT)
    docket.take(shown.kind, pack(shown), lineage)
    return docket


def test_what_is_proven_may_be_named_and_is_shown() -> None:
    shown, lineage = proof(), Lineage(HERE)
    docket = Docket(COURT)
    assert not docket.has([shown.fault], lineage)
    assert docket.take(shown.kind, pack(shown), lineage) == shown.fault
    assert docket.take(shown.kind, pack(shown), lineage) is None, "it is known"
    assert docket.provable(HERE, lineage, "ab") == (shown.fault,)
    assert docket.has([shown.fault], lineage)
    (known,) = docket.behind([shown.fault])
    assert known.at(HERE.position).proof == pack(shown)


def test_members_and_peers_without_a_lease_are_not_named() -> None:
    lineage = Lineage(HERE)
    docket = taken(proof(), lineage)
    assert docket.provable(HERE, lineage, "abc") == ()
    assert taken(proof("z"), lineage).provable(HERE, lineage, "ab") == ()


@pytest.mark.parametrize("kind", ["commitments", "averages", "none"])
def test_what_proves_nothing_is_refused(kind: str) -> None:
    same = proof().model_copy(update={"second": proof().first})
    with pytest.raises(FalseProofError):
        Docket(COURT).take(kind, pack(same), Lineage(HERE))


def test_another_fault_than_the_proven_one_is_not_proven() -> None:
    lineage, fault = Lineage(HERE), proof().fault
    docket = taken(proof(), lineage)
    assert not docket.has([fault.model_copy(update={"peer": "a"})], lineage)
    assert not docket.has([fault.model_copy(update={"kind": "averages"})], lineage)
    assert not docket.has([fault, proof("a").fault], lineage)
    assert docket.has([], lineage)


@pytest.mark.parametrize(
    "position",
    [
        Position(index=HERE.position.index, head=digest_of(b"another run")),
        Position(index=HERE.position.index + 1, head=HERE.position.head),
        Position(index=2**61, head=HERE.position.head),
    ],
)
def test_a_lie_elsewhere_proves_nothing_here_and_whoever_shows_it_need_not_know(position: Position) -> None:
    lineage, shown = Lineage(HERE), proof(position=position)
    assert Docket(COURT).take(shown.kind, pack(shown), lineage) is None
    assert not taken(shown, lineage).has([shown.fault], lineage)


@pytest.mark.parametrize("exclusion", [3, 1000])
def test_a_lie_is_told_once(exclusion: int) -> None:
    """While it is recent enough to be named, whoever was excluded for it still is."""
    log = replace(HERE, exclusion=exclusion)
    window = min(exclusion, RECENT_ENTRIES)
    recent, late = lineage_of(log, window - 1), lineage_of(log, window)
    assert taken(proof(), recent).provable(recent.log, recent, "ab")
    assert not taken(proof(), late).provable(late.log, late, "ab")
    docket = taken(proof(), recent)
    assert not docket.has([proof().fault], late), "it grows old"


def test_whoever_knows_few_heads_judges_as_all_others_once_its_log_has_told_it_the_rest() -> None:
    """Regression: a peer that began in the middle took part in no entry that named somebody for a lie before."""
    whole = lineage_of(HERE, 5)
    lineage = Lineage(whole.log)
    for index, head in enumerate(whole.heads, HERE.position.index):
        shown = proof(position=Position(index=index, head=head))
        assert taken(shown, whole).has([shown.fault], whole)
        assert taken(shown, lineage).has([shown.fault], lineage) == (index == whole.log.position.index)
    lineage.recall(lineage.known_from, whole.heads)
    for index, head in enumerate(whole.heads, HERE.position.index):
        shown = proof(position=Position(index=index, head=head))
        assert taken(shown, lineage).has([shown.fault], lineage)
        other = proof(position=Position(index=index, head=digest_of(b"another log")))
        assert not taken(other, lineage).has([other.fault], lineage)


def test_whoever_is_excluded_already_is_not_judged_again() -> None:
    docket = taken(proof(), Lineage(HERE))
    header = HERE.next_header([HERE.expected(peer) for peer in "ab"], PAYLOAD, [proof().fault])
    lineage = Lineage(HERE)
    lineage.append(header, HERE.append(header))
    other = proof(seed=1)
    assert docket.take(other.kind, pack(other), lineage) is None
    forged = other.model_copy(update={"second": other.first})
    assert docket.take(forged.kind, pack(forged), lineage) is None


def test_a_run_without_exclusions_names_nobody() -> None:
    log = replace(HERE, exclusion=0)
    assert taken(proof(), Lineage(log)).provable(log, Lineage(log), "ab") == ()


def test_who_floods_others_with_proofs_fills_no_memory() -> None:
    names = [f"liar{number:04}" for number in range(KEPT)]
    roster = [member(name, 20 * n, 20 * n + 20) for n, name in enumerate(["c", *names])]
    log = LOG.append(LOG.next_header(roster, PAYLOAD))
    lineage, docket = Lineage(log), Docket(COURT)
    faults = []
    for seed in range(2 * OF_ONE):
        shown = proof("c", log.position, seed)
        faults.append(shown.fault)
        docket.file(shown, lineage)
        assert docket.has([faults[0], faults[-1]], lineage), "what we may have named, and what another one may"
    assert sum(docket.has([fault], lineage) for fault in faults) == OF_ONE
    for name in names:
        docket.file(proof(name, log.position), lineage)
    assert not docket.has([faults[-1]], lineage)
    assert docket.has([proof(name, log.position).fault for name in names], lineage)


def test_nobody_is_remembered_whom_no_entry_can_name() -> None:
    lineage, docket = Lineage(HERE), Docket(COURT)
    made_up = proof("z")
    assert docket.take(made_up.kind, pack(made_up), lineage) is None
    assert docket.file(made_up, lineage) is None
    assert not docket.has([made_up.fault], lineage)


def test_an_entry_names_a_few() -> None:
    peers = [f"p{number}" for number in range(FAULT_LIMIT + 2)]
    roster = [member(peer, 20 * place, 20 * place + 20) for place, peer in enumerate(["a", *peers])]
    log = LOG.append(LOG.next_header(roster, PAYLOAD))
    lineage, docket = Lineage(log), Docket(COURT)
    for peer in peers:
        docket.file(proof(peer, log.position), lineage)
    faults = docket.provable(log, lineage, "a")
    assert [fault.peer for fault in faults] == peers[:FAULT_LIMIT]
    assert log.next_header([log.expected("a")], PAYLOAD, faults).faults == faults


def test_what_costs_too_much_to_show_is_not_named(monkeypatch: pytest.MonkeyPatch) -> None:
    lineage = Lineage(HERE)
    docket = taken(proof(), lineage)
    monkeypatch.setattr(docket_module, "SHOWN_BYTES", 2 * len(pack(proof())) - 1)
    assert docket.provable(HERE, lineage, "a")
    assert not docket.provable(HERE, lineage, "ab")
