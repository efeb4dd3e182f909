"""A plan from a run's configuration, the skeleton of its model, and `links.toml`, each value checked."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self

from pydantic import Field, ValidationError, model_validator

from opendiloco.config.run_config import RunConfig
from opendiloco.config.section import Name, NotNegativeFloat, Positive, Section, describe_validation_error, read_toml
from opendiloco.kernels import FORMATS
from opendiloco.model.utilisation import peak_tokens_per_second
from opendiloco.tools.plan.forecast import QUANTIZED, QUANTIZED_SPARSE, Peer, Plan
from peers.errors import ManifestError

if TYPE_CHECKING:
    from opendiloco.workers.needs import Needs

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
            raise ManifestError(describe_validation_error(str(path), error, cls)) from None


def plan_of(config: RunConfig, skeleton: Any, links: Links) -> Plan:
    """Return the plan. Raises: ManifestError where a machine's speed does not follow from its GPU."""
    from opendiloco.model.parameters import layout_of  # this and the next import torch
    from opendiloco.workers.needs import UTILISATION, needs_of

    training, peers = config.training, []
    needs_by_gpus = {gpus: needs_of(config, skeleton, max(1, gpus)) for gpus in {each.gpus for each in links.peers}}
    for place, section in enumerate(links.peers):
        peak, needs = None, needs_by_gpus[section.gpus]
        if section.gpu is not None:
            peak = peak_tokens_per_second(section.gpu, section.gpus, needs.precision, needs.token_flops)
        rate = section.tokens_per_second or (None if peak is None else UTILISATION * peak)
        peers.append(_peer(section, place, training.batch_size * training.sequence_length, rate, needs))
    return Plan(
        fragments=tuple(part.stop - part.start for part in layout_of(skeleton, config.streaming).fragments),
        peers=tuple(peers),
        inner_steps=training.inner_steps,
        tokens_per_step=training.batch_size * training.sequence_length,
        smallest_share=config.rounds.smallest_share,
        snapshot_every=config.snapshots.every,
        bits=_bits_of(config.codec.kind),
        encoded=QUANTIZED_SPARSE if config.codec.kind == "sparse" else QUANTIZED,
        timing=config.rounds.timing,
        staleness=config.rounds.staleness,
        contributions=config.rounds.enough,
        overlap=config.streaming.overlap,
    )


def _bits_of(codec: str) -> float:
    """Return the bits that a codec takes for a value, its blocks' headers included."""
    return 8 * FORMATS[codec].block_bytes / FORMATS[codec].block_values


def _peer(section: PeerSection, place: int, tokens: int, rate: float | None, needs: Needs) -> Peer:
    """Return the peers of a section, whose inner step has so many tokens, of which they train `rate` a second."""
    if section.step_seconds is not None:
        seconds = section.step_seconds
    elif rate is not None:
        seconds = tokens / rate
    else:
        raise ManifestError(
            f"peers.{place}.gpu = {section.gpu!r}: its peak is not known here.",
            "Give step_seconds or tokens_per_second instead.",
        )
    return Peer(
        name=section.name or f"peer {place + 1}",
        count=section.count,
        up=section.up_mbit * 1e6,
        down=section.down_mbit * 1e6,
        latency=section.latency_ms / 1e3,
        step_seconds=seconds,
        gpus=section.gpus,
        gpu_memory=section.gpu_memory_gb and 1e9 * section.gpu_memory_gb,
        main_memory=section.main_memory_gb and 1e9 * section.main_memory_gb,
        price_per_hour=section.price_per_hour,
        main_needed=needs.main_memory if section.gpus else needs.main_memory_on_cpu,
        gpu_needed=needs.device_memory if section.gpus else None,
    )
