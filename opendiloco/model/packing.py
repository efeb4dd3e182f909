"""Documents packed into windows: where each begins, and the loss of a batch of windows.

Windows are cut from documents that follow one another, each closed by the token `end`. With a document mask no token
attends to another document than its own, positions begin anew with each, and the first token of a document is not
predicted from the one before. transformers' models see that a sequence is packed by positions that begin anew.
"""

from __future__ import annotations

from typing import Any

import torch

from peers.errors import ManifestError

IGNORED = -100
"""The target that torch's cross-entropy leaves out."""


def window_loss(model: Any, windows: torch.Tensor, end: int | None = None, z_loss: float = 0.0) -> torch.Tensor:
    """Mean cross-entropy, in nats per token, of predicting tokens 1 … L of each window from those before.

    `windows` has shape (batch, L + 1). With `end`, documents are kept apart, and the mean is over the tokens predicted
    within one. With `z_loss`, so many times the mean of log(sum(exp(logits)))² is added.
    """
    inputs, targets = windows[:, :-1], windows[:, 1:]
    if end is None:
        logits = model(input_ids=inputs, use_cache=False).logits.flatten(0, 1).float()
        loss = torch.nn.functional.cross_entropy(logits, targets.flatten())
        return loss + z_loss * logits.logsumexp(-1).square().mean() if z_loss else loss
    logits = model(input_ids=inputs, position_ids=document_positions(inputs, end), use_cache=False).logits
    logits, targets = logits.flatten(0, 1).float(), targets.masked_fill(inputs == end, IGNORED).flatten()
    total = torch.nn.functional.cross_entropy(logits, targets, reduction="sum")
    if z_loss:
        total = total + z_loss * logits.logsumexp(-1).square()[targets != IGNORED].sum()
    return total / (targets != IGNORED).sum().clamp(min=1)  # there may be nothing but empty documents


def predicted_tokens(windows: torch.Tensor, end: int | None = None) -> int:
    """How many tokens `window_loss` is the mean of; at least 1."""
    inputs = windows[:, :-1]
    return inputs.numel() if end is None else max(1, int((inputs != end).sum()))


def document_positions(inputs: torch.Tensor, end: int) -> torch.Tensor:
    """Each token's position in its document, or in the part of it that the window has. Same shape as `inputs`."""
    places = torch.arange(inputs.shape[1], device=inputs.device).expand_as(inputs)
    begins = torch.zeros_like(inputs, dtype=torch.bool)
    begins[:, 1:] = inputs[:, :-1] == end
    return places - (places * begins).cummax(1).values


@torch.no_grad()
def check_document_mask(model: Any) -> None:
    """Whether the model keeps documents apart when positions begin anew: not every architecture does.

    Raises: ManifestError when what it says of a document depends on the one before.
    """
    was_training, device = model.training, next(model.parameters()).device
    model.eval()
    ids = torch.arange(6, device=device) % model.config.vocab_size
    packed = torch.stack([ids, torch.cat([ids.flip(0)[:3], ids[3:]])])  # two first documents, one second document
    positions = (torch.arange(6, device=device) % 3).expand(2, -1)
    first, second = model(input_ids=packed, position_ids=positions, use_cache=False).logits[:, 3:].float()
    model.train(was_training)
    if not torch.allclose(first, second, rtol=1e-4, atol=1e-5):
        raise ManifestError(
            f"training.document_mask = true: {model.config.model_type} does not keep packed documents apart with this "
            "version of transformers.",
            "Choose another architecture, such as llama, qwen2 or gpt2, or leave the mask out.",
        )
