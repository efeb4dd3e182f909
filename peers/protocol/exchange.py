"""A member's side of one round: which chunks have gone out, which have come in, and who owes which.

Each member with tokens reduces a part of the payload: everybody sends it their blocks of each chunk of its part, it
averages them in roster order and sends the result to all. What becomes of the chunks of a member that is lost:

    1. Everybody tells the next in line which of them it holds already (Holding).
    2. Once all who remain have said so, the next in line asks a holder for these chunks, and for the others it asks
       everybody for their blocks again (Want), as if they had been its own from the beginning.

From the moment that a member is lost nobody takes anything from it any more: what it reports as held is all it will
ever hold from there, so no chunk gets two values.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable

from peers.protocol.averages import Averages
from peers.protocol.chunk_sets import chunk_set, chunks_in
from peers.protocol.commitment import Commitment
from peers.protocol.contributions import UNKNOWN, Contributions
from peers.protocol.effects import AssemblePayload, Effect, OpenRound, ReduceChunk, Send, SendChunk
from peers.protocol.events import (
    AverageTooEarly,
    BadBlocks,
    ChunkSent,
    ChunksUnsent,
    ContributionArrived,
    PayloadAssembled,
    ReducedArrived,
)
from peers.protocol.messages import Accuse, Compare, Holding, Marked, Waiting, Want
from peers.protocol.rounds import Attempt, Round
from peers.protocol.signed_averages import Origin
from peers.values.chunks import parts_of
from peers.values.identity import Keys

ExchangeEvent = (
    ContributionArrived | BadBlocks | ReducedArrived | AverageTooEarly | ChunkSent | ChunksUnsent | PayloadAssembled
)


class Exchange:
    """Progress of one round at one member. `payload` is its digest, once all of it is here."""

    def __init__(
        self, me: str, attempt: Attempt, round: Round, contributions: Contributions = UNKNOWN, keys: Keys | None = None
    ) -> None:
        """Without `keys` nothing is signed, nor checked."""
        starts = {member.peer: member.incarnation for member in round.roster}
        self.averages = Averages(me, round.name, keys, starts, round.terms)
        self.contributions = contributions
        self.disputed: set[str] = set()
        """Whose chunks are not what they ought to be, though nobody but us can know."""
        self.attempt = attempt
        self.round = round
        self.name = round.name
        self.payload: bytes | None = None
        self.moved = 0  # chunks that have come and gone
        self._me = me
        self._keys = keys
        self._committed: dict[str, Commitment] = {}
        weights = contributions.weights
        self._weights = {member.peer: weights.get(member.peer, member.tokens) for member in round.contributors}
        reducing = [share for share in round.shares if share.chunks]
        self._line = tuple(share.member.peer for share in reducing)  # in which lost chunks are passed on
        self._parts = dict(zip(self._line, parts_of([share.chunks for share in reducing]), strict=True))
        self._reducer_of = {chunk: peer for peer, part in self._parts.items() for chunk in part}
        self._here: dict[int, tuple[str, ...]] = {}  # averaged chunks, and whose blocks are absent from them
        self._arrived: defaultdict[int, set[str]] = defaultdict(set)  # whose blocks of chunks that we reduce
        self._reducing: set[int] = set()
        self._undecided: set[int] = set()  # inherited chunks that somebody may hold
        self._givers = set[str]()
        self._given: defaultdict[str, float] = defaultdict(float)  # the squared norm of what each has averaged
        self._held_by: dict[str, set[int]] = {}
        self._wanted: dict[str, tuple[set[int], set[int]]] = {}  # asked of each: averaged chunks, own blocks
        self._owed: defaultdict[tuple[str, bool], set[int]] = defaultdict(set)  # to peer, reduced
        self._in_flight: set[tuple[str, bool, int]] = set()
        self._settle_who_is_left()

    def open(self) -> list[Effect]:
        return [OpenRound(self.round), *self._report(), *self._contribute()]

    def missed(self) -> dict[str, int]:
        """In how many chunks whose blocks are missing, by peer, in roster order."""
        if not any(self._here.values()):
            return {}
        missed = Counter(peer for absent in self._here.values() for peer in absent)
        return {peer: missed[peer] for peer in self.round.peers if missed[peer]}

    def is_with(self, peer: str) -> bool:
        """Whether the peer is in the round, and not lost."""
        return peer in self._remaining

    # Who is lost ----------------------------------------------------------------------------------------------
    def go_on(self, attempt: Attempt, round: Round) -> list[Effect]:
        """A later attempt goes on with this round. Nobody who was lost comes back."""
        self.attempt = attempt
        self.round = round.without(self.round.lost)
        self._held_by.clear()
        self._wanted.clear()
        for peer, reduced in list(self._owed):
            if peer in self.round.lost:
                del self._owed[peer, reduced]
        self._in_flight = {flight for flight in self._in_flight if flight[0] not in self.round.lost}
        self._settle_who_is_left()
        return self._report() + self._resolve() + self._reduce(list(self._arrived))

    def _settle_who_is_left(self) -> None:
        """Give the chunks of the lost to the next in line."""
        self._remaining = frozenset(self.round.remaining)
        self._awaited = self._weights.keys() & self._remaining
        for peer in self._line:
            heir = self._heir(peer)
            if peer in self._remaining or heir is None:
                continue
            for chunk in self._parts[peer]:
                self._reducer_of[chunk] = heir
                if heir == self._me and chunk not in self._here and chunk not in self._reducing:
                    self._undecided.add(chunk)

    def _heir(self, peer: str) -> str | None:
        place = self._line.index(peer)
        line = self._line[place:] + self._line[:place]
        return next((other for other in line if other in self._remaining), None)

    def _heirs(self) -> set[str]:
        """Who has chunks of the lost."""
        return {heir for peer in self._line if peer not in self._remaining and (heir := self._heir(peer))}

    def _inherited(self) -> set[int]:
        return {chunk for peer in self._line if peer not in self._remaining for chunk in self._parts[peer]}

    def _report(self) -> list[Effect]:
        held = chunk_set(self._inherited() & self._here.keys())
        return [Send(heir, Holding(attempt=self.attempt, chunks=held)) for heir in sorted(self._heirs() - {self._me})]

    def on_holding(self, sender: str, holding: Holding) -> list[Effect]:
        if holding.attempt != self.attempt or sender not in self._remaining or sender in self._held_by:
            return []
        self._held_by[sender] = set(chunks_in(holding.chunks))
        return self._resolve()

    def _resolve(self) -> list[Effect]:
        """Once everybody who remains has reported: whom to ask for what."""
        others = self._remaining - {self._me}
        if self._me not in self._heirs() or self._held_by.keys() != others:
            return []
        mine = {chunk for chunk in self._inherited() if self._reducer_of[chunk] == self._me}
        self._wanted = {peer: (set(), set()) for peer in sorted(others)}
        effects: list[Effect] = []
        for chunk in sorted(mine):
            holders = [peer for peer in self._wanted if chunk in self._held_by[peer]]
            if chunk in self._here:
                effects += self._owe([peer for peer in self._wanted if peer not in holders], True, [chunk])
            elif holders:
                self._wanted[holders[chunk % len(holders)]][0].add(chunk)
            else:
                self._undecided.discard(chunk)
                self._arrived[chunk].add(self._me)
                for peer in self._awaited - {self._me} - self._arrived[chunk]:
                    self._wanted[peer][1].add(chunk)
        return effects + self._ask() + self._reduce(mine)

    def _ask(self) -> list[Effect]:
        return [
            Send(peer, Want(attempt=self.attempt, reduced=chunk_set(reduced), own=chunk_set(own)))
            for peer, (reduced, own) in self._wanted.items()
            if reduced or own
        ]

    def on_want(self, sender: str, want: Want) -> list[Effect]:
        if want.attempt != self.attempt or sender not in self._heirs():
            return []
        theirs = {chunk for chunk, reducer in self._reducer_of.items() if reducer == sender}
        reduced = theirs.intersection(chunks_in(want.reduced)) & self._here.keys()
        own = theirs.intersection(chunks_in(want.own)) if self._contributes else set()
        return self._owe([sender], True, reduced) + self._owe([sender], False, own)

    def hear(self, sender: str, message: Holding | Want | Compare) -> list[Effect]:
        match message:
            case Holding():
                return self.on_holding(sender, message)
            case Want():
                return self.on_want(sender, message)
            case Compare():
                return self.on_compare(sender, message)

    def on_compare(self, sender: str, compare: Compare) -> list[Effect]:
        """Our payload is another one than the leader's, or another member's. Show what was signed to us of the first
        chunk that differs."""
        if compare.attempt != self.attempt or sender != self.attempt.leader:
            return []
        if compare.marks is None:
            return [Send(sender, Marked(attempt=self.attempt, marks=self.averages.marks()))]
        shown = self.averages.difference(compare.marks)
        if shown is None:
            return []
        accused = shown.origin.reducer
        return [Send(sender, Accuse(attempt=self.attempt, accused=accused, reason="two averages", average=shown))]

    # What comes in --------------------------------------------------------------------------------------------
    def handle(self, event: ExchangeEvent) -> list[Effect]:
        match event:
            case ContributionArrived(sender=sender, chunk=chunk):
                if self.wants_contribution(sender, chunk):
                    self.moved += 1
                    self._arrived[chunk].add(sender)
                    self._givers.add(sender)
                    self.disputed.discard(sender)
                    return self._reduce([chunk])
            case ReducedArrived(sender=sender, chunk=chunk, absent=absent):
                self._givers.add(sender)
                self.disputed.discard(sender)
                if chunk in self._here:
                    return []
                self._given[event.origin.reducer if event.origin else sender] += event.squares
                if event.origin is not None:
                    self.averages.keep(chunk, event.digest, absent, event.origin)
                elif sender == self._me:
                    self.averages.sign(chunk, event.digest, absent)
                return self._averaged(chunk, absent)
            case ChunkSent(peer=peer, reduced=reduced, chunk=chunk):
                self.moved += 1
                self._in_flight.discard((peer, reduced, chunk))
                self._owed[peer, reduced].discard(chunk)
            case ChunksUnsent(peer=peer, reduced=reduced, chunks=chunks):
                self._in_flight.difference_update((peer, reduced, chunk) for chunk in chunks)
            case AverageTooEarly(sender=sender):
                self.disputed.add(sender)
            case BadBlocks(sender=sender, chunk=chunk):
                self.disputed.add(sender)
                self._arrived[chunk].discard(sender)
                self._reducing.discard(chunk)
            case PayloadAssembled(digest=digest):
                self.payload = digest
        return []

    def wants_contribution(self, sender: str, chunk: int) -> bool:
        return self._reduces(chunk) and sender in self._awaited and sender not in self._arrived[chunk]

    def wants_reduced(self, sender: str, chunk: int) -> bool:
        if chunk in self._here or sender not in self._remaining:
            return False
        asked, _ = self._wanted.get(sender, (set(), set()))
        return self._reducer_of.get(chunk) == sender or chunk in asked

    def commitment(self, sender: str, signature: bytes | None) -> Commitment | None:
        """Return what a member contributes, with this signature, unless that is not its own."""
        said = self.contributions.commitments.get(sender)
        if said is None or signature is None:
            return None
        if sender not in self._committed:
            author = self.round.author(next(member for member in self.round.roster if member.peer == sender))
            commitment, keys = said.signed(signature), self._keys
            if keys is not None and not commitment.is_of(author, keys.verify):
                return None
            self._committed[sender] = commitment
        return self._committed[sender]

    def is_vouched_for(self, chunk: int, digest: bytes, absent: tuple[str, ...], origin: Origin | None) -> bool:
        """Whether one who was to average the chunk has signed this: its reducer, or one before that is lost."""
        owner = next((peer for peer, part in self._parts.items() if chunk in part), None)
        if origin is None or owner is None:
            return False
        line = self._line[self._line.index(owner) :] + self._line
        able = line[: line.index(self._reducer_of[chunk]) + 1]
        return origin.reducer in able and self.averages.is_signed(chunk, digest, absent, origin)

    def is_too_long(self, reducer: str, squares: float) -> bool:
        """Whether all that a reducer has averaged would be longer, with this, than what it can be made of."""
        return self._given[reducer] + squares > self.contributions.longest

    def is_done_with(self, sender: str, chunk: int, reduced: bool) -> bool:
        """Whether such a chunk of the sender's is here, or came too late."""
        if reduced or chunk in self._here:
            return chunk in self._here
        return chunk in self._reducing or sender in self._arrived[chunk]

    def may_lack(self, absent: Iterable[str]) -> bool:
        """Whether a chunk may ever be averaged without these: somebody must be left."""
        names = list(absent)
        return len(set(names)) == len(names) and set(names) < self._weights.keys()

    def are_lost(self, absent: Iterable[str]) -> bool:
        """Whether all these are lost, as far as we have heard: of nobody else's blocks one may do without."""
        return set(absent) <= set(self.round.lost)

    def missing(self) -> tuple[str, ...]:
        """The peers that owe us something; if blocks for our averages are missing, only those who owe them."""
        blocks, averages = set[str](), set[str]()
        for chunk in self._reducer_of.keys() - self._here.keys():
            reducer = self._reducer_of[chunk]
            if reducer != self._me:
                averages.add(reducer)
            elif chunk in self._undecided:
                averages |= self._remaining - self._held_by.keys()
                averages |= {peer for peer, (reduced, _) in self._wanted.items() if chunk in reduced}
            else:
                blocks |= self._awaited - self._arrived[chunk]
        return tuple(sorted((blocks or averages) - {self._me}))

    def waiting(self, attempt: Attempt, unreached: frozenset[str]) -> Waiting:
        """What to tell the leader until all is here."""
        broken = tuple(sorted(self.partners() & (unreached | self.disputed)))
        return Waiting(attempt=attempt, missing=self.missing(), moved=self.moved, unreached=broken)

    def lacks_all_of(self, peer: str) -> bool:
        """Whether the peer owes us something, and nothing of it has ever come."""
        return self.payload is None and peer not in self._givers and peer in self.missing()

    def partners(self) -> frozenset[str]:
        """The peers with which we still have to exchange something."""
        owed = {peer for (peer, _), chunks in self._owed.items() if chunks}
        return self._remaining & owed.union(self.missing())

    def _reduces(self, chunk: int) -> bool:
        """Whether the chunk is ours to average, and not averaged yet."""
        mine = self._reducer_of.get(chunk) == self._me and chunk not in self._undecided
        return mine and chunk not in self._here and chunk not in self._reducing

    @property
    def _contributes(self) -> bool:
        return self._me in self._weights

    def _contribute(self) -> list[Effect]:
        if not self._contributes:
            return []
        effects: list[Effect] = []
        inherited = self._inherited()
        for chunk, reducer in self._reducer_of.items():
            if reducer == self._me:
                self._arrived[chunk].add(self._me)
            elif chunk not in inherited:
                effects += self._owe([reducer], False, [chunk])
        return effects + self._resolve() + self._reduce(list(self._arrived))

    def _reduce(self, chunks: Iterable[int]) -> list[Effect]:
        """Average what is complete: blocks of the lost count if they are here, and are not waited for."""
        effects: list[Effect] = []
        for chunk in chunks:
            arrived = self._arrived[chunk]
            if len(arrived) >= len(self._awaited) and self._reduces(chunk) and self._awaited <= arrived:
                self._reducing.add(chunk)
                effects.append(self.reduction_of(chunk, tuple(peer for peer in self._weights if peer not in arrived)))
        return effects

    def reduction_of(self, chunk: int, absent: tuple[str, ...]) -> ReduceChunk:
        """How the average of a chunk is made without the blocks of these."""
        members = tuple(item for item in self._weights.items() if item[0] not in absent)
        factors = self.contributions.clipped
        clipped = {peer: factors[peer] for peer, _ in members if peer in factors}
        return ReduceChunk(self.name, chunk, members, absent, clipped)

    def _averaged(self, chunk: int, absent: tuple[str, ...]) -> list[Effect]:
        self.moved += 1
        self._here[chunk] = absent
        self._reducing.discard(chunk)
        self._undecided.discard(chunk)
        self._arrived.pop(chunk, None)
        effects: list[Effect] = []
        if self._reducer_of[chunk] == self._me:
            lacking = [peer for peer in self.round.remaining if chunk not in self._held_by.get(peer, ())]
            effects += self._owe(lacking, True, [chunk])
        if len(self._here) == self.round.chunks:
            effects.append(AssemblePayload(self.name))
        return effects

    # What goes out --------------------------------------------------------------------------------------------
    def repeat(self) -> list[Effect]:
        """What has not been confirmed and is not under way, and questions that may have been lost."""
        effects = self._report() + self._ask()
        for (peer, reduced), chunks in list(self._owed.items()):
            effects += self._owe([peer], reduced, list(chunks))
        return effects

    def _owe(self, peers: Iterable[str], reduced: bool, chunks: Iterable[int]) -> list[Effect]:
        effects: list[Effect] = []
        for chunk in sorted(chunks):
            for peer in peers:
                if peer != self._me and (peer, reduced, chunk) not in self._in_flight:
                    self._owed[peer, reduced].add(chunk)
                    self._in_flight.add((peer, reduced, chunk))
                    absent = self._here[chunk] if reduced else ()
                    origin = self.averages.origin(chunk) if reduced else None
                    signature = None if reduced else self.contributions.signature
                    effects.append(SendChunk(self.name, peer, chunk, reduced, absent, origin, signature))
        return effects
