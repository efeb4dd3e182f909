"""A plan from a run's configuration, the skeleton of its model, and `links.toml`."""

from __future__ import annotations

from typing import Any

from opendiloco.config.run_config import RunConfig
from opendiloco.kernels import FORMATS
from opendiloco.model.parameters import layout_of
from opendiloco.model.utilisation import peak_tokens_per_second
from opendiloco.tools.plan.forecast import Plan
from opendiloco.tools.plan.links import Links, PeerSection
from opendiloco.tools.plan.report import Memory
from opendiloco.tools.plan.rounds import QUANTIZED, QUANTIZED_SPARSE, Peer, Swarm
from opendiloco.workers.needs import UTILISATION, needs_of
from peers.errors import ManifestError


def plan_of(config: RunConfig, skeleton: Any, links: Links) -> Plan:
    """Return the plan. Raises: ManifestError where a machine's speed does not follow from its GPU."""
    training, needs, peers = config.training, needs_of(config, skeleton), []
    for place, section in enumerate(links.peers):
        peak = None
        if section.gpu is not None:
            peak = peak_tokens_per_second(section.gpu, section.gpus, needs.precision, needs.token_flops)
        peers.append(_peer(section, place, training.batch_size * training.sequence_length, peak))
    return Plan(
        fragments=tuple(part.stop - part.start for part in layout_of(skeleton, config.streaming).fragments),
        swarm=Swarm(tuple(peers)),
        inner_steps=training.inner_steps,
        tokens_per_step=training.batch_size * training.sequence_length,
        smallest_share=config.rounds.smallest_share,
        snapshot_every=config.snapshots.every,
        bits=bits_of(config.codec.kind),
        encoded=QUANTIZED_SPARSE if config.codec.kind == "sparse" else QUANTIZED,
        timing=config.rounds.timing,
        staleness=config.rounds.staleness,
        contributions=config.rounds.enough,
        overlap=config.streaming.overlap,
    )


def memory_of(config: RunConfig, skeleton: Any, peer: Peer) -> Memory:
    """Return what `join` will hold against the machine's memory."""
    needs = needs_of(config, skeleton, max(1, peer.gpus))
    if not peer.gpus:
        return Memory(needs.main_memory_on_cpu, None)
    return Memory(needs.main_memory, needs.device_memory)


def bits_of(codec: str) -> float:
    """Return the bits that a codec takes for a value, its blocks' headers included."""
    return 8 * FORMATS[codec].block_bytes / FORMATS[codec].block_values


def _peer(section: PeerSection, place: int, tokens: int, peak: float | None) -> Peer:
    """Return the peers of a section, whose inner step has so many tokens. `peak` is their GPUs', in tokens a second."""
    if section.step_seconds is not None:
        seconds = section.step_seconds
    elif section.tokens_per_second is not None:
        seconds = tokens / section.tokens_per_second
    elif peak is not None:
        seconds = tokens / (UTILISATION * peak)
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
        gpu_memory=_bytes(section.gpu_memory_gb),
        main_memory=_bytes(section.main_memory_gb),
        price_per_hour=section.price_per_hour,
    )


def _bytes(gigabytes: float | None) -> float | None:
    return None if gigabytes is None else gigabytes * 1e9
