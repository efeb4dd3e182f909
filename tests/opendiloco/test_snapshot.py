from __future__ import annotations

import numpy as np
import pytest
from safetensors.numpy import save

from opendiloco.outer.snapshot import decode_snapshot, encode_snapshot
from peers.values.workload import SnapshotError

THETA = np.arange(10, dtype=np.float32)
MOMENTUM = -THETA


def test_a_snapshot_comes_back_bit_for_bit() -> None:
    theta, momentum = decode_snapshot(encode_snapshot(THETA, MOMENTUM), 10)
    assert np.array_equal(theta, THETA)
    assert np.array_equal(momentum, MOMENTUM)


@pytest.mark.parametrize(
    ("snapshot", "said"),
    [
        (b"", "not safetensors"),
        (encode_snapshot(THETA, MOMENTUM)[:-1], "not safetensors"),
        (b"\xff" * 100, "not safetensors"),
        (save({"theta": THETA}), r"holds \['theta'\]"),
        (save({"theta": THETA, "momentum": MOMENTUM, "more": THETA}), "holds"),
        (save({"theta": THETA, "momentum": MOMENTUM.astype(np.float64)}), "momentum is float64"),
        (save({"theta": THETA[:9], "momentum": MOMENTUM}), r"theta is float32 of shape \(9,\)"),
        (save({"theta": THETA, "momentum": np.full(10, np.inf, np.float32)}), "momentum holds NaN or infinity"),
        (save({"theta": np.full(10, np.nan, np.float32), "momentum": MOMENTUM}), "theta holds"),
    ],
)
def test_anything_else_is_refused(snapshot: bytes, said: str) -> None:
    with pytest.raises(SnapshotError, match=said):
        decode_snapshot(snapshot, 10)
