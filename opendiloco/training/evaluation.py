"""The evaluation of a model: its loss on held-out text, and text that it generates."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from opendiloco.data.sample_order import HeldOutWindows
from opendiloco.data.tokenizer import Tokenizer
from opendiloco.model.loss import predicted_tokens, window_loss
from opendiloco.training.team import Team

EVALUATED_AT_ONCE = 4
"""Number of windows at once if no trial has found how many fit."""


@contextmanager
def _evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Set a model to evaluation mode inside the `with` block, and restore each module's own mode at the end.

    A training loop may keep some modules in evaluation mode, such as a frozen batch norm.
    """
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, was_training in modes:
            module.training = was_training


@torch.no_grad()
def held_out_loss(
    model: Any,
    held_out: HeldOutWindows,
    windows: int,
    batch_size: int,
    precision: Callable[[], AbstractContextManager[Any]] = nullcontext,
    team: Team | None = None,
) -> tuple[float, int]:
    """Return the mean loss on held-out text in nats per token (per byte with the byte tokenizer), and the number of
    tokens in the mean.

    It reads at most `windows` windows, evenly spread over the held-out text, the same ones at every call. `batch_size`
    of them go through the model at once, in the context `precision`. Compiled blocks run uncompiled here: they would be
    compiled again, with no limit on the time.

    Each worker of a `team` reads its piece of the windows, and all return the same result. All make the same number of
    forward passes, which are collectives; a worker without windows left computes one that does not count.
    """
    device = next(model.parameters()).device
    team = team or Team(device)
    chosen, end = held_out.spread(windows), held_out.document_end
    own = chosen[team.piece(len(chosen))]
    total = tokens = 0.0
    with _evaluating(model), torch.compiler.set_stance("force_eager"):
        for start in range(0, team.largest_piece(len(chosen)), batch_size):
            numbers = own[start : start + batch_size]
            batch = held_out.read(numbers if len(numbers) else chosen[:1])
            predicted = predicted_tokens(batch, end) if len(numbers) else 0
            with precision():
                total += window_loss(model, torch.from_numpy(batch).to(device), end).item() * predicted
            tokens += predicted
    total, tokens = team.sums([total, tokens])
    return total / tokens, int(tokens)


@torch.no_grad()
def generate_sample(
    model: Any, tokenizer: Tokenizer, prompt: str, tokens: int, seed: int, temperature: float = 0.8
) -> str:
    """Return at most `tokens` tokens of text that the model generates after `prompt`. Each token is sampled from the 50
    most likely ones, or is the most likely one if `temperature` is 0.

    The same weights and seed give the same text. Compiled blocks run uncompiled here, because they would be compiled
    again for each length.
    """
    pretrained = tokenizer.pretrained()
    encoded = pretrained(prompt or "\n", return_tensors="pt", add_special_tokens=False)
    device = next(model.parameters()).device
    ids = encoded["input_ids"].to(device)
    torch.manual_seed(seed)
    sampling: dict[str, Any] = {"do_sample": True, "temperature": temperature, "top_k": 50} if temperature else {}
    with _evaluating(model), torch.compiler.set_stance("force_eager"):
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            pad_token_id=tokenizer.end,
            **({"do_sample": False} | sampling),
        )
    return str(pretrained.decode(output[0, ids.shape[1] :], skip_special_tokens=True))
