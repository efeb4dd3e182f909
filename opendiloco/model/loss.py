"""The loss of a batch of windows of packed documents. To save memory, it is computed for a part of the positions at a
time."""

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
# A window may hold several documents, or parts of them, each closed by the token `end`. With a document mask, a token
# attends only to its own document, positions restart with each document, and the first token of a document is not
# predicted from the document before. transformers' models recognise a packed sequence by positions that restart.

IGNORED = -100
"""The target that torch's cross-entropy ignores."""

FINDS_DOCUMENTS, WARNS_OF_PADDING = "find_packed_sequence_indices", "warn_if_padding_and_no_attention_mask"
"""transformers' names for its checks of a batch: a function that reads positions, and a method that reads tokens."""
_known: ContextVar[bool | None] = ContextVar("_known", default=None)
"""True if the windows of the present forward pass are packed, False if not; None if the model should check."""


def window_loss(
    model: Any,
    windows: torch.Tensor,
    end: int | None = None,
    z_loss: float = 0.0,
    router_loss: float = 0.0,
    slope: float | None = None,
    compiled: CompiledLoss | None = None,
) -> torch.Tensor:
    """Return the mean cross-entropy, in nats per token, of predicting each token of a window but the first from the
    tokens before it. With `end`, the id that ends documents, each document is predicted separately, as if alone.

    `windows` has shape (batch, L + 1). With `end`, the mean is over the tokens that are predicted within a document.
    `z_loss` is the weight of an added mean of log(sum(exp(logits)))²; `router_loss` is the weight of the routers' loss
    for an uneven use of experts (see `router_loss_weight`).

    With `slope`, the caller must multiply the loss by exactly this number before the backward pass: gradients that are
    computed together with the loss already include it. With `compiled`, the loss of the logits is computed by that.
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
    """Return the sum of the cross-entropies of all targets except `IGNORED`, plus the z-loss, in fp32. The model's own
    `changes` are applied to the logits first."""
    for operation, numbers in changes:
        logits = operation(logits, *numbers)
    values = logits.float()
    total = torch.nn.functional.cross_entropy(values, targets, reduction="sum")
    if z_loss:
        total = total + z_loss * (values.logsumexp(-1).square() * (targets != IGNORED)).sum()
    return total


def router_loss_weight(model: Any) -> float:
    """Return the weight of a mixture of experts' router loss in training, from the model's configuration.

    transformers computes that loss on request, but adds it only to a loss that it computes itself. The weight is 0 for
    other models, and for mixtures whose routers are balanced without a loss.
    """
    weight = getattr(model, "router_aux_loss_coef", None) or getattr(model, "aux_loss_coef", None)
    return float(weight or 0.0)


def predicted_tokens(windows: NDArray[np.int64], end: int | None = None) -> int:
    """Return the number of tokens over which `window_loss` takes the mean, at least 1. `end` is the id that ends
    documents, or None if documents are not kept apart."""
    inputs = windows[:, :-1]
    return inputs.size if end is None else max(1, int((inputs != end).sum()))


@contextmanager
def packing_known(is_packed: bool) -> Iterator[None]:
    """Make transformers' models treat all batches in the context as packed if `is_packed`, else as not packed. The
    models skip their checks of each batch, which make the host wait until the device has finished its queued work."""
    _patch_transformers()
    before = _known.set(is_packed)
    try:
        yield
    finally:
        _known.reset(before)


@cache
def _patch_transformers() -> None:
    """Replace transformers' checks of each batch for packing and padding, for the life of the process. From then on
    they run only outside of `packing_known`. A check that the installed version does not have is skipped."""
    masks, models = (importlib.import_module(f"transformers.{name}") for name in ("masking_utils", "modeling_utils"))
    find: Callable[[torch.Tensor], torch.Tensor | None] | None = getattr(masks, FINDS_DOCUMENTS, None)
    warn: Callable[..., None] | None = getattr(models.PreTrainedModel, WARNS_OF_PADDING, None)
    if find is not None:
        setattr(masks, FINDS_DOCUMENTS, lambda positions: _documents(positions, find))
    if warn is not None:

        def warn_unless_known(*arguments: Any, **options: Any) -> None:
            if _known.get() is None:
                warn(*arguments, **options)

        setattr(models.PreTrainedModel, WARNS_OF_PADDING, warn_unless_known)


def _documents(positions: torch.Tensor, find: Callable[[torch.Tensor], torch.Tensor | None]) -> torch.Tensor | None:
    """Return the index of each token's document in its window; None if each window has one document. Call `find`,
    transformers' own slow check, only outside the context `packing_known`, which already says if windows are packed."""
    is_packed = _known.get()
    if is_packed is None:
        return find(positions)
    if not is_packed:
        return None
    follows = positions[:, 1:] == positions[:, :-1] + 1
    return torch.nn.functional.pad((~follows).cumsum(-1), (1, 0))


def _document_positions(inputs: torch.Tensor, end: int) -> torch.Tensor:
    """Return each token's position in its document, counted from the window's beginning or from the last id `end`, in
    the shape of `inputs`."""
    places = torch.arange(inputs.shape[1], device=inputs.device).expand_as(inputs)
    begins = torch.zeros_like(inputs, dtype=torch.bool)
    begins[:, 1:] = inputs[:, :-1] == end
    return places - (places * begins).cummax(1).values


@torch.no_grad()
def check_document_mask(model: Any) -> None:
    """Raise ManifestError if a document's logits depend on the document before it in the window although positions
    restart. Some architectures of transformers do not keep documents apart."""
    was_training, device = model.training, next(model.parameters()).device
    model.eval()
    ids = torch.arange(6, device=device) % model.config.vocab_size
    packed = torch.stack([ids, torch.cat([ids.flip(0)[:3], ids[3:]])])  # windows that differ in the first document
    positions = (torch.arange(6, device=device) % 3).expand(2, -1)
    first, second = model(input_ids=packed, position_ids=positions, use_cache=False).logits[:, 3:].float()
    model.train(was_training)
    if not torch.allclose(first, second, rtol=1e-4, atol=1e-5):
        raise ManifestError(
            f"training.document_mask = true: {model.config.model_type} does not keep packed documents apart with this "
            "version of transformers.",
            "Choose another architecture, such as llama, qwen2 or gpt2, or remove training.document_mask.",
        )


# Loss in pieces -------------------------------------------------------------------------------------------------------
# The loss of many positions is computed without having the logits of all positions in memory at once.
#
# A vocabulary is much wider than a model's hidden states, so the logits of all positions would fill a device's memory.
# The model therefore computes only hidden states. The logits, the loss and, in training, the gradient are computed for
# one piece of the positions after the other, and only the loss and the gradient are kept. This needs as much arithmetic
# as computing all logits at once.
#
# torch.nn.functional.linear_cross_entropy also works by pieces, but it has no z-loss, cannot apply a model's changes to
# its logits, and torch.compile does not fuse it.

LOGITS_AT_ONCE = {"cpu": 1 << 24, "cuda": 1 << 26}
"""Most logits computed at once (a piece), by device. Each piece reads and writes the gradient of the head's weight
once. That is slow compared with the rest of a GPU's work, so its pieces are larger, if they fit its memory."""
LEAST_LOGITS = 1 << 24
"""The least result of `fitting_logits`, for a GPU with little free memory."""
ELEMENTWISE = (torch.Tensor.mul, torch.Tensor.div, torch.Tensor.float, torch.Tensor.tanh, torch.tanh)
"""Operations that models apply to logits: scaling (cohere, granite) and soft-capping (gemma2)."""

Change = tuple[Callable[..., torch.Tensor], tuple[float, ...]]
"""An operation in `ELEMENTWISE`, and its numeric arguments after the logits."""

_most: ContextVar[int] = ContextVar("_most", default=sys.maxsize)
_without_pieces: WeakSet[Any] = WeakSet()
"""Models that need the logits of all positions at once, because `_head_skipped` does not work with them."""


class CompiledLoss:
    """The loss of logits, compiled by torch.compile, which makes fewer passes over the logits. After the first failure
    of the compiler, the loss is computed without compilation."""

    def __init__(self) -> None:
        self.compute: Callable[..., torch.Tensor] = torch.compile(_summed_loss)
        self.error: Exception | None = None
        """The error after which compilation was given up."""
        self.is_tried = False

    @contextmanager
    def tried(self) -> Iterator[None]:
        """Compute gradients within the context even where the caller needs none, so that the compiler compiles them in
        advance."""
        self.is_tried = True
        try:
            yield
        finally:
            self.is_tried = False

    def give_up(self, error: Exception) -> None:
        """Stop using the compiled loss because of `error`. Raises: torch.OutOfMemoryError if `error` is one, because
        that is not the compiler's fault."""
        if isinstance(error, torch.OutOfMemoryError):
            raise error
        self.error = error
        if not self.is_tried:
            self.say_why_not()

    def say_why_not(self) -> None:
        """Show the user why the compiled loss is not used, if compilation has failed."""
        if self.error is not None:
            at_stage(f"{NOT_COMPILING_THE_LOSS}: {first_line(self.error)}")


class _LogitsLoss(NamedTuple):
    """A function from logits of shape (positions, vocabulary) to their summed loss, after the model's own `changes` of
    the logits."""

    z_loss: float
    compiled: CompiledLoss | None
    changes: tuple[Change, ...] = ()

    @property
    def in_use(self) -> CompiledLoss | None:
        """The compiled loss; None if the caller gave none, or its compilation has failed."""
        return None if self.compiled is None or self.compiled.error is not None else self.compiled

    def __call__(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return _summed_loss(logits, targets, self.z_loss, self.changes)

    def with_slope(
        self, logits: Callable[[], torch.Tensor], targets: torch.Tensor, scale: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the summed loss of the logits that `logits()` returns, and `scale` times the loss's gradient with
        respect to them."""
        if (compiled := self.in_use) is not None:
            try:
                return self._with_slope(compiled.compute, logits, targets, scale)
            except Exception as error:  # PyTorch's compiler, Triton and C compilers raise many types
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
            edge = get_gradient_edge(logits)  # lets the gradient of the logits be computed after they are freed
            value = compute(logits, targets, self.z_loss, self.changes)
        del logits
        return value.detach(), torch.autograd.grad(value, edge, scale)[0]


def _model_and_loss(
    model: Any, inputs: Mapping[str, Any], targets: torch.Tensor, loss: _LogitsLoss, slope: float | None
) -> tuple[Any, torch.Tensor]:
    """Return the model's output and the mean loss of its logits. The output's logits must not be used. `slope` is the
    number by which the caller multiplies the loss before the backward pass; None if unknown.

    There is one target for each position. A sharded model keeps its head whole until the backward pass.
    """
    flat, head = targets.flatten(), _linear_head(model)
    count = (flat != IGNORED).sum().clamp(min=1)  # at least 1, because a batch may have only empty documents
    compiled = loss.in_use
    if head is not None and (compiled is not None or flat.numel() > positions_at_once(head.out_features, flat.device)):
        with _head_skipped(head) as calls:
            output = model(**inputs)
        if len(calls) == 1 and calls[0].is_complete(output.logits):
            hidden = output.logits.flatten(0, 1)
            learns = torch.is_grad_enabled() or (compiled is not None and compiled.is_tried)
            changed = loss._replace(changes=tuple(calls[0].changes))
            pieces = hidden, head.weight, head.bias, flat, count, changed, learns, slope
            return output, _LossByPieces.apply(*pieces)  # type: ignore[no-untyped-call]
        _give_up_pieces(model)  # `output` has hidden states in place of logits, so the model runs again
    output = model(**inputs)
    logits = output.logits.flatten(0, 1)
    if len(logits) > positions_at_once(logits.shape[-1], flat.device):
        _give_up_pieces(model)
    return output, _loss_of_whole(logits, flat, loss) / count


def _give_up_pieces(model: Any) -> None:
    if model not in _without_pieces:
        _without_pieces.add(model)
        at_stage("all logits are computed at once, which takes much memory: this model computes them in its own way")


def positions_at_once(vocabulary: int, device: torch.device) -> int:
    """Return the most positions whose logits are computed at once, in one piece."""
    at_once = LOGITS_AT_ONCE.get(device.type, LOGITS_AT_ONCE["cpu"])  # other types occur only in a user's own loop
    return min(max(1, at_once // vocabulary), _most.get())


def fitting_logits(device: torch.device, room: int) -> int:
    """Return the most logits to compute at once so that they fit into `room` bytes of a device's memory: a power of
    two, at least LEAST_LOGITS."""
    fitting: int = 1 << max(1, room // LOGIT_BYTES).bit_length() - 1
    return min(max(LEAST_LOGITS, fitting), LOGITS_AT_ONCE[device.type])


def limit_logits(device: torch.device, logits: int) -> None:
    """Set the most logits that are computed at once on devices of this type, for the life of the process."""
    LOGITS_AT_ONCE[device.type] = logits


@contextmanager
def in_pieces_of(positions: int) -> Iterator[None]:
    """Limit the number of token positions whose logits are computed at once to `positions`, while the context is
    open."""
    before = _most.set(positions)
    try:
        yield
    finally:
        _most.reset(before)


def _linear_head(model: Any) -> torch.nn.Linear | None:
    """Return the model's layer that computes logits from hidden states; None unless it is a plain torch.nn.Linear."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if isinstance(head, torch.nn.Linear) and type(head).forward is torch.nn.Linear.forward:
        return None if model in _without_pieces else head
    return None


@contextmanager
def _head_skipped(head: torch.nn.Linear) -> Iterator[list[_LogitsRecord]]:
    """Make the head return its input, the hidden states, in place of logits within the context. For each call of the
    head, the yielded list gets a record of the model's later operations on the result."""
    calls: list[_LogitsRecord] = []

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        record = _LogitsRecord(_without_view(hidden))
        calls.append(record)
        stack.enter_context(record)
        return record.hidden

    with ExitStack() as stack:
        stack.enter_context(with_forward(head, forward))
        yield calls


class _LogitsRecord(TorchFunctionMode):
    """A record of the ELEMENTWISE operations, such as scaling, that a model applies to its logits. They are recorded
    instead of run, because the model gets hidden states in place of logits."""

    def __init__(self, hidden: torch.Tensor) -> None:
        super().__init__()
        self.hidden, self.version = hidden, hidden._version
        self.changes: list[Change] = []

    def is_complete(self, output: torch.Tensor) -> bool:
        """Return True if the model applied only recorded operations to its logits. Then its `output` is `self.hidden`,
        unchanged."""
        return output is self.hidden and output._version == self.version

    def __torch_function__(
        self, operation: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        numbers = args[1:]
        is_known = operation in ELEMENTWISE and not kwargs and all(isinstance(one, int | float) for one in numbers)
        if not is_known or args[0] is not self.hidden:
            return operation(*args, **(kwargs or {}))
        self.changes.append((operation, tuple(numbers)))
        return self.hidden


def _without_view(tensor: torch.Tensor) -> torch.Tensor:
    """Return the base tensor if `tensor` is a view of the whole base, else `tensor`. FSDP2 warns of models that return
    views."""
    base = tensor._base
    is_same = base is not None and (base.shape, base.stride()) == (tensor.shape, tensor.stride())
    return base if base is not None and is_same and base.data_ptr() == tensor.data_ptr() else tensor


@contextmanager
def with_forward(module: Any, forward: Callable[..., Any]) -> Iterator[None]:
    """Replace a module's forward method within the context. A forward method of the instance, such as a compiled one,
    is restored afterwards."""
    before = vars(module).get("forward")
    module.forward = forward
    try:
        yield
    finally:
        del module.forward
        if before is not None:
            module.forward = before


class _LossByPieces(torch.autograd.Function):
    """The mean loss of hidden states over `count` targets, computed in pieces. The forward pass also computes the
    gradients, multiplied by `slope` if given; otherwise the backward pass multiplies them by the loss's gradient."""

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
            torch._assert_async(slope == torch.full_like(slope, ctx.slope), "the loss has another slope than given")
        by_hidden, *by_head = gradient
        return by_hidden, *(None if one is None else one.to(ctx.dtype) for one in by_head), *[None] * 5


class _Gradient(NamedTuple):
    """The gradients with respect to the hidden states, and to the head's weight and bias; None if not needed. The last
    two are sums over pieces in fp32, because sums in bf16 would lose most of each piece."""

    by_hidden: torch.Tensor | None
    by_weight: torch.Tensor | None
    by_bias: torch.Tensor | None

    def add(self, piece: slice, slope: torch.Tensor, states: torch.Tensor, matrix: torch.Tensor) -> None:
        """Add the gradients of one piece: `slope` is the gradient with respect to its logits, `states` are its hidden
        states, and `matrix` is the head's weight."""
        if self.by_hidden is not None:
            self.by_hidden[piece] = slope @ matrix
        if self.by_weight is not None:
            _add_product(self.by_weight, slope.T, states)
        if self.by_bias is not None:
            self.by_bias.add_(slope.sum(0, dtype=torch.float32))


def _add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Add the matrix product `left` @ `right` to the fp32 tensor `total`. If torch can, it adds the product without
    first rounding it to the dtype of `left`."""
    if left.dtype != total.dtype and _multiplies_into_fp32(left.device, left.dtype):
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    elif left.dtype == total.dtype or left.device.type == "cpu":
        total.addmm_(left.to(total.dtype), right.to(total.dtype))
    else:  # on a GPU with an older torch, a product in fp32 is many times slower than a rounded one
        total.add_(left @ right)


@cache
def _multiplies_into_fp32(device: torch.device, dtype: torch.dtype) -> bool:
    """Return True if torch can add a product of matrices of this dtype to an fp32 tensor on the device. Only torch 2.10
    and newer can, and only on CUDA."""
    total, one = torch.zeros(8, 8, device=device), torch.zeros(8, 8, dtype=dtype, device=device)
    try:
        torch.addmm(total, one, one, out_dtype=total.dtype, out=total)
    except (NotImplementedError, RuntimeError, TypeError):
        return False
    return True


def _loss_of_whole(logits: torch.Tensor, targets: torch.Tensor, loss: _LogitsLoss) -> torch.Tensor:
    """Return the summed loss of logits that are all in memory. For many logits, it is computed in pieces, and again in
    the backward pass, because the softmax of all logits in fp32 would need twice their memory."""
    rows = positions_at_once(logits.shape[-1], logits.device)
    if len(targets) <= rows:
        return loss(logits, targets)
    compute: Callable[..., torch.Tensor] = loss.__call__
    if torch.is_grad_enabled():
        compute = partial(checkpoint, loss, use_reentrant=False, preserve_rng_state=False)
    return torch.stack([compute(*piece) for piece in zip(logits.split(rows), targets.split(rows), strict=True)]).sum()
