"""Lies that a signature proves, and lies about such proofs."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import replace

from peers.log.header import Fault
from peers.protocol.averages import NO_TERMS, Averages
from peers.protocol.commitment import Author, commit_to, digest_of_all
from peers.protocol.effects import SendChunk
from peers.protocol.faults import FaultProof, SignedAverage, TwoAverages, TwoCommitments
from peers.protocol.messages import Begin, Complete, Message, Prove, Ready, Unread
from peers.protocol.rounds import Attempt
from peers.values.chunks import Sum
from peers.values.wire import digest_of, pack
from tests.simulator.liars import Lie, Means, Said, invented

KEPT = 50
"""Proofs that a liar remembers."""


class SignedAverages(Lie):
    """It gives each member another average, and signs each: two of them are proof."""

    def gives(self, send: SendChunk, data: bytes) -> tuple[SendChunk, bytes]:
        exchange, origin = self.liar.peer.exchange, send.origin
        if not send.reduced or exchange is None or origin is None or origin.reducer != self.liar.name:
            return send, data
        differing = digest_of(send.to.encode() + data)[: len(data)].ljust(len(data), b"x")
        starts = {member.peer: member.incarnation for member in exchange.round.roster}
        mine = Averages(self.liar.name, send.round_name, self.liar.keys, starts, exchange.round.terms)
        mine.sign(send.chunk, digest_of(differing), send.absent)
        return replace(send, origin=mine.origin(send.chunk)), differing


class ManyCommitments(Lie):
    """Each time that it says Ready it commits to something else."""

    def says(self, to: str, message: Message) -> Said:
        if isinstance(message, Ready) and message.commitment:
            root = Sum(invented((to, self.draw.random())), message.commitment.squares)
            commitment = commit_to(root, message.author(self.liar.name), self.liar.keys)
            message = message.model_copy(update={"commitment": commitment})
        yield to, message


class ManyEntries(Lie):
    """It signs one entry after another in an attempt, for each member all of them."""

    def says(self, to: str, message: Message) -> Said:
        yield to, message
        if (other := another_entry(self.liar, to, message)) is not None:
            yield to, other


class OtherEntries(Lie):
    """It signs one entry for its leader, and in open attempts another one for each other member, each once."""

    def says(self, to: str, message: Message) -> Said:
        is_leader = isinstance(message, Complete) and to == message.attempt.leader
        other = None if is_leader else another_entry(self.liar, to, message)
        yield to, other or message


def another_entry(liar: Means, to: str, message: Message) -> Complete | None:
    """Return what says that the liar has signed another entry than the message does; None where it says of none."""
    exchange = liar.peer.exchange
    if not isinstance(message, Complete) or exchange is None or exchange.payload is None:
        return None
    payload, log = invented((to, message.payload)), liar.log.of(message.position.fragment)
    header = exchange.round.entry(log, dict(message.missed), payload)
    signature = liar.sign(header, message.attempt)
    return message.model_copy(update={"payload": payload, "entry": header.digest, "signature": signature})


class NamesHonest(Lie):
    """As a leader it leaves a member out of a round and names it in its annex, with a forged proof or with none."""

    def says(self, to: str, message: Message) -> Said:
        if not isinstance(message, Begin):
            yield to, message
            return
        others = [peer for peer in message.round.peers if peer != self.liar.name and peer in self.liar.log.known]
        if not others:
            yield to, message
            return
        victim = others[message.attempt.number % len(others)]
        proof = forged(self.liar, victim)
        if self.draw.random() < 0.5:
            yield to, prove(self.liar, proof)
        yield to, _without(message, victim, proof.fault)


def _without(begin: Begin, victim: str, fault: Fault) -> Begin:
    """Return the same with one member named in the annex instead of taking part; another one reduces its part."""
    shares = [share for share in begin.round.shares if share.member.peer != victim]
    spare = begin.round.chunks - sum(share.chunks for share in shares)
    heir = max(range(len(shares)), key=lambda place: shares[place].chunks)
    shares[heir] = shares[heir].model_copy(update={"chunks": shares[heir].chunks + spare})
    contributors = zip(begin.round.contributors, begin.commitments, strict=False)
    commitments = tuple(commitment for member, commitment in contributors if member.peer != victim)
    lost = tuple(peer for peer in begin.round.lost if peer != victim)
    changes = {"shares": tuple(shares), "lost": lost, "faults": (fault,), "committed": digest_of_all(commitments)}
    round = begin.round.model_copy(update=changes)
    return begin.model_copy(update={"round": round, "commitments": commitments})


class ForgedProofs(Lie):
    """It floods all others with proofs that prove nothing."""

    def volunteers(self) -> Said:
        for other in self.liar.others:
            for _ in range(self.draw.randint(0, 3)):
                victim = self.draw.choice(self.liar.others)
                yield other, prove(self.liar, forged(self.liar, victim))


class ManyProofs(Lie):
    """It floods all others with good proofs that it has lied itself: at this place of the log, at others, and in
    another run."""

    def __init__(self, liar: Means, draw: random.Random) -> None:
        super().__init__(liar, draw)
        self._kept: deque[Prove] = deque(maxlen=KEPT)

    def volunteers(self) -> Said:
        self._kept.append(self._proof())
        here = {"position": self.liar.log.position}
        for other in self.liar.others:
            for _ in range(self.draw.randint(0, 2)):
                yield other, self.draw.choice(self._kept).model_copy(update=here)

    def _proof(self) -> Prove:
        here, draw = self.liar.log.position, self.draw
        head, index = draw.choice((here.head, here.head, invented("another run"))), draw.choice((here.index, 0, 2**61))
        position = here.model_copy(update={"head": head, "index": index})
        author = Author(peer=self.liar.name, incarnation=7, position=position, after=draw.randint(0, 2))
        roots = (Sum(invented((here, draw.random())), 1.0) for _ in range(2))
        first, second = (commit_to(root, author, self.liar.keys) for root in roots)
        return prove(self.liar, TwoCommitments(author=author, first=first, second=second))


class OldProofs(Lie):
    """It repeats every proof that it has ever heard, to all; also of those who are excluded already."""

    def __init__(self, liar: Means, draw: random.Random) -> None:
        super().__init__(liar, draw)
        self._heard: deque[Prove] = deque(maxlen=KEPT)

    def hears(self, sender: str, message: Message | Unread) -> Said:
        if isinstance(message, Prove):
            self._heard.append(message)
        yield from ()

    def volunteers(self) -> Said:
        here, others = {"position": self.liar.log.position}, self.liar.others
        for proof in list(self._heard):
            repeated = proof.model_copy(update=here)
            for other in others:
                yield other, repeated


def prove(liar: Means, proof: FaultProof) -> Prove:
    """Return what shows a proof at the liar's place in the log."""
    return Prove(position=liar.log.position, fault=proof.kind, proof=pack(proof))


def forged(liar: Means, victim: str) -> TwoAverages:
    """Return a proof that convicts nobody: the liar has signed it itself."""
    name = Attempt(position=liar.log.position, number=1, leader=liar.name)
    first, second = (
        SignedAverage(digest=digest, absent=(), signature=liar.keys.sign(digest))
        for digest in (invented((victim, name)), invented(victim))
    )
    about = {"round_name": name, "terms": NO_TERMS, "reducer": victim, "incarnation": 0, "chunk": 0}
    return TwoAverages.model_validate(about | {"first": first, "second": second})


FAULT_LIES: dict[str, type[Lie]] = {
    "signed averages": SignedAverages,
    "many commitments": ManyCommitments,
    "many entries": ManyEntries,
    "other entries": OtherEntries,
    "forged proofs": ForgedProofs,
    "many proofs": ManyProofs,
    "old proofs": OldProofs,
}
"""Of members."""
