"""This peer's copy of the run's state: where in the log it is, how it takes the next entry, and how it catches up."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from enum import StrEnum
from typing import ClassVar

from peers.errors import LocalProtocolError
from peers.log.certificate import Certificate, Proof, shortened
from peers.log.header import NO_PAYLOAD, Header
from peers.log.lineage import Lineage
from peers.log.state import LogError, LogState
from peers.presence.presence import Presence
from peers.protocol.context import Context
from peers.protocol.effects import Apply, Dropped, FetchPayload, FetchSnapshot, Note, TokensLost
from peers.protocol.events import Applied, Digested, SignedHeadsSeen, SnapshotFailed, SnapshotRestored
from peers.protocol.internal import Behind, EntryMade, FarBehind, NobodyAhead
from peers.protocol.messages import Certified
from peers.protocol.minority import are_most, may_follow, may_found
from peers.protocol.part import Part, Row, Table
from peers.values.signed_heads import NOTHING_SIGNED, SignedHead

PASSED_ON = 16
"""Members of an entry that is told on from member to member, where there are more."""


class ReplicaState(StrEnum):
    LEVEL = "level"
    FETCHING = "fetching"
    REPLAYING = "replaying"
    APPLYING = "applying"


LEVEL, FETCHING, REPLAYING, APPLYING = ReplicaState
DIGESTED: dict[type, Row] = {Digested: Row("_digested")}
"""The digest of a state is taken while the peer goes on: it may come at any time after the entry was applied."""


class Replica(Part):
    """Applies entries whole, in the log's order.

    `log` is where theta and momentum are, or will be once the entry at its end is applied. `settled` is where they are
    and have a digest, which is what heartbeats name.
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
        self.log = self.settled = lineage.log
        self.state_digest = state_digest
        self._in_our_state = lineage.log, lineage.log.in_state(state_digest)
        self.lineage = lineage
        self.undigested: LogState | None = None
        self.signed = NOTHING_SIGNED
        """What the run's archives have signed, as far as we know."""
        self._our_heads: Mapping[int, bytes] = {}
        self._behind: Behind | None = None
        self._context = context
        self._presence = presence
        self._waiting: deque[EntryMade] = deque()  # of other fragments
        self._advanced_at = context.now
        self.has_snapshot = False
        """Or got none: the way from here to where the others are is replayed."""

    @property
    def is_settled(self) -> bool:
        """Whether theta and momentum are where the log is, and their digest is known. Training needs no digest; what
        others are told of our state does."""
        return self.settled.position == self.log.position and self.state is not FETCHING

    @property
    def replaying(self) -> Header | None:
        """The entry that was made without us, while we fetch its payload."""
        return self._behind.header if self._behind else None

    @property
    def proof(self) -> Certificate | None:
        """Of the entry that is replayed."""
        return self._behind.certificate if self._behind else None

    # Entries --------------------------------------------------------------------------------------------------
    def is_news(self, header: Header) -> bool:
        """Whether the others of a large round are just being told of an entry. Of those, some ask before
        they hear of it, and ask again a moment later if they do not."""
        is_last = header.digest in self.log.ends or header in self.log.made
        has_lasted = self._context.now - self._advanced_at >= self._context.settings.timing.resend
        return is_last and len(header.roster) > PASSED_ON and not has_lasted

    @property
    def is_of_minority(self) -> bool:
        """Whether too few went on from some place in our lineage, and are still fewer than the others."""
        doubt = self.lineage.doubt
        return doubt is not None and not (self._presence.are_all_gone(doubt) or are_most(doubt, self.log.roster))

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
        """A fragment of theta is new. After the last one of a cycle the digest of the state is taken meanwhile."""
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
        """Now others can be told where we are."""
        log, self.undigested = self.undigested, None
        if log is None or log.last != digested.header:
            raise LocalProtocolError(f"the digest after entry {digested.header.index}, which was not applied last")
        self.settled, self.state_digest = log, digested.state_digest

    def in_our_state(self, log: LogState) -> LogState:
        """Return a log with the state that we have. It is the same object as long as nothing changes."""
        before, ours = self._in_our_state
        if before is not log or ours.state != self.state_digest:
            self._in_our_state = log, (ours := log.in_state(self.state_digest))
        return ours

    @property
    def state_of_most(self) -> bytes | None:
        """The digest that more than half of the roster name where we are; None: there is none."""
        return self._presence.branches.state_of_most(self.settled, self.state_digest, self._context.incarnation)

    def donor_of(self, state_digest: bytes) -> str | None:
        """Somebody who says that it has this state, and has not failed us."""
        head, live = self.settled.position.head, self._presence.live()
        having = {peer for peer, beat in live.items() if (beat.head, beat.state_digest) == (head, state_digest)}
        return min(having - self._presence.branches.unhelpful, default=None)

    # Who is further on ----------------------------------------------------------------------------------------
    @property
    def claimant(self) -> str | None:
        """Who says that it is furthest on, or on another branch."""
        return self._presence.branches.claimant(self.log, self.lineage, self.contradiction is not None)

    @property
    def furthest(self) -> str | None:
        """The claimant that is no straggler, as far as our log tells; None: nobody is ahead."""
        return self._presence.branches.furthest(self.log, self.lineage, self.contradiction is not None)

    @property
    def is_behind(self) -> bool:
        """Whether to wait for what others have made rather than go on from here."""
        return self._presence.branches.is_behind(self.log, self.lineage, self.contradiction is not None)

    # Signed heads -------------------------------------------------------------------------------------------------
    def hear_signed(self, seen: SignedHeadsSeen) -> None:
        """Take in what archives have signed. Whoever was passed over before may have the log that they mean."""
        is_new, self.signed, self._our_heads = seen.signed != self.signed, seen.signed, seen.ours
        if is_new:
            self._presence.branches.look_again()
            if (head := self.contradiction) is not None:
                text = f"the archive {head.archive} has signed another outer step {head.index} than this peer's"
                self._context.emit(Note("info", f"{text}: looking for the log that has it"))

    @property
    def contradiction(self) -> SignedHead | None:
        """The head that an archive has signed where our log has another one; None: our log may be the run's."""
        return self.signed.contradiction(self._heads) if self.signed.heads else None

    @property
    def _heads(self) -> dict[int, bytes]:
        """What our log has where archives have signed, as far as that is known."""
        known = {index: self.lineage.head_at(index) or self._our_heads.get(index) for index in self.signed.indices}
        return {index: head for index, head in known.items() if head and index <= self.log.position.index}

    @property
    def needs_signed_log(self) -> bool:
        """Whether we have no log yet, and know of a head that the run's must have: we found nothing, and follow nobody
        from entry to entry, until a whole log is seen to have it. An entry that an archive has signed is such a log."""
        return self.log.last is None and not self.log.made and bool(self.signed.indices)

    # Behind ---------------------------------------------------------------------------------------------------
    def note_nobody_ahead(self) -> None:
        """Whoever is ahead again may be far ahead."""
        self.has_snapshot = False

    def follow(self, sender: str, certified: Certified, proof: Proof | None, was_asked: bool) -> Behind | None:
        """Return what there is to replay, if the entry can be believed. A certified one can; its members may have the
        payload, and so may peers that are further on.

        What a minority has made is followed only where most of the last roster are not here to make an entry of their
        own, if the sender's heartbeats say that it is further on, or we asked it. A false certificate is worth none.
        """
        header, live = certified.header, self._presence.live()
        is_certified = proof is not None and proof.is_certified
        donors = {peer for peer, beat in live.items() if beat.index > header.index}
        if (was_asked or is_certified) and self._presence.is_live(sender):
            donors.add(sender)
        if is_certified:
            donors |= live.keys() & set(header.peers)
        elif sender not in donors:
            return None
        if not self._may_follow(header, proof, is_certified):
            return None
        if self.log.fragments > 1:  # of who is in our cycle heartbeats do not tell which of its entries it has
            donors |= {peer for peer, beat in live.items() if beat.head == header.previous}
        try:
            after = self.log.append(header).position
            heads = self._heads | {after.index: after.head}
            if (head := self.signed.contradiction(heads)) is not None and self.contradiction is None:
                raise LogError(f"the archive {head.archive} has signed another outer step {head.index}")
            if self.needs_signed_log and not self.signed.vouched(heads):
                return None
        except LogError as error:
            self._context.emit(Dropped(sender, "certificate", str(error)))
            return None
        if not donors and header.payload != NO_PAYLOAD:
            return None
        first = [sender] if sender in donors else []
        return Behind(
            header, certified.certificate if proof is not None else None, (*first, *sorted(donors - {sender}))
        )

    def _may_follow(self, header: Header, proof: Proof | None, is_certified: bool) -> bool:
        """Return whether to believe an entry that was made by a minority, or founds the run."""
        context, presence = self._context, self._presence
        if not is_certified:
            if not may_follow(context, presence, self.log, header, proof):
                return False
            if not context.evidence.has(header.faults, self.lineage):
                return False  # too few have seen the proofs of its annex
        return self.log.last is not None or may_found(context, presence, len(header.roster))

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
        self.state_digest, self._our_heads = restored.state_digest, {}
        self._leave_lineage(restored)
        self.has_snapshot = True
        self._context.emit(Note("info", f"state at {self.log.position} fetched from {restored.donor}"))
        self._enter(LEVEL)

    def _leave_lineage(self, restored: SnapshotRestored) -> None:
        """Our tokens in entries that the donor's lineage does not have are lost. Everybody says so of its own alone."""
        left = self.lineage.move(self.log, restored.lineage, restored.doubt)
        tokens = sum(entry.tokens_of(self._context.me) for entry in left if self.log.is_closing(entry))
        if tokens:
            reason = f"our entries from {left[0].index} on are not in the lineage of {restored.donor}"
            self._context.emit(TokensLost("entries", tokens, reason))

    def _not_restored(self, failed: SnapshotFailed) -> None:
        before = self.claimant, self.furthest
        self._presence.branches.gave_nothing(failed.donor)
        after = self.claimant, self.furthest
        if after.count(None) > before.count(None):  # nobody else is ahead: to go on alone would be worse
            self._presence.branches.ask_again(failed.donor)
        self.has_snapshot = True  # as good as: whoever knows what followed may have all of it
        self._context.emit(Note("info", f"no state from {failed.donor}: {failed.reason}"))
        self._enter(LEVEL)
