"""Model FLOPs utilisation (MFU): the training speed as a share of the devices' peak speed.

Only matrix products count, once forwards and twice backwards. Attention is causal: a token attends to itself and to the
tokens before it, and each window counts as one document. Recomputation to save memory does not count. PaLM's convention
(arXiv 2204.02311, appendix B) also counts the look-up of input embeddings, and attention to a whole window, so its
figures are higher: by 23 % for the 150M preset.
"""

from __future__ import annotations

import re
from typing import Any, Literal

Precision = Literal["fp32", "bf16", "tf32"]

# Peak speeds stated by the makers, in TFLOP/s without sparsity: bf16 with sums in fp32, and fp32 without TF32, which
# torch does not use by default. The patterns match torch's device names, but not variants with other peaks (Ti, Laptop,
# slices of a GPU). The makers state no peaks for TF32, so the MFU in TF32 is unknown.
PEAKS: tuple[tuple[str, dict[Precision, float]], ...] = (
    # peak TFLOP/s from the NVIDIA A100 data sheet
    (r"A100-(SXM4|PCIE)-\d+GB|A100 80GB PCIe", {"bf16": 312.0, "fp32": 19.5}),
    # peak TFLOP/s of the variants SXM, PCIe and NVL, from the NVIDIA H100 data sheet
    (r"H100 80GB HBM3", {"bf16": 989.4, "fp32": 66.9}),
    (r"H100 PCIe", {"bf16": 756.0, "fp32": 51.0}),
    (r"H100 NVL", {"bf16": 835.0, "fp32": 60.0}),
    # peak TFLOP/s of the variants SXM and NVL, from the NVIDIA H200 data sheet
    (r"H200", {"bf16": 989.4, "fp32": 66.9}),
    (r"H200 NVL", {"bf16": 835.0, "fp32": 60.0}),
    # peak TFLOP/s from the NVIDIA L40S data sheet
    (r"L40S", {"bf16": 362.05, "fp32": 91.6}),
    # peak TFLOP/s from appendix A of NVIDIA's Ampere GA102, Ada and RTX Blackwell architecture whitepapers
    (r"(GeForce )?RTX 3090", {"bf16": 71.0, "fp32": 35.6}),
    (r"(GeForce )?RTX 4090", {"bf16": 165.2, "fp32": 82.6}),
    (r"(GeForce )?RTX 5090", {"bf16": 209.5, "fp32": 104.8}),
    # peak TFLOP/s from the AMD Instinct MI300X data sheet
    (r"Instinct MI300X", {"bf16": 1307.4, "fp32": 163.4}),
)


def flops_per_token(settings: Any, multiplied: int, sequence_length: int) -> float | None:
    """Return the number of floating-point operations in the matrix products that train one token: 6·N +
    6·layers·width·(sequence_length + 1), where N = `multiplied` is the number of weights in matrix products. Return
    None if `settings`, the model's transformers configuration, does not name the number of layers or the width.

    Each of these weights (see `multiplied_weights`) multiplies and adds once forwards, twice backwards. The rest is
    causal attention: queries times keys, and attention weights times values, each over (sequence_length + 1) / 2 tokens
    on average and over the `width` of all heads together. For a mixture of experts, or a partly frozen model, this is
    an estimate.
    """
    settings = settings.get_text_config()
    layers: int | None = getattr(settings, "num_hidden_layers", None)
    width: int | None = getattr(settings, "hidden_size", None)
    if layers is None or width is None:
        return None
    if head := getattr(settings, "head_dim", None):
        width = head * settings.num_attention_heads
    return 6.0 * multiplied + 6.0 * layers * width * (sequence_length + 1)


def peak_tokens_per_second(
    device_name: str, devices: int, precision: Precision, token_flops: float | None
) -> float | None:
    """Return the most tokens that the devices could train in a second; None if their peak speed or `token_flops`, the
    operations for one token, is unknown. `device_name` is torch's name of each device."""
    names = (peaks for pattern, peaks in PEAKS if re.fullmatch(rf"((NVIDIA|AMD) )?({pattern})", device_name))
    peak = next(names, {}).get(precision)
    return None if peak is None or token_flops is None else devices * peak * 1e12 / token_flops
