"""Getting another peer's log, and comparing it with ours."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import pytest

from peers.log import chain as chain_module
from peers.log.chain import Chain, Entry, Stretch, Turnout
from peers.log.folder import RunLog
from peers.log.header import Header, Position
from peers.log.lineage import Branch
from peers.log.state import LogState
from peers.transfer import lineage_fetch
from peers.transfer.lineage_fetch import (
    PATIENCE,
    HeaderAndCertificate,
    HeadersRequest,
    LineageError,
    LineageFetch,
    best_branch,
    serve_headers,
)
from peers.values.signed_heads import SignedHead, SignedHeads
from peers.values.wire import digest_of, pack, unpack
from tests.peers.fakes import FakeTransport, at_once
from tests.peers.heartbeats import beat
from tests.peers.logs import LOG, RUN, certificate, first_log, newcomer, next_header
from tests.peers.network.test_throttle import simulate
from tests.simulator.simulated_keys import SimulatedKeys

FEW = 4
"""Entries that a donor tells at once here."""


@pytest.fixture(autouse=True)
def _short_stretches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chain_module, "STRETCH_LIMIT", FEW)
    monkeypatch.setattr(lineage_fetch, "STRETCH_LIMIT", FEW)


@pytest.fixture(autouse=True)
def _simulated_signatures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lineage_fetch, "verify", SimulatedKeys("me").verify)


class Past:
    """A log of a, b and c: some entries, each signed by these: by one of them as a minority."""

    def __init__(self, entries: int, by: str = "ab", after: Past | None = None, name: bytes = b"") -> None:
        self.entries: list[Entry] = list(after.entries) if after else []
        self.logs: list[LogState] = list(after.logs) if after else [LOG]
        for _ in range(entries):
            log = self.logs[-1]
            header = first_log().last if log.last is None else self._next(log, name)
            assert header is not None
            self.entries.append(Entry.whole(header, None, certificate(log, header, by) if by else None))
            self.logs.append(log.append(header))

    @staticmethod
    def _next(log: LogState, name: bytes) -> Header:
        roster = [log.expected(peer) for peer in log.roster]
        return next_header(log, roster, digest_of(name + bytes([log.position.index])))

    @property
    def end(self) -> LogState:
        return self.logs[-1]

    def chain(self, first: int = 0) -> Chain:
        chain = Chain(LOG)
        for entry in self.entries[first:]:
            chain.add(entry)
        return chain

    def kept(self, first: int = 0) -> RunLog:
        log = RunLog(LOG, 0)
        log.follow(self.chain(first), len(self.entries))
        return log


class Donors:
    def __init__(self) -> None:
        self.me = FakeTransport("me")
        self.recent: Callable[[Position], HeaderAndCertificate | None] = lambda position: None

    async def add(self, name: str, past: Past, first: int = 0) -> None:
        self.me.donors[name] = FakeTransport(name)
        await serve_headers(self.me.donors[name], {RUN: past.chain(first).stretch})

    async def compare(
        self, ours: RunLog, here: LogState, others: Sequence[str] = (), index: int = 100
    ) -> tuple[Branch, Branch, Chain]:
        fetch = LineageFetch(self.me, ours, self.recent)
        found = await fetch.compare("donor", index, others, here)
        return found.theirs, found.ours, found.chain


COMMON = Past(10)
OURS = Past(5, after=COMMON, by="c", name=b"ours")
THEIRS = Past(6, after=COMMON, name=b"theirs")


def test_a_newcomer_gets_and_checks_the_whole_log() -> None:
    async def scenario() -> None:
        donors = Donors()
        await donors.add("donor", THEIRS)
        theirs, own, chain = await donors.compare(RunLog(LOG, 0), LOG)
        assert (theirs.start, theirs.end, own.end, theirs.doubts) == (LOG, THEIRS.end, LOG, ())
        assert theirs.heads == {index: log.position.head for index, log in enumerate(THEIRS.logs)}
        kept = RunLog(LOG, 0)
        kept.follow(chain, 12)
        assert kept.headers(0, 100) == [log.last for log in THEIRS.logs[1:13]]
        assert all(kept.certificate_at(index) for index in range(12)), "it passes on what proves them"

    asyncio.run(scenario())


def test_a_log_without_end_is_looked_at_as_far_as_there_is_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """However often its donor is looked at: the entries of the first look are there still."""
    entries = Past(50).entries
    monkeypatch.setattr(lineage_fetch, "CHAIN_BYTES", sum(len(one.packed) for one in entries[:8]))

    async def scenario() -> None:
        donors = Donors()
        await donors.add("donor", Past(50))
        fetch = LineageFetch(donors.me, RunLog(LOG, 0))
        lengths = [len((await fetch.compare("donor", 100, (), LOG)).chain) for _ in range(4)]
        assert max(lengths) <= 8 + FEW

    asyncio.run(scenario())


@pytest.mark.parametrize("common", [0, 1, 9, 10])
def test_where_two_logs_split_is_found(common: int) -> None:
    async def scenario() -> None:
        before = Past(common)
        ours, past = Past(5, after=before, by="c", name=b"ours"), Past(6, after=before, name=b"theirs")
        if common == 0:  # two foundings: theirs by fewer
            past = Past(0)
            header = next_header(LOG, [newcomer(LOG, "a")], digest_of(b"another"))
            past.entries = [Entry.whole(header, None, certificate(LOG, header))]
            past.logs = [LOG, LOG.append(header)]
        donors = Donors()
        await donors.add("donor", past)
        theirs, own, _ = await donors.compare(ours.kept(), ours.end)
        assert theirs.start == own.start == ours.logs[common]
        assert (theirs.end, own.end) == (past.end, ours.end)
        if common:
            assert theirs.is_better_than(own), "it is certified"
        assert not own.is_better_than(theirs) or not common

    asyncio.run(scenario())


@pytest.mark.parametrize(("theirs", "better"), [(THEIRS, True), (COMMON, False)])
def test_who_has_what_we_have(theirs: Past, better: bool) -> None:
    async def scenario() -> None:
        donors = Donors()
        await donors.add("donor", theirs)
        branch, own, _ = await donors.compare(COMMON.kept(), COMMON.end)
        assert (branch.start, own.end, branch.is_better_than(own)) == (COMMON.end, COMMON.end, better)
        assert all(branch.has(log.position) for log in theirs.logs[1:]), "those before its start, too"

    asyncio.run(scenario())


def test_nobody_is_asked_for_the_log_of_one_that_is_where_ours_has_led() -> None:
    """Regression: a minority looked at each straggler again and again, and had its own whole log sent each time."""

    async def scenario() -> None:
        here, place = COMMON.end, COMMON.logs[4].position
        fetch = LineageFetch(FakeTransport("me"), COMMON.kept())
        found = await fetch.compare("donor", place.index, (), here, place.head)
        assert not found.theirs.splits_from(found.ours)
        assert not found.theirs.is_better_than(found.ours)
        for index, head in ((place.index, bytes(32)), (here.position.index + 1, place.head)):
            with pytest.raises(LineageError):
                await fetch.compare("donor", index, (), here, head)

    asyncio.run(scenario())


def test_what_the_donor_lacks_others_may_have() -> None:
    """It joined in the middle of the run."""

    async def scenario() -> None:
        donors = Donors()
        await donors.add("donor", THEIRS, first=8)
        theirs, _, _ = await donors.compare(RunLog(LOG, 0), LOG, others=["gone"])
        assert theirs.end == LOG, "nobody has the beginning"
        await donors.add("old", COMMON)
        theirs, _, _ = await donors.compare(RunLog(LOG, 0), LOG, others=["gone", "old"])
        assert theirs.end == THEIRS.end

    asyncio.run(scenario())


def test_a_log_counts_as_far_as_its_signatures_are_good() -> None:
    async def scenario() -> None:
        donors, forged = Donors(), Past(6, after=COMMON, name=b"forged")
        header = forged.logs[13].last
        assert header is not None
        proof = certificate(forged.logs[12], header, "ab")
        false = tuple(one.model_copy(update={"signature": bytes(64)}) for one in proof.signers)
        forged.entries[12] = Entry.whole(header, None, proof.model_copy(update={"signers": false}))
        await donors.add("donor", forged)
        theirs, _, _ = await donors.compare(COMMON.kept(), COMMON.end)
        assert theirs.end == forged.logs[12]

    asyncio.run(scenario())


def test_a_donor_that_does_not_answer() -> None:
    async def scenario() -> None:
        donors = Donors()
        with pytest.raises(LineageError, match="peer donor did not answer"):
            await donors.compare(COMMON.kept(), COMMON.end)

    asyncio.run(scenario())


def test_no_more_is_looked_at_than_a_donor_says_it_has() -> None:
    """Regression: whoever made up entries without end kept a peer busy for ever."""

    async def scenario() -> None:
        donors = Donors()
        await donors.add("donor", COMMON)
        await donors.add("endless", Past(50, after=COMMON, by="", name=b"endless"))
        theirs, _, _ = await donors.compare(RunLog(LOG, 0), LOG, others=["endless"], index=10)
        assert theirs.end.position.index < 10 + FEW

    asyncio.run(scenario())


def test_an_entry_that_does_not_follow_ends_the_look() -> None:
    """Regression: it was asked for again and again."""

    async def lie(name: str, header: bytes, data: bytearray) -> bytearray:
        stretch = unpack(Stretch, bytes(data), 1 << 20)
        nobody = {"turnout": Turnout(members=())}
        lies = [(one.model_copy(update=nobody), certificate) for one, certificate in stretch.contents]
        return bytearray(pack(stretch.model_copy(update={"contents": tuple(lies)})))

    async def scenario() -> None:
        donors = Donors()
        await donors.add("donor", COMMON)
        donors.me.donors["donor"].meddle = lie
        with pytest.raises(LineageError, match="entry 7 of donor does not follow"):
            await donors.compare(Past(3, after=Past(7)).kept(), Past(7).end)

    asyncio.run(scenario())


def test_a_donor_that_tells_its_log_too_slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    async def dawdle(name: str, header: bytes, data: bytearray) -> bytearray:
        await asyncio.sleep(PATIENCE / 3)
        return data

    async def scenario() -> None:
        donors = Donors()
        await donors.add("donor", Past(50))
        donors.me.donors["donor"].meddle = dawdle
        with pytest.raises(LineageError, match="takes too long to show its log"):
            await donors.compare(RunLog(LOG, 0), LOG)

    monkeypatch.setattr(asyncio, "to_thread", at_once)
    simulate(scenario())


@pytest.mark.parametrize("kept", [lambda: OURS.kept(), lambda: RunLog(LOG, 0), lambda: COMMON.kept()])
def test_a_log_that_is_not_where_the_state_is(kept: Callable[[], RunLog]) -> None:
    """The last entry is still to be written down, or the folder was lost, or it goes further than the checkpoint."""

    async def scenario() -> None:
        donors, here = Donors(), OURS.logs[12]
        await donors.add("donor", THEIRS)
        entry = OURS.entries[10]
        header = OURS.logs[11].last
        assert header is not None
        donors.recent = {COMMON.end.position: (header, entry.proof)}.get
        theirs, own, _ = await donors.compare(kept(), here)
        assert own.end == here
        if own.start == COMMON.end:
            assert own.first[0][0] == header.digest
        assert theirs.is_better_than(own)

    asyncio.run(scenario())


def test_whoever_has_no_log_compares_those_of_others() -> None:
    """The one that says it has trained most has gone on alone, and lies."""

    async def scenario() -> None:
        donors, longest = Donors(), Past(5, after=COMMON, by="c", name=b"alone")
        await donors.add("liar", longest)
        beats = [beat("liar", longest.end, lineage_tokens=2**61), beat("gone", COMMON.end, head=bytes(32))]
        for name in ("honest", "another"):
            await donors.add(name, Past(2, after=COMMON, name=b"theirs"))
            beats.append(beat(name, Past(2, after=COMMON, name=b"theirs").end))
        best, past = await best_branch(donors.me, beats, LOG)
        assert (best.start, best.end) == (LOG, Past(2, after=COMMON, name=b"theirs").end)
        assert past.headers(0, 100)[-1] == best.end.last
        with pytest.raises(LineageError, match="gone: peer gone did not answer"):
            await best_branch(donors.me, beats[1:2], LOG)

    asyncio.run(scenario())


@pytest.mark.parametrize(("end", "is_taken"), [(COMMON.end, True), (THEIRS.end, False)])
def test_whoever_has_no_log_takes_none_that_lacks_what_is_signed(end: LogState, is_taken: bool) -> None:
    """A founding that has not come so far may be another one."""
    place = end.position
    head = SignedHead.sign(LOG.run, place.index, place.head, "z", SimulatedKeys("z"))
    signed = SignedHeads(LOG.run, ("z",)).with_heads([head])

    async def scenario() -> None:
        donors = Donors()
        await donors.add("donor", COMMON)
        beats = [beat("donor", COMMON.end)]
        if is_taken:
            best, _ = await best_branch(donors.me, beats, LOG, signed)
            assert best.end == COMMON.end
        else:
            expected = f"shows a log up to outer step {place.index}, which archives have signed"
            with pytest.raises(LineageError, match=expected):
                await best_branch(donors.me, beats, LOG, signed)

    asyncio.run(scenario())


def test_a_second_look_goes_on_where_the_first_has_ended() -> None:
    """Regression: a joiner checked a long log twice, and the snapshot that it was offered expired meanwhile."""

    async def scenario() -> None:
        donors = Donors()
        await donors.add("donor", COMMON)
        fetch = LineageFetch(donors.me, RunLog(LOG, 0))
        await fetch.compare("donor", 100, (), LOG)
        await donors.add("donor", THEIRS)
        donors.me.pulls.clear()
        found = await fetch.compare("donor", 100, (), LOG)
        assert (found.theirs.end, len(found.chain)) == (THEIRS.end, len(THEIRS.entries))
        firsts = [unpack(HeadersRequest, request).first for _, _, request in donors.me.pulls]
        assert min(firsts) == len(COMMON.entries)
        found = await fetch.compare("donor", 100, (), COMMON.end)
        assert found.ours.end == COMMON.end, "our state has moved: it begins anew"

    asyncio.run(scenario())
