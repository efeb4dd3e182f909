"""Something large from several donors at once, on a clock that jumps ahead whenever everybody waits."""

from __future__ import annotations

import asyncio
import gc
import random
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any, TypeAlias

import pytest

from peers.errors import RemoteProtocolError
from peers.network.channel import PeerRefusedError, PeerUnreachableError, Serve
from peers.transfer.download import LOOK, MOST, PLACES, RANGES, SILENT, Download, DownloadError, Wanted
from peers.values.wire import Reach, digest_of
from tests.peers.network.test_throttle import now, simulate

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
        self.first_asked_at: dict[str, float] = {}
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

    def check_admitted(self, run_id: str, peer_id: str) -> None:
        """Everybody may come in."""

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


def test_each_donor_gives_one_range_before_any_gives_a_second() -> None:
    async def scenario() -> None:
        donors = Donors(dict.fromkeys("abc", 1.0))
        await download(donors)
        assert [donor for donor, _, _ in donors.asked[: 3 * RANGES]] == ["a", "b", "c"] * RANGES

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
        with pytest.raises(DownloadError, match="there was no peer to ask"):
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


@pytest.mark.parametrize("names", ["ab", "a", ""])
def test_nothing_is_left_behind(names: str) -> None:
    """Neither when all is here nor when nobody has it."""

    async def scenario() -> None:
        complaints: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: complaints.append(context))
        donors = Donors(dict.fromkeys("abc", 1.0), {"a": after(3, is_dead)})
        data = memoryview(bytearray(len(WHOLE)))
        with suppress(DownloadError):
            await Download(donors, WANTED, data).run(names)
        assert asyncio.all_tasks() == {asyncio.current_task()}
        gc.collect()
        assert complaints == []

    simulate(scenario())


def test_what_is_no_donors_fault_is_raised() -> None:
    async def breaks(donor: str, first: int, last: int, data: bytearray) -> bytearray:
        raise MemoryError

    async def scenario() -> None:
        donors = Donors({"a": 1.0, "b": 1.0}, {"a": after(3, breaks)})
        with pytest.raises(MemoryError):
            await download(donors)
        assert donors.under_way == 0

    simulate(scenario())


def test_a_donor_that_refuses_one_of_several_at_once_is_asked_for_fewer() -> None:
    async def scenario() -> None:
        donors = Donors({"a": 1.0})

        async def has_two_places(donor: str, first: int, last: int, data: bytearray) -> bytearray:
            if donors.under_way > 2:
                raise PeerRefusedError(donor, "other parts are on their way to you")
            return data

        donors.faults["a"] = has_two_places
        await download(donors)

    simulate(scenario())


# Slowness -------------------------------------------------------------------------------------------------------
MANY = 2000  # chunks


def wants_many() -> tuple[Wanted, memoryview]:
    """All of them the same."""
    zeros = digest_of(bytes(SIZE))
    wanted = Wanted(NAME, [zeros] * MANY, lambda first, last: (first * SIZE, last * SIZE), WANTED.request, RANGE)
    return wanted, memoryview(bytearray(SIZE * MANY))


class ManyDonors(Donors):
    async def _answer(self, peer_id: str, name: str, header: bytes, max_bytes: int) -> tuple[bytes, bytearray]:
        first, last = map(int, header.split())
        self.asked.append((peer_id, first, last))
        self.first_asked_at.setdefault(peer_id, now())
        async with self._links[peer_id]:
            await asyncio.sleep(self.paces[peer_id] * (last - first))
            data = bytearray(SIZE * (last - first))
        return b"", await self.faults[peer_id](peer_id, first, last, data) if peer_id in self.faults else data


def test_a_donor_that_trickles_loses_its_place_and_what_it_owes_comes_from_others() -> None:
    async def scenario() -> None:
        others = ["a", "b", "c"]
        donors = ManyDonors(dict.fromkeys([*others, "trickler", "spare"], 1.0), {"trickler": after(RANGES, stalls)})
        wanted, data = wants_many()
        one = Download(donors, wanted, data)
        await one.run([*others, "trickler", "spare"])
        owed = donors.asked_of("trickler")[RANGES:]
        assert len(owed) == RANGES
        stalled_at = RANGES * RANGE
        assert stalled_at < donors.first_asked_at["spare"] <= stalled_at + SILENT + 2 * LOOK, "its place is another's"
        assert set(owed) <= {(first, last) for donor, first, last in donors.asked if donor != "trickler"}
        assert len(donors.asked) == MANY // RANGE + len(owed), "nothing else was asked for twice"
        assert now() < 1.1 * MANY / 4, "four gave all the time"

    simulate(scenario())


def test_who_gives_little_while_all_do_is_not_given_up() -> None:
    """Because of a round that is under way, for instance."""

    async def scenario() -> None:
        round_ends = MOST - 10

        async def gives_way(donor: str, first: int, last: int, data: bytearray) -> bytearray:
            if donor == "slow" or now() > 20:
                await asyncio.sleep(max(0.0, round_ends - now()))
            return data

        names = ["fast", "other", "slow"]
        donors = Donors(dict.fromkeys(names, 1.0), dict.fromkeys(names, gives_way))
        one = await download(donors)
        assert all(one.fetched[name] for name in names)

    simulate(scenario())


def test_when_the_first_few_give_nothing_others_are_asked_too() -> None:
    async def scenario() -> None:
        slow = [f"slow{number}" for number in range(DONORS)]
        one = await download(Donors(dict.fromkeys(slow, 1e6) | {"good": 1.0}))
        assert one.fetched == {"good": len(WHOLE)}
        assert now() < SILENT + 1.5 * CHUNKS

    simulate(scenario())


def test_a_donor_alone_has_so_long_for_a_range_and_no_longer() -> None:
    async def scenario() -> None:
        with pytest.raises(DownloadError, match="peer a did not answer"):
            await download(Donors({"a": 1e6}))
        assert now() == pytest.approx(MOST, abs=2 * LOOK)

    simulate(scenario())


def test_who_takes_over_and_stalls_too_does_not_keep_a_range_from_a_third() -> None:
    """Regression: what two had been asked for was asked of nobody else."""

    async def scenario() -> None:
        donors = Donors({"bad": 1.0, "worse": 0.1, "good": 2.0}, {"bad": stalls})

        async def stalls_in_the_end(donor: str, first: int, last: int, data: bytearray) -> bytearray:
            return await stalls(donor, first, last, data) if (first, last) in donors.asked_of("bad") else data

        donors.faults["worse"] = stalls_in_the_end
        one = await download(donors)
        assert one.fetched["good"] >= RANGES * RANGE * SIZE
        assert now() < 3 * CHUNKS

    simulate(scenario())


@pytest.mark.parametrize("number", [1, 2, DONORS])
def test_what_equal_donors_are_about_to_give_is_asked_for_once(number: int) -> None:
    async def scenario() -> None:
        donors = Donors({f"donor{place}": 1.0 for place in range(number)})
        await download(donors)
        assert len(donors.asked) == CHUNKS // RANGE

    simulate(scenario())


# Reach ----------------------------------------------------------------------------------------------------------
RELAYED, NONE = Reach.RELAYED, Reach.NONE


@pytest.mark.parametrize(
    ("reach", "giving"),
    [
        ([RELAYED, NONE, Reach.OPEN, Reach.PUNCHED, None, None], [2, 3, 4, 5]),
        ([RELAYED, RELAYED, NONE, Reach.OPEN, None], [3, 4]),
        ([RELAYED, RELAYED, NONE, Reach.OPEN], [0, 3]),
        ([RELAYED, RELAYED, RELAYED, NONE], [0, 1]),
        ([NONE, NONE], [0]),
    ],
)
def test_those_that_are_reached_badly_give_only_where_others_are_too_few(
    reach: list[Reach | None], giving: list[int]
) -> None:
    async def scenario() -> None:
        donors = Donors({str(place): 1.0 for place in range(len(reach))})
        donors.reach = {str(place): one for place, one in enumerate(reach) if one is not None}
        one = await download(donors)
        assert set(one.fetched) == set(map(str, giving))

    simulate(scenario())


def test_those_that_are_reached_badly_are_asked_when_the_others_fail() -> None:
    async def scenario() -> None:
        donors = Donors({"open": 1.0, "relayed": 1.0, "none": 1.0}, {"open": is_dead, "relayed": after(2, is_short)})
        donors.reach = {"open": Reach.OPEN, "relayed": RELAYED, "none": NONE}
        one = await download(donors, ["none", "relayed", "open"])
        assert one.fetched == {"relayed": 2 * RANGE * SIZE, "none": len(WHOLE) - 2 * RANGE * SIZE}

    simulate(scenario())


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


def test_nothing_holds_the_data_once_all_is_here_though_a_pull_failed() -> None:
    """Regression: tracebacks held a snapshot in memory until garbage was collected."""

    async def scenario() -> None:
        donors = Donors({"a": 1.0, "b": 1.0})
        donors.faults["b"] = is_dead
        data = bytearray(len(WHOLE))
        one = Download(donors, WANTED, memoryview(data))
        gc.disable()
        try:
            await one.run("ab")
            assert data == WHOLE
            data.append(0)  # not while somebody looks at it
        finally:
            gc.enable()

    simulate(scenario())
