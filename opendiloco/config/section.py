"""What all tables of `run.toml` are made of: strict sections, and numbers with bounds."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from peers.values.identity import is_peer_id


def _check_digest(value: str) -> str:
    if not re.fullmatch("[0-9a-f]{64}", value):
        raise PydanticCustomError("digest", "not 64 hexadecimal digits in lower case")
    return value


def _check_peer_id(value: str) -> str:
    if not is_peer_id(value):
        raise PydanticCustomError("peer_id", "not a peer id")
    return value


# The bounds are far beyond what makes sense, and keep every number that is made of these within what the wire, fp32 and
# the clocks can carry: a manifest may come from a stranger.
LARGEST = 1e30
VALUES_LIMIT = 10**12
Positive = Annotated[int, Field(ge=1, le=1_000_000)]
StepCount = Annotated[int, Field(ge=0, le=10**9)]
ValueCount = Annotated[int, Field(ge=1, le=VALUES_LIMIT)]
TokenCount = Annotated[int, Field(ge=0, le=10**15)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
PositiveFloat = Annotated[float, Field(ge=1e-30, le=LARGEST)]
NotNegativeFloat = Annotated[float, Field(ge=0, le=LARGEST)]
Seconds = Annotated[float, Field(ge=0.1, le=86_400)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Name = Annotated[str, Field(min_length=1)]
# The formats are what the reference page calls them.
Digest = Annotated[str, AfterValidator(_check_digest), WithJsonSchema({"type": "string", "format": "digest"})]
PeerName = Annotated[str, AfterValidator(_check_peer_id), WithJsonSchema({"type": "string", "format": "peer id"})]


class Section(BaseModel):
    """One table of `run.toml`: no unknown keys, no silent conversions, no changes afterwards."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)
