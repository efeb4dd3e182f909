"""How many windows go through the model at once: a worker's whole piece of a batch, or as many as its memory takes.

What a window takes is found by trying one, whatever the model: forward and back where it is to be trained, forward
alone where it is only to be evaluated.
"""

from __future__ import annotations

import torch

from opendiloco.host_memory import MOMENTS_BYTES, HostMemory
from opendiloco.inner.replica import ModelReplica
from opendiloco.inner.team import Team
from opendiloco.inner.tensor_memory import peak_while
from opendiloco.shared_memory import available_memory

SHARE = {"cpu": 0.25, "cuda": 0.5}
"""Of the memory that is left, what windows may take by the size of their tensors. Operations take memory for
themselves, too, and malloc keeps much that was freed: on the CPU we measured 1.3 to 1.7 times the tensors, and 3.6
times with activation checkpointing."""


def fitting_micro_batch(replica: ModelReplica, piece: int, team: Team, trains: bool = True) -> int:
    """Return 1 to `piece` windows, the same number on all workers. They call this together."""
    if piece == 1:
        return 1  # whether it fits or not
    window = window_memory(replica, team, trains=trains)
    team.wait_for_all()  # so that nobody sees what another takes to try
    room = free_memory(team) - _taken_later(replica, team, trains) // team.size
    return team.smallest(max(1, min(int(SHARE[team.device.type] * room / window), piece)))


def _taken_later(replica: ModelReplica, team: Team, trains: bool) -> int:
    """Return the bytes that nobody has taken yet when workers start: moments, where there is training; in main memory
    also what the peer process takes. The gradient counts with the first window."""
    moments = MOMENTS_BYTES * replica.layout.size * trains
    if team.device.type != "cpu":
        return moments
    host = HostMemory(replica.layout.size, replica.format)
    return moments + (host.most if trains else host.evaluating) - host.shared


def window_memory(replica: ModelReplica, team: Team, windows: int = 1, trains: bool = True) -> int:
    """Return the bytes that windows take: forward and back, with the weights' gradient; or without `trains`, forward
    alone. The replica stays as it is."""
    ids = torch.zeros(windows, replica.window_length, dtype=torch.long, device=team.device)
    gpus = [team.device] if team.device.type == "cuda" else []

    def try_out() -> None:
        with torch.set_grad_enabled(trains):
            loss = replica.loss(ids)
        if trains:
            loss.backward()

    with torch.random.fork_rng(gpus), torch.compiler.set_stance("force_eager"):
        peak = peak_while(try_out, team.device)
    replica.model.zero_grad(set_to_none=True)
    return peak


def free_memory(team: Team) -> int:
    """Bytes for this worker: of its GPU, or its share of what the machine has."""
    if team.device.type == "cpu":
        return available_memory() // team.size
    unused = torch.cuda.memory_reserved(team.device) - torch.cuda.memory_allocated(team.device)
    return torch.cuda.mem_get_info(team.device)[0] + unused
