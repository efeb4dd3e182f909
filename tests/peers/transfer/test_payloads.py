"""Payloads of past entries: from whoever has them, several at once, and nothing that is not the run's."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack

import pytest

from peers.errors import RemoteProtocolError
from peers.log.header import Header
from peers.network import channel
from peers.network.channel import PeerRefusedError, PeerUnreachableError, RefusalError, Serve
from peers.transfer import download
from peers.transfer.buffers import PayloadBuffers
from peers.transfer.download import LOOK, PULLS
from peers.transfer.payloads import (
    PAYLOAD,
    RANGE,
    READERS,
    STAGGER,
    PayloadError,
    PayloadRequest,
    Payloads,
    serve_payloads,
)
from peers.values.chunks import CHUNK_BLOCKS, ChunkedPayload
from peers.values.wire import DIGEST_BYTES, Reach, digest_of, pack, unpack
from tests.peers.fakes import NoChance, at_once
from tests.peers.logs import LOG, RUN, member, next_header
from tests.peers.network.test_throttle import now, simulate
from tests.peers.rounds import round_name
from tests.simulator.simulated_workload import BLOCK_BYTES, SimulatedWorkload

CHUNKS = 300
SIZE = CHUNK_BLOCKS * BLOCK_BYTES  # of each chunk

Meddle = Callable[[PayloadRequest, bytearray], bytearray]
"""What becomes of a donor's answer; PeerUnreachableError if none."""


@pytest.fixture(autouse=True)
def _donors_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "CHANCE", NoChance())


def some_payload(seed: bytes = b"payload") -> ChunkedPayload:
    chunks = [digest_of(b"%s %d" % (seed, chunk)) * (SIZE // DIGEST_BYTES) for chunk in range(CHUNKS)]
    return ChunkedPayload(memoryview(b"".join(chunks)), tuple(map(digest_of, chunks)))


THE_PAYLOAD = some_payload()
HEADER = next_header(LOG, [member("a", 0, 20)], THE_PAYLOAD.digest)


def buffers() -> PayloadBuffers:
    return PayloadBuffers(SimulatedWorkload("a", CHUNKS * CHUNK_BLOCKS))


class Network:
    """Where pulls of payloads go; `asked` are the ranges in which whom was asked."""

    def __init__(self) -> None:
        self.serve: dict[str, Serve] = {}
        self.meddle: dict[str, Meddle] = {}
        self.stalled: set[str] = set()
        self.asked: list[tuple[str, int, int]] = []

    async def donor(
        self, name: str, payload: ChunkedPayload | None = THE_PAYLOAD, meddle: Meddle | None = None
    ) -> None:
        """A peer that keeps this payload."""
        kept = buffers()
        if payload:
            kept.kept.keep(payload)
        await serve_payloads(Transport(self, name), {RUN: [kept]})
        if meddle:
            self.meddle[name] = meddle

    def asked_for_chunks(self, donor: str) -> int:
        return sum(last - first for name, first, last in self.asked if name == donor)


class Transport:
    """One peer's way to the others."""

    def __init__(self, network: Network, me: str) -> None:
        self.network = network
        self.me = me

    def check_admitted(self, run_id: str, peer_id: str) -> None:
        """Everybody may come in."""

    async def on_pull(self, name: str, serve: Serve, gives_way: bool = False) -> None:
        assert (name, gives_way) == (PAYLOAD, True)
        self.network.serve[self.me] = serve

    def reach_of(self, peer_id: str) -> Reach | None:
        return None

    async def pull(
        self, peer_id: str, name: str, header: bytes, max_bytes: int, timeout: float
    ) -> tuple[bytes, bytearray]:
        assert name == PAYLOAD
        await asyncio.sleep(0)  # everybody's turn
        if peer_id not in self.network.serve:
            raise PeerUnreachableError(peer_id, "no answer in time")
        request = unpack(PayloadRequest, header)
        self.network.asked.append((peer_id, request.first, request.last))
        if peer_id in self.network.stalled:
            await asyncio.sleep(timeout)
            raise PeerUnreachableError(peer_id, "no answer in time")
        try:
            async with self.network.serve[peer_id](self.me, header) as (answer, served):
                data = bytearray(served)
        except RefusalError as refusal:
            raise PeerRefusedError(peer_id, str(refusal)) from refusal
        if peer_id in self.network.meddle:
            data = self.network.meddle[peer_id](request, data)
        if len(data) > max_bytes:
            raise PeerUnreachableError(peer_id, "its answer exceeds the limit")
        return answer, data


async def fetch(network: Network, donors: Sequence[str], header: Header = HEADER) -> PayloadBuffers:
    """What a peer has that fetched the payload."""
    mine = buffers()
    await Payloads(Transport(network, "me"), RUN, [mine]).fetch(header, donors)
    return mine


def assert_whole(mine: PayloadBuffers) -> None:
    kept = mine.kept.get(THE_PAYLOAD.digest)
    assert kept is not None
    assert (kept.data, kept.chunk_digests) == (THE_PAYLOAD.data, THE_PAYLOAD.chunk_digests)


def lies_in(chunk: int) -> Meddle:
    """Hands on other bytes than the run's."""

    def meddle(request: PayloadRequest, data: bytearray) -> bytearray:
        if request.first <= chunk < request.last:
            data[SIZE * (chunk - request.first)] ^= 1
        return data

    return meddle


def dies_after(ranges: int, name: str) -> Meddle:
    answered = 0

    def meddle(request: PayloadRequest, data: bytearray) -> bytearray:
        nonlocal answered
        answered += request.last > request.first
        if answered > ranges:
            raise PeerUnreachableError(name, "the stream ended after 3 of 128 bytes")
        return data

    return meddle


# Fetching -------------------------------------------------------------------------------------------------------
def test_one_donor_is_enough() -> None:
    async def scenario() -> None:
        network = Network()
        await network.donor("a")
        assert_whole(await fetch(network, ["a"]))

    asyncio.run(scenario())


def test_what_is_kept_is_not_fetched() -> None:
    async def scenario() -> None:
        network, mine = Network(), buffers()
        mine.kept.keep(THE_PAYLOAD)
        await Payloads(Transport(network, "me"), RUN, [mine]).fetch(HEADER, ["a"])
        assert network.asked == []

    asyncio.run(scenario())


def test_what_is_on_the_disk_is_not_fetched_and_is_at_hand_then() -> None:
    async def scenario() -> None:
        network = Network()
        mine = PayloadBuffers(SimulatedWorkload("a", CHUNKS * CHUNK_BLOCKS), 0, lambda _: THE_PAYLOAD)
        await Payloads(Transport(network, "me"), RUN, [mine]).fetch(HEADER, ["a"])
        assert network.asked == []
        assert mine.kept.get(THE_PAYLOAD.digest) is THE_PAYLOAD

    asyncio.run(scenario())


@pytest.mark.parametrize("is_over", [False, True])
def test_what_a_round_has_brought_is_not_fetched(is_over: bool) -> None:
    async def scenario() -> None:
        network, mine, name = Network(), buffers(), round_name()
        await network.donor("a")
        mine.open(name)
        for chunk in range(1, CHUNKS):
            start, stop = mine.chunk_bytes(chunk)
            mine.store(name, chunk, THE_PAYLOAD.data[start:stop] if chunk > 1 else bytes(SIZE))
        if is_over:
            mine.close()
        await Payloads(Transport(network, "me"), RUN, [mine]).fetch(HEADER, ["a"])
        assert_whole(mine)
        assert network.asked_for_chunks("a") == 2, "the one that was not here, and one with another value"

    asyncio.run(scenario())


def test_a_donor_with_other_digests_is_passed_over() -> None:
    """It may be on another lineage, or lie; no chunk of it is asked for."""

    def others_digests(request: PayloadRequest, data: bytearray) -> bytearray:
        assert request.last == 0
        return bytearray(b"".join(some_payload(b"another").chunk_digests))

    async def scenario() -> None:
        network = Network()
        await network.donor("liar", meddle=others_digests)
        await network.donor("a")
        assert_whole(await fetch(network, ["liar", "a"]))
        assert network.asked[0] == ("liar", 0, 0)
        assert network.asked_for_chunks("liar") == 0
        with pytest.raises(PayloadError, match="liar: the chunks of its payload do not match"):
            await fetch(network, ["liar"])

    asyncio.run(scenario())


@pytest.mark.parametrize("size", [0, DIGEST_BYTES - 1, DIGEST_BYTES * CHUNKS - 1, DIGEST_BYTES * (CHUNKS - 1)])
def test_digests_of_another_number_of_chunks_are_none(size: int) -> None:
    async def scenario() -> None:
        network = Network()
        await network.donor("short", meddle=lambda request, data: data[:size])
        with pytest.raises(PayloadError, match="short: the chunks of its payload do not match"):
            await fetch(network, ["short"])

    asyncio.run(scenario())


@pytest.mark.parametrize("chunk", [0, 1, RANGE - 1, RANGE, CHUNKS - 1])
def test_a_lie_in_any_chunk_is_found_out_and_the_truth_fetched_elsewhere(chunk: int) -> None:
    async def scenario() -> None:
        network = Network()
        await network.donor("liar", meddle=lies_in(chunk))
        with pytest.raises(PayloadError, match=f"peer liar.*chunk {chunk} of its payload is not the run's"):
            await fetch(network, ["liar"])
        await network.donor("a")
        assert_whole(await fetch(network, ["liar", "a"]))

    asyncio.run(scenario())


def test_of_a_fetch_that_fails_nothing_is_kept() -> None:
    async def scenario() -> None:
        network, mine = Network(), buffers()
        await network.donor("a", meddle=dies_after(3, "a"))
        await network.donor("b", meddle=lies_in(100))
        with pytest.raises(PayloadError, match=r"peer a did not answer.*; .*peer b|peer b.*; .*peer a"):
            await Payloads(Transport(network, "me"), RUN, [mine]).fetch(HEADER, ["a", "b"])
        assert mine.kept.get(THE_PAYLOAD.digest) is None

    asyncio.run(scenario())


def test_nobody_has_it() -> None:
    async def scenario() -> None:
        network = Network()
        for name in "ab":
            await network.donor(name, payload=None)
        with pytest.raises(PayloadError) as caught:
            await fetch(network, ["a", "b", "dead"])
        for reason in ("peer a refused: that payload is not kept here", "peer b refused", "peer dead did not answer"):
            assert reason in str(caught.value)
        with pytest.raises(PayloadError, match="there was no peer to ask for the payload"):
            await fetch(network, [])

    asyncio.run(scenario())


def test_who_has_it_is_found_among_those_who_have_not() -> None:
    async def scenario() -> None:
        network = Network()
        await network.donor("a", payload=None)
        await network.donor("c", payload=None)
        await network.donor("b")
        assert_whole(await fetch(network, ["dead", "a", "b", "c"]))

    asyncio.run(scenario())


def test_fetches_of_one_payload_at_once_share_the_work() -> None:
    """A member that adopts an entry asks for it again and again until it is here."""

    async def scenario() -> None:
        network, mine = Network(), buffers()
        await network.donor("a")
        payloads = Payloads(Transport(network, "me"), RUN, [mine])
        await asyncio.gather(*(payloads.fetch(HEADER, ["a"]) for _ in range(3)))
        assert_whole(mine)
        assert network.asked_for_chunks("a") == CHUNKS

    asyncio.run(scenario())


@pytest.mark.parametrize("stalled", [["a"], ["a", "b"], ["a", "b", "c"]])
def test_donors_that_stall_hold_nobody_up(stalled: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: who was asked for the digests first, and did not say them, was waited for for an hour."""
    monkeypatch.setattr(asyncio, "to_thread", at_once)

    async def scenario() -> None:
        network = Network()
        for name in [*stalled, "good", "other"]:
            await network.donor(name)
        network.stalled.update(stalled)
        assert_whole(await fetch(network, [*stalled, "good", "other"]))
        assert now() <= STAGGER * len(stalled) + LOOK
        assert asyncio.all_tasks() == {asyncio.current_task()}

    simulate(scenario())


def test_not_everybody_asks_the_same_donor_first(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        network, names = Network(), [f"donor{number}" for number in range(20)]
        for name in names:
            await network.donor(name)
        first = set()
        for seed in range(10):
            network.asked.clear()
            monkeypatch.setattr(download, "CHANCE", random.Random(seed))
            await Payloads(Transport(network, "me"), RUN, [buffers()]).fetch(HEADER, names)
            first.add(network.asked[0][0])
        assert len(first) > 3

    asyncio.run(scenario())


# Serving --------------------------------------------------------------------------------------------------------
def request(first: int, last: int, payload: bytes = THE_PAYLOAD.digest) -> bytes:
    return pack(PayloadRequest(run=RUN, fragment=0, payload=payload, first=first, last=last))


async def serving() -> Serve:
    network = Network()
    await network.donor("me")
    return network.serve["me"]


@pytest.mark.parametrize(("first", "last"), [(0, 1), (3, 2 * RANGE), (CHUNKS - 1, CHUNKS), (0, CHUNKS)])
def test_chunks_are_served(first: int, last: int) -> None:
    async def scenario() -> None:
        serve = await serving()
        async with serve("z", request(first, last)) as (header, data):
            assert (header, data) == (b"", THE_PAYLOAD.data[SIZE * first : SIZE * last])

    asyncio.run(scenario())


@pytest.mark.parametrize(("first", "last"), [(0, 0), (7, 7), (2**61, 5)])
def test_of_no_chunks_the_digests_of_all_are_served(first: int, last: int) -> None:
    async def scenario() -> None:
        serve = await serving()
        async with serve("z", request(first, last)) as (_, data):
            assert data == b"".join(THE_PAYLOAD.chunk_digests)

    asyncio.run(scenario())


@pytest.mark.parametrize("packed", [b"", b"nonsense", request(0, 1)[:-1], request(0, CHUNKS + 1), request(0, 2**61)])
def test_what_is_no_request_is_the_senders_mistake(packed: bytes) -> None:
    async def scenario() -> None:
        serve = await serving()
        with pytest.raises(RemoteProtocolError, match="peer z: "):
            async with serve("z", packed):
                pytest.fail("it was served")

    asyncio.run(scenario())


def test_what_is_not_kept_is_refused() -> None:
    async def scenario() -> None:
        serve = await serving()
        with pytest.raises(RefusalError, match="not kept here"):
            async with serve("z", request(0, 1, digest_of(b"another"))):
                pytest.fail("it was served")

    asyncio.run(scenario())


def test_so_many_are_served_at_once_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "PLACE_WAIT", 0.01)

    async def scenario() -> None:
        serve = await serving()
        async with AsyncExitStack() as readers:
            for number in range(READERS):
                await readers.enter_async_context(serve(f"reader{number}", request(0, 1)))
            for asked in (request(0, 1), request(0, 0)):
                with pytest.raises(RefusalError, match="too many"):
                    async with serve("one more", asked):
                        pytest.fail("it was served")
        async with serve("one more", request(0, 1)) as (_, data):
            assert len(data) == SIZE

    asyncio.run(scenario())


def test_one_peer_cannot_keep_all_others_from_being_served() -> None:
    async def scenario() -> None:
        serve = await serving()
        async with AsyncExitStack() as readers:
            for _ in range(PULLS):
                await readers.enter_async_context(serve("greedy", request(0, 1)))
            with pytest.raises(RefusalError, match="other parts"):
                await readers.enter_async_context(serve("greedy", request(0, 1)))
            async with serve("z", request(0, 1)) as (_, data):
                assert len(data) == SIZE

    asyncio.run(scenario())
