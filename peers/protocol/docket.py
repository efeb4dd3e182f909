"""The proven lies that one peer knows of, and that the log does not name yet.

Whoever leads puts them into the annex of the next entry; whoever does not shows them to its leader. No member signs an
entry whose annex names somebody of whom it has seen no proof.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable
from typing import NamedTuple

from peers.log.header import FAULT_LIMIT, Fault, Position, may_be_named
from peers.log.lineage import Lineage
from peers.log.state import LogState
from peers.protocol.faults import Court, FaultProof, read_proof
from peers.protocol.messages import Prove
from peers.values.wire import WireError, digest_of, pack

KEPT = 64
"""Proofs that are remembered."""
KEPT_BYTES = 1 << 23
OF_ONE = 4
"""Proofs against one peer that are remembered: others may have named others."""
SHOWN_BYTES = 1 << 24
"""Bytes that a leader spends on showing an annex's proofs to all members: what costs more is not put into the log."""
SHOWN_TO_EACH = 1 << 20
"""Bytes of them that each member is shown."""


class FalseProofError(ValueError):
    """What is shown proves nothing."""


class Known(NamedTuple):
    """A proof that has been checked, as bytes."""

    fault: Fault
    position: Position
    data: bytes

    def at(self, position: Position) -> Prove:
        """Return what is said of it there."""
        return Prove(position=position, fault=self.fault.kind, proof=self.data)


class Docket:
    """Of one peer, for as long as it runs."""

    def __init__(self, court: Court) -> None:
        self.court = court
        self._known: OrderedDict[bytes, Known] = OrderedDict()  # by their digests

    def take(self, kind: str, data: bytes, lineage: Lineage) -> Fault | None:
        """Look at a proof that somebody shows. Returns the fault, if it is the first of its peer that is known here.

        A proof that is too old, of another log, or of a peer without a lease, which may be excluded already, is not
        looked at: no entry could name it, and whoever shows it may not know.

        Raises: FalseProofError.
        """
        if self.has_seen(data):
            return None
        try:
            proof = read_proof(kind, data)
        except WireError as error:
            raise FalseProofError(str(error)) from error
        may_be_named = proof.accused in lineage.log.known and _is_timely(proof.position, lineage)
        return self.file(proof, lineage) if may_be_named else None

    def has_seen(self, data: bytes) -> bool:
        """Return whether a proof is remembered."""
        return digest_of(data) in self._known

    def file(self, proof: FaultProof, lineage: Lineage) -> Fault | None:
        """Remember a proof, if an entry may name its peer. Returns the fault, if it is the first of its peer.

        Raises: FalseProofError.
        """
        if not proof.convicts(self.court):
            raise FalseProofError(f"it does not show that {proof.accused} has lied")
        fault = proof.fault
        if fault.peer not in lineage.log.known:
            return None
        is_first = not self.convicts(fault.peer)
        self._known.setdefault(fault.proof, Known(fault, proof.position, pack(proof)))
        self._forget(fault.peer, lineage)
        return fault if is_first else None

    def convicts(self, peer: str) -> bool:
        """Return whether anything is remembered that proves that the peer has lied."""
        return any(known.fault.peer == peer for known in self._known.values())

    def proven_by(self, data: bytes, lineage: Lineage) -> Fault | None:
        """Return the fault that these bytes prove, if they are known here and recent enough."""
        known = self._known.get(digest_of(data))
        return known.fault if known is not None and _is_timely(known.position, lineage) else None

    def provable(self, log: LogState, lineage: Lineage, besides: Collection[str]) -> tuple[Fault, ...]:
        """Return the faults that the annex of the next entry may have, `besides` those of its members."""
        faults: dict[str, Fault] = {}
        room = min(SHOWN_TO_EACH, SHOWN_BYTES // max(1, len(besides)))
        for known in self._known.values():
            peer = known.fault.peer
            may_be_named = peer in log.known and peer not in besides and peer not in faults
            if may_be_named and len(known.data) <= room and _is_timely(known.position, lineage):
                faults[peer], room = known.fault, room - len(known.data)
        return tuple(faults.values())[:FAULT_LIMIT] if log.closes and log.exclusion else ()

    def has(self, faults: Iterable[Fault], lineage: Lineage) -> bool:
        """Return whether all of these are proven to us, and recent enough to be in the next entry."""
        return all(self._has(fault, lineage) for fault in faults)

    def _has(self, fault: Fault, lineage: Lineage) -> bool:
        known = self._known.get(fault.proof)
        return known is not None and known.fault == fault and _is_timely(known.position, lineage)

    def behind(self, faults: Iterable[Fault]) -> tuple[Known, ...]:
        """Return the proofs of these faults, as far as they are here."""
        return tuple(self._known[fault.proof] for fault in faults if fault.proof in self._known)

    def _forget(self, newest: str, lineage: Lineage) -> None:
        """Drop what no entry can name any more, and what is too much: of one peer's those between the first, which we
        may have named, and the newest, which others may."""
        peers = lineage.log.known
        for digest, known in list(self._known.items()):
            if known.fault.peer not in peers or not _is_timely(known.position, lineage):
                del self._known[digest]
        of_newest = [digest for digest, known in self._known.items() if known.fault.peer == newest]
        for digest in of_newest[OF_ONE - 1 : -1]:
            del self._known[digest]
        while len(self._known) > KEPT or sum(len(known.data) for known in self._known.values()) > KEPT_BYTES:
            self._known.popitem(last=False)


def _is_timely(position: Position, lineage: Lineage) -> bool:
    """Whether a lie was told in our log, and so lately that the next entry may name it."""
    log = lineage.log
    is_recent = may_be_named(position.index, log.position.index, log.exclusion)
    return is_recent and lineage.head_at(position.index) == position.head
