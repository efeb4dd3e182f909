"""Sending and fetching of the data that entries name by digest: payloads, and proofs of faults.

A payload comes from several peers at once, and each chunk is checked. A voter has seen the proofs that an entry's annex
names before it signs. A peer that takes the entry over later has not: it joined, followed, or keeps an archive. It may
fetch them from any peer.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, defaultdict, deque
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from weakref import WeakValueDictionary

from peers.errors import RemoteProtocolError
from peers.log.folder import LogFolderError, RunLog
from peers.log.header import Header
from peers.messages.messages import PROOF_LIMIT
from peers.network.channel import PeerUnreachableError, Places, RefusalError
from peers.transfer.buffers import PayloadBuffers
from peers.transfer.download import PULLS, Download, DownloadError, PullTransport, Wanted, kept_for, shuffled
from peers.values.chunks import ChunkedPayload, chunks_of
from peers.values.system import cancel_and_wait
from peers.values.wire import DIGEST_BYTES, Buffer, Count, Digest, RunId, Value, digest_of, pack, unpack_from

logger = logging.getLogger(__name__)

PAYLOAD = "payload"
READERS = 16  # maximum number of requests for payloads that this peer answers at the same time
RANGE = 16  # maximum number of chunks in one request for a payload
RANGES_AT_LEAST = 32  # minimum number of requests for one payload, if it has enough chunks, so that donors share them
DIGESTS_TIMEOUT = 60.0  # seconds for a donor to send the digests of a payload's chunks
STAGGER = 3.0  # seconds without the digests of a payload's chunks after which another donor is asked, too

PROOF = "proof"
PROOF_READERS = 4  # maximum number of requests for proofs that this peer answers at the same time; each uses up to 1 MB
PROOF_TIMEOUT = 60.0  # seconds for an answer with a proof: 1 MB at 1 Mbit/s takes 8, and the donor may be in a round
AT_ONCE = 16  # maximum number of proofs that one `MissingProofs.fetch` requests
ASKED = 4  # maximum number of peers that one `MissingProofs.fetch` asks for the same proof
TIMES = 4  # maximum requests to one peer for a proof; later ones may succeed, because a peer may have been busy
PATIENCE = 16  # number of peers that failed TIMES times to send a proof, after which the proof is given up


class PayloadRequest(Value):
    """A request for the chunks [first, last) of a fragment's payload. If that range is empty, the request is for the
    digests of all chunks."""

    run: RunId
    fragment: Count
    payload: Digest
    first: Count
    last: Count


class PayloadError(Exception):
    """Error: a payload is not available from the peers that should have it."""


async def serve_payloads(transport: PullTransport, kept: Mapping[str, Sequence[PayloadBuffers]]) -> None:
    """Begin to answer requests for kept payloads. `kept` has the buffers of each fragment, by run."""
    places = Places(READERS, PULLS)

    @asynccontextmanager
    async def serve(sender: str, packed: bytes) -> AsyncIterator[tuple[bytes, Buffer]]:
        request = unpack_from(sender, PayloadRequest, packed)
        fragments = kept_for(transport, kept, request.run, sender)
        buffers = fragments[request.fragment] if request.fragment < len(fragments) else None
        payload = await asyncio.to_thread(buffers.find, request.payload) if buffers else None
        if buffers is None or payload is None:
            raise RefusalError("that payload is not kept here")
        async with places.one_for(sender):
            if request.first >= request.last:
                yield b"", b"".join(payload.chunk_digests)
            elif request.last > buffers.size.chunks:
                raise RemoteProtocolError(sender, f"there is no chunk {request.last - 1} in a payload")
            else:
                start, stop = buffers.chunks_bytes(request.first, request.last)
                yield b"", payload.data[start:stop]

    await transport.on_pull(PAYLOAD, serve, gives_way=True)


class Payloads:
    """The fetcher of one run's payloads."""

    def __init__(self, transport: PullTransport, run: str, buffers: Sequence[PayloadBuffers]) -> None:
        self._transport = transport
        self._run = run
        self._buffers = buffers
        self._fetches: WeakValueDictionary[bytes, asyncio.Lock] = WeakValueDictionary()

    async def fetch(self, header: Header, donors: Sequence[str]) -> ChunkedPayload:
        """Return the payload of an entry and keep it in the buffers. Fetch it from the donors if it is not there.
        Raises: PayloadError when no donor has all of it."""
        async with self._fetches.setdefault(header.payload, asyncio.Lock()):
            buffers = self._buffers[header.fragment]
            payload = await asyncio.to_thread(buffers.find, header.payload)
            payload = payload or await self._fetch(buffers, header.payload, donors)
            buffers.kept.keep(payload)
            return payload

    async def _fetch(self, buffers: PayloadBuffers, payload: bytes, donors: Sequence[str]) -> ChunkedPayload:
        fragment, chunks = buffers.fragment, buffers.size.chunks
        digests, donors = await self._digests(buffers, payload, donors)
        wanted = Wanted(
            name=PAYLOAD,
            digests=digests,
            bounds=buffers.chunks_bytes,
            request=lambda first, last: self._request(fragment, payload, first, last),
            range=max(1, min(RANGE, chunks // RANGES_AT_LEAST)),
        )
        data = buffers.room_for_fetch()
        download = Download(self._transport, wanted, data)
        await download.adopt()
        try:
            await download.run(donors)
        except DownloadError as error:
            raise PayloadError(str(error)) from error
        return ChunkedPayload(data, digests)

    def _request(self, fragment: int, payload: bytes, first: int, last: int) -> bytes:
        request = PayloadRequest(run=self._run, fragment=fragment, payload=payload, first=first, last=last)
        return pack(request)

    async def _digests(
        self, buffers: PayloadBuffers, payload: bytes, donors: Sequence[str]
    ) -> tuple[tuple[bytes, ...], list[str]]:
        """Fetch the digests of the payload's chunks. Return them and the donors to ask for the chunks, slow ones last.

        Another donor is asked every few seconds, so that no slow one holds up the rest. Raises: PayloadError.
        """
        waiting = deque(shuffled(self._transport, donors))
        asking: dict[asyncio.Task[tuple[bytes, ...]], str] = {}
        reasons = []
        try:
            while waiting or asking:
                if waiting:
                    donor = waiting.popleft()
                    asking[asyncio.create_task(self._ask_digests(buffers, donor, payload))] = donor
                done, _ = await asyncio.wait(
                    asking, timeout=STAGGER if waiting else None, return_when=asyncio.FIRST_COMPLETED
                )
                for answer in done:
                    donor = asking.pop(answer)
                    try:
                        return answer.result(), [donor, *waiting, *asking.values()]
                    except (PeerUnreachableError, RemoteProtocolError) as error:
                        reasons.append(str(error))
        finally:
            await cancel_and_wait(*asking)
        raise PayloadError("; ".join(reasons) or "there was no peer to ask for the payload")

    async def _ask_digests(self, buffers: PayloadBuffers, donor: str, payload: bytes) -> tuple[bytes, ...]:
        """Fetch the digests of a payload's chunks from a donor. Raises: PeerUnreachableError; RemoteProtocolError when
        the digests do not match the payload's digest."""
        count, request = buffers.size.chunks, self._request(buffers.fragment, payload, 0, 0)
        _, packed = await self._transport.pull(donor, PAYLOAD, request, DIGEST_BYTES * count, DIGESTS_TIMEOUT)
        return chunks_of(donor, PAYLOAD, packed, count, payload)


# Proofs ---------------------------------------------------------------------------------------------------------------
class ProofRequest(Value):
    """A request for the proof of a fault. `proof` is the proof's digest, as in the entry that notes the fault."""

    run: RunId
    proof: Digest


async def serve_proofs(transport: PullTransport, logs: Mapping[str, RunLog]) -> None:
    """Begin to answer requests for the proofs of faults in the logs of these runs."""
    places = Places(PROOF_READERS, 1)

    @asynccontextmanager
    async def serve(sender: str, packed: bytes) -> AsyncIterator[tuple[bytes, Buffer]]:
        request = unpack_from(sender, ProofRequest, packed)
        log = kept_for(transport, logs, request.run, sender)
        async with places.one_for(sender):
            proof = await asyncio.to_thread(log.proof, request.proof)
            if proof is None:
                raise RefusalError("that proof is not kept here")
            yield b"", proof

    await transport.on_pull(PROOF, serve, gives_way=True)


class MissingProofs:
    """The fetcher of the proofs that a log on the disk does not have yet. A log in memory needs no proofs."""

    def __init__(self, transport: PullTransport, log: RunLog) -> None:
        self._transport = transport
        self._log = log
        self._missing: dict[bytes, None] = {}
        self._asked: defaultdict[bytes, Counter[str]] = defaultdict(Counter)  # failed requests for each proof, by peer
        self._looked = (0, 0, b"")  # the cycles [first, stop) that were searched, and the head of the log after them
        self._turn = asyncio.Lock()

    def look(self) -> None:
        """Search the entries that were added to either end of the log since the last call. Record the proofs that they
        name and that are not on this disk."""
        log, (first, stop, head) = self._log, self._looked
        if not log.is_on_disk:
            return
        if log.heads(stop - 1, stop) != [head]:  # the log has changed to another branch, so all of it is searched
            first = stop = log.next_index
        faults = [*log.faults(log.first, first), *log.faults(stop, log.next_index)]
        proofs = [fault.proof for fault in faults]
        self._missing |= dict.fromkeys(proof for proof in proofs if not log.has_proof(proof))
        self._looked = log.first, log.next_index, b"".join(log.heads(log.next_index - 1, log.next_index))

    async def fetch(self, donors: Collection[str]) -> None:
        """Fetch some of the missing proofs. Do nothing if another call is still fetching."""
        if self._turn.locked():
            return
        async with self._turn:
            for proof in list(self._missing)[:AT_ONCE]:
                asked = self._asked[proof]
                donors_left = [donor for donor in shuffled(self._transport, donors) if asked[donor] < TIMES]
                for donor in donors_left[:ASKED]:
                    if await self._fetch(proof, donor):
                        break

    async def _fetch(self, proof: bytes, donor: str) -> bool:
        """Ask one peer for a proof, and store it. Return True if no other peer need be asked, because the proof was
        stored or is given up."""
        try:
            request = pack(ProofRequest(run=self._log.empty_log.run, proof=proof))
            _, data = await self._transport.pull(donor, PROOF, request, PROOF_LIMIT, PROOF_TIMEOUT)
            if digest_of(data) != proof:
                raise RemoteProtocolError(donor, "it sent another proof than the requested one")
            await asyncio.to_thread(self._log.keep_proofs, [bytes(data)])
        except (PeerUnreachableError, RemoteProtocolError):
            asked = self._asked[proof]
            asked[donor] += 1
            if sum(times == TIMES for times in asked.values()) < PATIENCE:
                return False
        except LogFolderError as error:
            logger.warning("a proof of a fault cannot be stored: %s", error)
        del self._missing[proof], self._asked[proof]
        return True
