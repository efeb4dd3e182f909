"""What proves the faults that annexes name: served to peers that have an entry without it, and fetched by them.

Whoever signs an entry has seen the proofs of its annex. Whoever takes it over later has not: it joined, followed, or
keeps an archive. An entry names its proofs by their digests, so they may come from anybody.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import asynccontextmanager

from peers.errors import RemoteProtocolError
from peers.log.folder import LogFolderError, RunLog
from peers.network.channel import PeerUnreachableError, Places, RefusalError
from peers.protocol.faults import PROOF_LIMIT
from peers.transfer.download import PullTransport, kept_for, shuffled
from peers.values.wire import Buffer, Digest, RunId, Value, digest_of, pack, unpack_from

logger = logging.getLogger(__name__)

PROOF = "proof"
READERS = 4  # pulls that are served at once; each takes up to a megabyte meanwhile
PULLS = 1  # of one peer at once
TIMEOUT = 60.0  # seconds for an answer: a megabyte at 1 Mbit/s takes 8, and the donor may be in a round
AT_ONCE = 16  # proofs that are asked for after an entry
ASKED = 4  # peers that are asked for one of them
TIMES = 4  # that one peer is asked for a proof: it may have had no place, or have got it since
PATIENCE = 16  # peers without it after which a proof is not asked for any more


class ProofRequest(Value):
    """The proof with this digest, which an entry's annex names."""

    run: RunId
    proof: Digest


async def serve_proofs(transport: PullTransport, logs: Mapping[str, RunLog]) -> None:
    """Give the proofs that are kept of these runs to whoever asks, from now on."""
    places = Places(READERS, PULLS)

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


async def _fetch_proof(transport: PullTransport, donor: str, run: str, proof: bytes) -> bytes:
    """Fetch the proof with this digest. Raises: PeerUnreachableError, RemoteProtocolError."""
    request = pack(ProofRequest(run=run, proof=proof))
    _, data = await transport.pull(donor, PROOF, request, PROOF_LIMIT, TIMEOUT)
    if digest_of(data) != proof:
        raise RemoteProtocolError(donor, "it has another proof")
    return bytes(data)


class MissingProofs:
    """Finds the proofs that a log on the disk lacks, and fetches them. Nobody looks for those of a log in memory."""

    def __init__(self, transport: PullTransport, log: RunLog) -> None:
        self._transport = transport
        self._log = log
        self._lacking: dict[bytes, None] = {}
        self._asked: defaultdict[bytes, Counter[str]] = defaultdict(Counter)  # by proof: whom in vain, and how often
        self._looked = (0, 0, b"")  # at entries [first, stop) of the lineage with this digest at its end
        self._turn = asyncio.Lock()

    def look(self) -> None:
        """Note what lacks of the entries that have come since the last look: after those that were here, or before."""
        log, (first, stop, head) = self._log, self._looked
        if not log.is_on_disk:
            return
        if log.heads(stop - 1, stop) != [head]:  # another lineage
            first = stop = log.next_index
        faults = [*log.faults(log.first, first), *log.faults(stop, log.next_index)]
        proofs = [fault.proof for fault in faults]
        self._lacking |= dict.fromkeys(proof for proof in proofs if not log.has_proof(proof))
        self._looked = log.first, log.next_index, b"".join(log.heads(log.next_index - 1, log.next_index))

    async def fetch(self, donors: Collection[str]) -> None:
        """Fetch a few of those that lack, unless that is under way."""
        if self._turn.locked():
            return
        async with self._turn:
            for proof in list(self._lacking)[:AT_ONCE]:
                asked = self._asked[proof]
                left = [donor for donor in shuffled(self._transport, donors) if asked[donor] < TIMES]
                for donor in left[:ASKED]:
                    if await self._fetch(proof, donor):
                        break

    async def _fetch(self, proof: bytes, donor: str) -> bool:
        """Ask one peer for a proof. Returns whether none is to be asked for it now."""
        try:
            data = await _fetch_proof(self._transport, donor, self._log.empty_log.run, proof)
            await asyncio.to_thread(self._log.keep_proofs, [data])
        except (PeerUnreachableError, RemoteProtocolError):
            asked = self._asked[proof]
            asked[donor] += 1
            if sum(times == TIMES for times in asked.values()) < PATIENCE:
                return False
        except LogFolderError as error:
            logger.warning("a proof is not kept: %s", error)
        del self._lacking[proof], self._asked[proof]
        return True
