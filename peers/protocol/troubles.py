"""When what this peer trains could not count: it is told so, and does not train in vain.

Too slow: not even the smallest share of a lease is done before it is too old. The peer sees that itself, by the speeds
in heartbeats, and stops when a lease was in vain. Cut off: the peer whom all take for their leader can't be reached; or
the leader says that rounds go on without us. In each of these cases the peer waits without a lease, and
looks again when links or speeds change, and after some time. Astray: an archive of the run has signed another log. On
probation: a new peer's work does not count yet. It is told so, and goes on. Convicted: the log excludes it for a proven
lie.
"""

from __future__ import annotations

from dataclasses import dataclass

from peers.presence.heartbeat import TAIL
from peers.presence.presence import Presence
from peers.protocol.desk import Desk
from peers.protocol.effects import Trouble
from peers.protocol.replica import Replica, ReplicaState
from peers.protocol.trainer import Trainer

TOLD_AFTER = 12.0  # seconds: links come and go, and the first inner steps are slow
LOOK_AGAIN = 60.0  # seconds, where asking costs one message
TRAIN_AGAIN = 1800.0  # seconds, where finding out costs a lease that may be in vain
REACH_REMEDY = "let the router forward this peer's data port, or use a bootstrap node that relays"


@dataclass(frozen=True)
class Hindrance:
    """Why our work may not count. `is_vain`: nothing that we train now could."""

    kind: str
    reason: str
    is_vain: bool


class Troubles:
    """What keeps our work from counting. `told` is what the volunteer was told of it; empty: it counts."""

    def __init__(self, desk: Desk, presence: Presence, trainer: Trainer, replica: Replica) -> None:
        self.told = ""
        self.is_aside = False
        """Whether what we train now would be in vain, for long enough to be sure."""
        self._desk = desk
        self._presence = presence
        self._trainer = trainer
        self._replica = replica
        self._excluded = ""
        self._hindrance: Hindrance | None = None
        self._told_kind: str | None = None
        self._hindered_since = self._aside_since = self._ask_at = self._alone_since = desk.now

    def look(self, leader: str | None) -> None:
        """See what keeps our work from counting, and for how long it has."""
        now, found = self._desk.now, self._find(leader)
        if found is None or self._hindrance is None or found.kind != self._hindrance.kind:
            self._hindered_since = now
        self._hindrance = found
        others = {beat.peer for beat in self._presence.live().trainers}
        if not others or not others <= self._presence.unreached:
            self._alone_since = now
        self.is_aside = self._lasting is not None and self._lasting.is_vain

    @property
    def reaches_nobody(self) -> bool:
        """Whether we could exchange data with nobody who is there, for long enough to be sure."""
        return self._desk.now - self._alone_since >= TOLD_AFTER

    @property
    def _lasting(self) -> Hindrance | None:
        """What has lasted long enough to be told."""
        has_lasted = self._desk.now - self._hindered_since >= TOLD_AFTER or bool(self._excluded)
        return self._hindrance if has_lasted else None

    def tell(self) -> None:
        """Tell what was seen, if it is something new."""
        if not self.is_aside:
            self._aside_since = self._desk.now
        elif self._desk.now - self._aside_since >= TRAIN_AGAIN:
            self._trainer.in_vain = 0  # one day we try again
        told = self._lasting
        kind = told.kind if told else None
        if kind != self._told_kind:
            self._told_kind = kind
            self.told = told.reason if told else ""
            self._desk.emit(Trouble(self.told))

    @property
    def may_be_left_out(self) -> bool:
        """Whether anybody says, we or another, that we can exchange no data with somebody who is there. A leader that
        leaves us out though all reach us has no reason."""
        live, me = self._presence.live(), self._desk.me[-TAIL:]
        return not self._presence.unreached.isdisjoint(live) or any(me in beat.unreached for beat in live.trainers)

    def left_out(self, reason: str) -> None:
        """The leader goes on without us. Where we reach everybody, it may have heard of others' links a while ago."""
        self._excluded = reason
        reaches_all = self._presence.unreached.isdisjoint(self._presence.live())
        self._ask_at = self._desk.now + (TOLD_AFTER if reaches_all else LOOK_AGAIN)

    def links_changed(self) -> None:
        self._ask_at = self._desk.now

    def readmitted(self) -> bool:
        """The leader has given us a lease; whether it had left us out before."""
        was_excluded, self._excluded = bool(self._excluded), ""
        return was_excluded

    @property
    def is_excluded(self) -> bool:
        return bool(self._excluded)

    @property
    def may_ask(self) -> bool:
        """Whether to ask for a lease: not while it would be in vain, but the leader may think better of it."""
        return not self.is_aside or (bool(self._excluded) and self._desk.now >= self._ask_at)

    def _find(self, leader: str | None) -> Hindrance | None:
        if self._excluded:
            return Hindrance("left out", f"{self._excluded}; {REACH_REMEDY}", is_vain=True)
        if (found := self._convicted()) is not None:
            return found
        return self._cut_off(leader) or self._astray() or self._too_slow() or self._partition() or self._on_probation()

    def _astray(self) -> Hindrance | None:
        """Whether an archive of the run has signed another log than ours."""
        replica = self._replica
        if (head := replica.contradiction) is not None:
            reason = (
                f"the run's archive {head.archive} has signed another outer step {head.index} than this peer's, whose"
                f" log is not the run's: what is trained here counts nothing; it goes over when a peer with the right"
                f" log is found, and need not be started again"
            )
            return Hindrance("astray", reason, is_vain=False)
        if replica.needs_signed_log and replica.state is ReplicaState.LEVEL:
            reason = (
                f"the run's archives have signed outer step {max(replica.signed.indices)}, and this peer has not seen a"
                f" log yet that has it; it waits for a peer or an archive with that log"
            )
            return Hindrance("no signed log", reason, is_vain=False)
        return None

    def _partition(self) -> Hindrance | None:
        """Whether most of the run's peers are gone, and we wait for them, or go on with a few."""
        replica, doubt = self._replica, self._replica.lineage.doubt
        if doubt is not None and replica.is_of_minority:
            here = len(set(doubt.voters) & set(replica.log.voters))
            reason = (
                f"only {here} of the {len(doubt.voters)} peers of outer step {doubt.position.index} went on from there:"
                f" what is trained here counts nothing if the others did, too; leave, and join again to look for them"
            )
            return Hindrance("minority", reason, is_vain=False)
        roster = set(replica.log.voters)
        gone = roster - self._presence.live().keys() - {self._desk.me}
        if self._desk.settings.goes_on_alone or 2 * len(gone) < len(roster) or not roster:
            return None
        reason = f"{len(gone)} of the {len(roster)} peers of the last outer step are gone; waiting for them"
        return Hindrance("waiting", f"{reason}, as --on-partition wait says", is_vain=False)

    def _convicted(self) -> Hindrance | None:
        """Whether the log excludes us for a proven lie: if we have told none, a bit has flipped in our memory."""
        log = self._replica.log
        until = log.excluded.get(self._desk.me)
        if until is None:
            return None
        steps = until + 1 - log.position.index
        reason = (
            f"the run's log says that this peer has signed what is not true, and excludes it for its next {steps} outer"
            f" steps: nothing that it trains counts; if you have changed nothing, test this machine's memory, and join"
            f" from a sound machine with a new identity"
        )
        return Hindrance("convicted", reason, is_vain=True)

    def _on_probation(self) -> Hindrance | None:
        log = self._replica.log
        if not log.is_on_probation(self._desk.me):
            return None
        reason = (
            f"this peer is new to the run: its first {log.probation} outer steps do not count, as the run's"
            f" admission.probation says; it need only go on"
        )
        return Hindrance("on probation", reason, is_vain=False)

    def _cut_off(self, leader: str | None) -> Hindrance | None:
        """Whether we can talk to nobody, or not to the one whom all others take for their leader."""
        unreached = self._presence.unreached
        if not unreached:
            return None
        others = {beat.peer for beat in self._presence.live().trainers}
        if not unreached & others:
            return None
        was_cut_off = self._hindrance is not None and self._hindrance.kind == "cut off"
        # Once cut off, being behind is no cure for it.
        if leader in unreached and (self.is_aside or was_cut_off or not self._replica.is_behind):
            return Hindrance("cut off", f"the leader {leader} can't be reached; {REACH_REMEDY}", is_vain=True)
        if others <= unreached:
            reason = "no other peer can be reached, and what is trained here may count nothing in the end"
            return Hindrance("alone", f"{reason}; {REACH_REMEDY}", is_vain=False)
        return None

    def _too_slow(self) -> Hindrance | None:
        usual = self._presence.usual(self._replica.log)
        if not self._trainer.is_too_slow(usual):
            return None
        reason = (
            f"this peer trains {self._trainer.speed:.3g} tokens a second, most others {usual:.3g}: not even the"
            f" smallest lease is done in time; use a faster device, or a run with a smaller rounds.smallest_share"
        )
        return Hindrance("too slow", reason, is_vain=self._trainer.in_vain > 0)
