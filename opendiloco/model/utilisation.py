"""Model FLOPs utilisation (MFU): the training speed as a share of what the devices could do at most.

After PaLM (arXiv 2204.02311, appendix B): only the arithmetic counts that the model itself asks for, not what is
computed again to save memory; and the most is the devices' peak divided by that arithmetic.
"""

from __future__ import annotations

import re
from typing import Any, Literal

Precision = Literal["fp32", "bf16", "tf32"]

# What the makers promise, in TFLOP/s without sparsity: bf16 with sums in fp32, and fp32 without TF32, which torch does
# not use unless told to. The names are torch's. Other variants (Ti, Laptop, slices of a GPU) have other peaks.
# TF32's are on no page beside them: there MFU is not known.
PEAKS: tuple[tuple[str, dict[Precision, float]], ...] = (
    # NVIDIA A100 data sheet
    (r"A100-(SXM4|PCIE)-\d+GB|A100 80GB PCIe", {"bf16": 312.0, "fp32": 19.5}),
    # NVIDIA H100 data sheet: SXM, PCIe, NVL
    (r"H100 80GB HBM3", {"bf16": 989.4, "fp32": 66.9}),
    (r"H100 PCIe", {"bf16": 756.0, "fp32": 51.0}),
    (r"H100 NVL", {"bf16": 835.0, "fp32": 60.0}),
    # NVIDIA H200 data sheet: SXM, NVL
    (r"H200", {"bf16": 989.4, "fp32": 66.9}),
    (r"H200 NVL", {"bf16": 835.0, "fp32": 60.0}),
    # NVIDIA L40S data sheet
    (r"L40S", {"bf16": 362.05, "fp32": 91.6}),
    # NVIDIA Ampere GA102, Ada and RTX Blackwell architecture whitepapers, appendix A of each
    (r"GeForce RTX 3090", {"bf16": 71.0, "fp32": 35.6}),
    (r"GeForce RTX 4090", {"bf16": 165.2, "fp32": 82.6}),
    (r"GeForce RTX 5090", {"bf16": 209.5, "fp32": 104.8}),
    # AMD Instinct MI300X data sheet
    (r"Instinct MI300X", {"bf16": 1307.4, "fp32": 163.4}),
)


def flops_per_token(settings: Any, parameters: int, sequence_length: int) -> float | None:
    """FLOPs of one token's forward and backward pass: 6·N + 12·layers·hidden·sequence_length (PaLM, appendix B).

    6·N: each of N weights multiplies and adds once forwards and twice backwards. The rest is attention to a whole
    window. `settings` are the model's, a transformers configuration; None if they do not say how large it is. For a
    model whose experts take turns, or of which a part is frozen, this is only an estimate.
    """
    settings = settings.get_text_config()
    layers: int | None = getattr(settings, "num_hidden_layers", None)
    hidden: int | None = getattr(settings, "hidden_size", None)
    if layers is None or hidden is None:
        return None
    return 6.0 * parameters + 12.0 * layers * hidden * sequence_length


def peak_tokens_per_second(
    device_name: str, devices: int, precision: Precision, token_flops: float | None
) -> float | None:
    """Return what so many devices of this name, as torch has it, could train at most; None if it is not known."""
    names = (peaks for pattern, peaks in PEAKS if re.fullmatch(rf"((NVIDIA|AMD) )?({pattern})", device_name))
    peak = next(names, {}).get(precision)
    return None if peak is None or token_flops is None else devices * peak * 1e12 / token_flops
