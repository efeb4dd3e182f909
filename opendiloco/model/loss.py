"""The loss of a batch of windows, in which documents are packed, computed some positions at a time."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import cache, partial
from typing import Any, NamedTuple
from weakref import WeakSet

import numpy as np
import torch
from numpy.typing import NDArray
from torch.autograd.function import once_differentiable
from torch.autograd.graph import get_gradient_edge
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from opendiloco.errors import first_line
from opendiloco.host_memory import LOGIT_BYTES
from opendiloco.stages import NOT_COMPILING_THE_LOSS, at_stage
from peers.errors import ManifestError

# Packed documents -----------------------------------------------------------------------------------------------------
# Documents packed into windows: where each begins, and the loss of a batch of windows.
#
# Windows are cut from documents that follow one another, each closed by the token `end`. With a document mask no token
# attends to another document than its own, positions begin anew with each, and the first token of a document is not
# predicted from the one before. transformers' models see that a sequence is packed by positions that begin anew.

IGNORED = -100
"""The target that torch's cross-entropy leaves out."""

FINDS_DOCUMENTS, WARNS_OF_PADDING = "find_packed_sequence_indices", "warn_if_padding_and_no_attention_mask"
"""What transformers looks with: a function at positions, and a method of its models at tokens."""
_known: ContextVar[bool | None] = ContextVar("_known", default=None)
"""Whether the windows of the present forward pass have several documents; None if the model is to find out."""


def window_loss(
    model: Any,
    windows: torch.Tensor,
    end: int | None = None,
    z_loss: float = 0.0,
    router_loss: float = 0.0,
    slope: float | None = None,
    compiled: CompiledLoss | None = None,
) -> torch.Tensor:
    """Return the mean cross-entropy, in nats per token, of predicting tokens 1 … L of each window from those before.

    `windows` has shape (batch, L + 1). With `end`, documents are kept apart, and the mean is over the tokens predicted
    within one. With `z_loss`, so many times the mean of log(sum(exp(logits)))² is added; with `router_loss`, so many
    times what the model's routers lose by using its experts unevenly (see `router_loss_weight`).

    With `slope`, the loss is to be multiplied by this number before its backward pass, and by nothing else: a gradient
    that is computed with the loss has it already. With `compiled`, what is computed of logits goes through that.
    """
    inputs, targets = windows[:, :-1], windows[:, 1:]
    options: dict[str, Any] = {} if end is None else {"position_ids": _document_positions(inputs, end)}
    if router_loss:
        options["output_router_logits"] = True
    wanted = targets if end is None else targets.masked_fill(inputs == end, IGNORED)
    options |= {"input_ids": inputs, "use_cache": False}
    output, loss = _model_and_loss(model, options, wanted, _LogitsLoss(z_loss, compiled), slope)
    return loss + router_loss * output.aux_loss if router_loss else loss


def _summed_loss(
    logits: torch.Tensor, targets: torch.Tensor, z_loss: float, changes: tuple[Change, ...] = ()
) -> torch.Tensor:
    """Return the sum over the targets that are not ignored, computed in fp32, of the loss of logits after `changes`."""
    for operation, numbers in changes:
        logits = operation(logits, *numbers)
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
    """Have transformers ask `_known` first, if its version looks at all, for as long as the process lives."""
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


def _document_positions(inputs: torch.Tensor, end: int) -> torch.Tensor:
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


# Pieces ---------------------------------------------------------------------------------------------------------------
# The loss of many positions without all of their logits: the model's head and the softmax, some positions at a time.
#
# A vocabulary is much wider than a model, and the logits of all positions are what would fill a device's memory. So the
# model computes hidden states only. Of each piece of these the logits, the loss and, in training, the gradient are
# computed at once, and nothing but the loss and the gradient is kept. It takes no more arithmetic than whole logits do.
#
# torch.nn.functional.linear_cross_entropy goes by pieces, too, but it has no z-loss and no place for what a model does
# with its logits, and torch.compile leaves it as it is.

LOGITS_AT_ONCE = {"cpu": 1 << 24, "cuda": 1 << 26}
"""Logits of a piece, at most. For each piece the gradient of the head's weight goes through memory once. Beside what
else a GPU has to do that takes long, so its pieces are larger, where it has room for them."""
LEAST_LOGITS = 1 << 24
"""Logits of the pieces that a GPU with little room has."""
ONE_BY_ONE = (torch.Tensor.mul, torch.Tensor.div, torch.Tensor.float, torch.Tensor.tanh, torch.tanh)
"""What models do with logits: they scale them (cohere, granite), and keep them between bounds (gemma2)."""

Change = tuple[Callable[..., torch.Tensor], tuple[float, ...]]
"""One of these operations, and the numbers that it is given beside the logits."""

_most: ContextVar[int] = ContextVar("_most", default=sys.maxsize)
_without_pieces: WeakSet[Any] = WeakSet()
"""Models whose head cannot be left out."""


class CompiledLoss:
    """The loss of logits as torch.compile makes it: few passes over them, instead of one for each operation. When that
    fails for the first time, it is given up, and the loss is computed as it is written."""

    def __init__(self) -> None:
        self.compute: Callable[..., torch.Tensor] = torch.compile(_summed_loss)
        self.error: Exception | None = None
        """Why it was given up."""
        self.is_tried = False

    @contextmanager
    def tried(self) -> Iterator[None]:
        """Have gradients by logits computed meanwhile, also where none are wanted, so that all is compiled."""
        self.is_tried = True
        try:
            yield
        finally:
            self.is_tried = False

    def give_up(self, error: Exception) -> None:
        """Compute without it from now on. Raises: torch.OutOfMemoryError, which is no fault of the compiler."""
        if isinstance(error, torch.OutOfMemoryError):
            raise error
        self.error = error
        if not self.is_tried:
            self.say_why_not()

    def say_why_not(self) -> None:
        """Say why it was given up, if it was."""
        if self.error is not None:
            at_stage(f"{NOT_COMPILING_THE_LOSS}: {first_line(self.error)}")


class _LogitsLoss(NamedTuple):
    """The summed loss of what a model makes of logits, of shape (positions, vocabulary)."""

    z_loss: float
    compiled: CompiledLoss | None
    changes: tuple[Change, ...] = ()

    @property
    def in_use(self) -> CompiledLoss | None:
        """Return the compiled loss; None if there is none, or it was given up."""
        return None if self.compiled is None or self.compiled.error is not None else self.compiled

    def __call__(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return _summed_loss(logits, targets, self.z_loss, self.changes)

    def with_slope(
        self, logits: Callable[[], torch.Tensor], targets: torch.Tensor, scale: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the loss of the logits that are computed by a call, and `scale` times its gradient by these."""
        if (compiled := self.in_use) is not None:
            try:
                return self._with_slope(compiled.compute, logits, targets, scale)
            except Exception as error:  # PyTorch's compiler, Triton and a C compiler each have their own
                compiled.give_up(error)
        return self._with_slope(_summed_loss, logits, targets, scale)

    def _with_slope(
        self,
        compute: Callable[..., torch.Tensor],
        logits_of: Callable[[], torch.Tensor],
        targets: torch.Tensor,
        scale: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.enable_grad():
            logits = logits_of()
            edge = get_gradient_edge(logits)  # where the gradient by them is found when they are gone
            value = compute(logits, targets, self.z_loss, self.changes)
        del logits
        return value.detach(), torch.autograd.grad(value, edge, scale)[0]


def _model_and_loss(
    model: Any, inputs: Mapping[str, Any], targets: torch.Tensor, loss: _LogitsLoss, slope: float | None
) -> tuple[Any, torch.Tensor]:
    """Return what a model makes of its inputs, and the mean loss of its logits, which are not to be read from the
    former. For `slope` see `window_loss`.

    There is one of the `targets` for each position. A sharded model keeps its head whole until the backward pass.
    """
    flat, head = targets.flatten(), _linear_head(model)
    count = (flat != IGNORED).sum().clamp(min=1)  # there may be nothing but empty documents
    compiled = loss.in_use
    if head is not None and (compiled is not None or flat.numel() > positions_at_once(head.out_features, flat.device)):
        with _head_left_out(head) as calls:
            output = model(**inputs)
        if len(calls) == 1 and calls[0].stand_for(output.logits):
            hidden = output.logits.flatten(0, 1)
            learns = torch.is_grad_enabled() or (compiled is not None and compiled.is_tried)
            changed = loss._replace(changes=tuple(calls[0].changes))
            pieces = hidden, head.weight, head.bias, flat, count, changed, learns, slope
            return output, _LossByPieces.apply(*pieces)  # type: ignore[no-untyped-call]
        _give_up_pieces(model)  # and what it has computed is of no use
    output = model(**inputs)
    logits = output.logits.flatten(0, 1)
    if len(logits) > positions_at_once(logits.shape[-1], flat.device):
        _give_up_pieces(model)
    return output, _loss_of_whole(logits, flat, loss) / count


def _give_up_pieces(model: Any) -> None:
    if model not in _without_pieces:
        _without_pieces.add(model)
        at_stage("all logits are computed at once, which takes much memory: this model makes them in its own way")


def positions_at_once(vocabulary: int, device: torch.device) -> int:
    """Return how many positions a piece has, at most."""
    at_once = LOGITS_AT_ONCE.get(device.type, LOGITS_AT_ONCE["cpu"])  # one's own loop may train on any device
    return min(max(1, at_once // vocabulary), _most.get())


def fitting_logits(device: torch.device, room: int) -> int:
    """Return the logits of a piece that take no more than `room` bytes of a device, but are not fewer than is
    sensible: a power of two."""
    fitting: int = 1 << max(1, room // LOGIT_BYTES).bit_length() - 1
    return min(max(LEAST_LOGITS, fitting), LOGITS_AT_ONCE[device.type])


def limit_logits(device: torch.device, logits: int) -> None:
    """Have pieces with no more logits than these on such a device, for as long as the process lives."""
    LOGITS_AT_ONCE[device.type] = logits


@contextmanager
def in_pieces_of(positions: int) -> Iterator[None]:
    """Have pieces with no more positions than these."""
    before = _most.set(positions)
    try:
        yield
    finally:
        _most.reset(before)


def _linear_head(model: Any) -> torch.nn.Linear | None:
    """Return the layer that makes logits of hidden states, if it is as PyTorch has it."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if isinstance(head, torch.nn.Linear) and type(head).forward is torch.nn.Linear.forward:
        return None if model in _without_pieces else head
    return None


@contextmanager
def _head_left_out(head: torch.nn.Linear) -> Iterator[list[_Notes]]:
    """Meanwhile a head returns the hidden states that it is given, as if they were logits.

    What the model then does with each of them alone is noted, for each time that it calls its head, to be done with
    logits later.
    """
    calls: list[_Notes] = []

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        notes = _Notes(_without_view(hidden))
        calls.append(notes)
        stack.enter_context(notes)
        return notes.hidden

    with ExitStack() as stack:
        stack.enter_context(with_forward(head, forward))
        yield calls


class _Notes(TorchFunctionMode):
    """Notes what is done with each of some hidden states alone, instead of doing it."""

    def __init__(self, hidden: torch.Tensor) -> None:
        super().__init__()
        self.hidden, self.version = hidden, hidden._version
        self.changes: list[Change] = []

    def stand_for(self, logits: torch.Tensor) -> bool:
        """Return whether the model returned these hidden states as its logits, and did nothing else with them."""
        return logits is self.hidden and logits._version == self.version

    def __torch_function__(
        self, operation: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        numbers = args[1:]
        is_known = operation in ONE_BY_ONE and not kwargs and all(isinstance(one, int | float) for one in numbers)
        if not is_known or args[0] is not self.hidden:
            return operation(*args, **(kwargs or {}))
        self.changes.append((operation, tuple(numbers)))
        return self.hidden


def _without_view(tensor: torch.Tensor) -> torch.Tensor:
    """Return what a tensor is a view of, if it is a view of all of it: FSDP2 warns of models that return views."""
    base = tensor._base
    is_same = base is not None and (base.shape, base.stride()) == (tensor.shape, tensor.stride())
    return base if base is not None and is_same and base.data_ptr() == tensor.data_ptr() else tensor


@contextmanager
def with_forward(module: Any, forward: Callable[..., Any]) -> Iterator[None]:
    """Have a module's forward pass replaced. One of its own, such as a compiled one, is there again afterwards."""
    before = vars(module).get("forward")
    module.forward = forward
    try:
        yield
    finally:
        del module.forward
        if before is not None:
            module.forward = before


class _LossByPieces(torch.autograd.Function):
    """The loss of hidden states, as the mean over `count` targets. Its gradients come of the forward pass; the backward
    pass only multiplies them, unless they have its slope already."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        count: torch.Tensor,
        loss: _LogitsLoss,
        learns: bool,
        slope: float | None,
    ) -> torch.Tensor:
        by_hidden, by_weight, by_bias = (learns and wanted for wanted in ctx.needs_input_grad[:3])
        kind = weight.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
        matrix, shift = weight.to(dtype), None if bias is None else bias.to(dtype)
        scale = (1.0 if slope is None else slope) / count
        gradient = _Gradient(
            torch.empty_like(hidden) if by_hidden else None,
            torch.zeros_like(weight, dtype=torch.float32) if by_weight else None,
            torch.zeros_like(bias, dtype=torch.float32) if by_bias and bias is not None else None,
        )

        def value_of(piece: slice) -> torch.Tensor:
            states = hidden[piece].detach().to(dtype)
            if not (by_hidden or by_weight or by_bias):
                return loss(torch.nn.functional.linear(states, matrix, shift), targets[piece])
            logits = partial(torch.nn.functional.linear, states.requires_grad_(), matrix, shift)
            value, by_logits = loss.with_slope(logits, targets[piece], scale)
            gradient.add(piece, by_logits, states, matrix)
            return value

        rows = positions_at_once(len(weight), hidden.device)
        values = [value_of(slice(start, start + rows)) for start in range(0, len(hidden), rows)]
        ctx.gradient, ctx.dtype, ctx.slope = gradient, weight.dtype, slope
        return torch.stack(values).sum() / count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: torch.Tensor) -> Any:
        gradient, ctx.gradient = ctx.gradient, None
        if ctx.slope is None:
            gradient = [None if one is None else one.mul_(slope) for one in gradient]
        else:
            torch._assert_async(slope == torch.full_like(slope, ctx.slope), "this loss has another slope than was said")
        by_hidden, *by_head = gradient
        return by_hidden, *(None if one is None else one.to(ctx.dtype) for one in by_head), *[None] * 5


class _Gradient(NamedTuple):
    """By hidden states, and by a head's weight and bias, what is wanted of it. The latter two are sums over pieces, in
    fp32: in bf16 they would lose most of what each of many pieces adds."""

    by_hidden: torch.Tensor | None
    by_weight: torch.Tensor | None
    by_bias: torch.Tensor | None

    def add(self, piece: slice, slope: torch.Tensor, states: torch.Tensor, matrix: torch.Tensor) -> None:
        """Add that of a piece, from the gradient by its logits."""
        if self.by_hidden is not None:
            self.by_hidden[piece] = slope @ matrix
        if self.by_weight is not None:
            _add_product(self.by_weight, slope.T, states)
        if self.by_bias is not None:
            self.by_bias.add_(slope.sum(0, dtype=torch.float32))


def _add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Add a product of matrices to a sum in fp32. The product is not rounded to the matrices' dtype where torch can."""
    if left.dtype != total.dtype and _multiplies_into_fp32(left.device, left.dtype):
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    elif left.dtype == total.dtype or left.device.type == "cpu":
        total.addmm_(left.to(total.dtype), right.to(total.dtype))
    else:  # an older torch, with which a GPU multiplies in fp32 many times slower
        total.add_(left @ right)


@cache
def _multiplies_into_fp32(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether torch adds products of this dtype to fp32 on a device: since torch 2.10, on CUDA alone."""
    total, one = torch.zeros(8, 8, device=device), torch.zeros(8, 8, dtype=dtype, device=device)
    try:
        torch.addmm(total, one, one, out_dtype=total.dtype, out=total)
    except (NotImplementedError, RuntimeError, TypeError):
        return False
    return True


def _loss_of_whole(logits: torch.Tensor, targets: torch.Tensor, loss: _LogitsLoss) -> torch.Tensor:
    """Return the summed loss of logits that are there. Of many, the softmax is computed some at a time, and again in
    the backward pass, since it takes them twice more in fp32."""
    rows = positions_at_once(logits.shape[-1], logits.device)
    if len(targets) <= rows:
        return loss(logits, targets)
    compute: Callable[..., torch.Tensor] = loss.__call__
    if torch.is_grad_enabled():
        compute = partial(checkpoint, loss, use_reentrant=False, preserve_rng_state=False)
    return torch.stack([compute(*piece) for piece in zip(logits.split(rows), targets.split(rows), strict=True)]).sum()
