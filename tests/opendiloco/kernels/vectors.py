"""What the tests of the kernels share: values, and one-line encoders and decoders."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from opendiloco import kernels
from opendiloco.kernels import NEAREST, FloatArray, Format, Payload, Rounding

LARGEST_ENCODED = 2.0**63
SETS = kernels.supported_kernels()
FORMATS = list(kernels.FORMATS.values())
STOCHASTIC_FORMATS = [each for each in FORMATS if each.is_stochastic]
LENGTHS = [0, 1, 2, 15, 1023, 1024, 1025, 2048, 5000]


def normal(length: int, seed: int = 0, size: float = 1.0) -> FloatArray:
    return (np.random.default_rng(seed).standard_normal(length) * size).astype(np.float32)


def encode(format: Format, values: FloatArray, rounding: Rounding = NEAREST) -> bytes:
    payload = Payload(format, values.size)
    kernels.quantize(values, payload, rounding)
    return bytes(payload)


def decode(format: Format, payload: bytes, count: int) -> FloatArray:
    values = np.empty(count, np.float32)
    kernels.dequantize(Payload(format, count, payload), values)
    return values


def same_bits(left: FloatArray, right: npt.NDArray[np.floating[Any]]) -> bool:
    return left.tobytes() == right.tobytes()


def float_arrays(magnitude: float) -> st.SearchStrategy[FloatArray]:
    # Drawn from a handful of lengths around a block's end: hypothesis fills the rest with one value, so long is cheap.
    elements = st.floats(-magnitude, magnitude, width=32, allow_subnormal=True)
    return st.sampled_from([1, 7, 33, 256, 1023, 1024, 2050]).flatmap(
        lambda n: arrays(np.float32, n, elements=elements)
    )


def encodable_arrays(format: Format) -> st.SearchStrategy[FloatArray]:
    return float_arrays(65504.0 if format is kernels.FP16 else LARGEST_ENCODED)
