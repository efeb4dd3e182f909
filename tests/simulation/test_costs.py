"""What strangers, a thousand peers or a long past can make a peer do. As in test_weaknesses.py, each test says what
ought to be true, and fails until somebody mends it."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest

from peers.log.header import Assignment, Header, Member
from peers.log.settings import RunSettings
from peers.net.dht_storage import BoundedStorage
from peers.net.light import load_hivemind
from peers.net.records import heartbeats_key
from peers.protocol.messages import Attempt, Begin, Commit, Held, Message, Ready, Round, Share, pack_message
from peers.transfer.headers import HEADERS, HEADERS_AT_ONCE, HeadersRequest, serve_headers
from peers.values.leases import PIECE_LIMIT, SampleRange
from peers.values.wire import MESSAGE_LIMIT, digest_of, pack
from tests.peers.fakes import FakeTransport
from tests.simulation.test_weaknesses import broken

THOUSAND = 1000
SETTINGS = RunSettings("tiny-" + "a" * 32, digest_of(b"manifest"), 100, 6400, 1024)


def peer(number: int) -> str:
    return f"12D3KooW{number:044}"


def header_of(size: int, pieces: int = 1) -> Header:
    """Of an entry of so many peers, whose leases have so many ranges each."""
    per = SETTINGS.samples_per_lease // pieces

    def samples(number: int) -> tuple[SampleRange, ...]:
        starts = (10**9 + 2 * per * (number * pieces + piece) for piece in range(pieces))
        return tuple(SampleRange(start, start + per) for start in starts)

    roster = tuple(Member(peer=peer(number), tokens=6_553_600, samples=samples(number)) for number in range(size))
    leases = tuple(Assignment(peer=peer(number), samples=samples(size + number), since=1000) for number in range(size))
    return Header.model_construct(
        run=SETTINGS.run,
        index=1000,
        fragment=0,
        previous=digest_of(b"previous"),
        roster=roster,
        leases=leases,
        cursor=2 * 10**9,
        free=(),
        lineage_tokens=1 << 50,
        payload=digest_of(b"payload"),
    )


# Messages ------------------------------------------------------------------------------------------------------
def messages_of(size: int, pieces: int) -> dict[str, Message]:
    """The large messages of a round, and of the takeover when its leader dies."""
    header = header_of(size, pieces)
    log = SETTINGS.empty_log
    attempt = Attempt(position=log.position, number=3, leader=peer(0))
    round = Round(name=attempt, shares=tuple(Share(member=member, chunks=2) for member in header.roster), lost=())
    ready = Ready(
        position=log.position,
        state_digest=digest_of(b"state"),
        tokens=1,
        samples=header.roster[0].samples,
        incumbent=True,
        last_attempt=3,
        held=Held(attempt=attempt, header=header),
        round=round,
        rate=1,
        wants=0,
        relayed=(),
        unreached=(),
        seen=(),
    )
    begin = Begin(attempt=attempt, round=round, seconds=60.0, open=False)
    return {"begin": begin, "commit": Commit(header=header), "ready": ready}


def sizes_of(size: int, pieces: int) -> dict[str, int]:
    return {name: len(pack_message(SETTINGS.run, message)) for name, message in messages_of(size, pieces).items()}


@broken("Begin and Commit name the whole roster, to each of its members")
def test_the_leader_of_a_thousand_sends_three_megabytes() -> None:
    sizes = sizes_of(THOUSAND, pieces=1)
    assert (sizes["begin"] + sizes["commit"]) * THOUSAND <= 3_000_000


@broken("each Ready after a leader's death carries the roster twice, again and again")
def test_a_takeover_costs_no_more_than_three_rounds() -> None:
    assert sizes_of(THOUSAND, pieces=1)["ready"] * THOUSAND <= 3 * 3_000_000


def test_the_ready_of_a_takeover_can_be_sent() -> None:
    assert sizes_of(THOUSAND, PIECE_LIMIT)["ready"] <= MESSAGE_LIMIT


# Headers -------------------------------------------------------------------------------------------------------
@broken("a pull of headers is packed as one, in the event loop")
def test_a_pull_of_headers_stops_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """256 headers of a thousand peers take seconds to pack; meanwhile a peer neither hears nor says anything."""
    header, at_once = header_of(THOUSAND), list[int]()
    loop_thread = threading.get_ident()

    def count(value: Any) -> bytes:
        if threading.get_ident() == loop_thread:
            at_once.append(sum(len(one.roster) for one in value.headers))
        return b""

    async def scenario() -> None:
        donor = FakeTransport()
        await serve_headers(donor, {SETTINGS.run: lambda first, last: [header] * (last - first)})
        request = pack(HeadersRequest(run=SETTINGS.run, first=0, last=HEADERS_AT_ONCE))
        monkeypatch.setattr("peers.transfer.headers.pack", count)
        async with donor.serve[HEADERS]("a", request):
            pass

    asyncio.run(scenario())
    assert max(at_once, default=0) <= 10 * THOUSAND


# The DHT -------------------------------------------------------------------------------------------------------
def flooded(storage: BoundedStorage, key: Any, soon: float) -> int:
    """How many records of peers that somebody made up are taken."""
    count = 0
    while storage.store_subkey(key, f"made up {count}", bytes(700), soon + 600.0):
        count += 1
    return count


@broken("whoever comes first has the places under a run's key, and peers are made up for nothing")
def test_a_flood_of_records_hides_no_peer_of_the_run() -> None:
    dht_id = load_hivemind().protocol.DHTID
    storage, now = BoundedStorage(), time.time()
    run = dht_id.generate(source=heartbeats_key(SETTINGS.run))
    storage.favour(run)
    flooded(storage, run, now)
    assert any(storage.store_subkey(run, peer(number), bytes(700), now + 20.0) for number in range(100))


def test_a_flood_of_records_is_small_to_read() -> None:
    """What everybody is sent who looks for a run."""
    dht_id = load_hivemind().protocol.DHTID
    storage, now = BoundedStorage(), time.time()
    run = dht_id.generate(source=heartbeats_key(SETTINGS.run))
    assert flooded(storage, run, now) * 700 <= 200_000
