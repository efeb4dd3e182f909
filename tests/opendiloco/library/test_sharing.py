"""Processes that share a model are one peer: they train what one process would, and end together."""

from __future__ import annotations

import copy
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from opendiloco.config.run_config import RunConfig
from opendiloco.model.build import with_sizes_named

pytestmark = pytest.mark.thorough
SECONDS = 400.0
"""Two processes import torch and transformers, on two cores."""
LEASES = [[[0, 8]], [[8, 16]], [[16, 21]], [[30, 38]]]


def content_of(small_content: dict[str, Any], **changes: Any) -> dict[str, Any]:
    content = copy.deepcopy(small_content) | {"outer_steps": len(LEASES), "codec": {"kind": "fp16"}} | changes
    content["model"]["config"]["num_hidden_layers"] = 2
    return with_sizes_named(RunConfig.from_manifest_content(content)).to_manifest_content()


def run_processes(folder: Path, processes: int, *trainings: dict[str, Any]) -> list[tuple[list[dict[str, Any]], int]]:
    """Return what each process found in each training, its last line, and its exit code."""
    folder.mkdir(exist_ok=True)
    path = folder / "job.json"
    path.write_text(json.dumps({"processes": processes, "meeting": str(folder / "meeting"), "trainings": trainings}))
    command = [sys.executable, "-m", "tests.opendiloco.library.sharing_process", str(path)]
    started = [
        subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for rank in range(processes)
    ]
    found = []
    try:
        for process in started:
            out, err = process.communicate(timeout=SECONDS)
            assert out, err
            found.append((json.loads(out.splitlines()[-1]), process.returncode))
    finally:
        for process in started:
            process.kill()
            process.communicate()
    return found


def test_two_processes_train_what_one_does(small_content: dict[str, Any], tmp_path: Path) -> None:
    """Whichever way they share the model."""
    kinds: dict[str, dict[str, Any]] = {
        "ddp": {},
        "fsdp2": {},
        "fsdp2, streams": {"layers_per_fragment": 1, "overlap": 1},
        "fsdp2 in bf16, streams": {"overlap": 1},
    }
    trainings = [
        {"kind": kind, "content": content_of(small_content, streaming=streaming), "leases": LEASES}
        for kind, streaming in kinds.items()
    ]
    plain = [training | {"kind": "bf16" if "bf16" in training["kind"] else "alone"} for training in trainings]
    [(alone, _)] = run_processes(tmp_path / "alone", 1, *plain)
    (first, _), (second, _) = run_processes(tmp_path / "two", 2, *trainings)
    assert len(alone) == len(first) == len(second) == len(kinds), (alone, first, second)
    for kind, one, own, other in zip(kinds, alone, first, second, strict=True):
        assert own["final"] == other["final"], "both end with the run's weights"
        assert own["claims"] == one["claims"]
        assert [tokens for _, tokens in own["claims"]] == [128, 128, 80, 128]
        assert other["claims"] == [], "it is no peer"
        assert own["seen"] == other["seen"] == [[*at, 1, length] for *at, _, length in one["seen"]]
        tolerance = 2e-2 if "bf16" in kind else 1e-3  # gradients are summed in another order, and then rounded
        np.testing.assert_allclose(own["final"], one["final"], rtol=0, atol=tolerance, err_msg=kind)
        assert np.abs(np.subtract(own["final"], one["final"])).mean() < tolerance / 20


@pytest.mark.parametrize(
    ("failing", "first_error", "second_error"),
    [
        ({"swarm_fails_at": 1}, "RuntimeError: the network is gone", "RuntimeError: the network is gone"),
        ({"fails_at": [1, 1]}, "Connection closed by peer", "ValueError: out of something"),
        ({"kind": "alone"}, *["LoopError: the 2 processes of the loop no longer have the same weights"] * 2),
        ({"fails_at": [0, 1]}, "ValueError: out of something", "Connection closed by peer"),
    ],
    ids=["the swarm", "another process's loop", "nothing shared", "the first process's loop"],
)
def test_an_error_in_one_process_ends_all(
    small_content: dict[str, Any], tmp_path: Path, failing: dict[str, Any], first_error: str, second_error: str
) -> None:
    training = {"content": content_of(small_content), "leases": LEASES, "kind": "ddp"}
    found = run_processes(tmp_path, 2, training | failing)
    for ([ended], code), expected in zip(found, (first_error, second_error), strict=True):
        assert expected in ended["error"]
        assert code == 1


@pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="the Trainer needs accelerate")
def test_a_trainer_in_two_processes_is_one_peer(small_content: dict[str, Any], tmp_path: Path) -> None:
    training = {"content": content_of(small_content), "leases": LEASES, "kind": "trainer", "folder": str(tmp_path)}
    ([first], _), ([second], _) = run_processes(tmp_path, 2, training)
    assert [tokens for _, tokens in first["claims"]] == [128, 128, 80, 128], first
    assert second["claims"] == []
    assert first["final"] == second["final"]
