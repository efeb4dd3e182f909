"""The run's log: hash-chained headers, one per outer step, and what follows from them.

An entry is a header and a payload, the averaged pseudo-gradient. A header carries everything that the next entry
depends on (roster, leases, sample pool, tokens so far), so that a peer needs only the last header and a snapshot to
go on; and it says nothing about how the round went, so that whoever finishes a round writes the same header.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from pydantic import Field, ValidationError

from peers.leases import Lease, SamplePool
from peers.wire import Count, Digest, PeerId, RunId, Samples, Value, digest_of, pack

MEMBER_LIMIT = 1000
"""Peers in one entry; what a header costs to check grows with the square of it."""


class Member(Value):
    """A peer's share in one entry: it counts by the tokens it trained on these samples."""

    peer: PeerId
    tokens: Count
    samples: tuple[Samples, ...] = Field(max_length=1000)


class Assignment(Value):
    """The samples that a peer of the roster trains on next."""

    peer: PeerId
    samples: tuple[Samples, ...] = Field(max_length=1000)


class Header(Value):
    """One link of the chain."""

    run: RunId
    index: Count
    fragment: Count
    previous: Digest
    roster: tuple[Member, ...] = Field(min_length=1, max_length=MEMBER_LIMIT)
    leases: tuple[Assignment, ...]
    cursor: Count
    free: tuple[Samples, ...]
    lineage_tokens: Count
    payload: Digest

    @cached_property
    def digest(self) -> bytes:
        return digest_of(pack(self))

    @property
    def peers(self) -> tuple[str, ...]:
        return tuple(member.peer for member in self.roster)


class Position(Value):
    """A place in the log: `index` entries applied, the last of them `head` (before any: the manifest's digest)."""

    index: Count
    head: Digest

    def __str__(self) -> str:
        return f"{self.index}:{self.head.hex()[:8]}"


class LogError(ValueError):
    """A header that does not follow from the log. The message says which rule it breaks."""


@dataclass(frozen=True)
class LogState:
    """The log as seen from its end: all that the next entry depends on. Immutable; `append` gives the next state."""

    run: str
    manifest_digest: bytes
    samples_per_lease: int
    last: Header | None = None

    @cached_property
    def position(self) -> Position:
        if self.last is None:
            return Position(index=0, head=self.manifest_digest)
        return Position(index=self.last.index + 1, head=self.last.digest)

    @property
    def roster(self) -> tuple[str, ...]:
        """Peers of the last entry, first of them the leader's first choice; empty before the first entry."""
        return self.last.peers if self.last else ()

    @property
    def lineage_tokens(self) -> int:
        return self.last.lineage_tokens if self.last else 0

    @property
    def pool(self) -> SamplePool:
        return SamplePool(self.last.cursor, self.last.free) if self.last else SamplePool()

    @property
    def leases(self) -> dict[str, Lease]:
        return {lease.peer: lease.samples for lease in self.last.leases} if self.last else {}

    def pool_after(self, roster: Sequence[Member]) -> SamplePool:
        """The pool once `roster` has trained what it says, the rest of all leases having been given back.

        Raises: LogError when two members trained the same sample or one trained another's.
        """
        pool, leases = self.pool, self.leases
        for member in roster:
            try:
                pool = pool.release(leases.pop(member.peer, ())).claim(member.samples)
            except ValueError as error:
                raise LogError(f"{member.peer}: {error}") from error
        return pool.release(piece for lease in leases.values() for piece in lease)

    def next_header(self, roster: Sequence[Member], payload: bytes) -> Header:
        """The only header that may follow, given who took part and what came out. Raises: LogError."""
        peers = [member.peer for member in roster]
        if len(set(peers)) != len(peers):
            raise LogError("a peer is in the roster twice")
        tokens = sum(member.tokens for member in roster)
        if tokens == 0:
            raise LogError("nobody in the roster has trained anything")
        pool = self.pool_after(roster)
        leases: list[tuple[str, Lease]] = []
        for peer in peers:
            lease, pool = pool.take(self.samples_per_lease)
            leases.append((peer, lease))
        try:
            return Header(
                run=self.run,
                index=self.position.index,
                fragment=0,
                previous=self.position.head,
                roster=tuple(roster),
                leases=tuple(Assignment(peer=peer, samples=lease) for peer, lease in leases),
                cursor=pool.cursor,
                free=pool.free,
                lineage_tokens=self.lineage_tokens + tokens,
                payload=payload,
            )
        except ValidationError as error:
            raise LogError(f"no header can say that: {error.errors()[0]['msg']}") from error

    def append(self, header: Header) -> LogState:
        """Raises: LogError naming the first field that does not follow from the log."""
        expected = self.next_header(header.roster, header.payload)
        for field in Header.model_fields:
            if getattr(header, field) != getattr(expected, field):
                raise LogError(f"entry {header.index}: its {field} does not follow from the log")
        return self.at(header)

    def at(self, header: Header | None) -> LogState:
        """The state after `header`, taken on trust (from a snapshot whose digest peers vouch for)."""
        return LogState(self.run, self.manifest_digest, self.samples_per_lease, header)
