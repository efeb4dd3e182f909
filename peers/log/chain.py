"""Consecutive entries of a run, stored and sent in brief: as outcomes, which omit the data that follows from the log.

A header repeats data that follows from the log: all names, the samples of each peer, and all next leases. With a
thousand members that is 200 KB. A round decides little of it: which of the expected members are missing, which peers
joined, which trained something else than their lease, and the payload. An outcome has only that. It is relative to one
position: every peer there derives the same header from it, and no other peer can read it.

A chain is extended, cut and sent in whole cycles. Within a cycle the entries are in the order of their fragments.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Annotated, TypeAlias

from pydantic import Field

from peers.log.certificate import Certificate, CertificateError, prove
from peers.log.header import MEMBER_LIMIT, Faults, Header, Member, cycle_head
from peers.log.state import LogError, LogState
from peers.values.identity import verify
from peers.values.leases import prefix, sample_count
from peers.values.manifest import Amendment
from peers.values.wire import Count, Digest, PeerId, Value, pack, unpack

FRAMES = 32
"""Number of cycles from one stored whole header to the next. A lookup follows fewer outcomes than this."""
STRETCH_LIMIT = 256  # maximum number of entries in a stretch
STRETCH_BYTES = 1 << 22  # bytes of outcomes and certificates after which no further cycle is added to a stretch
HEADER_LIMIT = 1 << 20  # maximum bytes of an entry, packed as a header, or in brief as an outcome


class Turnout(Value):
    """A roster in brief: its `members` in order, and `deviations`, the values of members that the log did not predict.

    In `members`, a range [first, last) means the peers at these places in `LogState.lease_places`. A Member is written
    in full if it has no lease, or another incarnation than the log expects.

    `deviations` describes the members in ranges that differ from `LogState.expected`, because they trained only a
    beginning of their lease, were absent from some chunks, want other samples next, or sent another format. Its numbers
    are the places in the roster since the last such member, the missing samples and tokens, the samples wanted, and the
    format.
    """

    members: Annotated[tuple[tuple[Count, Count] | Member, ...], Field(max_length=MEMBER_LIMIT)]
    deviations: Annotated[tuple[tuple[Count, Count, Count, Count, Count], ...], Field(max_length=MEMBER_LIMIT)] = ()

    @classmethod
    def of(cls, log: LogState, roster: Sequence[Member]) -> Turnout:
        """Return a roster in brief, without the data that follows from `log`, the log before the roster's entry.

        Raises:
            LogError: the log does not allow a member, such as one whose samples are of another peer's lease.
        """
        members, last = list[tuple[int, int] | Member](), 0
        deviations = list[tuple[int, int, int, int, int]]()
        for number, member in enumerate(roster):
            log.check_member(member)
            place = log.lease_places.get(member.peer)
            expected = member if place is None else log.expected(member.peer)
            if place is None or member.incarnation != expected.incarnation:
                members.append(member)
                continue
            if member != expected:
                samples = sample_count(expected.samples) - sample_count(member.samples)
                tokens = expected.tokens - member.tokens
                deviations.append((number - last, samples, tokens, member.wants, member.format))
                last = number
            if members and isinstance(run := members[-1], tuple) and run[1] == place:
                members[-1] = run[0], place + 1
            else:
                members.append((place, place + 1))
        return cls(members=tuple(members), deviations=tuple(deviations))

    def roster(self, log: LogState) -> tuple[Member, ...]:
        """Return the roster in full. `log` is the log before the roster's entry.

        Raises:
            LogError: it names places that do not exist, has too many members, or has one that the log does not allow.
        """
        runs, roster = (one for one in self.members if isinstance(one, tuple)), list[Member]()
        if any(not first < last <= len(log.lease_holders) for first, last in runs):
            raise LogError(f"the roster names places beyond the {len(log.lease_holders)} peers with a lease")
        for one in self.members:
            roster += [one] if isinstance(one, Member) else map(log.expected, log.lease_holders[slice(*one)])
            if len(roster) > MEMBER_LIMIT:
                raise LogError(f"a roster has at most {MEMBER_LIMIT} members")
        place = 0
        for since, samples, tokens, wants, format in self.deviations:
            place += since
            if place >= len(roster) or tokens > roster[place].tokens:
                raise LogError(f"the roster has no member {place} with {tokens} tokens to take off")
            whole = roster[place]
            trained, counted = prefix(whole.samples, sample_count(whole.samples) - samples), whole.tokens - tokens
            differing = {"samples": trained, "tokens": counted, "wants": wants, "format": format}
            roster[place] = whole.model_copy(update=differing)
        for member in roster:
            log.check_member(member)
        return tuple(roster)


class Outcome(Value):
    """A fragment's entry in brief, without the data that follows from the log.

    `previous` is the head before the entry. `state` and `faults` are as in the header. `gone` are the voters that lose
    their vote, and `amendment` is the one that the entry adds to the log. `leader` is None if the leader of view 0 made
    the entry.
    """

    previous: Digest
    fragment: Count
    state: Digest
    turnout: Turnout
    payload: Digest
    faults: Faults = ()
    gone: Annotated[tuple[PeerId, ...], Field(max_length=2 * MEMBER_LIMIT)] = ()
    amendment: Amendment | None = None
    leader: PeerId | None = None


def outcome_of(log: LogState, header: Header) -> Outcome:
    """Return an entry of the log's present cycle in brief, given its header. Raises: LogError when the entry does not
    follow from the log."""
    return _outcome_of(log.opening(header.fragment), header)


def header_of(log: LogState, content: Header | Outcome) -> Header:
    """Return the header of an entry of the log's present cycle. `content` is the header itself, or the entry's outcome.

    Raises:
        LogError: the outcome leads to no header. A header is returned unchecked.
    """
    if isinstance(content, Header):
        return content
    if content.previous != log.position.head or content.fragment >= log.fragments:
        place = f"{content.previous.hex()[:8]}/{content.fragment}"
        raise LogError(f"an entry that follows {place} does not follow {log.position}")
    return _header_of(log.opening(content.fragment), content)


def follow(log: LogState, content: Header | Outcome) -> LogState:
    """Return the log with an entry appended. `content` is the entry's header or its outcome. Raises: LogError when the
    entry does not follow from the log."""
    return log.append(header_of(log, content))


@lru_cache(maxsize=8)
def _outcome_of(log: LogState, header: Header) -> Outcome:
    """Return the next entry after `log` in brief, given its header. Cached, since one entry is sent to all members and
    written to the disk."""
    log.append(header)
    return Outcome(
        previous=header.previous,
        fragment=header.fragment,
        state=header.state,
        turnout=Turnout.of(log, header.roster),
        payload=header.payload,
        faults=header.faults,
        gone=log.gone_in(header),
        amendment=log.taken_in(header),
        leader=None if header.leader == _first_leader(log) else header.leader,
    )


@lru_cache(maxsize=8)
def _header_of(log: LogState, outcome: Outcome) -> Header:
    """Return the header of an outcome. Cached, because many messages are about one entry."""
    besides = outcome.leader or _first_leader(log), outcome.faults, outcome.gone, outcome.amendment
    return log.in_state(outcome.state).next_header(outcome.turnout.roster(log), outcome.payload, *besides)


def _first_leader(log: LogState) -> str | None:
    """Return the leader of view 0 of the next entry; None before the first entry, and if the entry closes no cycle,
    since its header then names no leader."""
    return log.leader_of(0) if log.closes else None


StretchEntry: TypeAlias = tuple[Annotated[Header | Outcome, Field(union_mode="left_to_right")], Certificate | None]
"""An entry, as a header or in brief, with its certificate."""


class Stretch(Value):
    """Consecutive entries of whole cycles, as one peer sends them to another, each with its certificate (None if the
    sender does not know it). Entries are in brief, but those of the first cycle are headers if the sender or the
    receiver does not know the log before it."""

    contents: Annotated[tuple[StretchEntry, ...], Field(max_length=STRETCH_LIMIT)] = ()


@dataclass(frozen=True, slots=True)
class Entry:
    """An entry as a log stores it: packed, with the digest of its header.

    `packed` is an outcome, or a header if the log before the entry is unknown. `state_digest` is the digest of the
    state after the cycle: only in its closing entry, and None if unknown. `certificate` is packed, since with many
    members it is larger than the entry.
    """

    index: int
    digest: bytes
    packed: bytes
    is_whole: bool
    state_digest: bytes | None
    certificate: bytes | None = None
    fragment: int = 0

    @classmethod
    def whole(cls, header: Header, state_digest: bytes | None, certificate: Certificate | None = None) -> Entry:
        """Create an entry from its full header. Raises: LogError when the header has more than HEADER_LIMIT bytes."""
        proof, packed = None if certificate is None else pack(certificate), pack(header)
        if len(packed) > HEADER_LIMIT:
            raise LogError(f"entry {header.index} has {len(packed)} bytes, more than {HEADER_LIMIT}")
        return cls(header.index, header.digest, packed, True, state_digest, proof, header.fragment)

    def brief(self, log: LogState, header: Header) -> Entry:
        """Return a copy of this entry that packs an `Outcome` in place of the full `header`. The Outcome omits all that
        follows from `log`. Raises: LogError when the entry does not follow from `log`."""
        return replace(self, packed=pack(outcome_of(log, header)), is_whole=False)

    @property
    def proof(self) -> Certificate | None:
        return None if self.certificate is None else unpack(Certificate, self.certificate)

    @property
    def content(self) -> Header | Outcome:
        return (
            unpack(Header, self.packed, HEADER_LIMIT) if self.is_whole else unpack(Outcome, self.packed, HEADER_LIMIT)
        )

    def after(self, log: LogState) -> LogState:
        """Return `log` with this entry appended. If earlier entries are unknown, most of its header cannot be checked.

        Raises:
            LogError: the entry does not follow; the message names the most likely cause.
        """
        content = self.content
        if isinstance(content, Header) and content.run != log.run:
            raise LogError(f"entry {self.index} is of the run {content.run}, not of {log.run}")
        if content.fragment != len(log.made) or self.fragment != content.fragment:
            raise LogError(f"entry {self.index} is of fragment {content.fragment}, not of {len(log.made)}")
        if isinstance(content, Header) and log.last is None and content.index > 0:
            after = _on_trust(log, content)
        elif (self.index, content.previous) != (log.position.index, log.position.head):
            raise LogError(f"entry {self.index} does not follow from {log.position}")
        else:
            after = follow(log, content)
        made = newest(after)
        if (made.index, made.digest) != (self.index, self.digest):
            raise LogError(f"entry {self.index} does not have the digest beside it")
        return after


def newest(log: LogState) -> Header:
    """Return the header of the log's last entry. The log must have an entry, and each cycle's entries must have been
    added in the order of fragments."""
    header = log.made[-1] if log.made else log.last
    assert header is not None
    return header


def _on_trust(log: LogState, header: Header) -> LogState:
    """Return `log` with an entry of its first known cycle, mostly unchecked because earlier entries are unknown.

    Raises:
        LogError: it is not of one cycle with the entries before it, or names an amendment that is not signed.
    """
    made = (*log.made, header)
    if {(one.index, one.previous) for one in made} != {(header.index, header.previous)}:
        raise LogError(f"entry {header.index} is not of one cycle with the entries before it")
    if not log.is_truly_amended(header):
        raise LogError(f"entry {header.index}: its amendment is not signed by the run's organiser")
    whole = len(made) == log.fragments
    return log.at(header, tuple(one.digest for one in made)) if whole else replace(log, made=made)


class Chain:
    """Consecutive entries of one lineage, each stored in brief, as an `Outcome`. Only if the log before them is
    unknown, the first cycle's entries are stored as full headers. The last cycle may be incomplete while entries are
    added."""

    def __init__(self, empty_log: LogState) -> None:
        self.entries: list[Entry] = []
        self.end = empty_log
        """The log after the last entry."""
        self.empty_log = empty_log
        # packed closing header and digests of all entries of every FRAMES-th cycle, by the cycle's index
        self._frames: dict[int, tuple[bytes, tuple[bytes, ...]]] = {}

    def __len__(self) -> int:
        """Return the number of whole cycles in this chain."""
        return len(self.entries) // self.fragments

    @property
    def fragments(self) -> int:
        return self.empty_log.fragments

    @property
    def first(self) -> int:
        """The index of the chain's first cycle; 0 for an empty chain."""
        return self.entries[0].index if self.entries else 0

    @property
    def next_index(self) -> int:
        """The index of the cycle after the chain's last whole one."""
        return self.first + len(self)

    def cycles(self, first: int, last: int) -> Sequence[Entry]:
        """Return the entries of the cycles [first, last). Cycles that this chain does not have are left out."""
        start, stop = max(0, first - self.first), max(0, min(last, self.next_index) - self.first)
        return self.entries[start * self.fragments : stop * self.fragments]

    def entry(self, index: int, fragment: int | None = None) -> Entry | None:
        """Return the entry of cycle `index` for this fragment (if None, the closing entry). Return None if the chain
        has no such cycle."""
        place = self._place(index, fragment)
        return None if place is None else self.entries[place]

    def _place(self, index: int, fragment: int | None = None) -> int | None:
        if not self.first <= index < self.next_index:
            return None
        return (index - self.first) * self.fragments + (self.fragments - 1 if fragment is None else fragment)

    def head(self, index: int) -> bytes | None:
        """Return the head of the log after cycle `index`; None if the chain has no such cycle."""
        cycle = self.cycles(index, index + 1)
        return cycle_head([entry.digest for entry in cycle]) if cycle else None

    def add(self, entry: Entry) -> Entry:
        """Append an entry. Return it as stored: as an outcome if possible. Raises: LogError when it does not follow."""
        end = entry.after(self.end)
        if entry.is_whole and entry.index == self.end.position.index:
            entry = entry.brief(self.end, newest(end))
        self.entries.append(entry)
        self.end = end
        if entry.index % FRAMES == 0 and not end.made:
            self._frames[entry.index] = pack(newest(end)), end.ends
        return entry

    def complete(self, entry: Entry) -> bool:
        """Add the certificate of `entry` to the chain's copy of that entry, and the state digest to the closing entry
        of the cycle, where the chain has none yet. Return True if either was added."""
        place, closing = self._place(entry.index, entry.fragment), self._place(entry.index)
        assert place is not None
        assert closing is not None
        known = self.entries[place], self.entries[closing]
        self.entries[place] = replace(known[0], certificate=known[0].certificate or entry.certificate)
        closes = self.entries[closing]
        self.entries[closing] = replace(closes, state_digest=closes.state_digest or entry.state_digest)
        return known != (self.entries[place], self.entries[closing])

    def cut(self, index: int) -> None:
        """Remove the cycle with this index and all later cycles."""
        self.end = self.after(index - 1) or self.empty_log
        del self.entries[max(0, index - self.first) * self.fragments :]
        self._frames = {place: frame for place, frame in self._frames.items() if place < index}

    def after(self, index: int) -> LogState | None:
        """Return the log after cycle `index`, for -1 the empty log; None if the chain has no such cycle."""
        if index == self.next_index - 1 and not self.end.made:
            return self.end
        if index == -1:
            return self.empty_log
        return next((state for _, state in self.states(index, index + 1) if not state.made), None)

    def headers(self, first: int, last: int) -> Iterator[Header]:
        """Yield the headers of the chain's entries in the cycles [first, last)."""
        yield from (newest(state) for _, state in self.states(first, last))

    def states(self, first: int, last: int) -> Iterator[tuple[int, LogState]]:
        """Yield each entry's index and the log after the entry, for the chain's entries in the cycles [first, last)."""
        first, last = max(first, self.first), min(last, self.next_index)
        if first >= last:
            return
        # with several fragments, begin before cycle `first`, because `_frames` has no logs within a cycle
        start = first if self.fragments == 1 else first - 1
        start -= start % FRAMES
        log = self.empty_log
        if start in self._frames:
            closing, ends = self._frames[start]
            log = log.at(unpack(Header, closing, HEADER_LIMIT), ends)
            if start == first:
                yield start, log
            start += 1
        for entry in self.cycles(start, last):
            log = entry.after(log)
            if entry.index >= first:
                yield entry.index, log

    def stretch(self, first: int, last: int, is_whole: bool) -> Stretch:
        """Return as many of the chain's cycles [first, last) as a stretch may have; none if the chain does not have
        `first`. Entries are in brief. Those of the first cycle are headers if this chain does not know the log before
        them, or `is_whole` is True because the receiver does not know it."""
        entries = self.cycles(first, min(last, first + max(1, STRETCH_LIMIT // self.fragments)))
        if not entries or entries[0].index != first:
            return Stretch()
        sent, size = list[StretchEntry](), 0
        if entries[0].is_whole or (is_whole and first > 0):
            headers = self.headers(first, first + 1)
            sent += [(header, entry.proof) for header, entry in zip(headers, entries, strict=False)]
        for entry in entries[len(sent) :]:
            size += len(entry.packed) + len(entry.certificate or b"")
            if size > STRETCH_BYTES and entry.index > first and entry.fragment == 0:
                break
            sent.append((entry.content, entry.proof))
        return Stretch(contents=tuple(sent))

    def led_up_to(self, stretch: Stretch) -> Chain:
        """Return this chain with the earlier entries of `stretch` added at its beginning. Any peer may send such
        entries, because the chain's digests prove them.

        Raises:
            LogError: they do not lead up to the chain, or a signature among them is false.
        """
        wrong = LogError(f"these headers do not lead up to entry {self.first}")
        if not self.entries or not self.entries[0].is_whole:
            raise wrong
        chain = Chain(self.empty_log)
        for content, certificate in stretch.contents:
            if chain.next_index >= self.first and len(chain):
                raise wrong
            header = header_of(chain.end, content)
            if certificate is not None and header.previous == chain.end.position.head:
                prove(certificate, chain.end.of(header.fragment), header, verify)
            chain.add(Entry.whole(header, None, certificate))
        if chain.end.position.index != self.first or chain.end.made:
            raise wrong
        try:
            for entry in self.entries[: self.fragments]:
                chain.add(_proven(entry, chain.end))
        except LogError as error:
            raise wrong from error
        chain.entries += self.entries[self.fragments :]
        chain._frames |= self._frames
        chain.end = self.end
        return chain


def _proven(first: Entry, log: LogState) -> Entry:
    """Return the first entry of a chain, now that the log before it is known. If the entry's certificate is false,
    return the entry without it."""
    header, certificate = first.content, first.proof
    if certificate is not None and isinstance(header, Header):
        try:
            prove(certificate, log.of(header.fragment), header, verify)
        except CertificateError:
            return replace(first, certificate=None)
    return first
