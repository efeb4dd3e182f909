"""Signed heads: heads of the log, signed by the archives that a run's manifest names.

Any peer can found an open run a second time, with peers and entries of its own, all signed. A head that an archive has
signed distinguishes the two: of two branches of the log, the one that has it is the run's. Progress never waits for
archives; a branch that does not reach the head yet is only behind.

All keys count equally. A key that has signed two heads at one index does not count from there on; nor do two keys that
have signed different heads at one index. Those heads are kept and passed on as proof.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, Self

from pydantic import Field

from peers.values.identity import Keys, Signature, Verify, verify
from peers.values.wire import Digest, PeerId, Value, WireError, pack, pack_plain, unpack

# prefix of signed bytes, so that no other signature is valid as a head's
SIGNING_CONTEXT = b"diloco-peer signed head\0"
KEYS_LIMIT = 8  # maximum number of archives in a manifest, since every node keeps and checks their heads
KEPT = 4
"""Number of a key's newest heads that are kept, besides two that show why it does not count any more."""
HEADS_LIMIT = KEYS_LIMIT * (KEPT + 2)  # maximum number of heads that are kept, of all archives together
HEADS_BYTES = 16 * 1024  # maximum bytes of a packed list of heads; HEADS_LIMIT heads are 8 KB
CONTRADICTED = -1  # standing of a branch that a signed head contradicts: lower than any other standing


class SignedHeadsError(ValueError):
    """Error: not all heads are signed by archives of the run. The message is the reason, as the end of a sentence."""


class SignedHead(Value):
    """The head of the log after `index` outer steps, signed by the peer `archive`."""

    archive: PeerId
    index: Annotated[int, Field(strict=True, ge=1, lt=2**62)]
    head: Digest
    signature: Signature

    @classmethod
    def sign(cls, run: str, index: int, head: bytes, archive: str, keys: Keys) -> Self:
        """Sign a head as the archive `archive`, whose key pair is `keys`, and return it."""
        return cls(archive=archive, index=index, head=head, signature=keys.sign(_text(run, index, head)))

    def is_signed(self, run: str, verify: Verify = verify) -> bool:
        """Return True if the archive has signed this head for this run."""
        return verify(self.archive, _text(run, self.index, self.head), self.signature)


class HeadList(Value):
    """Signed heads, as nodes send them to each other and keep them on their disks."""

    heads: Annotated[tuple[SignedHead, ...], Field(max_length=HEADS_LIMIT)]


def pack_heads(heads: Iterable[SignedHead]) -> bytes:
    """Return the bytes of signed heads, for another node or the disk."""
    return pack(HeadList(heads=tuple(heads)))


def unpack_heads(packed: bytes) -> tuple[SignedHead, ...]:
    """Return the signed heads in these bytes, without a check of their signatures. Raises: SignedHeadsError when they
    cannot be read."""
    try:
        return unpack(HeadList, packed, HEADS_BYTES).heads
    except WireError as error:
        raise SignedHeadsError(f"they cannot be read ({error})") from error


@dataclass(frozen=True)
class SignedHeads:
    """The heads that the archives of a run have signed: the newest ones of each archive, and those that show a
    contradiction. `keys` are the archives' peer ids."""

    run: str
    keys: tuple[str, ...] = ()
    heads: tuple[SignedHead, ...] = ()

    def with_heads(self, heads: Iterable[SignedHead]) -> SignedHeads:
        """Return these heads with `heads` added. The caller must have checked their signatures."""
        by_place = {(one.index, one.archive, one.head): one for one in (*heads, *self.heads)}
        ordered = [by_place[place] for place in sorted(by_place)]
        ends, kept = _disbelieved(ordered), list[SignedHead]()
        for key in self.keys:
            own, end = [one for one in ordered if one.archive == key], ends.get(key)
            kept += [one for one in own if end is None or one.index < end][-KEPT:]
            kept += [one for one in own if one.index == end][:2]
        return self if tuple(kept) == self.heads else replace(self, heads=tuple(kept))

    def taking(self, heads: Iterable[SignedHead], verify: Verify = verify) -> SignedHeads:
        """Check the signatures of `heads`, which another node has sent, and return a SignedHeads with `heads` added.
        Raises: SignedHeadsError."""
        new = [head for head in heads if head not in self.heads]
        for head in new:
            if head.archive not in self.keys:
                raise SignedHeadsError(f"{head.archive} is not an archive of the run")
            if not head.is_signed(self.run, verify):
                raise SignedHeadsError(f"the signature of {head.archive} at outer step {head.index} is not its own")
        return self.with_heads(new) if new else self

    def only(self, key: str) -> SignedHeads:
        """Return only those of these heads that the archive with this key has signed."""
        return replace(self, keys=(key,), heads=tuple(head for head in self.heads if head.archive == key))

    @cached_property
    def disbelieved(self) -> Mapping[str, int]:
        """The archives that have contradicted themselves or each other, each with the index from which on its heads do
        not count."""
        return _disbelieved(self.heads)

    @cached_property
    def believed(self) -> tuple[SignedHead, ...]:
        """The heads that count, in the log's order. The heads of an archive in `disbelieved` count only below the index
        given there."""
        ends = self.disbelieved
        counting = (head for head in self.heads if head.index < ends.get(head.archive, head.index + 1))
        return tuple(sorted(counting, key=lambda head: (head.index, head.archive)))

    @cached_property
    def indices(self) -> frozenset[int]:
        """The indices of the heads that count. An archive's heads count below the first index at which it contradicts
        itself or another archive."""
        return frozenset(head.index for head in self.believed)

    @property
    def newest(self) -> SignedHead | None:
        """The head with the highest index, of those that count; None if none counts. An archive's heads count below the
        first index at which it contradicts itself or another archive."""
        return self.believed[-1] if self.believed else None

    # Branches -------------------------------------------------------------------------------------------------
    def standing(self, heads: Mapping[int, bytes], after: int = 0) -> int:
        """Return the highest index above `after` at which an archive has signed the branch's head, or 0. Return
        CONTRADICTED if a signed head differs from the branch's. `heads` are the branch's heads, by index.

        Of two branches that split there, the one with the greater standing is the run's.
        """
        reached = [one for one in self.believed if one.index > after and one.index in heads]
        if any(heads[one.index] != one.head for one in reached):
            return CONTRADICTED
        return max((one.index for one in reached), default=0)

    def contradiction(self, heads: Mapping[int, bytes]) -> SignedHead | None:
        """Return the first signed head that differs from the head at its index in `heads`, which are the heads of a
        branch by index. Return None if no head differs."""
        return next((one for one in self.believed if heads.get(one.index, one.head) != one.head), None)

    def vouched(self, heads: Mapping[int, bytes]) -> int:
        """Return the highest index at which archives have signed a branch's head, given the branch's heads by index.
        Return 0 if there is none, or if they contradict the branch."""
        return max(0, self.standing(heads))


NOTHING_SIGNED = SignedHeads("")


def _text(run: str, index: int, head: bytes) -> bytes:
    return SIGNING_CONTEXT + pack_plain([run, index, head])


def _disbelieved(heads: Iterable[SignedHead]) -> dict[str, int]:
    """Return the index from which on an archive's heads do not count, by archive. At this index the archive has signed
    two heads, or it and another archive that still counted have signed different heads: then both stop counting."""
    at: dict[int, dict[str, set[bytes]]] = {}
    for one in heads:
        at.setdefault(one.index, {}).setdefault(one.archive, set()).add(one.head)
    ends = dict[str, int]()
    for index, signed in sorted(at.items()):
        here = {key: named for key, named in signed.items() if key not in ends}
        liars = {key for key, named in here.items() if len(named) > 1}
        others = here.keys() - liars
        disputed = others if len(set[bytes]().union(*(here[key] for key in others))) > 1 else set()
        ends |= dict.fromkeys(liars | disputed, index)
    return ends
