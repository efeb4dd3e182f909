"""The reasons why this peer's training may not count, as shown to the volunteer (R14).

If the work cannot count, as far as this peer sees by itself, it waits without a lease until links or speeds change; a
peer that is too slow tries again after some time. For other reasons it goes on training, and shows what is wrong.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from peers.presence.heartbeat import PeerState
from peers.presence.presence import Presence
from peers.protocol.context import Context
from peers.protocol.effects import Trouble
from peers.protocol.replica import Replica, ReplicaState
from peers.protocol.trainer import Trainer

SHOWN_AFTER = 12.0  # seconds that a hindrance must last to be shown, since links fail briefly and workers begin slowly
TRAIN_AGAIN = 1800.0  # seconds until a peer that is too slow trains again; each try costs a lease
IN_VAIN = 2
"""Consecutive leases without any work in an entry, after which the volunteer is warned."""
REACH_REMEDY = "let the router forward this peer's data port, or use a bootstrap node that relays"


class Kind(StrEnum):
    """A kind of reason why this peer's training may not count. The volunteer sees a reason once its kind has lasted for
    SHOWN_AFTER seconds."""

    CONVICTED = "convicted"
    NO_VOTE = "no vote"
    CUT_OFF = "cut off"
    ALONE = "alone"
    ASTRAY = "astray"
    NO_SIGNED_LOG = "no signed log"
    TOO_SLOW = "too slow"
    MINORITY = "minority"
    ALL_ELSE_GONE = "all else gone"
    WAITING = "waiting"
    LATE = "late"
    ON_PROBATION = "on probation"


AS_MEANT = frozenset({Kind.ON_PROBATION, Kind.WAITING, Kind.ALL_ELSE_GONE})
"""Kinds that follow from the run's or the volunteer's own settings, so that no person needs to act."""


@dataclass(frozen=True)
class Hindrance:
    """A reason why this peer's training may not count. If `is_vain` is true, it certainly does not count."""

    kind: Kind
    reason: str
    is_vain: bool = False


class Hindrances:
    """The present reason why this peer's training may not count, if any. The volunteer sees it after SHOWN_AFTER
    seconds. `is_aside` is true while nothing that this peer trains can count."""

    def __init__(self, context: Context, presence: Presence, trainer: Trainer, replica: Replica) -> None:
        self.is_aside = False
        self._context = context
        self._presence = presence
        self._trainer = trainer
        self._replica = replica
        self._found: Hindrance | None = None
        self._shown: Hindrance | None = None
        self._found_since = self._aside_since = self._alone_since = context.now

    @property
    def reported_reason(self) -> str:
        """The reason, as shown to the volunteer, why this peer's training may not count; empty if none is shown."""
        return self._shown.reason if self._shown else ""

    @property
    def is_isolated(self) -> bool:
        """True if this peer has reached no other peer for SHOWN_AFTER seconds."""
        return self._context.now - self._alone_since >= SHOWN_AFTER

    def look(self, leader: str | None) -> None:
        """Find the present reason why this peer's training may not count, and show it to the volunteer once its kind
        has lasted for SHOWN_AFTER seconds. `leader` is the leader of the first view."""
        now, found, others = self._context.now, self._find(leader), self._others
        if _kind(found) != _kind(self._found):
            self._found_since = now
        self._found = found
        if not others or not others <= self._presence.unreached:
            self._alone_since = now
        lasting = found if now - self._found_since >= SHOWN_AFTER else None
        self.is_aside = lasting is not None and lasting.is_vain
        if not self.is_aside:
            self._aside_since = now
        elif now - self._aside_since >= TRAIN_AGAIN:
            self._trainer.in_vain = 0
        if _kind(lasting) != _kind(self._shown):
            self._shown = lasting
            self._context.emit(Trouble(self.reported_reason, "info" if _kind(lasting) in AS_MEANT else "warning"))

    @property
    def _others(self) -> set[str]:
        """The ids of the other peers: trainers that this peer hears, peers that only others hear, and peers of the last
        entry."""
        heard = {beat.peer for beat in self._presence.live().trainers}
        return heard.union(self._presence.unheard, self._replica.log.incarnations) - {self._context.me}

    def _find(self, leader: str | None) -> Hindrance | None:
        if self._trainer.watch.is_resting:
            return None
        return (
            self._convicted()
            or self._no_vote()
            or self._cut_off(leader)
            or self._astray()
            or self._too_slow()
            or self._partition()
            or self._late()
            or self._on_probation()
        )

    def _convicted(self) -> Hindrance | None:
        log = self._replica.log
        until = log.excluded.get(self._context.me)
        if until is None:
            return None
        steps = until + 1 - log.position.index
        reason = (
            f"the run's log says that this peer has signed false data, and excludes it for the next {steps} outer"
            f" steps: nothing that it trains counts; if you have changed no code, test this machine's memory, and join"
            f" from a healthy machine with a new identity"
        )
        return Hindrance(Kind.CONVICTED, reason, is_vain=True)

    def _no_vote(self) -> Hindrance | None:
        trouble = self._context.votes.trouble
        reason = f"this peer does not vote, since the disk does not take its votes or payloads: {trouble}"
        return Hindrance(Kind.NO_VOTE, reason) if trouble else None

    def _cut_off(self, leader: str | None) -> Hindrance | None:
        """Return a hindrance if this peer reaches no other peer, or cannot reach the leader that made the last entry
        without this peer."""
        unreached, others, log = self._presence.unreached, self._others, self._replica.log
        if not unreached & others:
            return None
        has_led = log.last is not None and log.last.leader == leader and self._context.me not in log.roster
        # A peer that is cut off also falls behind in the log, so falling behind does not end the hindrance.
        is_certain = self.is_aside or _kind(self._found) is Kind.CUT_OFF or not self._replica.is_behind
        if leader in unreached and is_certain and (others <= unreached or has_led):
            return Hindrance(Kind.CUT_OFF, f"this peer cannot reach the leader {leader}; {REACH_REMEDY}", is_vain=True)
        reason = f"this peer reaches no other peer, so its training may not count in the end; {REACH_REMEDY}"
        return Hindrance(Kind.ALONE, reason) if others <= unreached else None

    def _astray(self) -> Hindrance | None:
        replica = self._replica
        if (head := replica.contradiction) is not None:
            reason = (
                f"this peer's log is not the run's: the run's archive {head.archive} has signed another outer step"
                f" {head.index}; this peer's training does not count until it finds a peer with the right log and"
                f" changes over by itself; it need not be started again"
            )
            return Hindrance(Kind.ASTRAY, reason)
        if replica.needs_signed_log and replica.state is ReplicaState.LEVEL:
            reason = (
                f"the run's archives have signed outer step {max(replica.signed.indices)}, and this peer has not found"
                f" a log with it yet; it waits for a peer or an archive that has that log"
            )
            return Hindrance(Kind.NO_SIGNED_LOG, reason)
        return None

    def _too_slow(self) -> Hindrance | None:
        speed, usual = self._trainer.speed, self._presence.usual(self._replica.log)
        reason = (
            f"this peer trains {speed:.3g} tokens a second, most others {usual:.3g}: it cannot finish even the"
            f" smallest lease in time; use a faster device, or a run with a smaller rounds.smallest_share"
        )
        is_too_slow = self._context.pace.is_too_slow(speed, usual)
        return Hindrance(Kind.TOO_SLOW, reason, is_vain=self._trainer.in_vain > 0) if is_too_slow else None

    def _partition(self) -> Hindrance | None:
        """Return a hindrance if most voters are gone, and this peer waits for them or makes entries in a minority."""
        replica, doubt = self._replica, self._replica.lineage.doubt
        if doubt is not None and replica.is_of_minority:
            rest = len(set(doubt.voters) & set(replica.log.voters))
            archives = [beat for beat in self._presence.live().values() if beat.state is PeerState.ARCHIVING]
            if any(beat.index > doubt.position.index for beat in archives):
                reason = (
                    f"{rest} of the {len(doubt.voters)} peers of outer step {doubt.position.index} went on from there;"
                    f" an archive keeps their outer steps, and the others follow when they come back"
                )
                return Hindrance(Kind.ALL_ELSE_GONE, reason)
            reason = (
                f"only {rest} of the {len(doubt.voters)} peers of outer step {doubt.position.index} went on from there:"
                f" this training does not count if the others went on, too; this peer looks for them and changes over"
                f" to a better log, so see that others can reach this machine, or join with --on-partition wait"
            )
            return Hindrance(Kind.MINORITY, reason)
        log, settings = replica.log, self._context.settings
        present = {self._context.me, *self._presence.live()}
        gone = set(log.voters) - present
        if not gone or self._presence.is_quorum(log, present):
            return None
        grace = settings.timing.partition_grace
        until = f", for {grace:.0f} s at most" if settings.goes_on_alone else ", as --on-partition wait says"
        reason = f"{len(gone)} of the {len(log.voters)} peers of the last outer step are gone; waiting for them{until}"
        return Hindrance(Kind.WAITING, reason)

    def _late(self) -> Hindrance | None:
        """Return a hindrance if the last entries were made without this peer's training."""
        times, log, me = self._trainer.in_vain, self._replica.log, self._context.me
        counted = log.last is not None and log.last.tokens_of(me) > 0
        if times < IN_VAIN or counted or (me in log.roster and log.is_on_probation(me)):
            return None
        reason = (
            f"the last {times} outer steps were made without this peer's training for them: it was ready too late, or"
            f" its data did not arrive in time; a faster link or device helps"
        )
        return Hindrance(Kind.LATE, reason)

    def _on_probation(self) -> Hindrance | None:
        log = self._replica.log
        reason = (
            f"this peer is new to the run: its first {log.probation} outer steps do not count, by the run's"
            f" admission.probation; no action is needed"
        )
        return Hindrance(Kind.ON_PROBATION, reason) if log.is_on_probation(self._context.me) else None


def _kind(hindrance: Hindrance | None) -> Kind | None:
    return hindrance.kind if hindrance else None
