"""The decision whether this peer accepts entries and branches of other peers as part of the run's log (R8, R13, R19,
R21).

A certified entry proves itself. Other evidence is needed for an entry that a minority or the founders made.
"""

from __future__ import annotations

from peers.log.certificate import CertificateError, Support, prove
from peers.log.header import NO_PAYLOAD, Header
from peers.log.lineage import Branch
from peers.log.state import LogError, LogState
from peers.messages.messages import Certified
from peers.presence.heartbeat import PeerState
from peers.presence.presence import Presence
from peers.protocol.attendance import are_most
from peers.protocol.context import Context
from peers.protocol.effects import Dropped
from peers.protocol.internal import Behind
from peers.protocol.replica import Replica


class Belief:
    """The rules by which one peer accepts entries and branches that other peers show. They change no state."""

    def __init__(self, context: Context, presence: Presence, replica: Replica) -> None:
        self._context = context
        self._presence = presence
        self._replica = replica

    # The next entry -------------------------------------------------------------------------------------------
    def support(self, certified: Certified, log: LogState) -> Support | None:
        """Check an entry's certificate. Return the number of voters that signed it, and whether they are enough; None
        if the certificate is missing or not valid."""
        if certified.certificate is None:
            return None
        try:
            return prove(certified.certificate, log, certified.header, self._context.keys.verify)
        except CertificateError:
            return None

    def entry(
        self, sender: str, certified: Certified, support: Support | None, sender_was_asked: bool
    ) -> Behind | None:
        """Return the entry with the live peers that may have its payload; None if this peer must not accept it. Without
        a quorum of valid votes (`support`), it is accepted only from a sender that was asked or is heard to be ahead.

        The sender may also be this peer itself, which has assembled the votes but does not have the payload.
        """
        header, live, log = certified.header, self._presence.live(), self._replica.log
        is_certified = support is not None and support.is_certified
        donors = {peer for peer, beat in live.items() if beat.index > header.index}
        if (sender_was_asked or is_certified) and sender in live:
            donors.add(sender)
        if is_certified:
            donors |= live.keys() & set(header.peers)
        elif (sender not in donors and sender != self._context.me) or not self._may_follow(header, support):
            return None
        if log.last is None and not self.may_found(len(header.roster)):
            return None
        if not self._is_as_signed(sender, header):
            return None
        # With several fragments, heartbeats do not show which of a cycle's entries a peer has already made, so each
        # peer at this cycle may have this entry.
        if log.fragments > 1:
            donors |= {peer for peer, beat in live.items() if beat.head == header.previous}
        if not donors and header.payload != NO_PAYLOAD:
            return None
        ordered = sorted(donors, key=lambda peer: (peer != sender, peer))
        return Behind(header, certified.certificate if support is not None else None, tuple(ordered))

    def _may_follow(self, header: Header, support: Support | None) -> bool:
        """Return True if this peer may accept a minority's entry (R21). Two of the conditions: the live voters outside
        the minority are no quorum, and this peer has proofs of the faults that the entry names."""
        presence, log = self._presence, self._replica.log
        goes_on_alone = self._context.settings.goes_on_alone
        if not (goes_on_alone or presence.are_all_gone(log) or are_most(log, header.peers)):
            return False
        is_signed = support is not None and support.signers > 0
        if not (is_signed or presence.are_all_gone(log) or presence.live().keys().isdisjoint(log.voters)):
            return False
        minority = {*header.peers, *(one.peer for one in header.bystanders)} if is_signed else ()
        if presence.are_most_here(log, self._context.incarnation, minority):
            return False
        return self._context.evidence.has(header.faults, self._replica.lineage)

    def _is_as_signed(self, sender: str, header: Header) -> bool:
        """Return True if the entry follows from this peer's log and agrees with the heads that archives have signed
        (R19)."""
        replica = self._replica
        try:
            after = replica.log.append(header).position
            heads = replica.heads | {after.index: after.head}
            if (head := replica.signed.contradiction(heads)) is not None and replica.contradiction is None:
                raise LogError(f"the archive {head.archive} has signed another outer step {head.index}")
        except LogError as error:
            self._context.emit(Dropped(sender, "certificate", str(error)))
            return False
        return not replica.needs_signed_log or bool(replica.signed.vouched(heads))

    def may_found(self, founders: int) -> bool:
        """Return True if this peer accepts a first entry with this number of `founders` (R13). It must be at least the
        manifest's minimum, unless this peer has listened for the heartbeat expiry and heard too few peers."""
        context, timing = self._context, self._context.settings.timing
        least = context.settings.minimum_peers
        if founders >= least:
            return True
        others = self._presence.membership.spoke_within(timing.partition_grace, context.now)
        waiting = 1 + sum(not beat.index and beat.state is not PeerState.ARCHIVING for beat in others)
        return waiting < least and context.now - context.started_at >= timing.heartbeat_expiry

    # Another branch -------------------------------------------------------------------------------------------
    def branch(self, theirs: Branch, ours: Branch) -> Branch | None:
        """Return the part of another peer's branch (`theirs`) that this peer accepts as the run's log. Return None if
        it accepts no part, or cannot decide yet.

        Heads that archives signed decide first, and everything up to them is beyond doubt. Founders can invent their
        tokens, so of two foundings the one with more live peers counts.
        """
        log, signed, founders = self._replica.log, self._replica.signed, theirs.founders
        vouched = signed.vouched(theirs.heads)
        if self._replica.needs_signed_log and not vouched:
            return None  # this peer has no log yet, and an archive has signed heads, but none of this branch
        if log.last is None and founders is not None and not vouched and not self.may_found(founders):
            return None
        for doubt in theirs.doubts:
            if doubt.position.index < vouched:
                continue
            is_followed = self._is_followed(doubt, theirs)
            if is_followed is None:
                return None
            if not is_followed:
                theirs = theirs.until(doubt)
                break
        if not theirs.splits_from(ours):
            return theirs if theirs.contradiction(signed) is None else None
        if ours.end.position != log.position and not theirs.has(log.position):
            return None  # `ours` misses entries that this peer has made since the comparison began
        if theirs.standing(signed) != ours.standing(signed):
            return theirs if theirs.standing(signed) > ours.standing(signed) else None
        if theirs.start.last is None:
            are_more = self._presence.branches.are_more_there(theirs, log, self._replica.lineage)
            if are_more is not None:
                return theirs if are_more and theirs.is_certified else None
        return theirs if theirs.is_better_than(ours) else None

    def _is_followed(self, doubt: LogState, branch: Branch) -> bool | None:
        """Return True if this peer accepts the entries that a minority made on `branch`, False if not, None while it
        cannot decide. `doubt` is the log before these entries."""
        if self._presence.are_all_gone(doubt):
            return True
        if not (are_most(doubt, branch.end.roster) or self._context.settings.goes_on_alone):
            return False
        elsewhere = self._presence.branches.are_most_elsewhere(doubt, branch, self._context.incarnation)
        return None if elsewhere is None else not elsewhere
