"""What is tried before training, so that nothing breaks in it: compiled blocks, and whatever else may not work here.

Workers that share a model wait for each other at each of its blocks. So a worker on which something fails must not
leave the pass: it goes on without it, at the same block, and all compare notes when the pass is over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.attention.flex_attention import BlockMask
from torch.utils._pytree import tree_leaves, tree_map_only

from opendiloco.errors import first_line
from opendiloco.model.loss import with_forward
from opendiloco.model.parameters import transformer_blocks
from opendiloco.stages import COMPILING, at_stage
from opendiloco.training.team import Team

if TYPE_CHECKING:
    from opendiloco.training.replica import ModelReplica


class Trial:
    """A pass forward in which each block also trains, by itself, on what it is given there.

    With an `attention`, the model attends by that implementation. `error` is the first one of this worker.
    """

    def __init__(self, replica: ModelReplica, attention: str | None = None) -> None:
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
                    self.error = error
            with torch.compiler.set_stance("force_eager"), attending_by(self._replica.model, self._own_attention):
                return plain(
                    *map(_without_block_mask, arguments),
                    **{name: _without_block_mask(value) for name, value in options.items()},
                )

        return computed

    def _attending(self, model: Any) -> Callable[..., Any]:
        """Return the model's forward pass by the other implementation; by its own where the first block is not reached
        so, as when the mask cannot be made."""
        forward = model.forward

        def computed(*arguments: Any, **options: Any) -> Any:
            try:
                with attending_by(model, self._attention):
                    return forward(*arguments, **options)
            except Exception as error:
                if self._is_in_blocks:
                    raise
                self.error = error
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
    """Return an argument, or None in the place of a mask that flex attention alone knows. Uncompiled, that would take
    memory for all pairs of tokens."""
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


def trial_windows(replica: ModelReplica, device: torch.device) -> list[torch.Tensor]:
    """Return as many windows as go through the model at once in training, at first and at last: blocks are compiled for
    their number. All workers have as many of these batches."""
    ids = torch.arange(replica.window_length, device=device).remainder(replica.model.config.vocab_size)
    return [ids.repeat(windows, 1) for windows in replica.tried_sizes]


def compile_blocks(model: Any) -> None:
    """Compile each block's forward pass. To be called on a sharded model, not before it is sharded.

    FSDP2 gives a block another class, whose forward is the one that checkpoints activations; a forward that was bound
    before that checkpoints nothing.
    """
    for block in transformer_blocks(model):
        block.forward = torch.compile(block.forward)


def keep_compiled_if_it_works(replica: ModelReplica, team: Team) -> None:
    """Compile now, for training, in a pass that changes nothing. Where that fails on any worker, all train without, and
    say why. Workers call this together.

    A device that runs out of memory is no fault of the compiler: training will, too, and goes on with fewer windows.
    """
    compiled = [block for block in transformer_blocks(replica.model) if "forward" in vars(block)]
    if not compiled:
        return
    at_stage(COMPILING)
    trial = Trial(replica)
    for windows in trial_windows(replica, team.device):
        trial.loss(windows)
    if team.smallest(trial.error is None or isinstance(trial.error, torch.OutOfMemoryError)):
        return
    for block in compiled:
        del block.forward
    problem = "another worker cannot." if trial.error is None else first_line(trial.error)
    at_stage(f"not compiling, which would be faster: {problem}")
