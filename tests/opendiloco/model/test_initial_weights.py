from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from opendiloco.cli.run import _with_weights_named
from opendiloco.config.model import ModelSection, check_initial_weights, digest_of_weights
from opendiloco.config.run_config import RunConfig
from opendiloco.data.tokenizer import ByteTokenizer
from opendiloco.errors import MachineError
from opendiloco.model.build import build_model, initial_theta
from opendiloco.run import Run
from opendiloco.volunteer.local_workload import working
from opendiloco.workers.options import WorkerOptions
from peers.errors import ManifestError
from peers.values.identity import Identity

OTHER = "ab" * 32
CPU = WorkerOptions(device="cpu")


def pretrained(content: dict[str, Any], folder: Path) -> dict[str, Any]:
    """A run that begins with saved weights."""
    build_model(RunConfig.from_manifest_content(content), ByteTokenizer()).save_pretrained(folder)
    return content | {"model": {"path": str(folder)}}


def test_a_run_from_saved_weights_is_created_with_their_digest(small_content: dict[str, Any], tmp_path: Path) -> None:
    config = RunConfig.from_manifest_content(pretrained(small_content, tmp_path))
    named = _with_weights_named(config)
    assert named.model.digest == digest_of_weights(initial_theta(config))
    assert named.model.digest == digest_of_weights(initial_theta(RunConfig.from_manifest_content(small_content)))
    assert _with_weights_named(named) == named
    assert _with_weights_named(RunConfig.from_manifest_content(small_content)).model.digest is None


def test_a_run_with_another_digest_is_not_created(small_content: dict[str, Any], tmp_path: Path) -> None:
    content = pretrained(small_content, tmp_path)
    content["model"]["digest"] = OTHER
    with pytest.raises(MachineError, match=OTHER):
        _with_weights_named(RunConfig.from_manifest_content(content))


def test_weights_that_differ_are_named_with_those_that_are_meant() -> None:
    theta = np.arange(5, dtype=np.float32)
    meant, found = digest_of_weights(theta), digest_of_weights(theta + 1)
    check_initial_weights(theta, ModelSection(path="model", digest=meant))
    with pytest.raises(MachineError) as caught:
        check_initial_weights(theta + 1, ModelSection(path="model", digest=meant))
    assert caught.value.message == (
        f"the run's initial weights have the digest {meant}; here 'model' gives the digest {found}."
    )
    assert caught.value.exit_code == 6
    with pytest.raises(MachineError, match="here init_seed = 7 gives the digest") as caught:
        check_initial_weights(theta + 1, ModelSection(config={"model_type": "llama"}, init_seed=7, digest=meant))
    assert "constraints.txt" in caught.value.remedy


def test_weights_from_elsewhere_need_a_digest() -> None:
    theta = np.zeros(3, np.float32)
    check_initial_weights(theta, ModelSection(config={"model_type": "llama"}))
    with pytest.raises(ManifestError, match=r"model.path = 'hub/model' has no model.digest"):
        check_initial_weights(theta, ModelSection(path="hub/model"))


@pytest.mark.swarm
def test_a_volunteer_whose_weights_differ_does_not_train(small_content: dict[str, Any], tmp_path: Path) -> None:
    content = pretrained(small_content, tmp_path)
    content["model"]["digest"] = OTHER
    run = Run.sign(RunConfig.from_manifest_content(content), Identity.generate())

    async def story() -> None:
        async with working(run, CPU):
            pass

    with pytest.raises(MachineError, match=f"the digest {OTHER}; here .* gives the digest [0-9a-f]{{64}}"):
        asyncio.run(asyncio.wait_for(story(), 300))


@pytest.mark.parametrize("digest", ["ab", "AB" * 32, "xy" * 32])
def test_a_digest_is_one(small_content: dict[str, Any], digest: str) -> None:
    content = small_content | {"model": small_content["model"] | {"digest": digest}}
    with pytest.raises(ManifestError, match=f"model.digest = '{digest[:50]}.*: not 64 hexadecimal digits"):
        RunConfig.from_manifest_content(content)
