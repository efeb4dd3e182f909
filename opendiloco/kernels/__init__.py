"""The arithmetic of pseudo-gradients: floats to payloads and back, the same bits on every machine.

The one door to the C library in native/, whose formats.h describes every format to the byte. Three kinds of names:

- `Format`s (`INT8` is the default; `FORMATS` by name), and `Payload`: so many values in a format, and their bytes;
- operations on numpy arrays and payloads: `quantize`, `accumulate`, `outer_step`, …; they release the interpreter's
  lock, and take a number of threads;
- `choose_kernels` and `DILOCO_KERNELS`, which force an instruction set. All give the same bits.

Other rooms import:
the room: FORMATS, Format, NEAREST, NonFiniteError, Payload, Rounding, SPARSE, dequantize, quantize_difference,
    stochastic
self_test: differing_sets, measure_speeds
"""

from __future__ import annotations

import os

from opendiloco.kernels.operations import (
    ENVIRONMENT_VARIABLE,
    KERNEL_SETS,
    NEAREST,
    Rounding,
    accumulate,
    average,
    check_payload,
    choose_kernels,
    chosen_kernels,
    dequantize,
    finish_average,
    gradient_step,
    outer_step,
    quantize,
    quantize_difference,
    squared_norm,
    stochastic,
    supported_kernels,
)
from opendiloco.kernels.payloads import (
    E2M1,
    E2M1_BLOCK32,
    E3M0,
    FORMATS,
    FP16,
    INT8,
    SPARSE,
    UINT4,
    CorruptPayloadError,
    FloatArray,
    Floats,
    FloatView,
    Format,
    KernelError,
    NonFiniteError,
    Payload,
    PayloadBytes,
)

__all__ = [
    "E2M1",
    "E2M1_BLOCK32",
    "E3M0",
    "FORMATS",
    "FP16",
    "INT8",
    "KERNEL_SETS",
    "NEAREST",
    "SPARSE",
    "UINT4",
    "CorruptPayloadError",
    "FloatArray",
    "FloatView",
    "Floats",
    "Format",
    "KernelError",
    "NonFiniteError",
    "Payload",
    "PayloadBytes",
    "Rounding",
    "accumulate",
    "average",
    "check_payload",
    "choose_kernels",
    "chosen_kernels",
    "dequantize",
    "finish_average",
    "gradient_step",
    "outer_step",
    "quantize",
    "quantize_difference",
    "squared_norm",
    "stochastic",
    "supported_kernels",
]

choose_kernels(os.environ.get(ENVIRONMENT_VARIABLE, ""))
