"""How a peer comes to where others are: it replays the entries that were made without it, or takes another's state.

It looks for others only while its own state is level, and one at a time. The work in hand goes on beside a replay where
it can still count; it is dropped where another's state is taken.
"""

from __future__ import annotations

from typing import Protocol

from peers.log.certificate import Certificate
from peers.log.header import NO_PAYLOAD, Header
from peers.presence.presence import Presence
from peers.protocol.desk import Desk
from peers.protocol.effects import Note
from peers.protocol.events import LineageNotSeen, LineageSeen
from peers.protocol.internal import FarBehind, NobodyAhead, WorkEnds
from peers.protocol.messages import Commit
from peers.protocol.replica import Replica, ReplicaState
from peers.protocol.search import Search
from peers.protocol.slot import Slot
from peers.protocol.states import State
from peers.protocol.trainer import Trainer
from peers.protocol.troubles import Troubles
from peers.protocol.votes import signed_both


class Host(Protocol):
    """What the rest of the peer does about it."""

    slots: dict[int, Slot]

    @property
    def slot(self) -> Slot:
        """The one whose entry closes the cycle, if it is open."""

    @property
    def state(self) -> State:
        """What the peer is doing, in one word."""

    @property
    def notes_down(self) -> bool:
        """Whether the peer leaves, so that nothing new begins."""

    def entry_made(self, header: Header, certificate: Certificate | None) -> None:
        """The payload of an entry that was made without us is here, or it has none."""

    def open_slots(self) -> None:
        """Begin with new slots."""

    def open_slot(self, fragment: int) -> Slot:
        """Return a new slot for the fragment."""

    def turn(self) -> None:
        """Close the slots whose entries are made."""

    def await_lease(self) -> None:
        """There is something new to ask others for."""


class CatchingUp:
    """Of one peer. `search` finds out who is further on."""

    def __init__(
        self, desk: Desk, presence: Presence, trainer: Trainer, replica: Replica, troubles: Troubles, host: Host
    ) -> None:
        self.search = Search(desk, presence, replica)
        self.keeps_work = False
        """Whether what is trained goes into a later cycle than the one that is replayed."""
        self._desk = desk
        self._trainer = trainer
        self._replica = replica
        self._troubles = troubles
        self._host = host

    @property
    def may_begin(self) -> bool:
        return self._replica.state is ReplicaState.LEVEL and not self._host.notes_down

    # Who is further on ----------------------------------------------------------------------------------------
    def look(self) -> None:
        """Ask whoever claims to be further on, if there is anybody."""
        if self.may_begin and self._troubles.may_ask:
            self.search.catch_up()

    def on_lineage(self, event: LineageSeen | LineageNotSeen) -> None:
        """What another one's log is worth is known now. Where we have a state to give up, it is given up now. Where it
        is certified as ours is, whoever has signed both has lied."""
        if isinstance(event, LineageNotSeen):
            self.search.on_not_seen(event)
            return
        for proof in signed_both(event.ours, event.theirs):
            self._host.slot.witness.file(proof)
        far = self.search.on_seen(event)
        if far is not None and self.may_begin:
            self.fetch(far)

    def on_elsewhere(self, sender: str) -> None:
        """Our inquiry led nowhere: the sender is on another lineage than we are."""
        if self.may_begin and self._replica.claimant == sender:
            self.search.weigh(sender)

    # Entry after entry ----------------------------------------------------------------------------------------
    def replay(self, sender: str, commit: Commit, slot: Slot) -> None:
        """Others went on without us."""
        if not self.may_begin:
            return
        header, was_asked = commit.header, self._host.state is State.JOINING or slot.was_asked(sender)
        behind = self._replica.follow(sender, commit, slot.certifier.proof(header, commit.certificate), was_asked)
        if behind is None:
            return
        if self._replica.log.is_closing(header):
            self.keeps_work = self._trainer.outlives(header)
            if not self.keeps_work:
                self._trainer.take(WorkEnds(self._replica.log.position, header))
            self._host.slots[header.fragment] = self._host.open_slot(header.fragment)
        self.search.answered()
        self._replica.take(behind)
        if header.payload == NO_PAYLOAD:
            self._host.entry_made(header, commit.certificate)

    def on_not_replayed(self, header: Header, reason: str) -> None:
        self._desk.emit(Note("warning", f"no payload of entry {header.index}: {reason}"))
        far = self.search.far_behind()
        if far is not None:
            self.fetch(far)
        elif self._replica.log.is_closing(header):
            self.drop_work()
            self._replica.take(NobodyAhead())
            self._host.await_lease()
        else:  # its slot goes on: who has the entry tells us again
            self._replica.take(NobodyAhead())
            self._host.turn()

    # Another one's state --------------------------------------------------------------------------------------
    def check_state(self) -> None:
        """Take the state of most of the roster, where ours is another at the same place: a bit has flipped."""
        if not (self.may_begin and self._replica.is_settled):
            return
        most = self._replica.state_of_most
        if most is None or most == self._replica.state_digest:
            return
        donor = self._replica.donor_of(most)
        if donor is not None:
            self._desk.emit(Note("error", f"our state is not that of most peers: fetching it from {donor}"))
            self.fetch_from(donor)

    def fetch_from(self, donor: str) -> None:
        """Take the state that somebody has where we are, or further on."""
        self.fetch(FarBehind(donor, self._replica.log.position.index))

    def fetch(self, far: FarBehind) -> None:
        self.drop_work()
        self._replica.take(far)

    def drop_work(self) -> None:
        """We go on without the work in hand. What we have promised in this cycle still holds."""
        self._trainer.take(WorkEnds(self._replica.log.position))
        self.keeps_work = False
        self._host.open_slots()
