"""A plain training loop, as one would write it: `python -m benchmarks.bare_loop`, started by benchmarks.training.

It has the run's model, optimizer, schedule, batches and gradient clipping, on one device (on a GPU with torch.compile),
and nothing else: no check of what is finite, no word after each step. Each line on its standard input names samples.
Their windows are read before its clock starts, so that data costs it nothing. With `--by-hand` the model is not
transformers' but benchmarks/plain_llama.py's, from the same weights.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import click
import numpy as np

from benchmarks.processes import memory_of, say
from opendiloco.config.run_config import RunConfig


def train_as_told(config: RunConfig, threads: int, wanted: str, by_hand: bool) -> None:
    """Until standard input ends."""
    # Imported here, since torch looks at its environment only once.
    import torch
    from torch.nn.functional import cross_entropy

    from benchmarks.plain_llama import PlainLlama
    from opendiloco.data.tokenizer import build_tokenizer
    from opendiloco.data.training_data import load_data
    from opendiloco.model.build import build_model
    from opendiloco.model.utilisation import flops_per_token, peak_tokens_per_second
    from opendiloco.training.optimizers import build_inner_optimizer
    from opendiloco.training.outer import learning_rate_factor
    from opendiloco.training.team import choose_device

    torch.set_num_threads(threads)
    device, training, schedule = choose_device(wanted), config.training, config.schedule
    tokenizer = build_tokenizer(config.tokenizer)
    samples = load_data(config, tokenizer).samples
    say("loaded", memory=memory_of())
    tokens_per_step = training.batch_size * training.sequence_length if schedule.unit == "tokens" else 1

    def factor(steps_done: int) -> float:
        return learning_rate_factor(schedule, (steps_done + 1) * tokens_per_step)

    model = build_model(config, tokenizer)
    parameters = sum(each.numel() for each in model.parameters())
    arithmetic = flops_per_token(model.config, parameters, training.sequence_length)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    peak = peak_tokens_per_second(name, 1, training.precision, arithmetic)
    model = (PlainLlama.like(model) if by_hand else model).to(device)
    if device.type == "cuda":
        model.compile()
    model.train()
    optimizer = build_inner_optimizer(model, config.inner_optimizer)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)

    def train(batches: Sequence[torch.Tensor]) -> float:
        total = torch.zeros((), device=device)
        for batch in batches:
            windows = batch.to(device)
            optimizer.zero_grad()
            with torch.autocast(device.type, torch.bfloat16, enabled=training.precision == "bf16"):
                inputs = windows[:, :-1]
                logits = model(inputs) if by_hand else model(input_ids=inputs, use_cache=False).logits
                loss = cross_entropy(logits.flatten(0, 1).float(), windows[:, 1:].flatten())
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), training.gradient_clip)
            optimizer.step()
            scheduler.step()
            total += loss.detach()
        return total.item() / len(batches)  # on a GPU only this waits for it

    for line in sys.stdin:
        numbers = np.concatenate([np.arange(*piece) for piece in json.loads(line)])
        batches = torch.from_numpy(samples.read(numbers)).split(training.batch_size)
        began = time.monotonic()
        loss = train(batches)
        seconds = time.monotonic() - began
        tokens = len(numbers) * training.sequence_length
        say("trained", seconds=seconds, tokens=tokens, loss=loss, peak=peak, device=name)


@click.command(help=__doc__)
@click.argument("manifest", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--threads", type=int, required=True)
@click.option("--device", required=True)
@click.option("--by-hand", is_flag=True)
def main(manifest: Path, threads: int, device: str, by_hand: bool) -> None:
    os.environ["OMP_NUM_THREADS"] = str(threads)
    train_as_told(RunConfig.from_manifest_content(json.loads(manifest.read_text())), threads, device, by_hand)


if __name__ == "__main__":
    main()
