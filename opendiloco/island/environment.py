"""What torchrun tells each of its processes: whether several machines are one volunteer, and which this one is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from opendiloco.errors import IslandError

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")
HIGHEST_PORT = 65535
BY_TORCHRUN = (
    "Start one process on each machine with torchrun --nnodes N --nproc-per-node 1; on a single one unset "
    "TORCHELASTIC_RUN_ID."
)


@dataclass(frozen=True)
class Placement:
    """This machine's number among `size`, of which number 0 has the peer process; and torchrun's store."""

    rank: int
    size: int
    host: str
    port: int
    job: str

    @property
    def is_first(self) -> bool:
        """Whether the peer process is here."""
        return self.rank == 0

    @classmethod
    def read(cls, variables: Mapping[str, str]) -> Placement | None:
        """Return what torchrun says in environment variables; None where this machine is alone.

        Raises: IslandError when a variable is missing or wrong, or there is more than one process on each machine.
        """
        if "TORCHELASTIC_RUN_ID" not in variables or variables.get("WORLD_SIZE") == "1":
            return None  # Slurm and Kubeflow set WORLD_SIZE and RANK, too
        for name in NAMES:
            if not variables.get(name):
                raise IslandError(f"{name} is not set, but others of torchrun's variables are.", BY_TORCHRUN)
        size = _number(variables, "WORLD_SIZE", 2)
        own = _number(variables, "LOCAL_WORLD_SIZE", 1)
        if own != 1:
            raise IslandError(
                f"LOCAL_WORLD_SIZE = {own}: torchrun has started {own} processes on this machine.",
                "Use --nproc-per-node 1: that process trains on all GPUs of its machine, or as --cpu-workers says.",
            )
        if variables.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            raise IslandError(
                "TORCHELASTIC_USE_AGENT_STORE is not True: torchrun lends no store to meet at.",
                "Unset TORCH_DISABLE_SHARE_RDZV_TCP_STORE, and use a torchrun of the same torch.",
            )
        rank = _number(variables, "RANK", 0, size - 1)
        port = _number(variables, "MASTER_PORT", 1, HIGHEST_PORT)
        return cls(rank, size, variables["MASTER_ADDR"], port, variables["TORCHELASTIC_RUN_ID"])


def _number(variables: Mapping[str, str], name: str, least: int, most: int = 1 << 16) -> int:
    text = variables[name]
    if not text.isdecimal() or not least <= int(text) <= most:
        raise IslandError(f"{name} = {text!r} is no number from {least} to {most}.", BY_TORCHRUN)
    return int(text)
