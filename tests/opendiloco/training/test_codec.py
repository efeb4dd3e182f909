from __future__ import annotations

import numpy as np
import pytest

from opendiloco.kernels import FORMATS, INT8, Format, quantize_difference
from opendiloco.training.codec import BlockCodec
from peers.values.chunks import parts_of, split_by_rate
from peers.values.workload import BadBlocksError

VALUES = 5000  # four whole blocks and a short one


def contributions(codec: BlockCodec, count: int) -> list[bytes]:
    random = np.random.default_rng(0)
    theta, out = random.standard_normal(VALUES).astype(np.float32), codec.empty_payload()
    encoded = []
    for _ in range(count):
        quantize_difference(theta, theta + random.standard_normal(VALUES).astype(np.float32), out)
        encoded.append(bytes(out))
    return encoded


@pytest.mark.parametrize("format", FORMATS.values(), ids=str)
@pytest.mark.parametrize("owners", [1, 2, 3, 7])
def test_parts_averaged_apart_are_the_whole_averaged_at_once(owners: int, format: Format) -> None:
    codec = BlockCodec(format, VALUES)
    payloads = contributions(codec, 3)
    tokens = [100, 250, 7]
    whole = codec.average(list(zip(payloads, tokens, strict=True)), 0)
    parts = []
    for blocks in parts_of(split_by_rate(codec.block_count, [0.0] * owners, owners)):
        start, stop = codec.byte_range(blocks.start, blocks.stop)
        parts.append(codec.average([(p[start:stop], t) for p, t in zip(payloads, tokens, strict=True)], blocks.start))
    assert b"".join(parts) == whole


def test_an_average_is_made_where_it_is_wanted() -> None:
    codec = BlockCodec(INT8, VALUES)
    blocks = [(payload, 10) for payload in contributions(codec, 2)]
    out = memoryview(bytearray(len(blocks[0][0])))
    assert codec.average(blocks, 0, out).obj is out.obj
    assert out == codec.average(blocks, 0)


def test_blocks_of_a_part_are_checked_with_its_own_length() -> None:
    codec = BlockCodec(INT8, VALUES)
    [payload] = contributions(codec, 1)
    start, stop = codec.byte_range(3, 5)
    assert codec.squared_norm(payload[start:stop], 3) > 0
    with pytest.raises(BadBlocksError):
        codec.squared_norm(payload[start : stop - 1], 3)
    with pytest.raises(BadBlocksError):
        codec.squared_norm(b"\xff" * (stop - start), 3)


@pytest.mark.parametrize("format", FORMATS.values(), ids=str)
def test_a_payload_is_checked_whole(format: Format) -> None:
    codec = BlockCodec(format, VALUES)
    [payload] = contributions(codec, 1)
    assert bytes(codec.checked(payload)) == payload
    for wrong in (payload[:-1], payload + b"\0", payload[: codec.format.block_bytes], b"", b"\xff" * len(payload)):
        with pytest.raises(BadBlocksError):
            codec.checked(wrong)
