"""Trials before training, so that nothing breaks in it: compiled blocks, attention, and the size of a micro-batch.

Workers that share a model wait for each other at each of its blocks. So a worker on which something fails must not
leave the pass: it goes on without it, at the same block, and all compare notes when the pass is over.
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
    """A pass forward in which each block also trains, by itself, on what it is given there; so does a compiled loss.

    With an `attention`, the model attends by that implementation. `error` is the first one of this worker's blocks. A
    loss that was given up is tried anew.
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
        """Return the loss of windows; it says nothing after an error. Leaves no gradient behind, and no random numbers
        used. Workers call this together.

        Raises: what cannot be got round, so that the worker ends, and the others with it.
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
        """Return a block's forward pass that tries training; and, once something has failed, tries nothing."""
        forward, plain = block.forward, partial(type(block).forward, block)

        def computed(*arguments: Any, **options: Any) -> Any:
            self._is_in_blocks = True
            if self.error is None:
                try:
                    return _trained(block, forward, arguments, options)
                except Exception as error:  # PyTorch's compiler, Triton and a C compiler each have their own
                    self.error = error.with_traceback(None)  # whose frames would keep activations
            with torch.compiler.set_stance("force_eager"), attending_by(self._replica.model, self._own_attention):
                return plain(
                    *map(_without_block_mask, arguments),
                    **{name: _without_block_mask(value) for name, value in options.items()},
                )

        return computed

    def _attending(self, model: Any) -> Callable[..., Any]:
        """Return the model's forward pass by the other implementation; by its own if that fails before any block."""
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
    """Return what a block makes of its input, after a pass back through this block alone.

    Nothing waits for another worker here: FSDP2 has gathered the block's weights, and hears of no gradient.
    """
    inputs = [one.detach().requires_grad_() for one in arguments[:1]]  # hidden states come first, and they alone vary
    with torch.enable_grad():
        output = forward(*inputs, *arguments[1:], **options)
        made = [one for one in tree_leaves(output) if isinstance(one, torch.Tensor) and one.requires_grad]
        wanted = [one for one in (*inputs, *block.parameters()) if one.requires_grad]
        torch.autograd.grad(made, wanted, [torch.ones_like(one) for one in made], allow_unused=True)
    return tree_map_only(torch.Tensor, torch.Tensor.detach, output)


def _without_block_mask(value: Any) -> Any:
    """Return an argument; None for flex attention's mask, which uncompiled takes memory for all pairs of tokens."""
    return None if isinstance(value, BlockMask) else value


@contextmanager
def attending_by(model: Any, attention: str | None) -> Iterator[None]:
    """Have a transformers model compute attention by the implementation of this name; None leaves it as it is."""
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
    """Return batches of the replica's `tried_sizes`, for which blocks are compiled; as many on all workers."""
    ids = torch.arange(replica.window_length, device=device).remainder(replica.model.config.vocab_size)
    return [ids.repeat(windows, 1) for windows in replica.tried_sizes]


def compile_blocks(model: Any) -> None:
    """Compile each block's forward pass. To be called on a sharded model, not before it is sharded.

    FSDP2 gives a block another class, whose forward is the one that checkpoints activations; a forward that was bound
    before that checkpoints nothing.
    """
    for block in transformer_blocks(model):
        block.forward = torch.compile(block.forward)


def compiled_blocks(model: Any) -> list[Any]:
    """Return the blocks whose forward pass is compiled: all of them, or none."""
    return [block for block in transformer_blocks(model) if "forward" in vars(block)]


def keep_compiled_if_it_works(replica: ModelReplica, team: Team, cache: Path | None = None) -> str:
    """Compile now, for training, in a pass that changes nothing. Where that fails on any worker, all train without;
    a loss that alone cannot be compiled is given up by itself. Return why blocks are not compiled; nothing if they are.
    Workers call this together.

    `cache` is a folder of ours in which the compiler keeps what it makes. A device that runs out of memory is no fault
    of the compiler: training will, too, and goes on with fewer windows.
    """
    compiled, loss = compiled_blocks(replica.model), replica.compiled_loss
    if not compiled:
        return ""
    errors: list[Exception | None] = []  # of the blocks, in each attempt

    def attempt() -> Exception | None:
        trial = _Trial(replica)
        for windows in _trial_windows(replica, team.device):
            trial.loss(windows)
        errors.append(trial.error)
        return trial.error or (None if loss is None else loss.error)

    at_stage(COMPILING)
    problem = _tried_twice(team, cache, attempt)
    if not problem or _works(team, errors[-1]):
        if loss is not None:
            loss.say_why_not()
        return ""
    for block in compiled:
        del block.forward
    replica.compiled_loss = None
    at_stage(f"{NOT_COMPILING}: {problem}")
    return problem


def _tried_twice(team: Team, cache: Path | None, attempt: Callable[[], Exception | None]) -> str:
    """Return in a line why an attempt to compile fails on any worker; nothing if it succeeds. Workers call this
    together.

    A compiler that was killed may have left a library that nobody can load, now or later. So what fails is tried once
    more without what the cache had before.
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
    return "another worker cannot." if error is None else first_line(error)


def _works(team: Team, error: Exception | None) -> bool:
    return bool(team.smallest(error is None or isinstance(error, torch.OutOfMemoryError)))


def _empty(folder: Path) -> None:
    """Remove all that is in a folder, as far as that is possible."""
    with suppress(OSError):
        for path in folder.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


# Attention ------------------------------------------------------------------------------------------------------------
FLEX = "flex_attention"
"""Its name in transformers."""
FLEX_ON = {"cuda"}
TOLERANCE = 0.01
"""The share by which the trial's loss may differ: both ways are right, but round differently in bf16."""


def document_attention(replica: ModelReplica, team: Team, end: int, cache: Path | None = None) -> str | None:
    """Return the attention to train with, where documents end with `end`; None for the one that the model has.

    Flex attention is tried once, where it can be compiled. It is taken if it works on all workers and gives the loss
    that the model gives without it. Workers call this together. For `cache` see `keep_compiled_if_it_works`.
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
    problem = "another worker needs it." if problems[-1] is None else first_line(problems[-1])
    at_stage(f"attention is computed between documents, too, and masked: {problem}")
    return None


class _OtherLossError(Exception):
    """Flex attention can be compiled, and gives another loss."""


def _problem_with_flex(replica: ModelReplica, device: torch.device, end: int) -> Exception | None:
    """Return why windows of two documents cannot be trained with flex attention; None if they can."""
    trial, wrong = _Trial(replica, FLEX), None
    for windows in _trial_windows(replica, device):  # workers make as many passes each, whatever they find
        windows[:, windows.shape[1] // 2] = end
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):  # that is compiled for training alone
            expected = float(replica.loss(windows))
        found = trial.loss(windows)
        if not math.isclose(found, expected, rel_tol=TOLERANCE):
            wrong = _OtherLossError(f"flex attention gives a loss of {found:.4f} instead of {expected:.4f}.")
    return trial.error or wrong


# Micro-batch ----------------------------------------------------------------------------------------------------------
SHARE = {"cpu": 0.25, "cuda": 0.5}
"""Of the memory that is left, what windows may take by the size of their tensors. Operations take memory for
themselves, too, and malloc keeps much that was freed: on the CPU we measured 1.3 to 1.7 times the tensors, and 3.6
times with activation checkpointing."""


def fixed_and_each(one: int, two: int) -> tuple[int, int]:
    """Return the bytes that any number of windows takes, and those of each, from what one and two take. Fixed are the
    weights once more in bf16, or what FSDP2 gathers, for example."""
    each = min(max(1, two - one), one)
    return one - each, each


def fitting_micro_batch(replica: ModelReplica, piece: int, team: Team, trains: bool = True) -> int:
    """Return 1 to `piece` windows, the same number on all workers. They call this together."""
    if piece == 1:
        return 1  # whether it fits or not
    with trying(replica, team, trains) as taken:
        one = taken(1)
        team.wait_for_all()  # so that nobody sees what another takes to try
        room = _free_memory(team) - _taken_later(replica, team, trains)
        room -= VALUE_BYTES * replica.layout.size * replica.reduces_once  # whole gradients, until they are summed
        if not team.smallest(room > 2 * one):
            return 1  # two are not even to be tried
        fixed, each = fixed_and_each(one, taken(2))
        room = int(SHARE[team.device.type] * (room - fixed))
        fitting = team.smallest(min(room // each, piece))
        length = replica.window_length - 1
        at_once = positions_at_once(replica.model.config.vocab_size, team.device) // length
        if 1 < at_once < fitting:
            # Those beyond have no logits of their own, but the head's gradient is added up beside those of the rest.
            with in_pieces_of(length):
                two, three = taken(2), taken(3)
            beyond = min(max(1, three - two), each)
            added_up = max(0, two - fixed - each - beyond)
            further = max(0, room - added_up - at_once * each) // beyond
            fitting = team.smallest(min(at_once + further, piece))
    return max(1, fitting)


MEASURED_ON = {"cuda"}
"""Devices whose training itself is measured: there all is known that takes memory."""
MEASURED_SHARE = 0.8
"""Of the memory that is left, what windows may take by that. The rest is for gaps between tensors, and for what other
programs take later."""


def enlarge_micro_batch(replica: ModelReplica, batch_size: int, team: Team) -> bool:
    """Let more windows of a batch through the model at once where they fit by what training takes as it is now:
    compiled, and by the attention that was chosen.

    Return False when more were tried and do not work: then as many as before are to be compiled again.

    Only a worker that is alone tries more. Of workers that share a model, one that runs out of memory amid a pass would
    leave the others waiting for it.
    """
    proven = replica.micro_batch
    if team.device.type not in MEASURED_ON or proven is None or proven >= batch_size or team.size > 1:
        return True
    replica.uncompiled_micro_batch = proven
    fitting = _fitting_as_trained(replica, batch_size, proven, team)
    while 2 * (more := _evenly(fitting, batch_size)) >= 3 * proven:
        at_stage(COMPILING_MORE)
        replica.micro_batch = more
        torch.compiler.reset()  # what is compiled for a second size is compiled for any size, which is slower
        fitting = _fitting_as_trained(replica, batch_size, more, team)
        if fitting < more:  # moments come on top of what was tried
            replica.micro_batch = proven
            torch.compiler.reset()
            gc.collect()  # what a pass that failed has left
            return False
        proven = more
    return True


def _evenly(fitting: int, batch_size: int) -> int:
    """Return the size of as few parts of a batch as fit, all as large as each other."""
    return math.ceil(batch_size / math.ceil(batch_size / fitting)) if fitting else 0


def _fitting_as_trained(replica: ModelReplica, batch_size: int, at_once: int, team: Team) -> int:
    """Return how many windows fit, by the gradient of two parts of `at_once` windows; 0 if that cannot be computed.
    What does not grow with them is counted as if it did, but for gradients."""
    ids = np.arange(replica.window_length) % replica.model.config.vocab_size
    batch = np.tile(ids, (min(2 * at_once, batch_size), 1))
    try:
        with torch.random.fork_rng([team.device] if team.device.type == "cuda" else []):
            replica.add_gradient(batch)  # libraries keep what they take the first time
            replica.model.zero_grad(set_to_none=True)
            room = _free_memory(team) - _taken_later(replica, team, trains=True)
            peak = peak_while(lambda: replica.add_gradient(batch), team.device)
        gradients: int = sum(one.grad.nbytes for one in replica.model.parameters() if one.grad is not None)
        each = math.ceil(max(1, peak - gradients) / at_once)
        return max(0, int(MEASURED_SHARE * (room - gradients))) // each
    except Exception:  # compilers have their own, and libraries say in their own ways that memory has run out
        return 0
    finally:
        replica.model.zero_grad(set_to_none=True)


def _taken_later(replica: ModelReplica, team: Team, trains: bool) -> int:
    """Return this worker's share of the bytes that nobody has taken yet when workers have tried a window: moments,
    where there is training; in main memory also what the peer process takes."""
    trained, kept = replica.layout.size * trains // team.shards, replica.optimizer_state
    moments = moments_bytes(trained, kept)
    if team.device.type != "cpu":
        return moments
    moments += moments_bytes(trained, kept, is_on_host=True)
    host = HostMemory.of(replica.layout.size, replica.codec)
    return moments + ((host.most if trains else host.evaluating) - host.shared) // team.size


@contextmanager
def trying(replica: ModelReplica, team: Team, trains: bool = True) -> Iterator[Callable[[int], int]]:
    """Yield a function that measures what some windows take: forward and back, beside the weights' gradients; without
    `trains`, forward alone.

    There are gradients meanwhile, as there are from a batch's first windows on. In the end the replica is as it was.
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
    """Return the free bytes for this worker: of its GPU, or its share of what the machine has."""
    if team.device.type == "cpu":
        return available_memory() // team.size
    unused = torch.cuda.memory_reserved(team.device) - torch.cuda.memory_allocated(team.device)
    return torch.cuda.mem_get_info(team.device)[0] + unused


def peak_while(work: Callable[[], object], device: torch.device) -> int:
    """Return the most bytes of this device that tensors made by `work` take at any time."""
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
    """Sees what each operation returns. What an operation takes for itself alone is not seen."""

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
