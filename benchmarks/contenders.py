"""The calls that benchmarks/codecs.py times: diloco-peer's kernels, loops that only move memory, and other libraries'
functions for the same task."""

from __future__ import annotations

import mmap
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from opendiloco import kernels
from opendiloco.kernels import FloatArray, FloatView, Payload

HUGE_PAGE = 2 << 20
Call = Callable[[], object]


def new_floats(count: int, huge_pages: bool, size: float = 0.0) -> FloatArray:
    """Return `count` fp32 values in huge (2 MiB) or small (4 KiB) memory pages: normal noise of standard deviation
    `size`, or zeros if `size` is 0."""
    memory = mmap.mmap(-1, count * 4 + HUGE_PAGE)
    memory.madvise(mmap.MADV_HUGEPAGE if huge_pages else mmap.MADV_NOHUGEPAGE)
    whole = np.frombuffer(memory, np.uint8)
    offset = -whole.ctypes.data % HUGE_PAGE
    floats: FloatArray = whole[offset : offset + count * 4].view(np.float32)
    if size:
        generator = np.random.default_rng(count)
        for start in range(0, count, 1 << 20):
            part = floats[start : start + (1 << 20)]
            part[:] = generator.standard_normal(part.size, np.float32) * np.float32(size)
    else:
        floats[:] = 0
    return floats


def new_payload(format: kernels.Format, count: int, huge_pages: bool) -> Payload:
    size = format.payload_size(count)
    return Payload(format, count, new_floats(size // 4 + 1, huge_pages).view(np.uint8)[:size])


@dataclass
class Arrays:
    """The input and output buffers, each for `count` values, that all timed calls share."""

    count: int
    huge_pages: bool

    def __post_init__(self) -> None:
        self.values = new_floats(self.count, self.huge_pages, 1e-3)
        self.local = new_floats(self.count, self.huge_pages, 1e-3)
        self.theta = new_floats(self.count, self.huge_pages, 1.0)
        self.momentum = new_floats(self.count, self.huge_pages)
        self.bytes = new_floats(self.count // 4, self.huge_pages).view(np.uint8)
        self.payloads = {
            format: new_payload(format, self.count, self.huge_pages) for format in kernels.FORMATS.values()
        }
        for format, payload in self.payloads.items():
            kernels.quantize(self.values, payload)
            assert payload.format is format


def our_contenders(arrays: Arrays, threads: int) -> dict[str, Call]:
    """Return calls of diloco-peer's kernels, by name: quantizing to each format with each rounding, and the other
    kernels on int8."""
    values, local, theta, momentum = (
        FloatView(array) for array in (arrays.values, arrays.local, arrays.theta, arrays.momentum)
    )
    scratch = {format: new_payload(format, arrays.count, arrays.huge_pages) for format in arrays.payloads}
    int8, out = arrays.payloads[kernels.INT8], scratch[kernels.INT8]
    calls: dict[str, Call] = {}
    for format, target in scratch.items():
        calls[f"ours: quantize {format}"] = lambda target=target: kernels.quantize(  # type: ignore[misc]
            values, target, threads=threads
        )
        if format.is_stochastic:
            calls[f"ours: quantize {format}, stochastic"] = lambda target=target: kernels.quantize(  # type: ignore[misc]
                values, target, kernels.stochastic(1), threads
            )
    calls |= {
        "ours: quantize theta - local": lambda: kernels.quantize_difference(values, local, out, threads=threads),
        "ours: check int8": lambda: kernels.check_payload(int8, threads),
        "ours: dequantize int8": lambda: kernels.dequantize(int8, local, threads),
        "ours: accumulate int8": lambda: kernels.accumulate(int8, 0.5, momentum, threads),
        "ours: finish average int8": lambda: kernels.finish_average(values, 3.0, out, threads=threads),
        "ours: outer step int8": lambda: kernels.outer_step(int8, theta, momentum, 0.7, 0.9, threads),
    }
    return calls


def limit_contenders(limits: Any, arrays: Arrays, threads: int) -> dict[str, Call]:
    """Return calls, by name, that read and write as many bytes as the kernels but compute nothing, except for the
    addition in "fp32 y += x"."""
    values, local, theta, momentum = (
        FloatView(array).address for array in (arrays.values, arrays.local, arrays.theta, arrays.momentum)
    )
    taken, count = arrays.bytes.ctypes.data, arrays.count
    return {
        "limit: read 4, write 1": lambda: limits.limit_read_4_write_1(values, taken, count, threads),
        "limit: read 8, write 1": lambda: limits.limit_read_8_write_1(values, local, taken, count, threads),
        "limit: read 1, update 8": lambda: limits.limit_read_1_update_8(taken, theta, momentum, count, threads),
        "fp32 y += x": lambda: limits.limit_add(values, momentum, count, threads),
    }


def piquant_contenders(arrays: Arrays, threads: int) -> dict[str, Call]:
    """Return calls of pi-quant, by name, that compute the scale and the zero point of a whole tensor, and then its
    uint8 codes."""
    import piquant

    context = piquant.Context(threads)
    values, out, count = arrays.values.ctypes.data, arrays.bytes.ctypes.data, arrays.count
    floats, codes = piquant.DataType.F32, piquant.DataType.UINT8

    def quantize(mode: Any) -> None:
        scale, zero = context.compute_quant_params_ptr_float32(values, codes, count)
        context.quantize_ptr(values, floats, out, codes, count, scale, zero, mode)

    return {
        "pypiquant: parameters + quantize uint8": lambda: quantize(piquant.RoundMode.NEAREST),
        "pypiquant: the same, stochastic": lambda: quantize(piquant.RoundMode.STOCHASTIC),
    }


def _blockwise(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    blocks = values.view(-1, 1024)
    scale = blocks.abs().amax(dim=1, keepdim=True) / 127
    return (blocks / scale).round().to(torch.int8), scale


def torch_contenders(arrays: Arrays, threads: int, compile_too: bool) -> dict[str, Call]:
    """Return calls of torch, by name: its int8 quantization, int8 quantization by tensor operations (also compiled if
    `compile_too`), an addition, and SGD."""
    torch.set_num_threads(threads)
    values, theta = torch.from_numpy(arrays.values), torch.from_numpy(arrays.theta)
    momentum = torch.from_numpy(arrays.momentum)
    parameter = torch.nn.Parameter(theta)
    parameter.grad = torch.from_numpy(arrays.local)
    optimizer = torch.optim.SGD([parameter], lr=0.7, momentum=0.9, nesterov=True)
    optimizer.state[parameter]["momentum_buffer"] = momentum

    def per_tensor() -> object:
        scale = float(values.abs().max()) / 127
        return torch.quantize_per_tensor(values, scale, 0, torch.qint8)

    calls: dict[str, Call] = {
        "torch: quantize_per_tensor int8": per_tensor,
        "torch: tensor arithmetic int8": lambda: _blockwise(values),
        "torch: y.add_(x)": lambda: momentum.add_(values),
        "torch: SGD(nesterov)": lambda: optimizer.step(),
    }
    if compile_too:
        compiled = torch.compile(_blockwise, dynamic=True)
        calls["torch.compile: tensor arithmetic int8"] = lambda: compiled(values)
    return calls


def hivemind_contenders(arrays: Arrays) -> dict[str, Call]:
    """Return calls of hivemind's codecs, by name. The blockwise codec is included only if bitsandbytes works."""
    from hivemind.compression import (
        BlockwiseQuantization,
        CompressionInfo,
        Float16Compression,
        Uniform8BitQuantization,
    )

    values = torch.from_numpy(arrays.values)
    info = CompressionInfo.from_tensor(values)
    calls: dict[str, Call] = {
        "hivemind: Uniform8Bit": lambda: Uniform8BitQuantization().compress(values, info),
        "hivemind: Float16": lambda: Float16Compression().compress(values, info),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            BlockwiseQuantization().compress(values[:4096], info)
        except Exception:  # bitsandbytes is missing or does not work
            return calls
    return calls | {"hivemind: Blockwise": lambda: BlockwiseQuantization().compress(values, info)}
