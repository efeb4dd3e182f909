"""One peer's evidence: statements received from other peers, and proofs that some of these peers lie (R9).

The protocol uses it in two ways. It passes each statement that it hears to an `observe` method, which returns the
faults that this statement proves. And it asks for the faults that the next entry may name, or checks that the faults in
a leader's header are proven to this peer. The log then excludes a named peer for some cycles. There is no other
penalty: a claim without proof changes nothing, and after a false proof its sender's proofs are ignored for a cycle.

Everything here is pure: no clock, no input or output. The lineage is passed with each call, since the faults that may
be named depend on the peer's place in the log.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from peers.audit.proofs import (
    BadContribution,
    FaultProof,
    SignedChoice,
    SignedDeparture,
    Statements,
    Verifier,
    read_proof,
)
from peers.log.certificate import Certificate, Departure, Phase, prove
from peers.log.header import FAULT_LIMIT, Fault, Position, may_be_named
from peers.log.lineage import Branch, Lineage
from peers.log.settings import RunSettings
from peers.log.state import LogError, LogState, committee
from peers.messages.averages import Averaged
from peers.messages.commitment import Author, Commitment, CommittedChunk
from peers.messages.messages import Certified, Leaving, Proof, Vote
from peers.messages.rounds import Round
from peers.values.identity import Verify
from peers.values.wire import WireError, digest_of, pack
from peers.values.workload import PayloadKind

OF_ONE = 4
"""Proofs against one peer that are remembered, since different peers may have seen different ones."""
PROVEN = 1 << 10
"""Faults that are remembered as proven: so many that a liar cannot displace a named one by a flood of proofs."""
KEPT = 64
"""Proofs whose bytes are kept, so that they can be shown."""
KEPT_BYTES = 1 << 23
"""Bytes of kept proofs: eight of the longest, which contain a whole chunk."""
LOOKED_AT = 16
"""Proofs, and certificates of committed entries, that are checked of one sender in one cycle, besides proofs that a
header names. Each costs some signature checks."""
WANTED = 16
"""Maximum digests of named proofs that are accepted from any sender: enough for four proposals."""
SHOWN_BYTES = 1 << 24
"""Bytes that a leader may send to show one entry's proofs to all members. A fault that needs more is not named."""
SHOWN_TO_EACH = 1 << 20
"""Bytes of proofs that a leader may send to one member: one of the longest proofs."""


class FalseProofError(ValueError):
    """An error for a message with a proof that is malformed, or that does not show that the accused peer lies."""


# Limits on proofs -------------------------------------------------------------------------------------------------
class Known(NamedTuple):
    """A checked proof: its fault, its position in the log, and its packed bytes."""

    fault: Fault
    position: Position
    data: bytes


class ProofLimits:
    """Limits on the proofs checked and shown in one cycle, so that liars cost a bounded time and bandwidth."""

    def __init__(self, pause: float) -> None:
        """Create the limits. `pause` is the seconds until a proof is shown to the same peer a second time."""
        self._pause = pause
        # by sender: number of its proofs, and certificates of committed entries, that this peer did not ask for
        self._unasked = Counter[str]()
        self._misled = set[str]()  # senders of false proofs in this cycle
        self._wanted: dict[bytes, None] = {}
        # by peer and proof: number of times shown, time of the last in seconds
        self._shown: dict[tuple[str, bytes], tuple[int, float]] = {}

    def want(self, proofs: Iterable[bytes]) -> None:
        """Let `is_due` accept the proofs with these digests from any sender. Keep only the newest WANTED digests."""
        self._wanted |= dict.fromkeys(proofs)
        for oldest in list(self._wanted)[:-WANTED]:
            del self._wanted[oldest]

    def is_due(self, sender: str, proof: bytes) -> bool:
        """Return True if this peer should check a proof, given by its digest. It checks each proof that it misses for a
        header's faults. Of other proofs, it checks LOOKED_AT of each sender in a cycle, and none after a false one."""
        if proof in self._wanted:
            return True
        self._unasked[sender] += 1
        return sender not in self._misled and self._unasked[sender] <= LOOKED_AT

    def record_false(self, sender: str, proof: bytes) -> None:
        """Record that the sender has shown a false proof with this digest."""
        self._misled.add(sender)
        self._wanted.pop(proof, None)

    def may_show(self, peer: str, proof: bytes, now: float, again: bool) -> bool:
        """Return True, and record the proof with this digest as shown, if `peer` was not shown it before. With `again`,
        also do so after a pause, which doubles each time. Otherwise return False.

        Each peer is shown a proof so rarely because a proof may be as long as a chunk.
        """
        times, last = self._shown.get((peer, proof), (0, 0.0))
        if times and not (again and now - last >= self._pause * 2.0 ** (times - 1)):
            return False
        self._shown[peer, proof] = times + 1, now
        return True


class Evidence:
    """The evidence of lies that one peer collects for as long as it runs.

    The `observe` methods return the faults that a statement proves of peers not convicted before.
    """

    def __init__(self, settings: RunSettings, verify: Verify, payloads: Sequence[PayloadKind]) -> None:
        self._verifier = Verifier(settings.run, verify, payloads)
        self._pause = settings.timing.heartbeat_expiry
        self._statements = Statements(self._verifier)
        self._proven: OrderedDict[bytes, tuple[Fault, Position]] = OrderedDict()  # proven faults, by proof digest
        self._proofs: OrderedDict[bytes, Known] = OrderedDict()  # by digest; if more than KEPT, the oldest is dropped
        self._limits = ProofLimits(self._pause)
        self._position: Position | None = None

    # Statements -----------------------------------------------------------------------------------------------
    def observe_vote(self, peer: str, vote: Vote, lineage: Lineage) -> tuple[Fault, ...]:
        """Remember a vote at a recent position. Return the faults that it proves together with earlier statements."""
        if not self._may_matter(peer, vote.position, lineage):
            return ()
        signed = SignedChoice(vote.choice, vote.signature)
        return self._found(self._statements.vote(peer, vote.position, vote.incarnation, signed), lineage)

    def observe_certified(self, certified: Certified, log: LogState, lineage: Lineage) -> tuple[Fault, ...]:
        """Remember the votes in a verified certificate of either phase. Return the faults that they prove. `log` is the
        log before the certificate's entry."""
        before = log.of(certified.position.fragment)
        if certified.certificate is None or before.position != certified.position:
            return ()
        return self._observe_certificate(certified.certificate, before, lineage)

    def observe_late(self, sender: str, certified: Certified, lineage: Lineage) -> tuple[Fault, ...]:
        """Verify a certificate for a recent position whose entry is already committed, and remember its votes. Return
        the faults that they prove.

        The votes for this peer's own entry at the position are remembered, too, since a fork has two certificates. In a
        cycle a few certificates of each sender are checked.
        """
        self._follow(lineage)
        position, certificate = certified.position, certified.certificate
        log, entry = lineage.start(position.head), lineage.after(position)
        if log is None or certificate is None:
            return ()
        is_ours = entry is not None and entry[0] == certified.header and certificate.choice.phase is Phase.COMMIT
        if is_ours or sender in lineage.log.excluded or not self._limits.is_due(sender, certified.header.digest):
            return ()
        before = log.opening(position.fragment)
        try:
            prove(certificate, before, certified.header, self._verifier.verify, certificate.choice.phase)
        except LogError:
            return ()
        ours = self._observe_certificate(entry[1], before, lineage) if entry and entry[1] else ()
        return ours + self._observe_certificate(certificate, before, lineage)

    def observe_split(self, one: Branch, other: Branch, lineage: Lineage) -> tuple[Fault, ...]:
        """Remember the verified votes where two branches first differ. Return the faults that they prove."""
        faults: tuple[Fault, ...] = ()
        for fragment in sorted(one.certificates.keys() & other.certificates.keys()):
            for branch in (one, other):
                faults += self._observe_certificate(branch.certificates[fragment], one.start.of(fragment), lineage)
        return faults

    def _observe_certificate(self, certificate: Certificate, log: LogState, lineage: Lineage) -> tuple[Fault, ...]:
        """Remember the votes and farewells in a certificate. Return the faults that they prove. Votes for the run's
        first entry are not remembered, because no entry may name lies about the first entry (R9)."""
        position, faults = log.position, list[Fault]()
        voters = committee(certificate.group, position.head) if certificate.group else log.electors
        for signer in certificate.signers:
            peer, incarnation = voters[signer.place] if signer.place < len(voters) else ("", 0)
            if self._may_matter(peer, position, lineage):
                signed = SignedChoice(certificate.choice, signer.signature)
                proof = self._statements.vote(peer, position, incarnation, signed, is_checked=True)
                faults += self._found(proof, lineage)
        for farewell in certificate.farewells:
            peer, incarnation = voters[farewell.place] if farewell.place < len(voters) else ("", 0)
            if peer:
                departure = Departure(run=log.run, peer=peer, incarnation=incarnation, index=farewell.index)
                faults += self._observe_departure(SignedDeparture(departure, farewell.signature), lineage)
        return tuple(faults)

    def observe_farewell(self, peer: str, leaving: Leaving, lineage: Lineage) -> tuple[Fault, ...]:
        """Remember a farewell, and return the faults that it proves. Ignore it if the log names another incarnation of
        the peer."""
        if lineage.log.incarnations.get(peer) != leaving.incarnation:
            return ()
        run, incarnation, index = self._verifier.run, leaving.incarnation, leaving.departure
        departure = Departure(run=run, peer=peer, incarnation=incarnation, index=index)
        return self._observe_departure(SignedDeparture(departure, leaving.signature), lineage)

    def _observe_departure(self, farewell: SignedDeparture, lineage: Lineage) -> tuple[Fault, ...]:
        self._follow(lineage)
        is_known = farewell.departure.peer in lineage.log.accountable
        return self._found(self._statements.farewell(farewell), lineage) if is_known else ()

    def observe_average(self, round: Round, average: Averaged, lineage: Lineage) -> tuple[Fault, ...]:
        """Remember an average whose signature is verified. Return the faults that it proves."""
        if not self._may_matter(average.origin.reducer, round.name.position, lineage):
            return ()
        return self._found(self._statements.average(round, average), lineage)

    def observe_commitment(self, author: Author, commitment: Commitment, lineage: Lineage) -> tuple[Fault, ...]:
        """Remember a commitment to a contribution. Return the faults that it proves with earlier commitments."""
        if not self._may_matter(author.peer, author.position, lineage):
            return ()
        return self._found(self._statements.commitment(author, commitment), lineage)

    def observe_blocks(self, author: Author, chunk: CommittedChunk, lineage: Lineage) -> tuple[Fault, ...]:
        """Return the fault of a peer that committed to a chunk although the chunk is no valid contribution."""
        if not self._may_matter(author.peer, author.position, lineage):
            return ()
        return self._found(BadContribution(author=author, evidence=chunk), lineage)

    def observe_proof(self, sender: str, shown: Proof, lineage: Lineage) -> tuple[Fault, ...]:
        """Check a proof that another peer sent. Return the faults that are newly proven.

        A proof that no entry could name is ignored: too old, of another log, or about a peer without a lease, which may
        be excluded already. The sender may not know that, so such a proof does not count as false.
        Raises: FalseProofError.
        """
        self._follow(lineage)
        digest = digest_of(shown.proof)
        if digest in self._proven:
            return self._remember(Known(*self._proven[digest], shown.proof))
        if sender in lineage.log.excluded or not self._limits.is_due(sender, digest):
            return ()
        try:
            proof = read_proof(shown.fault, shown.proof)
            return self._file(proof) if self._may_matter(proof.accused, proof.position, lineage) else ()
        except (WireError, FalseProofError) as error:
            self._limits.record_false(sender, digest)
            raise FalseProofError(str(error)) from error

    def _may_matter(self, peer: str, position: Position, lineage: Lineage) -> bool:
        """Return True if an entry may still name the peer for a lie about this position."""
        self._follow(lineage)
        return peer in lineage.log.accountable and _is_timely(position, lineage)

    def _follow(self, lineage: Lineage) -> None:
        """If the log's position is new, drop evidence that no entry can name any more, and begin new ProofLimits."""
        position = lineage.log.position
        if position == self._position:
            return
        self._position, self._limits = position, ProofLimits(self._pause)
        self._statements.forget(lineage)
        gone = [
            digest
            for digest, (fault, place) in self._proven.items()
            if fault.peer not in lineage.log.accountable or not _is_timely(place, lineage)
        ]
        for digest in gone:
            self._forget(digest)

    # Faults ---------------------------------------------------------------------------------------------------
    def has_convicted(self, peer: str) -> bool:
        """Return True if this peer has a proof that `peer` lies, and the log may still name the fault."""
        return any(fault.peer == peer for fault, _ in self._proven.values())

    def _found(self, proof: FaultProof | None, lineage: Lineage) -> tuple[Fault, ...]:
        """Store a proof that this peer itself has found. Ignore it if the accused is already convicted, or if its
        position is too old or of another log. Return the newly proven faults."""
        if proof is None or self.has_convicted(proof.accused) or not _is_timely(proof.position, lineage):
            return ()
        try:
            return self._file(proof)
        except FalseProofError:
            return ()

    def _file(self, proof: FaultProof) -> tuple[Fault, ...]:
        """Check and store a proof. Return the newly proven faults. Raises: FalseProofError if it convicts no peer."""
        if not proof.convicts(self._verifier):
            raise FalseProofError(f"it does not show that {proof.accused} lies")
        return self._remember(Known(proof.fault, proof.position, pack(proof)))

    def _remember(self, known: Known) -> tuple[Fault, ...]:
        """Store a checked proof. Return its fault if it is the first proof against the accused peer, else ()."""
        fault, is_first = known.fault, not self.has_convicted(known.fault.peer)
        self._proven[fault.proof] = fault, known.position
        self._proven.move_to_end(fault.proof)
        self._proofs.setdefault(fault.proof, known)
        of_one = [digest for digest, known in self._proofs.items() if known.fault.peer == fault.peer]
        # Keep the newest proof against the accused, and the oldest three, since `provable` prefers the oldest.
        for digest in of_one[OF_ONE - 1 : -1]:
            del self._proofs[digest]
        while len(self._proofs) > KEPT or sum(len(known.data) for known in self._proofs.values()) > KEPT_BYTES:
            self._proofs.popitem(last=False)
        while len(self._proven) > PROVEN:
            self._forget(next(iter(self._proven)))
        return (fault,) if is_first else ()

    def _forget(self, digest: bytes) -> None:
        del self._proven[digest]
        self._proofs.pop(digest, None)

    def provable(self, log: LogState, lineage: Lineage, members: Collection[str]) -> tuple[Fault, ...]:
        """Return the faults that the entry after `log` may name: of peers that are not its `members`, with proofs short
        enough to show to all members. Only a later entry can name a member's fault."""
        self._follow(lineage)
        faults: dict[str, Fault] = {}
        room = min(SHOWN_TO_EACH, SHOWN_BYTES // max(1, len(members)))
        for known in self._proofs.values():
            peer = known.fault.peer
            if peer not in members and peer not in faults and len(known.data) <= room:
                faults[peer], room = known.fault, room - len(known.data)
        return tuple(faults.values())[:FAULT_LIMIT] if log.closes else ()

    def missing_proofs(self, faults: Iterable[Fault], lineage: Lineage) -> tuple[bytes, ...]:
        """Return the digests of those proofs of `faults` that are missing here, and accept these from any sender."""
        self._follow(lineage)
        missing = tuple(fault.proof for fault in faults if self._proven.get(fault.proof, (None,))[0] != fault)
        self._limits.want(missing)
        return missing

    def has(self, faults: Iterable[Fault], lineage: Lineage) -> bool:
        """Return True if this peer has, for each of these faults, a proof that is recent enough for the next entry."""
        return not self.missing_proofs(faults, lineage)

    # Showing proofs -------------------------------------------------------------------------------------------
    def behind(self, faults: Iterable[Fault]) -> tuple[Known, ...]:
        """Return the proofs of these faults that this peer still stores; some may be dropped."""
        return tuple(self._proofs[fault.proof] for fault in faults if fault.proof in self._proofs)

    def show(
        self, peer: str, faults: Iterable[Fault], position: Position, now: float, again: bool = False
    ) -> tuple[Proof, ...]:
        """Return messages that show a peer the proofs of these faults, each proof once in a cycle. With `again`, show a
        proof once more after a pause that doubles each time, because the peer may not have received it."""
        return tuple(
            Proof(position=position, fault=known.fault.kind, proof=known.data)
            for known in self.behind(faults)
            if self._limits.may_show(peer, known.fault.proof, now, again)
        )


def _is_timely(position: Position, lineage: Lineage) -> bool:
    """Return True if a position is in this peer's log, and so recent that the next entry may name a lie about it."""
    log = lineage.log
    is_recent = may_be_named(position.index, log.position.index, log.exclusion) and position.fragment < log.fragments
    return is_recent and lineage.head_at(position.index) == position.head
