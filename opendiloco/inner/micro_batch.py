"""How many windows go through the model at once: a worker's whole piece of a batch, or as many as its memory takes.

What a window costs is found by asking autograd what it keeps of one for the backward pass, whatever the model.
"""

from __future__ import annotations

import torch

from opendiloco.inner.replica import Replica
from opendiloco.inner.team import Team
from opendiloco.model.shards import local_part
from opendiloco.shared_memory import VALUE_BYTES, available_memory

SHARE = 0.5
"""Of the memory that is left, what may be kept for backward passes. The rest is for what comes and goes in them:
gradients of activations, logits in fp32, a block computed again, and what the allocator cannot use."""

LATER = {"cpu": 5, "cuda": 3}
"""Values for each one of theta that nobody has taken yet when workers start: the gradient and two moments; in main
memory also the momentum, and payloads."""


def fitting_micro_batch(replica: Replica, piece: int, team: Team) -> int:
    """1 to `piece` windows, and the same number on all workers, who call this together."""
    room = free_memory(team) - LATER[team.device.type] * VALUE_BYTES * replica.layout.size // team.size
    fitting = int(SHARE * room / bytes_kept(replica, team))
    return team.smallest(max(1, min(fitting, piece)))


def bytes_kept(replica: Replica, team: Team, windows: int = 1) -> int:
    """What autograd keeps of a forward pass for the backward pass, beside weights. The replica stays as it is."""
    kept: dict[int, torch.UntypedStorage] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = local_part(tensor).untyped_storage()
        kept[storage._cdata] = storage
        return tensor

    ids = torch.zeros(windows, replica.window_length, dtype=torch.long, device=team.device)
    gpus = [team.device] if team.device.type == "cuda" else []
    with torch.random.fork_rng(gpus), torch.compiler.set_stance("force_eager"):
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            loss = replica.loss(ids)
        weights = replica.model.state_dict(keep_vars=True).values()  # of FSDP2's, those that are whole now
        for tensor in weights:
            kept.pop(local_part(tensor).untyped_storage()._cdata, None)
        total = sum(storage.nbytes() for storage in kept.values())  # FSDP2 has emptied those of other weights
        kept.clear()
        loss.backward()  # FSDP2 does not expect another forward pass before
    replica.model.zero_grad(set_to_none=True)
    return total


def free_memory(team: Team) -> int:
    """Bytes for this worker: of its GPU, or its share of what the machine has."""
    if team.device.type == "cpu":
        return available_memory() // team.size
    unused = torch.cuda.memory_reserved(team.device) - torch.cuda.memory_allocated(team.device)
    return torch.cuda.mem_get_info(team.device)[0] + unused
