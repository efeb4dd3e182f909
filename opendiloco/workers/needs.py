"""The memory, disk, bandwidth and time that a machine needs to take part in a run, computed before it joins.

Memory follows the formula by which `join` checks the machine. Speeds are not measured: they are a share of a GPU's
peak, or the speed that `CPU_FLOPS` assumes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from opendiloco.config.run_config import RunConfig, TrainingSection
from opendiloco.host_memory import CONTEXT_BYTES, MOMENTS_BYTES, NCCL_BYTES, STATE_BYTES, HostMemory, WorkerMemory
from opendiloco.kernels import FORMATS
from opendiloco.model.loss import LEAST_LOGITS, in_pieces_of, positions_at_once
from opendiloco.model.parameters import layout_of, multiplied_weights, transformer_blocks
from opendiloco.model.utilisation import Precision, flops_per_token, peak_tokens_per_second
from opendiloco.quantities import MEGABIT, SECONDS_A_DAY, days_in_words, duration, in_words
from opendiloco.training.optimizers import FUSED_ON
from opendiloco.workers.options import WorkerOptions
from peers.log.settings import Timing
from peers.protocol.planning import deadline, seconds_to_send

UTILISATION = 0.4  # assumed share of a GPU's peak speed that training reaches, 0 to 1
CPU_FLOPS = 3e11
"""Operations a second that 8 CPU cores are assumed to train with. One core reached 0.67e11: 5149 tokens/s of llama-2m
(docs/benchmarks.md, `threads`), each of 13e6 operations (`flops_per_token`)."""
SHARE_OF_ROUNDS = 0.1  # share of a peer's time that rounds may take, 0 to 1; determines the needed bandwidth
CHECKPOINTS = 3  # number of checkpoints on disk: two kept ones, and one that is being written
MOMENTS_FILES = 2  # number of moments files on disk: a kept one, and one that is being written
SHORTEST_ROUND = 1.0  # rough number of seconds that the messages of a round take over the internet


@dataclass(frozen=True)
class _Machine:
    """A machine that people can rent, with `gpus` GPUs of `memory` bytes each. `gpu` is torch's name for such a GPU."""

    name: str
    gpu: str
    gpus: int
    memory: int


MACHINES = (
    _Machine("RTX 4090", "NVIDIA GeForce RTX 4090", 1, 24 * 10**9),
    _Machine("H100", "NVIDIA H100 80GB HBM3", 1, 80 * 10**9),
    _Machine("8 H100", "NVIDIA H100 80GB HBM3", 8, 80 * 10**9),
)


@dataclass(frozen=True)
class Needs:
    """The memory, disk and bandwidth that one peer with `gpus` GPUs needs in a run. Sizes are in bytes.

    Device memory does not include activations. `contributions` has the bytes of a contribution of the largest fragment
    in each format that the run allows. `overlap` is the share of an outer step for which training goes on during a
    round.
    """

    gpus: int
    host: HostMemory
    device: WorkerMemory
    on_cpu: WorkerMemory
    tokens_per_outer_step: int
    outer_steps: int
    precision: Precision
    token_flops: float | None
    contributions: Mapping[str, int]
    overlap: float
    timing: Timing

    @property
    def main_memory(self) -> int:
        """The main memory, in bytes, that a machine needs to train on GPUs."""
        return self.host.most + self.device.on_host

    @property
    def main_memory_on_cpu(self) -> int:
        """The main memory, in bytes, that a machine needs to train on its CPU."""
        return self.host.most + self.on_cpu.training + self.on_cpu.on_host

    @property
    def device_memory(self) -> int:
        """The memory, in bytes, that each GPU needs for its part of the model, CUDA and NCCL, but not for
        activations."""
        return self.device.training // self.gpus + CONTEXT_BYTES + NCCL_BYTES * (self.gpus > 1)

    @property
    def disk(self) -> int:
        """The disk space, in bytes, for the checkpoints and AdamW's moments that `join` keeps, not counting the log."""
        return CHECKPOINTS * STATE_BYTES * self.host.values + MOMENTS_FILES * MOMENTS_BYTES * self.host.values

    @property
    def tokens(self) -> int:
        """The number of tokens that one peer trains from the first outer step to the last."""
        return self.outer_steps * self.tokens_per_outer_step

    def plain(self) -> dict[str, Any]:
        """Return the needs by name, for JSON output: `parameters` is a count, all other values are in bytes."""
        return {
            "parameters": self.host.values,
            "gpu_memory": self.device_memory,
            "main_memory": self.main_memory,
            "main_memory_on_cpu": self.main_memory_on_cpu,
            "disk": self.disk,
            "traffic_each_way": 2 * self.host.payload,
            "contributions": dict(self.contributions),
        }

    def days(self, machine: _Machine) -> float | None:
        """Return the days for which a peer on `machine` trains in the run, or None if a GPU's memory is too small or
        its speed unknown."""
        if self.device_memory > machine.memory:
            return None
        peak = peak_tokens_per_second(machine.gpu, machine.gpus, self.precision, self.token_flops)
        return None if peak is None else self.tokens / (UTILISATION * peak) / SECONDS_A_DAY

    @property
    def days_on_cpu(self) -> float | None:
        """The days for which a peer with 8 CPU cores trains in the run, or None if its speed is unknown."""
        return None if self.token_flops is None else self.tokens * self.token_flops / CPU_FLOPS / SECONDS_A_DAY

    def link(self, days: float) -> tuple[float, float]:
        """Return the seconds that one round may take if the run takes `days` days, and the bits per second that a
        peer's link must then carry in each direction.

        A member of a large round sends two payloads and receives two.
        """
        seconds = SECONDS_A_DAY * days / self.outer_steps * SHARE_OF_ROUNDS / (1 - SHARE_OF_ROUNDS)
        return seconds, 8 * 2 * self.host.payload / seconds

    def uplinks(self, days: float) -> tuple[float, dict[str, float]]:
        """Return the seconds in which a peer should send its contribution if the run takes `days` days and, for each
        format, the uplink that this requires, in bytes per second.

        The other peers have links as `link` returns, and train for as many days.
        """
        needed = max(self.link(days)[0], SHORTEST_ROUND)
        overlap = self.overlap * SECONDS_A_DAY * days / self.outer_steps
        seconds = seconds_to_send(deadline([needed], self.timing), self.timing, overlap)
        return seconds, {format: size / seconds for format, size in self.contributions.items()}


def needs_of(config: RunConfig, skeleton: Any, gpus: int = 1, options: WorkerOptions | None = None) -> Needs:
    """Return the needs of a peer with this many GPUs. `skeleton` is the run's model without memory for its weights."""
    training, layout = config.training, layout_of(skeleton, config.streaming)
    host = HostMemory.of(layout.size, config.codec)
    largest = max(part.stop - part.start for part in layout.fragments)
    return Needs(
        gpus=gpus,
        host=host,
        device=worker_memory(skeleton, training, "cuda", gpus, options),
        on_cpu=worker_memory(skeleton, training, "cpu", 1, options),
        tokens_per_outer_step=training.inner_steps * training.batch_size * training.sequence_length,
        outer_steps=config.total_outer_steps,
        precision=training.precision,
        token_flops=flops_per_token(skeleton.config, multiplied_weights(skeleton), training.sequence_length),
        contributions={format: FORMATS[format].payload_size(largest) for format in config.codec.contributions},
        overlap=config.streaming.overlap / training.inner_steps,
        timing=config.rounds.timing,
    )


def needs_lines(needs: Callable[[int], Needs]) -> Iterator[str]:
    """Yield lines of text: the needs in general, on each of `MACHINES`, and on a CPU. `needs(n)` returns the needs of a
    peer with n GPUs."""
    one = needs(1)
    beside, alone = in_words(one.main_memory), in_words(one.main_memory_on_cpu)
    yield f"{one.host.values:,} parameters; {one.outer_steps} outer steps, {one.tokens:,} tokens of each peer"
    yield f"main memory: {beside} beside GPUs, {alone} without; Python's libraries and the data come on top"
    yield f"disk: {in_words(one.disk)} for checkpoints, and the log"
    yield f"each outer step: {in_words(2 * one.host.payload)} to send and as much to get"
    sizes = ", ".join(f"{in_words(size)} in {format}" for format, size in one.contributions.items())
    yield f"a contribution: {sizes}; a thin uplink sends the first that it carries in time"
    for machine in MACHINES:
        here = needs(machine.gpus)
        memory = f"{machine.name}: {in_words(here.device_memory)} of each GPU, and activations"
        yield memory + _time_on(machine, here)
        days = here.days(machine)
        if days is not None:
            yield f"  {_uplinks(here, days)}"
    if one.days_on_cpu is not None:
        days_assumed = f"{days_in_words(one.days_on_cpu)} at {CPU_FLOPS / 1e12:g} TFLOP/s"
        yield f"8 CPU cores: {days_assumed}; `diloco-peer doctor --run` measures how fast a machine trains"


def _uplinks(needs: Needs, days: float) -> str:
    """Return text with the uplink, in Mbit/s, that each format needs if the whole run takes `days` days."""
    seconds, uplinks = needs.uplinks(days)
    each = ", ".join(f"{format} {float(f'{rate / MEGABIT:.2g}'):,g}" for format, rate in uplinks.items())
    return f"uplink in Mbit/s for a contribution in {duration(seconds)}: {each}"


def _time_on(machine: _Machine, needs: Needs) -> str:
    """Return the text that follows a machine's name and memory: its training time, and the link that it needs."""
    if needs.device_memory > machine.memory:
        return ": it is too small"
    if (days := needs.days(machine)) is None:
        return "; how fast it trains is not known"
    round_seconds, bits = needs.link(days)
    time = f"; {days_in_words(days)} at {UTILISATION:.0%} of its peak"
    if round_seconds < SHORTEST_ROUND:
        return f"{time}, and more for rounds, whatever its link"
    return f"{time}, with a link of {float(f'{bits / 1e6:.2g}'):,g} Mbit/s"


def worker_memory(
    skeleton: Any,
    training: TrainingSection,
    device: str,
    workers: int,
    options: WorkerOptions | None = None,
    is_shared: bool | None = None,
) -> WorkerMemory:
    """Return the memory that a model needs in all workers together. `device` is the type of their devices: "cuda" or
    "cpu".

    Each worker of a shared model gathers two blocks, one in use and one ahead, and all values outside of blocks. With
    `whole_layers` it gathers the whole model; with `reduces_once` it also keeps all gradients. By default several
    workers share the model.
    """
    options = options or WorkerOptions()
    sizes = [parameter.numel() for parameter in skeleton.parameters()]
    blocks = [sum(each.numel() for each in block.parameters()) for block in transformer_blocks(skeleton)]
    shared = workers > 1 if is_shared is None else is_shared
    gathered = sum(sizes) if options.whole_layers else sum(sizes) - sum(blocks) + sum(sorted(blocks)[-2:])
    head, embedding = skeleton.get_output_embeddings(), skeleton.get_input_embeddings()
    vocabulary, matrix = (head.out_features, head.weight.numel()) if isinstance(head, torch.nn.Linear) else (0, 0)
    # The smallest pieces of logits count, because `join` uses larger ones only if they fit into the device's memory.
    with in_pieces_of(max(1, LEAST_LOGITS // max(1, vocabulary))):
        positions = min(positions_at_once(max(1, vocabulary), torch.device(device)), training.sequence_length)
    is_tied = bool(matrix) and head.weight is embedding.weight
    copied = multiplied_weights(skeleton)
    # If a window's logits are computed in pieces, not autocast but the loss makes the bf16 copy of the output layer's
    # weights. `WorkerMemory.training` counts that copy with the field `head`.
    if positions < training.sequence_length:
        copied -= matrix
    return WorkerMemory(
        weights=sum(sizes),
        trained=layout_of(skeleton).size,
        largest=max(sizes),
        gathered=gathered * workers if shared else 0,
        whole_gradients=sum(sizes) * workers if shared and options.reduces_once else 0,
        head=0 if shared else matrix,
        embedding=0 if shared or is_tied else embedding.weight.numel(),
        tied=matrix if is_tied and not shared else 0,
        logits=positions * vocabulary * workers,
        is_fused=device in FUSED_ON,
        optimizer_state=options.optimizer_state,
        copied=0 if shared or training.precision != "bf16" else copied,
        gathering_on_cpu=workers if shared and device == "cpu" else 0,
    )
