"""What a member shows its leader of others' lies, and what it wants to see before it signs that somebody has lied."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from contextlib import suppress

from peers.log.header import Fault, Faults
from peers.log.state import LogState
from peers.presence.presence import Presence
from peers.protocol.commitment import Author, Commitment
from peers.protocol.desk import Desk
from peers.protocol.docket import KEPT, OF_ONE, FalseProofError
from peers.protocol.effects import Dropped, Note, Send
from peers.protocol.faults import FaultProof, TwoCommitments
from peers.protocol.messages import Commit, Complete, Prove, Ready
from peers.protocol.patience import Patience
from peers.protocol.replica import Replica
from peers.protocol.rounds import Round
from peers.protocol.showings import Showings
from peers.values.wire import digest_of

JUDGED = 16
"""Proofs of one sender that are looked at in one slot; besides them only those that its leader names."""


class Witness:
    """Of one slot."""

    def __init__(self, desk: Desk, presence: Presence, log: LogState, replica: Replica, patience: Patience) -> None:
        self._desk = desk
        self._presence = presence
        self._log = log
        self._replica = replica
        self._patience = patience
        self._showings = Showings(desk.settings.timing.heartbeat_expiry)
        self._committed: dict[str, dict[Author, Commitment]] = {}
        self._votes = desk.polls.open(log)
        self._seen: dict[Fault, None] = {}  # proven here; the docket may have had to forget the proof since
        self._judged: Counter[str] = Counter()
        self._unheard: set[str] = set()  # whoever has shown what proves nothing
        self._lacking: tuple[str, Faults, float] | None = None  # who has named whom without proof, and since when

    def show(self, leader: str) -> None:
        """Show the leader what is proven to us, now and then: it may get lost, or the leader may be another start."""
        if leader == self._desk.me:
            return
        faults = self._desk.docket.provable(self._log, self._replica.lineage, (self._desk.me,))
        for known in self._desk.docket.behind(faults):
            if self._showings.is_due(leader, known.fault.proof, self._desk.now, is_lacking=True):
                self._desk.emit(Send(leader, known.at(self._log.position)))

    def hear(self, sender: str, shown: Prove) -> None:
        """Somebody shows that another one has lied. Whoever shows what proves nothing lies itself."""
        if not self._is_worth_a_look(sender, shown.proof):
            return
        try:
            fault = self._desk.docket.take(shown.fault, shown.proof, self._replica.lineage)
        except FalseProofError as error:
            self._desk.emit(Dropped(sender, "proof", str(error)))
            self._unheard.add(sender)
            self._presence.standing.bar(sender, self._desk.now)
            self._presence.distrust(sender)
            return
        if fault is not None:
            self._is_convicted(fault.peer, fault.kind)
        if (known := self._desk.docket.proven_by(shown.proof, self._replica.lineage)) is not None:
            self._see([known])

    def _is_worth_a_look(self, sender: str, proof: bytes) -> bool:
        """Return whether to check a proof. That takes time, and whoever lies can make up others without end: so nothing
        is checked of a sender that is excluded, or whose proof was false, and of all others a few."""
        if self._desk.docket.has_seen(proof):
            return True
        if sender in self._unheard or sender in self._log.excluded:
            return False
        self._judged[sender] += 1
        return self._judged[sender] <= JUDGED or digest_of(proof) in self._unproven

    def lacking(self, leader: str) -> tuple[bytes, ...]:
        """Return the digests of the proofs that the leader has named, and that are not here."""
        return self._unproven if self._lacking and self._lacking[0] == leader else ()

    @property
    def _unproven(self) -> tuple[bytes, ...]:
        faults = self._lacking[1] if self._lacking else ()
        return tuple(fault.proof for fault in faults if not self._is_proven(fault))

    def _is_proven(self, fault: Fault) -> bool:
        return fault in self._seen or self._desk.docket.has([fault], self._replica.lineage)

    def compare(self, sender: str, ready: Ready) -> None:
        """See whether a peer that is ready has committed to something else before, for the same attempt."""
        author, said = ready.author(sender), ready.commitment
        if said is None or self._desk.docket.convicts(sender):
            return
        committed = self._committed.setdefault(sender, {})
        known = committed.get(author)
        if known is not None:
            if known.root != said.root:
                self.file(TwoCommitments(author=author, first=known, second=said))
        elif said.is_of(author, self._desk.keys.verify):  # else it would stand in the way of what is signed
            committed[author] = said
            if len(committed) > OF_ONE:
                del committed[next(iter(committed))]

    def compare_votes(self, sender: str, complete: Complete, round: Round | None = None) -> None:
        """See whether a voter, or a member of the round under way, has signed another entry in the same attempt: here,
        or where we were a moment ago."""
        votes = self._desk.polls.at(complete.position)
        if votes is None or self._desk.docket.convicts(sender):
            return
        if (proof := votes.hear(sender, complete, round)) is not None:
            self.file(proof)

    def compare_certificate(self, commit: Commit) -> None:
        """See whether a member has signed another entry for somebody else than it said to us, in the same attempt."""
        for proof in self._votes.compare(commit):
            self.file(proof)

    def file(self, proof: FaultProof) -> None:
        """Remember a lie that was found, if it is proven."""
        with suppress(FalseProofError):
            if (fault := self._desk.docket.file(proof, self._replica.lineage)) is not None:
                self._is_convicted(fault.peer, fault.kind)

    def _is_convicted(self, peer: str, kind: str) -> None:
        """Neither take the peer into rounds of ours nor be led by it, for a while."""
        self._presence.standing.bar(peer, self._desk.now)
        self._presence.distrust(peer)
        self._desk.emit(Note("warning", f"{peer} is shown to have lied: {kind}"))

    def is_convinced(self, faults: Faults, leader: str) -> bool:
        """Return whether we have seen the proofs of an entry's annex, which a leader sends with what it begins. One
        that names somebody without proof for as long as an attempt may stand still is given up."""
        if all(self._is_proven(fault) for fault in faults):
            self._see(faults)
            self._lacking = None
            return True
        if self._lacking is None or self._lacking[:2] != (leader, faults):
            self._lacking = leader, faults, self._desk.now
        elif self._desk.now - self._lacking[2] > self._desk.schedule.stall:
            self._patience.give_up(leader)
        return False

    def _see(self, faults: Iterable[Fault]) -> None:
        """Remember for this entry what has been proven, however many other proofs against itself a liar shows."""
        self._seen |= dict.fromkeys(faults)
        for oldest in list(self._seen)[:-KEPT]:
            del self._seen[oldest]
