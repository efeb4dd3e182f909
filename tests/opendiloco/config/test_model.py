from __future__ import annotations

import copy
import hashlib
import inspect
import os
import re
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from opendiloco.config.model import digest_of_weights
from opendiloco.config.run_config import RunConfig
from opendiloco.data.tokenizer import ByteTokenizer
from opendiloco.model.build import BLOCK, _draw, _PortableNormal, build_model, build_skeleton, initial_theta
from opendiloco.model.parameters import Shards, layout_of, trainable
from peers.errors import ManifestError


def digest_of_a_draw() -> str:
    """Of a model as transformers itself initialises it, and of a draw."""
    with _PortableNormal(1):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model("gpt2", n_embd=64, n_head=4, n_layer=1, vocab_size=99)
        )
        draws = [*model.parameters(), torch.empty(50, 64).normal_(0, 0.02)]
    return hashlib.sha256(b"".join(draw.detach().numpy().tobytes() for draw in draws)).hexdigest()


def test_initial_weights_are_normal_and_the_same_for_the_same_seed(small_config: RunConfig) -> None:
    first, second = (build_model(small_config, ByteTokenizer()) for _ in range(2))
    weight = first.model.layers[0].mlp.up_proj.weight
    assert torch.equal(weight, second.model.layers[0].mlp.up_proj.weight)
    assert weight.dtype == torch.float32
    assert weight.std().item() == pytest.approx(0.02, rel=0.15)


def test_the_portable_normal_has_the_moments_of_a_normal() -> None:
    with _PortableNormal(0):
        values = torch.empty(200_000).normal_(3.0, 2.0)
    assert values.mean().item() == pytest.approx(3.0, abs=0.02)
    assert values.std().item() == pytest.approx(2.0, rel=0.01)
    assert ((values - 3).abs() < 2).float().mean().item() == pytest.approx(0.683, abs=0.01)


GOLDEN = {
    (0, 0): [0.7498626708984375, -1.50152587890625],
    (3, 1): [0.8978118896484375, -1.196044921875],
}
"""The first values of a seed and a call, by `reference`."""
GOLDEN_BLOCKS = "d4473f1911a6985279b12c1176d97a1774bc102fb1e9a805a0d058a61c6f6769"
"""SHA-256 of a whole block's values and of 5 of the next, by `reference`."""
GOLDEN_WEIGHTS = "c5c4d1b27a9b4740c4ef29f35c01307730dce077aa1204fa1a36ae64d3f13dcb"
"""Of the small run's model, with the versions in constraints.txt."""


def reference(seed: int, call: int, count: int) -> list[float]:
    """Return the first block's values as the definition has them, in exact arithmetic."""
    words = np.random.Philox(key=[seed, call], counter=[0, 0, 0, 0]).random_raw(3 * count).tolist()
    draws = [word >> shift & 0xFFFF for word in words for shift in (0, 16, 32, 48)]
    sums = [sum(draws[value::count]) for value in range(count)]
    return [(total - 12 * 65535 / 2) / 65536 for total in sums]


@pytest.mark.parametrize("seed_and_call", GOLDEN)
def test_the_portable_normal_is_as_it_is_defined(seed_and_call: tuple[int, int]) -> None:
    values = np.empty(1000, np.float32)
    _draw(*seed_and_call, values)
    assert values.tolist() == reference(*seed_and_call, 1000)
    assert values[:2].tolist() == GOLDEN[seed_and_call]


def test_the_portable_normal_is_the_same_in_every_block_on_every_machine() -> None:
    values = np.empty(BLOCK + 5, np.float32)
    _draw(7, 1, values)
    assert hashlib.sha256(values.astype("<f4").tobytes()).hexdigest() == GOLDEN_BLOCKS


def test_initial_weights_are_the_same_on_every_machine(small_config: RunConfig) -> None:
    """Peers of one run may have different versions of this package."""
    assert digest_of_weights(initial_theta(small_config)) == GOLDEN_WEIGHTS


def test_the_portable_normal_does_not_depend_on_who_draws_it() -> None:
    """However many threads draw, in whatever order; and no two blocks, calls or seeds have the same values."""
    alone, together = np.empty((2, 3 * BLOCK + 5), np.float32)
    _draw(7, 0, alone, threads=1)
    _draw(7, 0, together, threads=5)
    assert np.array_equal(alone.view(np.uint32), together.view(np.uint32))
    others = np.empty((2, BLOCK), np.float32)
    _draw(7, 1, others[0])
    _draw(8, 0, others[1])
    parts = [*alone[: 3 * BLOCK].reshape(3, BLOCK), *others]
    correlations = np.corrcoef(parts)
    assert np.abs(correlations - np.eye(len(parts))).max() < 0.01
    assert len({part[:100].tobytes() for part in parts}) == len(parts)


@pytest.mark.thorough
def test_the_portable_normal_does_not_depend_on_the_processors_vector_instructions() -> None:
    source = inspect.getsource(digest_of_a_draw)
    imports = (
        "import hashlib, torch; from opendiloco.model.build import _PortableNormal\n"
        "from transformers import AutoConfig, AutoModelForCausalLM\n"
    )
    without_vectors = subprocess.run(
        [sys.executable, "-c", f"{imports}{source}\nprint(digest_of_a_draw())"],
        env=os.environ | {"ATEN_CPU_CAPABILITY": "default", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
        timeout=240,  # one start of torch and transformers, on a busy machine
    )
    assert without_vectors.stdout.strip() == digest_of_a_draw()


def test_flat_vectors_and_models_hold_the_same_values(small_config: RunConfig) -> None:
    model = build_model(small_config, ByteTokenizer())
    layout = layout_of(model)
    assert "lm_head.weight" not in [place.name for place in layout]  # tied: it is embed_tokens.weight
    assert layout.size == sum(parameter.numel() for parameter in model.parameters())
    flat = np.arange(layout.size, dtype=np.float32)
    Shards(layout).load(flat, trainable(model))
    norm = next(place for place in layout if place.name == "model.norm.weight")
    assert model.model.norm.weight.tolist() == flat[norm.slice].tolist()
    back = np.zeros_like(flat)
    Shards(layout).store(trainable(model), back)
    assert np.array_equal(back, flat)


def test_what_transformers_objects_to_is_said_whole(small_content: dict[str, Any]) -> None:
    """Regression: it announces its reason on one line, and gives it on the next."""
    content = copy.deepcopy(small_content)
    content["model"]["config"]["hidden_size"] = 63
    with pytest.raises(ManifestError, match=r"hidden size \(63\) is not a multiple of the number of attention heads"):
        build_model(RunConfig.from_manifest_content(content), ByteTokenizer())


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hiden_size": 8}, "model.config.hiden_size = 8: llama has no such setting. Did you mean hidden_size?"),
        ({"model_type": "lama"}, "model.config.model_type = 'lama': transformers knows no such architecture."),
        *(
            (
                {"model_type": name},
                f"model.config.model_type = '{name}' is not a causal language model in transformers.",
            )
            for name in ("clip_text_model", "t5", "bert", "roberta", "xlnet", "bert-generation")
        ),
        ({"hidden_size": "wide"}, "model.config: transformers refuses it"),
    ],
)
def test_models_that_transformers_does_not_know(
    small_content: dict[str, Any], changes: dict[str, Any], said: str
) -> None:
    content = copy.deepcopy(small_content)
    content["model"]["config"].update(changes)
    for refuse in (build_model, build_skeleton):
        with pytest.raises(ManifestError) as caught:
            refuse(RunConfig.from_manifest_content(content), ByteTokenizer())
        assert str(caught.value).startswith(said)
        assert re.search(r"[.!?]( [A-Z][^.!?]*[.!?])*$", caught.value.message)


def test_a_config_that_was_pasted_is_taken(small_content: dict[str, Any]) -> None:
    """The tokenizer says which its special tokens are; settings whose place has changed count."""
    content = copy.deepcopy(small_content)
    pasted = {"architectures": ["LlamaForCausalLM"], "transformers_version": "4.31.0", "use_cache": True}
    pasted |= {"bos_token_id": 1, "eos_token_id": [2, 3], "pad_token_id": -1, "pretraining_tp": 1}
    pasted |= {"rope_theta": 77.0, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}
    content["model"]["config"].update(pasted)
    settings = build_skeleton(RunConfig.from_manifest_content(content), ByteTokenizer()).config
    assert {key: getattr(settings, key) for key in ByteTokenizer.special} == ByteTokenizer.special
    assert settings.rope_parameters == {"rope_type": "linear", "factor": 2.0, "rope_theta": 77.0}
    content["model"]["config"] = content["model"]["config"] | {"model_type": "bert", "is_decoder": True}
    for key in ("rope_theta", "rope_scaling", "pretraining_tp"):
        del content["model"]["config"][key]
    build_skeleton(RunConfig.from_manifest_content(content), ByteTokenizer())


def test_a_model_that_would_not_fit_here_can_be_checked(small_content: dict[str, Any]) -> None:
    """Without its weights: these would take 4 TB."""
    content = copy.deepcopy(small_content)
    content["model"]["config"].update(hidden_size=2**18, intermediate_size=2**20)
    build_skeleton(RunConfig.from_manifest_content(content), ByteTokenizer())


def test_a_size_left_to_transformers_is_checked_too(small_content: dict[str, Any]) -> None:
    content = copy.deepcopy(small_content)
    del content["model"]["config"]["max_position_embeddings"]
    content["training"]["sequence_length"] = 4096
    for refuse in (build_model, build_skeleton):
        with pytest.raises(ManifestError, match="sequence_length = 4096 is longer than"):
            refuse(RunConfig.from_manifest_content(content), ByteTokenizer())


def test_a_saved_model_can_be_where_a_run_starts(small_content: dict[str, Any], tmp_path: Any) -> None:
    model = build_model(RunConfig.from_manifest_content(small_content), ByteTokenizer())
    model.save_pretrained(tmp_path)
    content = small_content | {"model": {"path": str(tmp_path)}}
    loaded = build_model(RunConfig.from_manifest_content(content), ByteTokenizer())
    assert torch.equal(loaded.model.embed_tokens.weight, model.model.embed_tokens.weight)
    content = small_content | {"model": {"path": str(tmp_path / "nothing")}}
    with pytest.raises(ManifestError, match=r"model.path = .* cannot be loaded"):
        build_model(RunConfig.from_manifest_content(content), ByteTokenizer())
