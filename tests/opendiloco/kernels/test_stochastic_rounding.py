"""By chance, but reproducibly: unbiased, independent between elements, and cut into blocks as one likes."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from opendiloco import kernels
from opendiloco.kernels import FloatArray, Format, stochastic
from tests.opendiloco.kernels.vectors import STOCHASTIC_FORMATS, decode, encode, normal

SEEDS = 400
BLOCK = 1024


def rounded(format: Format, values: FloatArray, seed: int) -> FloatArray:
    return decode(format, encode(format, values, stochastic(seed)), values.size)


def errors(format: Format) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Errors over many seeds, of shape (SEEDS, BLOCK), and their standard deviations, of shape (BLOCK,)."""
    values = normal(BLOCK, seed=1)
    all_errors = np.stack([rounded(format, values, seed).astype(np.float64) - values for seed in range(SEEDS)])
    return all_errors, all_errors.std(axis=0)


@pytest.mark.parametrize("format", STOCHASTIC_FORMATS, ids=str)
def test_the_mean_is_the_value(format: Format) -> None:
    all_errors, deviation = errors(format)
    moving = deviation > 0  # the largest value of a block is always exact
    assert moving.sum() > 0.9 * BLOCK
    # Means of SEEDS errors, in standard deviations of such a mean: about normal, so their squares average to one.
    scores = all_errors.mean(axis=0)[moving] / deviation[moving] * np.sqrt(SEEDS)
    assert abs(scores.mean()) < 5 / np.sqrt(moving.sum())
    assert 0.8 < (scores**2).mean() < 1.2


@pytest.mark.parametrize("format", STOCHASTIC_FORMATS, ids=str)
@pytest.mark.parametrize("distance", [1, 2, 8, 16, 32, 256, 512])
def test_elements_are_rounded_independently(format: Format, distance: int) -> None:
    all_errors, deviation = errors(format)
    scores = all_errors / np.where(deviation > 0, deviation, 1)
    products = scores[:, distance:] * scores[:, :-distance]
    assert abs(products.mean()) < 5 / np.sqrt(products.size)


def test_blocks_and_seeds_are_rounded_independently() -> None:
    values = np.tile(normal(BLOCK), 64)
    first = rounded(kernels.INT8, values, 1).reshape(64, BLOCK) - values.reshape(64, BLOCK)
    second = rounded(kernels.INT8, values, 2).reshape(64, BLOCK) - values.reshape(64, BLOCK)
    expected = (first - first.mean(axis=0), second - second.mean(axis=0))
    for left, right in ((expected[0][1:], expected[0][:-1]), (expected[0], expected[1])):
        correlation = (left * right).mean() / np.sqrt((left**2).mean() * (right**2).mean())
        assert abs(correlation) < 5 / np.sqrt(left.size) + 1 / 64  # the mean of 64 blocks was taken off


@pytest.mark.parametrize("format", STOCHASTIC_FORMATS, ids=str)
def test_a_block_is_rounded_the_same_alone(format: Format) -> None:
    values = normal(5000)
    whole = encode(format, values, stochastic(9, first_block=3))
    first = 4 * 1024 // format.block_values
    rest = encode(format, values[4096:], stochastic(9, first_block=3 + first))
    assert whole[first * format.block_bytes :] == rest


@pytest.mark.parametrize("format", STOCHASTIC_FORMATS, ids=str)
def test_seeds_matter_and_repeat(format: Format) -> None:
    values = normal(2000)
    assert encode(format, values, stochastic(1)) == encode(format, values, stochastic(1))
    assert encode(format, values, stochastic(1)) != encode(format, values, stochastic(2))
    assert stochastic(-1) == stochastic(2**64 - 1)
