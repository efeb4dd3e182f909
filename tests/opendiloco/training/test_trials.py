"""What a worker tries before it trains. What fails on one of several workers is in test_sharing_workers.py."""

from __future__ import annotations

import json
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

from opendiloco.child_processes import child_environment
from opendiloco.config.run_config import RunConfig
from opendiloco.data.tokenizer import ByteTokenizer
from opendiloco.data.training_data import load_data
from opendiloco.model import loss as losses
from opendiloco.model.build import initial_theta
from opendiloco.shared_memory import SharedVectors, Vector, create_memory_file, reserve
from opendiloco.stages import watched_by
from opendiloco.training import trials
from opendiloco.training.evaluation import held_out_loss
from opendiloco.training.inner import ModelReplica
from opendiloco.training.team import Team
from opendiloco.workers.assembly import assemble_model
from opendiloco.workers.options import WorkerOptions
from opendiloco.workers.worker import ControlChannel, Worker
from peers.values.leases import SampleRange
from tests.opendiloco.workers.configuring import configure


def test_a_worker_tries_with_the_weights_that_it_trains(
    small_config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shards, and weights that nobody draws again, are whatever was in memory until theta is loaded."""
    tried = list[Vector]()

    def note(replica: ModelReplica, team: Team, cache: Path | None) -> str:
        weights = np.empty(replica.layout.size, np.float32)
        replica.store(weights)
        tried.append(weights)
        return ""

    monkeypatch.setattr(trials, "keep_compiled_if_it_works", note)
    theta, memory = initial_theta(small_config) + 1, create_memory_file()
    reserve(memory, theta.size)
    SharedVectors(memory, theta.size).theta[:] = theta
    command = configure(small_config, memory, fresh=False, micro_batch=2)
    Worker(command, ControlChannel(socket.socketpair()[0]))
    assert np.array_equal(tried, [theta])


@pytest.mark.parametrize(("works", "compiled"), [(True, 1), (False, 2)])
def test_a_worker_compiles_again_after_a_size_that_did_not_work(
    small_config: RunConfig, works: bool, compiled: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried, sizes = [0], list[int]()

    def keep(replica: ModelReplica, team: Team, cache: Path | None) -> str:
        tried[0] += 1
        return ""

    def enlarge(replica: ModelReplica, batch_size: int, team: Team) -> bool:
        sizes.append(batch_size)
        if works:
            replica.micro_batch, replica.uncompiled_micro_batch = 2, 1
        return works

    monkeypatch.setattr(trials, "keep_compiled_if_it_works", keep)
    monkeypatch.setattr(trials, "enlarge_micro_batch", enlarge)
    for micro_batch in (None, 1):  # of which the second is the owner's word
        memory = create_memory_file()
        reserve(memory, initial_theta(small_config).size)
        command = configure(small_config, memory, fresh=False, micro_batch=micro_batch)
        worker = Worker(command, ControlChannel(socket.socketpair()[0]))
        if micro_batch is None:
            assert (tried[0], sizes) == (compiled, [2])
            assert (worker.description.micro_batch, worker.description.uncompiled_micro_batch) == (2, 1 if works else 2)
    assert (tried[0], sizes) == (compiled + 1, [2])


def test_a_worker_that_computes_no_windows_tries_none(small_config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "fitting_micro_batch", lambda *_: pytest.fail("it tries how many windows fit"))
    memory = create_memory_file()
    reserve(memory, initial_theta(small_config).size)
    command = configure(small_config, memory, fresh=False, trains=False, reads=False)
    assert Worker(command, ControlChannel(socket.socketpair()[0])).description.micro_batch == 1


@pytest.mark.parametrize(("tf32", "precision"), [(True, "high"), (False, "highest")])
def test_a_worker_multiplies_as_precisely_as_its_owner_says(
    small_config: RunConfig, tf32: bool, precision: str
) -> None:
    before, memory = torch.get_float32_matmul_precision(), create_memory_file()
    reserve(memory, initial_theta(small_config).size)
    command = configure(small_config, memory, fresh=False, micro_batch=2, tf32=tf32)
    try:
        Worker(command, ControlChannel(socket.socketpair()[0]))
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


def test_more_windows_are_compiled_for_as_if_there_had_been_no_fewer(
    small_content: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """For their number alone, which makes faster kernels than for any; and training compiles nothing more."""
    sizes, others = list[int](), list[object]()

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        sizes.append(max(len(one) for one in inputs if isinstance(one, torch.Tensor) and one.ndim == 3))
        others.extend(one for one in inputs if not isinstance(one, torch.Tensor))  # how many there are
        return graph.forward

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    monkeypatch.setattr(trials, "MEASURED_ON", {"cpu"})
    monkeypatch.setattr(trials, "_free_memory", lambda team: 2**40)
    torch.compiler.reset()
    config = RunConfig.from_manifest_content(
        small_content | {"training": small_content["training"] | {"batch_size": 8}}
    )
    team, samples = Team(torch.device("cpu")), load_data(config, ByteTokenizer()).samples
    model = assemble_model(config, ByteTokenizer(), team, WorkerOptions(compile=True), None)
    replica = ModelReplica(config, model, samples, team, micro_batch=2)
    trials.keep_compiled_if_it_works(replica, team)
    assert trials.enlarge_micro_batch(replica, 8, team)
    assert replica.micro_batch == 8
    tried = len(sizes)
    assert (set(sizes), others) == ({2, 8}, [])
    replica.train(initial_theta(config), 0, (SampleRange(0, 20),), 3)  # the last batch has four windows
    assert len(sizes) == tried


@pytest.mark.parametrize("failures", [1, 2])
def test_a_loss_that_cannot_be_compiled_is_tried_again_with_an_empty_cache_and_given_up_without_the_blocks(
    failures: int, small_config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = [0]

    def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
        def computed(*arguments: Any) -> Any:
            tried[0] += 1
            if tried[0] <= failures:
                raise ImportError("file too short")
            return function(*arguments)

        return computed if function is losses._summed_loss else function

    monkeypatch.setattr(torch, "compile", compiled)
    (tmp_path / "library.so").touch()
    team, samples = Team(torch.device("cpu")), load_data(small_config, ByteTokenizer()).samples
    model = assemble_model(small_config, ByteTokenizer(), team, WorkerOptions(compile=True), None)
    replica, said = ModelReplica(small_config, model, samples, team, micro_batch=2), list[str]()
    with watched_by(lambda stage, share: said.append(stage)):
        assert trials.keep_compiled_if_it_works(replica, team, tmp_path) == ""
    assert trials.compiled_blocks(model)
    assert replica.compiled_loss is not None
    assert (replica.compiled_loss.error is not None) == (failures == 2)
    given_up = ["not compiling the loss, which would be faster: file too short."] * (failures == 2)
    assert said == ["compiling", "compiling again, with an empty cache", *given_up]


CACHED = """
import json, sys, torch
from opendiloco.config.run_config import RunConfig
from opendiloco.data.tokenizer import ByteTokenizer
from opendiloco.data.training_data import load_data
from opendiloco.stages import watched_by
from opendiloco.training.inner import ModelReplica
from opendiloco.training.team import Team
from opendiloco.training.trials import keep_compiled_if_it_works
from opendiloco.workers.assembly import assemble_model
from opendiloco.workers.options import WorkerOptions
from opendiloco.workers.worker import _own_cache

config, cache, said = RunConfig.from_manifest_content(json.loads(sys.argv[1])), _own_cache(sys.argv[2]), []
team, samples = Team(torch.device("cpu")), load_data(config, ByteTokenizer()).samples
model = assemble_model(config, ByteTokenizer(), team, WorkerOptions(compile=True), None)
replica = ModelReplica(config, model, samples, team, micro_batch=2)
with watched_by(lambda stage, share: said.append(stage)):
    problem = keep_compiled_if_it_works(replica, team, cache if sys.argv[3] == "ours" else None)
print(json.dumps([problem, said]))
"""


@pytest.mark.thorough
def test_a_compiler_that_was_killed_is_tried_again_with_an_empty_cache(
    small_content: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It leaves libraries of no bytes, which every later start would find."""
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)

    def compiled(whose: str) -> tuple[str, list[str]]:
        command = [sys.executable, "-c", CACHED, json.dumps(small_content), str(tmp_path / "compiled"), whose]
        ended = subprocess.run(command, env=child_environment(), capture_output=True, text=True, timeout=600)
        assert ended.returncode == 0, ended.stderr
        problem, said = json.loads(ended.stdout.splitlines()[-1])
        return problem, said

    assert compiled("ours") == ("", ["compiling"])
    libraries = list((tmp_path / "compiled").rglob("*.main.so"))
    assert libraries
    for library in libraries:
        library.write_bytes(b"")
    problem, said = compiled("the owner's")
    assert "file too short" in problem
    assert said[1].startswith("not compiling, which would be faster: ")
    assert compiled("ours") == ("", ["compiling", "compiling again, with an empty cache"])
    assert all(path.stat().st_size for path in (tmp_path / "compiled").rglob("*.so"))


@pytest.mark.parametrize(
    ("files", "errors", "attempts", "says"),
    [
        ({"a.so": ""}, [None], 1, ""),
        ({"a.so": ""}, [ImportError("too short"), None], 2, ""),
        ({"a.so": ""}, [ImportError("too short"), OSError("no Python.h")], 2, "no Python.h."),
        ({"a.so": ""}, [torch.OutOfMemoryError("full")], 1, ""),
        ({}, [OSError("no Python.h")], 1, "no Python.h."),
        (None, [OSError("no Python.h")], 1, "no Python.h."),
    ],
)
def test_what_cannot_be_compiled_is_tried_twice_if_the_cache_may_be_the_reason(
    files: dict[str, str] | None, errors: list[Exception | None], attempts: int, says: str, tmp_path: Path
) -> None:
    tried, found = [0], list[int]()
    for name, text in (files or {}).items():
        (tmp_path / "folder").mkdir()
        (tmp_path / "folder" / name).write_text(text)
        (tmp_path / name).write_text(text)

    def attempt() -> Exception | None:
        tried[0] += 1
        found.append(len(list(tmp_path.iterdir())))
        return errors[tried[0] - 1]

    cache = None if files is None else tmp_path
    assert trials._tried_twice(Team(torch.device("cpu")), cache, attempt) == says
    assert tried[0] == attempts
    assert found[1:] == [0] * (attempts - 1), "emptied in between"
