"""A peer that averages with another library (gloo, torchft or hivemind): `python -m benchmarks.averagers`, started by
benchmarks/averaging.py.

Lines on standard input control it: "prepare KIND" (all work except averaging: new values, and hivemind's search for a
group), then "go". It answers "ready" and "averaged", see `benchmarks.processes`. All kinds share one tensor to save
memory. "gloo-bytes" averages only the beginning of the tensor, which has as many bytes as our payload of all values.
"""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, Protocol

import click
import torch

from benchmarks.processes import cpu_seconds, say
from opendiloco.kernels import INT8

TIMEOUT = timedelta(minutes=10)
MATCHMAKING_SECONDS = 120.0
LOOK_SECONDS = 0.01
COMPRESSIONS = {"hivemind-fp32": "NoCompression", "hivemind-fp16": "Float16Compression"}


class Averager(Protocol):
    """An adapter of an averaging library. `average` replaces the values of `tensor` by their mean over all peers."""

    tensor: torch.Tensor

    def prepare(self) -> None: ...
    def average(self) -> None: ...
    def close(self) -> None: ...


class Meeting:
    """A store of addresses that all peers can read: torch's TCPStore, which runs in the first peer's process.

    `address` is this peer's own IPv4 address; `contact` is the first peer's listener, as ADDRESS:PORT.
    """

    def __init__(self, rank: int, peers: int, contact: str | None, address: str) -> None:
        self.rank, self.peers, self.address = rank, peers, address
        host, _, port = (contact or f"{address}:0").rpartition(":")
        self.store = new_store(host, int(port), peers, is_master=contact is None)
        if contact is None:
            say("listening", address=f"{address}:{self.store.port}")

    def exchange(self, what: str, address: str | None) -> str:
        """Return the address that the first peer has stored under the key `what`. The first peer passes the `address`
        to store; the other peers pass None."""
        if address is not None:
            self.store.set(what, address)
        return str(self.store.get(what).decode())


def new_store(host: str, port: int, peers: int, is_master: bool) -> Any:
    distributed = importlib.import_module("torch.distributed")
    return distributed.TCPStore(host, port, peers, is_master, TIMEOUT, wait_for_workers=False)


class Gloo:
    """An averager that uses torch.distributed's all_reduce on gloo: in fp32, unencrypted, between a fixed set of
    processes."""

    def __init__(self, tensor: torch.Tensor, meeting: Meeting) -> None:
        self.tensor, self._peers = tensor, meeting.peers
        self._distributed = importlib.import_module("torch.distributed")
        self._distributed.init_process_group(
            "gloo", store=meeting.store, rank=meeting.rank, world_size=meeting.peers, timeout=TIMEOUT
        )

    def prepare(self) -> None: ...

    def average(self) -> None:
        self._distributed.all_reduce(self.tensor)
        self.tensor /= self._peers

    def close(self) -> None:
        self._distributed.destroy_process_group()


class Torchft:
    """An averager that uses torchft's fault-tolerant all_reduce on gloo. A round lasts from joining torchft's quorum to
    the vote on the commit."""

    def __init__(self, tensor: torch.Tensor, meeting: Meeting) -> None:
        self.tensor = tensor
        lighthouse_server = importlib.import_module("torchft._torchft").LighthouseServer
        self._lighthouse: Any = None
        address = None
        if meeting.rank == 0:
            self._lighthouse = lighthouse_server(bind=f"{meeting.address}:0", min_replicas=meeting.peers)
            address = f"http://{meeting.address}:{self._lighthouse.address().rpartition(':')[2]}"
        self._store = new_store(meeting.address, 0, 1, is_master=True)
        self._manager = importlib.import_module("torchft.manager").Manager(
            pg=importlib.import_module("torchft.process_group").ProcessGroupGloo(timeout=TIMEOUT),
            load_state_dict=lambda state: None,
            state_dict=dict,
            min_replica_size=meeting.peers,
            use_async_quorum=False,
            timeout=TIMEOUT,
            quorum_timeout=TIMEOUT,
            rank=0,
            world_size=1,
            store_addr=meeting.address,
            store_port=self._store.port,
            lighthouse_addr=meeting.exchange("torchft", address),
            replica_id=f"replica_{meeting.rank}",
            hostname=meeting.address,
            init_sync=False,
        )

    def prepare(self) -> None: ...

    def average(self) -> None:
        self._manager.start_quorum()
        self._manager.allreduce(self.tensor).wait()
        if not self._manager.should_commit():
            raise RuntimeError("torchft's replicas voted against this round")

    def close(self) -> None:
        self._manager.shutdown(wait=False)
        if self._lighthouse:
            self._lighthouse.shutdown()


class Hivemind:
    """An averager that uses hivemind in one fixed group of peers. `prepare` forms the group, and `average` averages in
    the group."""

    def __init__(self, tensor: torch.Tensor, meeting: Meeting, kind: str) -> None:
        # hivemind reads this environment variable when hivemind is imported. With its default value, files remain in
        # /dev/shm when hivemind is killed.
        os.environ["HIVEMIND_MEMORY_SHARING_STRATEGY"] = "file_descriptor"
        import hivemind
        import hivemind.compression

        # hivemind does not delete its clients' sockets, so they are created in TMPDIR, the benchmark's own temporary
        # folder.
        hivemind.p2p.P2P._UNIX_SOCKET_PREFIX = f"/unix{tempfile.gettempdir()}/hivemind-"
        self.tensor = tensor
        self._peers = meeting.peers
        self._dht = hivemind.DHT(
            initial_peers=[] if meeting.rank == 0 else [meeting.exchange(kind, None)],
            host_maddrs=[f"/ip4/{meeting.address}/tcp/0"],
            use_relay=False,
            use_auto_relay=False,
            start=True,
        )
        if meeting.rank == 0:
            meeting.exchange(kind, str(self._dht.get_visible_maddrs()[0]))
        self._averager = hivemind.averaging.DecentralizedAverager(
            [tensor],
            self._dht,
            prefix="benchmark",
            target_group_size=meeting.peers,
            min_group_size=meeting.peers,
            initial_group_bits="",
            compression=getattr(hivemind.compression, COMPRESSIONS[kind])(),
            start=True,
        )
        self._awaiting = hivemind.averaging.control.AveragingStage.AWAITING_TRIGGER
        self._step: Any = None

    def prepare(self) -> None:
        self._step = self._averager.step(wait=False, require_trigger=True, timeout=MATCHMAKING_SECONDS)
        while self._step.stage != self._awaiting:
            if self._step.done():
                self._step.result()
                raise RuntimeError("hivemind averaged before it was triggered")
            time.sleep(LOOK_SECONDS)

    def average(self) -> None:
        self._step.allow_allreduce()
        gathered = self._step.result()
        if len(gathered) != self._peers:
            raise RuntimeError(f"hivemind averaged {len(gathered)} peers")

    def close(self) -> None:
        self._averager.shutdown()
        self._dht.shutdown()


def start(kind: str, tensor: torch.Tensor, meeting: Meeting) -> Averager:
    match kind:
        case "gloo":
            return Gloo(tensor, meeting)
        case "gloo-bytes":
            return Gloo(tensor[: floats_of_our_payload(tensor.numel())], meeting)
        case "torchft":
            return Torchft(tensor, meeting)
        case _:
            return Hivemind(tensor, meeting, kind)


def floats_of_our_payload(values: int) -> int:
    """Return the number of fp32 values that together have as many bytes as diloco-peer's int8 payload of `values`
    values."""
    return INT8.payload_size(values) // 4


def is_average(tensor: torch.Tensor, peers: int) -> bool:
    """Return True if each value of the tensor is the mean of 0 … peers - 1, the numbers with which the peers filled
    their tensors."""
    expected = (peers - 1) / 2
    return max(abs(float(tensor.min()) - expected), abs(float(tensor.max()) - expected)) < 1e-3


def serve(averagers: Mapping[str, Averager], meeting: Meeting) -> None:
    """Execute each command from standard input until the input ends: "prepare KIND" prepares an averager, and "go"
    averages with that averager."""
    for line in sys.stdin:
        command, *kinds = line.split()
        if command == "prepare":
            averager = averagers[kinds[0]]
            averager.tensor.fill_(meeting.rank)
            averager.prepare()
            say("ready", cpu=cpu_seconds())
        else:
            averager.average()
            done_at, cpu = time.monotonic(), cpu_seconds()
            complete = is_average(averager.tensor, meeting.peers)
            say("averaged", time=done_at, cpu=cpu, peers=meeting.peers, complete=complete)


@click.command(help=__doc__)
@click.argument("kinds", nargs=-1)
@click.option("--values", type=int, required=True)
@click.option("--peers", type=int, required=True)
@click.option("--rank", type=int, required=True)
@click.option("--contact", help="The address that the first peer has reported.")
@click.option("--address", default="127.0.0.1", show_default=True, help="This peer's own IPv4 address.")
@click.option("--interface", default="lo", show_default=True, help="The network interface that has it.")
def main(
    kinds: Sequence[str], values: int, peers: int, rank: int, contact: str | None, address: str, interface: str
) -> None:
    torch.set_num_threads(1)  # one thread is fastest, because there are more processes than cores
    os.environ["GLOO_SOCKET_IFNAME"] = interface
    tensor = torch.zeros(values)
    meeting = Meeting(rank, peers, contact, address)
    averagers = {kind: start(kind, tensor, meeting) for kind in kinds}
    try:
        serve(averagers, meeting)
    finally:
        for averager in averagers.values():
            averager.close()


if __name__ == "__main__":
    main()
