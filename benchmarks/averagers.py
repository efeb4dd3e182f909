"""One peer of what else averages vectors: `python -m benchmarks.averagers KIND`, started by benchmarks/averaging.py.

Lines on standard input say what to do: "prepare" (everything that is not averaging: new values, and hivemind's search
for a group), then "go". The answers are "ready" and "averaged", see `benchmarks.processes`.
"""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
import time
from datetime import timedelta
from typing import Any, Protocol

import click
import torch

from benchmarks.processes import say

LOCALHOST = "127.0.0.1"
TIMEOUT = timedelta(minutes=10)
MATCHMAKING_SECONDS = 120.0
LOOK_SECONDS = 0.01


class Averager(Protocol):
    """Averages one tensor with its peers. The first peer, which has no contact, says where it listens."""

    tensor: torch.Tensor

    def prepare(self) -> None: ...
    def average(self) -> None: ...
    def close(self) -> None: ...


class Gloo:
    """torch.distributed's all_reduce: fp32, in the clear, by processes that must all be there to the end."""

    def __init__(self, tensor: torch.Tensor, rank: int, peers: int, contact: str | None) -> None:
        self._distributed = distributed = importlib.import_module("torch.distributed")
        self.tensor, self._peers = tensor, peers
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        port = int(contact) if contact else 0
        store = distributed.TCPStore(LOCALHOST, port, peers, contact is None, TIMEOUT, wait_for_workers=False)
        if contact is None:
            say("listening", address=store.port)
        distributed.init_process_group("gloo", store=store, rank=rank, world_size=peers, timeout=TIMEOUT)

    def prepare(self) -> None: ...

    def average(self) -> None:
        self._distributed.all_reduce(self.tensor)
        self.tensor /= self._peers

    def close(self) -> None:
        self._distributed.destroy_process_group()


class Torchft:
    """torchft's fault-tolerant all_reduce on gloo, from joining the quorum to the vote on committing."""

    def __init__(self, tensor: torch.Tensor, rank: int, peers: int, contact: str | None) -> None:
        self.tensor = tensor
        lighthouse_server = importlib.import_module("torchft._torchft").LighthouseServer
        self._lighthouse: Any = None
        if contact is None:
            self._lighthouse = lighthouse_server(bind=f"{LOCALHOST}:0", min_replicas=peers)
            contact = f"http://{LOCALHOST}:{self._lighthouse.address().rpartition(':')[2]}"
            say("listening", address=contact)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        self._store = importlib.import_module("torch.distributed").TCPStore(
            LOCALHOST, 0, 1, True, TIMEOUT, wait_for_workers=False
        )
        group = importlib.import_module("torchft.process_group").ProcessGroupGloo(timeout=TIMEOUT)
        self._manager = importlib.import_module("torchft.manager").Manager(
            pg=group,
            load_state_dict=lambda state: None,
            state_dict=dict,
            min_replica_size=peers,
            use_async_quorum=False,
            timeout=TIMEOUT,
            quorum_timeout=TIMEOUT,
            rank=0,
            world_size=1,
            store_addr=LOCALHOST,
            store_port=self._store.port,
            lighthouse_addr=contact,
            replica_id=f"replica_{rank}",
            hostname=LOCALHOST,
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
    """hivemind's averager in one fixed group. The group is found while we prepare, and triggered on "go"."""

    def __init__(self, tensor: torch.Tensor, peers: int, contact: str | None, compression: str) -> None:
        # As it is, files stay behind in /dev/shm when it does not end properly. It reads this when it is imported.
        os.environ["HIVEMIND_MEMORY_SHARING_STRATEGY"] = "file_descriptor"
        import hivemind
        import hivemind.compression

        # Its clients' sockets stay behind in /tmp when they end; ours are where temporary files are removed.
        hivemind.p2p.P2P._UNIX_SOCKET_PREFIX = f"/unix{tempfile.gettempdir()}/hivemind-"
        self.tensor, self._peers = tensor, peers
        self._dht = hivemind.DHT(
            initial_peers=[contact] if contact else [],
            host_maddrs=[f"/ip4/{LOCALHOST}/tcp/0"],
            use_relay=False,
            use_auto_relay=False,
            start=True,
        )
        if contact is None:
            say("listening", address=str(self._dht.get_visible_maddrs()[0]))
        self._averager = hivemind.averaging.DecentralizedAverager(
            [tensor],
            self._dht,
            prefix="benchmark",
            target_group_size=peers,
            min_group_size=peers,
            initial_group_bits="",
            compression=getattr(hivemind.compression, compression)(),
            start=True,
        )
        self._awaiting = hivemind.averaging.control.AveragingStage.AWAITING_TRIGGER
        self._step: Any = None

    def prepare(self) -> None:
        self._step = self._averager.step(wait=False, require_trigger=True, timeout=MATCHMAKING_SECONDS)
        while self._step.stage != self._awaiting:
            if self._step.done():
                self._step.result()
                raise RuntimeError("hivemind averaged before it was told to")
            time.sleep(LOOK_SECONDS)

    def average(self) -> None:
        self._step.allow_allreduce()
        gathered = self._step.result()
        if len(gathered) != self._peers:
            raise RuntimeError(f"hivemind averaged {len(gathered)} peers")

    def close(self) -> None:
        self._averager.shutdown()
        self._dht.shutdown()


def is_average(tensor: torch.Tensor, peers: int) -> bool:
    """Whether every place holds the average of all peers' ranks, which they had there."""
    expected = (peers - 1) / 2
    return max(abs(float(tensor.min()) - expected), abs(float(tensor.max()) - expected)) < 1e-3


def serve(averager: Averager, rank: int, peers: int) -> None:
    """Do what we are told until standard input ends."""
    for line in sys.stdin:
        if line.strip() == "prepare":
            averager.tensor.fill_(rank)
            averager.prepare()
            say("ready")
        else:
            averager.average()
            done_at = time.monotonic()
            say("averaged", time=done_at, peers=peers, complete=is_average(averager.tensor, peers))


@click.command(help=__doc__)
@click.argument("kind", type=click.Choice(["hivemind-fp32", "hivemind-fp16", "gloo", "torchft"]))
@click.option("--values", type=int, required=True)
@click.option("--peers", type=int, required=True)
@click.option("--rank", type=int, required=True)
@click.option("--contact", help="What the first peer said where it listens.")
def main(kind: str, values: int, peers: int, rank: int, contact: str | None) -> None:
    tensor = torch.zeros(values)
    averager: Averager
    match kind:
        case "gloo":
            averager = Gloo(tensor, rank, peers, contact)
        case "torchft":
            averager = Torchft(tensor, rank, peers, contact)
        case _:
            compression = "Float16Compression" if kind == "hivemind-fp16" else "NoCompression"
            averager = Hivemind(tensor, peers, contact, compression)
    try:
        serve(averager, rank, peers)
    finally:
        averager.close()


if __name__ == "__main__":
    main()
