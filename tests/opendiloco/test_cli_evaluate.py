"""`diloco-peer evaluate`: what lm-eval is called with, and what it makes of an exported model."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from opendiloco.cli.group import main
from opendiloco.config.run_config import RunConfig
from opendiloco.data.tokenizer import ByteTokenizer
from opendiloco.model.build import build_model
from opendiloco.model.card import RunFacts
from opendiloco.model.export import export_model

FACTS = RunFacts(run_id="small-1", manifest_digest="00" * 32, outer_steps=1, tokens=1, peers=1, held_out_loss=5.0)
STAND_IN = (
    "import json, pathlib, sys\npathlib.Path('called.json').write_text(json.dumps(sys.argv[1:]))\nsys.exit({code})\n"
)
TASK = """
task: local_words
dataset_path: json
dataset_kwargs:
  data_files:
    test: {file}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
"""


def call(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["evaluate", *map(str, arguments)])


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    return folder


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package of lm-eval's name that notes how it is called."""
    package = tmp_path / "packages" / "lm_eval"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(STAND_IN.format(code=0))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(package.parent), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.syspath_prepend(package.parent)
    monkeypatch.chdir(tmp_path)
    return package / "__main__.py"


def test_the_folder_and_the_options_are_handed_on(model: Path, stand_in: Path, tmp_path: Path) -> None:
    done = call(model, "--tasks", "a,b", "--limit", 3, "--device", "cpu", "--", "--num_fewshot", 2)
    assert done.exit_code == 0, done.output
    called = json.loads((tmp_path / "called.json").read_text())
    assert called == [
        *("--model", "hf", "--model_args", f"pretrained={model},trust_remote_code=False", "--tasks", "a,b"),
        *("--limit", "3", "--batch_size", "8", "--device", "cpu", "--num_fewshot", "2"),
    ]


def test_what_goes_wrong_there_is_an_error_here(model: Path, stand_in: Path) -> None:
    stand_in.write_text(STAND_IN.format(code=3))
    done = call(model, "--tasks", "a")
    assert done.exit_code == 6
    assert "lm-eval ended with exit status 3." in done.output


def test_a_folder_of_tasks_that_is_not_there_is_named(model: Path, stand_in: Path, tmp_path: Path) -> None:
    """Regression: lm-eval passed over it, and showed a traceback."""
    done = call(model, "--tasks", "a", "--include", "/nonexistent")
    assert done.exit_code == 2
    assert "Invalid value for --include: '/nonexistent' is not there. Name a folder that has" in done.output
    assert not (tmp_path / "called.json").exists(), "lm-eval was started"


def test_a_path_that_lm_eval_would_take_apart_is_refused(tmp_path: Path, stand_in: Path) -> None:
    (tmp_path / "a,b").mkdir()
    done = call(tmp_path / "a,b", "--tasks", "a")
    assert done.exit_code == 6
    assert "Rename the folder" in done.output


def test_without_lm_eval_the_remedy_installs_it(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    done = call(model, "--tasks", "hellaswag")
    assert done.exit_code == 6
    assert 'lm-eval is not installed here. Install it: pip install "diloco-peer[evaluate]"' in done.output


def test_a_local_task(small_config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the real lm-eval, which takes long to import."""
    pytest.importorskip("lm_eval", reason="a development package that is not installed")
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    model, tasks = tmp_path / "model", tmp_path / "tasks"
    export_model(build_model(small_config, ByteTokenizer()), ByteTokenizer(), model, small_config, FACTS, "bfloat16")
    tasks.mkdir()
    questions: list[dict[str, Any]] = [
        {"question": f"{word} ", "choices": ["go", "on"], "answer": place % 2}
        for place, word in enumerate(["peers", "train", "alone", "then"])
    ]
    (tasks / "words.jsonl").write_text("\n".join(map(json.dumps, questions)))
    (tasks / "words.yaml").write_text(TASK.format(file=tasks / "words.jsonl"))
    out = tmp_path / "results"
    done = call(model, "--tasks", "local_words", "--include", tasks, "--device", "cpu", "--out", out, "--limit", 3)
    assert done.exit_code == 0, done.output
    [file] = out.rglob("results*.json")
    assert 0 <= json.loads(file.read_text())["results"]["local_words"]["acc,none"] <= 1
