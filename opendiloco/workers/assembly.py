"""A worker's model: plain if the worker is alone, else sharded; and whether there is memory for it."""

from __future__ import annotations

from typing import Any

import torch

from opendiloco.config.run_config import RunConfig
from opendiloco.data.tokenizer import Tokenizer
from opendiloco.errors import MachineError, first_line
from opendiloco.host_memory import HostMemory, worker_memory
from opendiloco.inner.sharding import fill_untrained, has_other_tensors, shard_model, transformer_blocks
from opendiloco.inner.team import Team
from opendiloco.kernels import FORMATS, Format
from opendiloco.model.build import build_model, build_skeleton, layout_of, store_weights
from opendiloco.shared_memory import VALUE_BYTES, SharedVectors, check_available, reserve
from opendiloco.workers.options import WorkerOptions


def assemble_model(
    config: RunConfig, tokenizer: Tokenizer, team: Team, options: WorkerOptions, memory_descriptor: int | None
) -> Any:
    """The worker's model on its device. What theta has of it is to be loaded from there, if it is sharded.

    With a `memory_descriptor`, the first worker puts the initial theta into that shared memory. It alone builds a whole
    model; the others do, too, if the model has tensors that only its constructor can fill.

    Raises: MachineError when the machine or device has too little memory; see `build_model`.
    """
    skeleton = build_skeleton(config, tokenizer)
    each_builds = has_other_tensors(skeleton)
    if team.device.type == "cuda":
        _check_device(skeleton, team, options)
    if memory_descriptor is not None and team.rank == 0:
        _check_memory(skeleton, team, options, FORMATS[config.codec.kind])
        reserve(memory_descriptor, layout_of(skeleton).size)
    whole = build_model(config, tokenizer) if team.rank == 0 or each_builds else None
    if memory_descriptor is not None and team.rank == 0:
        store_weights(whole, SharedVectors(memory_descriptor, layout_of(skeleton).size).theta)
    model: Any = whole if team.mesh is None or each_builds else skeleton
    asked = options.activation_checkpointing
    if config.training.activation_checkpointing if asked is None else asked:
        _checkpoint_activations(model)
    if team.mesh is None:
        model.to(team.device)
        model.tie_weights()  # to some kinds of device, tied weights are moved one by one
    else:
        shard_model(model, team, config.training)
        if not each_builds:
            fill_untrained(model, whole, team)
    if options.compile if options.compile is not None else team.device.type == "cuda":
        _compile_blocks(model)
    team.wait_for_all()  # the others map the shared memory now, which must have its size
    return model


def _checkpoint_activations(model: Any) -> None:
    """Have each block compute its activations again in the backward pass. Raises: MachineError when it cannot."""
    # Its name until transformers 5.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    try:
        enable({"use_reentrant": False})
    except ValueError as error:
        raise MachineError(first_line(error), "Use --no-activation-checkpointing.") from error


def _compile_blocks(model: Any) -> None:
    """Compile each block's forward pass. To be called on a sharded model, not before it is sharded.

    FSDP2 gives a block another class, whose forward is the one that checkpoints activations; a forward that was bound
    before that checkpoints nothing.
    """
    for block in transformer_blocks(model):
        block.forward = torch.compile(block.forward)


def _check_memory(skeleton: Any, team: Team, options: WorkerOptions, format: Format) -> None:
    """What activations take cannot be known, and comes on top. Raises: MachineError."""
    weights, trained = _counts(skeleton)
    host = HostMemory(trained, format)
    starting = host.shared + VALUE_BYTES * weights  # worker 0's whole model
    needed = host.most if options.trains else host.evaluating
    if team.device.type == "cpu":
        starting += VALUE_BYTES * weights if team.mesh else 0
        needed += worker_memory(weights, trained, options.trains)
    what = "Training this model" if options.trains else "Evaluating this model"
    check_available(what, max(starting, needed))


def _check_device(skeleton: Any, team: Team, options: WorkerOptions) -> None:
    """Raises: MachineError."""
    needed = worker_memory(*_counts(skeleton), options.trains) // team.size
    free = torch.cuda.mem_get_info(team.device)[0]
    if needed > free:
        raise MachineError(
            f"{team.device} has {free / 2**20:.0f} MiB free; its part of the model takes {needed / 2**20:.0f} MiB.",
            "Use more GPUs, or larger ones.",
        )


def _counts(model: Any) -> tuple[int, int]:
    """How many values the model has, and how many of them are trained."""
    return sum(parameter.numel() for parameter in model.parameters()), layout_of(model).size
