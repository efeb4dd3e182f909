"""By how many tokens a fragment counts that is stored in the midst of training."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from peers.driver.replication import Replication
from peers.driver.training import Training
from peers.protocol.effects import Train
from peers.values.leases import SampleRange
from peers.values.workload import Progress
from tests.peers.fakes import FakeWorkload
from tests.peers.logs import SETTINGS, TOKENS

BATCH_TOKENS = 10
REPLICATION = cast(Replication, SimpleNamespace())


@pytest.mark.parametrize(
    ("step_tokens", "tokens"),
    [(None, TOKENS), (BATCH_TOKENS, TOKENS), (BATCH_TOKENS / 2, TOKENS // 2), (3 * BATCH_TOKENS, TOKENS)],
    ids=["a worker", "the run's batch", "half of it", "more than it"],
)
def test_it_counts_by_what_an_inner_step_trains_and_at_most_by_the_lease(
    step_tokens: float | None, tokens: int
) -> None:
    host: Any = SimpleNamespace(peer=SimpleNamespace(settings=SETTINGS), handle=lambda event: None)
    training = Training(FakeWorkload(), [], REPLICATION, host)
    training._progress(Progress(1, None, 1.0, step_tokens))
    assert training._planned_tokens(Train(index=0, samples=(SampleRange(0, 20),), steps=10, tokens=0)) == tokens
