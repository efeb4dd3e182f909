"""Conversion of typed values to bytes and back, and types of fields that values share. All data from the network is
checked by `unpack`.

Values are pydantic models packed as msgpack arrays in field order: canonical (the same value always gives the same
bytes, so digests can be taken of them), bounded in size, and checked field by field. Never pickle.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import StrEnum
from functools import cache
from typing import Annotated, Any, Self, TypeAlias, TypeVar

import msgpack
from blake3 import blake3
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PlainValidator, ValidationError, model_validator

from peers.errors import RemoteProtocolError
from peers.values.leases import SampleRange

# increased when peers of the earlier version would misread new messages: the two versions cannot share a run
PROTOCOL_VERSION = 18
DIGEST_BYTES = 32  # bytes of a BLAKE3 digest
REASON_LIMIT = 500  # maximum characters of a text from a peer: `Reason` refuses longer ones, `printable` cuts them
LONGEST_WAIT = 30 * 86400.0  # maximum value of a time in a message: 30 days, in seconds
MESSAGE_LIMIT = 1 << 20  # maximum bytes of a message; a roster of 1,000 peers with their leases needs about 200 KB
NICKNAME_LENGTH = 32  # maximum characters of the name of a team or peer
NICKNAME = r"^([!-~]([ -~]*[!-~])?)?$"
"""Printable ASCII without spaces at its ends; may be empty."""


def _sample_range(plain: object) -> SampleRange:
    """Check a sample range from the network, and return it. pydantic would create each range anew, which would take
    most of the time for reading a member."""
    match plain:
        case [start, stop] if type(start) is int and type(stop) is int and 0 <= start < stop < 2**62:
            return plain if type(plain) is SampleRange else SampleRange(start, stop)
    raise ValueError("a sample range needs whole numbers 0 <= start < stop")


def printable(text: str) -> str:
    """Return a peer's text in a form that is safe for a terminal or a log: one line, without control characters, at
    most REASON_LIMIT characters."""
    return "".join(character if character.isprintable() else " " for character in text[:REASON_LIMIT])


Count = Annotated[int, Field(strict=True, ge=0, lt=2**62)]
Digest = Annotated[bytes, Field(strict=True, min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]
PeerId = Annotated[str, Field(strict=True, min_length=1, max_length=128, pattern=r"^[A-Za-z0-9]+$")]
RunId = Annotated[str, Field(strict=True, min_length=1, max_length=128, pattern=r"^[!-~]+$")]
Samples = Annotated[SampleRange, PlainValidator(_sample_range)]
Seconds = Annotated[float, Field(strict=True, gt=0, le=LONGEST_WAIT, allow_inf_nan=False)]
Reason = Annotated[str, Field(strict=True, max_length=REASON_LIMIT), AfterValidator(printable)]


@cache
def field_names(kind: type[BaseModel]) -> tuple[str, ...]:
    """Return the names of a model's fields in order. Cached, since pydantic collects them anew each time."""
    return tuple(kind.model_fields)


class Value(BaseModel):
    """The base class of all values that peers send over the network: immutable, without unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _from_list(cls, plain: object) -> object:
        if not isinstance(plain, list):
            return plain
        fields = field_names(cls)
        if len(plain) != len(fields):
            raise ValueError(f"needs {len(fields)} fields, has {len(plain)}")
        return dict(zip(fields, plain, strict=True))

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Return a copy with some fields changed, without cached properties, such as digests."""
        copied = super().model_copy(update=update, deep=deep)
        for name in copied.__dict__.keys() - set(field_names(type(self))):
            del copied.__dict__[name]
        return copied

    def __eq__(self, other: object) -> bool:
        """Return True if all fields are equal. pydantic's own comparison takes up to ten times as long, and peers
        compare the position of each message."""
        if self is other:
            return True
        if type(self) is not type(other):
            return NotImplemented
        mine, theirs = self.__dict__, other.__dict__
        if mine == theirs:
            return True
        fields = type(self).__pydantic_fields__
        if len(mine) == len(theirs) == len(fields):  # otherwise one of the values also has cached properties
            return False
        return all(mine.get(name) == theirs.get(name) for name in fields)


ValueT = TypeVar("ValueT", bound=Value)


Buffer: TypeAlias = bytes | bytearray | memoryview


def digest_of(data: Buffer) -> bytes:
    """Return the BLAKE3 digest of these bytes, 32 bytes."""
    return blake3(data).digest()


def _plain_fields(value: Value) -> list[object]:
    """Return the fields of a value in order; msgpack calls this function for objects that it cannot pack."""
    fields = value.__dict__
    return [fields[name] for name in field_names(type(value))]


def pack_plain(value: object) -> bytes:
    """Return the canonical msgpack bytes of plain values, and of `Value`s among them."""
    packed: bytes = msgpack.packb(value, default=_plain_fields, use_bin_type=True)
    return packed


def pack(value: Value) -> bytes:
    """Return the canonical msgpack bytes of a value."""
    return pack_plain(value)


class WireError(ValueError):
    """Error: bytes are not a value of the expected kind."""


def decode(data: bytes, limit: int = MESSAGE_LIMIT) -> Any:
    """Return the plain lists, numbers, strings and bytes in msgpack bytes. Raises: WireError."""
    if len(data) > limit:
        raise WireError(f"{len(data)} bytes exceed the limit of {limit}")
    try:
        return msgpack.unpackb(data, raw=False, strict_map_key=True)
    except (ValueError, msgpack.UnpackException, RecursionError) as error:
        raise WireError(f"not msgpack: {type(error).__name__}") from error


def from_plain(kind: type[ValueT], plain: object) -> ValueT:
    """Return a checked value of this kind from nested lists in field order. Raises: WireError naming the field."""
    try:
        return kind.model_validate(plain)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in (kind.__name__, *first["loc"]))
        raise WireError(f"{where}: {first['msg']}") from error


def unpack(kind: type[ValueT], data: bytes, limit: int = MESSAGE_LIMIT) -> ValueT:
    """Unpack bytes from the network, and return them as a checked value of this kind. Raises: WireError."""
    return from_plain(kind, decode(data, limit))


def unpack_from(peer: str, kind: type[ValueT], data: bytes, limit: int = MESSAGE_LIMIT) -> ValueT:
    """Unpack bytes that `peer` sent, and return them as a checked value of this kind. Raises: RemoteProtocolError."""
    try:
        return unpack(kind, data, limit)
    except WireError as error:
        raise RemoteProtocolError(peer, str(error)) from error


def check_nickname(name: str) -> None:
    """Raise ValueError unless this is a valid name of a team or peer."""
    if not name or len(name) > NICKNAME_LENGTH or not re.fullmatch(NICKNAME, name):
        raise ValueError(
            f"{name!r} is not a valid name of a team or peer: give 1 to {NICKNAME_LENGTH} printable ASCII characters,"
            " without spaces at its ends"
        )


class Reach(StrEnum):
    """The kind of connection over which two peers send bulk data; the same in both directions."""

    OPEN = "open"
    """One of the two can dial the other."""
    PUNCHED = "punched"
    """Both dialled at once, through their NATs."""
    RELAYED = "relayed"
    """A node that both can dial forwards the bytes, and cannot read them."""
    NONE = "none"
    """Every way was tried, and failed."""

    @property
    def is_direct(self) -> bool:
        return self in (Reach.OPEN, Reach.PUNCHED)
