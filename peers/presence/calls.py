"""Calls by which peers show that they are live: their names, payloads and answers (R20)."""

from __future__ import annotations

import zlib
from functools import lru_cache
from typing import Annotated, Self

from pydantic import Field

from peers.errors import RemoteProtocolError
from peers.presence.heartbeat import SIZE_LIMIT, Heartbeat, PeerState, Rate
from peers.values.wire import PROTOCOL_VERSION, Count, RunId, Value, WireError, digest_of, pack, unpack, unpack_from

BEAT, HEARTBEAT, WHO = "beat", "heartbeat", "who"
"""Names of the calls. Their payloads: a Beat; a tag of the run and a signed heartbeat; a Request. The first two are
answered by an Answer, the last by a Page."""
BEAT_BYTES = 100  # maximum size of a packed Beat, in bytes
SHORT = 8  # number of first bytes of a digest that replace it where a collision does no harm
PAGE = 64  # maximum number of heartbeats in a Page
KNOWN_LIMIT = 4096  # maximum number of peers that a Request names
PAGE_BYTES = PAGE * (SIZE_LIMIT + 64)  # maximum size of a Page before compression, in bytes
REQUEST_BYTES = KNOWN_LIMIT * SHORT + 1024  # maximum bytes of a packed Request: tags of peers, and its other fields
ANSWER_BYTES = 2 * SIZE_LIMIT + 1024  # maximum size of a packed Answer, in bytes: two heartbeats and a beat

Short = Annotated[bytes, Field(strict=True, min_length=SHORT, max_length=SHORT)]
Signed = Annotated[bytes, Field(strict=True, min_length=1, max_length=SIZE_LIMIT)]


@lru_cache(maxsize=4096)
def tag_of(name: str) -> bytes:
    """Return the tag of a run's or peer's id: the first SHORT bytes of its digest."""
    return digest_of(name.encode())[:SHORT]


class Beat(Value):
    """A peer's short message between two signed heartbeats. `run` is a tag of the run's id, and `head` has the first
    SHORT bytes of the head; the other fields are as in a Heartbeat."""

    run: Short
    sequence: Count
    incarnation: Count
    state: PeerState
    index: Count
    head: Short
    view: Count
    inner_step: Count
    speed: Rate
    leads: Annotated[bool, Field(strict=True)]

    @classmethod
    def of(cls, heartbeat: Heartbeat) -> Self:
        """Return a beat with the values of a heartbeat."""
        return cls(
            run=tag_of(heartbeat.run),
            sequence=heartbeat.sequence,
            incarnation=heartbeat.incarnation,
            state=heartbeat.state,
            index=heartbeat.index,
            head=heartbeat.head[:SHORT],
            view=heartbeat.view,
            inner_step=heartbeat.inner_step,
            speed=heartbeat.speed,
            leads=heartbeat.leads,
        )

    def goes_on(self, heartbeat: Heartbeat) -> bool:
        """Return True if the beat is at the same place in the log as a signed heartbeat of its peer. Return False if
        the peer is leaving, because a farewell needs a signature."""
        here = self.index == heartbeat.index and self.head == heartbeat.head[:SHORT]
        return here and PeerState.LEAVING not in (self.state, heartbeat.state)

    def added_to(self, heartbeat: Heartbeat) -> Heartbeat:
        """Return `heartbeat` with this beat's fields. If their places in the log differ, update only the sequence."""
        if not self.goes_on(heartbeat):
            return heartbeat.model_copy(update={"sequence": self.sequence})
        carried = {"state", "view", "inner_step", "speed", "leads", "sequence"}
        return heartbeat.model_copy(update={name: getattr(self, name) for name in carried})


class Answer(Value):
    """The answer to a beat or a signed heartbeat.

    `wants` asks for the other peer's signed heartbeat. `beat` is ours, for a peer that we do not beat to. `heartbeats`
    are our signed one, if the other peer may not have it, and one of another process with the other peer's key.
    """

    wants: Annotated[bool, Field(strict=True)]
    beat: Beat | None = None
    heartbeats: Annotated[tuple[Signed, ...], Field(max_length=2)] = ()


NOTHING_TO_SAY = b""
"""An empty Answer; as an answer to a Request it means that another peer should be asked."""


class Request(Value):
    """A request for heartbeats of the run's peers that the receiver hears. `known` has tags of peers to leave out:
    the first SHORT bytes of the digests of their ids."""

    version: Count = PROTOCOL_VERSION
    run: RunId
    known: Annotated[bytes, Field(strict=True, max_length=KNOWN_LIMIT * SHORT)]

    @classmethod
    def unpack(cls, sender: str, data: bytes) -> Self:
        """Return the request packed in `data`. Raises: RemoteProtocolError, also for another protocol version."""
        request = unpack_from(sender, cls, data, REQUEST_BYTES)
        if request.version != PROTOCOL_VERSION:
            raise RemoteProtocolError(sender, f"its protocol version is {request.version}, ours is {PROTOCOL_VERSION}")
        if len(request.known) % SHORT:
            raise RemoteProtocolError(sender, f"{len(request.known)} bytes are no whole number of tags")
        return request


class Page(Value):
    """Signed heartbeats of peers that the answering peer hears. If the page is full, the peer may hear more."""

    heartbeats: Annotated[tuple[Signed, ...], Field(max_length=PAGE)]

    def packed(self) -> bytes:
        """Return the page as bytes, compressed by zlib: one heartbeat shrinks to a third, many to a fifth."""
        return zlib.compress(pack(self), 1)

    @classmethod
    def unpack(cls, sender: str, data: bytes) -> Self:
        """Return the page packed in `data`. Raises: RemoteProtocolError."""
        inflating = zlib.decompressobj()
        try:
            plain = inflating.decompress(data, PAGE_BYTES)
            if not inflating.eof or inflating.unused_data:
                raise WireError(f"it has more than {PAGE_BYTES} bytes, or is cut off")
            return unpack(cls, plain, PAGE_BYTES)
        except (zlib.error, WireError) as error:
            raise RemoteProtocolError(sender, f"its page has no valid heartbeats: {error}") from error
