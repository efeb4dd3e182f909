"""The history of a run, read from its log: each entry's members, signatures, and absent peers with the reasons, and
each peer's contribution."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

from peers.log.certificate import Certificate, electorate, weigh
from peers.log.chain import Entry
from peers.log.folder import RunLog
from peers.log.header import Header
from peers.log.state import LogState
from peers.values.manifest import Amendment

SLICE_SECONDS = 0.02
"""Most seconds for one call of `Chronicle.read`. A long log must not hold up the process's other tasks."""
KEPT = 240  # number of newest entries kept for display
UNSIGNED = 8  # number of newest entries whose signatures or state digest may still arrive


class _Absence(NamedTuple):
    """A peer with a lease whose work is missing in an entry, wholly or for the most part. `kind` is one word for the
    reason `why`."""

    peer: str
    kind: str
    why: str


@dataclass(frozen=True)
class Signatures:
    """The signatures of an entry: the number of its voters that have `signed`, and `certified`, which is True with a
    quorum's certificate and False if a minority made the entry alone. None means unknown."""

    signed: int | None = None
    voters: int | None = None
    certified: bool | None = None


class Change(NamedTuple):
    """An amendment that takes effect with an entry. `before` is the amendment that was in force until then, or None for
    the manifest's values."""

    amendment: Amendment
    before: Amendment | None


@dataclass
class Record:
    """One entry of the log, for display. None means that a value is not known yet."""

    index: int
    digest: bytes
    payload: bytes
    state_digest: bytes | None
    members: int
    tokens: int
    lineage_tokens: int
    signatures: Signatures | None = None
    absent: tuple[_Absence, ...] = ()
    joined: tuple[str, ...] = ()
    change: Change | None = None


@dataclass
class PeerTotals:
    """One peer's total contribution to the entries read so far. `last` is the index of the newest entry that includes
    the peer."""

    tokens: int = 0
    entries: int = 0
    last: int = 0


@dataclass(frozen=True)
class Standing:
    """One peer's training compared with that of all `peers` peers: tokens, rounds, `share` of all tokens, and
    `rank` (1 for the largest). Entries that are not in this log do not count."""

    tokens: int
    rounds: int
    share: float
    rank: int
    peers: int


class Chronicle:
    """The history of the log's entries before `next_index`. If the log has replaced some of them by others, the history
    is read again from the beginning."""

    def __init__(self) -> None:
        self._begin(0)

    def _begin(self, first: int) -> None:
        self.first = first
        """Index of the first entry of the log. A peer that joined in the middle may not have earlier entries."""
        self.records = deque[Record](maxlen=KEPT)
        self.contributions: dict[str, PeerTotals] = {}
        self.tokens = 0  # tokens of all peers' contributions together
        self._end: LogState | None = None
        self._unsigned = deque[tuple[Record, LogState, Header]](maxlen=UNSIGNED)

    @property
    def next_index(self) -> int:
        return self.first if self._end is None else self._end.position.index

    @property
    def amendment(self) -> Amendment | None:
        """The amendment in force after the last entry that was read, or None for the manifest's values."""
        return None if self._end is None else self._end.amendment

    def read(self, log: RunLog) -> bool:
        """Read more entries of the log, for `SLICE_SECONDS` at most. Return True if more entries remain. Raises:
        LogError."""
        at, end = self.next_index, self._end
        if end is None or log.first != self.first or log.heads_at([at]).get(at) != end.position.head:
            self._begin(log.first)  # entries read before were replaced, or earlier ones added
        deadline = time.monotonic() + SLICE_SECONDS
        for entry, state in log.states_after(self._end or log.empty_log):
            if state.last is None or state.made:
                continue  # only the entry that closes a cycle names the tokens that count
            self._take(entry, state.last, log)
            self._end = state
            if time.monotonic() >= deadline:
                break
        self._complete(log)
        return self.next_index < log.next_index

    def standing(self, peer: str) -> Standing | None:
        """Return one peer's trained tokens in the entries read so far, compared with those of all peers. Return None if
        these entries contain no trained tokens."""
        if not self.tokens:
            return None
        own = self.contributions.get(peer, PeerTotals())
        rank = 1 + sum(other.tokens > own.tokens for other in self.contributions.values())
        return Standing(own.tokens, own.entries, own.tokens / self.tokens, rank, len({*self.contributions, peer}))

    def _take(self, entry: Entry, header: Header, log: RunLog) -> None:
        before = log.empty_log if entry.index == 0 else self._end
        before = before and before.of(entry.fragment)
        record = Record(
            index=entry.index,
            digest=header.digest,
            payload=header.payload,
            state_digest=entry.state_digest,
            members=len(header.roster),
            tokens=sum(member.tokens for member in header.roster),
            lineage_tokens=header.lineage_tokens,
        )
        if before is not None:
            record.signatures = _signatures(entry.proof, before, header)
            record.absent = _absences(before, header, entry.proof)
            record.joined = tuple(peer for peer in header.peers if peer not in before.leases)
            if header.amendment is not None and header.amendment != before.amendment:
                record.change = Change(header.amendment, before.amendment)
            if record.signatures is None or record.state_digest is None:
                self._unsigned.append((record, before, header))
        self.records.append(record)
        for member in header.roster:
            contribution = self.contributions.setdefault(member.peer, PeerTotals())
            contribution.tokens += member.tokens
            contribution.entries += 1
            contribution.last = entry.index
        self.tokens += record.tokens

    def _complete(self, log: RunLog) -> None:
        """Add to the newest records the signatures and state digests that had not arrived when the entries were
        read."""
        for record, before, header in self._unsigned:
            record.signatures = record.signatures or _signatures(log.certificate_at(record.index), before, header)
            record.state_digest = record.state_digest or log.state_digest_at(record.index)


def _signatures(certificate: Certificate | None, before: LogState, header: Header) -> Signatures | None:
    """Return the signatures that an entry's certificate has. They are not verified, because the log has verified
    them."""
    if certificate is None:
        return None
    proof = weigh(certificate, before, header)
    voters = electorate(before, header).voters
    return Signatures(proof.signers, len(voters), proof.is_certified)


def _absences(before: LogState, header: Header, certificate: Certificate | None) -> tuple[_Absence, ...]:
    """Return the peers that had a lease but whose work for an entry is missing, wholly or for the most part."""
    faults = {fault.peer: fault.kind for fault in header.faults}
    gone, leases = set(before.gone_in(header)), {lease.peer for lease in header.leases}
    voters = electorate(before, header, certificate.group).voters if certificate else ()
    left = {voters[farewell.place][0] for farewell in certificate.farewells} if certificate else set()
    partly = "was absent from most chunks: its samples are trained again"
    found = [_Absence(member.peer, "partly", partly) for member in header.roster if not before.has_trained(member)]
    for peer in dict.fromkeys((*before.ring, *faults)):
        if peer in faults:
            found.append(_Absence(peer, "lied", f"excluded for a proven lie: {faults[peer]}"))
        elif peer in header.peers:
            continue
        elif peer in left:
            found.append(_Absence(peer, "left", "left with a farewell"))
        elif peer in gone:
            found.append(_Absence(peer, "gone", "has left, fell silent, or started again"))
        elif peer in leases:
            found.append(_Absence(peer, "unready", "was not ready; its work may still count in the next entry"))
        else:
            found.append(_Absence(peer, "returned", "was not ready; its lease went back into the pool"))
    return tuple(found)
