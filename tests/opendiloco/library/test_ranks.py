"""What one process of a loop knows of the others. (test_sharing.py has them.)"""

from __future__ import annotations

import pickle

import pytest
import torch

from opendiloco.errors import LoopError
from opendiloco.library.ranks import Ranks, _portable


def test_a_process_that_is_alone_asks_nobody() -> None:
    ranks = Ranks()
    ranks.meet()
    assert ranks.is_first
    assert ranks.from_first(lambda: 3) == ranks.sum(3) == 3
    assert ranks.spread(3.0) == 0
    with pytest.raises(KeyError):
        ranks.from_first(lambda: dict[str, int]()["nothing"])
    ranks.part()


@pytest.mark.parametrize(("windows", "processes", "shares"), [(8, 4, 2), (6, 4, 2), (1, 3, 1), (5, 1, 5)])
def test_shares_of_a_batch_are_equally_large_and_have_all_of_it(windows: int, processes: int, shares: int) -> None:
    batch, got = torch.arange(windows * 3).view(windows, 3), list[torch.Tensor]()
    for rank in range(processes):
        ranks = Ranks()
        ranks.rank, ranks.size = rank, processes
        got.append(ranks.piece(batch))
    assert {len(share) for share in got} == {shares}
    assert torch.equal(torch.cat(got).unique(dim=0), batch)


def test_errors_reach_other_processes_as_they_are_where_that_can_be() -> None:
    class UnknownError(Exception):
        pass

    known = pickle.loads(pickle.dumps(_portable(LoopError("it is so.", "Do this."))))
    assert (type(known), known.message, known.remedy) == (LoopError, "it is so.", "Do this.")
    other = _portable(UnknownError("something"))
    assert (type(other), str(other)) == (RuntimeError, "UnknownError in the first process: something")
