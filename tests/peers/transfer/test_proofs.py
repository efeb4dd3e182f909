"""Proofs of the faults that annexes name, as they are served and fetched."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from peers.log.folder import LogFolder, RunLog, proof_path
from peers.log.header import Header
from peers.log.state import LogState
from peers.network.channel import PeerRefusedError, RefusalError
from peers.transfer.payloads import ASKED, PATIENCE, PROOF, TIMES, MissingProofs, ProofRequest, serve_proofs
from peers.values.wire import digest_of, pack
from tests.peers.audit.statements import two_commitments as proof
from tests.peers.fakes import FakeTransport
from tests.peers.logs import LOG, PAYLOAD, RUN, chain_of, first_log, next_header

SHOWN = proof("c")
DATA, DIGEST = pack(SHOWN), SHOWN.fault.proof
FIRST = first_log().last


def entries(named: str = "c") -> list[Header]:
    """Three entries of a log; the second one excludes a peer."""
    log, headers = first_log(), [header for header in (FIRST,) if header]
    for accused in (named, ""):
        faults = [proof(accused).fault] if accused else []
        headers.append(next_header(log, [log.expected(peer) for peer in "ab"], PAYLOAD, faults))
        log = log.append(headers[-1])
    return headers


ENTRIES = entries()


@dataclass
class Place:
    """A peer whose log lacks a proof, and donors."""

    folder: Path
    me: FakeTransport = field(default_factory=lambda: FakeTransport("me"))

    def log(self, name: str = "me") -> LogFolder:
        return LogFolder.open(self.folder / name, LOG, 8)

    async def donor(self, name: str, *proofs: bytes) -> None:
        log = self.log(name)
        log.keep_proofs(proofs)
        self.me.donors[name] = FakeTransport(name)
        await serve_proofs(self.me.donors[name], {RUN: log})

    def asked(self) -> list[str]:
        return [donor for donor, name, _ in self.me.pulls if name == PROOF]


def taken(log: RunLog, headers: Sequence[Header]) -> None:
    """Add entries to a log."""
    for header in headers:
        log.append(header, None, None)


def test_a_proof_comes_from_a_peer_that_keeps_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        place = Place(tmp_path)
        await place.donor("a", DATA)

        async def ask(run: str, wanted: bytes) -> tuple[bytes, bytearray]:
            return await place.me.pull("a", PROOF, pack(ProofRequest(run=run, proof=wanted)), len(DATA), 1.0)

        assert await ask(RUN, DIGEST) == (b"", bytearray(DATA))
        assert place.me.donors["a"].giving_way == {PROOF}
        with pytest.raises(PeerRefusedError, match="not kept here"):
            await ask(RUN, bytes(32))
        with pytest.raises(PeerRefusedError, match="run another is not here"):
            await ask("another", DIGEST)

    asyncio.run(scenario())


def test_of_each_peer_one_request_is_answered_at_once(tmp_path: Path) -> None:
    async def scenario() -> None:
        place = Place(tmp_path)
        await place.donor("a", DATA)
        serve, request = place.me.donors["a"].serve[PROOF], pack(ProofRequest(run=RUN, proof=DIGEST))
        async with AsyncExitStack() as served:
            assert await served.enter_async_context(serve("x", request)) == (b"", DATA)
            with pytest.raises(RefusalError, match="being sent to you"):
                await served.enter_async_context(serve("x", request))
            assert await served.enter_async_context(serve("y", request)) == (b"", DATA)

    asyncio.run(scenario())


def test_other_bytes_than_the_named_ones_are_refused(tmp_path: Path) -> None:
    async def scenario() -> None:
        async def meddle(name: str, header: bytes, data: bytearray) -> bytearray:
            return bytearray(reversed(data))

        place = Place(tmp_path)
        await place.donor("a", DATA)
        place.me.donors["a"].meddle = meddle
        log = place.log()
        taken(log, ENTRIES)
        missing = MissingProofs(place.me, log)
        missing.look()
        await missing.fetch(["a"])
        assert place.asked() == ["a"]
        assert log.proof(DIGEST) is None
        place.me.donors["a"].meddle = None
        await missing.fetch(["a"])
        assert log.proof(DIGEST) == DATA

    asyncio.run(scenario())


def test_a_proof_whose_bytes_have_changed_is_not_given(tmp_path: Path) -> None:
    log = Place(tmp_path).log()
    log.keep_proofs([DATA])
    assert log.has_proof(DIGEST)
    assert log.proof(DIGEST) == DATA
    proof_path(log.path, DIGEST).write_bytes(DATA[:-1])
    assert log.proof(DIGEST) is None
    assert not log.has_proof(DIGEST)


def test_what_a_log_lacks_is_asked_of_those_who_may_have_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        place = Place(tmp_path)
        await place.donor("a")
        await place.donor("b", DATA)
        log = place.log()
        taken(log, ENTRIES)
        missing = MissingProofs(place.me, log)
        missing.look()
        await missing.fetch(["a", "b", "nobody"])
        assert log.proof(DIGEST) == DATA
        asked = place.asked()
        missing.look()
        await missing.fetch(["a", "b"])
        assert place.asked() == asked, "nothing lacks any more"

    asyncio.run(scenario())


@pytest.mark.parametrize("times", [(3,), (1, 2, 3), (1, 1, 3)])
def test_entries_that_come_later_are_looked_at(times: tuple[int, ...], tmp_path: Path) -> None:
    async def scenario() -> None:
        place = Place(tmp_path)
        await place.donor("a", DATA)
        log = place.log()
        missing = MissingProofs(place.me, log)
        for count in times:
            taken(log, ENTRIES[:count])
            missing.look()
            await missing.fetch("a")
        assert log.proof(DIGEST) == DATA

    asyncio.run(scenario())


def test_entries_that_come_before_the_others_are_looked_at(tmp_path: Path) -> None:
    async def scenario() -> None:
        place = Place(tmp_path)
        await place.donor("a", DATA)
        log = place.log()
        missing = MissingProofs(place.me, log)
        taken(log, ENTRIES[2:])
        missing.look()
        log.prepend(chain_of(ENTRIES[:2]).stretch(0, 2, is_whole=True))
        missing.look()
        await missing.fetch("a")
        assert log.proof(DIGEST) == DATA

    asyncio.run(scenario())


def test_entries_of_another_lineage_are_looked_at(tmp_path: Path) -> None:
    async def scenario() -> None:
        place, log_of = Place(tmp_path), first_log()
        await place.donor("a", DATA)
        log = place.log()
        missing = MissingProofs(place.me, log)
        other = [next_header(log_of, [log_of.expected(peer) for peer in "abc"], digest_of(b"other"))]
        taken(log, [ENTRIES[0], *other, *_after(log_of.append(other[0]))])
        missing.look()
        taken(log, ENTRIES[1:])
        missing.look()
        await missing.fetch("a")
        assert log.proof(DIGEST) == DATA

    asyncio.run(scenario())


def _after(log: LogState) -> list[Header]:
    return [next_header(log, [log.expected(peer) for peer in "abc"], PAYLOAD)]


def test_what_nobody_has_is_not_asked_for_without_end(tmp_path: Path) -> None:
    async def scenario() -> None:
        place = Place(tmp_path)
        for name in "abcdefgh":
            await place.donor(name)
        log = place.log()
        taken(log, ENTRIES)
        missing = MissingProofs(place.me, log)
        missing.look()
        await missing.fetch("abcdefgh")
        assert len(set(place.asked())) == ASKED
        for _ in range(PATIENCE):
            missing.look()
            await missing.fetch("abcdefgh")
        assert Counter(place.asked()) == dict.fromkeys("abcdefgh", TIMES)

    asyncio.run(scenario())


def test_one_that_refuses_keeps_nobody_from_getting_it_of_another(tmp_path: Path) -> None:
    async def scenario() -> None:
        place = Place(tmp_path)
        await place.donor("a")
        log = place.log()
        taken(log, ENTRIES)
        missing = MissingProofs(place.me, log)
        missing.look()
        for _ in range(2 * PATIENCE):
            await missing.fetch("a")
        assert place.asked() == ["a"] * TIMES
        await place.donor("b", DATA)
        await missing.fetch("ab")
        assert log.proof(DIGEST) == DATA

    asyncio.run(scenario())


def test_a_crowd_that_refuses_is_believed(tmp_path: Path) -> None:
    async def scenario() -> None:
        place, crowd = Place(tmp_path), [f"peer {number}" for number in range(PATIENCE)]
        for name in crowd:
            await place.donor(name)
        log = place.log()
        taken(log, ENTRIES)
        missing = MissingProofs(place.me, log)
        missing.look()
        for _ in range(PATIENCE * TIMES):
            await missing.fetch(crowd)
        await place.donor("b", DATA)
        await missing.fetch("b")
        assert log.proof(DIGEST) is None
        assert "b" not in place.asked()

    asyncio.run(scenario())


def test_a_log_in_memory_keeps_no_proofs_and_lacks_none(tmp_path: Path) -> None:
    async def scenario() -> None:
        place, log = Place(tmp_path), RunLog(LOG)
        await place.donor("a", DATA)
        taken(log, ENTRIES)
        missing = MissingProofs(place.me, log)
        missing.look()
        await missing.fetch("a")
        assert not place.asked()
        log.keep_proofs([DATA])
        assert log.proof(DIGEST) is None

    asyncio.run(scenario())
