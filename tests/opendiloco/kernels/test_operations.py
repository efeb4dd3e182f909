"""What the operations compute, from the decoded values of the reference; and what they refuse to work on."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from native.check import reference
from opendiloco import kernels
from opendiloco.kernels import INT8, FloatArray, FloatView, Format, Payload
from peers.errors import DilocoPeerError
from tests.opendiloco.kernels.vectors import FORMATS, LENGTHS, decode, encode, float_arrays, normal, same_bits


@pytest.mark.parametrize("format", FORMATS, ids=str)
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("threads", [1, 3])
def test_accumulate_and_finish_average(format: Format, length: int, threads: int) -> None:
    payload, accumulator = encode(format, normal(length)), normal(length, seed=1)
    expected: FloatArray = accumulator + np.float32(20480) * reference.decode(format.name, payload, length)
    kernels.accumulate(Payload(format, length, payload), 20480, accumulator, threads)
    assert same_bits(accumulator, expected)
    average = Payload(format, length)
    kernels.finish_average(accumulator, 12345, average, threads=threads)
    assert bytes(average) == reference.encode(format.name, (expected / np.float32(12345)).astype(np.float32))


@pytest.mark.parametrize("format", FORMATS, ids=str)
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("threads", [1, 3])
def test_average_in_one_go_is_that_by_way_of_the_sum(format: Format, length: int, threads: int) -> None:
    contributions = [
        (Payload(format, length, encode(format, normal(length, seed))), weight) for seed, weight in enumerate([3, 0, 9])
    ]
    accumulator, expected, average = np.zeros(length, np.float32), Payload(format, length), Payload(format, length)
    for contribution, weight in contributions:
        kernels.accumulate(contribution, weight, accumulator)
    kernels.finish_average(accumulator, 12, expected)
    kernels.average(contributions, average, threads=threads)
    assert bytes(average) == bytes(expected)


def test_what_has_no_average_is_named() -> None:
    sound = Payload(INT8, 3000, encode(INT8, normal(3000)))
    corrupt, too_large = (Payload(INT8, 3000, bytearray(bytes(sound))) for _ in range(2))
    corrupt.buffer[2 * INT8.block_bytes :][:4] = b"\x00\x7c\xc0\xff"
    with pytest.raises(kernels.CorruptPayloadError) as corruption:
        kernels.average([(sound, 1), (corrupt, 1)], Payload(INT8, 3000))
    assert corruption.value.block == 2
    too_large.buffer[INT8.block_bytes :][:5] = np.float32(2.0**57).tobytes() + bytes([127])
    kernels.check_payload(too_large)  # no encoder makes more than 2^63, but for what its rounding adds
    with pytest.raises(kernels.NonFiniteError) as overflow:
        kernels.average([(sound, 1), (too_large, 1000)], Payload(INT8, 3000))
    assert overflow.value.block == 1


@given(float_arrays(1e6), st.floats(1, 1e6, width=32), st.integers(1, 4))
def test_average_of_equal_contributions_is_the_contribution(values: FloatArray, weight: float, members: int) -> None:
    contribution, average = Payload(INT8, values.size, encode(INT8, values)), Payload(INT8, values.size)
    accumulator = np.zeros_like(values)
    for _ in range(members):
        kernels.accumulate(contribution, weight, accumulator)
    kernels.finish_average(accumulator, weight * members, average)
    np.testing.assert_allclose(
        decode(INT8, bytes(average), values.size),
        decode(INT8, bytes(contribution), values.size),
        rtol=1e-5,
        atol=1.5e-36,
    )


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_weights_of_a_whole_run_do_not_overflow(format: Format) -> None:
    largest = 65504.0 if format is kernels.FP16 else 2.0**63
    payload = Payload(format, 1024, encode(format, np.full(1024, largest, np.float32)))
    accumulator, average = np.zeros(1024, np.float32), Payload(format, 1024)
    for _ in range(4):
        kernels.accumulate(payload, 2.0**61, accumulator)
    kernels.finish_average(accumulator, 2.0**63, average)
    decoded, kept = decode(format, bytes(average), 1024), 16 if format is kernels.SPARSE else 1024
    np.testing.assert_allclose(decoded[:kept], largest, rtol=1e-6)
    assert not decoded[kept:].any()


@pytest.mark.parametrize("format", FORMATS, ids=str)
@pytest.mark.parametrize("length", LENGTHS)
def test_outer_step_is_nesterovs(format: Format, length: int) -> None:
    payload, theta, momentum = encode(format, normal(length)), normal(length, 1), normal(length, 2)
    gradient, rate, mu = reference.decode(format.name, payload, length), np.float32(0.7), np.float32(0.9)
    expected_momentum = mu * momentum + gradient
    expected_theta = theta - rate * (gradient + mu * expected_momentum)
    kernels.outer_step(Payload(format, length, payload), theta, momentum, 0.7, 0.9, threads=2)
    assert same_bits(momentum, expected_momentum)
    assert same_bits(theta, expected_theta)


@pytest.mark.parametrize("format", FORMATS, ids=str)
@pytest.mark.parametrize("length", LENGTHS)
def test_a_gradient_step_has_no_momentum(format: Format, length: int) -> None:
    payload, theta = encode(format, normal(length)), normal(length, 1)
    expected = theta - np.float32(0.7) * reference.decode(format.name, payload, length)
    kernels.gradient_step(Payload(format, length, payload), theta, 0.7, threads=2)
    assert same_bits(theta, expected)


@pytest.mark.parametrize(("learning_rate", "coefficient"), [(0.7, 0.9), (0.7, 0.6), (1.0, 0.5)])
def test_outer_step_agrees_with_torch(learning_rate: float, coefficient: float) -> None:
    theta, momentum = normal(3000, 1), np.zeros(3000, np.float32)
    parameter = torch.nn.Parameter(torch.from_numpy(theta.copy()))
    optimizer = torch.optim.SGD([parameter], lr=learning_rate, momentum=coefficient, nesterov=True)
    for step in range(8):
        payload = encode(INT8, normal(3000, seed=10 + step))
        kernels.outer_step(Payload(INT8, 3000, payload), theta, momentum, learning_rate, coefficient)
        parameter.grad = torch.from_numpy(reference.decode("int8", payload, 3000))
        optimizer.step()
    # Relative to the largest: a parameter that happens to end near zero has lost its own relative precision.
    assert np.abs(theta - parameter.detach().numpy()).max() <= 1e-6 * np.abs(theta).max()


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_differences_with_error_feedback(format: Format) -> None:
    theta, local, residual = normal(3000, 1), normal(3000, 2), np.zeros(3000, np.float32)
    difference = theta - local
    total = np.zeros(3000, np.float64)
    for _ in range(8):
        before, payload = residual.copy(), Payload(format, 3000)
        kernels.quantize_difference(theta, local, payload, residual=residual, threads=2)
        assert bytes(payload) == reference.encode(format.name, difference + before)
        assert same_bits(residual, (difference + before) - decode(format, bytes(payload), 3000))
        total += decode(format, bytes(payload), 3000)
    # What is left out in one round is made up for in a later one: the total is off by the last residual only.
    np.testing.assert_allclose(total + residual, 8.0 * difference, rtol=1e-4, atol=1e-5)


def test_a_difference_that_overflows_is_reported() -> None:
    theta = normal(2000)
    local = theta.copy()
    theta[1500], local[1500] = 3e38, -3e38
    with pytest.raises(kernels.NonFiniteError, match="block 1"):
        kernels.quantize_difference(theta, local, Payload(INT8, 2000))


@pytest.mark.parametrize("offset", [0, 1, 3])
@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview, lambda b: np.frombuffer(b, np.uint8)])
def test_payloads_of_any_kind_at_any_alignment(kind: Callable[[bytes], kernels.PayloadBytes], offset: int) -> None:
    values = normal(1500)
    payload = kind(bytes(offset) + encode(INT8, values))[offset:]
    decoded = np.empty_like(values)
    kernels.dequantize(Payload(INT8, 1500, payload), decoded)
    assert same_bits(decoded, reference.decode("int8", encode(INT8, values), 1500))


def test_views_are_arrays_that_were_checked_before() -> None:
    values, payload, decoded = normal(1024), Payload(INT8, 1024), np.zeros(1024, np.float32)
    kernels.quantize(FloatView(values), payload)
    kernels.dequantize(payload, FloatView(decoded))
    assert same_bits(decoded, reference.decode("int8", encode(INT8, values), 1024))


def test_a_thread_that_flushes_subnormals_gets_the_same_bits() -> None:
    values = normal(2048, size=1e-36)
    flushed: list[bytes] = []

    def work() -> None:
        torch.set_flush_denormal(True)  # in this thread only
        flushed.append(encode(INT8, values) + decode(INT8, encode(INT8, values), 2048).tobytes())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(timeout=240)
    assert flushed == [encode(INT8, values) + decode(INT8, encode(INT8, values), 2048).tobytes()]


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_a_corrupt_block_is_named_by_all_that_read(format: Format) -> None:
    payload = bytearray(encode(format, normal(2500)))
    block = 1500 // format.block_values
    payload[block * format.block_bytes : block * format.block_bytes + 4] = b"\x00\x7c\xc0\xff"
    theta, momentum, corrupt = normal(2500, 1), normal(2500, 2), Payload(format, 2500, payload)
    readers: list[Callable[[], None]] = [
        lambda: kernels.check_payload(corrupt),
        lambda: kernels.dequantize(corrupt, theta),
        lambda: kernels.accumulate(corrupt, 2.0, theta),
        lambda: kernels.outer_step(corrupt, theta, momentum, 0.7, 0.9),
    ]
    for read in readers:
        with pytest.raises(kernels.CorruptPayloadError) as raised:
            read()
        assert raised.value.block == block


@pytest.mark.parametrize(("size", "block"), [(0, 0), (1027, 0), (2507, 2), (2513, 2), (9999, 3)])
def test_a_payload_of_the_wrong_length_is_corrupt(size: int, block: int) -> None:
    with pytest.raises(kernels.CorruptPayloadError, match=f"it has {size} bytes; 2500 values take") as raised:
        Payload(INT8, 2500, bytes(size))
    assert raised.value.block == block


def test_kernel_errors_are_shown_to_users() -> None:
    error = kernels.NonFiniteError(3, 1024)
    assert isinstance(error, DilocoPeerError)
    assert error.exit_code == 8
    assert "values 3072 to 4095" in error.message
    assert error.remedy


def misuses() -> dict[str, Callable[[], object]]:
    good, payload = np.zeros(10, np.float32), Payload(INT8, 10)
    read_only, halves = np.zeros(10, np.float32), np.zeros(10, np.uint16)
    read_only.flags.writeable = False
    unaligned = np.frombuffer(bytearray(41), np.uint8)[1:].view(np.float32)
    sealed = Payload(INT8, 10, bytes(14))
    return {
        "float64": lambda: kernels.quantize(np.zeros(10), payload),  # type: ignore[arg-type]
        "two-dimensional": lambda: kernels.quantize(np.zeros((2, 5), np.float32), payload),
        "a list": lambda: kernels.quantize([0.0] * 10, payload),  # type: ignore[arg-type]
        "strided": lambda: kernels.quantize(np.zeros(20, np.float32)[::2], payload),
        "unaligned": lambda: kernels.quantize(unaligned, payload),
        "bytes of bfloat16": lambda: kernels.quantize(halves, payload),  # type: ignore[arg-type]
        "payload of another length": lambda: kernels.quantize(np.zeros(9, np.float32), payload),
        "read-only payload": lambda: kernels.quantize(good, sealed),
        "payload of floats": lambda: Payload(INT8, 10, np.zeros(14, np.float32)),
        "strided payload": lambda: Payload(INT8, 10, memoryview(bytes(28))[::2]),
        "read-only output": lambda: kernels.dequantize(payload, read_only),
        "output of another length": lambda: kernels.dequantize(payload, np.zeros(9, np.float32)),
        "lengths differ": lambda: kernels.quantize_difference(good, np.zeros(11, np.float32), payload),
        "residual of another length": lambda: kernels.quantize_difference(good, good, payload, residual=good[1:]),
        "negative weight": lambda: kernels.accumulate(payload, -1.0, good),
        "infinite weight": lambda: kernels.accumulate(payload, np.inf, good),
        "weight beyond 2^63": lambda: kernels.accumulate(payload, 1e19, good),
        "no weight at all": lambda: kernels.finish_average(good, 0.0, payload),
        "weight that fp32 rounds to zero": lambda: kernels.finish_average(good, 1e-60, payload),
        "no weights at all": lambda: kernels.average([(payload, 0.0)], Payload(INT8, 10)),
        "a negative weight among others": lambda: kernels.average([(payload, 2.0), (payload, -1.0)], Payload(INT8, 10)),
        "an average of nothing": lambda: kernels.average([], Payload(INT8, 10)),
        "average of another length": lambda: kernels.average([(payload, 1.0)], Payload(INT8, 9)),
        "average of another format": lambda: kernels.average([(payload, 1.0)], Payload(kernels.FP16, 10)),
        "read-only average": lambda: kernels.average([(payload, 1.0)], sealed),
        "momentum of another length": lambda: kernels.outer_step(payload, good, np.zeros(9, np.float32), 0.7, 0.9),
        "learning rate not a number": lambda: kernels.outer_step(payload, good, good.copy(), np.nan, 0.9),
        "stochastic halves": lambda: kernels.quantize(good, Payload(kernels.FP16, 10), kernels.stochastic(1)),
    }


@pytest.mark.parametrize("misuse", misuses())
def test_misuse_raises_value_error(misuse: str) -> None:
    with pytest.raises(ValueError, match=r"must|values|bytes|read-only|stochastic"):
        misuses()[misuse]()
