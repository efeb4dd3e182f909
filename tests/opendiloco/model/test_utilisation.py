"""FLOPs, and what a device can do at most."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from opendiloco.model.parameters import multiplied_weights
from opendiloco.model.utilisation import flops_per_token, peak_tokens_per_second

LLAMA: dict[str, Any] = {
    "vocab_size": 10,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 16,
}
BLOCK = 8 * 8 + 8 * 4 + 8 * 4 + 8 * 8 + 3 * 8 * 12
"""Weights of queries, keys, values (one head for two of queries) and output, and of the three matrices of the MLP."""
PAIRS = 1 + 2 + 3 + 4 + 5
"""Of a token with itself or one before, in a window of five."""


@pytest.mark.parametrize("tied", [False, True])
def test_flops_are_those_of_matrix_products_counted_by_hand(tied: bool) -> None:
    """The head counts, tied or not; norms do not, nor does looking an embedding up."""
    model = AutoModelForCausalLM.from_config(LlamaConfig(**LLAMA, tie_word_embeddings=tied))
    weights = 3 * BLOCK + 10 * 8
    assert multiplied_weights(model) == weights
    forwards = 2 * weights * 5 + 3 * (2 + 2) * 8 * PAIRS  # queries by keys, shares by values
    assert flops_per_token(model.config, weights, 5) == 3 * forwards / 5


@pytest.mark.parametrize("tied", [False, True])
def test_torch_counts_the_same_flops_but_for_what_causal_attention_leaves_out(tied: bool) -> None:
    config = LlamaConfig(**LLAMA | {"tie_word_embeddings": tied, "attn_implementation": "eager"})
    model, length = AutoModelForCausalLM.from_config(config), 5
    with FlopCounterMode(display=False) as counted:
        model(input_ids=torch.zeros(1, length, dtype=torch.long), use_cache=False).logits.sum().backward()
    left_out = 3 * 3 * (2 + 2) * 8 * (length**2 - PAIRS)
    expected = flops_per_token(config, multiplied_weights(model), length)
    assert expected == (counted.get_total_flops() - left_out) / length


def test_gpt2_looks_its_positions_up_and_multiplies_its_tied_head() -> None:
    sizes = {"vocab_size": 10, "n_embd": 8, "n_layer": 3, "n_head": 2, "n_positions": 16}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", **sizes))
    weights = 3 * 12 * 8 * 8 + 10 * 8
    assert multiplied_weights(model) == weights
    assert flops_per_token(model.config, weights, 4) == 6 * weights + 6 * 3 * 8 * 5


def test_attention_is_as_wide_as_its_heads_together() -> None:
    config = LlamaConfig(**LLAMA, head_dim=16)
    assert flops_per_token(config, 1000, 4) == 6 * 1000 + 6 * 3 * (2 * 16) * 5


def test_the_peak_in_tf32_is_not_known() -> None:
    assert peak_tokens_per_second("NVIDIA H100 80GB HBM3", 1, "tf32", 1.0) is None


def test_what_says_not_how_large_it_is_has_no_flops() -> None:
    class Settings:
        def get_text_config(self) -> Settings:
            return self

    assert flops_per_token(Settings(), 1000, 16) is None


@pytest.mark.parametrize(
    ("name", "bf16", "fp32"),
    [
        ("NVIDIA A100-SXM4-80GB", 312, 19.5),
        ("NVIDIA A100 80GB PCIe", 312, 19.5),
        ("A100-PCIE-40GB", 312, 19.5),
        ("NVIDIA H100 80GB HBM3", 989.4, 66.9),
        ("NVIDIA H100 NVL", 835, 60),
        ("NVIDIA GeForce RTX 4090", 165.2, 82.6),
        ("AMD Instinct MI300X", 1307.4, 163.4),
    ],
)
def test_a_known_gpu_has_its_makers_peak(name: str, bf16: float, fp32: float) -> None:
    assert peak_tokens_per_second(name, 1, "bf16", 1.0) == pytest.approx(bf16 * 1e12)
    assert peak_tokens_per_second(name, 1, "fp32", 1.0) == pytest.approx(fp32 * 1e12)


@pytest.mark.parametrize(
    "name",
    ["cpu", "", "NVIDIA GeForce RTX 3090 Ti", "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA A100-SXM4-40GB MIG 1g.5gb"],
)
def test_of_anything_else_no_peak_is_made_up(name: str) -> None:
    assert peak_tokens_per_second(name, 1, "bf16", 100.0) is None


def test_several_devices_do_as_much_as_they_are() -> None:
    assert peak_tokens_per_second("NVIDIA L40S", 4, "bf16", 1e9) == pytest.approx(4 * 362050)
    assert peak_tokens_per_second("NVIDIA L40S", 4, "bf16", None) is None
