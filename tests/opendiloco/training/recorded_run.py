"""A run that was recorded without a swarm: headers and payloads, and the states that real kernels make of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from opendiloco import kernels
from opendiloco.config.overrides import Overrides
from opendiloco.config.run_config import RunConfig
from opendiloco.kernels import quantize_difference
from opendiloco.run import Run
from opendiloco.shared_memory import Vector
from opendiloco.training.codec import BLOCK_VALUES, BlockCodec
from opendiloco.training.outer import OuterState
from peers.log.certificate import Certificate
from peers.log.folder import RunLog
from peers.log.header import Header, Member
from peers.log.state import LogState
from peers.transfer.snapshots import Snapshot
from peers.values.chunks import ChunkedPayload
from peers.values.identity import Identity
from peers.values.leases import SampleRange
from peers.values.manifest import Amendment
from tests.peers import logs
from tests.peers.logs import next_header

BLOCK_BYTES = kernels.INT8.payload_size(BLOCK_VALUES)
IDENTITIES = tuple(Identity(Ed25519PrivateKey.from_private_bytes(bytes([number]) * 32)) for number in range(2))
PEERS = tuple(identity.peer_id for identity in IDENTITIES)
NO_AMENDMENTS: Mapping[int, Amendment] = {}


@dataclass
class RecordedRun:
    """`states[k]` is the checkpoint after k entries."""

    run: Run
    headers: list[Header] = field(default_factory=list)
    certificates: list[Certificate] = field(default_factory=list)
    payloads: list[ChunkedPayload] = field(default_factory=list)
    states: list[Snapshot] = field(default_factory=list)

    @property
    def empty_log(self) -> LogState:
        return self.run.settings.empty_log

    def fill(self, log: RunLog, first: int = 0) -> None:
        """Append the entries from `first` on."""
        for index in range(first, len(self.headers)):
            state_digest = self.states[index + 1].state_digest
            log.append(self.headers[index], state_digest, self.payloads[index], self.certificates[index])


def record(
    run: Run, theta: Vector, entries: int, seed: int = 1, amendments: Mapping[int, Amendment] = NO_AMENDMENTS
) -> RecordedRun:
    """Entries with random payloads, applied to this theta, which is left as it is. Some take in `amendments`."""
    random = np.random.default_rng(seed)
    recorded = RecordedRun(run)
    state = OuterState(theta.copy(), run.config.outer_optimizer)
    codec = BlockCodec(kernels.FORMATS[run.config.codec.kind], theta.size)
    log = recorded.empty_log
    recorded.states.append(saved(state, None))
    for index in range(entries):
        average = codec.empty_payload()
        quantize_difference(random.normal(size=theta.size).astype(np.float32), np.zeros_like(theta), average)
        payload = ChunkedPayload.cut(memoryview(bytes(average)), BLOCK_BYTES)
        log = log.in_state(recorded.states[-1].state_digest)
        header = next_header(log, roster(run.config, log), payload.digest, amendment=amendments.get(index))
        recorded.certificates.append(certificate(log, header))
        state.apply(average, index, overrides=Overrides.of(log.amendment, run.config))
        log = log.append(header)
        recorded.headers.append(header)
        recorded.payloads.append(payload)
        recorded.states.append(saved(state, header))
    return recorded


def amendment(run: Run, number: int, by: Identity, **values: object) -> Amendment:
    """Return an amendment that sets these values."""
    return Amendment.sign(run.run_id, number, Overrides.model_validate(values).content, by)


def certificate(log: LogState, header: Header, signers: Sequence[Identity] = IDENTITIES) -> Certificate:
    """Return the certificate of an entry that these peers have signed; one alone is a minority."""
    by = [identity.peer_id for identity in signers]
    return logs.certificate(log, header, by, sign=lambda peer, text: IDENTITIES[PEERS.index(peer)].sign(text))


def roster(config: RunConfig, log: LogState) -> list[Member]:
    size = log.samples_per_lease
    first = {peer: (SampleRange(place * size, (place + 1) * size),) for place, peer in enumerate(PEERS)}
    leases = log.leases or first
    tokens = size * config.training.sequence_length
    return [Member(peer=peer, tokens=tokens, samples=leases[peer]) for peer in PEERS]


def saved(state: OuterState, last: Header | None) -> Snapshot:
    return Snapshot(last, state.digest(), (), memoryview(b"".join(state.vectors)))
