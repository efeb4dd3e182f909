"""What a liar may do in rounds: as a voter, as a leader, and in the exchange of blocks."""

from __future__ import annotations

from dataclasses import replace

from peers.log.certificate import Ballot, Certificate, Choice, Departure, Phase, Signer, electorate
from peers.log.header import Header
from peers.log.state import LogError
from peers.messages.averages import Averaged
from peers.messages.commitment import commit_to, digest_of_all
from peers.messages.messages import Begin, Certified, Leaving, Message, Propose, Ready, Unread, Vote
from peers.messages.rounds import RoundName
from peers.protocol.effects import ReduceChunk, SendChunk
from peers.protocol.events import Event, Received, Tick
from peers.protocol.parts import round_outcome
from peers.protocol.voter import commit_of
from peers.values.chunks import Sum
from peers.values.wire import LONGEST_WAIT, digest_of
from peers.values.workload import Blocks
from tests.simulator.liars import FAR, Lie, Said, altered, invented, remade, signed_average

BURNT = Ballot(view=FAR, attempt=FAR)
LATE = 60  # ticks by which a slow leader is late


# Voters ----------------------------------------------------------------------------------------------------------
class SilentVoter(Lie):
    """It takes part in exchanges, and votes for nothing."""

    def says(self, to: str, message: Message) -> Said:
        if not isinstance(message, Vote):
            yield to, message


class DoubleVoter(Lie):
    """It votes for what is proposed, and in the same ballot for another header, which nobody has proposed."""

    def says(self, to: str, message: Message) -> Said:
        yield to, message
        if isinstance(message, Vote):
            other = remade(message.choice, header=invented(message.choice.header))
            yield to, self.vote(other, message.position)


class LockBreaker(Lie):
    """It votes for all that is proposed, and for all that is prepared, whatever it is bound to."""

    def hears(self, sender: str, message: Message | Unread) -> Said:
        if isinstance(message, Propose):
            yield from self.to_all(self.vote(message.choice, message.position))
        elif isinstance(message, Certified) and message.certificate is not None:
            yield from self.to_all(self.vote(commit_of(message.certificate.choice), message.position))


class BallotBurner(Lie):
    """It proposes, and votes, in a ballot that is higher than any other."""

    def volunteers(self) -> Said:
        header = self.entry_of_its_own()
        propose = Propose(ballot=BURNT, header=header, group=(), justify=None, round=None)
        for message in (propose, self.vote(propose.choice, propose.position)):
            yield from self.to_all(message)


class FalseFarewell(Lie):
    """It says that it has left, and voted nowhere; and goes on voting."""

    def volunteers(self) -> Said:
        log, incarnation = self.log, self.peer.incarnation
        departure = Departure(run=log.run, peer=self.me, incarnation=incarnation, index=0)
        signature = self.keys.sign(departure.text)
        leaving = Leaving(position=log.position, incarnation=incarnation, departure=0, signature=signature)
        if self.draw.random() < 0.1:
            yield from self.to_all(leaving)


class InventedLock(Lie):
    """It says that it is bound to an entry of its own making, from a late ballot."""

    def says(self, to: str, message: Message) -> Said:
        lock = certified(self, self.entry_of_its_own(), Phase.PREPARE) if isinstance(message, Ready) else None
        yield to, remade(message, lock=lock) if lock else message


class UnaskedCertificates(Lie):
    """It commits entries of its own making, with no certificate, or with one that is false."""

    def volunteers(self) -> Said:
        if self.draw.random() < 0.2:
            made = certified(self, self.entry_of_its_own(), self.draw.choice(tuple(Phase)))
            yield from self.to_all(self.draw.choice((made, Certified(header=made.header, certificate=None))))


def certified(lie: Lie, header: Header, phase: Phase) -> Certified:
    """Return a certificate in which no signature but the liar's own is true."""
    log = lie.log.of(header.fragment)
    choice = Choice(ballot=BURNT, phase=phase, header=header.digest, group=None, justify=None)
    own = lie.vote(choice, log.position).signature
    voters = [peer for peer, _ in electorate(log, header).voters]
    signers = [Signer(place=n, signature=own if peer == lie.me else bytes(64)) for n, peer in enumerate(voters)]
    return Certified(header=header, certificate=Certificate(choice=choice, group=(), signers=tuple(signers)))


def is_far(lie: Lie, peer: str) -> bool:
    """Return whether a peer is of the half that hears something else."""
    others = sorted({*lie.log.voters, *lie.others} - {lie.me})
    return peer in others and others.index(peer) % 2 == 1


# Leaders ---------------------------------------------------------------------------------------------------------
class MuteLeader(Lie):
    """It lets all others wait for a round."""

    def says(self, to: str, message: Message) -> Said:
        if not isinstance(message, Begin | Propose):
            yield to, message


class NeverProposes(Lie):
    """Its exchanges take the longest time that a message can name, and lead to no proposal."""

    def says(self, to: str, message: Message) -> Said:
        if not isinstance(message, Propose):
            yield to, remade(message, seconds=LONGEST_WAIT) if isinstance(message, Begin) else message


class SlowLeader(Lie):
    """All that it says as a leader comes a minute late."""

    _held: tuple[tuple[int, str, Message], ...] = ()
    _ticks = 0

    def says(self, to: str, message: Message) -> Said:
        if isinstance(message, Begin | Propose | Certified):
            self._held = (*self._held[-1000:], (self._ticks + LATE, to, message))
        else:
            yield to, message

    def volunteers(self) -> Said:
        self._ticks += 1
        due = [(to, message) for tick, to, message in self._held if tick <= self._ticks]
        self._held = self._held[len(due) :]
        yield from due


class BeginsAgain(NeverProposes):
    """And it goes on with the round in another ballot, again and again."""

    _begun: Begin | None = None

    def says(self, to: str, message: Message) -> Said:
        self._begun = message if isinstance(message, Begin) else self._begun
        yield from super().says(to, message)

    def volunteers(self) -> Said:
        if self._begun is not None and self.draw.random() < 0.05:
            ballot = self._begun.ballot
            self._begun = remade(self._begun, ballot=remade(ballot, attempt=ballot.attempt + 1))
            yield from self.to_all(self._begun)


class TellsSome(Lie):
    """Every other member never hears of what it prepares and commits."""

    def says(self, to: str, message: Message) -> Said:
        if not isinstance(message, Certified | Vote) or not is_far(self, to):
            yield to, message


class LeavesOut(Lie):
    """Its rounds lack one of those who are ready, always the same: it hears nothing of that one's Ready."""

    def notices(self, event: Event) -> Event:
        if not isinstance(event, Received) or not isinstance(event.message, Ready):
            return event
        return Tick() if event.sender == max(self.victims, default="") else event


class KeepsFew(Lie):
    """It takes in its allies and as many others as make a majority with them, and proposes that all the rest are gone,
    so that its allies are the majority from then on."""

    def notices(self, event: Event) -> Event:
        if not isinstance(event, Received) or not isinstance(event.message, Ready) or not self.log.voters:
            return event
        others = [peer for peer in sorted(self.log.voters) if peer not in self.allies]
        needed = others[: len(self.log.voters) // 2 + 1 - len(self.allies)]
        return event if event.sender in (*needed, *self.allies) else Tick()

    def says(self, to: str, message: Message) -> Said:
        if isinstance(message, Propose) and message.justify is None and message.header.leader == self.me:
            gone = tuple(peer for peer in self.log.voters if peer not in message.header.peers)
            message = proposing(self, message, gone=gone)
        yield to, message


class ManyBegins(Lie):
    """It begins a round with other shares with each member."""

    def says(self, to: str, message: Message) -> Said:
        if isinstance(message, Begin):
            numbers = [share.chunks for share in message.round.shares]
            self.draw.shuffle(numbers)
            pairs = zip(message.round.shares, numbers, strict=True)
            shares = tuple(share.model_copy(update={"chunks": chunks}) for share, chunks in pairs)
            message = remade(message, round=remade(message.round, shares=shares))
        yield to, message


class InventedRoots(Lie):
    """It tells each of the others what some of them have committed to, who have not."""

    def says(self, to: str, message: Message) -> Said:
        if isinstance(message, Begin) and message.commitments:
            changes: list[dict[str, object]] = [
                {},
                {"digest": invented("root")},
                {"squares": 2 * message.commitments[0].squares},
            ]
            told = tuple(one.model_copy(update=self.draw.choice(changes)) for one in message.commitments)
            message = remade(message, commitments=told, round=remade(message.round, committed=digest_of_all(told)))
        yield to, message


class TwoProposals(Lie):
    """Of the chunks that it averages it gives one half of the others other averages. As a leader it proposes one entry
    to each half, votes for both, and hides from each what the other one does."""

    def __init__(self, *given: object) -> None:
        super().__init__(*given)  # type: ignore[arg-type]
        self._given: dict[tuple[RoundName, int], Averaged] = {}

    def gives(self, send: SendChunk, data: bytes) -> tuple[SendChunk, bytes]:
        exchange = self.exchange
        is_own = send.origin is not None and send.origin.reducer == self.me
        if exchange is None or exchange.name != send.round_name or not is_own or not is_far(self, send.to):
            return send, data
        data = altered(data)
        send = signed_average(exchange, self.keys, send, data)
        assert send.origin is not None
        other = Averaged(chunk=send.chunk, digest=digest_of(data), absent=send.absent, origin=send.origin)
        self._given[exchange.name, send.chunk] = other
        return send, data

    def says(self, to: str, message: Message) -> Said:
        if not isinstance(message, Propose | Certified | Vote) or not is_far(self, to):
            yield to, message
        elif isinstance(message, Propose) and (other := self._other(message)) is not None:
            yield to, other
            yield to, self.vote(other.choice, other.position)

    def _other(self, propose: Propose) -> Propose | None:
        """Return what the other half is told."""
        exchange = self.exchange
        if exchange is None or propose.round != exchange.name:
            return None
        here = {chunk: exchange.averages.of(chunk) for chunk in range(exchange.round.chunks)}
        averages = {chunk: self._given.get((exchange.name, chunk), average) for chunk, average in here.items()}
        outcome = round_outcome(exchange.round, {chunk: one for chunk, one in averages.items() if one is not None})
        if outcome is None:
            return None
        roster = exchange.round.counted(outcome.absent)
        return proposing(self, propose, roster=roster, payload=outcome.payload, marks=outcome.marks)

    def hears(self, sender: str, message: Message | Unread) -> Said:
        """Vote for what the other half prepares, too."""
        if isinstance(message, Vote) and is_far(self, sender) and message.choice.phase is Phase.PREPARE:
            vote = self.vote(commit_of(message.choice), message.position)
            yield from ((peer, vote) for peer in self.others if is_far(self, peer))


def proposing(lie: Lie, propose: Propose, marks: bytes | None = None, **changes: object) -> Propose:
    """Return a proposal of another header; the same if none can say that."""
    header, log = propose.header, lie.log.of(propose.header.fragment)
    fields = {name: getattr(header, name) for name in ("roster", "payload", "leader", "faults")}
    fields |= {"gone": log.gone_in(header), "amendment": log.taken_in(header)} | changes
    try:
        return remade(propose, header=log.next_header(**fields), marks=propose.marks if marks is None else marks)
    except LogError:
        return propose


# In the exchange ---------------------------------------------------------------------------------------------------
class Mute(Lie):
    """No block of it ever comes."""

    def gives(self, send: SendChunk, data: bytes) -> tuple[SendChunk, bytes] | None:
        return None


class Starves(Lie):
    """It gives nothing to one honest member, and all others what they are due."""

    def gives(self, send: SendChunk, data: bytes) -> tuple[SendChunk, bytes] | None:
        return None if send.to == min(self.victims, default="") else (send, data)


class MakesAbsent(Lie):
    """It averages its own blocks alone, and signs that those of all others were absent."""

    def reduces(self, reduce: ReduceChunk) -> ReduceChunk:
        own, exchange = tuple(one for one in reduce.members if one[0] == self.me), self.exchange
        if not own or exchange is None:
            return reduce
        absent = tuple(member.peer for member in exchange.round.contributors if member.peer != self.me)
        return replace(reduce, members=own, absent=absent)


class ManyAverages(Lie):
    """It gives each member another average of what it averages, and signs each."""

    def gives(self, send: SendChunk, data: bytes) -> tuple[SendChunk, bytes]:
        exchange = self.exchange
        is_own = send.origin is not None and send.origin.reducer == self.me
        if exchange is None or exchange.name != send.round_name or not is_own:
            return send, data
        data = altered(data, send.to)
        return signed_average(exchange, self.keys, send, data), data


class WrongAverages(Lie):
    """What it averages is wrong, and the same for all: only a member that makes the average again finds that out."""

    def averages(self, blocks: Blocks) -> Blocks:
        return bytes(blocks)[::-1]


class WrongBlocks(Lie):
    """Its blocks are others than those that it has committed to."""

    def gives(self, send: SendChunk, data: bytes) -> tuple[SendChunk, bytes]:
        return send, data if send.reduced else altered(data)


class UnsignedBlocks(Lie):
    """It has not signed what its blocks lead to, or not before all."""

    def gives(self, send: SendChunk, data: bytes) -> tuple[SendChunk, bytes]:
        return replace(send, signature=self.draw.choice((None, bytes(64), send.signature))), data


class ManyCommitments(Lie):
    """Each time that it says Ready it commits to something else."""

    def says(self, to: str, message: Message) -> Said:
        if isinstance(message, Ready) and (said := message.commitment) is not None:
            author = said.author(self.me, message.incarnation, message.position)
            root = Sum(invented((to, self.draw.random())), said.squares)
            message = message.model_copy(update={"commitment": commit_to(root, author, self.keys)})
        yield to, message
