"""Trials of compiled blocks, of attention and of the micro-batch's size. They run before training, so that training
does not fail.

Workers that share a model wait for each other at each of its blocks. If a trial fails on one worker, that worker must
therefore not leave the pass. It continues from the same block without the tried feature, and all workers compare their
results after the pass.
"""

from __future__ import annotations

import gc
import math
import shutil
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn.attention.flex_attention import BlockMask
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from opendiloco.errors import first_line
from opendiloco.host_memory import HostMemory, moments_bytes
from opendiloco.model.loss import in_pieces_of, positions_at_once, with_forward
from opendiloco.model.parameters import transformer_blocks
from opendiloco.quantities import VALUE_BYTES
from opendiloco.shared_memory import available_memory
from opendiloco.stages import COMPILING, COMPILING_AGAIN, COMPILING_MORE, NOT_COMPILING, TRYING_ATTENTION, at_stage
from opendiloco.training.team import Team, compiling_lacks, forget_peak_memory, peak_memory

if TYPE_CHECKING:
    from opendiloco.training.inner import ModelReplica


# Trials ---------------------------------------------------------------------------------------------------------------
class _Trial:
    """A trial forward pass, in which each block and a compiled loss also run a backward pass of their own.

    With an `attention`, the model uses that implementation. `error` is the first error of this worker's blocks. A
    compiled loss that was given up before is tried again.
    """

    def __init__(self, replica: ModelReplica, attention: str | None = None) -> None:
        if replica.compiled_loss is not None:
            replica.compiled_loss.error = None
        self.error: Exception | None = None
        self._replica = replica
        self._attention = attention
        self._own_attention = None if attention is None else replica.model.config._attn_implementation
        self._is_in_blocks = False

    def loss(self, windows: torch.Tensor) -> float:
        """Run the trial on windows and return their loss, which is meaningless if `error` is set. All workers must call
        this together.

        It leaves no gradient behind, and restores the state of the random numbers. An error that cannot be caught here
        ends the worker, and the other workers with it.
        """
        model, device = self._replica.model, windows.device
        with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.no_grad(), ExitStack() as stack:
            for block in transformer_blocks(model):
                stack.enter_context(with_forward(block, self._tried(block)))
            if self._attention is not None:
                stack.enter_context(with_forward(model, self._attending(model)))
            if self._replica.compiled_loss is not None:
                stack.enter_context(self._replica.compiled_loss.tried())
            return float(self._replica.loss(windows))

    def _tried(self, block: Any) -> Callable[..., Any]:
        """Return a function that replaces a block's forward pass and also tries a backward pass. After the first error,
        the block computes uncompiled."""
        forward, plain = block.forward, partial(type(block).forward, block)

        def computed(*arguments: Any, **options: Any) -> Any:
            self._is_in_blocks = True
            if self.error is None:
                try:
                    return _trained(block, forward, arguments, options)
                except Exception as error:  # PyTorch's compiler, Triton and C compilers raise their own errors
                    self.error = error.with_traceback(None)  # the traceback's frames would keep activations in memory
            with torch.compiler.set_stance("force_eager"), attending_by(self._replica.model, self._own_attention):
                return plain(
                    *map(_without_block_mask, arguments),
                    **{name: _without_block_mask(value) for name, value in options.items()},
                )

        return computed

    def _attending(self, model: Any) -> Callable[..., Any]:
        """Return a forward pass for the model that uses the tried attention. After an error before the first
        transformer block, it repeats the pass with the model's own attention. Later errors are raised."""
        forward = model.forward

        def computed(*arguments: Any, **options: Any) -> Any:
            try:
                with attending_by(model, self._attention):
                    return forward(*arguments, **options)
            except Exception as error:
                if self._is_in_blocks:
                    raise
                self.error = error.with_traceback(None)
            return forward(*arguments, **options)

        return computed


def _trained(block: Any, forward: Callable[..., Any], arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Run a forward pass and a backward pass of one transformer block, discard the gradients, and return the block's
    output, detached.

    It waits for no other worker: FSDP2 has gathered the block's weights, and is not informed of the gradients.
    """
    inputs = [one.detach().requires_grad_() for one in arguments[:1]]  # the hidden states, which alone need a gradient
    with torch.enable_grad():
        output = forward(*inputs, *arguments[1:], **options)
        made = [one for one in tree_leaves(output) if isinstance(one, torch.Tensor) and one.requires_grad]
        wanted = [one for one in (*inputs, *block.parameters()) if one.requires_grad]
        torch.autograd.grad(made, wanted, [torch.ones_like(one) for one in made], allow_unused=True)
    return tree_map_only(torch.Tensor, torch.Tensor.detach, output)


def _without_block_mask(value: Any) -> Any:
    """Return None for flex attention's mask, which uncompiled code would expand to all pairs of tokens. Return any
    other argument unchanged."""
    return None if isinstance(value, BlockMask) else value


@contextmanager
def attending_by(model: Any, attention: str | None) -> Iterator[None]:
    """Make a transformers model use the attention implementation of this name inside the `with` block. None leaves the
    model unchanged."""
    if attention is None:
        yield
        return
    config = model.config
    before, config._attn_implementation = config._attn_implementation, attention
    try:
        yield
    finally:
        config._attn_implementation = before


def _trial_windows(replica: ModelReplica, device: torch.device) -> list[torch.Tensor]:
    """Return one batch of token ids for each size in the replica's `tried_sizes`."""
    ids = torch.arange(replica.window_length, device=device).remainder(replica.model.config.vocab_size)
    return [ids.repeat(windows, 1) for windows in replica.tried_sizes]


def compile_blocks(model: Any) -> None:
    """Compile the forward pass of each transformer block. If a model is to be sharded, it must be sharded before this
    call.

    FSDP2 gives a block another class, whose forward is the one that checkpoints activations. A forward bound before
    that checkpoints nothing.
    """
    for block in transformer_blocks(model):
        block.forward = torch.compile(block.forward)


def compiled_blocks(model: Any) -> list[Any]:
    """Return all transformer blocks if their forward passes are compiled, or an empty list if they are not."""
    return [block for block in transformer_blocks(model) if "forward" in vars(block)]


def keep_compiled_if_it_works(replica: ModelReplica, team: Team, cache: Path | None = None) -> str:
    """Compile the blocks for training now, in a pass that changes no weights. Return the reason why the blocks stay
    uncompiled, or an empty string. All workers must call this together.

    If compiling fails on any worker, all train uncompiled. If only the loss cannot be compiled, only the loss stays
    uncompiled. `cache` is this project's folder for compiled code. An out-of-memory error is not the compiler's fault:
    it would come up in training, too, which then goes on with fewer windows.
    """
    compiled, loss = compiled_blocks(replica.model), replica.compiled_loss
    if not compiled:
        return ""
    block_errors: list[Exception | None] = []  # for each attempt to compile: the first error in a block, or None

    def attempt() -> Exception | None:
        trial = _Trial(replica)
        for windows in _trial_windows(replica, team.device):
            trial.loss(windows)
        block_errors.append(trial.error)
        return trial.error or (None if loss is None else loss.error)

    at_stage(COMPILING)
    problem = _tried_twice(team, cache, attempt)
    if not problem or _works(team, block_errors[-1]):
        if loss is not None:
            loss.say_why_not()
        return ""
    for block in compiled:
        del block.forward
    replica.compiled_loss = None
    at_stage(f"{NOT_COMPILING}: {problem}")
    return problem


def _tried_twice(team: Team, cache: Path | None, attempt: Callable[[], Exception | None]) -> str:
    """Call `attempt`, which tries to compile. If it fails on any worker and `cache` had files, delete these and call it
    again. Return the reason of the last failure, or an empty string. All workers must call this together.

    A killed compiler may have left a library in the cache that cannot be loaded.
    """
    is_new = team.smallest(cache is None or not any(cache.iterdir()))
    error = attempt()
    if _works(team, error):
        return ""
    if cache is not None and not is_new:
        at_stage(COMPILING_AGAIN)
        if team.rank == 0:
            _empty(cache)
        team.wait_for_all()
        torch.compiler.reset()
        error = attempt()
        if _works(team, error):
            return ""
    return "another worker cannot compile." if error is None else first_line(error)


def _works(team: Team, error: Exception | None) -> bool:
    return bool(team.smallest(error is None or isinstance(error, torch.OutOfMemoryError)))


def _empty(folder: Path) -> None:
    with suppress(OSError):
        for path in folder.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


# Attention ------------------------------------------------------------------------------------------------------------
FLEX = "flex_attention"
"""The name of flex attention in transformers."""
FLEX_ON = {"cuda"}
TOLERANCE = 0.01
"""Share by which the trial's loss may differ, because the two implementations round differently in bf16."""


def document_attention(replica: ModelReplica, team: Team, end: int, cache: Path | None = None) -> str | None:
    """Return the name of the attention to train with, or None for the model's own. `end` is the token that ends a
    document.

    Flex attention is tried once if it can be compiled. It is used if it works on all workers and gives the same loss as
    the model's own. Workers call this together. For `cache` see `keep_compiled_if_it_works`.
    """
    if team.device.type not in FLEX_ON or compiling_lacks(team.device) is not None:
        return None
    at_stage(TRYING_ATTENTION)
    loss = replica.compiled_loss
    problems: list[Exception | None] = []

    def attempt() -> Exception | None:
        problems.append(_problem_with_flex(replica, team.device, end))
        problem = None if isinstance(problems[-1], _OtherLossError) else problems[-1]
        return problem or (None if loss is None else loss.error)

    _tried_twice(team, cache, attempt)
    if team.smallest(problems[-1] is None):
        if loss is not None:
            loss.say_why_not()
        return FLEX
    problem = "flex attention fails on another worker." if problems[-1] is None else first_line(problems[-1])
    at_stage(f"attention across documents is computed and masked, which is slower: {problem}")
    return None


class _OtherLossError(Exception):
    """Flex attention compiles, but gives another loss than the model's own attention."""


def _problem_with_flex(replica: ModelReplica, device: torch.device, end: int) -> Exception | None:
    """Try flex attention on windows with two documents each. Return the error if training cannot use flex attention,
    else None."""
    trial, wrong = _Trial(replica, FLEX), None
    for windows in _trial_windows(replica, device):  # no break: all workers must make equally many passes
        windows[:, windows.shape[1] // 2] = end
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):  # the blocks are compiled only for training
            expected = float(replica.loss(windows))
        found = trial.loss(windows)
        if not math.isclose(found, expected, rel_tol=TOLERANCE):
            wrong = _OtherLossError(f"flex attention gives a loss of {found:.4f} instead of {expected:.4f}.")
    return trial.error or wrong


# Micro-batch ----------------------------------------------------------------------------------------------------------
SHARE = {"cpu": 0.25, "cuda": 0.5}
"""Share of the free memory that windows may take by the size of their tensors.

Operations allocate memory for themselves, too, and malloc keeps much freed memory: on the CPU we measured 1.3 to 1.7
times the size of the tensors, and 3.6 times with activation checkpointing.
"""


def fixed_and_each(one: int, two: int) -> tuple[int, int]:
    """Return the number of bytes that do not depend on the number of windows, and the number for each window. `one` and
    `two` are the bytes that one and two windows use.

    The fixed bytes are for example the weights in bf16, or FSDP2's gathered weights.
    """
    each = min(max(1, two - one), one)
    return one - each, each


def fitting_micro_batch(replica: ModelReplica, piece: int, team: Team, trains: bool = True) -> int:
    """Return the number of windows that fit in memory: from 1 to `piece`, the same on all workers. All workers must
    call this together. Without `trains`, there is no backward pass."""
    if piece == 1:
        return 1  # no smaller micro-batch exists
    with trying(replica, team, trains) as taken:
        one = taken(1)
        team.wait_for_all()  # no worker may count the memory of another worker's trial
        room = _free_memory(team) - _taken_later(replica, team, trains)
        # With `reduces_once`, each worker keeps the gradients of all parameters, unsharded, until a batch's last
        # micro-batch. The trial does not, so their bytes are subtracted here.
        room -= VALUE_BYTES * replica.layout.size * replica.reduces_once
        if not team.smallest(room > 2 * one):
            return 1  # not even a trial with two windows is sure to fit
        fixed, each = fixed_and_each(one, taken(2))
        room = int(SHARE[team.device.type] * (room - fixed))
        fitting = team.smallest(min(room // each, piece))
        length = replica.window_length - 1
        at_once = positions_at_once(replica.model.config.vocab_size, team.device) // length
        if 1 < at_once < fitting:
            # Logits are computed for at most `at_once` windows at a time, so more windows need no more memory for
            # logits. All windows together need one buffer to add up the head's gradients (`added_up`).
            with in_pieces_of(length):
                two, three = taken(2), taken(3)
            beyond = min(max(1, three - two), each)
            added_up = max(0, two - fixed - each - beyond)
            further = max(0, room - added_up - at_once * each) // beyond
            fitting = team.smallest(min(at_once + further, piece))
    return max(1, fitting)


MEASURED_ON = {"cuda"}
"""Devices on which training itself is measured, because all memory use is known there."""
MEASURED_SHARE = 0.8
"""Share of the free memory that windows may take by this measurement. The rest is for gaps between tensors, and for
other programs."""


def enlarge_micro_batch(replica: ModelReplica, batch_size: int, team: Team) -> bool:
    """Raise the micro-batch if real training passes show that more windows fit in memory. Return False if a larger one
    was tried and does not work; the caller must then compile for the old size again.

    The passes use compiled blocks and the chosen attention. Only a single worker tries this. A worker that ran out of
    memory in a shared pass would leave the others waiting.
    """
    proven = replica.micro_batch
    if team.device.type not in MEASURED_ON or proven is None or proven >= batch_size or team.size > 1:
        return True
    replica.uncompiled_micro_batch = proven
    fitting = _fitting_as_trained(replica, batch_size, proven, team)
    while 2 * (more := _evenly(fitting, batch_size)) >= 3 * proven:
        at_stage(COMPILING_MORE)
        replica.micro_batch = more
        torch.compiler.reset()  # otherwise torch would now compile slower code, for any size
        fitting = _fitting_as_trained(replica, batch_size, more, team)
        if fitting < more:  # the pass failed, or there is no memory left for moments
            replica.micro_batch = proven
            torch.compiler.reset()
            gc.collect()  # free the memory of a failed pass
            return False
        proven = more
    return True


def _evenly(fitting: int, batch_size: int) -> int:
    """Cut a batch into as few equal parts as possible, each of at most `fitting` windows. Return the number of windows
    in a part, or 0 if `fitting` is 0."""
    return math.ceil(batch_size / math.ceil(batch_size / fitting)) if fitting else 0


def _fitting_as_trained(replica: ModelReplica, batch_size: int, at_once: int, team: Team) -> int:
    """Return the number of windows that fit in memory, computed from a pass over two parts of `at_once` windows, or 0
    if the pass fails.

    Except for gradients, memory that does not grow with the windows is counted as if it did.
    """
    ids = np.arange(replica.window_length) % replica.model.config.vocab_size
    batch = np.tile(ids, (min(2 * at_once, batch_size), 1))
    try:
        with torch.random.fork_rng([team.device] if team.device.type == "cuda" else []):
            replica.add_gradient(batch)  # not measured, because libraries allocate lasting memory at their first use
            replica.model.zero_grad(set_to_none=True)
            room = _free_memory(team) - _taken_later(replica, team, trains=True)
            peak = peak_while(lambda: replica.add_gradient(batch), team.device)
        gradients: int = sum(one.grad.nbytes for one in replica.model.parameters() if one.grad is not None)
        each = math.ceil(max(1, peak - gradients) / at_once)
        return max(0, int(MEASURED_SHARE * (room - gradients))) // each
    except Exception:  # compilers raise their own errors, and libraries report full memory in many ways
        return 0
    finally:
        replica.model.zero_grad(set_to_none=True)


def _taken_later(replica: ModelReplica, team: Team, trains: bool) -> int:
    """Return the bytes of this worker's free memory that windows must leave for later: for moments if the replica
    `trains`, and on the CPU also an equal share of the memory that the peer process needs."""
    trained, kept = replica.layout.size * trains // team.shards, replica.optimizer_state
    moments = moments_bytes(trained, kept)
    if team.device.type != "cpu":
        return moments
    moments += moments_bytes(trained, kept, is_on_host=True)
    host = HostMemory.of(replica.layout.size, replica.codec)
    return moments + ((host.most if trains else host.evaluating) - host.shared) // team.size


@contextmanager
def trying(replica: ModelReplica, team: Team, trains: bool = True) -> Iterator[Callable[[int], int]]:
    """Yield a function that runs a forward pass of a number of windows, and with `trains` a backward pass, and returns
    the peak of its memory in bytes.

    The weights have gradients during the measurement, as they do after a batch's first windows. Afterwards the replica
    is as before.
    """
    gpus = [team.device] if team.device.type == "cuda" else []

    def go(windows: int) -> None:
        ids = torch.zeros(windows, replica.window_length, dtype=torch.long, device=team.device)
        with torch.set_grad_enabled(trains):
            loss = replica.loss(ids)
        if trains:
            loss.backward()

    with torch.random.fork_rng(gpus), torch.compiler.set_stance("force_eager"):
        try:
            if trains:
                go(1)
            yield lambda windows: peak_while(lambda: go(windows), team.device)
        finally:
            replica.model.zero_grad(set_to_none=True)


def _free_memory(team: Team) -> int:
    """Return the number of free bytes for this worker: of its GPU, or its share of the machine's main memory."""
    if team.device.type == "cpu":
        return available_memory() // team.size
    unused = torch.cuda.memory_reserved(team.device) - torch.cuda.memory_allocated(team.device)
    return torch.cuda.mem_get_info(team.device)[0] + unused


def peak_while(work: Callable[[], object], device: torch.device) -> int:
    """Call `work`, and return the peak of the total size, in bytes, of the tensors that it allocates on this device."""
    if device.type == "cuda":
        forget_peak_memory(device)
        before: int = torch.cuda.memory_allocated(device)
        work()
        return peak_memory(device) - before
    noticed = _Noticing()
    with noticed:
        work()
    return noticed.peak


class _Noticing(TorchDispatchMode):
    """Measures the peak of the total size, in bytes, of the tensors that operations return. Memory that an operation
    uses internally is not counted."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = self._present = 0
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        inputs = [one.untyped_storage()._cdata for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
        result = operation(*args, **(kwargs or {}))
        for one in tree_leaves(result):
            if isinstance(one, torch.Tensor) and one.untyped_storage()._cdata not in inputs:
                self._notice(one.untyped_storage())
        return result

    def _notice(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self._storages:
            self._storages[key] = weakref.ref(storage, lambda _: self._forget(key, size))
            self._present += size
            self.peak = max(self.peak, self._present)

    def _forget(self, key: int, size: int) -> None:
        del self._storages[key]
        self._present -= size
