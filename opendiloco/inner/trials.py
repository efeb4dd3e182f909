"""What is tried before training, so that nothing breaks in it: compiled blocks, and whatever else may not work here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.fsdp import FSDPModule

from opendiloco.errors import MachineError, first_line
from opendiloco.inner.sharding import transformer_blocks
from opendiloco.inner.team import Team
from opendiloco.stages import at_stage

if TYPE_CHECKING:
    from opendiloco.inner.replica import ModelReplica


@contextmanager
def trial(replica: ModelReplica, device: torch.device) -> Iterator[None]:
    """Leave no gradient behind and no random numbers used, nor half a pass where what is tried fails.

    Raises: MachineError when torch cannot make a sharded model whole again after that.
    """
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        try:
            yield
        except Exception as error:
            replica.model.zero_grad(set_to_none=True)  # of whole parameters, before FSDP2 puts them out of sight
            _forget_half_a_pass(replica.model, error)
            raise
        finally:
            replica.model.zero_grad(set_to_none=True)


def _forget_half_a_pass(model: Any, error: Exception) -> None:
    """FSDP2 would take the next backward pass for a part of the one that failed, and sum no gradients in it."""
    if not isinstance(model, FSDPModule):
        return
    if not hasattr(model, "reset_iter_state"):  # until torch 2.12
        raise MachineError(
            f"a trial has failed, after which torch {torch.__version__} cannot go on: {first_line(error)}",
            "Use --no-compile, or the torch in constraints.txt.",
        ) from error
    model.reset_iter_state()


def trial_windows(replica: ModelReplica, device: torch.device) -> torch.Tensor:
    """Return as many windows as go through the model at once in training: blocks are compiled for their number."""
    ids = torch.arange(replica.window_length, device=device).remainder(replica.model.config.vocab_size)
    return ids.repeat(replica.micro_batch or 1, 1)


def compile_blocks(model: Any) -> None:
    """Compile each block's forward pass. To be called on a sharded model, not before it is sharded.

    FSDP2 gives a block another class, whose forward is the one that checkpoints activations; a forward that was bound
    before that checkpoints nothing.
    """
    for block in transformer_blocks(model):
        block.forward = torch.compile(block.forward)


def keep_compiled_if_it_works(replica: ModelReplica, team: Team) -> None:
    """Compile now, for training, in a pass forward and back that changes nothing. Where that fails on any worker, all
    train without, and say why. Workers call this together.

    Raises: torch.OutOfMemoryError, which is no fault of the compiler; MachineError, see `trial`.
    """
    compiled = [block for block in transformer_blocks(replica.model) if "forward" in vars(block)]
    if not compiled:
        return
    at_stage("compiling")
    problem = None
    try:
        with trial(replica, team.device):
            replica.loss(trial_windows(replica, team.device)).backward()
    except (torch.OutOfMemoryError, MachineError):
        raise
    except Exception as error:  # PyTorch's compiler, Triton and a C compiler each have their own
        problem = first_line(error)
    if team.smallest(problem is None):
        return
    for block in compiled:
        del block.forward
    at_stage(f"not compiling, which would be faster: {problem or 'another worker cannot.'}")
