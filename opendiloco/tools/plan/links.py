"""`links.toml`: the machines and links of a planned run, each value checked."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, ValidationError, model_validator

from opendiloco.config.section import Name, NotNegativeFloat, Positive, Section, explain_validation_error, read_toml

Megabits = Annotated[float, Field(gt=0, le=1e7)]
Amount = Annotated[float, Field(gt=0, le=1e30)]
Milliseconds = Annotated[float, Field(ge=0, le=60_000)]
PEERS_LIMIT = 1000
"""That a swarm is built for."""


class PeerSection(Section):
    """So many equal peers. `latency_ms` is what ping shows to a well-connected server: a round trip.

    How fast each trains is one of `step_seconds` (an inner step of its whole batch), `tokens_per_second`, and `gpu`:
    what torch calls it, of which there are `gpus`.
    """

    name: Name | None = None
    count: Positive = 1
    up_mbit: Megabits
    down_mbit: Megabits
    latency_ms: Milliseconds = 50.0
    step_seconds: Amount | None = None
    tokens_per_second: Amount | None = None
    gpu: Name | None = None
    gpus: Annotated[int, Field(ge=0, le=64)] = 1
    gpu_memory_gb: Amount | None = None
    main_memory_gb: Amount | None = None
    price_per_hour: NotNegativeFloat | None = None

    @model_validator(mode="after")
    def check_speed(self) -> Self:
        given = [key for key in ("step_seconds", "tokens_per_second", "gpu") if getattr(self, key) is not None]
        if len(given) != 1:
            named = " and ".join(given) or "none of them"
            raise ValueError(f"{named} given; say with one of step_seconds, tokens_per_second and gpu how fast it is")
        if self.gpus == 0 and (self.gpu is not None or self.gpu_memory_gb is not None):
            raise ValueError("gpus = 0 has neither a gpu nor gpu_memory_gb; remove these, or say how many there are")
        return self


class Links(Section):
    """A whole `links.toml`."""

    peers: Annotated[tuple[PeerSection, ...], Field(strict=False, min_length=1, max_length=PEERS_LIMIT)]

    @model_validator(mode="after")
    def check_count(self) -> Self:
        count = sum(peer.count for peer in self.peers)
        if not 2 <= count <= PEERS_LIMIT:
            raise ValueError(f"the counts of all [[peers]] add up to {count}; give 2 to {PEERS_LIMIT} peers")
        return self

    @classmethod
    def from_toml(cls, path: Path) -> Self:
        """Read and check a file. Raises: ManifestError, with one line for each problem."""
        content = read_toml(path, "Give a file that exists.")
        try:
            return cls.model_validate(content)
        except ValidationError as error:
            raise explain_validation_error(str(path), error, cls) from None
