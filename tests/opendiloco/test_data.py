from __future__ import annotations

import string
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from opendiloco.config import RunConfig
from opendiloco.data import load_data
from opendiloco.errors import DataError
from opendiloco.sample_order import Permutation, ShuffledWindows
from opendiloco.tokenized import Windows
from opendiloco.tokenizer import ByteTokenizer


@given(st.integers(1, 3000), st.integers(0, 2**63 - 1), st.integers(0, 1000))
def test_a_permutation_meets_every_window_once(size: int, seed: int, epoch: int) -> None:
    assert sorted(Permutation(size, seed, epoch)(np.arange(size))) == list(range(size))


def test_permutations_are_the_same_on_every_machine_for_ever() -> None:
    assert Permutation(1000, seed=5, epoch=0)(np.arange(6)).tolist() == [617, 742, 433, 154, 517, 150]


def test_seeds_and_epochs_give_unrelated_permutations() -> None:
    positions = np.arange(4096)
    orders = [Permutation(4096, seed, epoch)(positions) for seed in (0, 1) for epoch in (0, 1)]
    for first in range(4):
        assert np.mean(orders[first] == positions) < 0.01
        assert abs(np.corrcoef(orders[first], positions)[0, 1]) < 0.06
        for second in range(first):
            assert np.mean(orders[first] == orders[second]) < 0.01


def test_windows_overlap_by_the_token_that_is_only_predicted_from() -> None:
    windows = Windows(np.arange(23, dtype=np.uint16), sequence_length=5)
    assert windows.count == 4
    assert windows.read(np.array([0, 3])).tolist() == [[0, 1, 2, 3, 4, 5], [15, 16, 17, 18, 19, 20]]


def test_a_sample_depends_on_its_number_alone() -> None:
    order = ShuffledWindows(Windows(np.arange(101, dtype=np.uint16), sequence_length=5), seed=9)
    whole = order.read(np.arange(50))
    assert np.array_equal(whole[13:47], order.read(np.arange(13, 47)))
    assert sorted(whole[:20, 0]) == sorted(whole[20:40, 0]) == list(range(0, 100, 5))
    assert whole[:20, 0].tolist() != whole[20:40, 0].tolist()


def test_documents_end_with_the_end_token_and_held_out_ones_are_never_trained_on(
    small_content: dict[str, Any], tmp_path: Path
) -> None:
    for letter in string.ascii_letters:
        (tmp_path / f"{letter}.txt").write_text(letter * 50, encoding="utf-8")
    section = {"source": str(tmp_path), "held_out": 0.3}
    data = load_data(RunConfig.from_manifest_content(small_content | {"data": section}), ByteTokenizer())
    held_out = set(data.held_out.read(np.arange(data.held_out.count)).ravel())
    trained = set(data.samples.read(np.arange(1000)).ravel())
    assert trained & held_out == {ByteTokenizer.end}
    assert len(trained | held_out) == len(string.ascii_letters) + 1


@pytest.mark.parametrize(
    ("part", "changes"),
    [
        ("training", {"training": {"inner_steps": 1, "batch_size": 100_000, "sequence_length": 16}}),
        ("held-out", {"held_out": 1e-12}),
    ],
)
def test_too_small_a_corpus(small_content: dict[str, Any], part: str, changes: dict[str, Any]) -> None:
    if "held_out" in changes:
        changes = {"data": small_content["data"] | changes}
    config = RunConfig.from_manifest_content(small_content | changes)
    with pytest.raises(DataError, match=rf"has \d+ {part} windows of 16 tokens; a batch needs") as caught:
        load_data(config, ByteTokenizer())
    assert caught.value.remedy
