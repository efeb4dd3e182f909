"""FLOPs, and what a device can do at most."""

from __future__ import annotations

import pytest
from transformers import AutoConfig

from opendiloco.model.utilisation import flops_per_token, peak_tokens_per_second

LLAMA = {"num_hidden_layers": 3, "hidden_size": 8, "num_attention_heads": 2}
GPT2 = {"n_layer": 3, "n_embd": 8, "n_head": 2}


@pytest.mark.parametrize(("family", "sizes"), [("llama", LLAMA), ("gpt2", GPT2)])
def test_a_token_takes_six_flops_a_weight_and_attention(family: str, sizes: dict[str, int]) -> None:
    assert flops_per_token(AutoConfig.for_model(family, **sizes), 1000, 16) == 6 * 1000 + 12 * 3 * 8 * 16


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
