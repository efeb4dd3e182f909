from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]

from opendiloco.training import team
from opendiloco.training.team import SETTING_UP, Team

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


def test_workers_wait_for_each_other_as_long_as_the_slowest_start_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing 10 billion initial values takes longer than NCCL's ten minutes."""
    given = dict[str, Any]()

    class BegunError(Exception):
        pass

    def begin(backend: str, **options: Any) -> None:
        given.update(options)
        raise BegunError

    monkeypatch.setattr(dist, "init_process_group", begin)
    monkeypatch.setattr(team, "TCPStore", lambda *arguments, **options: HashStore())
    with pytest.raises(BegunError):
        Team.meet(torch.device("cpu"), 0, 2)
    assert given["timeout"] == SETTING_UP >= timedelta(hours=1)
