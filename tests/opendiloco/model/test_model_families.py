"""Whatever causal language model transformers has can be trained; these are held to it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from opendiloco.config.run_config import RunConfig
from opendiloco.data.tokenizer import ByteTokenizer
from opendiloco.data.training_data import load_data
from opendiloco.model.build import build_model, build_skeleton
from opendiloco.model.export import RunFacts, export_model
from opendiloco.model.parameters import layout_of
from opendiloco.training.inner import ModelReplica
from peers.errors import ManifestError
from peers.values.leases import SampleRange

FACTS = RunFacts(run_id="a", manifest_digest="00" * 32, outer_steps=1, tokens=1, peers=1, held_out_loss=1.0)
SIZES = {"vocab_size": 259, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
LLAMA_LIKE = SIZES | {"intermediate_size": 24, "num_key_value_heads": 1, "max_position_embeddings": 32}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": LLAMA_LIKE,
    "qwen2": LLAMA_LIKE,
    "qwen3": LLAMA_LIKE | {"head_dim": 8},
    "gpt2": SIZES | {"n_positions": 32},
}


@pytest.fixture(params=[(family, tied) for family in FAMILIES for tied in (True, False)], ids=str)
def config(request: pytest.FixtureRequest, small_content: dict[str, Any]) -> RunConfig:
    family, tied = request.param
    content = copy.deepcopy(small_content)
    content["model"]["config"] = FAMILIES[family] | {"model_type": family, "tie_word_embeddings": tied}
    return RunConfig.from_manifest_content(content)


def test_a_model_trains_travels_as_a_flat_vector_and_is_exported(config: RunConfig, tmp_path: Path) -> None:
    tokenizer = ByteTokenizer()
    build_skeleton(config, tokenizer)
    samples = load_data(config, tokenizer).samples
    one, other = (ModelReplica(config, build_model(config, tokenizer), samples) for _ in range(2))
    theta, moved, back = (np.empty(one.layout.size, np.float32) for _ in range(3))
    one.store(theta)
    trained = one.train(theta, 0, (SampleRange(0, 8),), 4)
    assert 0 < trained.loss < 8
    one.store(moved)
    assert not np.array_equal(moved, theta)
    other.load(moved)
    other.store(back)
    assert np.array_equal(moved, back)
    export_model(other.model, tokenizer, tmp_path / "model", config, FACTS)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    ids = torch.tensor([[10, 20, 30]])
    assert torch.equal(loaded(ids).logits, one.model.eval()(ids).logits)
    assert one.layout.size == sum(parameter.numel() for parameter in loaded.parameters())


def test_tied_embeddings_are_one_parameter(config: RunConfig) -> None:
    model = build_model(config, ByteTokenizer())
    table = model.get_input_embeddings().weight
    tied = (config.model.config or {})["tie_word_embeddings"]
    assert (model.get_output_embeddings().weight is table) == tied
    shapes = [place.shape for place in layout_of(model)]
    assert shapes.count((259, 16)) == (1 if tied else 2)


class Draws(TorchDispatchMode):
    """Notes what draws random numbers."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.names.add(str(func))
        return func(*args, **(kwargs or {}))


def test_initial_weights_are_drawn_in_a_way_that_is_the_same_on_every_machine(config: RunConfig) -> None:
    normal = torch.ops.aten.normal_.default
    with Draws() as draws:
        model = build_model(config, ByteTokenizer())
    assert str(normal) not in draws.names
    assert draws.names == {"aten.uniform_.default"}
    assert model.get_input_embeddings().weight.std().item() == pytest.approx(0.02, rel=0.15)


def test_queries_and_keys_are_normalised_where_the_architecture_does_it(small_content: dict[str, Any]) -> None:
    def built(family: str, **changes: Any) -> Any:
        content = copy.deepcopy(small_content)
        content["model"]["config"] = FAMILIES[family] | {"model_type": family} | changes
        return build_model(RunConfig.from_manifest_content(content), ByteTokenizer())

    assert built("qwen3").model.layers[0].self_attn.q_norm.weight.shape == (8,)
    with pytest.raises(ManifestError, match=r"model.config.use_qk_norm = True: llama has no such setting"):
        built("llama", use_qk_norm=True)
