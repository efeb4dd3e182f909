"""This peer's copy of the run's state: its place in the log, and how it gets and applies the next entries."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from enum import StrEnum
from typing import ClassVar

from peers.errors import LocalProtocolError
from peers.log.certificate import Certificate, shortened
from peers.log.header import NO_PAYLOAD, Header
from peers.log.lineage import Lineage
from peers.log.state import LogState
from peers.presence.presence import Presence
from peers.protocol.attendance import are_most
from peers.protocol.context import Context
from peers.protocol.effects import Apply, FetchPayload, FetchSnapshot, Note, TokensLost
from peers.protocol.events import Applied, Digested, SignedHeadsSeen, SnapshotFailed, SnapshotRestored
from peers.protocol.internal import Behind, EntryMade, FarBehind, NoneAhead
from peers.protocol.state_machine import Row, StateMachine, Table
from peers.values.signed_heads import NOTHING_SIGNED, SignedHead, SignedHeads

PASSED_ON = 16
"""Maximum number of members to which an entry is sent directly. With more members it goes down a tree."""


class ReplicaState(StrEnum):
    LEVEL = "level"
    FETCHING = "fetching"
    REPLAYING = "replaying"
    APPLYING = "applying"


LEVEL, FETCHING, REPLAYING, APPLYING = ReplicaState
DIGESTED: dict[type, Row] = {Digested: Row("_digested")}
"""The driver computes a state's digest in parallel, so Digested may arrive at any time after the entry was applied."""


class Replica(StateMachine):
    """This peer's copy of the run's state, and its place in the log. The replica applies whole entries in the log's
    order.

    `log` is where theta and momentum are, or will be once its last entry is applied. `settled` is the last place whose
    `state_digest` is known; heartbeats name it. `undigested` is the place whose digest is being computed.
    """

    TABLE: ClassVar[Table] = {
        LEVEL: {
            EntryMade: Row("_apply", {APPLYING: "its entry is committed"}),
            Behind: Row("_replay", {REPLAYING: "an entry was made without this peer"}),
            FarBehind: Row("_fetch", {FETCHING: "its state was refused, or others are far ahead"}),
        }
        | DIGESTED,
        FETCHING: {
            SnapshotRestored: Row("_restored", {LEVEL: "has the donor's state"}),
            SnapshotFailed: Row("_not_restored", {LEVEL: "no donor gave a state"}),
        }
        | DIGESTED,
        REPLAYING: {
            EntryMade: Row("_apply_or_wait", {APPLYING: "has the entry's payload"}),
            FarBehind: Row("_fetch", {FETCHING: "no peer has the payload any more"}),
            NoneAhead: Row(
                "_give_up", {LEVEL: "no peer is ahead any more", APPLYING: "another fragment's entry is made"}
            ),
        }
        | DIGESTED,
        APPLYING: DIGESTED
        | {
            EntryMade: Row("_wait"),
            Applied: Row("_applied", {LEVEL: "has taken the step", APPLYING: "another fragment's entry is made"}),
        },
    }
    EXACT = frozenset({EntryMade, Behind, FarBehind, NoneAhead, Applied, SnapshotRestored, SnapshotFailed})
    state: ReplicaState

    def __init__(self, context: Context, presence: Presence, lineage: Lineage, state_digest: bytes) -> None:
        super().__init__(LEVEL)
        self.lineage = lineage
        self.log = self.settled = lineage.log
        self.state_digest = state_digest
        self.undigested: LogState | None = None
        self._behind: Behind | None = None
        # Entries that wait until the entry of another fragment is applied, the oldest first.
        self._waiting: deque[EntryMade] = deque()
        self._advanced_at = context.now
        self._archives = SignedHeadsSeen(NOTHING_SIGNED)
        self._context = context
        self._presence = presence

    @property
    def is_settled(self) -> bool:
        """True if theta and momentum are those at the end of `log`, and their digest is known."""
        return self.settled.position == self.log.position and self.state is not FETCHING

    @property
    def replaying(self) -> Header | None:
        """The header of an entry that was made without this peer and is being replayed; None if there is none."""
        return self._behind.header if self._behind else None

    @property
    def certificate(self) -> Certificate | None:
        """The certificate of the entry that this peer is replaying; None if there is none."""
        return self._behind.certificate if self._behind else None

    def is_news(self, header: Header) -> bool:
        """Return True if an entry with many members was applied just now, and is still being forwarded to them.
        Messages about the entry's position need no answer then."""
        is_last = header.digest in self.log.ends or header in self.log.made
        has_lasted = self._context.now - self._advanced_at >= self._context.settings.timing.resend
        return is_last and len(header.roster) > PASSED_ON and not has_lasted

    # Entries --------------------------------------------------------------------------------------------------
    def _apply(self, made: EntryMade) -> None:
        certificate = made.certificate and shortened(made.certificate, self.log, made.header)
        amendment, self.log = self.log.amendment, self.log.append(made.header)
        self.lineage.append(made.header, self.log, certificate)
        self._behind, self._advanced_at = None, self._context.now
        self._enter(APPLYING)
        proofs = tuple(known.data for known in self._context.evidence.behind(made.header.faults))
        self._context.emit(Apply(made.header, made.keeps_work, amendment, certificate, proofs))

    def _apply_or_wait(self, made: EntryMade) -> None:
        if made.header == self.replaying:
            self._apply(made)
        else:
            self._wait(made)

    def _wait(self, made: EntryMade) -> None:
        self._waiting.append(made)

    def _applied(self, _: Applied) -> None:
        """Finish the outer step of one fragment. After a cycle's last fragment, expect the digest of the state."""
        if not self.log.made:
            index, roster = self.log.position.index, self.log.roster
            self.undigested = self.log
            self._context.emit(Note("info", f"outer step {index} applied, {len(roster)} peer{'s' * (len(roster) > 1)}"))
            if self.log.amendment not in (None, self.settled.amendment):
                self._context.emit(Note("info", f"from this outer step on: {self.log.amendment}"))
        self._apply_waiting()

    def _apply_waiting(self) -> None:
        """Apply the oldest entry that arrived while another one was applied or replayed, and that the log does not have
        yet. If there is none, enter the state LEVEL."""
        while self._waiting:
            made = self._waiting.popleft()
            if made.header.fragment in self.log.pending:  # otherwise this replica has replayed the entry already
                self._apply(made)
                return
        self._enter(LEVEL)

    def _digested(self, digested: Digested) -> None:
        log, self.undigested = self.undigested, None
        if log is None or log.last != digested.header:
            raise LocalProtocolError(f"digest for entry {digested.header.index}, which is not the last applied one")
        self.settled, self.state_digest = log, digested.state_digest

    # Catching up ------------------------------------------------------------------------------------------------
    def _replay(self, behind: Behind) -> None:
        self._enter(REPLAYING)
        self._behind = behind
        if behind.header.payload != NO_PAYLOAD:
            self._context.emit(FetchPayload(behind.header, behind.donors))

    def _give_up(self, _: NoneAhead) -> None:
        self._behind = None
        self._apply_waiting()

    def _fetch(self, far: FarBehind) -> None:
        self._waiting.clear()
        self._behind = None
        self._enter(FETCHING)
        others = tuple(sorted(self._presence.branches.donors() - {far.donor}))
        self._context.emit(FetchSnapshot(far.donor, others, far.least))

    def _restored(self, restored: SnapshotRestored) -> None:
        self.log = self.settled = self.log.at(restored.header, restored.ends)
        self.state_digest, self._archives = restored.state_digest, replace(self._archives, ours={})
        left = self.lineage.move(self.log, restored.lineage, restored.doubt)
        tokens = sum(entry.tokens_of(self._context.me) for entry in left if self.log.is_closing(entry))
        if tokens:
            reason = f"this peer's entries from {left[0].index} on are not in the lineage of {restored.donor}"
            self._context.emit(TokensLost("entries", tokens, reason))
        self._context.emit(Note("info", f"state at {self.log.position} fetched from {restored.donor}"))
        self._enter(LEVEL)

    def _not_restored(self, failed: SnapshotFailed) -> None:
        donors_before = self.claimant, self.furthest
        self._presence.branches.gave_nothing(failed.donor)
        donors_after = self.claimant, self.furthest
        # If no other donor is left, ask the failed donor again.
        if donors_after.count(None) > donors_before.count(None):
            self._presence.branches.ask_again(failed.donor)
        self._context.emit(Note("info", f"{failed.donor} gave no state: {failed.reason}"))
        self._enter(LEVEL)

    # Comparison with other peers --------------------------------------------------------------------------------
    @property
    def claimant(self) -> str | None:
        """The peer that claims to be furthest ahead, or on another branch; None if there is none."""
        return self._presence.branches.claimant(self.log, self.lineage, self.contradiction is not None)

    @property
    def furthest(self) -> str | None:
        """The peer that claims to be furthest ahead, or on another branch; None if there is none. Peers at an index
        before the oldest head that this peer knows are left out."""
        return self._presence.branches.furthest(self.log, self.lineage, self.contradiction is not None)

    @property
    def is_behind(self) -> bool:
        """True if this peer should wait for entries that others have made, instead of making the next entry."""
        return self._presence.branches.is_behind(self.log, self.lineage, self.contradiction is not None)

    @property
    def is_of_minority(self) -> bool:
        """True if the log has an entry made by a minority, and the last entry's members are still not most of the
        voters before that entry. False if these voters have all left."""
        doubt = self.lineage.doubt
        return doubt is not None and not (self._presence.are_all_gone(doubt) or are_most(doubt, self.log.roster))

    @property
    def state_of_most(self) -> bytes | None:
        """The state digest that more than half of the voters name for this peer's place; None if there is none."""
        return self._presence.branches.state_of_most(self.settled, self.state_digest, self._context.incarnation)

    # Signed heads (R19) -----------------------------------------------------------------------------------------
    def hear_signed(self, seen: SignedHeadsSeen) -> None:
        """Store the heads that archives have signed. If any is new, end the pauses in which some peers are not asked
        for their logs, because these peers may have the signed log."""
        is_new, self._archives = seen.signed != self.signed, seen
        if is_new:
            self._presence.branches.look_again()
            if (head := self.contradiction) is not None:
                text = f"the archive {head.archive} has signed another outer step {head.index} than this peer's"
                self._context.emit(Note("info", f"{text}: looking for a log with the signed one"))

    @property
    def signed(self) -> SignedHeads:
        """The heads that the run's archives have signed, as far as this peer knows."""
        return self._archives.signed

    @property
    def heads(self) -> dict[int, bytes]:
        """The heads of this peer's own log, by index, at the indices that archives have signed, as far as known."""
        ours = self._archives.ours
        known = {index: self.lineage.head_at(index) or ours.get(index) for index in self.signed.indices}
        return {index: head for index, head in known.items() if head and index <= self.log.position.index}

    @property
    def contradiction(self) -> SignedHead | None:
        """The signed head that differs from this peer's log at the same index; None if there is none."""
        return self.signed.contradiction(self.heads) if self.signed.heads else None

    @property
    def needs_signed_log(self) -> bool:
        """True if this peer has no log yet, but an archive has signed a head of the run. This peer then does not found
        the run, and follows only a peer whose log has the signed head."""
        return self.log.last is None and not self.log.made and bool(self.signed.indices)
