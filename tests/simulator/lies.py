"""What a liar that does not lead may do: claims in heartbeats and messages, and false data in rounds."""

from __future__ import annotations

from dataclasses import replace

from peers.log.certificate import Departure
from peers.presence.heartbeat import TAIL, Heartbeat, PeerState, name_peers
from peers.protocol.effects import SendChunk
from peers.protocol.events import Event, PayloadAssembled, ReducedArrived, Tick
from peers.protocol.messages import (
    Accuse,
    Begin,
    Commit,
    Complete,
    Inquire,
    LeaseRequest,
    Leaving,
    Marked,
    Message,
    Prepared,
    Ready,
    Unread,
    Waiting,
)
from peers.protocol.rounds import Attempt
from peers.values.wire import digest_of
from peers.values.workload import Blocks
from tests.simulator.liars import Liar, Lie, Said, invented
from tests.simulator.simulated_log import Frozen
from tests.simulator.simulated_peer import SimulatedPeer

FAR = 2**61
"""More than any honest run counts up to."""
TURN = 4
"""Heartbeats in a row in which a liar claims most, before an ally's turn."""


# Claims --------------------------------------------------------------------------------------------------------
class InventedLog(Lie):
    """Its heartbeats name a log that nobody has, heavier or longer than all others."""

    def beats(self, to: str, heartbeat: Heartbeat) -> Heartbeat:
        claims = {
            "lineage_tokens": FAR,
            "index": heartbeat.index + 1000,
            "head": invented(("head", heartbeat.index)),
            "state_digest": invented("state"),
        }
        chosen = dict(self.draw.sample(sorted(claims.items()), self.draw.randint(1, len(claims))))
        return heartbeat.model_copy(update=chosen)


class ClaimsInTurn(Lie):
    """Its heartbeats name the heaviest log of all, and then an ally's do; neither tells newcomers what followed."""

    def beats(self, to: str, heartbeat: Heartbeat) -> Heartbeat:
        turn, allies = heartbeat.sequence // TURN, sorted(self.liar.allies)
        is_ours = allies[turn % len(allies)] == self.liar.name
        return heartbeat.model_copy(update={"lineage_tokens": FAR if is_ours else FAR - 1})

    def says(self, to: str, message: Message) -> Said:
        if not isinstance(message, Commit) or to in self.liar.log.voters:
            yield to, message


class LeapsAhead(Lie):
    """Its heartbeats are one entry further on than it is, so that nobody there counts it, or a few."""

    def beats(self, to: str, heartbeat: Heartbeat) -> Heartbeat:
        ahead = heartbeat.index + self.draw.choice((1, 1, 3))
        return heartbeat.model_copy(update={"index": ahead, "head": invented(("head", ahead))})


class SeemsReady(Lie):
    """It says that it is ready in heartbeats alone."""

    def beats(self, to: str, heartbeat: Heartbeat) -> Heartbeat:
        return heartbeat.model_copy(update={"state": PeerState.READY})

    def says(self, to: str, message: Message) -> Said:
        if not isinstance(message, Ready | Complete):
            yield to, message


class Whispers(Lie):
    """It gives no sign of life, says nothing to its leader, and speaks to all others each second."""

    said: Heartbeat | None = None

    def beats(self, to: str, heartbeat: Heartbeat) -> Heartbeat:
        self.said = self.said or heartbeat
        return self.said

    def says(self, to: str, message: Message) -> Said:
        if to != self.liar.peer.slot.led_by:
            yield to, message

    def volunteers(self) -> Said:
        whisper = Inquire(position=self.liar.log.position)
        yield from ((other, whisper) for other in self.liar.others if other != self.liar.peer.slot.led_by)


class FalseState(Lie):
    """It says that its state is another than it is."""

    def beats(self, to: str, heartbeat: Heartbeat) -> Heartbeat:
        return heartbeat.model_copy(update={"state_digest": invented(("state", heartbeat.head))})

    def says(self, to: str, message: Message) -> Said:
        if isinstance(message, Ready | LeaseRequest):
            message = message.model_copy(update={"state_digest": invented(("state", message.position.head))})
        yield to, message


class FalseSnapshot(Lie):
    """What it gives to joiners is not the state that its entries lead to."""

    def freezes(self, frozen: Frozen) -> Frozen:
        return replace(frozen, states=tuple(digest_of(b"false" + state) for state in frozen.states))


class FalseRate(Lie):
    """It says that its link carries very much, or next to nothing; and that the others' do so, too."""

    def says(self, to: str, message: Message) -> Said:
        if isinstance(message, Ready):
            seen = tuple((peer, self.draw.choice((1, FAR))) for peer in self.liar.others)
            message = message.model_copy(update={"rate": self.draw.choice((1, FAR)), "seen": seen})
        yield to, message


class FalseSpeed(Lie):
    """It says that it trains faster than anybody can, so that the others' leases become small."""

    def beats(self, to: str, heartbeat: Heartbeat) -> Heartbeat:
        return heartbeat.model_copy(update={"speed": 1e12})


class ManyVotes(Lie):
    """It votes for each of those who hear it."""

    def beats(self, to: str, heartbeat: Heartbeat) -> Heartbeat:
        return heartbeat.model_copy(update={"vote": to[-TAIL:]})


class ReachesNobody(Lie):
    """It says that it reaches none of the others."""

    def beats(self, to: str, heartbeat: Heartbeat) -> Heartbeat:
        return heartbeat.model_copy(update={"unreached": name_peers(self.liar.others)})

    def says(self, to: str, message: Message) -> Said:
        if isinstance(message, Ready | LeaseRequest):
            message = message.model_copy(update={"unreached": tuple(self.liar.others)})
        yield to, message


class InventedHeld(Lie):
    """It says that it holds an entry of its own making, from a late attempt, and has signed that."""

    def says(self, to: str, message: Message) -> Said:
        if isinstance(message, Ready):
            entry = self.liar.entry_of_its_own()
            attempt = Attempt(position=message.position, number=FAR, leader=max([*self.liar.others, self.liar.name]))
            message = message.model_copy(update={"held": self.liar.holding(entry, attempt)})
        yield to, message


class FalseFarewell(Lie):
    """It says that it has left, and signed nothing; and goes on."""

    def volunteers(self) -> Said:
        peer = self.liar.peer
        departure = Departure(run=peer.settings.run, peer=self.liar.name, incarnation=peer.incarnation, index=0)
        leaving = Leaving(
            position=peer.log.position,
            incarnation=peer.incarnation,
            departure=0,
            signature=self.liar.keys.sign(departure.text),
        )
        if self.draw.random() < 0.1:
            yield from ((other, leaving) for other in self.liar.others)


class Twins(Lie):
    """Two processes run with its key, and what one has promised the other does not know. Both are honest."""

    def notices(self, event: Event) -> Event:
        liar = self.liar
        assert isinstance(liar, Liar)
        if liar.twin is None and isinstance(event, Tick):
            liar.twin = Twin(liar.name, liar.swarm, liar.swarm.block_count, liar.swarm.kept_bytes, liar.clock)
        return event

    def beats(self, to: str, heartbeat: Heartbeat) -> Heartbeat:
        assert isinstance(self.liar, Liar)
        twin = self.liar.twin
        if twin is None or heartbeat.sequence % 2:
            return heartbeat
        twin.sequence = heartbeat.sequence - 1
        return twin.beat()


class Twin(SimulatedPeer):
    is_honest = False

    def may_stumble(self, error: Exception) -> bool:
        """It gets the data of rounds that it is not in."""
        self.alive = False
        return True


# In rounds -----------------------------------------------------------------------------------------------------
class Mute(Lie):
    """No block of it ever comes."""

    def gives(self, send: SendChunk, data: bytes) -> tuple[SendChunk, bytes] | None:
        return None


class ManyAverages(Lie):
    """It gives each member another average."""

    def gives(self, send: SendChunk, data: bytes) -> tuple[SendChunk, bytes]:
        differing = digest_of(send.to.encode() + data)[: len(data)].ljust(len(data), b"x")
        return send, differing if send.reduced else data


class WrongAverages(Lie):
    """What it averages is wrong, and the same for all: only whoever makes the average again finds that out."""

    def reduces(self, blocks: Blocks) -> Blocks:
        return bytes(blocks)[::-1]


class FalseBlocks(Lie):
    """Its own blocks are such as no encoder makes."""

    def gives(self, send: SendChunk, data: bytes) -> tuple[SendChunk, bytes]:
        return send, data if send.reduced else bytes(len(data))


class UnsignedBlocks(Lie):
    """It has not signed what its own blocks lead to, or not to everybody."""

    def gives(self, send: SendChunk, data: bytes) -> tuple[SendChunk, bytes]:
        return replace(send, signature=self.draw.choice((None, bytes(64), send.signature))), data


class AllAbsent(Lie):
    """It averages its own blocks alone, and says that those of all others were absent."""

    def _others(self) -> tuple[str, ...]:
        exchange = self.liar.peer.exchange
        return tuple(peer for peer in exchange.round.peers if peer != self.liar.name) if exchange else ()

    def notices(self, event: Event) -> Event:
        if isinstance(event, ReducedArrived) and event.sender == self.liar.name:
            return replace(event, absent=self._others())
        return event

    def gives(self, send: SendChunk, data: bytes) -> tuple[SendChunk, bytes]:
        return (replace(send, absent=self._others()) if send.reduced else send), data


class Accuser(Lie):
    """It accuses every other member as soon as a round begins."""

    def hears(self, sender: str, message: Message | Unread) -> Said:
        if isinstance(message, Begin):
            for victim in sorted(set(message.round.remaining) - {self.liar.name, sender}):
                yield sender, Accuse(attempt=message.attempt, accused=victim, reason="bad blocks")


class FalseMarks(ManyAverages):
    """And it tells a leader what it likes of those that it has itself."""

    def says(self, to: str, message: Message) -> Said:
        if isinstance(message, Marked):
            message = message.model_copy(update={"marks": invented(message.marks)})
        yield to, message


class ManyCompletes(Lie):
    """It signs another entry for each member, whatever it holds."""

    def says(self, to: str, message: Message) -> Said:
        exchange = self.liar.peer.exchange
        if not isinstance(message, Complete) or exchange is None:
            yield to, message
            return
        payload, log = invented((to, message.payload)), self.liar.log.of(message.position.fragment)
        header = exchange.round.entry(log, dict(message.missed), payload)
        signature = self.liar.sign(header, message.attempt)
        yield to, message.model_copy(update={"payload": payload, "signature": signature})


class ManyPayloads(Lie):
    """It tells each member, and its leader, that it has another payload."""

    def says(self, to: str, message: Message) -> Said:
        if isinstance(message, Prepared):
            message = message.model_copy(update={"payload": invented((to, message.payload))})
        yield to, message


class SpeaksLast(Lie):
    """It tells nobody what payload it has, and signs when somebody else has."""

    signed: Attempt | None = None  # by somebody

    def hears(self, sender: str, message: Message | Unread) -> Said:
        if isinstance(message, Complete):
            self.signed = message.attempt
        yield from ()

    def says(self, to: str, message: Message) -> Said:
        is_early = isinstance(message, Complete) and message.attempt != self.signed
        if not isinstance(message, Prepared) and not is_early:
            yield to, message


class WaitsForItsLeader(Lie):
    """It gives what it owes, and says for ever that it lacks what its leader owes it."""

    moved = 0

    def notices(self, event: Event) -> Event:
        is_led = isinstance(event, PayloadAssembled) and event.round_name.leader != self.liar.name
        return Tick() if is_led else event

    def says(self, to: str, message: Message) -> Said:
        if isinstance(message, Waiting) and to != self.liar.name:
            self.moved += 1
            message = message.model_copy(update={"missing": (to,), "moved": self.moved})
        yield to, message


class FalseSignatures(Lie):
    """What it signs is not what it says."""

    def says(self, to: str, message: Message) -> Said:
        if isinstance(message, Complete):
            message = message.model_copy(update={"signature": 2 * invented(to)})
        yield to, message


class ManyReadys(Lie):
    """It says Ready to all, with ever higher attempts, and now with its work and now without."""

    def says(self, to: str, message: Message) -> Said:
        yield to, message
        if isinstance(message, Ready):
            for other in self.liar.others:
                last = message.last_attempt + self.draw.choice((0, 1, 1000))
                update = {"last_attempt": last} | self.draw.choice(({}, {"tokens": 0, "samples": ()}))
                yield other, message.model_copy(update=update)


MEMBERS_LIES: dict[str, type[Lie]] = {
    "invented log": InventedLog,
    "claims in turn": ClaimsInTurn,
    "leaps ahead": LeapsAhead,
    "seems ready": SeemsReady,
    "whispers": Whispers,
    "false state": FalseState,
    "false snapshot": FalseSnapshot,
    "false rate": FalseRate,
    "false speed": FalseSpeed,
    "many votes": ManyVotes,
    "reaches nobody": ReachesNobody,
    "invented held": InventedHeld,
    "false farewell": FalseFarewell,
    "twins": Twins,
    "mute": Mute,
    "many averages": ManyAverages,
    "wrong averages": WrongAverages,
    "false blocks": FalseBlocks,
    "unsigned blocks": UnsignedBlocks,
    "all absent": AllAbsent,
    "accuser": Accuser,
    "false marks": FalseMarks,
    "many completes": ManyCompletes,
    "many payloads": ManyPayloads,
    "speaks last": SpeaksLast,
    "waits for its leader": WaitsForItsLeader,
    "false signatures": FalseSignatures,
    "many readys": ManyReadys,
}
