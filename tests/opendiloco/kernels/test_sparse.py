"""The sparse format: what it keeps of a block, what it makes of that, and that each result has one encoding."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from native.check import reference
from opendiloco import kernels
from opendiloco.kernels import SPARSE, FloatArray, Payload
from tests.opendiloco.kernels.vectors import LARGEST_ENCODED, decode, encode, normal, same_bits

LENGTHS = [1, 63, 64, 65, 127, 4095, 4096, 4097, 2 * 4096 + 130]


def round_trip(values: FloatArray) -> FloatArray:
    return decode(SPARSE, encode(SPARSE, values), values.size)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("distinct", [2, 9, None])
def test_long_blocks_with_and_without_ties_are_the_references(length: int, distinct: int | None) -> None:
    values = normal(length)
    if distinct is not None:
        values = np.round(values * distinct / 4).astype(np.float32)
    payload = encode(SPARSE, values)
    assert payload == reference.encode("sparse", values)
    assert same_bits(decode(SPARSE, payload, length), reference.decode("sparse", payload, length))


# Few different values, so that there are ties, and most of them in few columns.
@settings(max_examples=40)
@given(
    arrays(np.float32, 4096, elements=st.floats(-LARGEST_ENCODED, LARGEST_ENCODED, width=32)),
    st.sampled_from([1, 64, 4096]),
)
def test_blocks_of_few_values_are_the_references(values: FloatArray, every: int) -> None:
    values[np.arange(4096) % every != 0] = 0
    assert encode(SPARSE, values) == reference.encode("sparse", values)


@pytest.mark.parametrize("length", LENGTHS)
def test_one_value_in_64_is_kept_of_each_block_the_largest(length: int) -> None:
    values = normal(length)
    decoded = round_trip(values)
    for start in range(0, length, 4096):
        block, kept = values[start : start + 4096], decoded[start : start + 4096] != 0
        assert kept.sum() == -(-block.size // 64)
        assert np.abs(block[kept]).min() >= np.abs(block[~kept]).max(initial=0)
        assert np.array_equal(np.sign(decoded[start : start + 4096][kept]), np.sign(block[kept]))


def test_of_equal_values_those_of_the_lower_indices_are_kept() -> None:
    values = np.full(4096, -1, np.float32)
    values[4000:4010] = 3
    [kept] = np.nonzero(round_trip(values))
    assert kept.tolist() == [*range(54), *range(4000, 4010)]


def test_the_levels_are_the_means_of_the_small_and_of_the_large() -> None:
    values = np.zeros(192, np.float32)
    values[[3, 60, 150]] = 1, -2, 8
    assert round_trip(values)[[3, 60, 150]].tolist() == [1.5, -1.5, 8]
    values[150] = -2
    assert round_trip(values)[[3, 60, 150]].tolist() == [1, -2, -2]


@settings(max_examples=40)
@given(arrays(np.float32, st.sampled_from([1, 192, 4096]), elements=st.floats(-1e9, 1e9, width=32)))
def test_what_is_left_out_is_never_more_than_there_was(values: FloatArray) -> None:
    left = values.astype(np.float64) - round_trip(values)
    before = float(np.sum(values.astype(np.float64) ** 2))
    assert float(np.sum(left**2)) <= before * (1 + 2.0**-15)  # a level is rounded to 8 bits


@settings(max_examples=200)
@given(data=st.data())
def test_all_that_passes_is_what_the_encoder_makes_of_it(data: st.DataObject) -> None:
    count = data.draw(st.sampled_from([1, 64, 65, 192, 4096, 4100]))
    payload = bytearray(encode(SPARSE, normal(count)))
    for place in data.draw(st.lists(st.integers(0, len(payload) - 1), max_size=4)):
        payload[place] ^= data.draw(st.sampled_from([1, 2, 16, 64, 128, 255]))
    try:
        kernels.check_payload(Payload(SPARSE, count, payload))
    except kernels.CorruptPayloadError:
        return
    assert encode(SPARSE, decode(SPARSE, bytes(payload), count)) == bytes(payload)
