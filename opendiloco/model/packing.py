"""Documents packed into windows: where each begins, and the loss of a batch of windows.

Windows are cut from documents that follow one another, each closed by the token `end`. With a document mask no token
attends to another document than its own, positions begin anew with each, and the first token of a document is not
predicted from the one before. transformers' models see that a sequence is packed by positions that begin anew.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from opendiloco.model.head import model_and_loss
from peers.errors import ManifestError

IGNORED = -100
"""The target that torch's cross-entropy leaves out."""

FINDS_DOCUMENTS, WARNS_OF_PADDING = "find_packed_sequence_indices", "warn_if_padding_and_no_attention_mask"
"""What transformers looks with: a function at positions, and a method of its models at tokens."""
_known: ContextVar[bool | None] = ContextVar("_known", default=None)
"""Whether the windows of the present forward pass have several documents; None if the model is to find out."""


def window_loss(
    model: Any, windows: torch.Tensor, end: int | None = None, z_loss: float = 0.0, router_loss: float = 0.0
) -> torch.Tensor:
    """Return the mean cross-entropy, in nats per token, of predicting tokens 1 … L of each window from those before.

    `windows` has shape (batch, L + 1). With `end`, documents are kept apart, and the mean is over the tokens predicted
    within one. With `z_loss`, so many times the mean of log(sum(exp(logits)))² is added; with `router_loss`, so many
    times what the model's routers lose by using its experts unevenly (see `router_loss_weight`).
    """
    inputs, targets = windows[:, :-1], windows[:, 1:]
    options: dict[str, Any] = {} if end is None else {"position_ids": document_positions(inputs, end)}
    if router_loss:
        options["output_router_logits"] = True
    wanted = targets if end is None else targets.masked_fill(inputs == end, IGNORED)
    options |= {"input_ids": inputs, "use_cache": False}
    output, total = model_and_loss(model, options, wanted, partial(_summed_loss, z_loss=z_loss))
    loss = total / (wanted != IGNORED).sum().clamp(min=1)  # there may be nothing but empty documents
    return loss + router_loss * output.aux_loss if router_loss else loss


def _summed_loss(logits: torch.Tensor, targets: torch.Tensor, z_loss: float) -> torch.Tensor:
    """Return the sum over the targets that are not ignored, computed in fp32."""
    values = logits.float()
    total = torch.nn.functional.cross_entropy(values, targets, reduction="sum")
    if z_loss:
        total = total + z_loss * (values.logsumexp(-1).square() * (targets != IGNORED)).sum()
    return total


def router_loss_weight(model: Any) -> float:
    """Return the weight of the routers' loss in training, as the configuration of a mixture of experts says it.

    transformers computes that loss when it is asked for it, and adds it to a loss that it computes itself. It is 0 for
    other models, and for mixtures whose routers are balanced without a loss.
    """
    weight = getattr(model, "router_aux_loss_coef", None) or getattr(model, "aux_loss_coef", None)
    return float(weight or 0.0)


def predicted_tokens(windows: NDArray[np.int64], end: int | None = None) -> int:
    """Return how many tokens `window_loss` is the mean of; at least 1."""
    inputs = windows[:, :-1]
    return inputs.size if end is None else max(1, int((inputs != end).sum()))


@contextmanager
def packing_known(is_packed: bool) -> Iterator[None]:
    """Have transformers' models take it from us whether windows are packed, and that they have no padding.

    By themselves they look at each batch, for which the host waits until the device is done with all that it was given
    before.
    """
    _take_what_is_known()
    before = _known.set(is_packed)
    try:
        yield
    finally:
        _known.reset(before)


@cache
def _take_what_is_known() -> None:
    """Have transformers ask `_known` first, for as long as the process lives. A version that does not look has nothing
    to ask."""
    masks, models = (importlib.import_module(f"transformers.{name}") for name in ("masking_utils", "modeling_utils"))
    find: Callable[[torch.Tensor], torch.Tensor | None] | None = getattr(masks, FINDS_DOCUMENTS, None)
    warn: Callable[..., None] | None = getattr(models.PreTrainedModel, WARNS_OF_PADDING, None)
    if find is not None:
        setattr(masks, FINDS_DOCUMENTS, lambda positions: _documents(positions, find))
    if warn is not None:

        def warn_of_others(*arguments: Any, **options: Any) -> None:
            if _known.get() is None:
                warn(*arguments, **options)

        setattr(models.PreTrainedModel, WARNS_OF_PADDING, warn_of_others)


def _documents(positions: torch.Tensor, find: Callable[[torch.Tensor], torch.Tensor | None]) -> torch.Tensor | None:
    """Return the number of each token's document in its window; None where there is one document in each."""
    is_packed = _known.get()
    if is_packed is None:
        return find(positions)
    if not is_packed:
        return None
    follows = positions[:, 1:] == positions[:, :-1] + 1
    return torch.nn.functional.pad((~follows).cumsum(-1), (1, 0))


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
