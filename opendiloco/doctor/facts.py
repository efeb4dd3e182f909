"""What is known of this machine and its network: plain values, from which the checks draw their conclusions."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from opendiloco.owner.sensors import GpuState, Sensor


@dataclass(frozen=True)
class Gpu:
    """A GPU as torch sees it. `error` says why torch cannot compute on it; empty: it can. Memory is in bytes."""

    name: str
    capability: tuple[int, int]
    memory: int
    free: int
    has_bf16: bool
    error: str = ""


@dataclass(frozen=True)
class Torch:
    """torch as it is installed. `platform` is what it was built for, such as "CUDA 12.8"; None: for CPUs alone.

    `gpus` are None where torch was not asked, and `error` is what it says when it sees none, or cannot be imported.
    """

    version: str
    platform: str | None
    gpus: tuple[Gpu, ...] | None = None
    error: str = ""


@dataclass(frozen=True)
class Cards:
    """GPUs on this machine's buses, whether anything can use them or not. `driver` is NVIDIA's version, if there is
    one."""

    names: tuple[str, ...] = ()
    driver: str | None = None


@dataclass(frozen=True)
class Folder:
    """Where checkpoints are kept. `free` are its disk's free bytes; `error` says why it cannot be written to."""

    path: Path
    free: int
    error: str = ""


@dataclass(frozen=True)
class Machine:
    """This machine without its network. Sizes are in bytes; `shm` is None where there is no /dev/shm."""

    python: str
    cores: int
    torch: Torch | None
    cards: Cards
    has_compiler: bool
    memory: int
    shm: int | None
    folder: Folder
    sensors: tuple[Sensor, ...] = ()
    gpu_states: tuple[GpuState, ...] = ()
    is_on_battery: bool = False


@dataclass(frozen=True)
class Kernels:
    """The C kernels' self-test: the set in use, the sets that do not give its bits, and GB/s by operation."""

    chosen: str
    differing: tuple[str, ...]
    speeds: dict[str, float]
    error: str = ""


@dataclass(frozen=True)
class Addresses:
    """The addresses of ours with which packets leave for the internet; None: they do not, in this version of IP."""

    ipv4: str | None
    ipv6: str | None


@dataclass(frozen=True)
class Node:
    """A bootstrap node. `seconds` is the time of a round trip, and `ahead` by how much its clock is ahead of ours,
    give or take half of that; None: it did not say."""

    address: str
    answers: bool
    seconds: float | None = None
    ahead: float | None = None


@dataclass(frozen=True)
class DialledBack:
    """What a bootstrap node says that it sees of us. `open_port` is a data port of ours that it could dial, if any.

    `keeps_ports`: our router gave a connection the port number that it has here.
    """

    seen_at: str
    port: int
    open_port: int | None
    keeps_ports: bool


@dataclass(frozen=True)
class Bandwidth:
    """Bits a second that our link carries, and with whom that was measured: "a peer" or "a bootstrap node"."""

    up: float
    down: float
    measured_with: str


@dataclass(frozen=True)
class Taken:
    """What a run takes of this machine, in bytes, by the formula that `join` goes by; `gpu` of each of `gpus`."""

    memory: int
    gpu: int | None
    gpus: int
    disk: int


@dataclass(frozen=True)
class Speed:
    """Tokens a second. `steps` inner steps were measured; 0: it is estimated."""

    tokens_per_second: float
    steps: int


@dataclass(frozen=True)
class Outlook:
    """What a run would come to for this machine: seconds of training and of a round in an outer step, bytes sent in it
    (and received as many), and seconds that joining takes (None: it never catches up).

    `cycles`: how many outer steps there are from one that its work is in to the next; 0: it never counts.
    `peers` average together, ourselves included; `is_supposed`: no others are there, and one like us is supposed.
    """

    inner_steps: int
    training_seconds: float
    round_seconds: float
    cycle_seconds: float
    sent: float
    joining_seconds: float | None
    cycles: int
    peers: int
    is_supposed: bool

    @property
    def sent_a_day(self) -> float:
        return self.sent / self.cycle_seconds * 86_400
