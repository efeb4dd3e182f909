from __future__ import annotations

import pytest
import torch

from opendiloco.inner.team import Team

CPU = torch.device("cpu")


@pytest.mark.parametrize("size", [1, 2, 3, 7])
@pytest.mark.parametrize("count", [0, 1, 5, 6, 64])
def test_pieces_are_consecutive_and_as_even_as_possible(size: int, count: int) -> None:
    teams = [Team(CPU, rank, size) for rank in range(size)]
    pieces = [list(range(count))[team.piece(count)] for team in teams]
    assert [number for piece in pieces for number in piece] == list(range(count))
    lengths = [len(piece) for piece in pieces]
    assert max(lengths) - min(lengths) <= 1
    assert [team.largest_piece(count) for team in teams] == [max(lengths)] * size


def test_a_worker_alone_agrees_with_itself() -> None:
    assert Team(CPU).sums([0.1, True]) == [0.1, True]
    assert Team(CPU).sums([torch.tensor(0.5), 0.1, True]) == [0.5, 0.1, True]
