"""Who leads a slot, as this peer sees it; and its own lead, when others take it for their leader."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from peers.log.state import LogState
from peers.presence.presence import Presence
from peers.protocol.certifier import Certifier
from peers.protocol.desk import Desk
from peers.protocol.exchange import Exchange
from peers.protocol.judge import Judge
from peers.protocol.leader import Leader
from peers.protocol.messages import Accuse, Complete, LeaseRequest, Marked, Prepared, Ready, Waiting
from peers.protocol.replica import Replica, ReplicaState
from peers.protocol.showings import Showings
from peers.protocol.trainer import Trainer, TrainerState


class _OwnWork(Protocol):
    """What this peer does in the slot itself."""

    @property
    def is_taking_part(self) -> bool:
        """Whether we are ready in the slot, or further, whatever the trainer does by now."""

    @property
    def exchange(self) -> Exchange | None:
        """Our side of the round."""


class Leadership:
    """Of one slot. Safety does not depend on there being one leader; that a round comes about does."""

    def __init__(
        self,
        desk: Desk,
        presence: Presence,
        trainer: Trainer,
        replica: Replica,
        log: LogState,
        certifier: Certifier,
        work: _OwnWork,
    ) -> None:
        self.granted_by: str | None = None
        """Who gave us our lease: it leads, though its heartbeats may not say yet that it is at work, too."""
        self._desk = desk
        self._presence = presence
        self._trainer = trainer
        self._replica = replica
        self._log = log
        self._certifier = certifier
        self._work = work
        self._since = desk.now
        self._leader: Leader | None = None

    def elect(self) -> str | None:
        return self._presence.elect(self._log, self._at_work())

    def _at_work(self) -> set[str]:
        """Who works on the entry without saying so in heartbeats."""
        is_at_work = self._trainer.state is not TrainerState.IDLE or self._work.is_taking_part
        is_level = self._replica.state is ReplicaState.LEVEL
        has_given = self._leader is not None and self._leader.has_given
        if not ((is_level and is_at_work) or has_given or self._replica.state is ReplicaState.APPLYING):
            return set()
        is_new = self._trainer.has_lasted <= self._desk.settings.timing.heartbeat_expiry
        return {self._desk.me} | ({self.granted_by} if self.granted_by and is_new else set())

    def gives_lease(self, joiner: str) -> bool:
        """Return whether we lead, as far as we know: two leaders of one position may give two joiners the same samples.

        A peer that gave us our lease does not lead if it asks us for one.
        """
        return self.elect() == self._desk.me or joiner == self.granted_by

    # Our own lead ---------------------------------------------------------------------------------------------
    def tick(self) -> None:
        if self._leader is not None:
            awaited = self._leader.awaited
            awaited.grace, awaited.shortest_grace = self._trainer.grace(), self._trainer.shortest_grace()
            usual = self._presence.usual(self._log)
            awaited.slack = self._trainer.slack(self._presence.standing.round_seconds, usual)
            awaited.own = self._trainer.inner_step(), self._trainer.speed if self._trainer.is_training else 0.0
            self._leader.unreached = self._presence.unreached
            self._leader.is_behind = self._replica.is_behind
            self._leader.met = self._presence.membership.met
            self._leader.vain = self._presence.vain
            departed = self._presence.membership.departed(self._log)
            self._desk.emit(*self._leader.tick(self._desk.now, self._presence.live(), departed))

    def _gone(self, heard: Collection[str]) -> tuple[str, ...]:
        """The voters that are gone. We are more patient than members are, and believe them for the partition grace if
        they say that they hear one, though it may have said farewell to us alone: else whoever says so would keep
        the dead in."""
        here = self._voters_here(self._desk.schedule.death)
        here |= self._voters_here(self._desk.settings.timing.partition_grace, even_leavers=True).intersection(heard)
        return tuple(peer for peer in self._log.voters if peer not in here)

    def on_lease_request(self, request: LeaseRequest, sender: str) -> None:
        step = self._trainer.inner_step()
        if self._trainer.state is TrainerState.TRAINED:
            step = self._desk.settings.inner_steps
        self._desk.emit(*self._lead().on_lease_request(sender, request, step))

    def on_ready(self, ready: Ready, sender: str) -> None:
        leader = self._lead()
        if self._is_two(sender, ready.incarnation):
            return
        self._desk.emit(*leader.on_ready(sender, ready, self._desk.now))
        if leader.is_full and not leader.running:
            self.tick()  # at once: a round does not wait for the clock

    def _is_two(self, peer: str, incarnation: int) -> bool:
        """Whether a voter says Ready as another start than it is heard as. Members sign no entry that takes its say;
        one that has started again is heard as that start in a moment."""
        if self._log.starts.get(peer, incarnation) == incarnation or peer == self._desk.me:
            return False
        return peer in self._voters_here(self._desk.settings.timing.heartbeat_expiry)

    def _voters_here(self, patience: float, even_leavers: bool = False) -> set[str]:
        return self._presence.voters_here(self._log, self._desk.memory.incarnation, patience, even_leavers)

    def on_waiting(self, waiting: Waiting, sender: str) -> None:
        if self._leader is not None:
            self._desk.emit(*self._leader.on_waiting(sender, waiting, self._desk.now))

    def on_accuse(self, accuse: Accuse, sender: str) -> None:
        if self._leader is not None:
            self._desk.emit(*self._leader.on_accuse(sender, accuse, self._desk.now))

    def on_marked(self, marked: Marked, sender: str) -> None:
        if self._leader is not None:
            self._desk.emit(*self._leader.on_marked(sender, marked, self._desk.now))

    def on_prepared(self, prepared: Prepared, sender: str) -> None:
        if self._leader is not None and prepared.attempt.leader == self._desk.me:
            self._desk.emit(*self._leader.on_prepared(sender, prepared, self._desk.now))

    def on_complete(self, complete: Complete, sender: str) -> None:
        if self._leader is not None and complete.attempt.leader == self._desk.me:
            self._desk.emit(*self._leader.on_complete(sender, complete, self._desk.now))

    def on_leaving(self, peer: str) -> None:
        if self._leader is not None:
            self._leader.departed = self._presence.membership.departed(self._log)
            self._desk.emit(*self._leader.gone(peer, self._desk.now))

    @property
    def is_leading(self) -> bool:
        """Whether somebody asked us for something as its leader."""
        return self._leader is not None

    def _lead(self) -> Leader:
        if self._leader is None:
            settings, digest = self._desk.settings, self._replica.state_digest
            payload = self._desk.payloads[self._log.fragment].size
            standing, log = self._presence.standing, self._log.in_state(digest)
            showings = Showings(settings.timing.resend)
            desk, lineage = self._desk, self._replica.lineage
            judge = Judge(log, desk.docket, desk.amending, lineage, lambda: self._work.exchange, showings)
            told = log, digest, settings, payload, standing, self._certifier, judge
            self._leader = Leader(self._desk.me, *told)
            self._leader.since = self._since
            self._leader.find_gone = self._gone
        self._leader.lease = self._trainer.lease
        return self._leader
