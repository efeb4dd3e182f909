"""What two peers say to each other in an exchange of gossip."""

from __future__ import annotations

import zlib
from typing import Annotated, NamedTuple, Self

from pydantic import Field

from peers.errors import RemoteProtocolError
from peers.presence.heartbeat import LINK_BYTES, SIZE_LIMIT
from peers.presence.life_signs import SIGN, SLOTS, TAG_BYTES, LifeSign, pack_signs, unpack_signs
from peers.values.wire import PROTOCOL_VERSION, Count, RunId, Value, WireError, pack, unpack, unpack_from

SIGNS_LIMIT = 4096  # signs of life in one message
HEARTBEATS_LIMIT = 64  # whole heartbeats that one message asks for
WHOLES_LIMIT = HEARTBEATS_LIMIT + 1  # in one message: those that were asked for, and the sender's own
WHOLES_BYTES = WHOLES_LIMIT * (SIZE_LIMIT + 64)  # of them together, before they are made smaller
NEWS_BYTES = SIGNS_LIMIT * SIGN.size + HEARTBEATS_LIMIT * TAG_BYTES + WHOLES_BYTES + 1024

Signs = Annotated[bytes, Field(strict=True, max_length=SIGNS_LIMIT * SIGN.size)]
Tags = Annotated[bytes, Field(strict=True, max_length=HEARTBEATS_LIMIT * TAG_BYTES)]


class Whole(Value):
    """A signed heartbeat, and the newest link of its chain (`slots` 0: there is none yet)."""

    signed: Annotated[bytes, Field(strict=True, max_length=SIZE_LIMIT)]
    slots: Annotated[int, Field(strict=True, ge=0, le=SLOTS)]
    link: Annotated[bytes, Field(strict=True, max_length=LINK_BYTES)]


class Wholes(Value):
    wholes: Annotated[tuple[Whole, ...], Field(max_length=WHOLES_LIMIT)]


class PackedNews(Value):
    """`News` as it crosses the network."""

    upto: Count
    is_cut: Annotated[bool, Field(strict=True)]
    signs: Signs
    asked: Tags
    wholes: Annotated[bytes, Field(strict=True, max_length=WHOLES_BYTES)]  # zlib: a third of the bytes, of many a fifth


class News(NamedTuple):
    """What one peer tells another one. With it all of the sender's numbers up to `upto` are told.

    `is_cut`: there is more. `asked` are the tags of chains whose newest heartbeat the sender wants to have.
    """

    upto: int
    is_cut: bool = False
    signs: tuple[LifeSign, ...] = ()
    asked: tuple[bytes, ...] = ()
    wholes: tuple[Whole, ...] = ()

    @property
    def packed(self) -> PackedNews:
        return PackedNews(
            upto=self.upto,
            is_cut=self.is_cut,
            signs=pack_signs(self.signs),
            asked=b"".join(self.asked),
            wholes=zlib.compress(pack(Wholes(wholes=self.wholes)), 1) if self.wholes else b"",
        )

    @property
    def size(self) -> int:
        """Return about how many bytes it takes to hear this."""
        return SIGN.size * len(self.signs) + TAG_BYTES * len(self.asked) + sum(len(one.signed) for one in self.wholes)

    def pack(self) -> bytes:
        return pack(self.packed)

    @classmethod
    def unpack(cls, sender: str, data: bytes) -> Self:
        """Raises: RemoteProtocolError."""
        return cls.of(sender, unpack_from(sender, PackedNews, data, NEWS_BYTES))

    @classmethod
    def of(cls, sender: str, packed: PackedNews) -> Self:
        """Raises: RemoteProtocolError."""
        if len(packed.asked) % TAG_BYTES:
            raise RemoteProtocolError(sender, f"{len(packed.asked)} bytes are no whole number of tags")
        asked = tuple(packed.asked[at : at + TAG_BYTES] for at in range(0, len(packed.asked), TAG_BYTES))
        try:
            wholes = unpack(Wholes, _inflated(packed.wholes), WHOLES_BYTES).wholes if packed.wholes else ()
            return cls(packed.upto, packed.is_cut, tuple(unpack_signs(packed.signs)), asked, wholes)
        except ValueError as error:  # which a WireError is, too
            raise RemoteProtocolError(sender, str(error)) from error


class Request(Value):
    """Asks for what came after number `after` of whoever answers, and tells what its sender knows."""

    version: Count = PROTOCOL_VERSION
    run: RunId
    after: Count
    news: PackedNews

    @classmethod
    def unpack(cls, sender: str, data: bytes) -> Self:
        """Raises: RemoteProtocolError, also for a request of another protocol version."""
        request = unpack_from(sender, cls, data, NEWS_BYTES + 256)
        if request.version != PROTOCOL_VERSION:
            raise RemoteProtocolError(sender, f"its protocol version is {request.version}, ours is {PROTOCOL_VERSION}")
        return request


def _inflated(data: bytes) -> bytes:
    """Raises: WireError when it is not zlib's, or too large."""
    inflating = zlib.decompressobj()
    try:
        plain = inflating.decompress(data, WHOLES_BYTES)
    except zlib.error as error:
        raise WireError(f"heartbeats that zlib cannot read: {error}") from error
    if not inflating.eof or inflating.unused_data:
        raise WireError(f"heartbeats of more than {WHOLES_BYTES} bytes, or cut off")
    return plain
