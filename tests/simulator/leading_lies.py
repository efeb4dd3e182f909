"""What a liar may do when others take it for their leader."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from peers.log.certificate import certify, weigh
from peers.log.header import Header, Member
from peers.log.state import LogError
from peers.protocol.commitment import Commitment, Contribution, commit_to, digest_of_all
from peers.protocol.effects import SendChunk
from peers.protocol.events import Event, Received, Tick, TrainingDone
from peers.protocol.messages import (
    Abort,
    Adopt,
    Begin,
    Commit,
    Complete,
    Excluded,
    LeaseGrant,
    LeaseRequest,
    Message,
    Prepared,
    Ready,
    Refuse,
    Unread,
)
from peers.protocol.rounds import Round, Share
from peers.transfer.buffers import PayloadBuffers, inspection, offer
from peers.values.wire import LONGEST_WAIT, digest_of
from tests.simulator.fault_lies import NamesHonest
from tests.simulator.liars import Liar, Lie, Means, Said, invented


class NeverBegins(Lie):
    """It lets all others wait."""

    def says(self, to: str, message: Message) -> Said:
        if not isinstance(message, Begin | Adopt):
            yield to, message


class NeverCommits(Lie):
    """It leads rounds that nobody can conclude: nobody hears that it is complete, or that all are."""

    def says(self, to: str, message: Message) -> Said:
        if not isinstance(message, Commit | Complete):
            yield to, message


class TakesLongest(NeverCommits):
    """It says that its attempts take the longest time that a message can name, and ends none."""

    def says(self, to: str, message: Message) -> Said:
        if isinstance(message, Begin | Adopt):
            message = message.model_copy(update={"seconds": LONGEST_WAIT})
        if not isinstance(message, Abort):
            yield from super().says(to, message)


class BeginsAgain(TakesLongest):
    """And before the time is up it goes on with the round in another attempt, again and again."""

    def __init__(self, liar: Means, draw: random.Random) -> None:
        super().__init__(liar, draw)
        self._begun: Begin | None = None

    def says(self, to: str, message: Message) -> Said:
        if isinstance(message, Begin):
            self._begun = message
        yield from super().says(to, message)

    def volunteers(self) -> Said:
        if self._begun is None or self.draw.random() > 0.02:
            return
        attempt = self._begun.attempt
        later = attempt.model_copy(update={"number": attempt.number + 1})
        self._begun = self._begun.model_copy(update={"attempt": later, "seconds": LONGEST_WAIT})
        yield from ((peer, self._begun) for peer in self.liar.others)


class CommitsToSome(Lie):
    """Every other member never hears of what it commits."""

    def says(self, to: str, message: Message) -> Said:
        is_told = self.liar.others.index(to) % 2 == 0 if to in self.liar.others else True
        if not isinstance(message, Commit | Complete) or is_told:
            yield to, message


class LeavesOut(Lie):
    """Its rounds lack one of those who are ready, always the same, if the others are enough without it."""

    def notices(self, event: Event) -> Event:
        """It hears nothing of that one's Ready."""
        if not isinstance(event, Received) or not isinstance(event.message, Ready):
            return event
        return Tick() if event.sender == max(self.liar.others, default="") else event


class KeepsFew(Lie):
    """It takes in its allies and just as many others as make a majority with them, and says that all the rest are gone,
    so that its allies are the majority from then on."""

    def __init__(self, liar: Means, draw: random.Random) -> None:
        super().__init__(liar, draw)
        liar.peer.presence.voters_here = lambda *asked, even_leavers=False: set()  # type: ignore[method-assign]

    def notices(self, event: Event) -> Event:
        """It hears no Ready of those that it does not need."""
        if not isinstance(event, Received) or not isinstance(event.message, Ready):
            return event
        voters = self.liar.log.voters
        others = sorted(set(voters) - set(self.liar.allies))
        needed = others[: len(voters) // 2 + 1 - len(set(voters) - set(others))]
        return event if event.sender in (*needed, *self.liar.allies) or not voters else Tick()


class RefusesAll(Lie):
    """Whoever says Ready to it, or asks for a lease, is told that its state is wrong."""

    def hears(self, sender: str, message: Message | Unread) -> Said:
        if isinstance(message, Ready | LeaseRequest):
            digest = self.draw.choice((message.state_digest, invented("state")))
            yield sender, Refuse(position=message.position, state_digest=digest, reason="your state is wrong")

    def says(self, to: str, message: Message) -> Said:
        if not isinstance(message, Begin | Adopt | LeaseGrant):
            yield to, message


class ExcludesAll(Lie):
    """Whoever says Ready to it, or asks for a lease, is told that rounds go on without it."""

    def hears(self, sender: str, message: Message | Unread) -> Said:
        if isinstance(message, Ready | LeaseRequest):
            yield sender, Excluded(position=message.position, reason="nobody reaches you")

    def says(self, to: str, message: Message) -> Said:
        if not isinstance(message, Begin | Adopt | LeaseGrant):
            yield to, message


class AbortsAll(Lie):
    """It ends every attempt as soon as its members are complete."""

    def hears(self, sender: str, message: Message | Unread) -> Said:
        if isinstance(message, Complete) and message.attempt.leader == self.liar.name:
            yield sender, Abort(attempt=message.attempt, reason="again")

    def says(self, to: str, message: Message) -> Said:
        if not isinstance(message, Commit | Complete):
            yield to, message


class OneLeaseForAll(Lie):
    """It gives everybody who asks the same samples."""

    def says(self, to: str, message: Message) -> Said:
        if isinstance(message, LeaseGrant):
            message = message.model_copy(update={"samples": self.liar.log.grants[0]})
        yield to, message


class KeepsNewcomersOut(Lie):
    """Whoever asks it for samples gets no answer."""

    def says(self, to: str, message: Message) -> Said:
        if not isinstance(message, LeaseGrant):
            yield to, message


class GivesNoLease(KeepsNewcomersOut):
    """And it is never done with its own."""

    def notices(self, event: Event) -> Event:
        return Tick() if isinstance(event, TrainingDone) else event


class OtherLeases(Lie):
    """It gives samples that are another's already, or nobody's to give, and in too many inner steps."""

    def says(self, to: str, message: Message) -> Said:
        if isinstance(message, LeaseGrant):
            leases = [*self.liar.log.leases.values(), self.liar.log.grants[-1]]
            message = message.model_copy(
                update={"samples": self.draw.choice(leases), "steps": self.draw.choice((1, message.steps, 10**6))}
            )
        yield to, message


class ManyBegins(Lie):
    """It begins another round with each: other shares, or without some of the others."""

    def says(self, to: str, message: Message) -> Said:
        if isinstance(message, Begin):
            message = message.model_copy(update={"round": self._another(message.round, to)})
        yield to, message

    def _another(self, round: Round, to: str) -> Round:
        if self.draw.random() < 0.5:
            gone = [peer for peer in round.remaining if peer not in (to, self.liar.name)]
            return round.without(self.draw.sample(gone, self.draw.randint(0, len(gone) // 2)))
        numbers = [share.chunks for share in round.shares]
        self.draw.shuffle(numbers)
        shares = tuple(
            share.model_copy(update={"chunks": chunks}) for share, chunks in zip(round.shares, numbers, strict=True)
        )
        return round.model_copy(update={"shares": shares})


class TwoRosters(Lie):
    """It begins one round with two rosters: to half of the others it says that it wants another lease next. They come
    to the same payload, and to two entries; it signs both."""

    _round: Round | None = None

    def says(self, to: str, message: Message) -> Said:
        is_mine = isinstance(message, Begin | Prepared | Complete) and message.attempt.leader == self.liar.name
        if is_mine and isinstance(message, Begin):
            self._round = message.round
        if is_mine and self._round is not None and self._is_in_other_half(to, self._round):
            message = self._another(message, self._altered(self._round))
        yield to, message

    def _is_in_other_half(self, peer: str, round: Round) -> bool:
        others = [member for member in round.remaining if member != self.liar.name]
        return peer in others[len(others) // 2 :]

    def _another(self, message: Message, round: Round) -> Message:
        if isinstance(message, Begin):
            return message.model_copy(update={"round": round})
        assert isinstance(message, Prepared | Complete)
        try:
            entry = round.entry(self.liar.log, dict(message.missed), message.payload)
        except LogError:  # that was a round ago
            return message
        changes: dict[str, object] = {"entry": entry.digest}
        if isinstance(message, Complete):
            changes["signature"] = self.liar.sign(entry, message.attempt)
        return message.model_copy(update=changes)

    def _altered(self, round: Round) -> Round:
        """Return another object, since a copy would keep the roster that was worked out before."""
        shares = [
            Share(member=self._wanting_more(share.member), chunks=share.chunks)
            if share.member.peer == self.liar.name
            else share
            for share in round.shares
        ]
        besides = {"lost": round.lost, "faults": round.faults, "gone": round.gone, "committed": round.committed}
        return Round.model_validate({"name": round.name, "shares": tuple(shares)} | besides)

    def _wanting_more(self, member: Member) -> Member:
        return member.model_copy(update={"wants": member.wants + 1})


class InventedRoots(Lie):
    """It tells each of the others what some of them have committed to, who have not."""

    def says(self, to: str, message: Message) -> Said:
        if isinstance(message, Begin):
            told = tuple(map(self._another, message.commitments))
            round = message.round.model_copy(update={"committed": digest_of_all(told)})
            message = message.model_copy(update={"commitments": told, "round": round if told else message.round})
        yield to, message

    def _another(self, told: Contribution) -> Contribution:
        changes: list[dict[str, object]] = [{}, {"digest": invented("root")}, {"squares": 2 * told.squares}]
        return told.model_copy(update=self.draw.choice(changes))


class OtherContributions(Lie):
    """It contributes something else to each who averages, and tells each of that alone: so what two of them average of
    it seems wrong to each other."""

    def says(self, to: str, message: Message) -> Said:
        if isinstance(message, Begin) and message.commitments:
            names = [member.peer for member in message.round.contributors]
            if self.liar.name in names:
                commitment = self._commitment(to, message.round)
                told, place = list(message.commitments), names.index(self.liar.name)
                told[place] = commitment.contribution
                round = message.round.model_copy(update={"committed": digest_of_all(told)})
                message = message.model_copy(update={"commitments": tuple(told), "round": round})
        yield to, message

    def gives(self, send: SendChunk, data: bytes) -> tuple[SendChunk, bytes]:
        exchange = self.liar.peer.exchange
        if send.reduced or exchange is None or exchange.name.leader != self.liar.name:
            return send, data
        offered = self._own(send.to)
        signature = self._commitment(send.to, exchange.round).signature
        return replace(send, signature=signature), bytes(offered.own_chunk(send.chunk))

    def offers(self, to: str, buffers: PayloadBuffers) -> PayloadBuffers:
        exchange = self.liar.peer.exchange
        is_ours = exchange is not None and exchange.name.leader == self.liar.name
        return self._own(to) if is_ours else buffers

    def _commitment(self, to: str, round: Round) -> Commitment:
        member = next(member for member in round.roster if member.peer == self.liar.name)
        tree = self._own(to).tree
        assert tree is not None
        return commit_to(tree.root, round.author(member), self.liar.keys)

    def _own(self, to: str) -> PayloadBuffers:
        """Return what it contributes for one of the others; for itself what it has trained."""
        assert isinstance(self.liar, Liar)
        fragment = self.liar.fragments[0]
        if to == self.liar.name:
            return fragment.buffers
        own, buffers = bytes(fragment.buffers.own), PayloadBuffers(fragment.workload)
        offer(
            (digest_of(to.encode() + own) * len(own))[: len(own)],
            buffers,
            inspection(fragment.workload.squared_norm, buffers),
        )
        return buffers


class HandsOnItsOwn(Lie):
    """Instead of a round it hands on an entry that it has made up, and that it and its allies have signed."""

    def says(self, to: str, message: Message) -> Said:
        if isinstance(message, Begin):
            attempt = message.attempt
            header = self.liar.entry_of_its_own()
            holders = self.liar.holders(header, attempt)
            message = Adopt(attempt=attempt, header=header, holders=holders, seconds=message.seconds)
        yield to, message


class TwoEntries(Lie):
    """It has each half of the others sign another entry, signs both, and commits both."""

    def __init__(self, liar: Means, draw: random.Random) -> None:
        super().__init__(liar, draw)
        self._votes: defaultdict[Header, dict[str, bytes]] = defaultdict(dict)

    def says(self, to: str, message: Message) -> Said:
        if isinstance(message, Begin):
            header = self._entry(message.round, to)
            holders = self.liar.holders(header, message.attempt)
            message = Adopt(attempt=message.attempt, header=header, holders=holders, seconds=message.seconds)
        yield to, message

    def _entry(self, round: Round, to: str) -> Header:
        """Return an entry of the round, for one half without its last member; its payload is the liar's own."""
        others, entry = self.liar.others, self.liar.entry_of_its_own()
        half = others.index(to) % 2 if to in others else 0
        return self._follower(round.roster[: len(round.roster) - half], entry)

    def _follower(self, roster: Sequence[Member], entry: Header) -> Header:
        try:
            return self.liar.log.of(entry.fragment).next_header(roster, entry.payload)
        except LogError:
            return entry

    def hears(self, sender: str, message: Message | Unread) -> Said:
        """Put certificates together of what the members have signed, and of its own and its allies' signatures."""
        exchange = self.liar.peer.exchange
        is_mine = isinstance(message, Complete) and message.attempt.leader == self.liar.name
        if not is_mine or exchange is None or not isinstance(message, Complete):
            return
        header, attempt = self._entry(exchange.round, sender), message.attempt
        votes = self._votes[header]
        votes[sender] = message.signature
        signatures = votes | {ally: self.liar.sign(header, attempt, ally) for ally in self.liar.allies}
        certificate = certify(self.liar.log, header, attempt.name, signatures, {})
        if weigh(certificate, self.liar.log, header).is_certified:
            yield from ((peer, Commit(header=header, certificate=certificate)) for peer in votes)


LEADERS_LIES: dict[str, type[Lie]] = {
    "never begins": NeverBegins,
    "never commits": NeverCommits,
    "takes longest": TakesLongest,
    "begins again": BeginsAgain,
    "commits to some": CommitsToSome,
    "leaves out": LeavesOut,
    "keeps few": KeepsFew,
    "refuses all": RefusesAll,
    "excludes all": ExcludesAll,
    "aborts all": AbortsAll,
    "one lease for all": OneLeaseForAll,
    "keeps newcomers out": KeepsNewcomersOut,
    "gives no lease": GivesNoLease,
    "other leases": OtherLeases,
    "many begins": ManyBegins,
    "two rosters": TwoRosters,
    "invented roots": InventedRoots,
    "other contributions": OtherContributions,
    "hands on its own": HandsOnItsOwn,
    "two entries": TwoEntries,
    "names the honest": NamesHonest,
}
