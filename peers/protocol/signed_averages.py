"""An average as its reducer has signed it: as chunks carry it, and as it is shown to others."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from peers.log.header import MEMBER_LIMIT
from peers.values.identity import Signature
from peers.values.wire import MESSAGE_LIMIT, Count, Digest, PeerId, Value

Marks = Annotated[bytes, Field(strict=True, max_length=MESSAGE_LIMIT // 2)]
"""A few bytes for each chunk, which tell averages from others."""


class Origin(Value):
    """Who averaged a chunk, and its signature of what came out."""

    reducer: PeerId
    signature: Signature


class Averaged(Value):
    """What a reducer has signed of a chunk: its digest, and whose blocks are absent from it."""

    chunk: Count
    digest: Digest
    absent: Annotated[tuple[PeerId, ...], Field(max_length=MEMBER_LIMIT)]
    origin: Origin
