"""Which parameters belong to which fragment, and where fragments lie."""

from __future__ import annotations

import copy
import re
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import init_device_mesh

from opendiloco.alignment import ALIGNMENT
from opendiloco.config.run_config import RunConfig, StreamingSection
from opendiloco.data.tokenizer import ByteTokenizer
from opendiloco.kernels import FORMATS
from opendiloco.model.build import build_model, build_skeleton, initial_theta
from opendiloco.model.layout import Layout
from opendiloco.model.parameters import layout_of
from opendiloco.training.team import Team, shard_model
from peers.errors import ManifestError

SIZES = {"vocab_size": 259, "hidden_size": 16, "num_hidden_layers": 5, "num_attention_heads": 2}
LLAMA_LIKE = SIZES | {"intermediate_size": 24, "num_key_value_heads": 1, "max_position_embeddings": 32}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": LLAMA_LIKE,
    "qwen3": LLAMA_LIKE | {"head_dim": 8},
    "gpt2": SIZES | {"n_positions": 32},
    "mixtral": LLAMA_LIKE | {"num_local_experts": 2},
}


def config_of(small_content: dict[str, Any], family: str = "llama", tied: bool = True, **streaming: Any) -> RunConfig:
    content = copy.deepcopy(small_content) | {"streaming": streaming}
    content["model"]["config"] = FAMILIES[family] | {"model_type": family, "tie_word_embeddings": tied}
    return RunConfig.from_manifest_content(content)


def fragments_of(config: RunConfig) -> dict[str, int]:
    """Return the fragment of each block, by its number, and of each module outside of the blocks, by its name."""
    layout = layout_of(build_skeleton(config, ByteTokenizer()), config.streaming)
    found: dict[str, set[int]] = {}
    for parameter, fragment in zip(layout, layout.fragment_of, strict=True):
        block = re.search(r"\.(\d+)\.", parameter.name)
        name = block.group(1) if block else parameter.name.split(".")[-2]
        found.setdefault(name, set()).add(fragment)
    return {name: fragment for name, (fragment,) in found.items()}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize(
    ("pattern", "blocks"),
    [("strided", [0, 1, 2, 0, 1]), ("sequential", [0, 0, 1, 1, 2])],
    ids=["strided", "sequential"],
)
@pytest.mark.parametrize("embeddings", ["apart", "ends"])
def test_patterns_hold_for_every_family(
    small_content: dict[str, Any], family: str, tied: bool, pattern: str, blocks: list[int], embeddings: str
) -> None:
    streaming = {"layers_per_fragment": 2, "pattern": pattern, "embeddings": embeddings}
    found = fragments_of(config_of(small_content, family, tied, **streaming))
    assert [found.pop(str(block)) for block in range(5)] == blocks
    first = {"wte", "wpe"} if family == "gpt2" else {"embed_tokens"}
    last = {"ln_f"} if family == "gpt2" else {"norm"}
    last |= set() if tied else {"lm_head"}
    places = (3, 3) if embeddings == "apart" else (0, 2)
    assert found == dict.fromkeys(first, places[0]) | dict.fromkeys(last, places[1])


def test_the_papers_models_have_one_fragment_more_than_those_of_blocks(small_content: dict[str, Any]) -> None:
    """Strided as in its figure 2; with 9 of them, some fragment is synchronised every 11 of 100 inner steps."""
    content = copy.deepcopy(small_content) | {"streaming": {"layers_per_fragment": 3}}
    content["model"]["config"] |= {"num_hidden_layers": 24}
    content["training"]["inner_steps"] = 100
    found = fragments_of(RunConfig.from_manifest_content(content))
    assert [found[str(block)] for block in range(24)] == [block % 8 for block in range(24)]
    assert found["embed_tokens"] == 8
    assert 100 // 9 == 11


def test_balanced_fragments_have_whole_tensors_and_about_as_many_bytes(small_content: dict[str, Any]) -> None:
    config = config_of(small_content, "llama", pattern="balanced", layers_per_fragment=2)
    layout = layout_of(build_skeleton(config, ByteTokenizer()), config.streaming)
    sizes = [whole.stop - whole.start for whole in layout.fragments]
    assert len(sizes) == 3
    assert max(sizes) - min(sizes) < 300  # the embeddings alone have 4144 values, each block 1888
    assert sum(sizes) == layout.parameter_count
    again = layout_of(build_model(config, ByteTokenizer()), config.streaming)
    assert again.fragment_of == layout.fragment_of


def test_without_a_number_of_layers_there_is_one_fragment_without_padding(small_content: dict[str, Any]) -> None:
    config = config_of(small_content)
    plain = layout_of(build_skeleton(config, ByteTokenizer()))
    assert list(layout_of(build_skeleton(config, ByteTokenizer()), config.streaming)) == list(plain)
    assert plain.fragments == (slice(0, plain.size),)
    assert plain.parameter_count == plain.size
    offset = 0
    for parameter in plain:
        assert parameter.offset == offset
        offset += parameter.size


@pytest.mark.parametrize("layers", [1, 2, 3, 5, 9])
def test_fragments_begin_with_a_block_of_their_own_and_padding_is_zeros(
    small_content: dict[str, Any], layers: int
) -> None:
    training = small_content["training"] | {"inner_steps": 6}
    config = config_of(small_content | {"training": training}, "llama", layers_per_fragment=layers)
    layout = layout_of(build_skeleton(config, ByteTokenizer()), config.streaming)
    assert len(layout.fragments) == -(-5 // layers) + 1
    owner = np.full(layout.size, -1)
    for parameter, fragment in zip(layout, layout.fragment_of, strict=True):
        whole = layout.fragments[fragment]
        assert whole.start <= parameter.slice.start <= parameter.slice.stop <= whole.stop
        assert (owner[parameter.slice] == -1).all()
        owner[parameter.slice] = fragment
    for fragment, whole in enumerate(layout.fragments):
        assert whole.start % ALIGNMENT == 0
        assert (owner[whole] == fragment).all()
        assert [each.name for each in layout.fragment(fragment)] == [
            each.name for each, number in zip(layout, layout.fragment_of, strict=True) if number == fragment
        ]
    assert layout.size - layout.parameter_count == (owner == -1).sum() < ALIGNMENT * len(layout.fragments)
    theta, plain = initial_theta(config), initial_theta(config_of(small_content))
    assert not theta[owner == -1].any()
    assert np.array_equal(np.sort(theta[owner >= 0]), np.sort(plain))


def test_codecs_blocks_fit_the_alignment_or_are_multiples_of_it() -> None:
    assert all(ALIGNMENT % each.block_values == 0 or each.block_values % ALIGNMENT == 0 for each in FORMATS.values())


def test_what_is_not_trained_is_in_no_fragment(small_content: dict[str, Any]) -> None:
    config = config_of(small_content, "llama", layers_per_fragment=2)
    model = build_model(config, ByteTokenizer())
    model.get_input_embeddings().weight.requires_grad_(False)
    model.model.norm.weight.requires_grad_(False)
    model.model.layers[1].requires_grad_(False)
    model.model.layers[4].requires_grad_(False)
    layout = layout_of(model, config.streaming)
    assert len(layout.fragments) == 2, "of the second and the last nothing is left"
    assert set(layout.fragment_of) == {0, 1}
    assert Layout([]).fragments == (slice(0, 0),)


def test_a_sharded_model_has_the_same_fragments(small_content: dict[str, Any]) -> None:
    config = config_of(small_content, "llama", layers_per_fragment=2)
    model = build_model(config, ByteTokenizer())
    layout = layout_of(model, config.streaming)
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        shard_model(model, Team(torch.device("cpu"), 0, 1, init_device_mesh("cpu", (1,))), config.training)
        assert list(layout_of(model, config.streaming)) == list(layout)
    finally:
        dist.destroy_process_group()


def test_more_fragments_than_inner_steps_are_refused(small_content: dict[str, Any]) -> None:
    config = config_of(small_content, "llama", layers_per_fragment=1)
    with pytest.raises(
        ManifestError, match=r"the model's 6 fragments are more than training.inner_steps = 4"
    ) as caught:
        build_skeleton(config, ByteTokenizer())
    assert "layers_per_fragment" in caught.value.remedy


def test_a_model_without_blocks_is_refused() -> None:
    with pytest.raises(ManifestError, match="no transformer blocks"):
        layout_of(torch.nn.Linear(3, 3), StreamingSection(layers_per_fragment=1))
