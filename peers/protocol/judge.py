"""What a leader makes of an accusation: whether what is shown convinces everybody. And what an entry says besides."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from peers.log.header import Faults
from peers.log.lineage import Lineage
from peers.log.state import LogState
from peers.protocol.amending import Amending
from peers.protocol.docket import Docket, FalseProofError
from peers.protocol.exchange import Exchange
from peers.protocol.faults import BadContribution, FaultProof, SignedAverage, TwoAverages
from peers.protocol.messages import Accuse, Prove, Ready
from peers.protocol.rounds import Round
from peers.protocol.showings import Showings
from peers.protocol.signed_averages import Averaged
from peers.values.manifest import Amendment


@dataclass(frozen=True)
class Judge:
    """Of one position. `exchange` is our own side of the round under way."""

    log: LogState
    docket: Docket
    amending: Amending
    lineage: Lineage
    exchange: Callable[[], Exchange | None]
    showings: Showings

    @property
    def marks(self) -> bytes:
        """What tells our averages from others'."""
        exchange = self.exchange()
        return exchange.averages.marks() if exchange else b""

    def is_bad_contribution(self, accuse: Accuse, round: Round) -> bool:
        """Return whether the accused has committed to what is none, or to another norm than it has."""
        accused = next((member for member in round.contributors if member.peer == accuse.accused), None)
        if accused is None or accuse.evidence is None:
            return False
        return self._is_proven(BadContribution(author=round.author(accused), evidence=accuse.evidence))

    def averaged(self, chunk: int) -> Averaged | None:
        """Return what has been signed to us of a chunk in the round under way."""
        exchange = self.exchange()
        return exchange.averages.signed(chunk) if exchange else None

    def is_two_averages(self, round: Round, first: Averaged, second: Averaged) -> bool:
        """Return whether one reducer has signed both of one chunk, and they differ."""
        reducer = first.origin.reducer
        starts = {member.peer: member.incarnation for member in round.roster}
        if (second.chunk, second.origin.reducer) != (first.chunk, reducer) or reducer not in starts:
            return False
        proof = TwoAverages(
            round_name=round.name,
            terms=round.terms,
            reducer=reducer,
            incarnation=starts[reducer],
            chunk=first.chunk,
            first=_signed(first),
            second=_signed(second),
        )
        return self._is_proven(proof)

    def _is_proven(self, proof: FaultProof) -> bool:
        try:
            self.docket.file(proof, self.lineage)
        except FalseProofError:
            return False
        return True

    # The annex ------------------------------------------------------------------------------------------------
    def annex(self, members: Collection[str], alone: bool) -> tuple[Faults, Amendment | None]:
        """Return the faults to be named in an entry with these members, and the amendment that it takes in. A minority
        that goes on alone names nobody. An amendment proves itself: nobody is shown anything before it signs that."""
        faults = () if alone else self.docket.provable(self.log, self.lineage, members)
        return faults, self.amending.proposed(self.log) if self.log.closes else None

    def shown(
        self, faults: Faults, peers: Iterable[str], ready: Mapping[str, Ready], now: float
    ) -> Mapping[str, Sequence[Prove]]:
        """Return what each of these members is shown before it signs that: what it was not shown yet, and what it said
        that it lacks when it was ready."""
        shown: dict[str, list[Prove]] = {}
        proofs = self.docket.behind(faults)
        for peer in peers if proofs else ():
            lacking = ready[peer].unproven if peer in ready else ()
            for known in proofs:
                proof = known.fault.proof
                if self.showings.is_due(peer, proof, now, is_lacking=proof in lacking):
                    shown.setdefault(peer, []).append(known.at(self.log.position))
        return shown


def _signed(average: Averaged) -> SignedAverage:
    return SignedAverage(digest=average.digest, absent=average.absent, signature=average.origin.signature)
