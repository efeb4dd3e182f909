"""Trials among workers that share a model: what fails on one of them alone keeps no other one waiting."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from opendiloco.config.run_config import RunConfig
from opendiloco.data.tokenizer import ByteTokenizer
from opendiloco.data.training_data import load_data
from opendiloco.inner import trials
from opendiloco.inner.replica import ModelReplica
from opendiloco.inner.team import Team
from opendiloco.model.build import initial_theta
from opendiloco.model.evaluation import held_out_loss
from opendiloco.shared_memory import SharedVectors, Vector, create_memory_file, reserve
from opendiloco.workers.assembly import assemble_model
from opendiloco.workers.channel import ControlChannel
from opendiloco.workers.control import Configure
from opendiloco.workers.options import WorkerOptions
from opendiloco.workers.worker import Descriptors, Worker
from peers.values.leases import SampleRange

PATIENCE = 300.0
"""Seconds: each worker starts torch and transformers, on a busy machine."""

WORKER = """
import json, os, sys, torch, torch.distributed as distributed
from datetime import timedelta
from pathlib import Path
from transformers.models.llama import modeling_llama
from opendiloco.config.run_config import RunConfig
from opendiloco.data.tokenizer import ByteTokenizer
from opendiloco.data.training_data import load_data
from opendiloco.inner import attention
from opendiloco.inner.replica import ModelReplica
from opendiloco.model.blocks import transformer_blocks
from opendiloco.inner.team import Team
from opendiloco.inner.trials import keep_compiled_if_it_works
from opendiloco.model.build import initial_theta
from opendiloco.stages import watched_by
from opendiloco.workers.assembly import assemble_model
from opendiloco.workers.options import WorkerOptions
from peers.values.leases import SampleRange
from tests.opendiloco.test_sharding import Broken

rank, folder = int(sys.argv[1]), Path(sys.argv[2])
store = distributed.FileStore(str(folder / "store"), 2)
distributed.init_process_group("gloo", timeout=timedelta(seconds=120), rank=rank, world_size=2, store=store)
team = Team(torch.device("cpu"), rank, 2, distributed.init_device_mesh("cpu", (2,)))
config = RunConfig.from_manifest_content(json.loads((folder / "run.json").read_text()))
samples, theta = load_data(config, ByteTokenizer()).samples, initial_theta(config)
make_mask, said = modeling_llama.create_causal_mask, []

def refuse(*arguments, **options):
    raise RuntimeError("there is no compiler here")

def mask(config, *arguments, **options):
    is_refused = rank == 1 and config._attn_implementation == "eager"
    return refuse() if is_refused else make_mask(config, *arguments, **options)

def trained(compiled, trial):
    torch.compile = compiled
    model = assemble_model(config, ByteTokenizer(), team, WorkerOptions(compile=compiled is not None), None)
    replica = ModelReplica(config, model, samples, team, micro_batch=2)
    replica.load(theta)
    with watched_by(lambda stage, share: said.append(stage)):
        trial(replica)
    assert all("forward" not in vars(block) for block in transformer_blocks(model))
    done = replica.train(theta, 0, (SampleRange(0, 8),), 2)
    return done.loss

def compiling(replica):
    keep_compiled_if_it_works(replica, team)

def attending(replica):
    assert attention.document_attention(replica, team, ByteTokenizer.end) is None

def broken(forward):
    return Broken(forward) if rank == 1 else forward

def refused(forward):
    return refuse if rank == 1 else forward

expected = trained(None, lambda replica: None)
assert trained(broken, compiling) == expected
assert trained(refused, compiling) == expected
attention.FLEX, attention.FLEX_ON, attention.compiling_lacks = "eager", {"cpu"}, lambda device: None
modeling_llama.create_causal_mask = mask
assert trained(None, attending) == expected
print(json.dumps([stage for stage in said if stage.startswith(("not compiling", "attention"))]), flush=True)
os._exit(0)  # as workers end: an interpreter that ends while gloo's threads live may abort
"""


def test_what_fails_on_one_worker_alone_is_left_out_on_all(small_content: dict[str, Any], tmp_path: Path) -> None:
    """Compiling, forward and back, and the mask of another attention; and both train as if nobody had tried."""
    model = {"config": small_content["model"]["config"] | {"num_hidden_layers": 2}, "init_seed": 3}
    training = small_content["training"] | {"document_mask": True}
    content = small_content | {"model": model, "training": training}
    (tmp_path / "run.json").write_text(json.dumps(content), encoding="utf-8")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, str(rank), str(tmp_path)],
            env=environment | {"GLOO_SOCKET_IFNAME": "lo"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for rank in range(2)
    ]
    try:
        ended = [worker.communicate(timeout=PATIENCE) for worker in workers]
        errors = "\n".join(error.decode() for _, error in ended)
        assert [worker.returncode for worker in workers] == [0, 0], errors
        said = [json.loads(out) for out, _ in ended]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    uncompiled = "not compiling, which would be faster: "
    masked = "attention is computed between documents, too, and masked: "
    assert said[0] == [f"{uncompiled}another worker cannot."] * 2 + [f"{masked}another worker needs it."]
    assert said[1] == [
        f"{uncompiled}fatal error: Python.h: No such file.",
        f"{uncompiled}there is no compiler here.",
        f"{masked}there is no compiler here.",
    ]


def test_a_worker_tries_with_the_weights_that_it_trains(
    small_config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shards, and weights that nobody draws again, are whatever was in memory until theta is loaded."""
    tried = list[Vector]()

    def note(replica: ModelReplica, team: Team) -> None:
        weights = np.empty(replica.layout.size, np.float32)
        replica.store(weights)
        tried.append(weights)

    monkeypatch.setattr(trials, "keep_compiled_if_it_works", note)
    theta, memory = initial_theta(small_config) + 1, create_memory_file()
    reserve(memory, theta.size)
    SharedVectors(memory, theta.size).theta[:] = theta
    configure = Configure(
        manifest_content=small_config.to_manifest_content(),
        options=WorkerOptions(device="cpu", micro_batch=2),
        device="cpu",
        rank=0,
        workers=1,
        port=0,
        fresh=False,
    )
    Worker(configure, Descriptors(memory, create_memory_file(), None), ControlChannel(socket.socketpair()[0]))
    assert np.array_equal(tried, [theta])


@pytest.mark.parametrize(("tf32", "precision"), [(True, "high"), (False, "highest")])
def test_a_worker_multiplies_as_precisely_as_its_owner_says(
    small_config: RunConfig, tf32: bool, precision: str
) -> None:
    before, memory = torch.get_float32_matmul_precision(), create_memory_file()
    reserve(memory, initial_theta(small_config).size)
    configure = Configure(
        manifest_content=small_config.to_manifest_content(),
        options=WorkerOptions(device="cpu", micro_batch=2, tf32=tf32),
        device="cpu",
        rank=0,
        workers=1,
        port=0,
        fresh=False,
    )
    try:
        Worker(configure, Descriptors(memory, create_memory_file(), None), ControlChannel(socket.socketpair()[0]))
        assert torch.get_float32_matmul_precision() == precision
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("checkpoints", [False, True])
def test_what_is_compiled_in_the_trial_is_what_trains(
    checkpoints: bool, small_config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training compiles nothing more: it has the same shapes, and the same gradients are wanted."""
    graphs = list[torch.fx.GraphModule]()

    def backend(graph: torch.fx.GraphModule, inputs: object) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    torch.compiler.reset()
    options = WorkerOptions(compile=True, activation_checkpointing=checkpoints)
    team, samples = Team(torch.device("cpu")), load_data(small_config, ByteTokenizer()).samples
    model = assemble_model(small_config, ByteTokenizer(), team, options, None)
    replica = ModelReplica(small_config, model, samples, team, micro_batch=2)
    trials.keep_compiled_if_it_works(replica, team)
    tried = len(graphs)
    replica.train(initial_theta(small_config), 0, (SampleRange(0, 8),), 2)
    assert len(graphs) == tried > 0


def test_nothing_is_compiled_after_the_trial(small_content: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither for the last windows of a batch, nor for the last batch of a lease, nor to evaluate."""
    graphs = list[torch.fx.GraphModule]()

    def backend(graph: torch.fx.GraphModule, inputs: object) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    torch.compiler.reset()
    training = small_content["training"] | {"batch_size": 8, "document_mask": True}
    config = RunConfig.from_manifest_content(small_content | {"training": training})
    team, data = Team(torch.device("cpu")), load_data(config, ByteTokenizer())
    model = assemble_model(config, ByteTokenizer(), team, WorkerOptions(compile=True), None)
    replica, theta = ModelReplica(config, model, data.samples, team, micro_batch=5), initial_theta(config)
    assert replica.tried_sizes == (5, 3)
    trials.keep_compiled_if_it_works(replica, team)
    tried = len(graphs)
    replica.train(theta, 0, (SampleRange(0, 16),), 2)
    assert len(graphs) == tried > 1
    replica.train(theta, 0, (SampleRange(16, 25),), 2)  # its last batch has one window
    held_out_loss(model, data.held_out, 8, 7)
    assert len(graphs) == tried
