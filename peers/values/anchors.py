"""Anchors: keys that a run's manifest names, and the heads of its log that their holders have signed.

Anybody can found an open run a second time, with peers and entries of its own making, all signed. A head that an anchor
has signed tells the two apart: of two branches of the log the one that has it is the run's. Progress never waits for
anchors; a branch that has not come so far is behind, and nothing worse.

The manifest's order is one of precedence: what a key says of two branches counts only where those named before it say
nothing. A key that has signed two heads at one index has lied. The two are kept and passed on as proof, and nothing is
believed that it signed there or further on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Annotated, Self, TypeAlias

from pydantic import Field

from peers.values.identity import verify
from peers.values.signing import Keys, Signature, Verify
from peers.values.wire import Count, Digest, PeerId, RunId, Value, WireError, digest_of, pack, unpack

ANCHOR_CONTEXT = b"diloco-peer anchor\0"  # a signature made for anything else is worth nothing here
KEYS_LIMIT = 8
KEPT = 4
"""Heads of one key that are remembered, the newest ones; besides, two that contradict each other."""
HEADS_LIMIT = KEYS_LIMIT * (KEPT + 2)
HEADS_BYTES = 16 * 1024
DIGEST_BYTES = 8  # of what names all that is known, in heartbeats

Standing: TypeAlias = tuple[int, ...]
"""Of a branch, for each key in order: the newest of its heads that the branch has; 0: none; -1: it has another one."""
CONTRADICTED = -1


class AnchorError(ValueError):
    """Heads that no anchor of the run has signed. The message says why, as the end of a sentence."""


class AnchorText(Value):
    """What an anchor signs: the log of this run has this head after so many outer steps."""

    run: RunId
    index: Count
    head: Digest


class AnchoredHead(Value):
    """What names the log after `index` outer steps, signed by the peer `anchor`."""

    anchor: PeerId
    index: Annotated[int, Field(strict=True, ge=1, lt=2**62)]
    head: Digest
    signature: Signature

    @classmethod
    def sign(cls, run: str, index: int, head: bytes, anchor: str, keys: Keys) -> Self:
        """Sign a head as the peer `anchor`, whose keys these are."""
        return cls(anchor=anchor, index=index, head=head, signature=keys.sign(_text(run, index, head)))

    def is_signed(self, run: str, verify: Verify = verify) -> bool:
        """Whether its anchor has signed it for this run."""
        return verify(self.anchor, _text(run, self.index, self.head), self.signature)


class AnchoredHeads(Value):
    """Heads as one node tells them to another, and keeps them on its disk."""

    heads: Annotated[tuple[AnchoredHead, ...], Field(max_length=HEADS_LIMIT)]


@dataclass(frozen=True)
class Anchors:
    """The anchors of a run, in the manifest's order, and of what they have signed as much as is worth knowing.

    Whoever knows the same heads keeps the same ones of them, whichever came first.
    """

    run: str
    keys: tuple[str, ...] = ()
    heads: tuple[AnchoredHead, ...] = ()

    def with_heads(self, heads: Iterable[AnchoredHead]) -> Anchors:
        """Return these and more, whose signatures have been checked."""
        every = {(head.anchor, head.index, head.head, head.signature): head for head in (*heads, *self.heads)}
        by_place = {name[:3]: every[name] for name in sorted(every, reverse=True)}  # of two signatures one, the same
        ordered = [by_place[place] for place in sorted(by_place)]
        kept = [head for key in self.keys for head in _worth_keeping([one for one in ordered if one.anchor == key])]
        return self if tuple(kept) == self.heads else replace(self, heads=tuple(kept))

    def taking(self, packed: bytes, verify: Verify = verify) -> Anchors:
        """Return these and what somebody else knows. Raises: AnchorError."""
        try:
            told = unpack(AnchoredHeads, packed, HEADS_BYTES).heads
        except WireError as error:
            raise AnchorError(f"they cannot be read ({error})") from error
        known = set(self.heads)
        for head in told:
            if head.anchor not in self.keys:
                raise AnchorError(f"{head.anchor} is no anchor of the run")
            if head not in known and not head.is_signed(self.run, verify):
                raise AnchorError(f"the signature of {head.anchor} at outer step {head.index} is not its own")
        return self.with_heads(told)

    def up_to(self, key: str) -> Anchors:
        """Return what this key and those before it have signed: all that it has to go by when it overrules others."""
        keys = self.keys[: self.keys.index(key) + 1]
        return replace(self, keys=keys, heads=tuple(head for head in self.heads if head.anchor in keys))

    @property
    def packed(self) -> bytes:
        """Return what to tell others; empty: nothing is known."""
        return pack(AnchoredHeads(heads=self.heads)) if self.heads else b""

    @cached_property
    def digest(self) -> bytes:
        """Return what names all that is known; empty: nothing is."""
        return digest_of(self.packed)[:DIGEST_BYTES] if self.heads else b""

    @cached_property
    def believed(self) -> Mapping[str, tuple[AnchoredHead, ...]]:
        """The heads that count, by key, in their order."""
        by_key = {key: [head for head in self.heads if head.anchor == key] for key in self.keys}
        return {key: tuple(heads[: _honest(heads)]) for key, heads in by_key.items()}

    @cached_property
    def indices(self) -> frozenset[int]:
        """The places of the heads that count."""
        return frozenset(head.index for heads in self.believed.values() for head in heads)

    def before(self, key: str) -> list[AnchoredHead]:
        """Return the heads that count of the keys that overrule this one."""
        return [head for other in self.keys[: self.keys.index(key)] for head in self.believed[other]]

    @property
    def liars(self) -> dict[str, int]:
        """Keys that have signed two heads at one index, and that index: from there on they are not believed."""
        by_key = {key: [head for head in self.heads if head.anchor == key] for key in self.keys}
        return {key: heads[_honest(heads)].index for key, heads in by_key.items() if _honest(heads) < len(heads)}

    def newest_of(self, key: str) -> AnchoredHead | None:
        """Return the newest head of a key that counts."""
        return next(reversed(self.believed.get(key, ())), None)

    # Branches -------------------------------------------------------------------------------------------------
    def standing(self, heads: Mapping[int, bytes], after: int = 0) -> Standing:
        """What the keys say of a branch with these heads, by index, as far as it is known after so many outer steps.

        Of two branches that split there, the one with the greater standing is the run's.
        """
        return tuple(_standing_with(self.believed[key], heads, after) for key in self.keys)

    def contradiction(self, heads: Mapping[int, bytes]) -> AnchoredHead | None:
        """Return the first head that counts against a branch: it has another one there. None: nothing does."""
        for key, standing in zip(self.keys, self.standing(heads), strict=True):
            if standing > 0:
                return None
            if standing == CONTRADICTED:
                return next(one for one in self.believed[key] if heads.get(one.index, one.head) != one.head)
        return None

    def vouched(self, heads: Mapping[int, bytes]) -> int:
        """Return up to which index the first key that says something vouches for a branch; 0: not at all."""
        return max(0, next((standing for standing in self.standing(heads) if standing), 0))


NO_ANCHORS = Anchors("")


def _text(run: str, index: int, head: bytes) -> bytes:
    return ANCHOR_CONTEXT + pack(AnchorText(run=run, index=index, head=head))


def _honest(heads: list[AnchoredHead]) -> int:
    """How many heads of one key, in their order, come before the first two at one index."""
    pairs = pairwise(heads)
    return next((place for place, (one, other) in enumerate(pairs) if one.index == other.index), len(heads))


def _worth_keeping(heads: list[AnchoredHead]) -> list[AnchoredHead]:
    """Of one key, in their order: the newest of those before it has lied, and the proof of that."""
    honest = _honest(heads)
    return heads[max(0, honest - KEPT) : honest + 2] if honest < len(heads) else heads[-KEPT:]


def _standing_with(said: tuple[AnchoredHead, ...], heads: Mapping[int, bytes], after: int) -> int:
    reached = [head for head in said if head.index > after and head.index in heads]
    if any(heads[head.index] != head.head for head in reached):
        return CONTRADICTED
    return max((head.index for head in reached), default=0)
