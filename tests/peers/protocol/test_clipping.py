"""How much of a contribution counts: honest ones whole, one that is much longer a multiple of the median."""

from __future__ import annotations

import pytest

from peers.protocol.contributions import clipped, median


def squares(**norms: float) -> dict[str, float]:
    return {peer: norm * norm for peer, norm in norms.items()}


@pytest.mark.parametrize("norms", [{"a": 0.87, "b": 1.0, "c": 1.7}, {"a": 1.0}, {"a": 0.0, "b": 0.0}, {}])
def test_honest_contributions_count_whole(norms: dict[str, float]) -> None:
    assert clipped(dict.fromkeys(norms, 100), squares(**norms), 4.0) == {}


def test_one_that_is_longer_counts_with_four_medians() -> None:
    norms = {"a": 1.0, "b": 2.0, "c": 3.0, "liar": 2.0**57}
    factors = clipped(dict.fromkeys(norms, 100), squares(**norms), 4.0)
    assert factors == {"liar": 8.0 / 2.0**57}


def test_tokens_decide_what_is_normal_and_not_names() -> None:
    tokens = {"a": 1000, "b": 1000} | {f"sybil{number}": 1 for number in range(50)}
    norms = {"a": 1.0, "b": 1.1} | {f"sybil{number}": 1e9 for number in range(50)}
    factors = clipped(tokens, squares(**norms), 4.0)
    assert factors.keys() == {f"sybil{number}" for number in range(50)}
    nothing = norms | {f"sybil{number}": 0.0 for number in range(50)}
    assert clipped(tokens, squares(**nothing), 4.0) == {}


def test_of_two_that_count_as_much_the_shorter_is_normal() -> None:
    assert median({"a": 5, "b": 5}, {"a": 4.0, "b": 9.0}) == 4.0
    assert clipped({"a": 5, "b": 5}, squares(a=1.0, b=2.0**57), 4.0) == {"b": 4.0 / 2.0**57}
    assert clipped({"slow": 1, "fast": 8}, squares(slow=0.1, fast=1.0), 4.0) == {}, "it has trained less"


def test_beside_nothing_nothing_counts() -> None:
    assert clipped({"a": 5, "b": 5}, squares(a=0.0, b=1.0), 4.0) == {"b": 0.0}
