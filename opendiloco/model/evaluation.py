"""How good the model is: its loss on held-out text, and what it writes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from opendiloco.data.tokenizer import Tokenizer
from opendiloco.data.training_data import HeldOutWindows
from opendiloco.model.packing import predicted_tokens, window_loss


@torch.no_grad()
def held_out_loss(
    model: Any,
    held_out: HeldOutWindows,
    windows: int,
    batch_size: int,
    precision: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> tuple[float, int]:
    """Return the mean loss in nats per token (per byte with the byte tokenizer), and how many tokens it is a mean of.

    At most `windows` windows are read, evenly spread over the held-out text: the same ones at every call. `batch_size`
    of them go through the model at once, in the context `precision`.
    """
    model.eval()
    device = next(model.parameters()).device
    chosen, end = held_out.spread(windows), held_out.document_end
    total, tokens = 0.0, 0
    for start in range(0, len(chosen), batch_size):
        batch = torch.from_numpy(held_out.read(chosen[start : start + batch_size]))
        predicted = predicted_tokens(batch, end)
        with precision():
            total += window_loss(model, batch.to(device), end).item() * predicted
        tokens += predicted
    return total / tokens, tokens


@torch.no_grad()
def generate_sample(model: Any, tokenizer: Tokenizer, prompt: str, tokens: int, seed: int) -> str:
    """A continuation of `prompt`, sampled at temperature 0.8; the same for the same weights and seed."""
    model.eval()
    pretrained = tokenizer.pretrained()
    encoded = pretrained(prompt or "\n", return_tensors="pt", add_special_tokens=False)
    device = next(model.parameters()).device
    ids = encoded["input_ids"].to(device)
    torch.manual_seed(seed)
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=tokens,
        do_sample=True,
        temperature=0.8,
        top_k=50,
        pad_token_id=tokenizer.end,
    )
    return str(pretrained.decode(output[0, ids.shape[1] :], skip_special_tokens=True))
