"""Nothing of a stranger's model or tokenizer runs here, opens what was not named, or takes more than was allowed."""

from __future__ import annotations

import ast
import copy
import importlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch

import opendiloco
from opendiloco import shared_memory
from opendiloco.cli.status import _needs_here
from opendiloco.config.data import TokenizerSection
from opendiloco.config.run_config import RunConfig
from opendiloco.data.own_files import OwnFiles
from opendiloco.data.tokenizer import ByteTokenizer, build_tokenizer
from opendiloco.errors import DataError, MachineError
from opendiloco.model import build as building
from opendiloco.model.build import build_model, build_skeleton, sized_skeleton
from opendiloco.run import Run
from opendiloco.shared_memory import cap_memory
from opendiloco.volunteer.states import find_origin
from peers.errors import ManifestError
from peers.values.identity import Identity

LOADERS = {"from_pretrained", "from_config", "load_dataset", "load_dataset_builder"}
CODE = {"AutoConfig": "code.Config", "AutoTokenizer": ["code.Tokenizer", None]}


def changed(content: dict[str, Any], **values: Any) -> dict[str, Any]:
    """Return a run's content with these values in its model.config."""
    content = copy.deepcopy(content)
    content["model"]["config"].update(values)
    return content


def of_folder(content: dict[str, Any], path: Path | str) -> RunConfig:
    return RunConfig.from_manifest_content(content | {"model": {"path": str(path)}})


@pytest.fixture
def folder(small_content: dict[str, Any], tmp_path: Path) -> Path:
    """A model's folder."""
    path = tmp_path / "model"
    build_model(RunConfig.from_manifest_content(small_content), ByteTokenizer()).save_pretrained(path)
    return path


@pytest.fixture
def words(tmp_path: Path) -> Path:
    """A tokenizer's folder."""
    ByteTokenizer().pretrained().save_pretrained(tmp_path / "words")
    return tmp_path / "words"


def rewrite(file: Path, **values: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text(encoding="utf-8")) | values), encoding="utf-8")


def loading_calls(tree: ast.AST) -> Iterator[ast.Call | ast.Attribute]:
    """Yield each call of a loader, and each mention of one that is not called where it stands."""
    called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        mentioned = node.func if isinstance(node, ast.Call) else node
        is_loader = isinstance(mentioned, ast.Attribute) and mentioned.attr in LOADERS
        if is_loader and isinstance(node, ast.Call | ast.Attribute) and id(node) not in called:
            yield node


def is_closed(node: ast.Call | ast.Attribute) -> bool:
    if isinstance(node, ast.Attribute):
        return False
    if isinstance(node.func, ast.Attribute) and node.func.attr.startswith("load_dataset"):
        return all(each.arg != "trust_remote_code" for each in node.keywords)  # `datasets` runs no code any more
    trusted = [each.value for each in node.keywords if each.arg == "trust_remote_code"]
    return [getattr(each, "value", None) for each in trusted] == [False]


def test_no_call_leaves_it_open_whether_code_is_run() -> None:
    found = []
    for file in Path(opendiloco.__file__).parent.rglob("*.py"):
        found += [(file.name, node) for node in loading_calls(ast.parse(file.read_text(encoding="utf-8")))]
    assert len(found) >= 5
    assert not [(name, node.lineno) for name, node in found if not is_closed(node)]


@pytest.mark.parametrize(
    "line",
    ["A.from_pretrained(p)", "A.from_config(c, trust_remote_code=x)", "load = A.from_pretrained", "f(A.from_config)"],
)
def test_the_walk_finds_a_call_that_does(line: str) -> None:
    assert not all(map(is_closed, loading_calls(ast.parse(line))))


FOREIGN = [
    ("attn_implementation", "people/kernel"),
    ("experts_implementation", "people/kernel"),
    ("quantization_config", {"quant_method": "gptq", "bits": 4}),
    ("text_config", {"attn_implementation": {"": "people/kernel"}}),
]


@pytest.mark.parametrize(("key", "value"), FOREIGN)
def test_a_config_names_no_code_and_no_kernels(
    key: str, value: Any, small_content: dict[str, Any], folder: Path
) -> None:
    with pytest.raises(ManifestError, match=rf"model.config: {key}\S* names code or kernels that come with the model"):
        RunConfig.from_manifest_content(changed(small_content, **{key: value}))
    rewrite(folder / "config.json", **{key: value})
    for refuse in (build_skeleton, build_model):
        with pytest.raises(ManifestError, match=rf"model.path = .*config.json: {key}\S* names code or kernels"):
            refuse(of_folder(small_content, folder), ByteTokenizer())


def test_a_manifests_config_names_no_code_at_all(small_content: dict[str, Any]) -> None:
    with pytest.raises(
        ManifestError, match=r"model.config: auto_map\S* names code or kernels that come with the model"
    ):
        RunConfig.from_manifest_content(changed(small_content, auto_map=CODE))


def test_code_that_lies_beside_a_known_model_is_passed_over(
    small_content: dict[str, Any], folder: Path, words: Path, tmp_path: Path
) -> None:
    """Many a published model has some, for versions of transformers that did not know it."""
    mark = tmp_path / "mark"
    for place, name in ((folder, "config.json"), (words, "tokenizer_config.json")):
        rewrite(place / name, auto_map=CODE)
        (place / "code.py").write_text(f"open({str(mark)!r}, 'w')\n", encoding="utf-8")
    assert build_model(of_folder(small_content, folder), ByteTokenizer()).config.model_type == "llama"
    assert build_tokenizer(TokenizerSection(kind="pretrained", path=str(words))).size == 259
    assert not mark.exists()


@pytest.mark.parametrize("key", ["_attn_implementation", "_name_or_path", "name_or_path"])
def test_a_config_in_a_manifest_says_nothing_of_transformers_insides(key: str, small_content: dict[str, Any]) -> None:
    for values in ({key: "people/kernel"}, {"rope_parameters": [{key: "people/kernel"}]}):
        with pytest.raises(ManifestError, match=rf"model.config: \S*{key} is set by transformers itself"):
            RunConfig.from_manifest_content(changed(small_content, **values))


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_only_a_published_config_says_how_its_weights_are_kept(
    key: str, small_content: dict[str, Any], folder: Path
) -> None:
    for values in ({key: "bfloat16"}, {"text_config": {key: "bfloat16"}}):
        with pytest.raises(ManifestError, match=rf"model.config: \S*{key} has no effect: weights are fp32, and tr"):
            RunConfig.from_manifest_content(changed(small_content, **values))
    rewrite(folder / "config.json", **{key: "bfloat16"})
    assert next(build_model(of_folder(small_content, folder), ByteTokenizer()).parameters()).dtype == torch.float32


@pytest.mark.parametrize(
    ("values", "where"),
    [
        ({"num_hidden_layers": 100_000_000}, "num_hidden_layers = 100000000"),
        ({"vocab_size": -(10**30)}, "vocab_size = -1"),
        ({"vision_config": {"depths": [2, 10**9]}}, r"vision_config\.depths\.1 = 1000000000"),
    ],
)
def test_every_whole_number_of_a_config_has_a_bound(
    values: dict[str, Any], where: str, small_content: dict[str, Any], folder: Path, words: Path
) -> None:
    with pytest.raises(ManifestError, match=rf"model.config: {where}\d* is too large; use 16777216 or less"):
        RunConfig.from_manifest_content(changed(small_content, **values))
    rewrite(folder / "config.json", **values)
    with pytest.raises(ManifestError, match=rf"config.json: {where}\d* is too large"):
        build_skeleton(of_folder(small_content, folder), ByteTokenizer())
    (words / "config.json").write_bytes((folder / "config.json").read_bytes())
    with pytest.raises(DataError, match=rf"config.json: {where}\d* is too large"):
        build_tokenizer(TokenizerSection(kind="pretrained", path=str(words)))


def test_a_model_that_takes_too_long_to_lay_out_is_refused_before_it_is(
    small_content: dict[str, Any], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers, built = 1 << 24, list[Any]()
    rewrite(folder / "config.json", num_hidden_layers=layers, layer_types=None)
    monkeypatch.setattr(building, "MOST_SECONDS", 1)
    monkeypatch.setattr(torch.nn.Module, "float", built.append)
    config = RunConfig.from_manifest_content(changed(small_content, num_hidden_layers=layers))
    ways: tuple[tuple[Callable[[RunConfig], Any], RunConfig, str], ...] = (
        (sized_skeleton, config, "config"),
        (lambda run: build_model(run, ByteTokenizer()), config, "config"),
        (sized_skeleton, of_folder(small_content, folder), "path"),
    )
    said = "takes more than 1024 MiB of memory or 1 s"
    for refuse, run, field in ways:
        with pytest.raises(ManifestError, match=rf"^model.{field}: to lay out this model.* {said}") as caught:
            refuse(run)
        assert "Lower its numbers of layers" in caught.value.remedy
    assert not built, "it was laid out in this process"


def test_a_child_that_hangs_at_a_lock_is_followed_by_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: where another thread had held a lock of torch's at the fork, the model was refused as too large."""
    monkeypatch.setattr(building, "STILLNESS", 0.05)
    lock, tried = threading.Lock(), tmp_path / "tried"

    def build(hangs: int) -> None:
        with tried.open("a", encoding="ascii") as file:
            file.write("x")
        if len(tried.read_text(encoding="ascii")) <= hangs:
            lock.acquire()

    lock.acquire()
    building.rehearse(lambda: build(hangs=2), "model.config")
    assert tried.read_text(encoding="ascii") == "xxx"
    with pytest.raises(MachineError, match=r"^model.config: the process that lays out this model hangs"):
        building.rehearse(lambda: build(hangs=6), "model.config")


def test_no_more_memory_is_taken_than_a_model_may_and_the_owner_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    def build() -> None:
        bytearray(1 << 29)  # more than the heap of this process may have free

    building.rehearse(build, "model.config")
    monkeypatch.setattr(building, "MOST_BYTES", 1 << 25)
    with pytest.raises(ManifestError, match="takes more than 32 MiB"):
        building.rehearse(build, "model.config")
    cap_memory(0)
    try:
        with pytest.raises(ManifestError, match="takes more than 0 MiB"):
            building.rehearse(build, "model.config")
    finally:
        cap_memory(None)


def test_weights_are_counted_before_they_are_drawn(small_content: dict[str, Any]) -> None:
    config = RunConfig.from_manifest_content(changed(small_content, hidden_size=1 << 20, intermediate_size=1 << 22))
    with pytest.raises(MachineError, match=r"Building this model: .* MiB are needed"):
        build_model(config, ByteTokenizer())


def test_buffers_are_counted_before_they_are_filled(
    small_content: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: a mask with the square of the positions takes nothing as a skeleton, and took all memory later."""
    masked = {"model_type": "gpt_bigcode", "vocab_size": 259, "n_embd": 8, "n_layer": 1, "n_head": 1, "n_inner": 8}
    config = RunConfig.from_manifest_content(small_content | {"model": {"config": masked | {"n_positions": 16_384}}})
    monkeypatch.setattr(shared_memory, "available_memory", lambda: 1 << 29)
    with pytest.raises(MachineError, match=r"Building this model: 76\d MiB are needed, 512 MiB are free"):
        build_model(config, ByteTokenizer())


def test_an_architecture_fetches_no_kernels_from_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mamba would, where the package `kernels` is installed."""
    hub: Any = importlib.import_module("transformers.integrations.hub_kernels")
    asked = list[str]()
    monkeypatch.setattr(hub, "is_kernels_available", lambda: True)
    monkeypatch.setattr(hub, "get_kernel", lambda name, **options: asked.append(name))
    assert hub.lazy_load_kernel("mamba-ssm", {}) is None
    assert not asked


@pytest.mark.thorough
def test_no_environment_variable_allows_them() -> None:
    """Regression: an owner who had USE_HUB_KERNELS set for other programs let strangers' models fetch them."""
    code = "import opendiloco.model.build, transformers.integrations.hub_kernels as hub; print(hub._kernels_enabled)"
    environment = os.environ | {"USE_HUB_KERNELS": "YES"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.stdout == "False\n", done.stderr


# Whose files are opened ---------------------------------------------------------------------------------------------
def test_a_name_on_the_hub_is_no_folder_here(
    small_content: dict[str, Any], folder: Path, words: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever lies in the working directory under that name, or below the name of its owner."""
    asked = list[str]()
    here = tmp_path / "here"
    for name in ("gpt2", "people/llama"):
        (here / name).mkdir(parents=True)
        rewritten = {"auto_map": CODE, "model_type": "evil"}
        (here / name / "config.json").write_text(json.dumps(rewritten), encoding="utf-8")
        (here / name / "tokenizer_config.json").write_text(json.dumps(rewritten), encoding="utf-8")

    def download(name: str, allow_patterns: list[str], ignore_patterns: list[str], token: bool) -> str:
        assert not token, "a stranger's run would read what only this machine's owner may"
        asked.append(name)
        return str(words if "*.txt" in allow_patterns else folder)

    monkeypatch.chdir(here)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr(huggingface_hub, "HfApi", None)
    for name in ("gpt2", "people/llama"):
        assert build_model(of_folder(small_content, name), ByteTokenizer()).config.model_type == "llama"
        assert build_tokenizer(TokenizerSection(kind="pretrained", path=name)).size == 259
    assert set(asked) == {"gpt2", "people/llama"}


@pytest.mark.parametrize("path", ["/etc", "~/model", "../model", ".cache", "a/b/c", "a\\b", "file:///model", "./gpt2"])
def test_what_is_no_name_on_the_hub_is_opened_where_a_volunteer_names_it(
    path: str, small_content: dict[str, Any], folder: Path, words: Path
) -> None:
    content = small_content | {"tokenizer": {"kind": "pretrained", "path": path}}
    theirs = Run.sign(of_folder(content, path), Identity.generate())
    model, tokenizer = OwnFiles(model=folder), OwnFiles(tokenizer=words)
    for own, table in ((OwnFiles(), "model"), (tokenizer, "model"), (model, "tokenizer")):
        with pytest.raises(DataError, match=f"{table}.path = .* what you have not named is not read") as caught:
            theirs.with_own(own)
        assert (caught.value.exit_code, f"--{table} PATH" in caught.value.remedy) == (7, True)
    ours = theirs.with_own(OwnFiles(folder, words)).config
    assert build_model(ours, build_tokenizer(ours.tokenizer)).config.model_type == "llama"


def test_a_tokenizers_file_is_local_by_any_name(small_content: dict[str, Any], words: Path) -> None:
    content = small_content | {"tokenizer": {"kind": "file", "path": "tokenizer.json", "end": "<|end|>"}}
    theirs = Run.sign(RunConfig.from_manifest_content(content), Identity.generate())
    with pytest.raises(DataError, match=r"tokenizer.path = 'tokenizer.json' is a place"):
        theirs.with_own(OwnFiles())
    ours = theirs.with_own(OwnFiles(tokenizer=words / "tokenizer.json"))
    assert build_tokenizer(ours.config.tokenizer).size == 259


def test_what_a_run_brings_itself_needs_no_file(small_config: RunConfig, folder: Path) -> None:
    run = Run.sign(small_config, Identity.generate())
    assert run.with_own(OwnFiles()) == run
    for table in ("model", "tokenizer"):
        with pytest.raises(DataError, match=f"--{table} .*: this run's manifest defines its {table}"):
            run.with_own(OwnFiles(**{table: folder}))


def test_what_lists_or_reads_a_strangers_run_opens_no_folder(
    small_content: dict[str, Any], folder: Path, tmp_path: Path
) -> None:
    run = Run.sign(of_folder(small_content, folder), Identity.generate())
    with pytest.raises(DataError, match="--model PATH"):
        _needs_here(run)
    (tmp_path / "manifest").write_bytes(run.manifest.pack())
    with pytest.raises(DataError, match="--model PATH"):
        find_origin(tmp_path, manifest=tmp_path / "manifest")


@pytest.mark.parametrize("key", ["vocab_file", "tokenizer_file", "fast_tokenizer_files"])
def test_a_tokenizers_folder_names_no_files_elsewhere(key: str, words: Path) -> None:
    rewrite(words / "tokenizer_config.json", **{key: ["/etc/passwd"]})
    with pytest.raises(DataError, match=rf"tokenizer_config.json: {key} names other files") as caught:
        build_tokenizer(TokenizerSection(kind="pretrained", path=str(words)))
    assert "\n" not in str(caught.value)


def replacing(pattern: dict[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


@pytest.mark.parametrize(
    ("normalizers", "is_refused"),
    [
        ([replacing({"String": "e"}, "ee")] * 9, False),
        ([replacing({"Regex": " {2,}"}, " "), replacing({"String": "``"}, '"'), {"type": "NFKC"}], False),
        ([replacing({"String": "e"}, "ee")] * 10, True),
        ([{"type": "Sequence", "normalizers": [replacing({"Regex": "x*"}, "a" * 40)] * 2}], True),
    ],
)
def test_a_tokenizer_makes_no_text_endlessly_longer(
    normalizers: list[dict[str, Any]], is_refused: bool, words: Path
) -> None:
    """Regression: forty replacements of a letter by two took all memory for the first word."""
    rewrite(words / "tokenizer.json", normalizer={"type": "Sequence", "normalizers": normalizers})
    section = TokenizerSection(kind="pretrained", path=str(words))
    if not is_refused:
        assert build_tokenizer(section).size == 259
        return
    with pytest.raises(DataError, match=r"tokenizer.json: its normalizer can lengthen a text more than 1000 times"):
        build_tokenizer(section)


def test_a_models_folder_has_its_own_weights(small_content: dict[str, Any], folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"lm_head.weight": "../secret.safetensors"}}), encoding="utf-8")
    with pytest.raises(ManifestError, match=r"names '../secret.safetensors', which is not a file in the same folder"):
        build_model(of_folder(small_content, folder), ByteTokenizer())
    index.unlink()
    (folder / "adapter_config.json").write_text("{}", encoding="utf-8")
    for missing in ((), ("config.json",)):
        for name in missing:
            (folder / name).unlink()
        with pytest.raises(ManifestError, match="an adapter to another model"):
            build_model(of_folder(small_content, folder), ByteTokenizer())
