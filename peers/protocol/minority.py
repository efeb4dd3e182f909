"""What a peer believes of an entry that too few have signed to certify it.

A minority goes on alone when the others may be gone for good. Its leader is the only judge of that, for the members of
its attempt. Everybody else follows it only where too few of the last roster are here to make an entry of their own: one
liar, with nothing but its own signature, takes nobody along.
"""

from __future__ import annotations

from collections.abc import Iterable

from peers.log.certificate import Proof
from peers.log.header import Header
from peers.log.state import LogState
from peers.presence.heartbeat import PeerState
from peers.presence.presence import Presence
from peers.protocol.desk import Desk
from peers.protocol.messages import Commit
from peers.protocol.rounds import Attempt


def are_most(log: LogState, peers: Iterable[str]) -> bool:
    """Return whether these are more than half of the roster by their names, though some may have started again."""
    return 2 * len(set(log.voters) & set(peers)) > len(log.voters)


def may_make(
    desk: Desk,
    presence: Presence,
    log: LogState,
    said_in: Attempt | None,
    sender: str,
    commit: Commit,
    proof: Proof,
) -> bool:
    """Whether an entry that we hold is to be made. `said_in` is the attempt in which we said last that we hold it."""
    certificate = commit.certificate
    assert certificate is not None
    is_ours = said_in is not None and said_in.name == certificate.attempt and sender == certificate.leader
    if is_ours and presence.are_all_gone(log):
        return True
    if not (desk.settings.goes_on_alone or are_most(log, commit.header.peers)):
        return False
    if is_ours and certificate.alone:
        return True
    is_known = sender == desk.me or (presence.is_live(sender) and proof.signers > 0)
    return is_known and not presence.are_most_here(log, desk.memory.incarnation)


def may_found(desk: Desk, presence: Presence, founders: int) -> bool:
    """Whether to believe that a run was founded by so many. Whoever founds one certifies that itself; so fewer than the
    manifest's minimum are believed only where for the partition grace too few others were there to do it together; and
    by nobody who has just started, and can't have heard of them yet."""
    least, timing = desk.settings.minimum_peers, desk.settings.timing
    if founders >= least:
        return True
    others = presence.membership.spoke_within(timing.partition_grace, desk.now)
    waiting = 1 + sum(not beat.index and beat.state is not PeerState.ARCHIVING for beat in others)
    return waiting < least and desk.now - desk.started_at >= timing.heartbeat_expiry


def may_follow(desk: Desk, presence: Presence, log: LogState, sender: str, header: Header, proof: Proof | None) -> bool:
    """Whether an entry that was made without us is to be replayed: one of the roster must have made it, at least."""
    if not (desk.settings.goes_on_alone or presence.are_all_gone(log) or are_most(log, header.peers)):
        return False
    is_of_one = proof is not None and proof.signers > 0
    is_of_one = is_of_one or not log.roster or (sender in log.voters and sender in header.peers)
    return is_of_one and not presence.are_most_here(log, desk.memory.incarnation)
