"""The runs that come as examples are loadable, as large as they say, and the small ones train."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from opendiloco.config.data import DataSection
from opendiloco.config.run_config import RunConfig
from opendiloco.data.tokenizer import ByteTokenizer
from opendiloco.model.build import build_skeleton
from opendiloco.reference import Reference, Work
from peers.values.leases import SampleRange

ROOT = Path(__file__).parents[2]
PARAMETERS = {
    "llama-2m": 1_968_384,
    "llama-15m": 15_441_408,
    "llama-150m": 214_983_680,
    "llama-1b": 1_100_048_384,
    "llama-10b": 10_211_381_248,
}


def preset(name: str) -> RunConfig:
    return RunConfig.from_toml(ROOT / "examples" / f"{name}.toml")


def test_these_are_all_of_them() -> None:
    assert {path.stem for path in (ROOT / "examples").glob("*.toml")} == {*PARAMETERS, "tiny"}
    rows = re.findall(r"^\| \[(\S+)\]\(\.\./examples/\S+\.toml\) \| ([\d,]+) \|", DOCUMENT, re.MULTILINE)
    assert {name: int(count.replace(",", "")) for name, count in rows} == PARAMETERS


DOCUMENT = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_preset_is_a_run_of_the_size_that_it_says(name: str) -> None:
    config = preset(name)
    assert config.name == name
    carried = json.loads(json.dumps(config.to_manifest_content()))
    assert RunConfig.from_manifest_content(carried) == config
    model = build_skeleton(config, ByteTokenizer())
    assert sum(parameter.numel() for parameter in model.parameters()) == PARAMETERS[name]
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}


@pytest.mark.parametrize("name", ["llama-2m", "llama-15m"])
def test_a_small_preset_trains(name: str, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("They train alone, then average what they learned, and go on. " * 400)
    (tmp_path / "b.txt").write_text("Peers come and go at any time. " * 400)
    changes = {"batch_size": 1, "sequence_length": 64, "inner_steps": 2}
    config = preset(name)
    config = config.model_copy(
        update={
            "data": DataSection(source=str(tmp_path), held_out=0.5),
            "training": config.training.model_copy(update=changes),
            "evaluation": config.evaluation.model_copy(update={"windows": 4}),
        }
    )
    torch.set_num_threads(1)
    reference = Reference(config)
    before = reference.held_out_loss()
    for start in (0, 2):
        reference.outer_step([Work("a", (SampleRange(start, start + 2),), 2)])
    assert reference.held_out_loss() < before
