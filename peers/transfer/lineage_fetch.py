"""Headers of past entries: sending them to other peers, and fetching those of a peer's log from the place where it
splits off from this peer's log.

The signatures of fetched entries are checked, and the two branches are compared.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from time import thread_time
from typing import Annotated, TypeAlias

from pydantic import Field

from peers.errors import RemoteProtocolError
from peers.log.certificate import Certificate
from peers.log.chain import STRETCH_LIMIT, Chain, Entry, Stretch, follow
from peers.log.folder import RunLog
from peers.log.header import Header, Position
from peers.log.lineage import Branch, Walk
from peers.log.state import LogError, LogState
from peers.network.channel import PeerUnreachableError, Places, RefusalError
from peers.presence.allowances import STRANGER, Allowances
from peers.presence.heartbeat import Heartbeat
from peers.transfer.download import CHANCE, PullTransport, kept_for, shuffled
from peers.values.identity import verify
from peers.values.signed_heads import NOTHING_SIGNED, SignedHeads
from peers.values.system import now
from peers.values.wire import Buffer, Count, RunId, Value, pack, unpack_from

HEADERS = "headers"
READERS = 8  # maximum requests from peers with a lease that this peer answers at the same time; each may use megabytes
# maximum requests from other peers that this peer answers at the same time; they may only want to keep it busy
STRANGERS = 4
# maximum requests from one peer that this peer answers at the same time, since packing entries blocks the event loop
PULLS = 1
PACKING_BURST, PACKING_SHARE = 30.0, 0.25
"""Processor seconds at once, and in each second, that packing entries may take for one member, or for all strangers
together. A second packs some thousand entries, and a peer can ask for them without reading them."""
BYTES_LIMIT = 1 << 23  # maximum bytes of an answer: outcomes, certificates, and a header
TIMEOUT = 30.0  # seconds for an answer: the donor may be in a round
TIMEOUT_PER_ENTRY = 0.25  # additional seconds for each entry of an answer: enough for 30 KB at 1 Mbit/s

StretchSource: TypeAlias = Callable[[int, int, bool], Stretch]
"""Returns those of the cycles [first, last) that are here, with the first one whole or not: see `Chain.stretch`."""
BACK = 16
"""Factor by which each search step for the place where two logs split goes further back than the one before."""
ASKED = 16
"""Peers whose logs a peer without one compares; also peers that are asked for entries that a donor does not have."""
PATIENCE = 60.0  # seconds for one comparison of two logs, without those for each entry (PATIENCE_PER_ENTRY)
PATIENCE_PER_ENTRY = 0.05  # additional seconds for each fetched entry: checking its certificate takes milliseconds
LONGEST = 1800.0  # maximum seconds for one comparison, however many entries it fetches
CHAIN_BYTES = 1 << 30  # maximum bytes of entries fetched in one comparison
NO_STRETCH = Stretch()


class HeadersRequest(Value):
    """A request for the entries of the cycles [first, last), as outcomes. `is_whole` asks for headers in the first
    cycle, for an asker that does not know the entry before it."""

    run: RunId
    first: Count
    last: Count
    is_whole: Annotated[bool, Field(strict=True)]


async def serve_headers(
    transport: PullTransport,
    sources: Mapping[str, StretchSource],
    is_member: Callable[[str, str], bool] = lambda run, peer: False,
) -> None:
    """Begin to answer the requests of `fetch_stretch` for the runs in `sources`.

    `is_member` returns whether the log of a run has a lease for a peer. Such peers have places of their own, so that
    strangers cannot keep them from being answered.
    """
    places, places_for_strangers = Places(READERS, PULLS), Places(STRANGERS, PULLS)
    packing = Allowances(PACKING_BURST, PACKING_SHARE, READERS)

    @asynccontextmanager
    async def serve(sender: str, packed: bytes) -> AsyncIterator[tuple[bytes, Buffer]]:
        request = unpack_from(sender, HeadersRequest, packed)
        past = kept_for(transport, sources, request.run, sender)
        is_known = is_member(request.run, sender)
        async with (places if is_known else places_for_strangers).one_for(sender):
            account = sender if is_known else STRANGER
            if not packing.has_some(account, now()):
                raise RefusalError("this peer's processor time for log requests is used up; ask another peer")
            last = min(request.last, request.first + STRETCH_LIMIT)
            with packing.spending(account, thread_time):
                answer = pack(past(request.first, last, request.is_whole))
            yield b"", answer

    await transport.on_pull(HEADERS, serve, gives_way=True)


async def fetch_stretch(
    transport: PullTransport, donor: str, run: str, first: int, last: int, is_whole: bool
) -> Stretch:
    """Fetch the entries of as many of the cycles [first, last) as the donor sends in one answer, from `first` on.

    The caller must check that they follow from its log. Raises: PeerUnreachableError, RemoteProtocolError.
    """
    request = pack(HeadersRequest(run=run, first=first, last=last, is_whole=is_whole))
    timeout = TIMEOUT + TIMEOUT_PER_ENTRY * max(0, min(STRETCH_LIMIT, last - first))
    _, packed = await transport.pull(donor, HEADERS, request, BYTES_LIMIT, timeout)
    return unpack_from(donor, Stretch, bytes(packed), BYTES_LIMIT)


async def add_headers_before(transport: PullTransport, donor: str, log: RunLog) -> bool:
    """Fetch some of the entries before a log's first one, and add them to the log. Return True if the donor had any.

    Raises: PeerUnreachableError, RemoteProtocolError, LogError, LogFolderError.
    """
    first = max(0, log.first - max(1, STRETCH_LIMIT // log.empty_log.fragments))
    stretch = await fetch_stretch(transport, donor, log.empty_log.run, first, log.first, is_whole=True)
    await asyncio.to_thread(log.prepend, stretch)
    return bool(stretch.contents)


HeaderAndCertificate = tuple[Header, Certificate | None]


class LineageError(LogError):
    """Error: no peer shows the log that a heartbeat claims. The message lists the peers' answers."""


@dataclass(frozen=True)
class Compared:
    """The result of comparing two logs: the donor's branch and this peer's branch, both from the last place that the
    logs share. `chain` has the entries of the donor's branch.

    Both branches also have the heads before that place, as far as this peer knows them.
    """

    theirs: Branch
    ours: Branch
    chain: Chain


@dataclass
class _Look:
    """The progress of a comparison with one donor's log. `here` is the position of this peer's state when the
    comparison began."""

    donor: str
    here: Position
    walk: Walk
    chain: Chain
    size: int = 0
    """Bytes of the chain, which stays in memory as long as the next comparison may continue it."""


class LineageFetch:
    """The comparer of this peer's log with the logs of other peers. If the same donor is compared again, it fetches
    only newer entries."""

    def __init__(
        self,
        transport: PullTransport,
        ours: RunLog,
        recent: Callable[[Position], HeaderAndCertificate | None] = lambda position: None,
    ) -> None:
        """Create an object that compares other logs with `ours`. `recent` returns the entry that this peer has made at
        a position, even if `ours` does not have it yet; None if there is none."""
        self._transport = transport
        self._ours = ours
        self._recent = recent
        self._last: _Look | None = None

    async def compare(
        self, donor: str, index: int, others: Sequence[str], here: LogState, head: bytes | None = None
    ) -> Compared:
        """Compare the donor's log up to outer step `index` with this peer's log up to `here`. Entries that the donor
        does not send are fetched from `others`.

        `head` is the donor's head at `index`, if known. If this peer's log contains it, no peer is asked, and both
        branches in the result are empty.

        Raises: LineageError.
        """
        if index <= here.position.index and self._ours.heads_at([index]) == {index: head}:
            return Compared(Branch(here, here), Branch(here, here), Chain(self._ours.empty_log))
        clock = asyncio.get_running_loop()
        began = clock.time()
        try:
            async with asyncio.timeout(PATIENCE) as deadline:
                look, stretch = await self._begin(donor, others, here)
                walk, chain = look.walk, look.chain
                while stretch.contents and look.size < CHAIN_BYTES:
                    added = await asyncio.to_thread(_go_on, walk, chain, stretch)
                    new = chain.entries[len(chain.entries) - added :]
                    look.size += sum(len(entry.packed) + len(entry.certificate or b"") for entry in new)
                    allowed = PATIENCE + PATIENCE_PER_ENTRY * len(chain)
                    deadline.reschedule(began + min(LONGEST, allowed))
                    is_whole = added == len(stretch.contents) and walk.end.position.index < index
                    stretch = await self._next(donor, others, walk.end) if is_whole else NO_STRETCH
        except TimeoutError:
            raise LineageError(f"peer {donor} takes too long to show its log") from None
        theirs = walk.branch()
        if walk.end.made:  # the entries end within a cycle, which is left out, because logs grow by whole cycles
            chain.cut(walk.whole.position.index)
            theirs = theirs.until(walk.whole)
        else:
            self._last = look
        return await asyncio.to_thread(self._compared, theirs, here, chain)

    async def _begin(self, donor: str, others: Sequence[str], here: LogState) -> tuple[_Look, Stretch]:
        """Begin to compare this peer's log up to `here` with the donor's, or continue the last comparison. Return its
        progress, and the donor's next stretch, from the donor or `others`. Raises: LineageError."""
        last, self._last = self._last, None
        if last is not None and (last.donor, last.here) == (donor, here.position):
            return last, await self._next(donor, others, last.walk.end)
        start, stretch = await self._find_split(donor, others, here)
        return _Look(donor, here.position, Walk(start, verify), Chain(self._ours.empty_log)), stretch

    def _compared(self, theirs: Branch, here: LogState, chain: Chain) -> Compared:
        """Return `theirs`, the donor's branch, with this peer's branch from the same start to `here`. Both get the
        known heads before the start, since archives may have signed these."""
        both = theirs, self._own_branch(theirs.start, here)
        first, heads = self._ours.first + 1, self._ours.heads(0, theirs.start.position.index)
        theirs, ours = (branch.preceded_by(first, heads) for branch in both)
        return Compared(theirs, ours, chain)

    async def _find_split(self, donor: str, others: Sequence[str], here: LogState) -> tuple[LogState, Stretch]:
        """Return the log at the last place that both logs share, and the donor's stretch after it. Raises:
        LineageError."""
        index, back = min(self._ours.next_index, here.position.index), 1
        while True:
            log = await asyncio.to_thread(self._ours.log_after, index)
            if log is not None:
                try:
                    stretch = await self._stretch(donor, index)
                except (PeerUnreachableError, RemoteProtocolError) as error:
                    raise LineageError(str(error)) from error
                if stretch.contents and stretch.contents[0][0].previous == log.position.head:
                    return await self._go_along_shared(donor, others, log, stretch)
            if index == 0:
                return self._ours.empty_log, await self._next(donor, others, self._ours.empty_log)
            index, back = max(0, index - back), BACK * back

    async def _go_along_shared(
        self, donor: str, others: Sequence[str], log: LogState, stretch: Stretch
    ) -> tuple[LogState, Stretch]:
        """Skip entries that both logs share. Return the log at the last shared place, and the donor's stretch after it.

        Raises: LineageError.
        """
        while stretch.contents:
            passed, rest = await asyncio.to_thread(self._skip_shared, log, stretch)
            if rest.contents:
                return passed, rest
            if passed == log:
                raise LineageError(f"entry {log.position.index} of {donor} does not follow from the log")
            log, stretch = passed, await self._next(donor, others, passed)
        return log, NO_STRETCH

    def _skip_shared(self, log: LogState, stretch: Stretch) -> tuple[LogState, Stretch]:
        """Return the log after the stretch's last cycle that this peer's log has, too, and the rest of the stretch."""
        with suppress(LogError):
            for place in range(0, len(stretch.contents), log.fragments):
                after = log
                for content, _ in stretch.contents[place : place + log.fragments]:
                    after = follow(after, content)
                if self._ours.heads(log.position.index, log.position.index + 1) != [after.position.head]:
                    return log, Stretch(contents=stretch.contents[place:])
                log = after
        return log, NO_STRETCH

    async def _next(self, donor: str, others: Sequence[str], end: LogState) -> Stretch:
        """Fetch the stretch after `end` from the first peer that has it; return an empty stretch if no peer has it."""
        for asked in (donor, *shuffled(self._transport, others)[:ASKED]):
            with suppress(PeerUnreachableError, RemoteProtocolError):
                stretch = await self._stretch(asked, end.position.index)
                if stretch.contents and stretch.contents[0][0].previous == end.position.head:
                    return stretch
        return NO_STRETCH

    async def _stretch(self, donor: str, index: int) -> Stretch:
        run = self._ours.empty_log.run
        return await fetch_stretch(self._transport, donor, run, index, index + STRETCH_LIMIT, is_whole=False)

    def _own_branch(self, start: LogState, here: LogState) -> Branch:
        """Return this peer's branch from `start` to `here`.

        It holds the entries of its first cycle only, since no comparison needs more; of the later ones it holds the
        heads, which archives may have signed.
        """
        walk, index = Walk(start, verify), start.position.index
        with suppress(LogError):
            for content in self._own_entries(start) if index < here.position.index else ():
                walk.take(*content)
        branch, first = walk.branch(), max(index, self._ours.first)
        heads = dict(enumerate(self._ours.heads(first, here.position.index), first + 1)) | dict(branch.heads)
        if here.position.index <= index:
            return Branch(start, start, branch.first, branch.heads)
        heads[here.position.index] = here.position.head
        return Branch(start, here, branch.first, heads, certificates=branch.certificates)

    def _own_entries(self, start: LogState) -> list[HeaderAndCertificate]:
        index = start.position.index
        recent = [self._recent(start.of(fragment).position) for fragment in range(start.fragments)]
        if all(recent):
            return [content for content in recent if content is not None]
        headers = self._ours.headers(index, index + 1)
        return [(one, self._ours.certificate_at(index, one.fragment)) for one in headers]


async def best_branch(
    transport: PullTransport, beats: Sequence[Heartbeat], empty_log: LogState, signed: SignedHeads = NOTHING_SIGNED
) -> tuple[Branch, RunLog]:
    """Compare the logs of at most ASKED senders of `beats`: the first, and random others. Return the branch that is
    best by R21, and a log with its entries.

    Raises: LineageError when no peer shows a branch, or none contains the heads that the run's archives signed.
    """
    log, best, reasons = RunLog(empty_log, 0), Branch(empty_log, empty_log), list[str]()
    donors = [beat.peer for beat in beats]
    for beat in [*beats[:1], *CHANCE.sample(beats[1:], min(ASKED - 1, len(beats[1:])))]:
        if best.heads.get(beat.index) == beat.head:
            continue
        others = [peer for peer in donors if peer != beat.peer]
        try:
            found = await LineageFetch(transport, log).compare(beat.peer, beat.index, others, best.end)
        except LineageError as error:
            reasons.append(f"{beat.peer}: {error}")
            continue
        if (head := found.theirs.contradiction(signed)) is not None:
            reasons.append(f"{beat.peer}: the archive {head.archive} has signed another outer step {head.index}")
        if found.theirs.is_better_than(found.ours, signed):
            best = best.followed_by(found.theirs)
            await asyncio.to_thread(log.follow, found.chain, found.theirs.end.position.index)
    if best.end.last is None:
        raise LineageError("; ".join(reasons) or "no peer shows the run's log; try again when a peer trains")
    # refuse a branch without any head that archives have signed: it may be of a second founding of the run
    if signed.indices and not signed.vouched(best.heads):
        raise LineageError(f"no peer shows a log up to outer step {min(signed.indices)}, which archives have signed")
    return best, log


def _go_on(walk: Walk, chain: Chain, stretch: Stretch) -> int:
    """Check a stretch's entries, and append them to the chain until one fails. Return how many were appended."""
    taken = 0
    with suppress(LogError):
        for content, certificate in stretch.contents:
            chain.add(Entry.whole(walk.take(content, certificate), None, certificate))
            taken += 1
    return taken
