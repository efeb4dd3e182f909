"""A model on a device, beside the formula that `join` goes by: `python -m benchmarks.device_memory --device cuda`.

A worker's replica takes a few inner steps in this process, on windows so short that activations hardly matter, one at a
time, since the formula leaves activations out. On a GPU, PyTorch's allocator says how much tensors took at most, as in
`peak_memory_bytes` of a worker's report; on the CPU each tensor is noticed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import torch

from benchmarks.reporting import Bar, json_option, report, run_option
from opendiloco.config.run_config import RunConfig
from opendiloco.data.tokenizer import build_tokenizer
from opendiloco.data.training_data import load_data
from opendiloco.host_memory import WorkerMemory
from opendiloco.model.build import build_skeleton, initial_theta
from opendiloco.training.inner import ModelReplica
from opendiloco.training.team import Team
from opendiloco.training.trials import peak_while
from opendiloco.workers.assembly import assemble_model, in_fitting_precision
from opendiloco.workers.needs import worker_memory
from opendiloco.workers.options import WorkerOptions
from peers.values.leases import SampleRange

TOKENS, STEPS, WINDOWS = 2, 2, 2
WITHIN = 0.9
"""The smaller of both numbers, as a share of the larger."""


def shortened(config: RunConfig) -> RunConfig:
    """Return the run with windows of hardly any tokens, of the bytes of whatever text is here."""
    training = {"sequence_length": TOKENS, "batch_size": WINDOWS, "document_mask": False}
    data = RunConfig.from_toml(Path("examples/tiny.toml"))
    return config.model_copy(
        update={
            "training": config.training.model_copy(update=training),
            "tokenizer": data.tokenizer,
            "data": data.data,
        }
    )


def measure(config: RunConfig, device: torch.device) -> tuple[int, WorkerMemory]:
    """Return the most bytes that tensors took on the device, and what the formula says."""
    team, tokenizer = Team(device), build_tokenizer(config.tokenizer)
    config = in_fitting_precision(config, team)
    memory = worker_memory(build_skeleton(config, tokenizer), config.training, device.type, 1)
    theta, samples = initial_theta(config), load_data(config, tokenizer).samples

    def train() -> None:
        options = WorkerOptions(device=str(device), compile=False, activation_checkpointing=False)
        model = assemble_model(config, tokenizer, team, options, None)
        replica = ModelReplica(config, model, samples, team, micro_batch=1)
        replica.train(theta, 0, (SampleRange(0, STEPS * WINDOWS),), STEPS)

    return peak_while(train, device), memory


def bar_of(peak: int, formula: int) -> Bar:
    return Bar("the smaller of measurement and formula / the larger", min(peak, formula) / max(peak, formula), WITHIN)


@click.command(help=__doc__)
@run_option("examples/llama-150m.toml", "Whose model, a run.toml.")
@click.option("--device", default="cpu", show_default=True, help="cpu, or one GPU: cuda, the first, or cuda:1.")
@json_option
def main(run_file: Path, device: str, json_file: Path | None) -> None:
    config = shortened(RunConfig.from_toml(run_file))
    peak, memory = measure(config, torch.device("cuda:0" if device == "cuda" else device))
    row: dict[str, Any] = {
        "run": config.name,
        "parameters": f"{memory.trained:,}",
        "precision": config.training.precision,
        "measured MB": peak / 1e6,
        "formula MB": memory.training / 1e6,
    }
    report(f"memory of one worker on {device}", [row], [bar_of(peak, memory.training)], json_file)


if __name__ == "__main__":
    main()
