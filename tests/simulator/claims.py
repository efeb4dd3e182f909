"""What a liar may claim: of the log and its state, of its links and its speed, of samples, and of others' faults."""

from __future__ import annotations

from dataclasses import replace

from peers.audit.proofs import FaultProof, TwoAverages, TwoCommitments
from peers.log.certificate import Ballot
from peers.messages.averages import Averaged, Origin
from peers.messages.commitment import Author, commit_to
from peers.messages.messages import (
    Begin,
    Certified,
    Inquire,
    LeaseGrant,
    LeaseRequest,
    Message,
    Proof,
    Propose,
    Ready,
    Refuse,
    Unread,
    Vote,
)
from peers.messages.rounds import RoundName
from peers.presence.heartbeat import Heartbeat, PeerState, name_peers
from peers.protocol.effects import SendChunk
from peers.protocol.events import Event, Tick, TrainingDone
from peers.values.chunks import Sum
from peers.values.wire import digest_of, pack
from tests.simulator.liars import FAR, Lie, Said, invented
from tests.simulator.lies import LeavesOut, proposing
from tests.simulator.simulated_log import Frozen

TURN = 4  # heartbeats in a row in which a liar claims most, before an ally's turn
KEPT = 50  # proofs that a liar remembers


# The log, the state, the link ------------------------------------------------------------------------------------
class InventedLog(Lie):
    """Its heartbeats name a log that nobody has, heavier or longer than all others."""

    def beats(self, to: str, heartbeat: Heartbeat) -> Heartbeat:
        index = heartbeat.index + 1000
        claims = {"lineage_tokens": FAR, "index": index, "head": invented(index), "state_digest": invented("state")}
        chosen = self.draw.sample(sorted(claims), self.draw.randint(1, len(claims)))
        return heartbeat.model_copy(update={name: claims[name] for name in chosen})


class ClaimsInTurn(Lie):
    """Its heartbeats name the heaviest log of all, and then an ally's do; neither tells newcomers what followed."""

    def beats(self, to: str, heartbeat: Heartbeat) -> Heartbeat:
        allies = sorted(self.allies)
        is_ours = allies[heartbeat.sequence // TURN % len(allies)] == self.me
        return heartbeat.model_copy(update={"lineage_tokens": FAR if is_ours else FAR - 1})

    def says(self, to: str, message: Message) -> Said:
        if not isinstance(message, Certified) or to in self.log.voters:
            yield to, message


class LeapsAhead(Lie):
    """Its heartbeats are an entry further on than it is, or a few."""

    def beats(self, to: str, heartbeat: Heartbeat) -> Heartbeat:
        ahead = heartbeat.index + self.draw.choice((1, 1, 3))
        return heartbeat.model_copy(update={"index": ahead, "head": invented(("head", ahead))})


class SeemsReady(Lie):
    """It says that it is ready, in heartbeats alone."""

    def beats(self, to: str, heartbeat: Heartbeat) -> Heartbeat:
        return heartbeat.model_copy(update={"state": PeerState.READY})

    def says(self, to: str, message: Message) -> Said:
        if not isinstance(message, Ready | Vote):
            yield to, message


class Whispers(Lie):
    """It gives no sign of life, says nothing to the leader, and speaks to all others each second."""

    said: Heartbeat | None = None

    def beats(self, to: str, heartbeat: Heartbeat) -> Heartbeat:
        self.said = self.said or heartbeat
        return self.said

    def says(self, to: str, message: Message) -> Said:
        if not self._leads(to):
            yield to, message

    def volunteers(self) -> Said:
        whisper = Inquire(position=self.log.position)
        yield from ((other, whisper) for other in self.others if not self._leads(other))

    def _leads(self, peer: str) -> bool:
        return bool(self.log.ring) and self.log.leader_of(self.peer.view) == peer


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
            seen = tuple((peer, self.draw.choice((1, FAR))) for peer in self.others)
            message = message.model_copy(update={"rate": self.draw.choice((1, FAR)), "seen": seen})
        yield to, message


class Trickles(Lie):
    """It says that its link carries very much, and gives one chunk in ten."""

    def says(self, to: str, message: Message) -> Said:
        yield to, message.model_copy(update={"rate": FAR}) if isinstance(message, Ready) else message

    def gives(self, send: SendChunk, data: bytes) -> tuple[SendChunk, bytes] | None:
        return (send, data) if self.draw.random() < 0.1 else None


class FalseSpeed(Lie):
    """It says that it trains faster than anybody can, so that the others' leases become small."""

    def beats(self, to: str, heartbeat: Heartbeat) -> Heartbeat:
        return heartbeat.model_copy(update={"speed": 1e12})


class ReachesNobody(Lie):
    """It says that it reaches none of the others."""

    def beats(self, to: str, heartbeat: Heartbeat) -> Heartbeat:
        return heartbeat.model_copy(update={"unreached": name_peers(self.others)})

    def says(self, to: str, message: Message) -> Said:
        if isinstance(message, Ready):
            message = message.model_copy(update={"unreached": tuple(self.others)})
        yield to, message


class JumpsViews(Lie):
    """It says that it is in a view that nobody has reached."""

    def beats(self, to: str, heartbeat: Heartbeat) -> Heartbeat:
        return heartbeat.model_copy(update={"view": FAR})

    def says(self, to: str, message: Message) -> Said:
        yield to, message.model_copy(update={"view": FAR}) if isinstance(message, Ready) else message


class ManyReadys(Lie):
    """It says Ready to all, in all views, and now with its work and now without."""

    def says(self, to: str, message: Message) -> Said:
        yield to, message
        if isinstance(message, Ready):
            for other in self.others:
                idle = self.draw.choice(({}, {"tokens": 0, "samples": ()}))
                yield other, message.model_copy(update={"view": message.view + self.draw.choice((0, 1, 1000))} | idle)


# Samples ---------------------------------------------------------------------------------------
class RefusesAll(Lie):
    """Peers that say Ready to it, or ask for a lease, are told that their state is wrong."""

    def hears(self, sender: str, message: Message | Unread) -> Said:
        if isinstance(message, Ready | LeaseRequest):
            digest = self.draw.choice((message.state_digest, invented("state")))
            yield sender, Refuse(position=message.position, state_digest=digest, reason="your state is wrong")

    def says(self, to: str, message: Message) -> Said:
        if not isinstance(message, Begin | Propose | LeaseGrant):
            yield to, message


class KeepsNewcomersOut(Lie):
    """It gives no samples to those who ask for them."""

    def says(self, to: str, message: Message) -> Said:
        if not isinstance(message, LeaseGrant):
            yield to, message


class GivesNoLease(KeepsNewcomersOut):
    """And it is never done with its own."""

    def notices(self, event: Event) -> Event:
        return Tick() if isinstance(event, TrainingDone) else event


class OneLeaseForAll(Lie):
    """It gives all who ask the same samples."""

    def says(self, to: str, message: Message) -> Said:
        if isinstance(message, LeaseGrant):
            message = message.model_copy(update={"samples": self.log.grants[0]})
        yield to, message


class OtherLeases(Lie):
    """It gives samples that are another's already, or nobody's to give, and in too many inner steps."""

    def says(self, to: str, message: Message) -> Said:
        if isinstance(message, LeaseGrant):
            leases = [*self.log.leases.values(), self.log.grants[-1]]
            steps = self.draw.choice((1, message.steps, 10**6))
            message = message.model_copy(update={"samples": self.draw.choice(leases), "steps": steps})
        yield to, message


# Blame -------------------------------------------------------------------------------------------------------------
class NamesHonest(LeavesOut):
    """It leaves a member out of its rounds and names it in its annex, with a forged proof or with none."""

    def says(self, to: str, message: Message) -> Said:
        if isinstance(message, Propose) and message.justify is None and message.header.leader == self.me:
            proof = forged(self, max(self.victims, default=self.me))
            if self.draw.random() < 0.5:
                yield to, shown(self, proof)
            message = proposing(self, message, faults=(proof.fault,))
        yield to, message


class ForgedProofs(Lie):
    """It floods all others with proofs that prove nothing."""

    def volunteers(self) -> Said:
        for other in self.others:
            for _ in range(self.draw.randint(0, 3)):
                yield other, shown(self, forged(self, self.draw.choice(self.others)))


class ManyProofs(Lie):
    """It floods all others with good proofs that it has lied itself: here, elsewhere, and in another run."""

    def volunteers(self) -> Said:
        here, draw = self.log.position, self.draw
        for other in self.others:
            head, index = draw.choice((here.head, here.head, invented("run"))), draw.choice((here.index, 0, FAR))
            position = here.model_copy(update={"head": head, "index": index})
            author = Author(peer=self.me, incarnation=7, position=position, number=draw.randint(0, 2))
            roots = (Sum(invented((here, draw.random())), 1.0) for _ in range(2))
            first, second = (commit_to(root, author, self.keys) for root in roots)
            yield other, shown(self, TwoCommitments(author=author, first=first, second=second))


class OldProofs(Lie):
    """It repeats all proofs that it has ever heard to all, also of peers that are excluded already."""

    _heard: tuple[Proof, ...] = ()

    def hears(self, sender: str, message: Message | Unread) -> Said:
        if isinstance(message, Proof):
            self._heard = (*self._heard[-KEPT:], message)
        yield from ()

    def volunteers(self) -> Said:
        for proof in self._heard:
            yield from self.to_all(proof.model_copy(update={"position": self.log.position}))


def shown(lie: Lie, proof: FaultProof) -> Proof:
    """Return what shows a proof at the liar's place in the log."""
    return Proof(position=lie.log.position, fault=proof.kind, proof=pack(proof))


def forged(lie: Lie, victim: str) -> TwoAverages:
    """Return a proof that convicts nobody: the liar has signed it itself."""
    name = RoundName(position=lie.log.position, ballot=Ballot(view=0, attempt=1), leader=lie.me)
    first, second = (
        Averaged(chunk=0, digest=digest, absent=(), origin=Origin(reducer=victim, signature=lie.keys.sign(digest)))
        for digest in (invented((victim, "first")), invented(victim))
    )
    return TwoAverages(round=name, terms=invented("terms"), incarnation=0, first=first, second=second)
