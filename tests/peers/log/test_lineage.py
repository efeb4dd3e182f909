"""The end of the log as a peer has seen it, and what it knows of it when it starts again."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from peers.log.folder import LogFolder, RunLog
from peers.log.header import Header, Member
from peers.log.lineage import RECENT_ENTRIES, Lineage
from peers.log.state import LogState
from peers.values.wire import digest_of
from tests.peers.logs import LOG, PAYLOAD, TOKENS, certificate, first_log, next_header


def entries_after(log: LogState, *names: str) -> list[Header]:
    """One entry for each name, of a round of peers that are called so."""
    headers = []
    for name in names:
        roster = [Member(peer=name, tokens=TOKENS, samples=log.grants[0])]
        headers.append(next_header(log, roster, digest_of(name.encode())))
        log = log.append(headers[-1])
    return headers


def digests(headers: Sequence[Header]) -> tuple[bytes, ...]:
    return tuple(header.digest for header in headers)


def lineage_of(headers: Sequence[Header]) -> Lineage:
    lineage = Lineage(LOG)
    log = LOG
    for header in headers:
        log = log.append(header)
        lineage.append(header, log)
    return lineage


# The lineage ---------------------------------------------------------------------------------------------------
COMMON = entries_after(LOG, "a", "b", "c")
OURS = [*COMMON, *entries_after(LOG.at(COMMON[-1]), "d", "e")]
THEIRS = [*COMMON, *entries_after(LOG.at(COMMON[-1]), "f", "g", "h", "i")]


def short(headers: Sequence[Header], known: int) -> Lineage:
    """The lineage of a peer that began with the state before the last entries, of which it knows so many."""
    log = LOG.at(headers[-known - 1])
    lineage = Lineage(log)
    for header in headers[-known:]:
        log = log.append(header)
        lineage.append(header, log)
    return lineage


@pytest.mark.parametrize("count", [5, RECENT_ENTRIES + 7])
def test_heads_that_the_log_has_kept_fill_in_what_a_lineage_does_not_know(count: int) -> None:
    headers = entries_after(LOG, *("abc"[place % 3] for place in range(count)))
    lineage, whole = short(headers, 2), lineage_of(headers)
    assert lineage.is_short
    assert not whole.is_short
    assert (lineage.known_from, lineage.head_at(count - 3)) == (count - 2, None)
    lineage.recall(lineage.known_from, digests(headers[: count - 2]))
    assert not lineage.is_short
    assert lineage.heads == whole.heads
    assert lineage.head_at(count - 3) == headers[count - 4].digest


def test_heads_of_another_log_or_of_another_place_change_nothing() -> None:
    headers, others = entries_after(LOG, *"abcab"), entries_after(LOG, *"bacba")
    lineage = short(headers, 2)
    for index, heads in ((3, digests(others[:3])), (4, digests(headers[:3])), (3, digests(headers[:2])), (3, ())):
        lineage.recall(index, heads)
        assert lineage.heads == digests(headers[2:])
    assert lineage.is_short


def test_a_lineage_from_the_manifest_on_lacks_nothing() -> None:
    lineage = Lineage(LOG)
    assert not lineage.is_short
    lineage.recall(lineage.known_from, (bytes(32),))
    assert lineage.heads == ()


def test_it_names_what_followed_what() -> None:
    lineage = lineage_of(OURS)
    assert lineage.entries == tuple(OURS)
    assert lineage.heads == digests(OURS)
    assert lineage.after(LOG.position) == (OURS[0], None)
    assert lineage.after(LOG.at(OURS[3]).position) == (OURS[4], None)
    assert lineage.after(LOG.at(OURS[4]).position) is None


def test_it_forgets_what_is_long_past() -> None:
    headers = entries_after(LOG, *(f"peer{number}" for number in range(RECENT_ENTRIES + 2)))
    lineage = lineage_of(headers)
    assert lineage.entries == tuple(headers[2:])
    assert lineage.heads == digests(headers[2:])


@pytest.mark.parametrize(
    ("theirs", "left"),
    [
        (THEIRS, OURS[3:]),
        (THEIRS[:4], OURS[3:]),
        (OURS, []),
        ([*OURS, *entries_after(LOG.at(OURS[-1]), "z")], []),
        (OURS[:-1], OURS[-1:]),
        ([], OURS),
    ],
    ids=["a longer lineage", "a shorter one", "where we are", "further on", "further back", "before all"],
)
def test_what_is_left_is_what_the_other_lineage_lacks(theirs: list[Header], left: list[Header]) -> None:
    lineage = lineage_of(OURS)
    last = theirs[-1] if theirs else None
    assert lineage.move(LOG.at(last), digests(theirs)) == tuple(left)
    assert lineage.entries == ()
    assert lineage.heads == digests(theirs)
    assert lineage.move(LOG.at(last), digests(theirs)) == (), "once"


def test_what_lies_further_back_than_the_other_names_may_be_in_both() -> None:
    assert lineage_of(OURS).move(LOG.at(THEIRS[4]), digests(THEIRS[4:])) == (OURS[4],)
    assert lineage_of(OURS).move(LOG.at(THEIRS[-1]), ()) == ()


def test_what_follows_the_snapshot_in_the_same_lineage_is_not_left() -> None:
    """It is older than where we are, and on the way to where they are."""
    lineage = lineage_of(OURS)
    assert lineage.move(LOG.at(OURS[1]), digests(OURS)) == ()
    assert lineage.heads == digests(OURS[:2])
    assert lineage_of(OURS).move(LOG.at(COMMON[0]), digests(THEIRS)) == tuple(OURS[3:])


# A peer starts again -------------------------------------------------------------------------------------------
def kept(log: RunLog, *signers: str | None, first: int = 0) -> LogState:
    """Keep the first entry, and one more for each of these signers (None: they are not known). Return where that is."""
    here = first_log()
    assert here.last is not None
    if not first:
        log.append(here.last, None, None, certificate(LOG, here.last))
    for by in signers:
        gone = [peer for peer in here.voters if by is not None and peer not in by]
        header = next_header(here, [here.expected(peer) for peer in by or here.roster], PAYLOAD, (), gone)
        if header.index >= first:
            log.append(header, None, None, None if by is None else certificate(here, header, by))
        here = here.append(header)
    return here


@pytest.mark.parametrize("is_on_disk", [False, True])
@pytest.mark.parametrize(
    ("signers", "doubt"),
    [
        (("abc", "ab"), None),
        (("abc", "a"), 2),
        (("a", "a", "a"), 1),
        (("abc", None), None),
        (("abc", "a", *["a"] * RECENT_ENTRIES), 2),
    ],
    ids=["most went on", "one went on", "one went on, and on", "nobody knows who", "long ago"],
)
def test_whoever_starts_again_remembers_from_where_too_few_went_on(
    tmp_path: Path, is_on_disk: bool, signers: Sequence[str | None], doubt: int | None
) -> None:
    log: RunLog = LogFolder.open(tmp_path, LOG, 10) if is_on_disk else RunLog(LOG)
    end = kept(log, *signers)
    lineage = (LogFolder.open(tmp_path, LOG, 10) if is_on_disk else log).lineage(end)
    assert (lineage.doubt.position.index if lineage.doubt else None) == doubt
    assert lineage.log == end


def test_whoever_starts_again_tells_what_followed_and_sees_who_was_elsewhere() -> None:
    log = RunLog(LOG)
    end = kept(log, "abc", "ab")
    lineage, second = log.lineage(end), log.header_at(1)
    assert second is not None
    assert lineage.after(LOG.at(second).position) == (log.header_at(2), log.certificate_at(2))
    assert lineage.heads == tuple(log.heads(0, 3))
    assert lineage.lacks(2, bytes(32))
    assert not lineage.lacks(2, second.digest)


def test_of_a_log_that_goes_on_as_much_as_the_state_has() -> None:
    log = RunLog(LOG)
    kept(log, "abc", "a")
    here = log.log_after(2)
    assert here is not None
    lineage = log.lineage(here)
    assert (lineage.log, lineage.doubt) == (here, None)
    assert log.lineage(LOG).heads == ()


def test_of_a_log_without_its_beginning_what_follows_its_first_entry() -> None:
    log = RunLog(LOG)
    end = kept(log, "abc", "a", "a", first=2)
    lineage = log.lineage(end)
    assert lineage.heads == tuple(log.heads(2, 4))
    assert lineage.doubt is None, "nobody knows yet what the first one here followed"


def test_of_a_log_that_has_not_come_so_far_nothing() -> None:
    log = RunLog(LOG)
    kept(log, "abc")
    elsewhere = LOG.at(THEIRS[4])
    lineage = log.lineage(elsewhere)
    assert (lineage.log.position, lineage.heads) == (elsewhere.position, (THEIRS[4].digest,))
