"""The peak memory of a model that trains on a device, compared with the formula of `join`: `python -m
benchmarks.device_memory --device cuda`.

A worker's replica takes a few inner steps in this process. Its windows are short and go through the model one at a
time, because the formula excludes activations. On a GPU, PyTorch's allocator gives the peak of the tensors, as in
`peak_memory_bytes` of a worker's report; on the CPU each tensor is recorded. CUDA's context does not count.

`--cards` measures nothing. For GPUs of 8 to 24 GB it prints how many windows of a preset go through the model at once.
It uses the formula, the computed tensor sizes of a window, and the shares of memory that `join` gives to logits and
windows. Of each two numbers the second is with activation checkpointing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any, get_args

import click
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM

from benchmarks.reporting import Bar, json_option, report, run_option
from opendiloco.config.run_config import RunConfig
from opendiloco.data.tokenizer import ByteTokenizer, build_tokenizer
from opendiloco.data.training_data import load_data
from opendiloco.host_memory import LOGIT_BYTES, WorkerMemory
from opendiloco.model.build import build_skeleton, initial_theta
from opendiloco.model.loss import fitting_logits, packing_known
from opendiloco.quantities import OptimizerState
from opendiloco.training.inner import ModelReplica
from opendiloco.training.team import Team
from opendiloco.training.trials import SHARE, fixed_and_each, peak_while
from opendiloco.workers.assembly import (
    SHARE_OF_LOGITS,
    assemble_model,
    checkpoint_activations,
    in_fitting_precision,
)
from opendiloco.workers.needs import Needs, needs_of, worker_memory
from opendiloco.workers.options import WorkerOptions
from peers.values.leases import SampleRange

TOKENS, STEPS, WINDOWS = 2, 2, 2
EXAMPLES = Path(__file__).parent.parent / "examples"
CARDS = 8, 12, 16, 24
"""Memory sizes of GPUs in GB (10⁹ bytes)."""
ON_CARDS = ("llama-15m", 1), ("llama-150m", 1), ("llama-1b", 1), ("llama-1b", 2), ("llama-1b", 4), ("llama-10b", 8)
"""Presets, and the number of GPUs that share each."""
KEPT: tuple[OptimizerState, ...] = get_args(OptimizerState)
WITHIN = 0.9
"""Bar: the smaller of measurement and formula must be at least this share of the larger."""


def shortened(config: RunConfig) -> RunConfig:
    """Return a copy of the run's configuration with windows of two tokens, and with the text of examples/tiny.toml,
    which needs no download."""
    training = {"sequence_length": TOKENS, "batch_size": WINDOWS, "document_mask": False}
    data = RunConfig.from_toml(EXAMPLES / "tiny.toml")
    return config.model_copy(
        update={
            "training": config.training.model_copy(update=training),
            "tokenizer": data.tokenizer,
            "data": data.data,
        }
    )


def measure(config: RunConfig, device: torch.device, kept: OptimizerState = "device") -> tuple[int, WorkerMemory]:
    """Train a few inner steps, and return the measured peak bytes of tensors on the device and the memory that the
    formula predicts. On the CPU, the measured peak includes the optimizer's moments if they are kept in main memory."""
    team, tokenizer = Team(device), build_tokenizer(config.tokenizer)
    config = in_fitting_precision(config, team)
    options = WorkerOptions(device=str(device), compile=False, activation_checkpointing=False, optimizer_state=kept)
    memory = worker_memory(build_skeleton(config, tokenizer), config.training, device.type, 1, options)
    theta, samples = initial_theta(config), load_data(config, tokenizer).samples

    def train() -> None:
        model = assemble_model(config, tokenizer, team, options, None)
        replica = ModelReplica(config, model, samples, team, micro_batch=1, optimizer_state=kept)
        replica.train(theta, 0, (SampleRange(0, STEPS * WINDOWS),), STEPS)

    return peak_while(train, device), memory


def preset(name: str) -> RunConfig:
    return RunConfig.from_toml(EXAMPLES / f"{name}.toml")


@cache
def window_bytes(name: str, checkpoints: bool) -> int:
    """Return the bytes of activations that one more window of the preset `name` needs, measured uncompiled on PyTorch's
    fake tensors, which have no values."""
    config = preset(name)
    settings, training = build_skeleton(config, ByteTokenizer()).config, config.training
    is_bf16 = training.precision == "bf16"
    with FakeTensorMode():
        model = AutoModelForCausalLM.from_config(settings).train()
        if checkpoints:
            checkpoint_activations(model)

        def go(windows: int) -> None:
            ids = torch.zeros(windows, training.sequence_length, dtype=torch.long)
            with torch.autocast("cpu", torch.bfloat16, enabled=is_bf16), packing_known(False):
                states = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
            states.sum().backward()

        go(1)  # creates the parameters' gradients before the measurement
        one, two = (peak_while(partial(go, windows), torch.device("cpu")) for windows in (1, 2))
    return fixed_and_each(one, two)[1]


@cache
def taken_by(name: str, gpus: int, kept: OptimizerState) -> Needs:
    config = preset(name)
    return needs_of(config, build_skeleton(config, ByteTokenizer()), gpus, WorkerOptions(optimizer_state=kept))


def windows_that_fit(name: str, gpus: int, kept: OptimizerState, card: int, checkpoints: bool) -> int:
    """Return the number of the preset's windows that fit into memory at once on `gpus` GPUs of `card` bytes each, or 0
    if the model does not fit.

    `join` would find the same number from these figures.
    """
    config = preset(name)
    needs = taken_by(name, gpus, kept)
    room = card - needs.device_memory
    if room <= 0:
        return 0
    window = config.training.sequence_length * build_skeleton(config, ByteTokenizer()).config.vocab_size
    logits = fitting_logits(torch.device("cuda"), int(SHARE_OF_LOGITS * room))
    room -= LOGIT_BYTES * max(0, min(window, logits) - needs.device.logits // gpus)
    if (each := window_bytes(name, checkpoints)) > room:
        return 0
    most = config.training.micro_batch or config.training.batch_size
    return min(most, max(1, int(SHARE["cuda"] * room) // each))


def rows_of_cards(cases: Sequence[tuple[str, int]] = ON_CARDS) -> Iterator[dict[str, Any]]:
    """Yield the rows of the table that `--cards` prints. Each row is about one preset on its number of GPUs, and one
    place (GPU or main memory) of the optimizer's moments."""
    for (name, gpus), kept in product(cases, KEPT):

        def fitting(size: int, name: str = name, gpus: int = gpus, kept: OptimizerState = kept) -> str:
            found = (windows_that_fit(name, gpus, kept, size * 10**9, checkpoints) for checkpoints in (False, True))
            return " / ".join(str(windows or "no") for windows in found)

        needs = taken_by(name, gpus, kept)
        yield {
            "preset": name,
            "GPUs": gpus,
            "`--optimizer-state`": kept,
            **{f"{size} GB": fitting(size) for size in CARDS},
            "main memory": f"{float(f'{needs.main_memory / 1e9:.3g}'):g}",
        }


def bar_of(peak: int, formula: int) -> Bar:
    return Bar("the smaller of measurement and formula / the larger", min(peak, formula) / max(peak, formula), WITHIN)


@click.command(help=__doc__)
@run_option("examples/llama-150m.toml", "The run with the model, a run.toml.")
@click.option("--device", default="cpu", show_default=True, help="cpu, or one GPU: cuda, the first, or cuda:1.")
@click.option("--cards", is_flag=True, help="Instead, compute what fits GPUs of 8 to 24 GB.")
@click.option("--optimizer-state", type=click.Choice(KEPT), default="device", show_default=True, help="As in `join`.")
@json_option
def main(run_file: Path, device: str, cards: bool, optimizer_state: OptimizerState, json_file: Path | None) -> None:
    if cards:
        return report("windows at once, on GPUs of these sizes", list(rows_of_cards()), [], json_file)
    config = shortened(RunConfig.from_toml(run_file))
    on = torch.device("cuda:0" if device == "cuda" else device)
    peak, memory = measure(config, on, optimizer_state)
    formula = memory.training + memory.on_host * (on.type == "cpu")
    row: dict[str, Any] = {
        "run": config.name,
        "parameters": f"{memory.trained:,}",
        "precision": config.training.precision,
        "measured MB": peak / 1e6,
        "formula MB": formula / 1e6,
    }
    report(f"memory of one worker on {device}", [row], [bar_of(peak, formula)], json_file)


if __name__ == "__main__":
    main()
