"""The signed heartbeat of a peer, with all that the peer reports about itself. Beats (beats.py) are sent in between."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from functools import lru_cache
from ipaddress import ip_address
from typing import Annotated

from pydantic import AfterValidator, Field

from peers.errors import RemoteProtocolError
from peers.values.identity import SIGNATURE_BYTES, Identity, Signature, verify
from peers.values.manifest import Amendment
from peers.values.signed_heads import SignedHead
from peers.values.tickets import SHOWN_BYTES
from peers.values.wire import (
    NICKNAME,
    NICKNAME_LENGTH,
    PROTOCOL_VERSION,
    Count,
    Digest,
    PeerId,
    Reason,
    RunId,
    Value,
    WireError,
    decode,
    from_plain,
    pack,
    unpack,
)

SIZE_LIMIT = 6144  # maximum size of a signed heartbeat, in bytes
ADDRESS_LENGTH = 256  # maximum number of characters of an address; a relayed address names two peers
ENDPOINT_LENGTH = 64  # maximum number of characters of an endpoint
NAMED_PEERS = 16  # maximum number of peers that a heartbeat names for each kind of reachability
TAIL = 8  # number of last characters of a peer's id by which a heartbeat names it
DEFAULT_LIFETIME = 30.0  # seconds for which a heartbeat is valid
SIGNING_CONTEXT = b"diloco-peer heartbeat\0"  # signed with each heartbeat, to exclude signatures for other purposes
UNKNOWN_PEER = "unknown"

Rate = Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)]
Loss = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Address = Annotated[str, Field(strict=True, min_length=1, max_length=ADDRESS_LENGTH, pattern=r"^/[!-~]+$")]
ENDPOINT = r"^(\d+\.\d+\.\d+\.\d+|\[[0-9a-f:.]+\]):\d+$"


def _dialable(endpoint: str) -> str:
    host, _, port = endpoint.rpartition(":")
    ip_address(host.strip("[]"))
    if not 0 < int(port) < 1 << 16:
        raise ValueError(f"there is no port {port}")
    return endpoint


Endpoint = Annotated[str, Field(strict=True, max_length=ENDPOINT_LENGTH, pattern=ENDPOINT), AfterValidator(_dialable)]
"""An IP address and a TCP port: 203.0.113.5:31338 or [2001:db8::5]:31338."""
Tail = Annotated[str, Field(strict=True, min_length=TAIL, max_length=TAIL, pattern=r"^[A-Za-z0-9]+$")]
Nickname = Annotated[str, Field(strict=True, max_length=NICKNAME_LENGTH, pattern=NICKNAME)]
"""The nickname of a team, or of a peer."""
Tails = Annotated[tuple[Tail, ...], Field(max_length=NAMED_PEERS)]


def name_peers(peers: Iterable[str]) -> tuple[str, ...]:
    """Return the sorted tails of peer ids, by which heartbeats name peers: at most NAMED_PEERS."""
    return tuple(sorted(peer[-TAIL:] for peer in peers)[:NAMED_PEERS])


class PeerState(StrEnum):
    """The activity of a peer, as others see it. ARCHIVING: it keeps the log and takes no part in rounds. Only the
    owner's own displays show STARTING, because a peer sends no heartbeat before its worker is ready."""

    STARTING = "starting"
    JOINING = "joining"
    TRAINING = "training"
    READY = "ready"
    AVERAGING = "averaging"
    LEAVING = "leaving"
    ARCHIVING = "archiving"


class SignedHeartbeat(Value):
    """A packed heartbeat and its peer's signature."""

    payload: Annotated[bytes, Field(strict=True, max_length=SIZE_LIMIT)]
    signature: Signature


class HeldOutLoss(Value):
    """The loss of theta on held-out text after `index` entries, in nats per token."""

    index: Count
    loss: Loss


class Heartbeat(Value):
    """A report of one peer's state in one run at one moment.

    `index` and `head` are its position in the log, `state_digest` is that of theta and momentum there. `loss` is that
    of the inner step under way (None: not known). `speed` is that of its last training in tokens a second, also while
    it does not train. `held_out` is the result of its last evaluation of theta.

    `view` is its view at its place in the log. It `leads` unless its own links reach too few peers (R1).

    `endpoints` are where bulk connections to it may be dialled, `relays` the addresses of nodes that can introduce it
    to others and pass bytes on. `relayed` and `unreached` name the peers that it reaches only so, or not at all.
    `trouble` is the reason why its work does not count at present, with the remedy; empty if it counts. A peer that
    leaves has cast no vote from index `departure` on; `farewell` is its signature of that `Departure`.

    In a run by invitation its `ticket` is the packed `ShownTicket` that admits it, and `revocations` the number of the
    newest list of revoked tickets that it has. `signed` is the last head of the log that it has signed, as one of the
    run's archives. `team` is the team that its work counts for, and `name` its nickname; both are its own choice.

    `amendment` is the organiser's that is in force at its position, `proposed` a newer one that it knows.
    """

    version: Count = PROTOCOL_VERSION
    run: RunId
    peer: PeerId
    incarnation: Count
    sequence: Count  # milliseconds since the epoch on the peer's clock; grows with every heartbeat
    lifetime: Annotated[float, Field(strict=True, gt=0, le=600, allow_inf_nan=False)] = DEFAULT_LIFETIME  # seconds
    state: PeerState
    index: Count
    head: Digest
    state_digest: Digest
    lineage_tokens: Count
    inner_step: Count
    tokens_per_second: Rate
    loss: Loss | None
    speed: Rate
    addresses: tuple[Address, ...] = Field(max_length=8)
    roster_size: Count
    held_out: HeldOutLoss | None = None
    endpoints: Annotated[tuple[Endpoint, ...], Field(max_length=8)] = ()
    relays: Annotated[tuple[Address, ...], Field(max_length=3)] = ()
    relayed: Tails = ()
    unreached: Tails = ()
    view: Count = 0
    leads: Annotated[bool, Field(strict=True)] = True
    trouble: Reason = ""
    departure: Count = 0
    farewell: Annotated[bytes, Field(strict=True, max_length=SIGNATURE_BYTES)] = b""
    ticket: Annotated[bytes, Field(strict=True, max_length=SHOWN_BYTES)] = b""
    revocations: Count = 0
    signed: SignedHead | None = None
    team: Nickname = ""
    name: Nickname = ""
    amendment: Amendment | None = None
    proposed: Amendment | None = None
    start: Count = 0

    @property
    def life(self) -> tuple[int, int]:
        """The incarnation and the number of the process's start. No two machines with the same key share this pair."""
        return self.incarnation, self.start

    @property
    def expires(self) -> float:
        """The end of the heartbeat's lifetime, in seconds since the epoch. It is signed, so no peer can change it."""
        return self.sequence / 1000 + self.lifetime

    def repeats(self, earlier: Heartbeat) -> bool:
        """Return True if this heartbeat equals the earlier one in all but the sequence."""
        return self.__dict__ | {"sequence": earlier.sequence} == earlier.__dict__

    def sign(self, identity: Identity) -> bytes:
        """Return the packed SignedHeartbeat, at most SIZE_LIMIT bytes. Raises: ValueError for another's heartbeat."""
        if identity.peer_id != self.peer:
            raise ValueError(f"{identity.peer_id} cannot sign a heartbeat of {self.peer}")
        payload = pack(self)
        return pack(SignedHeartbeat(payload=payload, signature=identity.sign(SIGNING_CONTEXT + payload)))

    @classmethod
    def verify(cls, data: bytes, run_id: str | None = None) -> Heartbeat:
        """Return the heartbeat in a packed SignedHeartbeat. Check its signature and, if `run_id` is given, its run.

        Raises: RemoteProtocolError, which names the check that failed.
        """
        if len(data) > SIZE_LIMIT:
            raise RemoteProtocolError(UNKNOWN_PEER, f"a heartbeat of {len(data)} bytes exceeds {SIZE_LIMIT}")
        heartbeat = _open(data)
        if run_id is not None and heartbeat.run != run_id:
            raise RemoteProtocolError(heartbeat.peer, f"its heartbeat is about run {heartbeat.run}, not {run_id}")
        return heartbeat


@lru_cache(maxsize=4096)  # the DHT hands each heartbeat to us several times; a signature costs 0.1 ms to check
def _open(data: bytes) -> Heartbeat:
    try:
        envelope = unpack(SignedHeartbeat, data, SIZE_LIMIT)
        plain = decode(envelope.payload, SIZE_LIMIT)
        if isinstance(plain, list) and plain and isinstance(plain[0], int) and plain[0] != PROTOCOL_VERSION:
            raise WireError(f"its protocol version is {plain[0]}, ours is {PROTOCOL_VERSION}")
        heartbeat = from_plain(Heartbeat, plain)
    except WireError as error:
        raise RemoteProtocolError(UNKNOWN_PEER, f"not a heartbeat: {error}") from error
    if not verify(heartbeat.peer, SIGNING_CONTEXT + envelope.payload, envelope.signature):
        raise RemoteProtocolError(heartbeat.peer, "the signature of its heartbeat is not by its own key")
    return heartbeat
