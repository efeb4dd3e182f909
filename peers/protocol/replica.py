"""This peer's copy of the run's state: where in the log it is, and how it takes the next entries."""

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
from peers.protocol.internal import Behind, EntryMade, FarBehind, NobodyAhead
from peers.protocol.state_machine import Row, StateMachine, Table
from peers.values.signed_heads import NOTHING_SIGNED, SignedHead, SignedHeads

PASSED_ON = 16
"""Most members of an entry that all hear of at once; more are told by a tree."""


class ReplicaState(StrEnum):
    LEVEL = "level"
    FETCHING = "fetching"
    REPLAYING = "replaying"
    APPLYING = "applying"


LEVEL, FETCHING, REPLAYING, APPLYING = ReplicaState
DIGESTED: dict[type, Row] = {Digested: Row("_digested")}
"""The digest of a state is taken beside all else, and may come at any time after the entry was applied."""


class Replica(StateMachine):
    """Applies entries whole, in the log's order.

    `log` is where theta and momentum are, or will be once its last entry is applied. `settled` is where they are and
    have a digest, `state_digest`: heartbeats name that. `undigested` is where they are while their digest is taken.
    """

    TABLE: ClassVar[Table] = {
        LEVEL: {
            EntryMade: Row("_apply", {APPLYING: "our slot's entry is made"}),
            Behind: Row("_replay", {REPLAYING: "an entry was made without us"}),
            FarBehind: Row("_fetch", {FETCHING: "refused, or others are far ahead"}),
        }
        | DIGESTED,
        FETCHING: {
            SnapshotRestored: Row("_restored", {LEVEL: "has the donor's state"}),
            SnapshotFailed: Row("_not_restored", {LEVEL: "nobody gave one"}),
        }
        | DIGESTED,
        REPLAYING: {
            EntryMade: Row("_apply_or_wait", {APPLYING: "has the entry's payload"}),
            FarBehind: Row("_fetch", {FETCHING: "nobody has the payload any more"}),
            NobodyAhead: Row(
                "_give_up", {LEVEL: "nobody is ahead any more", APPLYING: "another fragment's entry is made"}
            ),
        }
        | DIGESTED,
        APPLYING: DIGESTED
        | {
            EntryMade: Row("_wait"),
            Applied: Row("_applied", {LEVEL: "has taken the step", APPLYING: "another fragment's entry is made"}),
        },
    }
    EXACT = frozenset({EntryMade, Behind, FarBehind, NobodyAhead, Applied, SnapshotRestored, SnapshotFailed})
    state: ReplicaState

    def __init__(self, context: Context, presence: Presence, lineage: Lineage, state_digest: bytes) -> None:
        """`lineage` ends where the state is."""
        super().__init__(LEVEL)
        self.lineage = lineage
        self.log = self.settled = lineage.log
        self.state_digest = state_digest
        self.undigested: LogState | None = None
        self._behind: Behind | None = None
        self._waiting: deque[EntryMade] = deque()  # of other fragments
        self._advanced_at = context.now
        self._archives = SignedHeadsSeen(NOTHING_SIGNED)
        self._context = context
        self._presence = presence

    @property
    def is_settled(self) -> bool:
        """Whether theta and momentum are where the log is, and their digest is known."""
        return self.settled.position == self.log.position and self.state is not FETCHING

    @property
    def replaying(self) -> Header | None:
        """The entry that was made without us, while its payload is fetched."""
        return self._behind.header if self._behind else None

    @property
    def certificate(self) -> Certificate | None:
        """The certificate of the entry that is replayed."""
        return self._behind.certificate if self._behind else None

    def is_news(self, header: Header) -> bool:
        """Return whether an entry of many members is on its way to them: those that ask need no answer yet."""
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
        """A fragment of theta is new. After the last one of a cycle the digest of the state is taken."""
        if not self.log.made:
            index, roster = self.log.position.index, self.log.roster
            self.undigested = self.log
            self._context.emit(Note("info", f"outer step {index} applied, {len(roster)} peer{'s' * (len(roster) > 1)}"))
            if self.log.amendment not in (None, self.settled.amendment):
                self._context.emit(Note("info", f"from now on: {self.log.amendment}"))
        self._go_on()

    def _go_on(self) -> None:
        """Apply another fragment's entry that was made meanwhile, if there is one."""
        while self._waiting:
            made = self._waiting.popleft()
            if made.header.fragment in self.log.pending:  # else it was replayed meanwhile
                self._apply(made)
                return
        self._enter(LEVEL)

    def _digested(self, digested: Digested) -> None:
        log, self.undigested = self.undigested, None
        if log is None or log.last != digested.header:
            raise LocalProtocolError(f"the digest after entry {digested.header.index}, which was not applied last")
        self.settled, self.state_digest = log, digested.state_digest

    # Behind ---------------------------------------------------------------------------------------------------
    def _replay(self, behind: Behind) -> None:
        self._enter(REPLAYING)
        self._behind = behind
        if behind.header.payload != NO_PAYLOAD:
            self._context.emit(FetchPayload(behind.header, behind.donors))

    def _give_up(self, _: NobodyAhead) -> None:
        self._behind = None
        self._go_on()

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
            reason = f"our entries from {left[0].index} on are not in the lineage of {restored.donor}"
            self._context.emit(TokensLost("entries", tokens, reason))
        self._context.emit(Note("info", f"state at {self.log.position} fetched from {restored.donor}"))
        self._enter(LEVEL)

    def _not_restored(self, failed: SnapshotFailed) -> None:
        before = self.claimant, self.furthest
        self._presence.branches.gave_nothing(failed.donor)
        after = self.claimant, self.furthest
        if after.count(None) > before.count(None):  # no other peer is ahead: to go on alone would be worse
            self._presence.branches.ask_again(failed.donor)
        self._context.emit(Note("info", f"no state from {failed.donor}: {failed.reason}"))
        self._enter(LEVEL)

    # Beside others --------------------------------------------------------------------------------------------
    @property
    def claimant(self) -> str | None:
        """The peer that says that it is furthest on, or on another branch."""
        return self._presence.branches.claimant(self.log, self.lineage, self.contradiction is not None)

    @property
    def furthest(self) -> str | None:
        """The claimant that is no straggler, as far as our log tells; None: no peer is ahead."""
        return self._presence.branches.furthest(self.log, self.lineage, self.contradiction is not None)

    @property
    def is_behind(self) -> bool:
        """Whether to wait for what others have made rather than go on from here."""
        return self._presence.branches.is_behind(self.log, self.lineage, self.contradiction is not None)

    @property
    def is_of_minority(self) -> bool:
        """Whether too few went on from some place in our lineage, and are still fewer than the others."""
        doubt = self.lineage.doubt
        return doubt is not None and not (self._presence.are_all_gone(doubt) or are_most(doubt, self.log.roster))

    @property
    def state_of_most(self) -> bytes | None:
        """The digest that more than half of the voters name for the state where we are, if any."""
        return self._presence.branches.state_of_most(self.settled, self.state_digest, self._context.incarnation)

    # Signed heads (R19) -----------------------------------------------------------------------------------------
    def hear_signed(self, seen: SignedHeadsSeen) -> None:
        """Take in what archives have signed. Peers that were passed over may have the log that they mean."""
        is_new, self._archives = seen.signed != self.signed, seen
        if is_new:
            self._presence.branches.look_again()
            if (head := self.contradiction) is not None:
                text = f"the archive {head.archive} has signed another outer step {head.index} than this peer's"
                self._context.emit(Note("info", f"{text}: looking for the log that has it"))

    @property
    def signed(self) -> SignedHeads:
        """What the run's archives have signed, as far as it is known."""
        return self._archives.signed

    @property
    def heads(self) -> dict[int, bytes]:
        """The heads of our log at the indices that archives have signed, as far as they are known."""
        ours = self._archives.ours
        known = {index: self.lineage.head_at(index) or ours.get(index) for index in self.signed.indices}
        return {index: head for index, head in known.items() if head and index <= self.log.position.index}

    @property
    def contradiction(self) -> SignedHead | None:
        """The head that an archive has signed where our log has another one; None: our log may be the run's."""
        return self.signed.contradiction(self.heads) if self.signed.heads else None

    @property
    def needs_signed_log(self) -> bool:
        """Whether we have no log yet, and the run's must have a signed head: we found no run, and follow no peer before
        its whole log is seen to have that head."""
        return self.log.last is None and not self.log.made and bool(self.signed.indices)
