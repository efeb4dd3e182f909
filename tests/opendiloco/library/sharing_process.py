"""One of several processes that share the model of a loop: `python -m tests.opendiloco.library.sharing_process JOB`.

The job is a file of JSON, with one training after another. Prints what it found as a line of JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from opendiloco.config.run_config import RunConfig
from opendiloco.data.tokenizer import ByteTokenizer
from opendiloco.library import DiLoCo, DiLoCoCallback
from opendiloco.model.build import build_model
from opendiloco.model.parameters import transformer_blocks
from opendiloco.run import Run
from peers.values.leases import SampleRange
from tests.opendiloco.library.played_swarm import PlayedSwarm, playing


def shared(config: RunConfig, kind: str) -> Any:
    """Return the run's model as the processes share it."""
    model: Any = build_model(config, ByteTokenizer())
    if "bf16" in kind:
        model.to(torch.bfloat16)
    if "ddp" in kind:
        return DistributedDataParallel(model)
    if "fsdp2" in kind:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for module in (*transformer_blocks(model), model):
            fully_shard(module, mesh=mesh)
    return model


def train(job: dict[str, Any], rank: int) -> dict[str, Any]:
    """Train a run, as one training of the job says. Return its final weights, what the peer claimed, and what this
    process saw."""
    config = RunConfig.from_manifest_content(job["content"])
    leases = [tuple(SampleRange(*piece) for piece in lease) for lease in job["leases"]]
    model = shared(config, job["kind"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = list[Any]()
    with playing(config, leases) as played:
        played.fails_at = job.get("swarm_fails_at")
        with DiLoCo(model, optimizer, run="diloco:small-1") as diloco:
            for windows in diloco.batches():
                if [rank, diloco.outer_step] == job.get("fails_at"):
                    raise ValueError("out of something")
                seen.append([diloco.outer_step, diloco.inner_step, *windows.shape])
                logits = model(input_ids=windows[:, :-1]).logits
                torch.nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten()).backward()
                optimizer.step()
                optimizer.zero_grad()
            assert diloco.finished
            assert (diloco.outer_step, diloco.lease) == (len(leases), ())
        swarms: list[PlayedSwarm] = played.swarms
    whole = [value.full_tensor() if hasattr(value, "full_tensor") else value for value in model.parameters()]
    final = np.concatenate([value.detach().float().numpy().ravel() for value in whole])
    claims = [[trained.samples, trained.tokens] for swarm in swarms for trained in swarm.trained]
    return {"final": final.tolist(), "claims": claims, "seen": seen}


def train_by_trainer(job: dict[str, Any]) -> dict[str, Any]:
    """Have transformers' Trainer train a run, with one window a process in each inner step."""
    from transformers import Trainer, TrainingArguments

    config = RunConfig.from_manifest_content(job["content"])
    leases = [tuple(SampleRange(*piece) for piece in lease) for lease in job["leases"]]
    quiet: dict[str, Any] = {"save_strategy": "no", "report_to": "none", "disable_tqdm": True, "use_cpu": True}
    arguments = TrainingArguments(
        job["folder"], per_device_train_batch_size=1, num_train_epochs=1000, ddp_backend="gloo", **quiet
    )
    windows: Any = [{"input_ids": ids, "labels": ids} for ids in (torch.arange(64 * 16) % 256).view(64, 16)]
    model: Any = build_model(config, ByteTokenizer())
    with playing(config, leases) as played:
        Trainer(model, arguments, train_dataset=windows, callbacks=[DiLoCoCallback("diloco:small-1")]).train()
        claims = [[trained.samples, trained.tokens] for swarm in played.swarms for trained in swarm.trained]
    return {"final": float(sum(value.double().sum() for value in model.parameters())), "claims": claims}


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    rank, size = int(sys.argv[2]), job["processes"]
    # As torchrun has it; accelerate goes by that, and finds the process group there.
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    torch.set_num_threads(1)
    Run.with_data = lambda run, folders=(): run  # type: ignore[method-assign, assignment]
    if size > 1:
        dist.init_process_group("gloo", init_method=f"file://{job['meeting']}", rank=rank, world_size=size)
    try:
        found = [
            train_by_trainer(training) if training["kind"] == "trainer" else train(training, rank)
            for training in job["trainings"]
        ]
    except Exception as error:
        print(json.dumps([{"error": f"{type(error).__name__}: {error}"}]), flush=True)
        raise
    print(json.dumps(found), flush=True)
    if size > 1:
        with contextlib.suppress(RuntimeError):
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
