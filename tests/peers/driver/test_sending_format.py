"""The format of a contribution: what the uplink has time for, and what the owner's limits leave."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from peers.driver.replication import Replication
from peers.driver.training import Training
from peers.transfer.buffers import PayloadBuffers
from peers.values.chunks import PayloadSize
from tests.peers.fakes import FakeWorkload

SIZE = PayloadSize(1, 1000, (500, 30))


@pytest.mark.parametrize(
    ("uplink", "share", "told", "format"),
    [
        (200.0, 1.0, None, 0),
        (200.0, 0.99, None, 1),
        (200.0, 0.5, None, 1),
        (200.0, 0.49, None, 2),
        (200.0, 1e-6, None, 2),
        (10.0, 1.0, None, 2),
        (10.0, 0.99, None, 2),
        (0.0, 0.99, None, 1),
        (10.0, 1e-6, 0, 0),
    ],
)
def test_it_is_what_the_uplink_and_the_share_allow_unless_it_is_told(
    uplink: float, share: float, told: int | None, format: int
) -> None:
    host: Any = SimpleNamespace(
        rounds=SimpleNamespace(traffic=SimpleNamespace(last_uplink=uplink)),
        peer=SimpleNamespace(seconds_to_send=lambda fragment: 10.0),
    )
    buffers = [cast(PayloadBuffers, SimpleNamespace(size=SIZE))]
    training = Training(FakeWorkload(), buffers, cast(Replication, SimpleNamespace()), host, told, lambda: share)
    assert training._choose_format(0) == format
    assert training.sending is not None
    assert training.sending.format == format
