"""A test of the kernels on this machine: whether their bits are right, and how fast they are, in two seconds."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from opendiloco import kernels
from opendiloco.kernels import FORMATS, INT8, NEAREST, FloatArray, Format, Payload, Rounding

COMPARED_VALUES = 100 * 1024 + 77
TIMED_VALUES = 8 << 20
SECONDS_PER_OPERATION = 0.3


def differing_sets() -> list[str]:
    """Return those of this machine's sets whose results aren't the scalar one's, bit for bit: there should be none."""
    before = kernels.chosen_kernels()
    values = _values(COMPARED_VALUES)
    try:
        results = {name: _results(name, values) for name in kernels.supported_kernels()}
    finally:
        kernels.choose_kernels(before)
    return [name for name, result in results.items() if result != results["scalar"]]


def measure_speeds(threads: int) -> dict[str, float]:
    """Return the speed of each operation of the chosen set, in int8, on arrays that fit no cache: in GB/s of all that
    it must read and write, of floats and payloads together."""
    values, theta, momentum = _values(TIMED_VALUES), _values(TIMED_VALUES), np.zeros(TIMED_VALUES, np.float32)
    payload = Payload(INT8, TIMED_VALUES)
    floats, codes = 4 * TIMED_VALUES, INT8.payload_size(TIMED_VALUES)
    operations: list[tuple[str, int, Callable[[], None]]] = [
        ("quantize", floats + codes, lambda: kernels.quantize(values, payload, threads=threads)),
        ("dequantize", floats + codes, lambda: kernels.dequantize(payload, values, threads)),
        ("accumulate", 2 * floats + codes, lambda: kernels.accumulate(payload, 1.0, momentum, threads)),
        ("outer step", 4 * floats + codes, lambda: kernels.outer_step(payload, theta, momentum, 0.0, 0.9, threads)),
    ]
    return {name: size / _fastest(operation) / 1e9 for name, size, operation in operations}


def _fastest(operation: Callable[[], None]) -> float:
    """Seconds of the fastest of the calls that fit into SECONDS_PER_OPERATION, at least one after a first."""
    operation()
    fastest, end = float("inf"), time.perf_counter() + SECONDS_PER_OPERATION
    while fastest == float("inf") or time.perf_counter() < end:
        start = time.perf_counter()
        operation()
        fastest = min(fastest, time.perf_counter() - start)
    return fastest


def _results(name: str, values: FloatArray) -> list[bytes]:
    kernels.choose_kernels(name)
    return [
        result
        for format in FORMATS.values()
        for rounding in (NEAREST, kernels.stochastic(7))
        if format.is_stochastic or not rounding.is_stochastic
        for result in _results_of_format(format, rounding, values)
    ]


def _results_of_format(format: Format, rounding: Rounding, values: FloatArray) -> list[bytes]:
    payload, theta, momentum = Payload(format, values.size), values.copy(), values.copy()
    kernels.quantize(values, payload, rounding)
    kernels.accumulate(payload, 12345.0, momentum)
    kernels.outer_step(payload, theta, momentum, 0.7, 0.9)
    return [bytes(payload), theta.tobytes(), momentum.tobytes()]


def _values(count: int) -> FloatArray:
    return np.random.default_rng(0).standard_normal(count, np.float32)
