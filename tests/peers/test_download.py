"""Something large from several donors at once, on a clock that jumps ahead whenever everybody waits."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeAlias

import pytest

from peers.donors import PLACES
from peers.download import RANGES, Download, DownloadError, Wanted
from peers.errors import RemoteProtocolError
from peers.reach import Reach
from peers.streams import PeerUnreachableError, Serve
from peers.wire import digest_of
from tests.peers.test_throttle import now, simulate

SIZE = 10  # bytes of a chunk; the last one is shorter
CHUNKS = 100
RANGE = 4
WHOLE = random.Random(0).randbytes(SIZE * CHUNKS - 3)
NAME = "something"

DONORS = PLACES[None]

Fault: TypeAlias = Callable[[str, int, int, bytearray], Awaitable[bytearray]]
"""(donor, first chunk, last chunk, what is right) -> what is sent."""


def bounds(first: int, last: int) -> tuple[int, int]:
    return first * SIZE, min(last * SIZE, len(WHOLE))


def digests() -> list[bytes]:
    return [digest_of(WHOLE[slice(*bounds(chunk, chunk + 1))]) for chunk in range(CHUNKS)]


WANTED = Wanted(NAME, digests(), bounds, lambda first, last: b"%d %d" % (first, last), RANGE)


class Donors:
    """Each sends one answer after another, at its own pace in seconds a chunk."""

    def __init__(self, paces: dict[str, float], faults: dict[str, Fault] | None = None) -> None:
        self.paces = paces
        self.faults = faults or {}
        self.reach: dict[str, Reach] = {}
        self.asked: list[tuple[str, int, int]] = []
        self.under_way = 0
        self._links = {donor: asyncio.Lock() for donor in paces}

    def reach_of(self, peer_id: str) -> Reach | None:
        return self.reach.get(peer_id)

    async def pull(
        self, peer_id: str, name: str, header: bytes, max_bytes: int, timeout: float
    ) -> tuple[bytes, bytearray]:
        try:
            async with asyncio.timeout(timeout):
                return await self._answer(peer_id, name, header, max_bytes)
        except TimeoutError as error:
            raise PeerUnreachableError(peer_id, "no answer in time") from error

    async def _answer(self, peer_id: str, name: str, header: bytes, max_bytes: int) -> tuple[bytes, bytearray]:
        assert name == NAME
        first, last = map(int, header.split())
        start, stop = bounds(first, last)
        assert max_bytes == stop - start
        self.asked.append((peer_id, first, last))
        self.under_way += 1
        try:
            async with self._links[peer_id]:
                await asyncio.sleep(self.paces[peer_id] * (last - first))
                data = bytearray(WHOLE[start:stop])
                if peer_id in self.faults:
                    data = await self.faults[peer_id](peer_id, first, last, data)
                return b"", data
        finally:
            self.under_way -= 1

    async def on_pull(self, name: str, serve: Serve, gives_way: bool = False) -> None:
        raise NotImplementedError

    def asked_of(self, donor: str) -> list[tuple[int, int]]:
        return [(first, last) for name, first, last in self.asked if name == donor]


# What donors do wrong -------------------------------------------------------------------------------------------
async def is_dead(donor: str, first: int, last: int, data: bytearray) -> bytearray:
    raise PeerUnreachableError(donor, "no answer in time")


async def stalls(donor: str, first: int, last: int, data: bytearray) -> bytearray:
    await asyncio.Event().wait()
    return data


async def is_short(donor: str, first: int, last: int, data: bytearray) -> bytearray:
    return data[:-1]


async def is_silent(donor: str, first: int, last: int, data: bytearray) -> bytearray:
    return bytearray()


def lies_in(chunk: int) -> Fault:
    async def lie(donor: str, first: int, last: int, data: bytearray) -> bytearray:
        if first <= chunk < last:
            data[SIZE * (chunk - first)] ^= 1
        return data

    return lie


def after(ranges: int, fault: Fault) -> Fault:
    """Goes wrong when it has given so many ranges."""
    given = 0

    async def well_at_first(donor: str, first: int, last: int, data: bytearray) -> bytearray:
        nonlocal given
        given += 1
        return await fault(donor, first, last, data) if given > ranges else data

    return well_at_first


FAULTS: dict[str, Fault] = {
    "dead": is_dead,
    "short": is_short,
    "silent": is_silent,
    "liar": lies_in(7),
    "lies at the end": lies_in(CHUNKS - 1),
    "mortal": after(3, is_dead),
    "half a liar": after(3, lambda donor, first, last, data: lies_in(first)(donor, first, last, data)),
}


async def download(donors: Donors, names: Sequence[str] | None = None) -> Download:
    """All of it, whole, and nothing more under way."""
    data = bytearray(len(WHOLE))
    one = Download(donors, WANTED, memoryview(data))
    await one.run(list(donors.paces) if names is None else names)
    assert data == WHOLE
    assert sum(one.fetched.values()) == len(WHOLE)
    assert donors.under_way == 0
    return one


# Sharing --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("number", [1, 2, DONORS])
def test_donors_of_one_pace_give_as_much_each(number: int) -> None:
    async def scenario() -> None:
        one = await download(Donors({f"donor{place}": 1.0 for place in range(number)}))
        assert len(one.fetched) == number
        assert max(one.fetched.values()) <= 1.3 * min(one.fetched.values())
        assert now() <= 1.2 * CHUNKS / number, "all links were busy"

    simulate(scenario())


def test_fast_donors_give_more() -> None:
    async def scenario() -> None:
        one = await download(Donors({"fast": 1.0, "slow": 5.0}))
        assert 3 * one.fetched["slow"] <= one.fetched["fast"] <= 7 * one.fetched["slow"]

    simulate(scenario())


def test_no_more_donors_are_asked_than_are_needed() -> None:
    async def scenario() -> None:
        names = [f"donor{number}" for number in range(DONORS + 2)]
        one = await download(Donors(dict.fromkeys(names, 1.0)))
        assert set(one.fetched) == set(names[:DONORS])

    simulate(scenario())


def test_nothing_is_asked_for_twice_before_all_has_been_asked_for() -> None:
    async def scenario() -> None:
        donors = Donors({"a": 1.0, "b": 2.0, "c": 7.0})
        await download(donors)
        ranges = [(first, last) for _, first, last in donors.asked]
        assert len(set(ranges[: CHUNKS // RANGE])) == CHUNKS // RANGE

    simulate(scenario())


def test_of_nothing_nothing_is_asked() -> None:
    async def scenario() -> None:
        donors, nothing = Donors({"a": 1.0}), Wanted(NAME, [], bounds, WANTED.request, RANGE)
        await Download(donors, nothing, memoryview(bytearray())).run(["a"])
        assert donors.asked == []

    simulate(scenario())


# Faults ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("fault", FAULTS)
def test_what_a_bad_donor_owes_comes_from_the_others_and_it_is_not_asked_again(fault: str) -> None:
    async def scenario() -> None:
        donors = Donors({"bad": 1.0, "good": 1.0}, {"bad": FAULTS[fault]})
        one = await download(donors)
        failed_at = next((at for at, asked in enumerate(donors.asked_of("bad")) if fault_shows(fault, at, asked)), None)
        if failed_at is not None:
            assert len(donors.asked_of("bad")) <= failed_at + RANGES
        assert one.fetched["good"] > 0

    def fault_shows(fault: str, at: int, asked: tuple[int, int]) -> bool:
        if fault == "liar":
            return asked[0] <= 7 < asked[1]
        if fault == "lies at the end":
            return asked[1] == CHUNKS
        return at >= (3 if fault in ("mortal", "half a liar") else 0)

    simulate(scenario())


def test_a_donor_that_stalls_holds_nothing_up() -> None:
    async def scenario() -> None:
        donors = Donors({"stalled": 1.0, "good": 1.0}, {"stalled": after(2, stalls)})
        one = await download(donors)
        assert one.fetched["stalled"] == 2 * RANGE * SIZE
        assert now() < 1.5 * CHUNKS

    simulate(scenario())


def test_at_the_end_idle_donors_take_over_what_slow_ones_owe() -> None:
    async def scenario() -> None:
        donors = Donors({"fast": 1.0, "slow": 1000.0})
        one = await download(donors)
        assert one.fetched == {"fast": len(WHOLE)}
        assert len(donors.asked_of("slow")) == RANGES
        assert now() < 1.2 * CHUNKS

    simulate(scenario())


def test_who_is_asked_first_may_still_be_the_faster() -> None:
    """A range that another one has taken over counts once, whoever brings it."""

    async def scenario() -> None:
        donors = Donors({"fast": 1.0, "slow": 13.0})
        one = await download(donors)
        assert one.fetched["slow"] > 0

    simulate(scenario())


def test_a_range_that_fails_last_of_all_is_not_forgotten() -> None:
    """The other donor had nothing left to do when it came back, and had failed to get it, too."""

    async def first_time_short(donor: str, first: int, last: int, data: bytearray) -> bytearray:
        return await (is_dead if (first, last) == (0, RANGE) else lies_in(-1))(donor, first, last, data)

    async def scenario() -> None:
        donors = Donors({"a": 1.0, "b": 1.0, "c": 30.0}, {"a": first_time_short, "b": first_time_short})
        one = await download(donors)
        assert one.fetched["c"] >= RANGE * SIZE

    simulate(scenario())


def test_those_behind_the_first_few_are_asked_when_these_fail() -> None:
    async def scenario() -> None:
        bad = {f"bad{number}": list(FAULTS.values())[number] for number in range(DONORS)}
        paces = dict.fromkeys(bad, 1.0) | {"good": 1.0}
        await download(Donors(paces, bad))

    simulate(scenario())


def test_when_nobody_is_left_all_reasons_are_named_and_what_came_is_kept() -> None:
    async def scenario() -> None:
        donors = Donors({"a": 1.0, "b": 1.0, "c": 1.0}, {"a": is_dead, "b": lies_in(30), "c": after(2, is_dead)})
        data = bytearray(len(WHOLE))
        one = Download(donors, WANTED, memoryview(data))
        with pytest.raises(DownloadError) as caught:
            await one.run(list("abc"))
        for reason in ("peer a did not answer", "peer b: chunk 30 of its something is not the run's", "peer c did not"):
            assert reason in str(caught.value)
        kept = sum(
            data[slice(*bounds(chunk, chunk + 1))] == WHOLE[slice(*bounds(chunk, chunk + 1))] for chunk in range(CHUNKS)
        )
        assert kept * SIZE == sum(one.fetched.values()) > 0

    simulate(scenario())


def test_nobody_has_it() -> None:
    async def scenario() -> None:
        with pytest.raises(DownloadError, match="nobody has it"):
            await download(Donors({}))

    simulate(scenario())


def test_a_lie_is_never_written_down() -> None:
    async def scenario() -> None:
        data = bytearray(len(WHOLE))
        donors = Donors({"liar": 1.0}, {"liar": lies_in(0)})
        with pytest.raises(DownloadError):
            await Download(donors, WANTED, memoryview(data)).run(["liar"])
        assert data[: SIZE * RANGE] == bytes(SIZE * RANGE)

    simulate(scenario())


def test_a_download_that_is_cancelled_leaves_nothing_under_way() -> None:
    async def scenario() -> None:
        donors = Donors({"a": 1.0, "b": 2.0})
        running = asyncio.ensure_future(Download(donors, WANTED, memoryview(bytearray(len(WHOLE)))).run(["a", "b"]))
        await asyncio.sleep(10.0)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert running.cancelled()
        assert donors.under_way == 0

    simulate(scenario())


@pytest.mark.parametrize("first_seed", range(0, 200, 50))
def test_whatever_goes_wrong_one_good_donor_is_enough(first_seed: int) -> None:
    async def scenario(seed: int) -> None:
        chance = random.Random(seed)
        paces = {f"donor{number}": chance.choice([0.0, 0.1, 1.0, 30.0]) for number in range(chance.randint(1, 8))}
        kinds: list[Fault] = [*FAULTS.values(), after(chance.randrange(5), is_short), lies_in(chance.randrange(CHUNKS))]
        faults = {donor: chance.choice(kinds) for donor in paces if chance.random() < 0.8}
        good = chance.choice(list(paces))
        faults.pop(good, None)
        async with asyncio.timeout(100_000.0):
            await download(Donors(paces, faults), sorted(paces, key=lambda _: chance.random()))

    for seed in range(first_seed, first_seed + 50):
        simulate(scenario(seed))


# Going on -------------------------------------------------------------------------------------------------------
def test_what_is_there_already_is_not_fetched_again() -> None:
    async def scenario() -> None:
        donors, data = Donors({"a": 0.0}), bytearray(WHOLE)
        for chunk in (0, 50, 51, 52, 53, 54, CHUNKS - 1):
            data[SIZE * chunk] ^= 1
        one = Download(donors, WANTED, memoryview(data))
        assert await one.adopt() == CHUNKS - 7
        await one.run(["a"])
        assert data == WHOLE
        assert sorted(donors.asked_of("a")) == [(0, 1), (50, 54), (54, 55), (CHUNKS - 1, CHUNKS)]

    asyncio.run(scenario())


def test_of_what_is_there_whole_nothing_is_fetched() -> None:
    async def scenario() -> None:
        donors = Donors({})
        one = Download(donors, WANTED, memoryview(bytearray(WHOLE)))
        assert await one.adopt() == CHUNKS
        await one.run([])

    asyncio.run(scenario())


def test_a_download_that_broke_off_goes_on_where_it_was() -> None:
    async def scenario() -> None:
        data = bytearray(len(WHOLE))
        mortal = Donors({"mortal": 0.0}, {"mortal": after(10, is_dead)})
        broken = Download(mortal, WANTED, memoryview(data))
        with pytest.raises(DownloadError):
            await broken.run(["mortal"])
        donors = Donors({"a": 0.0})
        again = Download(donors, WANTED, memoryview(data))
        assert await again.adopt() == 10 * RANGE
        await again.run(["a"])
        assert data == WHOLE
        assert again.fetched["a"] == len(WHOLE) - 10 * RANGE * SIZE

    asyncio.run(scenario())


def test_an_unusable_answer_is_the_donors_mistake() -> None:
    async def is_confused(donor: str, first: int, last: int, data: bytearray) -> bytearray:
        raise RemoteProtocolError(donor, "its verdict is neither yes nor no")

    async def scenario() -> None:
        await download(Donors({"confused": 1.0, "good": 1.0}, {"confused": is_confused}))

    simulate(scenario())
