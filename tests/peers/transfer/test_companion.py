"""A companion state on its way from one peer to a joiner, and all that can go wrong: the joiner then stays as it is."""

from __future__ import annotations

import asyncio
import gc
import logging
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest

from peers.streams.channel import Buffer, PeerUnreachableError
from peers.transfer import companion as companion_module
from peers.transfer import companion_fetch, state_chunks
from peers.transfer.companion import COMPANION, CompanionDonor, CompanionOffer, CompanionRequest
from peers.transfer.companion_fetch import CompanionJoiner
from peers.transfer.memory_file import MemoryFile
from peers.transfer.state_chunks import chunk_digests, digest_of_chunks
from peers.transfer.storage import MemoryStorage
from peers.values.wire import pack, unpack
from peers.values.workload import SnapshotError
from tests.peers.builders import LOG, RUN, Rig, leaving
from tests.peers.fakes import FakeTransport, NoChance, at_once
from tests.peers.protocol.test_peer import at_second
from tests.peers.streams.test_throttle import simulate
from tests.peers.transfer.test_freezing import FullStorage

CHUNK = 16
SIZE = 40 * CHUNK - 5
DEADLINE = 20_000.0  # seconds of simulated time


@pytest.fixture(autouse=True)
def _small_and_without_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_chunks, "STATE_CHUNK", CHUNK)
    monkeypatch.setattr(asyncio, "to_thread", at_once)


class FakeState:
    """A worker's companion state. It can be copied once `is_ready`."""

    def __init__(self, byte: int, size: int = SIZE) -> None:
        self.data = bytes([byte]) * size
        self.size = size
        self.copies = 0
        self.is_ready = asyncio.Event()
        self.is_ready.set()
        self.problem: Exception | None = None

    async def copy(self, out: memoryview) -> None:
        await self.is_ready.wait()
        if self.problem:
            raise self.problem
        self.copies += 1
        out[:] = self.data

    async def restore(self, companion: memoryview) -> None:
        if self.problem:
            raise self.problem
        self.data = bytes(companion)


class Host:
    """Starts what it is asked to, and nothing else."""

    def __init__(self) -> None:
        self.tasks: set[asyncio.Task[None]] = set()

    def start(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task


class Swarm:
    """A joiner, and donors among the others of its roster, "a" and "c".

    All have the same peer, so the joiner comes to the donors under a name that is known there, "c".
    """

    def __init__(self) -> None:
        self.peer = at_second().peer
        self.host = Host()
        self.state = FakeState(0)
        self.transport = FakeTransport("c")
        self.storage = MemoryStorage()
        self.joiner = CompanionJoiner(self.peer, self.state, self.transport, self.storage, self.host, NoChance())

    async def add(self, name: str, state: FakeState, storage: MemoryStorage | None = None) -> FakeTransport:
        donor = FakeTransport(name)
        await CompanionDonor(self.peer, state, donor, storage or MemoryStorage(), self.host).serve()
        self.transport.donors[name] = donor
        return donor

    async def join(self, index: int = 5) -> bytes:
        """What the worker has in the end."""
        others = set(self.host.tasks)
        self.joiner.training_begins(index)
        if fetching := self.host.tasks - others:
            async with asyncio.timeout(DEADLINE):
                await asyncio.wait(fetching)
        return self.state.data

    @property
    def asked(self) -> list[str]:
        """Whom, each once, in this order."""
        return list(dict.fromkeys(donor for donor, _, _ in self.transport.pulls))


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def with_deadline() -> None:
        async with asyncio.timeout(DEADLINE):
            await scenario()

    simulate(with_deadline())


# It goes well ---------------------------------------------------------------------------------------------------
def test_a_joiner_gets_the_state_of_one_donor() -> None:
    async def scenario() -> None:
        swarm = Swarm()
        given = [FakeState(1), FakeState(3)]
        for name, state in zip("ac", given, strict=True):
            donor = await swarm.add(name, state)
            assert donor.giving_way == {COMPANION}
        assert await swarm.join() in [state.data for state in given]
        assert len(swarm.asked) == 1

    run(scenario)


def test_a_donor_whose_worker_is_busy_is_asked_again() -> None:
    async def scenario() -> None:
        swarm, state = Swarm(), FakeState(1)
        state.is_ready.clear()
        await swarm.add("a", state)
        await swarm.add("c", state)

        async def be_ready() -> None:
            while len(swarm.transport.pulls) < 3:
                await asyncio.sleep(1.0)
            state.is_ready.set()

        ready = asyncio.create_task(be_ready())
        assert await swarm.join() == state.data
        await ready
        assert (len(swarm.asked), state.copies) == (1, 1)

    run(scenario)


@pytest.mark.parametrize("first", [0, 5])
def test_only_the_first_training_asks_and_not_at_the_beginning_of_a_run(first: int) -> None:
    async def scenario() -> None:
        swarm = Swarm()
        for name in "ac":
            await swarm.add(name, FakeState(1))
        got = await swarm.join(first)
        assert (got == FakeState(1).data) == (first > 0)
        swarm.transport.pulls.clear()
        await swarm.join(first + 1)
        assert swarm.asked == []

    run(scenario)


def test_those_who_ask_meanwhile_get_the_same_copy_and_then_it_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    memories: list[weakref.ref[MemoryFile]] = []

    class Watched(MemoryStorage):
        def snapshot(self, size: int) -> MemoryFile:
            memory = super().snapshot(size)
            memories.append(weakref.ref(memory))
            return memory

    async def scenario() -> None:
        swarm, state = Swarm(), FakeState(1)
        donor = await swarm.add("a", state, Watched())
        request = pack(CompanionRequest(run=RUN, digest=None, first=0, last=0))
        offers = await asyncio.gather(*(pull(swarm, request) for _ in range(3)))
        state.data = bytes(SIZE)
        offers.append(await pull(swarm, request))
        assert len({bytes(digests) for _, digests in offers}) == state.copies == len(memories) == 1
        digest = unpack(CompanionOffer, offers[0][0]).digest
        chunks = pack(CompanionRequest(run=RUN, digest=digest, first=1, last=3))
        release, begun = asyncio.Event(), asyncio.Event()

        async def slowly(name: str, header: bytes, data: bytearray) -> bytearray:
            begun.set()
            await release.wait()
            return data

        donor.meddle = slowly
        reading = asyncio.create_task(pull(swarm, chunks))
        await begun.wait()
        monkeypatch.setattr(companion_module, "IN_USE", 0.0)
        (dropping,) = swarm.host.tasks
        await asyncio.wait([dropping], timeout=3 * companion_module.LOOK)
        assert not dropping.done(), "somebody is fetching it"
        release.set()
        assert (await reading)[1] == b"\1" * 2 * CHUNK
        await dropping
        gc.collect()
        assert memories[0]() is None
        with pytest.raises(PeerUnreachableError, match="not here any more"):
            await pull(swarm, chunks)

    run(scenario)


async def pull(swarm: Swarm, request: bytes) -> tuple[bytes, bytearray]:
    return await swarm.transport.pull("a", COMPANION, request, 1 << 20, DEADLINE)


# It does not ----------------------------------------------------------------------------------------------------
def fails_with(caplog: pytest.LogCaptureFixture, spoil: Callable[[Swarm], Awaitable[None]]) -> str:
    """What a joiner says of the first donor, "a", whom `spoil` adds; the other one's state is what it gets."""

    async def scenario() -> None:
        swarm = Swarm()
        await spoil(swarm)
        assert await swarm.join() == bytes(SIZE), "alone it is of no use"
        swarm = Swarm()
        await spoil(swarm)
        await swarm.add("c", FakeState(3))
        assert await swarm.join() == FakeState(3).data
        assert swarm.asked == ["a", "c"]

    with caplog.at_level(logging.INFO):
        run(scenario)
    assert "goes on with a fresh one" in caplog.text
    assert "goes on with the companion state of c" in caplog.text
    return caplog.text


def test_nobody_else_is_there(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        swarm = Swarm()
        swarm.peer.membership.departs("a", 0, 0, leaving(LOG, "a", 0).signature)
        swarm.peer.membership.departs("c", 0, 0, leaving(LOG, "c", 0).signature)
        assert await swarm.join() == bytes(SIZE)
        assert swarm.asked == []

    run(scenario)
    assert "goes on with a fresh one" in caplog.text


def test_a_donor_is_gone(caplog: pytest.LogCaptureFixture) -> None:
    async def gone(swarm: Swarm) -> None:
        pass

    assert "peer a did not answer" in fails_with(caplog, gone)


def test_a_donor_has_none(caplog: pytest.LogCaptureFixture) -> None:
    async def has_none(swarm: Swarm) -> None:
        state = FakeState(1)
        state.problem = SnapshotError("it has only just begun")
        await swarm.add("a", state)

    said = fails_with(caplog, has_none)
    assert "no companion state for who asks: it has only just begun" in said
    assert f"not within {companion_fetch.PATIENCE:g} s: there is no copy yet; ask again" in said


def test_a_donor_has_no_room(caplog: pytest.LogCaptureFixture) -> None:
    async def no_room(swarm: Swarm) -> None:
        await swarm.add("a", FakeState(1), FullStorage())

    assert "no space left on device" in fails_with(caplog, no_room)


def test_a_donors_worker_never_gets_to_it(caplog: pytest.LogCaptureFixture) -> None:
    async def never(swarm: Swarm) -> None:
        state = FakeState(1)
        state.is_ready.clear()
        await swarm.add("a", state)

    assert f"no companion state from a: not within {companion_fetch.PATIENCE:g} s" in fails_with(caplog, never)


def test_a_donor_does_not_know_the_joiner(caplog: pytest.LogCaptureFixture) -> None:
    async def unknown(swarm: Swarm) -> None:
        donor = await swarm.add("a", FakeState(1))
        donor.serve.clear()
        await CompanionDonor(Rig().peer, FakeState(1), donor, MemoryStorage(), swarm.host).serve()

    assert "you are not known here" in fails_with(caplog, unknown)


def meddling(meddle: Callable[[CompanionRequest, bytearray], bytearray]) -> Callable[[Swarm], Awaitable[None]]:
    async def spoil(swarm: Swarm) -> None:
        async def with_request(name: str, header: bytes, data: bytearray) -> bytearray:
            return meddle(unpack(CompanionRequest, header), data)

        (await swarm.add("a", FakeState(1))).meddle = with_request

    return spoil


def test_a_donor_dies_half_way(caplog: pytest.LogCaptureFixture) -> None:
    def die(request: CompanionRequest, data: bytearray) -> bytearray:
        if request.first >= 16:
            raise PeerUnreachableError("a", "the stream ended")
        return data

    assert "no companion state from a: peer a did not answer" in fails_with(caplog, meddling(die))


def test_chunks_are_not_what_their_digests_say(caplog: pytest.LogCaptureFixture) -> None:
    def corrupt(request: CompanionRequest, data: bytearray) -> bytearray:
        data[-1] ^= request.digest is not None
        return data

    assert "peer a: chunk" in fails_with(caplog, meddling(corrupt))


@pytest.mark.parametrize("change", [lambda data: data[:-1], lambda data: data[:-32], lambda data: bytes(len(data))])
def test_digests_are_not_those_of_the_whole(
    change: Callable[[bytearray], bytearray], caplog: pytest.LogCaptureFixture
) -> None:
    def lie(request: CompanionRequest, data: bytearray) -> bytearray:
        return data if request.digest else bytearray(change(data))

    said = fails_with(caplog, meddling(lie))
    assert "peer a: its companion has other chunks than its digest says" in said


@pytest.mark.parametrize("size", [0, SIZE - 1, SIZE + 1, SIZE - CHUNK])
def test_it_is_of_another_size(size: int, caplog: pytest.LogCaptureFixture) -> None:
    async def another(swarm: Swarm) -> None:
        await swarm.add("a", FakeState(1, size))

    assert f"its companion state has {size} bytes" in fails_with(caplog, another)


def test_the_offer_is_garbage(caplog: pytest.LogCaptureFixture) -> None:
    async def garbage(swarm: Swarm) -> None:
        @asynccontextmanager
        async def answer(sender: str, header: bytes) -> AsyncIterator[tuple[bytes, Buffer]]:
            yield b"garbage", b""

        (await swarm.add("a", FakeState(1))).serve[COMPANION] = answer

    assert "peer a: not msgpack" in fails_with(caplog, garbage)


def test_it_takes_for_ever(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(companion_fetch, "FETCH_TIMEOUT", 100.0)

    async def dawdles(swarm: Swarm) -> None:
        async def dawdle(name: str, header: bytes, data: bytearray) -> bytearray:
            if unpack(CompanionRequest, header).digest:
                await asyncio.Event().wait()
            return data

        (await swarm.add("a", FakeState(1))).meddle = dawdle

    assert "no companion state from a: it takes longer than 100 s" in fails_with(caplog, dawdles)


def test_the_worker_finds_it_of_no_use(caplog: pytest.LogCaptureFixture) -> None:
    """Not finite, say. Whoever sent it, the joiner is as it was."""

    async def scenario() -> None:
        swarm = Swarm()
        swarm.state.problem = SnapshotError("its moments hold NaN or infinity")
        for name in "ac":
            await swarm.add(name, FakeState(1))
        assert await swarm.join() == bytes(SIZE)
        assert swarm.asked == ["a", "c"]

    run(scenario)
    assert "no companion state from c: its moments hold NaN or infinity" in caplog.text
    assert "goes on with a fresh one" in caplog.text


def test_the_joiner_has_no_room(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        swarm = Swarm()
        swarm.joiner._storage = FullStorage()
        for name in "ac":
            await swarm.add(name, FakeState(1))
        assert await swarm.join() == bytes(SIZE)

    run(scenario)
    assert "no space left on device" in caplog.text


# What a donor is asked ------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"run": "another"}, "run another is not here"),
        ({"digest": bytes(32)}, "that copy is not here any more"),
        ({"first": 3, "last": 3}, "there are no chunks 3 to 3"),
        ({"first": 0, "last": 41}, "there are no chunks 0 to 41"),
    ],
)
def test_requests_that_lead_nowhere_are_refused(changes: dict[str, Any], reason: str) -> None:
    async def scenario() -> None:
        swarm, state = Swarm(), FakeState(1)
        await swarm.add("a", state)
        await pull(swarm, pack(CompanionRequest(run=RUN, digest=None, first=0, last=0)))
        digest = digest_of_chunks(chunk_digests([state.data]))
        request = CompanionRequest(run=RUN, digest=digest, first=0, last=1).model_copy(update=changes)
        with pytest.raises(Exception, match=reason):
            await pull(swarm, pack(request))

    run(scenario)
