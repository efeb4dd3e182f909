"""A team of one that shares a model nevertheless."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import init_device_mesh

from opendiloco.training.team import Team


def only_one() -> Team:
    """All shards in one worker, which no machine has: what is sharded can be computed with in one process."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=HashStore())
    return Team(torch.device("cpu"), 0, 1, init_device_mesh("cpu", (1,)))
