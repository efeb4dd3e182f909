"""The reasons why what this peer trains may not count: it is told so, and does not train in vain.

Too slow: not even the smallest share of a lease is done before it is too old. The peer sees that itself, by the speeds
in heartbeats, and stops when a lease was in vain. Cut off: the leader can't be reached. In these cases the peer waits
without a lease, and looks again when links or speeds change, and after some time. Late: the last entries went on
without it. Astray: an archive of the run has signed another log. On probation: a new peer's work does not count yet. It
is told so, and goes on. Convicted: the log excludes it for a proven lie. Minority and waiting: most of the run's peers
are gone. No vote: the disk takes none.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from peers.presence.presence import Presence
from peers.protocol.context import Context
from peers.protocol.effects import Trouble
from peers.protocol.replica import Replica, ReplicaState
from peers.protocol.trainer import Trainer

TOLD_AFTER = 12.0  # seconds: links come and go, and the first inner steps are slow
TRAIN_AGAIN = 1800.0  # seconds, where finding out costs a lease that may be in vain
LATE = 2
"""Leases in a row of which nothing came into an entry, until that is told."""
REACH_REMEDY = "let the router forward this peer's data port, or use a bootstrap node that relays"


class Kind(StrEnum):
    """The kind of a hindrance."""

    CONVICTED = "convicted"
    CUT_OFF = "cut off"
    ALONE = "alone"
    ASTRAY = "astray"
    NO_SIGNED_LOG = "no signed log"
    NO_VOTE = "no vote"
    TOO_SLOW = "too slow"
    MINORITY = "minority"
    WAITING = "waiting"
    LATE = "late"
    ON_PROBATION = "on probation"


AS_MEANT = frozenset({Kind.ON_PROBATION, Kind.WAITING})
"""Kinds that the run's or the volunteer's own settings bring about: nobody need act."""


@dataclass(frozen=True)
class Hindrance:
    """Why our work may not count. `is_vain`: nothing that we train now could."""

    kind: Kind
    reason: str
    is_vain: bool


class Hindrances:
    """`told` is what the volunteer was told last; empty: what we train counts. `is_aside`: whether what we train now
    would be in vain, for long enough to be sure."""

    def __init__(self, context: Context, presence: Presence, trainer: Trainer, replica: Replica) -> None:
        self.told = ""
        self.is_aside = False
        self._context = context
        self._presence = presence
        self._trainer = trainer
        self._replica = replica
        self._found: Hindrance | None = None
        self._told_kind: Kind | None = None
        self._hindered_since = self._aside_since = self._alone_since = context.now

    def look(self, leader: str | None) -> None:
        """See what keeps our work from counting, and for how long it has. `leader` is the one whose turn it is."""
        now, found = self._context.now, self._find(leader)
        if found is None or self._found is None or found.kind != self._found.kind:
            self._hindered_since = now
        self._found = found
        others = self._others
        if not others or not others <= self._presence.unreached:
            self._alone_since = now
        self.is_aside = self._lasting is not None and self._lasting.is_vain

    @property
    def reaches_nobody(self) -> bool:
        """Whether we could exchange data with no peer that is there, for long enough to be sure."""
        return self._context.now - self._alone_since >= TOLD_AFTER

    @property
    def _lasting(self) -> Hindrance | None:
        """What has lasted long enough to be told."""
        return self._found if self._context.now - self._hindered_since >= TOLD_AFTER else None

    def tell(self) -> None:
        """Tell what was seen, if it is something new."""
        if not self.is_aside:
            self._aside_since = self._context.now
        elif self._context.now - self._aside_since >= TRAIN_AGAIN:
            self._trainer.in_vain = 0  # one day we try again
        told = self._lasting
        kind = told.kind if told else None
        if kind != self._told_kind:
            self._told_kind = kind
            self.told = told.reason if told else ""
            self._context.emit(Trouble(self.told, "info" if kind in AS_MEANT else "warning"))

    def _find(self, leader: str | None) -> Hindrance | None:
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
        """Return whether the log excludes us for a proven lie: if we have told none, a bit has flipped in our
        memory."""
        log = self._replica.log
        until = log.excluded.get(self._context.me)
        if until is None:
            return None
        steps = until + 1 - log.position.index
        reason = (
            f"the run's log says that this peer has signed what is not true, and excludes it for its next {steps} outer"
            f" steps: nothing that it trains counts; if you have changed nothing, test this machine's memory, and join"
            f" from a sound machine with a new identity"
        )
        return Hindrance(Kind.CONVICTED, reason, is_vain=True)

    def _no_vote(self) -> Hindrance | None:
        """Return whether the disk takes no votes: this peer trains and takes part in rounds, and others decide."""
        trouble = self._context.votes.trouble
        reason = f"this peer has no vote, since none leaves a machine that could forget it: {trouble}"
        return Hindrance(Kind.NO_VOTE, reason, is_vain=False) if trouble else None

    @property
    def _others(self) -> set[str]:
        """The peers that have a say besides us, and all that train, whether they are heard or have fresh records."""
        heard = {beat.peer for beat in self._presence.live().trainers}
        return heard.union(self._presence.unheard, self._replica.log.incarnations) - {self._context.me}

    def _cut_off(self, leader: str | None) -> Hindrance | None:
        """Return whether no peer can be reached, or not the one that leads, as the last entries without us tell."""
        unreached, others, log = self._presence.unreached, self._others, self._replica.log
        if not unreached & others:
            return None
        was_cut_off = self._found is not None and self._found.kind is Kind.CUT_OFF
        has_led = log.last is not None and log.last.leader == leader and self._context.me not in log.roster
        # Once cut off, being behind is no cure for it.
        is_certain = self.is_aside or was_cut_off or not self._replica.is_behind
        if leader in unreached and is_certain and (others <= unreached or has_led):
            return Hindrance(Kind.CUT_OFF, f"the leader {leader} can't be reached; {REACH_REMEDY}", is_vain=True)
        if others <= unreached:
            reason = "no other peer can be reached, and what is trained here may count nothing in the end"
            return Hindrance(Kind.ALONE, f"{reason}; {REACH_REMEDY}", is_vain=False)
        return None

    def _astray(self) -> Hindrance | None:
        """Return whether an archive of the run has signed another log than ours."""
        replica = self._replica
        if (head := replica.contradiction) is not None:
            reason = (
                f"the run's archive {head.archive} has signed another outer step {head.index} than this peer's, whose"
                f" log is not the run's: what is trained here counts nothing; it goes over when a peer with the right"
                f" log is found, and need not be started again"
            )
            return Hindrance(Kind.ASTRAY, reason, is_vain=False)
        if replica.needs_signed_log and replica.state is ReplicaState.LEVEL:
            reason = (
                f"the run's archives have signed outer step {max(replica.signed.indices)}, and this peer has not seen a"
                f" log yet that has it; it waits for a peer or an archive with that log"
            )
            return Hindrance(Kind.NO_SIGNED_LOG, reason, is_vain=False)
        return None

    def _too_slow(self) -> Hindrance | None:
        usual = self._presence.usual(self._replica.log)
        if not self._context.pace.is_too_slow(self._trainer.speed, usual):
            return None
        reason = (
            f"this peer trains {self._trainer.speed:.3g} tokens a second, most others {usual:.3g}: not even the"
            f" smallest lease is done in time; use a faster device, or a run with a smaller rounds.smallest_share"
        )
        return Hindrance(Kind.TOO_SLOW, reason, is_vain=self._trainer.in_vain > 0)

    def _partition(self) -> Hindrance | None:
        """Return whether most of the run's peers are gone, and we wait for them, or go on with a few."""
        replica, doubt = self._replica, self._replica.lineage.doubt
        if doubt is not None and replica.is_of_minority:
            rest = len(set(doubt.voters) & set(replica.log.voters))
            reason = (
                f"only {rest} of the {len(doubt.voters)} peers of outer step {doubt.position.index} went on from there:"
                f" what is trained here counts nothing if the others did, too; this peer looks for them and goes over"
                f" to a better log, so see that others can reach this machine, or join with --on-partition wait"
            )
            return Hindrance(Kind.MINORITY, reason, is_vain=False)
        log, settings = replica.log, self._context.settings
        present = {self._context.me, *self._presence.live()}
        gone = set(log.voters) - present
        if not gone or self._presence.is_quorum(log, present):
            return None
        grace = settings.timing.partition_grace
        until = f", for {grace:.0f} s at most" if settings.goes_on_alone else ", as --on-partition wait says"
        reason = f"{len(gone)} of the {len(log.voters)} peers of the last outer step are gone; waiting for them{until}"
        return Hindrance(Kind.WAITING, reason, is_vain=False)

    def _late(self) -> Hindrance | None:
        """Return whether the last entries took nothing of what we trained for them."""
        times, log, me = self._trainer.in_vain, self._replica.log, self._context.me
        roster = log.last.roster if log.last else ()
        counted = any(member.peer == me and member.tokens for member in roster)
        if times < LATE or counted or (me in log.roster and log.is_on_probation(me)):
            return None
        reason = (
            f"the last {times} outer steps went on without what this peer trained for them: it was ready too late, or"
            f" its data did not arrive in time; a faster link or device helps"
        )
        return Hindrance(Kind.LATE, reason, is_vain=False)

    def _on_probation(self) -> Hindrance | None:
        log = self._replica.log
        if not log.is_on_probation(self._context.me):
            return None
        reason = (
            f"this peer is new to the run: its first {log.probation} outer steps do not count, as the run's"
            f" admission.probation says; it need only go on"
        )
        return Hindrance(Kind.ON_PROBATION, reason, is_vain=False)
