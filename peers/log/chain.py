"""Consecutive entries of a run, kept and passed on in brief, as outcomes.

A header repeats what follows from the log: all names, what each peer was to train, and everybody's next lease. With a
thousand members these are 200 KB, of which a round decides little: which of the expected members are missing, who
joined, who trained something else than its lease, and the payload. An outcome says that much. It is meant for one
position: every peer that is there derives the same header from it, and no other peer can read it.

A chain is continued, cut and told by whole cycles. Within a cycle entries lie in the order of their fragments.
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
"""Cycles from one that is kept whole to the next: any header is found by following the outcomes of fewer than these."""
STRETCH_LIMIT = 256  # entries
STRETCH_BYTES = 1 << 22  # of outcomes, after which a stretch ends
HEADER_LIMIT = 1 << 20  # bytes of an entry's header or outcome


class Turnout(Value):
    """A roster in brief: runs of places [first, last) among the lease holders (`LogState.lease_places`), of members
    that did what the log expects of them (`LogState.expected`); all others in full, among them newcomers.

    `less` are members in runs that trained a beginning of their lease, or were absent from some chunks, or want other
    samples next, or sent another format: places in the roster since the last such one, missing samples and tokens, the
    samples wanted, and the format.
    """

    members: Annotated[tuple[tuple[Count, Count] | Member, ...], Field(max_length=MEMBER_LIMIT)]
    less: Annotated[tuple[tuple[Count, Count, Count, Count, Count], ...], Field(max_length=MEMBER_LIMIT)] = ()

    @classmethod
    def of(cls, log: LogState, roster: Sequence[Member]) -> Turnout:
        """Return a roster in brief. Raises: LogError when a member trained what was not for it."""
        members, less, last = list[tuple[int, int] | Member](), list[tuple[int, int, int, int, int]](), 0
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
                less.append((number - last, samples, tokens, member.wants, member.format))
                last = number
            if members and isinstance(run := members[-1], tuple) and run[1] == place:
                members[-1] = run[0], place + 1
            else:
                members.append((place, place + 1))
        return cls(members=tuple(members), less=tuple(less))

    def roster(self, log: LogState) -> tuple[Member, ...]:
        """Return the roster in full.

        Raises: LogError when it names places that are not there, or too many; or a member trained what was not for it.
        """
        runs, roster = (one for one in self.members if isinstance(one, tuple)), list[Member]()
        if any(not first < last <= len(log.lease_holders) for first, last in runs):
            raise LogError(f"there are no such places among {len(log.lease_holders)} peers with a lease")
        for one in self.members:
            roster += [one] if isinstance(one, Member) else map(log.expected, log.lease_holders[slice(*one)])
            if len(roster) > MEMBER_LIMIT:
                raise LogError(f"a roster has at most {MEMBER_LIMIT} members")
        place = 0
        for since, samples, tokens, wants, format in self.less:
            place += since
            if place >= len(roster) or tokens > roster[place].tokens:
                raise LogError(f"there is no member {place} that lacks {tokens} tokens")
            whole = roster[place]
            trained, counted = prefix(whole.samples, sample_count(whole.samples) - samples), whole.tokens - tokens
            differing = {"samples": trained, "tokens": counted, "wants": wants, "format": format}
            roster[place] = whole.model_copy(update=differing)
        for member in roster:
            log.check_member(member)
        return tuple(roster)


class Outcome(Value):
    """The entry of a fragment that follows the head `previous`, in brief. `state` and `faults` as in the header.
    `gone` are the voters that have no say any more, `amendment` is the one that it takes in. `leader` is named if it is
    not the one whose turn it was first."""

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
    """Return an entry of the log's present cycle in brief. Raises: LogError when it does not follow from the log."""
    return _outcome_of(log.opening(header.fragment), header)


def header_of(log: LogState, told: Header | Outcome) -> Header:
    """Return the entry of the log's present cycle that is told, whole or in brief.

    Raises: LogError when there is none for an outcome. Whether a header follows is not checked.
    """
    if isinstance(told, Header):
        return told
    if told.previous != log.position.head or told.fragment >= log.fragments:
        place = f"{told.previous.hex()[:8]}/{told.fragment}"
        raise LogError(f"an entry that follows {place} does not follow {log.position}")
    return _header_of(log.opening(told.fragment), told)


def follow(log: LogState, told: Header | Outcome) -> LogState:
    """Return the log with the entry that is told, as a header or in brief. Raises: LogError when there is none."""
    return log.append(header_of(log, told))


@lru_cache(maxsize=8)
def _outcome_of(log: LogState, header: Header) -> Outcome:
    """One entry is told to all members, and written to the disk."""
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
    """Many messages are about one entry."""
    besides = outcome.leader or _first_leader(log), outcome.faults, outcome.gone, outcome.amendment
    return log.in_state(outcome.state).next_header(outcome.turnout.roster(log), outcome.payload, *besides)


def _first_leader(log: LogState) -> str | None:
    """Return the peer whose turn it is first to propose the next entry, if that closes a cycle."""
    return log.leader_of(0) if log.closes else None


CertifiedContent: TypeAlias = tuple[Annotated[Header | Outcome, Field(union_mode="left_to_right")], Certificate | None]
"""An entry, whole or in brief, with its certificate."""


class Stretch(Value):
    """Consecutive entries of whole cycles, as one peer tells them to another: those of the first cycle as headers,
    unless the reader is to know what it follows. Each has its certificate; None: not known to the peer that tells it.
    """

    contents: Annotated[tuple[CertifiedContent, ...], Field(max_length=STRETCH_LIMIT)] = ()


@dataclass(frozen=True, slots=True)
class Entry:
    """An entry as a log keeps it: `packed` is a packed outcome, or a packed header where nothing before it is known.

    `digest` is the header's; `state_digest` that of the state after its cycle, if that is known and the entry closes
    it. `certificate` is packed, too: with many members it is larger than the entry.
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
        """Create an entry that can be read by itself. Raises: LogError when it is too long for that."""
        proof, packed = None if certificate is None else pack(certificate), pack(header)
        if len(packed) > HEADER_LIMIT:
            raise LogError(f"entry {header.index} has {len(packed)} bytes, more than {HEADER_LIMIT}")
        return cls(header.index, header.digest, packed, True, state_digest, proof, header.fragment)

    def brief(self, log: LogState, header: Header) -> Entry:
        """Return the same in brief, to be read where the log before it is known. Raises: LogError when it does not
        follow."""
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
        """Return the log with this entry. Those of a cycle that are whole may be the first that are known of a log.

        Raises: LogError, which says in words what is most likely wrong.
        """
        content = self.content
        if isinstance(content, Header) and content.run != log.run:
            raise LogError(f"entry {self.index} is of the run {content.run}")
        if content.fragment != len(log.made) or self.fragment != content.fragment:
            raise LogError(f"entry {self.index} is not of fragment {len(log.made)}")
        if isinstance(content, Header) and log.last is None and content.index > 0:
            after = _on_trust(log, content)
        elif (self.index, content.previous) != (log.position.index, log.position.head):
            raise LogError(f"entry {self.index} does not follow from {log.position}")
        else:
            after = follow(log, content)
        made = newest(after)
        if (made.index, made.digest) != (self.index, self.digest):
            raise LogError(f"entry {self.index} is not the one whose digest is beside it")
        return after


def newest(log: LogState) -> Header:
    """Return the last entry of a log whose cycles are made in the order of fragments. It has one."""
    header = log.made[-1] if log.made else log.last
    assert header is not None
    return header


def _on_trust(log: LogState, header: Header) -> LogState:
    """Return the log with an entry of the first cycle that is known of it: nothing before vouches for it.

    Raises: LogError when it is not of one cycle with the entries before it, or names an amendment that is not signed.
    """
    made = (*log.made, header)
    if {(one.index, one.previous) for one in made} != {(header.index, header.previous)}:
        raise LogError(f"entry {header.index} is not of the cycle that begins here")
    if not log.is_truly_amended(header):
        raise LogError(f"entry {header.index}: its amendment is not signed by the run's organiser")
    whole = len(made) == log.fragments
    return log.at(header, tuple(one.digest for one in made)) if whole else replace(log, made=made)


class Chain:
    """Entries of one lineage, one after another. Only those of the first cycle may be whole, where what it follows is
    not known. The last cycle may lack entries while they are added."""

    def __init__(self, empty_log: LogState) -> None:
        self.entries: list[Entry] = []
        self.end = empty_log
        """The log after the last entry."""
        self.empty_log = empty_log
        self._frames: dict[int, tuple[bytes, tuple[bytes, ...]]] = {}  # packed closing headers, and cycles' `ends`

    def __len__(self) -> int:
        """Return how many whole cycles are here."""
        return len(self.entries) // self.fragments

    @property
    def fragments(self) -> int:
        """How many entries a cycle has."""
        return self.empty_log.fragments

    @property
    def first(self) -> int:
        """Index of the first cycle that is here; 0 if none is."""
        return self.entries[0].index if self.entries else 0

    @property
    def next_index(self) -> int:
        """Index of the cycle that comes next."""
        return self.first + len(self)

    def cycles(self, first: int, last: int) -> Sequence[Entry]:
        """Return the entries of the cycles [first, last) that are here."""
        start, stop = max(0, first - self.first), max(0, min(last, self.next_index) - self.first)
        return self.entries[start * self.fragments : stop * self.fragments]

    def entry(self, index: int, fragment: int | None = None) -> Entry | None:
        """Return the entry of a cycle for this fragment, by default the one that closes it."""
        place = self._place(index, fragment)
        return None if place is None else self.entries[place]

    def _place(self, index: int, fragment: int | None = None) -> int | None:
        if not self.first <= index < self.next_index:
            return None
        return (index - self.first) * self.fragments + (self.fragments - 1 if fragment is None else fragment)

    def head(self, index: int) -> bytes | None:
        """Return what names the log after a cycle, if that is here."""
        cycle = self.cycles(index, index + 1)
        return cycle_head([entry.digest for entry in cycle]) if cycle else None

    def add(self, entry: Entry) -> Entry:
        """Add the next entry. Returns it as it is kept: in brief if it can be. Raises: LogError."""
        end = entry.after(self.end)
        if entry.is_whole and entry.index == self.end.position.index:
            entry = entry.brief(self.end, newest(end))
        self.entries.append(entry)
        self.end = end
        if entry.index % FRAMES == 0 and not end.made:
            self._frames[entry.index] = pack(newest(end)), end.ends
        return entry

    def complete(self, entry: Entry) -> bool:
        """Note what was not known of an entry that is here: its certificate, and the digest of the state after its
        cycle, whichever of the cycle's entries brings that.

        Returns whether that is new.
        """
        place, closing = self._place(entry.index, entry.fragment), self._place(entry.index)
        assert place is not None
        assert closing is not None
        known = self.entries[place], self.entries[closing]
        self.entries[place] = replace(known[0], certificate=known[0].certificate or entry.certificate)
        closes = self.entries[closing]
        self.entries[closing] = replace(closes, state_digest=closes.state_digest or entry.state_digest)
        return known != (self.entries[place], self.entries[closing])

    def cut(self, index: int) -> None:
        """Drop the cycles from this one on."""
        self.end = self.after(index - 1) or self.empty_log
        del self.entries[max(0, index - self.first) * self.fragments :]
        self._frames = {place: frame for place, frame in self._frames.items() if place < index}

    def after(self, index: int) -> LogState | None:
        """Return the log after a cycle, if it is here; after cycle -1 the empty one."""
        if index == self.next_index - 1 and not self.end.made:
            return self.end
        if index == -1:
            return self.empty_log
        return next((state for _, state in self.states(index, index + 1) if not state.made), None)

    def headers(self, first: int, last: int) -> Iterator[Header]:
        """Those of the entries of the cycles [first, last) that are here."""
        yield from (newest(state) for _, state in self.states(first, last))

    def states(self, first: int, last: int) -> Iterator[tuple[int, LogState]]:
        """Return the log after each of the entries of the cycles [first, last) that are here, with their indices."""
        first, last = max(first, self.first), min(last, self.next_index)
        if first >= last:
            return
        start = first if self.fragments == 1 else first - 1  # a frame has no states within its cycle
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
        """Return the cycles from `first` on, as many as may be told at once, before `last`; none if that is not here.

        The first of them `is_whole` if the reader does not know what it follows, or we do not.
        """
        entries = self.cycles(first, min(last, first + max(1, STRETCH_LIMIT // self.fragments)))
        if not entries or entries[0].index != first:
            return Stretch()
        contents, size = list[CertifiedContent](), 0
        if entries[0].is_whole or (is_whole and first > 0):
            headers = self.headers(first, first + 1)
            contents += [(header, entry.proof) for header, entry in zip(headers, entries, strict=False)]
        for entry in entries[len(contents) :]:
            size += len(entry.packed) + len(entry.certificate or b"")
            if size > STRETCH_BYTES and entry.index > first and entry.fragment == 0:
                break
            contents.append((entry.content, entry.proof))
        return Stretch(contents=tuple(contents))

    def led_up_to(self, stretch: Stretch) -> Chain:
        """Return this chain with entries before it. Their digests vouch for them, so they may come from anybody.

        Raises: LogError when they do not lead up to it, or a signature among them is false.
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
    """Return the first entry that is here, now that what it follows is known: without its certificate, if that is
    false."""
    header, certificate = first.content, first.proof
    if certificate is not None and isinstance(header, Header):
        try:
            prove(certificate, log.of(header.fragment), header, verify)
        except CertificateError:
            return replace(first, certificate=None)
    return first
