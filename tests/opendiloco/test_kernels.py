"""The kernels against a numpy reference, bit for bit, and against torch's optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from opendiloco import kernels
from opendiloco.kernels import BLOCK, BLOCK_BYTES, CorruptPayloadError, Floats, NonFiniteError
from peers.errors import DilocoPeerError

LARGEST = float(np.finfo(np.float32).max)
SMALLEST_NORMAL = np.finfo(np.float32).tiny
LENGTHS = [0, 1, 2, 15, 1023, 1024, 1025, 2048, 5000]


def reference_encode(values: Floats) -> bytes:
    payload = b""
    for start in range(0, values.size, BLOCK):
        block = values[start : start + BLOCK]
        absmax = np.abs(block).max()
        scale = absmax / np.float32(127)
        if scale < SMALLEST_NORMAL:
            scale, codes = np.float32(0), np.zeros(block.size, np.int8)
        else:
            codes = np.rint(block * (np.float32(127) / absmax)).astype(np.int8)
        payload += scale.tobytes() + codes.tobytes()
    return payload


def reference_decode(payload: bytes, weight: float = 1.0) -> Floats:
    blocks = [payload[start : start + BLOCK_BYTES] for start in range(0, len(payload), BLOCK_BYTES)]
    scales = [np.float32(weight) * np.frombuffer(block[:4], np.float32) for block in blocks]
    codes = [np.frombuffer(block[4:], np.int8).astype(np.float32) for block in blocks]
    decoded = [scale * code for scale, code in zip(scales, codes, strict=True)]
    return np.concatenate([np.zeros(0, np.float32), *decoded])


def encode(values: Floats) -> bytes:
    out = bytearray(kernels.payload_size(values.size))
    kernels.quantize(values, out)
    return bytes(out)


def normal(length: int, seed: int = 0, size: float = 1.0) -> Floats:
    return (np.random.default_rng(seed).standard_normal(length) * size).astype(np.float32)


def same_bits(left: Floats, right: npt.NDArray[np.floating[Any]]) -> bool:
    return left.tobytes() == right.tobytes()


def float_arrays(magnitude: float) -> st.SearchStrategy[Floats]:
    # Drawn from a handful of lengths around a block's end: hypothesis fills the rest with one value, so long is cheap.
    elements = st.floats(-magnitude, magnitude, width=32, allow_subnormal=True)
    return st.sampled_from([1, 7, 1023, 1024, 1025, 2050]).flatmap(lambda n: arrays(np.float32, n, elements=elements))


finite_arrays = float_arrays(float(np.float32(LARGEST / 2)))


@pytest.mark.parametrize(
    ("values", "blocks", "size"), [(0, 0, 0), (1, 1, 5), (1024, 1, 1028), (1025, 2, 1033), (2048, 2, 2056)]
)
def test_sizes(values: int, blocks: int, size: int) -> None:
    assert kernels.block_count(values) == blocks
    assert kernels.payload_size(values) == size


@given(finite_arrays)
def test_quantize_equals_reference(values: Floats) -> None:
    assert encode(values) == reference_encode(values)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("size", [1.0, 1e-3, 1e-36, 1e-40, 1e30])
def test_quantize_equals_reference_on_normal_values(length: int, size: float) -> None:
    values = normal(length, size=size)
    assert encode(values) == reference_encode(values)


@given(finite_arrays)
def test_decoding_errs_by_at_most_half_a_scale(values: Floats) -> None:
    payload = encode(values)
    decoded = np.empty_like(values)
    kernels.dequantize(payload, decoded)
    absmax = np.repeat(
        [np.abs(values[start : start + BLOCK]).max() for start in range(0, values.size, BLOCK)], BLOCK
    ).astype(np.float64)[: values.size]
    # A little more than half for the rounding of scale and inverse; values too small to be encoded decode as zero.
    allowed = np.maximum(absmax / 127 * 0.50002, np.where(absmax < 1.5e-36, absmax, 0))
    assert np.all(np.abs(decoded.astype(np.float64) - values) <= allowed)
    assert same_bits(decoded, reference_decode(payload))


def test_rounding_is_to_even() -> None:
    values = np.array([127, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, -127], np.float32)
    assert np.frombuffer(encode(values)[4:], np.int8).tolist() == [127, 0, 2, 2, 0, -2, -2, -127]


@pytest.mark.parametrize(
    "values",
    [
        pytest.param(np.zeros(1500, np.float32), id="zeros"),
        pytest.param(-np.zeros(1500, np.float32), id="negative zeros"),
        pytest.param(np.full(1500, 1e-45, np.float32), id="smallest subnormals"),
        pytest.param(np.full(1500, SMALLEST_NORMAL, np.float32), id="a scale that would be subnormal"),
    ],
)
def test_values_that_become_zero(values: Floats) -> None:
    assert encode(values) == bytes(kernels.payload_size(1500))


@given(finite_arrays, st.integers(0, 2**32 - 1))
def test_quantize_difference_equals_reference(theta: Floats, seed: int) -> None:
    local = theta + normal(theta.size, seed)
    out = bytearray(kernels.payload_size(theta.size))
    kernels.quantize_difference(theta, local, out)
    assert out == reference_encode(theta - local)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("weight", [0.0, 1.0, 0.1, 20480.0, 16777217.0])
def test_accumulate_equals_reference(length: int, weight: float) -> None:
    payload, accumulator = encode(normal(length)), normal(length, seed=1)
    expected = accumulator + reference_decode(payload, weight)
    kernels.accumulate(payload, weight, accumulator)
    assert same_bits(accumulator, expected)


@pytest.mark.parametrize("length", LENGTHS)
def test_finish_average_equals_reference(length: int) -> None:
    accumulator = normal(length, size=1e4)
    out = bytearray(kernels.payload_size(length))
    kernels.finish_average(accumulator, 12345.0, out)
    assert out == reference_encode(accumulator / np.float32(12345))


@given(float_arrays(1e6), st.floats(1, 1e6, width=32), st.integers(1, 4))
def test_average_of_equal_contributions_is_the_contribution(values: Floats, weight: float, members: int) -> None:
    payload = encode(values)
    accumulator = np.zeros_like(values)
    for _ in range(members):
        kernels.accumulate(payload, weight, accumulator)
    average, decoded = np.empty_like(values), np.empty_like(values)
    out = bytearray(len(payload))
    kernels.finish_average(accumulator, weight * members, out)
    kernels.dequantize(out, average)
    kernels.dequantize(payload, decoded)
    np.testing.assert_allclose(average, decoded, rtol=1e-5, atol=1.5e-36)


@pytest.mark.parametrize("length", LENGTHS)
def test_outer_step_equals_reference(length: int) -> None:
    payload, theta, momentum = encode(normal(length)), normal(length, 1), normal(length, 2)
    gradient, rate, mu = reference_decode(payload), np.float32(0.7), np.float32(0.9)
    expected_momentum = mu * momentum + gradient
    expected_theta = theta - rate * (gradient + mu * expected_momentum)
    kernels.outer_step(payload, theta, momentum, 0.7, 0.9)
    assert same_bits(momentum, expected_momentum)
    assert same_bits(theta, expected_theta)


@pytest.mark.parametrize(("learning_rate", "coefficient"), [(0.7, 0.9), (0.7, 0.6), (1.0, 0.5)])
def test_outer_step_agrees_with_torch(learning_rate: float, coefficient: float) -> None:
    import torch

    theta, momentum = normal(3000, 1), np.zeros(3000, np.float32)
    parameter = torch.nn.Parameter(torch.from_numpy(theta.copy()))
    optimizer = torch.optim.SGD([parameter], lr=learning_rate, momentum=coefficient, nesterov=True)
    for step in range(8):
        payload = encode(normal(3000, seed=10 + step))
        kernels.outer_step(payload, theta, momentum, learning_rate, coefficient)
        parameter.grad = torch.from_numpy(reference_decode(payload))
        optimizer.step()
    # Relative to the largest: a parameter that happens to end near zero has lost its own relative precision.
    assert np.abs(theta - parameter.detach().numpy()).max() <= 1e-6 * np.abs(theta).max()


def test_a_range_of_blocks_is_a_slice() -> None:
    values, whole = normal(5000), bytearray(kernels.payload_size(5000))
    kernels.quantize(values, whole)
    part = memoryview(whole)[2 * BLOCK_BYTES : 4 * BLOCK_BYTES]
    out = np.zeros(5000, np.float32)
    kernels.dequantize(part, out[2 * BLOCK : 4 * BLOCK])
    assert encode(values[2 * BLOCK : 4 * BLOCK]) == bytes(part)
    assert same_bits(out[2 * BLOCK : 4 * BLOCK], reference_decode(bytes(part)))
    assert not out[: 2 * BLOCK].any()
    assert not out[4 * BLOCK :].any()


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview, lambda b: np.frombuffer(b, np.uint8)])
@pytest.mark.parametrize("offset", [0, 1, 3])
def test_payloads_of_any_kind_at_any_alignment(kind: Callable[[bytes], kernels.Payload], offset: int) -> None:
    values = normal(1500)
    payload = kind(bytes(offset) + encode(values))[offset:]
    decoded = np.empty_like(values)
    kernels.dequantize(payload, decoded)
    assert same_bits(decoded, reference_decode(encode(values)))


def test_a_bytearray_can_grow_again_after_the_call() -> None:
    payload = bytearray(encode(normal(10)))
    kernels.check_payload(payload, 10)
    payload += b"more"


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, LARGEST, -LARGEST])
@pytest.mark.parametrize("place", [0, 1023, 1024, 2499])
def test_values_that_cannot_be_encoded_are_reported_with_their_block(bad: float, place: int) -> None:
    values, zeros = normal(2500), np.zeros(2500, np.float32)
    values[place] = bad
    out = bytearray(kernels.payload_size(2500))
    attempts: list[Callable[[], None]] = [
        lambda: kernels.quantize(values, out),
        lambda: kernels.quantize_difference(values, zeros, out),
        lambda: kernels.quantize_difference(zeros, values, out),
        lambda: kernels.finish_average(values, 1.0, out),
    ]
    for attempt in attempts:
        out[:] = bytes(len(out))
        with pytest.raises(NonFiniteError) as raised:
            attempt()
        assert raised.value.block == place // BLOCK
        assert not any(out[place // BLOCK * BLOCK_BYTES :])


def test_a_difference_that_overflows_is_reported() -> None:
    theta = normal(2000)
    local = theta.copy()
    theta[1500], local[1500] = 3e38, -3e38
    with pytest.raises(NonFiniteError, match="block 1"):
        kernels.quantize_difference(theta, local, bytearray(kernels.payload_size(2000)))


def corrupted(block: int, offset: int, replacement: bytes) -> bytes:
    payload = bytearray(encode(normal(2500)))
    start = block * BLOCK_BYTES + offset
    payload[start : start + len(replacement)] = replacement
    return bytes(payload)


def assert_refused_unchanged(payload: bytes, block: int) -> None:
    theta, momentum = normal(2500, 1), normal(2500, 2)
    readers: list[Callable[[], None]] = [
        lambda: kernels.check_payload(payload, 2500),
        lambda: kernels.dequantize(payload, theta),
        lambda: kernels.accumulate(payload, 2.0, theta),
        lambda: kernels.outer_step(payload, theta, momentum, 0.7, 0.9),
    ]
    for reader in readers:
        with pytest.raises(CorruptPayloadError) as raised:
            reader()
        assert raised.value.block == block
    assert same_bits(theta, normal(2500, 1))
    assert same_bits(momentum, normal(2500, 2))


@pytest.mark.parametrize("block", [0, 1, 2])
@pytest.mark.parametrize("scale", [np.nan, np.inf, -np.inf, -1.0, -0.0, LARGEST])
def test_bad_scales_are_refused(block: int, scale: float) -> None:
    assert_refused_unchanged(corrupted(block, 0, np.float32(scale).tobytes()), block)


@pytest.mark.parametrize(("block", "index"), [(0, 0), (1, 1023), (2, 451)])
def test_the_code_minus_128_is_refused(block: int, index: int) -> None:
    assert_refused_unchanged(corrupted(block, 4 + index, b"\x80"), block)


@given(st.binary(max_size=40).flatmap(lambda data: st.tuples(st.just(data), st.sampled_from([len(data) - 4, 10]))))
@example((np.float32(LARGEST / 127.01).tobytes() + b"\x7f\x81" * 5, 10))
def test_any_bytes_are_refused_or_decode_to_finite_values(drawn: tuple[bytes, int]) -> None:
    payload, values = drawn[0], max(drawn[1], 0)
    decoded = np.zeros(values, np.float32)
    try:
        kernels.check_payload(payload, values)
    except CorruptPayloadError:
        return
    kernels.dequantize(payload, decoded)
    assert np.isfinite(decoded).all()


@pytest.mark.parametrize(("size", "block"), [(0, 0), (1027, 0), (2507, 2), (2513, 2), (9999, 3)])
def test_a_payload_of_the_wrong_length_is_corrupt(size: int, block: int) -> None:
    with pytest.raises(CorruptPayloadError, match=f"{size} bytes came for 2500 values, which take 2512") as raised:
        kernels.check_payload(bytes(size), 2500)
    assert raised.value.block == block


def test_a_weight_that_makes_a_block_overflow_is_refused() -> None:
    payload = encode(np.full(10, 1e37, np.float32))
    accumulator = np.ones(10, np.float32)
    with pytest.raises(CorruptPayloadError):
        kernels.accumulate(payload, 1e6, accumulator)
    assert accumulator.tolist() == [1.0] * 10


def test_kernel_errors_are_shown_to_users() -> None:
    error = NonFiniteError(3)
    assert isinstance(error, DilocoPeerError)
    assert error.exit_code == 8
    assert "values 3072 to 4095" in error.message
    assert error.remedy


def misuses() -> dict[str, Callable[[], None]]:
    good, payload = np.zeros(10, np.float32), bytearray(14)
    read_only = np.zeros(10, np.float32)
    read_only.flags.writeable = False
    unaligned = np.frombuffer(bytearray(41), np.uint8)[1:].view(np.float32)
    return {
        "float64": lambda: kernels.quantize(np.zeros(10), payload),  # type: ignore[arg-type]
        "two-dimensional": lambda: kernels.quantize(np.zeros((2, 5), np.float32), payload),
        "a list": lambda: kernels.quantize([0.0] * 10, payload),  # type: ignore[arg-type]
        "strided": lambda: kernels.quantize(np.zeros(20, np.float32)[::2], payload),
        "unaligned": lambda: kernels.quantize(unaligned, payload),
        "short payload": lambda: kernels.quantize(good, bytearray(13)),
        "read-only payload": lambda: kernels.quantize(good, bytes(14)),
        "payload of floats": lambda: kernels.dequantize(np.zeros(14, np.float32), good),
        "strided payload": lambda: kernels.dequantize(memoryview(bytes(28))[::2], good),
        "read-only output": lambda: kernels.dequantize(payload, read_only),
        "lengths differ": lambda: kernels.quantize_difference(good, np.zeros(11, np.float32), payload),
        "negative weight": lambda: kernels.accumulate(payload, -1.0, good),
        "infinite weight": lambda: kernels.accumulate(payload, np.inf, good),
        "weight beyond fp32": lambda: kernels.accumulate(payload, 1e39, good),
        "no weight at all": lambda: kernels.finish_average(good, 0.0, payload),
        "weight that fp32 rounds to zero": lambda: kernels.finish_average(good, 1e-60, payload),
        "momentum of another length": lambda: kernels.outer_step(payload, good, np.zeros(9, np.float32), 0.7, 0.9),
        "learning rate not a number": lambda: kernels.outer_step(payload, good, good.copy(), np.nan, 0.9),
    }


@pytest.mark.parametrize("misuse", misuses())
def test_misuse_raises_value_error(misuse: str) -> None:
    with pytest.raises(ValueError, match=r"must|values|bytes|read-only"):
        misuses()[misuse]()
