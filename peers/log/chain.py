"""Consecutive entries of a run, kept and passed on as outcomes. With many members, headers are far larger."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Annotated

from pydantic import Field

from peers.log.certificate import Certificate, CertificateError, prove
from peers.log.header import Header
from peers.log.outcome import Outcome, follow, outcome_of
from peers.log.state import LogError, LogState
from peers.values.identity import verify
from peers.values.wire import Value, pack, unpack

FRAMES = 32
"""Entries from one that is kept whole to the next: any header is found by following fewer outcomes than these."""
STRETCH_LIMIT = 256  # entries
STRETCH_BYTES = 1 << 22  # of outcomes, after which a stretch ends
HEADER_LIMIT = 1 << 20  # bytes


class Stretch(Value):
    """Consecutive entries, as one peer tells them to another: the first as a whole `header`, unless the reader is to
    know what it follows. `certificates` are those of the entries, in order; None: not known to who tells it."""

    header: Header | None
    outcomes: Annotated[tuple[Outcome, ...], Field(max_length=STRETCH_LIMIT)]
    certificates: Annotated[tuple[Certificate | None, ...], Field(max_length=STRETCH_LIMIT + 1)] = ()

    @property
    def told(self) -> tuple[tuple[Header | Outcome, Certificate | None], ...]:
        """The entries, each with its certificate."""
        entries = (*((self.header,) if self.header else ()), *self.outcomes)
        return tuple(zip(entries, (*self.certificates, *(None for _ in entries)), strict=False))


@dataclass(frozen=True, slots=True)
class Entry:
    """An entry as a log keeps it: `told` is a packed outcome, or a packed header where nothing before it is known.

    `digest` is the header's, its name in the chain; `state_digest` that of the state after it, if it is known.
    `certificate` is packed, too: with many members it is larger than the entry.
    """

    index: int
    digest: bytes
    told: bytes
    is_whole: bool
    state_digest: bytes | None
    certificate: bytes | None = None

    @classmethod
    def whole(cls, header: Header, state_digest: bytes | None, certificate: Certificate | None = None) -> Entry:
        """Create an entry that can be read by itself."""
        proof = None if certificate is None else pack(certificate)
        return cls(header.index, header.digest, pack(header), True, state_digest, proof)

    def brief(self, log: LogState, header: Header) -> Entry:
        """Return the same in brief, to be read where the log before it is known. Raises: LogError when it does not
        follow."""
        return replace(self, told=pack(outcome_of(log, header)), is_whole=False)

    @property
    def proof(self) -> Certificate | None:
        return None if self.certificate is None else unpack(Certificate, self.certificate)

    @property
    def content(self) -> Header | Outcome:
        return unpack(Header, self.told, HEADER_LIMIT) if self.is_whole else unpack(Outcome, self.told, HEADER_LIMIT)

    def after(self, log: LogState) -> LogState:
        """Return the log with this entry. One that is whole may be the first that is known of a log.

        Raises: LogError, which says in words what is most likely wrong.
        """
        content = self.content
        if isinstance(content, Header) and content.run != log.run:
            raise LogError(f"entry {self.index} is of the run {content.run}")
        if isinstance(content, Header) and log.last is None and content.index > 0:
            after = log.at(content)
        elif (self.index, content.previous) != (log.position.index, log.position.head):
            raise LogError(f"entry {self.index} does not follow from {log.position}")
        else:
            after = follow(log, content)
        if (after.position.index, after.position.head) != (self.index + 1, self.digest):
            raise LogError(f"entry {self.index} is not the one whose digest is beside it")
        return after


class Chain:
    """Entries of one lineage, one after another. Only the first may be whole, where what it follows is not known."""

    def __init__(self, empty_log: LogState) -> None:
        self.entries: list[Entry] = []
        self.end = empty_log
        """The log after the last entry."""
        self.empty_log = empty_log
        self._frames: dict[int, bytes] = {}  # packed headers of some entries

    def __len__(self) -> int:
        return len(self.entries)

    @property
    def first(self) -> int:
        """Index of the first entry that is here; 0 if none is."""
        return self.entries[0].index if self.entries else 0

    @property
    def next_index(self) -> int:
        """Index of the entry that comes next."""
        return self.first + len(self.entries)

    def entry(self, index: int) -> Entry | None:
        place = index - self.first
        return self.entries[place] if 0 <= place < len(self.entries) else None

    def add(self, entry: Entry) -> Entry:
        """Add the next entry. Returns it as it is kept: in brief if it can be. Raises: LogError."""
        end = entry.after(self.end)
        assert end.last is not None
        if entry.is_whole and entry.index == self.end.position.index:
            entry = entry.brief(self.end, end.last)
        self.entries.append(entry)
        self.end = end
        if entry.index % FRAMES == 0:
            self._frames[entry.index] = pack(end.last)
        return entry

    def complete(self, entry: Entry) -> bool:
        """Note what was not known of an entry that is here: the digest of the state after it, and its certificate.

        Returns whether that is new.
        """
        known = self.entries[entry.index - self.first]
        completed = replace(
            known,
            state_digest=known.state_digest or entry.state_digest,
            certificate=known.certificate or entry.certificate,
        )
        self.entries[entry.index - self.first] = completed
        return completed != known

    def cut(self, index: int) -> None:
        """Drop the entries from this one on."""
        self.end = self.after(index - 1) or self.empty_log
        del self.entries[max(0, index - self.first) :]
        self._frames = {place: frame for place, frame in self._frames.items() if place < index}

    def after(self, index: int) -> LogState | None:
        """Return the log after an entry, if it is here; after entry -1 the empty one."""
        if index == self.next_index - 1:
            return self.end
        if index == -1:
            return self.empty_log
        if self.entry(index) is None:
            return None
        return next((state for at, state in self._states(index) if at == index), None)

    def headers(self, first: int, last: int) -> Iterator[Header]:
        """Those of the entries [first, last) that are here."""
        for _, state in self.states(first, last):
            if state.last is not None:
                yield state.last

    def states(self, first: int, last: int) -> Iterator[tuple[int, LogState]]:
        """The log after each of the entries [first, last) that are here, with their indices."""
        first, last = max(first, self.first), min(last, self.next_index)
        for index, state in self._states(first) if first < last else ():
            if index >= last:
                return
            if index >= first:
                yield index, state

    def stretch(self, first: int, last: int, is_whole: bool) -> Stretch:
        """Return entries from `first` on, as many as may be told at once, before `last`; none if that is not here.

        The first of them `is_whole` if the reader does not know what it follows, or we do not.
        """
        entries = self.entries[max(0, first - self.first) : max(0, last - self.first)][:STRETCH_LIMIT]
        if not entries or entries[0].index != first:
            return Stretch(header=None, outcomes=())
        header, certificates = None, list[Certificate | None]()
        if entries[0].is_whole or (is_whole and first > 0):
            header = next(self.headers(first, first + 1))
            certificates.append(entries[0].proof)
            entries = entries[1:]
        size, outcomes = 0, list[Outcome]()
        for entry in entries:
            size += len(entry.told) + len(entry.certificate or b"")
            if size > STRETCH_BYTES and outcomes:
                break
            outcomes.append(unpack(Outcome, entry.told, HEADER_LIMIT))
            certificates.append(entry.proof)
        return Stretch(header=header, outcomes=tuple(outcomes), certificates=tuple(certificates))

    def led_up_to(self, stretch: Stretch) -> Chain:
        """Return this chain with entries before it. Their digests vouch for them, so they may come from anybody.

        Raises: LogError when they do not lead up to it, or a signature among them is false.
        """
        wrong = LogError(f"these headers do not lead up to entry {self.first}")
        if not self.entries or not self.entries[0].is_whole:
            raise wrong
        chain = Chain(self.empty_log)
        for told, certificate in stretch.told:
            if chain.next_index >= self.first and len(chain):
                raise wrong
            header = told if isinstance(told, Header) else follow(chain.end, told).last
            assert header is not None
            if certificate is not None and header.previous == chain.end.position.head:
                prove(certificate, chain.end, header, verify)
            chain.add(Entry.whole(header, None, certificate))
        if chain.end.position.index != self.first:
            raise wrong
        try:
            chain.add(_proven(self.entries[0], chain.end))
        except LogError as error:
            raise wrong from error
        chain.entries += self.entries[1:]
        chain._frames |= self._frames
        chain.end = self.end
        return chain

    def _states(self, index: int) -> Iterator[tuple[int, LogState]]:
        """The log after each entry, from the last one not after `index` that is kept whole."""
        start = index - index % FRAMES
        log = self.empty_log
        if start in self._frames:
            log = log.at(unpack(Header, self._frames[start], HEADER_LIMIT))
            yield start, log
            start += 1
        for entry in self.entries[max(0, start - self.first) :]:
            log = entry.after(log)
            yield entry.index, log


def _proven(first: Entry, log: LogState) -> Entry:
    """The first entry that is here, now that what it follows is known: without its certificate, if that is false."""
    header, certificate = first.content, first.proof
    if certificate is not None and isinstance(header, Header):
        try:
            prove(certificate, log, header, verify)
        except CertificateError:
            return replace(first, certificate=None)
    return first
