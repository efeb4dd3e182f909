"""The outer state as safetensors bytes: tensors `theta` and `momentum`, both fp32 of shape (n,)."""

from __future__ import annotations

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from opendiloco.shared_memory import Vector
from peers.values.workload import SnapshotError

FORMAT = {"format": "diloco-peer outer state, version 1"}
SNAPSHOT_OVERHEAD = 4096  # bytes; safetensors' own header is a few hundred


def encode_snapshot(theta: Vector, momentum: Vector) -> bytes:
    """About 8 bytes per parameter."""
    return save({"theta": theta, "momentum": momentum}, metadata=FORMAT)


def decode_snapshot(snapshot: bytes, size: int) -> tuple[Vector, Vector]:
    """theta and momentum of `size` values each.

    Raises: SnapshotError when the bytes are not safetensors, or names, types, shapes or values are not as they must be.
    """
    try:
        tensors = load(snapshot)
    except (SafetensorError, KeyError, ValueError) as error:
        raise SnapshotError(f"not safetensors: {error}") from error
    if tensors.keys() != {"theta", "momentum"}:
        raise SnapshotError(f"holds {sorted(tensors)}, not momentum and theta")
    for name, tensor in tensors.items():
        if tensor.dtype != np.float32 or tensor.shape != (size,):
            raise SnapshotError(f"{name} is {tensor.dtype} of shape {tensor.shape}, not float32 of shape ({size},)")
        if not np.isfinite(tensor).all():
            raise SnapshotError(f"{name} holds NaN or infinity")
    return tensors["theta"], tensors["momentum"]
