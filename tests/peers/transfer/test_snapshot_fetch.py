"""Which snapshot is taken over, and what becomes of its download."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from peers.log.header import UNKNOWN_STATE, Header
from peers.log.lineage import Branch
from peers.log.state import LogState
from peers.network.channel import PeerUnreachableError, RefusalError
from peers.transfer import download, snapshots
from peers.transfer.download import Download
from peers.transfer.snapshots import (
    ASKED,
    OFFER_TIMEOUT,
    NotYetVouchedError,
    Offered,
    Snapshot,
    SnapshotOffer,
    SnapshotRequest,
    Vouched,
    ask_size,
    fetch_snapshot,
    serve_snapshots,
)
from peers.transfer.storage import FolderStorage, Storage
from peers.values import chunks as state_chunks
from peers.values.chunks import chunk_digests, digest_of_chunks
from peers.values.wire import DIGEST_BYTES, Reach, digest_of, unpack
from peers.values.workload import SnapshotError
from tests.peers.fakes import FakeTransport, NoChance, at_once
from tests.peers.logs import LOG, RUN, log_at
from tests.peers.network.test_throttle import simulate

CHUNK = 16
SIZE = 200 * CHUNK - 5
ROUND = (log_at(4), log_at(8))  # two places of one lineage
FORK = log_at(8, "ab")


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_chunks, "STATE_CHUNK", CHUNK)


@pytest.fixture(autouse=True)
def _donors_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "CHANCE", NoChance())


def state_at(log: LogState) -> bytes:
    return random.Random(log.position.head).randbytes(SIZE)


def branch_to(log: LogState, names: str = "abc", states: Mapping[int, bytes] | None = None) -> Branch:
    """What the log up to there vouches for."""
    heads = {index: log_at(index, names).position.head for index in range(log.position.index + 1)}
    return Branch(LOG, log, heads=heads, states=states or {})


class Source:
    """A donor's one snapshot."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot

    def is_member(self, peer: str) -> bool:
        return True

    async def newest(self, least: int) -> Snapshot:
        if self.snapshot.index < least:
            raise RefusalError(f"outer step {least} is not here yet")
        return self.snapshot

    def held(self, head: bytes) -> Snapshot | None:
        return self.snapshot if head == LOG.at(self.snapshot.last).position.head else None


class Donors:
    """Peers with a snapshot each, and the way to them."""

    def __init__(self, *vouched: Vouched) -> None:
        """`vouched` is what the log vouches for at first."""
        self.vouched = list(vouched)
        self.me = FakeTransport("me")

    async def add(self, name: str, log: LogState, state: bytes | None = None) -> FakeTransport:
        state = state_at(log) if state is None else state
        digests = chunk_digests([state])
        snapshot = Snapshot(log.last, digest_of_chunks(digests), digests, memoryview(state))
        donor = FakeTransport(name)
        await serve_snapshots(donor, {RUN: Source(snapshot)})
        self.me.donors[name] = donor
        return donor

    async def fetch(self, least: int = 0, storage: Storage | None = None, log: LogState = LOG) -> Snapshot:
        names, storage = list(self.me.donors), storage or Storage()

        async def vouch() -> Vouched:
            return self.vouched.pop(0) if self.vouched else Vouched(branch_to(ROUND[1]), least=least)

        snapshot = await fetch_snapshot(self.me, names, log, least, vouch, storage, SIZE)
        assert bytes(snapshot.data) == state_at(LOG.at(snapshot.last))
        return snapshot

    def chunks_asked_of(self, name: str) -> list[int]:
        requests = [unpack(SnapshotRequest, header) for donor, _, header in self.me.pulls if donor == name]
        return [chunk for request in requests for chunk in range(request.first, request.last)]


def test_a_liar_fills_no_memory_with_digests_of_a_state_of_any_size() -> None:
    """Regression: sixteen peers of one made-up run had an archive take 64 MiB of digests each at once."""

    async def scenario() -> None:
        donors = Donors()
        await donors.add("a", ROUND[0])
        await donors.add("b", ROUND[0])
        await donors.add("liar", ROUND[0], bytes(100 * SIZE))
        memory = snapshots.MEMORY_SHARE * DIGEST_BYTES * 2 * (SIZE // CHUNK)
        assert await ask_size(donors.me, ["a", "b", "liar"], LOG, memory) == SIZE
        with pytest.raises(SnapshotError, match="exceeds the limit"):
            await ask_size(donors.me, ["liar"], LOG, memory)

    asyncio.run(scenario())


# Which one ------------------------------------------------------------------------------------------------------
def test_an_offer_of_the_last_place_that_can_be_named_is_its_donors_mistake() -> None:
    """The place after it has no number. What a donor of a snapshot says of the log is taken on trust."""

    async def scenario() -> None:
        donors, last = Donors(), ROUND[1].last
        assert last is not None
        await donors.add("a", ROUND[1])
        await donors.add("liar", LOG.at(last.model_copy(update={"index": 2**62 - 1})), state_at(ROUND[1]))
        assert (await donors.fetch()).last == last

    asyncio.run(scenario())


def offered(log: LogState, state: bytes = b"") -> Offered:
    return Offered(SnapshotOffer(last=log.last, bytes=SIZE, state_digest=named(log, state)), log.position, ())


def named(log: LogState, state: bytes = b"") -> bytes:
    return digest_of(log.position.head + state)


def nobody_says(place: LogState) -> bytes | None:
    """Those who could say what the state is do not."""
    return UNKNOWN_STATE


def chosen(offers: dict[str, Offered], least: int = 0) -> tuple[int, list[str]]:
    having = Vouched(branch_to(ROUND[1]), least=least).choose(offers)
    return offers[having[0]].position.index, having


def test_the_one_that_most_have_is_taken() -> None:
    old, new = map(offered, ROUND)
    assert chosen({"a": new, "b": old, "c": old}) == (4, ["b", "c"])


def test_of_two_that_as_many_have_the_newer_is_taken() -> None:
    old, new = map(offered, ROUND)
    assert chosen({"a": old, "b": new, "c": old, "d": new}) == (8, ["b", "d"])


def test_whoever_is_wary_takes_one_that_no_doubtful_entry_led_to() -> None:
    """Regression: whoever made up an entry, and the state after it, gave that to a follower with one other donor."""
    old, new = map(offered, ROUND)
    doubtful = replace(branch_to(ROUND[1]), doubts=(log_at(6, "abc"),))
    for offers, taken in (({"a": old, "b": new, "c": new}, ["a"]), ({"b": new}, ["b"])):
        assert Vouched(doubtful, is_wary=True).choose(offers) == taken
    assert Vouched(doubtful).choose({"a": old, "b": new, "c": new}) == ["b", "c"]
    certified_later = replace(doubtful, doubts=(log_at(2, "abc"),))
    assert Vouched(certified_later, is_wary=True).choose({"a": old, "b": new, "c": new}) == ["b", "c"]


def test_none_that_is_too_old_is_taken() -> None:
    old, new = map(offered, ROUND)
    assert chosen({"a": new, "b": old, "c": old}, least=5) == (8, ["a"])
    with pytest.raises(SnapshotError, match="outer step 9 or later"):
        chosen({"a": new, "b": old}, least=9)


def test_only_places_of_the_log_count_however_many_say_something_else() -> None:
    fork, ours = offered(FORK), offered(ROUND[0])
    assert chosen({"a": ours, "b": fork, "c": fork}) == (4, ["a"])
    with pytest.raises(SnapshotError, match="that the log vouches for"):
        chosen({"b": fork, "c": fork})


def test_a_state_with_another_digest_is_another_state() -> None:
    wrong, right = offered(ROUND[1], b"corrupt"), offered(ROUND[1])
    assert chosen({"a": wrong, "b": right, "c": right}) == (8, ["b", "c"])


def test_the_state_that_the_next_entry_names_is_the_right_one_however_many_have_another() -> None:
    """After the last entry it is the one that most of the roster name."""
    wrong, right = offered(ROUND[0], b"corrupt"), offered(ROUND[0])
    offers = {"a": wrong, "b": wrong, "c": right}
    assert Vouched(branch_to(ROUND[1], states={4: named(ROUND[0])})).choose(offers) == ["c"]
    assert Vouched(branch_to(ROUND[0]), lambda place: named(ROUND[0])).choose(offers) == ["c"]
    assert Vouched(branch_to(ROUND[1]), lambda place: named(ROUND[0])).choose(offers) == ["a", "b"], "nobody says"
    claimed = replace(branch_to(ROUND[1]), claimed={4: named(ROUND[0])})
    assert Vouched(claimed).choose(offers) == ["c"]


@pytest.mark.parametrize("is_wary", [False, True])
def test_an_entry_that_anybody_may_have_made_up_does_not_say_which_state_it_follows(is_wary: bool) -> None:
    """Regression: who put an entry that nobody had signed after the last one, and named a state of its own there, gave
    that to followers and archives, however many had the right one."""
    wrong, right, further = offered(ROUND[0], b"invented"), offered(ROUND[0]), offered(ROUND[1], b"invented")
    claimed = {4: named(ROUND[0], b"invented")}
    made_up = replace(branch_to(ROUND[1]), claimed=claimed, doubts=(ROUND[0],))
    told = Vouched(made_up, lambda place: named(ROUND[0]) if place is ROUND[0] else None, is_wary=is_wary)
    assert told.choose({"a": right, "b": wrong, "c": wrong}) == ["a"]
    untold = Vouched(made_up, lambda place: UNKNOWN_STATE if place is ROUND[0] else None, is_wary=True)
    with pytest.raises(NotYetVouchedError):
        untold.choose({"a": right, "b": wrong, "c": further})


def test_none_is_taken_while_those_who_know_do_not_say_which_is_right() -> None:
    """Regression: a liar alone had one that was new enough, and where entries came faster than heartbeats, nobody named
    the state at the log's end; so the liar's was taken."""
    wrong, old = offered(ROUND[1], b"invented"), offered(ROUND[0])
    vouched = Vouched(branch_to(ROUND[1]), nobody_says)
    with pytest.raises(NotYetVouchedError):
        vouched.choose({"a": wrong})
    assert vouched.choose({"a": wrong, "b": old}) == ["b"]
    with pytest.raises(SnapshotError) as elsewhere:
        vouched.choose({"a": offered(FORK)})
    assert elsewhere.type is SnapshotError, "no heartbeat makes it better"


def test_the_state_before_the_first_entry_is_of_every_lineage() -> None:
    genesis = offered(LOG)
    assert chosen({"a": genesis, "b": genesis}) == (0, ["a", "b"])


def test_what_is_not_vouched_for_yet_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "PAUSE", 0.0)

    async def scenario() -> None:
        donors = Donors(*[Vouched(branch_to(ROUND[1]), nobody_says)] * 3)
        await donors.add("a", ROUND[1])
        await donors.fetch()
        assert not donors.vouched

    asyncio.run(scenario())


def test_what_is_never_vouched_for_is_not_taken() -> None:
    async def scenario() -> None:
        donors = Donors(*[Vouched(branch_to(ROUND[1]), nobody_says)] * 100)
        await donors.add("a", ROUND[1])
        with pytest.raises(NotYetVouchedError):
            await donors.fetch()

    simulate(scenario())


# Asking ---------------------------------------------------------------------------------------------------------
def test_all_who_have_it_give_it() -> None:
    async def scenario() -> None:
        donors = Donors()
        for name in "abc":
            await donors.add(name, ROUND[1])
        snapshot = await donors.fetch()
        assert snapshot.last == ROUND[1].last
        assert all(donors.chunks_asked_of(name) for name in "abc")

    asyncio.run(scenario())


def test_only_so_many_are_asked_what_they_have() -> None:
    async def scenario() -> None:
        donors = Donors()
        for number in range(ASKED + 3):
            await donors.add(f"donor{number}", ROUND[1])
        await donors.fetch()
        assert len({donor for donor, _, _ in donors.me.pulls}) == ASKED

    asyncio.run(scenario())


def test_not_everybody_asks_the_same_donors(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        donors = Donors()
        for number in range(2 * ASKED):
            await donors.add(f"donor{number}", ROUND[1])
        asked = []
        for seed in range(5):
            donors.me.pulls.clear()
            monkeypatch.setattr(download, "CHANCE", random.Random(seed))
            await donors.fetch()
            asked.append({donor for donor, _, _ in donors.me.pulls})
        assert all("donor0" in names for names in asked), "it leads"
        assert len(set.union(*asked)) > 1.5 * ASKED

    asyncio.run(scenario())


def test_those_that_are_reached_badly_are_not_asked_for_chunks_while_there_are_others() -> None:
    async def scenario() -> None:
        donors = Donors()
        for name in ("relayed", "none", "open", "punched"):
            await donors.add(name, ROUND[1])
            donors.me.reach[name] = Reach(name)
        await donors.fetch()
        assert "none" not in {donor for donor, _, _ in donors.me.pulls}
        assert {name for name in donors.me.donors if donors.chunks_asked_of(name)} == {"open", "punched"}

    asyncio.run(scenario())


def test_who_has_another_snapshot_or_none_or_is_gone_is_not_asked_for_chunks() -> None:
    async def scenario() -> None:
        donors = Donors()
        await donors.add("a", ROUND[1])
        await donors.add("old", ROUND[0])
        await donors.add("b", ROUND[1])
        donors.me.donors["gone"] = FakeTransport("gone")
        assert (await donors.fetch(least=5)).index == 8
        assert donors.chunks_asked_of("old") == donors.chunks_asked_of("gone") == []

    asyncio.run(scenario())


def test_who_takes_too_long_to_say_what_it_has_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: a byte every half minute was enough to keep a joiner waiting for an hour."""
    monkeypatch.setattr(asyncio, "to_thread", at_once)

    async def dawdles(name: str, header: bytes, data: bytearray) -> bytearray:
        await asyncio.Event().wait()
        return data

    async def scenario() -> None:
        donors = Donors()
        (await donors.add("slow", ROUND[1])).meddle = dawdles
        await donors.add("a", ROUND[1])
        async with asyncio.timeout(2 * OFFER_TIMEOUT):
            await donors.fetch()

    simulate(scenario())


def test_nobody_has_one() -> None:
    async def scenario() -> None:
        donors = Donors()
        await donors.add("a", ROUND[0])
        donors.me.donors["gone"] = FakeTransport("gone")
        with pytest.raises(SnapshotError) as caught:
            await donors.fetch(least=5)
        assert "peer a refused: outer step 5 is not here yet" in str(caught.value)
        assert "peer gone did not answer" in str(caught.value)

    asyncio.run(scenario())


# Lies -----------------------------------------------------------------------------------------------------------
def of_another_run() -> Header:
    last = ROUND[1].last
    assert last is not None
    return last.model_copy(update={"run": "another"})


def test_digests_that_are_not_those_of_the_state_are_refused() -> None:
    async def other_digests(name: str, header: bytes, data: bytearray) -> bytearray:
        if unpack(SnapshotRequest, header).head is None:
            data[0] ^= 1
        return data

    async def too_few(name: str, header: bytes, data: bytearray) -> bytearray:
        return data[:-1]

    async def scenario() -> None:
        for lie in (other_digests, too_few):
            donors = Donors()
            (await donors.add("liar", ROUND[1])).meddle = lie
            with pytest.raises(SnapshotError, match="peer liar: the chunks of its snapshot do not match the digest"):
                await donors.fetch()
            await donors.add("a", ROUND[1])
            await donors.fetch()
            assert donors.chunks_asked_of("liar") == []

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("size", "reason"), [(SIZE - CHUNK, "bytes, not"), (SIZE + 1, "bytes, not"), (SIZE + CHUNK, "exceeds the limit")]
)
def test_a_state_of_another_size_is_refused(size: int, reason: str) -> None:
    async def scenario() -> None:
        donors = Donors()
        await donors.add("another", ROUND[1], state=bytes(size))
        with pytest.raises(SnapshotError, match=f"peer another.*{reason}"):
            await donors.fetch()

    asyncio.run(scenario())


def test_another_runs_snapshot_is_refused() -> None:
    async def scenario() -> None:
        donors = Donors()
        await donors.add("a", LOG.at(of_another_run()))
        with pytest.raises(SnapshotError, match="peer a: its snapshot is of run another"):
            await donors.fetch()

    asyncio.run(scenario())


def test_a_chunk_that_is_not_the_states_is_fetched_from_another() -> None:
    async def corrupt(name: str, header: bytes, data: bytearray) -> bytearray:
        if unpack(SnapshotRequest, header).head is not None:
            data[0] ^= 1
        return data

    async def scenario() -> None:
        donors = Donors()
        (await donors.add("liar", ROUND[1])).meddle = corrupt
        with pytest.raises(SnapshotError, match=r"peer liar: chunk \d+ of its snapshot is not the run's"):
            await donors.fetch()
        await donors.add("a", ROUND[1])
        await donors.fetch()

    asyncio.run(scenario())


# Going on -------------------------------------------------------------------------------------------------------
def test_new_memory_is_not_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Digests of as many zeros as the state has bytes, while all links are idle."""

    async def search(download: Download) -> int:
        raise AssertionError("what was fetched before?")

    monkeypatch.setattr(Download, "adopt", search)

    async def scenario() -> None:
        donors = Donors()
        await donors.add("ann", ROUND[1])
        await donors.fetch()

    asyncio.run(scenario())


def test_a_download_that_broke_off_goes_on_from_its_folder(tmp_path: Path) -> None:
    def storage() -> FolderStorage:
        return FolderStorage(tmp_path, lambda: 1 << 40)

    async def scenario() -> None:
        donors, given = Donors(), set[int]()

        async def dies_half_way(name: str, header: bytes, data: bytearray) -> bytearray:
            request = unpack(SnapshotRequest, header)
            if len(given) > 100:
                raise PeerUnreachableError("mortal", "no answer in time")
            given.update(range(request.first, request.last))
            return data

        (await donors.add("mortal", ROUND[1])).meddle = dies_half_way
        with pytest.raises(SnapshotError, match="peer mortal did not answer"):
            await donors.fetch(storage=storage())
        again = Donors()
        await again.add("a", ROUND[1])
        await again.fetch(storage=storage())
        asked = set(again.chunks_asked_of("a"))
        assert asked.isdisjoint(given)
        assert asked | given == set(range(200))
        assert list(tmp_path.iterdir()) == [], "nothing is left behind"

    asyncio.run(scenario())
