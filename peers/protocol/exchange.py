"""One member's side of a round: the chunks that it has sent and received, and the outcome of the round.

Each reducer averages a part of the payload. All contributors send it their blocks of each chunk of its part. When six
tenths of the time are over, at the latest, it averages the blocks that have arrived, signs the average once, and sends
it to all. Blocks that are missing then are absent from the chunk, and the signature says so. The exchange may lose
anything else:

    1. A silent reducer is replaced by an heir, which asks for blocks and averages its chunks anew.
    2. If a chunk has two averages, the proposal's marks name the one that counts. A member that has the other one, or
       none, fetches it from the reducer, or else from one other member after another.

The exchange does not remember which members were late: the vote decides the outcome of the round.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence

from peers.log.header import NO_PAYLOAD
from peers.messages.averages import MARK_BYTES, MARKED, Averaged
from peers.messages.chunk_sets import chunk_set, chunks_in
from peers.messages.commitment import Commitment
from peers.messages.messages import Part, Want
from peers.messages.rounds import Round, RoundName
from peers.protocol.contributions import UNKNOWN, Contributions, OwnersSignatures
from peers.protocol.effects import AssemblePayload, Effect, OpenRound, ReduceChunk, Send, SendChunk
from peers.protocol.events import (
    BadBlocks,
    ChunkSent,
    ChunksUnsent,
    ContributionArrived,
    PayloadAssembled,
    ReducedArrived,
)
from peers.protocol.parts import Averages, Reducers, RoundOutcome, is_lawful
from peers.values.identity import Keys

ExchangeEvent = ContributionArrived | BadBlocks | ReducedArrived | ChunkSent | ChunksUnsent | PayloadAssembled

GONE = 0.2
"""Share of the exchange's time for which a reducer waits for blocks of members that it does not hear."""
DUE = 0.6
"""Share of the exchange's time for which a reducer waits for any blocks."""
STALLED = 3.0
"""Seconds without data from a member after which its averages are requested from another member."""
GIVEN = 2
"""Limit on the data that one member gets because it asks: averages of this many payloads, and blocks of this many times
the chunks that it averages."""


class Exchange:
    """The progress of one round at one member. `payload` is the digest of the payload once the member has all averages,
    or all that the leader proposes; None before."""

    def __init__(
        self,
        me: str,
        round: Round,
        contributions: Contributions = UNKNOWN,
        keys: Keys | None = None,
        begun_at: float = 0.0,
        seconds: float = 60.0,
        resend: float = 1.0,
        late: Collection[str] = (),
    ) -> None:
        """Args:
        keys: this peer's keys; without keys nothing is signed or verified.
        resend: seconds after which data that may be lost is sent again.
        late: late members (R7). This peer does not wait for their blocks, but averages those that arrive in time.
        """
        self.round = round
        self.averages = Averages(me, round, keys)
        self.contributions = contributions
        self.payload: bytes | None = None if round.chunks else NO_PAYLOAD
        self.me = me
        weights = contributions.weights
        self._weights = {member.peer: weights.get(member.peer, member.tokens) for member in round.contributors}
        self._formats = {member.peer: member.format for member in round.contributors}
        self._signatures = OwnersSignatures(round, keys)
        self._reducers = Reducers(round)
        self._reducing = Reducing(self._weights.keys(), me)
        self._reducing.silent = frozenset(late)
        self._outbox = Outbox(begun_at, resend)
        self._search = AverageSearch(me, round.peers, self._reducers, DUE * seconds)
        self._part: Part | None = None
        self._live = frozenset(round.peers)
        self._now = begun_at
        self._reducing.add(self._reducers.parts.get(me, ()), begun_at, seconds)

    @property
    def name(self) -> RoundName:
        return self.round.name

    def open(self) -> list[Effect]:
        """Return the effects that allocate memory for the round and send this peer's blocks to the reducers."""
        if not self.round.chunks:
            return []
        effects: list[Effect] = [OpenRound(self.round)]
        if self.me in self._weights:
            for owner, part in self._reducers.parts.items():
                effects += self._owe([owner], False, part)
        return effects + self._reduce(self._reducing.waiting)

    def go_on(
        self,
        heirs: Iterable[tuple[str, str]],
        seconds: float,
        now: float,
        contributions: Contributions = UNKNOWN,
    ) -> list[Effect]:
        """Return the effects of a later ballot, in which heirs average the chunks of some reducers within `seconds`.

        An heir of a large round may learn the commitments only now.
        """
        self._now = now
        if contributions.commitments or not self.contributions.commitments:
            self.contributions = contributions
        self.averages.marks = b""  # this ballot's proposal will have new marks, which name the averages that count
        for part in self._reducers.add(heirs).get(self.me, ()):
            self._reducing.add([chunk for chunk in part if chunk not in self.averages.ours], now, seconds)
            self._reducing.silent |= self.averages.absent_from_ours()
        return self._ask_for_blocks() + self._reduce(self._reducing.waiting)

    def tick(self, now: float, live: Collection[str]) -> list[Effect]:
        """Return the effects that average each chunk whose wait for blocks is over. Every `resend` seconds, also repeat
        failed sends (ChunksUnsent) and requests for missing data. `live` are the peers that this peer hears."""
        self._now, self._live = now, frozenset(live)
        effects = self._reduce(self._reducing.waiting)
        if self._outbox.is_time(now):
            again = self._send(self._outbox.overdue(self._live))
            effects += again + self._ask_for_blocks() + self._ask_for_averages()
        return effects

    # The Part for the leader, and its proposal ------------------------------------------------------------------
    def part(self) -> Part | None:
        """Return the message Part for the leader if this reducer has averaged all of its chunks; otherwise None."""
        ours = self.averages.ours
        if self._reducing.is_waiting or not ours:
            return None
        if self._part is None or len(self._part.averages) < len(ours):
            self._part = Part(round=self.name, averages=tuple(ours[chunk] for chunk in sorted(ours)))
        return self._part

    def proposed(self, marks: bytes) -> list[Effect]:
        """Store a proposal's marks, which name the averages that count. Return the effects that fetch the missing
        ones."""
        if len(marks) != MARK_BYTES * min(self.round.chunks, MARKED) or marks == self.averages.marks:
            return []
        self.averages.marks = marks
        self._reducing.pause()
        lacking = self.averages.lacking()
        if not lacking:
            return [] if self.payload else [AssemblePayload(self.name)]
        self.payload = None
        self._search.begin(lacking, [chunk for chunk in lacking if self.averages.of(chunk)], self._now)
        return self._ask_for_averages()

    def lacking(self) -> tuple[str, ...]:
        """Return the reducers of the chunks whose average is missing, or differs from the proposed one."""
        return tuple(dict.fromkeys(self._reducers.of(chunk)[0] for chunk in self.averages.lacking()))

    @property
    def is_whole(self) -> bool:
        """True if this member has the whole payload (if there is a proposal, the proposed one)."""
        return self.payload is not None

    def absent(self) -> dict[str, int]:
        """Return the number of averaged chunks from which each member is absent, in roster order."""
        return self.averages.absent()

    def outcome(self) -> RoundOutcome | None:
        """Return the outcome of the round if this member has all averages; otherwise None."""
        return self.averages.outcome()

    # Incoming data ------------------------------------------------------------------------------------------------
    def handle(self, event: ExchangeEvent) -> list[Effect]:
        match event:
            case ContributionArrived(sender=sender, chunk=chunk):
                if self.wants_blocks(sender, chunk):
                    self._reducing.arrived(sender, chunk)
                    return self._reduce([chunk])
            case ReducedArrived():
                return self._averaged(event)
            case BadBlocks(reduced=True):
                pass  # the right average may still arrive, from its reducer or from another member
            case BadBlocks(sender=sender, chunk=chunk):
                self._reducing.spoiled(sender, chunk)
                return self._reduce([chunk])
            case ChunkSent(peer=peer, reduced=reduced, chunk=chunk):
                self._outbox.sent(peer, reduced, chunk)
            case ChunksUnsent(peer=peer, reduced=reduced, chunks=chunks):
                self._outbox.unsent(peer, reduced, chunks)
            case PayloadAssembled(digest=digest):
                if self.averages.are_whole:
                    self.payload = digest
        return []

    def hear(self, sender: str, want: Want) -> list[Effect]:
        """Return the effects that send a member the averages for which it asks, and this peer's own blocks of chunks
        that the member averages."""
        if want.round != self.name or sender not in self.round.peers or sender == self.me:
            return []
        # Read only the round's chunks in the request, because a small message can name half a million others.
        mask = slice(-(-self.round.chunks // 8))
        asked = [chunk for chunk in chunks_in(want.averages[mask]) if chunk < self.round.chunks]
        missing = set(filter(self.wants_average, asked))
        for chunk in missing:
            self._outbox.later[chunk].add(sender)
        effects = self._give(sender, [chunk for chunk in asked if chunk not in missing])
        if self.me in self._weights:
            own = self._reducers.chunks_of(sender)
            lacking = self._outbox.not_under_way(sender, set(chunks_in(want.blocks[mask])).intersection(own))
            blocks = lacking[: max(0, GIVEN * len(own) - self._outbox.asked_blocks[sender])]
            self._outbox.asked_blocks[sender] += len(blocks)
            effects += self._owe([sender], False, blocks)
        return effects

    # Data that the exchange accepts -------------------------------------------------------------------------------
    def is_with(self, peer: str) -> bool:
        return peer in self.round.peers

    def format_of(self, peer: str) -> int:
        """Return the number of the format in which a member's blocks are encoded."""
        return self._formats.get(peer, 0)

    def formats(self, reduce: ReduceChunk) -> list[int]:
        """Return the format number of each member's blocks in the average, in the order of their summation."""
        return [self.format_of(peer) for peer, _ in reduce.weights]

    def wants_blocks(self, sender: str, chunk: int) -> bool:
        """Return True if this peer waits for the sender's blocks of a chunk."""
        return self._reducing.wants(sender, chunk)

    def wants_average(self, chunk: int) -> bool:
        """Return True if a chunk's average is missing here, or is not the one that the proposal names."""
        return chunk < self.round.chunks and not self.averages.is_right(chunk)

    def is_wanted(self, averaged: Averaged) -> bool:
        """Return True if the average is the proposed one, or if there is no proposal."""
        return not self.averages.marks or self.averages.is_marked(averaged)

    def wants_own(self, chunk: int) -> bool:
        """Return True if this peer is computing its own average of a chunk; False once a proposal names averages."""
        return chunk in self._reducing.under_way

    def is_done_with(self, sender: str, chunk: int, reduced: bool) -> bool:
        """Return True if this peer already has the sender's chunk, or the chunk arrives too late to count. The chunk is
        an average if `reduced`, otherwise the sender's own blocks."""
        if reduced:
            return chunk < self.round.chunks and not self.wants_average(chunk)
        return chunk in self.averages.ours or self._reducing.needs_no_more(sender, chunk)

    def commitment(self, sender: str, signature: bytes | None) -> Commitment | None:
        """Return a member's commitment with the `signature` if that is valid; otherwise None."""
        return self._signatures.checked(sender, self.contributions.commitments.get(sender), signature)

    def is_vouched_for(self, averaged: Averaged) -> bool:
        """Return True if an average is valid and signed by a reducer of the chunk, or by an heir that this peer knows.
        If the proposal names the average, any contributor may have signed it, because this peer may not know all
        heirs."""
        able: Collection[str] = self._reducers.of(averaged.chunk)
        if self.averages.marks and self.averages.is_marked(averaged):
            able = self._weights.keys()
        return averaged.reducer in able and is_lawful(self.round, averaged) and self.averages.is_signed(averaged)

    def is_too_long(self, averaged: Averaged, squares: float) -> bool:
        """Return True if the reducer's averages, this one included, have a larger squared norm together than the
        contributions allow. `squares` is the squared norm of this average."""
        longest = self.contributions.longest(self.averages.absent_from_ours())
        return self.averages.squares_with(averaged, squares) > longest

    # Averaging --------------------------------------------------------------------------------------------------
    def reduction_of(self, chunk: int, absent: tuple[str, ...]) -> ReduceChunk:
        """Return the effect that averages a chunk without the blocks of the `absent` members."""
        members = tuple(item for item in self._weights.items() if item[0] not in absent)
        factors = self.contributions.clipped(absent)
        clipped = {peer: factors[peer] for peer, _ in members if peer in factors}
        return ReduceChunk(self.name, chunk, members, absent, clipped)

    def _reduce(self, chunks: Iterable[int]) -> list[Effect]:
        if self.averages.marks:
            return []
        begun = [chunk for chunk in chunks if self._reducing.begins(chunk, self._now, self._live)]
        return [self.reduction_of(chunk, self._absent_from(chunk)) for chunk in begun]

    def _absent_from(self, chunk: int) -> tuple[str, ...]:
        missing = self._reducing.missing(chunk)
        return tuple(peer for peer in self._weights if peer in missing)

    def _averaged(self, event: ReducedArrived) -> list[Effect]:
        """Store an average that this peer has computed or received. Return the effects that send it to members that
        need it and, if no average is missing any more, assemble the payload."""
        chunk = event.chunk
        effects: list[Effect] = []
        if event.sender == self.me:
            if not self._reducing.is_ours(chunk):
                return []
            self._reducing.done(chunk)
            averaged = self.averages.sign(chunk, event.digest, event.absent)
        else:
            if event.origin is None or not self.wants_average(chunk):
                return []
            averaged = Averaged(chunk=chunk, digest=event.digest, absent=event.absent, origin=event.origin)
            self._search.came(event.sender, self._now)
        if self.averages.keep(averaged, event.squares):
            self.payload = None
        if event.sender == self.me:
            effects += self._owe(self.round.peers, True, [chunk])
        elif self.averages.is_right(chunk):
            for peer in sorted(self._outbox.later.pop(chunk, ())):
                effects += self._give(peer, [chunk])
        if self.averages.are_whole:
            effects.append(AssemblePayload(self.name))
        return effects

    # Outgoing data ------------------------------------------------------------------------------------------------
    def _owe(self, peers: Iterable[str], reduced: bool, chunks: Iterable[int]) -> list[Effect]:
        others = [peer for peer in peers if peer != self.me]
        return self._send(self._outbox.owe(others, reduced, chunks))

    def _give(self, peer: str, averages: Sequence[int]) -> list[Effect]:
        """Return the effects that send a member averages for which it has asked, up to the limit GIVEN."""
        averages = averages[: max(0, GIVEN * self.round.chunks - self._outbox.asked[peer])]
        self._outbox.asked[peer] += len(averages)
        return self._owe([peer], True, averages)

    def _send(self, flights: Iterable[Flight]) -> list[Effect]:
        effects: list[Effect] = []
        for peer, reduced, chunk in flights:
            average = self.averages.of(chunk) if reduced else None
            absent, origin = (average.absent, average.origin) if average else ((), None)
            signature = None if reduced else self.contributions.signature
            effects.append(SendChunk(self.name, peer, chunk, reduced, absent, origin, signature))
        return effects

    def _ask_for_blocks(self) -> list[Effect]:
        """Return an heir's requests for missing blocks, which members send unasked only to the first reducer."""
        owned = self._reducers.parts.get(self.me, ())
        lacking: defaultdict[str, list[int]] = defaultdict(list)
        for chunk in self._reducing.waiting:
            if chunk not in owned:
                for peer in self._absent_from(chunk):
                    lacking[peer].append(chunk)
        return [
            Send(peer, Want(round=self.name, averages=b"", blocks=chunk_set(chunks)))
            for peer, chunks in lacking.items()
            if peer in self._live
        ]

    def _ask_for_averages(self) -> list[Effect]:
        """Return requests for the proposed averages that are missing here and that no member is sending."""
        if not self.averages.marks:
            return []
        asked = self._search.ask(self.averages.lacking(), self._now, self._live)
        return [
            Send(peer, Want(round=self.name, averages=chunk_set(chunks), blocks=b"")) for peer, chunks in asked.items()
        ]


class Reducing:
    """The chunks that this peer averages, the members whose blocks have arrived, and the times at which the wait for
    further blocks ends."""

    def __init__(self, givers: Collection[str], me: str) -> None:
        self.under_way: set[int] = set()
        """Chunks whose average is being computed."""
        self.silent: frozenset[str] = frozenset()
        """Members that have sent this peer no blocks: as an heir, this peer does not wait for their blocks again."""
        self._givers = frozenset(givers)
        self._me = me
        # By chunk: the times at which the wait for blocks ends, for members that this peer does not hear, and for all.
        self._times: dict[int, tuple[float, float]] = {}
        self._arrived: defaultdict[int, set[str]] = defaultdict(set)
        self._bad: defaultdict[int, set[str]] = defaultdict(set)

    @property
    def waiting(self) -> Sequence[int]:
        """The chunks that this peer must average and has not averaged yet."""
        return list(self._times)

    @property
    def is_waiting(self) -> bool:
        return bool(self._times)

    def is_ours(self, chunk: int) -> bool:
        return chunk in self._times

    def add(self, chunks: Iterable[int], now: float, seconds: float) -> None:
        """Add chunks for this peer to average, in an exchange that ends `seconds` after `now`."""
        for chunk in chunks:
            self._times[chunk] = now + GONE * seconds, now + DUE * seconds
            self._arrived[chunk] |= self._givers & {self._me}

    def wants(self, sender: str, chunk: int) -> bool:
        is_open = chunk in self._times and chunk not in self.under_way
        return is_open and sender in self._givers and not self.needs_no_more(sender, chunk)

    def needs_no_more(self, sender: str, chunk: int) -> bool:
        """Return True if this peer needs no more blocks of its chunk from the member, because they have arrived, were
        bad, or would be too late."""
        if chunk not in self._times:
            return False
        return chunk in self.under_way or sender in self._arrived[chunk] or sender in self._bad[chunk]

    def arrived(self, sender: str, chunk: int) -> None:
        self._arrived[chunk].add(sender)

    def spoiled(self, sender: str, chunk: int) -> None:
        """Exclude a member's bad blocks from a chunk's average. If the average is under way, it is computed anew."""
        if chunk in self._times and sender != self._me:
            self._bad[chunk].add(sender)
            self._arrived[chunk].discard(sender)
            self.under_way.discard(chunk)

    def missing(self, chunk: int) -> frozenset[str]:
        return self._givers - self._arrived[chunk]

    def begins(self, chunk: int, now: float, live: frozenset[str]) -> bool:
        """Mark a chunk as being averaged, unless this peer must wait for blocks. Return True if the chunk is marked."""
        if chunk not in self._times or chunk in self.under_way:
            return False
        gone, due = self._times[chunk]
        is_complete = len(self._arrived[chunk]) + len(self._bad[chunk]) >= len(self._givers)
        if not is_complete and now < due:
            awaited = self.missing(chunk) - self._bad[chunk] - self.silent
            if awaited if now < gone else not live.isdisjoint(awaited):
                return False
        self.under_way.add(chunk)
        return True

    def pause(self) -> None:
        """Discard the averages that are being computed. They may be computed again later."""
        self.under_way.clear()

    def done(self, chunk: int) -> None:
        self.under_way.discard(chunk)
        del self._times[chunk]
        del self._arrived[chunk]


Flight = tuple[str, bool, int]
"""The peer to send to, true for an average and false for own blocks, and the chunk."""


class Outbox:
    """The chunks that this peer must send to others. A chunk being sent is sent again only after ChunksUnsent."""

    def __init__(self, now: float, resend: float) -> None:
        self.asked: Counter[str] = Counter()
        """Number of averages that each member got because it asked."""
        self.later: defaultdict[int, set[str]] = defaultdict(set)
        """By chunk: the members that asked for its average before this peer had it. They get it when it arrives."""
        self.asked_blocks: Counter[str] = Counter()
        self._unconfirmed: dict[Flight, bool] = {}  # True while being sent; False after ChunksUnsent, until sent again
        self._resend = resend
        self._again_at = now + resend

    def is_time(self, now: float) -> bool:
        """Return True if it is time to send unconfirmed data again, and start the next wait of `resend` seconds."""
        if now < self._again_at:
            return False
        self._again_at = now + self._resend
        return True

    def not_under_way(self, peer: str, chunks: Iterable[int]) -> list[int]:
        """Return the chunks, among those given, whose blocks this peer is not sending to `peer` at present."""
        return [chunk for chunk in sorted(chunks) if not self._unconfirmed.get((peer, False, chunk))]

    def owe(self, peers: Sequence[str], reduced: bool, chunks: Iterable[int]) -> list[Flight]:
        """Record chunks to send to the peers: averages if `reduced` is true, otherwise this peer's own blocks. Return
        the transfers to start now: those not under way already."""
        flights = [(peer, reduced, chunk) for chunk in sorted(chunks) for peer in peers]
        new = [flight for flight in flights if not self._unconfirmed.get(flight)]
        self._unconfirmed |= dict.fromkeys(new, True)
        return new

    def sent(self, peer: str, reduced: bool, chunk: int) -> None:
        self._unconfirmed.pop((peer, reduced, chunk), None)

    def unsent(self, peer: str, reduced: bool, chunks: Iterable[int]) -> None:
        for chunk in chunks:
            if (peer, reduced, chunk) in self._unconfirmed:
                self._unconfirmed[peer, reduced, chunk] = False

    def overdue(self, live: Collection[str]) -> list[Flight]:
        """Return the transfers to repeat now: those that were reported unsent, if their peer is heard."""
        due = [flight for flight, is_under_way in self._unconfirmed.items() if not is_under_way and flight[0] in live]
        self._unconfirmed |= dict.fromkeys(due, True)
        return due


class AverageSearch:
    """The choice of the members to ask for proposed averages that this peer does not have.

    A reducer sends its averages unasked, to all at once; over a thin uplink that takes as long as the exchange. So this
    peer waits for a member that still delivers, and asks for each chunk one member at a time.
    """

    def __init__(self, me: str, members: Sequence[str], reducers: Reducers, longest: float) -> None:
        """Create a search that waits at most `longest` seconds for a chunk, whatever else the asked member delivers."""
        place = members.index(me) if me in members else 0
        self._others = [*members[place + 1 :], *members[:place]]
        self._me = me
        self._reducers = reducers
        self._longest = longest
        self._asked: dict[int, tuple[str, float]] = {}  # by chunk: the member that should send it, and since when
        self._came: dict[str, float] = {}  # time at which each member last delivered an average

    def begin(self, lacking: Iterable[int], replaced: Collection[int], now: float) -> None:
        """Start the search for the averages of the chunks in `lacking`. Chunks in `replaced` are requested at once,
        because this peer has another average of them, so no member sends the right one without a request."""
        self._asked = {chunk: (self._reducers.of(chunk)[0], now) for chunk in lacking if chunk not in replaced}

    def came(self, peer: str, now: float) -> None:
        self._came[peer] = now

    def ask(self, lacking: Iterable[int], now: float, live: Collection[str]) -> Mapping[str, list[int]]:
        """Return the chunks whose averages to request now, by the member to ask."""
        asked: defaultdict[str, list[int]] = defaultdict(list)
        for chunk in lacking:
            sources = [peer for peer in self._sources(chunk) if peer in live]
            source, since = self._asked.get(chunk, ("", now))
            if not sources or (source in sources and not self._has_stalled(source, since, now)):
                continue
            place = sources.index(source) + 1 if source in sources else 0
            source = sources[place % len(sources)]
            self._asked[chunk] = source, now
            asked[source].append(chunk)
        return asked

    def _has_stalled(self, source: str, since: float, now: float) -> bool:
        return now - max(since, self._came.get(source, since)) >= STALLED or now - since >= self._longest

    def _sources(self, chunk: int) -> list[str]:
        """Return all other members in the order to ask for a chunk: first those that may have averaged it, then the
        rest in an order that differs by chunk."""
        first = [peer for peer in self._reducers.of(chunk) if peer != self._me]
        turn = chunk % len(self._others) if self._others else 0
        rest = self._others[turn:] + self._others[:turn]
        return first + [peer for peer in rest if peer not in first]
