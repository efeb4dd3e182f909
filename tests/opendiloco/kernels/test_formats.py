"""Every format against the numpy reference, bit for bit: golden vectors in every set that this machine has, all else in
the fastest. `make kernels` compares the sets with each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from native.check import reference
from opendiloco import kernels
from opendiloco.kernels import FloatArray, Format, Payload, stochastic
from tests.opendiloco.kernels.vectors import (
    FORMATS,
    LENGTHS,
    SETS,
    STOCHASTIC_FORMATS,
    decode,
    encodable_arrays,
    encode,
    normal,
    same_bits,
)

GOLDEN = Path(reference.__file__).with_name("golden.txt")


@pytest.mark.parametrize(
    ("name", "values", "size"),
    [
        ("int8", 1025, 1028 + 5),
        ("uint4", 257, 136 + 9),
        ("e2m1-block32", 33, 20 + 5),
        ("e2m1", 1027, 516 + 6),
        ("e3m0", 1024, 516),
        ("fp16", 3, 6),
        ("sparse", 2 * 4096, 2 * 116),
        ("sparse", 4096 + 65, 116 + 4 + 4),
        ("int8", 0, 0),
    ],
)
def test_sizes(name: str, values: int, size: int) -> None:
    assert kernels.FORMATS[name].payload_size(values) == size


def test_payloads_of_more_than_2_to_the_31_values_have_a_size() -> None:
    assert kernels.INT8.payload_size(2**33) == 2**33 + 4 * 2**23
    assert kernels.INT8.block_count(2**33 + 1) == 2**23 + 1


@pytest.fixture
def fastest_afterwards() -> Iterator[None]:
    yield
    kernels.choose_kernels("")


@pytest.mark.parametrize("kernel_set", SETS)
@pytest.mark.parametrize("line", GOLDEN.read_text(encoding="ascii").splitlines(), ids=lambda line: line[:24])
@pytest.mark.usefixtures("fastest_afterwards")
def test_golden_vectors(line: str, kernel_set: str) -> None:
    kernels.choose_kernels(kernel_set)
    name, rounding, seed, first_block, values, payload, decoded = line.split()
    floats = np.frombuffer(bytes.fromhex(values), np.float32)
    how = stochastic(int(seed), int(first_block)) if rounding == "stochastic" else kernels.NEAREST
    assert encode(kernels.FORMATS[name], floats, how).hex() == payload
    assert decode(kernels.FORMATS[name], bytes.fromhex(payload), floats.size).tobytes().hex() == decoded


@pytest.mark.parametrize("format", FORMATS, ids=str)
@settings(max_examples=40)
@given(data=st.data())
def test_rounding_to_nearest_is_the_reference(format: Format, data: st.DataObject) -> None:
    values = data.draw(encodable_arrays(format))
    payload = encode(format, values)
    assert payload == reference.encode(format.name, values)
    assert same_bits(decode(format, payload, values.size), reference.decode(format.name, payload, values.size))


@pytest.mark.parametrize("format", STOCHASTIC_FORMATS, ids=str)
@settings(max_examples=40)
@given(data=st.data(), seed=st.integers(0, 2**64 - 1), first_block=st.integers(0, 2**40))
def test_stochastic_rounding_is_the_reference(format: Format, data: st.DataObject, seed: int, first_block: int) -> None:
    values = data.draw(encodable_arrays(format))
    payload = encode(format, values, stochastic(seed, first_block))
    assert payload == reference.encode(format.name, values, seed, first_block)


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_normal_values_are_encoded_as_the_reference_does(format: Format) -> None:
    for length, size in product(LENGTHS, [1.0, 1e-3, 1e-36, 1e-40, 1e4]):
        values, where = normal(length, size=size), f"{length} values of about {size}"
        payload = encode(format, values)
        assert payload == reference.encode(format.name, values), where
        assert same_bits(decode(format, payload, length), reference.decode(format.name, payload, length)), where


def test_halves_are_numpys_halves() -> None:
    every = np.arange(0x7C00, dtype=np.uint16)
    halves = np.concatenate([every, every | 0x8000]).view(np.float16)
    exact: FloatArray = halves.astype(np.float32)
    between = ((exact[:-1] + exact[1:]) / 2).astype(np.float32)  # ties between all neighbours
    below: FloatArray = np.nextafter(between, np.float32(0))
    for values in (exact, between, below):
        assert encode(kernels.FP16, values) == values.astype(np.float16).tobytes()
    assert same_bits(decode(kernels.FP16, halves.tobytes(), halves.size), exact)


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_zeros_and_what_is_too_small_for_a_scale(format: Format) -> None:
    for value in [0.0, -0.0, 1e-45, -1e-40, 1.1754944e-38]:
        decoded = decode(format, encode(format, np.full(1500, value, np.float32)), 1500)
        assert np.abs(decoded).max() <= abs(np.float32(value)), value
        if format is not kernels.FP16:
            assert not np.signbit(decoded[decoded == 0]).any(), value


@pytest.mark.parametrize("format", FORMATS, ids=str)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1.0001 * 2.0**63])
def test_what_cannot_be_encoded_is_reported_with_its_block(format: Format, bad: float) -> None:
    for place in [0, 31, 32, 1023, 1024, 2499]:
        values = normal(2500)
        values[place] = bad
        is_reported_with_its_block(format, values, place)


def is_reported_with_its_block(format: Format, values: FloatArray, place: int) -> None:
    zeros, payload = np.zeros(2500, np.float32), Payload(format, 2500)
    attempts: list[Callable[[], None]] = [
        lambda: kernels.quantize(values, payload),
        lambda: kernels.quantize_difference(values, zeros, payload),
        lambda: kernels.quantize_difference(zeros, values, payload, threads=2),
        lambda: kernels.finish_average(values, 1.0, payload),
    ]
    for attempt in attempts:
        with pytest.raises(kernels.NonFiniteError) as raised:
            attempt()
        assert raised.value.block == place // format.block_values, place
        assert f"values {raised.value.block * format.block_values} to" in raised.value.message


@pytest.mark.parametrize("format", FORMATS, ids=str)
@settings(max_examples=40)
@given(data=st.data())
def test_any_bytes_are_refused_or_decode_to_finite_values(format: Format, data: st.DataObject) -> None:
    count = data.draw(st.sampled_from([1, 5, 33, 257, 1025]))
    size = format.payload_size(count)
    payload = bytearray(encode(format, normal(count)))
    for place in data.draw(st.lists(st.integers(0, size - 1), max_size=6)):
        payload[place] = data.draw(st.integers(0, 255))
    decoded = np.zeros(count, np.float32)
    try:
        kernels.check_payload(Payload(format, count, payload))
    except kernels.CorruptPayloadError:
        with pytest.raises(kernels.CorruptPayloadError):
            kernels.dequantize(Payload(format, count, payload), decoded)
        return
    kernels.dequantize(Payload(format, count, payload), decoded)
    assert np.isfinite(decoded).all()
