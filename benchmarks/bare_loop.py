"""A training loop for one device, written by hand as a good engineer would: `python -m benchmarks.bare_loop`, started
by benchmarks/training.py.

It has the run's model, optimizer, schedule, batches, precision and gradient clipping, and nothing else: no check for
finite values, no report after each step. Gradients are summed over micro-batches. The loss is computed for some
positions at a time, so that not all logits exist at once. With `--compile`, blocks and loss are compiled. AdamW is
fused. Windows wait in pinned memory, and are copied to a GPU one micro-batch ahead.

Each line on its standard input names samples. Their windows are read before its clock starts, so data cost it no time.
With `--by-hand` the model is that of benchmarks/plain_llama.py instead of transformers', with the same weights.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from torch.nn.functional import cross_entropy

from benchmarks.plain_llama import PlainLlama
from benchmarks.processes import memory_of, say
from opendiloco.config.optimizers import InnerOptimizerSection
from opendiloco.config.run_config import RunConfig
from opendiloco.data.tokenizer import build_tokenizer
from opendiloco.data.training_data import load_data
from opendiloco.model.build import build_model
from opendiloco.model.loss import packing_known
from opendiloco.model.parameters import multiplied_weights, transformer_blocks
from opendiloco.model.utilisation import flops_per_token, peak_tokens_per_second
from opendiloco.training.optimizers import build_inner_optimizer
from opendiloco.training.outer import learning_rate_factor
from opendiloco.training.team import choose_device

LOGITS_AT_ONCE = {"cpu": 1 << 24, "cuda": 1 << 26}
"""Number of logits in a piece of the loss, small enough to fit beside the model and large enough to keep the device
busy."""
KEPT_OPTIONS = ("params", "lr", "betas", "eps", "weight_decay")


class BareLoop:
    """A hand-written loop of inner steps. `model` is a transformers model or a `PlainLlama`, already on the device that
    trains."""

    def __init__(self, config: RunConfig, model: Any, micro_batch: int, compiles: bool) -> None:
        self._training = config.training
        self._model = model.train()
        self._head = model.lm_head if isinstance(model, PlainLlama) else model.get_output_embeddings()
        self._device: torch.device = self._head.weight.device
        self._micro_batch = micro_batch
        self._piece_loss = torch.compile(self._summed_loss) if compiles else self._summed_loss
        self._optimizer = fused(build_inner_optimizer(model, config.inner_optimizer), config.inner_optimizer)
        schedule = config.schedule
        step_size = self._training.batch_size * self._training.sequence_length if schedule.unit == "tokens" else 1
        self._scheduler = torch.optim.lr_scheduler.LambdaLR(
            self._optimizer, lambda steps: learning_rate_factor(schedule, (steps + 1) * step_size)
        )
        if compiles:
            for block in model.model.layers if isinstance(model, PlainLlama) else transformer_blocks(model):
                block.compile()

    def train(self, windows: torch.Tensor) -> float:
        """Take an inner step on each batch of the windows, and return the mean loss in nats per token. The host waits
        for a GPU only at the end."""
        losses = [self._inner_step(batch) for batch in windows.split(self._training.batch_size)]
        return torch.stack(losses).mean().item()

    def add_gradient(self, batch: torch.Tensor) -> torch.Tensor:
        """Add the gradient of a batch's mean loss to the parameters' gradients, and return the mean loss in nats per
        token."""
        total = torch.zeros((), device=self._device)
        for windows in copied_ahead(batch.split(self._micro_batch), self._device):
            with self._precision(), packing_known(False):
                states = self._states(windows[:, :-1])
            loss, slopes = self._loss_and_slopes(states.detach().flatten(0, 1), windows[:, 1:].flatten(), batch.shape)
            states.backward(slopes.view_as(states))
            total += loss
        return total

    def _inner_step(self, batch: torch.Tensor) -> torch.Tensor:
        self._optimizer.zero_grad()
        loss = self.add_gradient(batch)
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._training.gradient_clip)
        self._optimizer.step()
        self._scheduler.step()
        return loss

    def _states(self, ids: torch.Tensor) -> torch.Tensor:
        if isinstance(self._model, PlainLlama):
            return self._model.model(ids)  # type: ignore[no-any-return]
        return self._model.base_model(input_ids=ids, use_cache=False).last_hidden_state  # type: ignore[no-any-return]

    def _loss_and_slopes(
        self, states: torch.Tensor, targets: torch.Tensor, shape: torch.Size
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a micro-batch's part of the batch's mean loss in nats per token, and the gradient of this part with
        respect to `states`. Also add this part's gradient with respect to the head's weights to the head's gradient.

        `shape` is the batch's: the windows, and the tokens of each, one more than are predicted.
        """
        predicted, slopes = shape[0] * (shape[1] - 1), torch.empty_like(states)
        total = torch.zeros((), device=self._device)
        at_once = LOGITS_AT_ONCE.get(self._device.type, LOGITS_AT_ONCE["cpu"]) // self._head.out_features
        pieces = -(-len(states) // max(1, at_once))  # equal pieces, because `_piece_loss` is compiled for one size
        for part, wanted, slope in zip(*(each.chunk(pieces) for each in (states, targets, slopes)), strict=True):
            part.requires_grad_()
            with self._precision():
                loss = self._piece_loss(part, wanted) / predicted
            loss.backward()
            slope.copy_(part.grad)
            total += loss.detach()
        return total, slopes

    def _summed_loss(self, states: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return cross_entropy(self._head(states).float(), targets, reduction="sum")

    def _precision(self) -> AbstractContextManager[Any]:
        is_bf16 = self._training.precision == "bf16"
        return torch.autocast(self._device.type, torch.bfloat16) if is_bf16 else nullcontext()


def fused(optimizer: torch.optim.Optimizer, section: InnerOptimizerSection) -> torch.optim.Optimizer:
    """Return, for AdamW, a copy of `optimizer` that uses torch's fused step; otherwise `optimizer` itself."""
    if section.kind != "adamw":
        return optimizer
    groups = [{name: group[name] for name in KEPT_OPTIONS} for group in optimizer.param_groups]
    return torch.optim.AdamW(groups, fused=True)


def copied_ahead(parts: Iterable[torch.Tensor], device: torch.device) -> Iterator[torch.Tensor]:
    """Yield a copy on the device of each part of a batch. If the batch is in pinned memory, the next part is copied
    while the caller uses the current part."""
    coming = None
    for part in parts:
        following = part.to(device, non_blocking=True)
        if coming is not None:
            yield coming
        coming = following
    if coming is not None:
        yield coming


@torch.no_grad()
def check_logits(model: Any) -> None:
    """Raise ClickException if the model's logits differ from its head's output for its last hidden states."""
    ids = torch.arange(4, device=model.device).remainder(model.config.vocab_size)[None]
    model.eval()
    made = model.get_output_embeddings()(model.base_model(input_ids=ids, use_cache=False).last_hidden_state)
    if not torch.allclose(made, model(input_ids=ids, use_cache=False).logits, rtol=1e-3, atol=1e-4):
        raise click.ClickException(
            f"model_type = {model.config.model_type!r}: the model changes its logits in a way that the bare loop does "
            "not support. Use a run with another model, such as a llama."
        )


def train_on_request(
    config: RunConfig, threads: int, wanted: str, by_hand: bool, micro_batch: int, compiles: bool
) -> None:
    """Train on the samples listed in each line of standard input, and report each training's seconds and loss, until
    the input ends."""
    torch.set_num_threads(threads)
    device, training = choose_device(wanted), config.training
    tokenizer = build_tokenizer(config.tokenizer)
    samples = load_data(config, tokenizer).samples
    say("loaded", memory=memory_of())
    model = build_model(config, tokenizer)
    arithmetic = flops_per_token(model.config, multiplied_weights(model), training.sequence_length)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    peak = peak_tokens_per_second(name, 1, training.precision, arithmetic)
    check_logits(model)
    loop = BareLoop(config, (PlainLlama.like(model) if by_hand else model).to(device), micro_batch, compiles)
    for line in sys.stdin:
        numbers = np.concatenate([np.arange(*piece) for piece in json.loads(line)])
        windows = torch.from_numpy(samples.read(numbers))
        if device.type == "cuda":
            windows = windows.pin_memory()
        began = time.monotonic()
        loss = loop.train(windows)
        seconds = time.monotonic() - began
        tokens = len(numbers) * training.sequence_length
        say("trained", seconds=seconds, tokens=tokens, loss=loss, peak=peak, device=name)


@click.command(help=__doc__)
@click.argument("manifest", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--threads", type=int, required=True)
@click.option("--device", required=True)
@click.option("--by-hand", is_flag=True)
@click.option("--micro-batch", type=int, default=1)
@click.option("--compile/--no-compile", "compiles", default=False)
def main(manifest: Path, threads: int, device: str, by_hand: bool, micro_batch: int, compiles: bool) -> None:
    config = RunConfig.from_manifest_content(json.loads(manifest.read_text()))
    train_on_request(config, threads, device, by_hand, micro_batch, compiles)


if __name__ == "__main__":
    main()
