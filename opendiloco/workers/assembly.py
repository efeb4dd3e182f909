"""The assembly of a worker's model, sharded if several workers share it, and a check that it fits in memory."""

from __future__ import annotations

from typing import Any

import torch

from opendiloco.config.run_config import CodecSection, RunConfig
from opendiloco.data.tokenizer import Tokenizer
from opendiloco.errors import MachineError, first_line
from opendiloco.host_memory import HostMemory, WorkerMemory
from opendiloco.model.build import build_model, build_skeleton
from opendiloco.model.loss import fitting_logits, limit_logits
from opendiloco.model.parameters import Shards, is_all_trained, layout_of, trainable
from opendiloco.shared_memory import SharedVectors, check_available, reserve
from opendiloco.stages import NOT_COMPILING, at_stage
from opendiloco.training.team import (
    Team,
    compiling_lacks,
    fill_untrained,
    has_bf16,
    has_fast_fp16,
    has_other_tensors,
    shard_model,
)
from opendiloco.training.trials import compile_blocks
from opendiloco.workers.needs import worker_memory
from opendiloco.workers.options import WorkerOptions

SHARE_OF_LOGITS = 0.25
"""Share of the GPU memory beside the model for the logits that are computed at once. The rest is for activations."""


def in_fitting_precision(config: RunConfig, team: Team) -> RunConfig:
    """Return `config` with a precision that all workers' devices support. If that is fp16, which no config can name,
    set `team.half` to fp16, and return `config` unchanged.

    If the run asks for bf16 and one worker's device does not support it, all compute in fp16 if that is fast on all
    devices, and otherwise in fp32.
    """
    if config.training.precision != "bf16" or team.smallest(has_bf16(team.device)):
        return config
    if team.smallest(has_fast_fp16(team.device)):
        team.half = torch.float16
        at_stage("computing in fp16, with a loss scale, since a GPU of this volunteer has no bf16")
        return config
    at_stage("computing in fp32, since a GPU of this volunteer has no bf16")
    return config.model_copy(update={"training": config.training.model_copy(update={"precision": "fp32"})})


def assemble_model(
    config: RunConfig, tokenizer: Tokenizer, team: Team, options: WorkerOptions, memory_descriptor: int | None
) -> Any:
    """Return the worker's model, on the worker's device. If the model is sharded, the caller must load theta into the
    model afterwards.

    With a `memory_descriptor`, the first worker allocates that shared memory and writes the initial theta into it. Only
    the first worker builds a whole model, unless the model has tensors that only its constructor can fill; then all do.

    Raises: MachineError when the machine or device has too little memory; see also `build_model`.
    """
    skeleton = build_skeleton(config, tokenizer)
    layout = layout_of(skeleton, config.streaming)
    each_builds = has_other_tensors(skeleton)
    memory = worker_memory(
        skeleton, config.training, team.device.type, team.shards, options, is_shared=team.mesh is not None
    )
    if team.device.type == "cuda":
        room = team.smallest(_check_device(memory, team, options.trains))
        limit_logits(team.device, fitting_logits(team.device, int(SHARE_OF_LOGITS * room)))
    if memory_descriptor is not None and team.rank == 0:
        _check_memory(memory, team, options.trains, config.codec)
        reserve(memory_descriptor, layout.size)
    at_stage("building the model")
    # Draw initial weights only if shared memory does not hold theta yet, or the model has tensors outside of theta.
    draws = memory_descriptor is not None or each_builds or not is_all_trained(skeleton)
    whole: Any = None
    if team.rank == 0 or each_builds:
        whole = build_model(config, tokenizer, memory.weights, draws, options.threads)
    if memory_descriptor is not None and team.rank == 0:
        Shards(layout).store(trainable(whole), SharedVectors(memory_descriptor, layout.size).theta)
    model: Any = whole if team.mesh is None or each_builds else skeleton
    asked = options.activation_checkpointing
    if config.training.activation_checkpointing if asked is None else asked:
        checkpoint_activations(model)
    if team.mesh is None:
        model.to(team.device)
        model.tie_weights()  # moving a model to some devices unties its weights
        if team.device.type == "cuda":
            _cast_embeddings(model)
    else:
        shard_model(model, team, config.training, options.whole_layers)
        if not each_builds:
            fill_untrained(model, whole, team)
    if _is_compiled(options, team.device):
        compile_blocks(model)
    team.wait_for_all()  # the first worker must have sized the shared memory before others map it
    return model


def checkpoint_activations(model: Any) -> None:
    """Make each block compute its activations again in the backward pass. Raises: MachineError if the model cannot."""
    # Version 5 of transformers renamed gradient_checkpointing_enable to activation_checkpointing_enable.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    try:
        enable({"use_reentrant": False})
    except ValueError as error:
        raise MachineError(first_line(error), "Use --no-activation-checkpointing.") from error


def _cast_embeddings(model: torch.nn.Module) -> None:
    """Make the model's embedding layers convert their output to autocast's type, such as bf16, while autocast is on.

    Blocks add to this output. In half precision, the activations that they read and keep for the backward pass are half
    as large, as they are under FSDP2's precision policy.
    """

    def cast(module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        kind = output.device.type
        return output.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else output

    for module in model.modules():
        if isinstance(module, torch.nn.Embedding):
            module.register_forward_hook(cast)


def _is_compiled(options: WorkerOptions, device: torch.device) -> bool:
    """Return True if the model's blocks are to be compiled: by the owner's choice or, if the owner chose nothing, for
    training on a CUDA GPU for which torch can compile."""
    if options.compile is not None or device.type != "cuda" or not options.trains:
        return bool(options.compile)
    lacking = compiling_lacks(device)
    if lacking is not None:
        at_stage(f"{NOT_COMPILING}: {lacking}")
    return lacking is None


def _check_memory(memory: WorkerMemory, team: Team, trains: bool, codec: CodecSection) -> None:
    """Raise MachineError if the machine has too little main memory for the model, not counting activations."""
    host = HostMemory.of(memory.trained, codec)
    starting = host.shared + memory.evaluating  # bytes of main memory while the first worker builds the whole model
    replicas = team.size // team.shards
    needed = host.most + memory.on_host * replicas if trains else host.evaluating
    if team.device.type == "cpu":
        starting += memory.evaluating * replicas if team.mesh else 0
        needed += (memory.training if trains else memory.evaluating) * replicas
    check_available("Training this model" if trains else "Evaluating this model", max(starting, needed))


def _check_device(memory: WorkerMemory, team: Team, trains: bool) -> int:
    """Return the number of bytes of the worker's GPU that remain free for activations beside its part of the model.
    Raises: MachineError if that part does not fit."""
    needed = (memory.training if trains else memory.evaluating) // team.shards
    free = torch.cuda.mem_get_info(team.device)[0]
    if needed > free:
        raise MachineError(
            f"{team.device} has {free / 2**20:.0f} MiB free; its part of the model takes {needed / 2**20:.0f} MiB.",
            "Use more GPUs, or larger ones; try --optimizer-state host or 8bit.",
        )
    return free - needed
