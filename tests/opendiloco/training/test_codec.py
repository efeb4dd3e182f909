from __future__ import annotations

from typing import get_args

import numpy as np
import pytest

from opendiloco.config.run_config import BITS, CodecSection
from opendiloco.kernels import FORMATS, INT8, Format, Payload, dequantize, quantize, quantize_difference
from opendiloco.quantities import FormatName
from opendiloco.training.codec import BLOCK_VALUES, BlockCodec
from peers.values.chunks import parts_of, split_by_rate
from peers.values.workload import BadBlocksError

VALUES = 17_000  # four whole blocks and a short one


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


def test_a_mean_of_contributions_in_other_formats_is_that_of_their_values() -> None:
    """Also chunk by chunk, in the order of the contributions."""
    codec = BlockCodec.of(CodecSection(contributions=("int8", "e2m1", "sparse")), VALUES)
    draw, formats = np.random.default_rng(1), (2, 0, 1)
    weights, sent, total = (100.0, 50.0, 7.0), [], np.zeros(VALUES, np.float32)
    for format, weight in zip(formats, weights, strict=True):
        payload, values = Payload(codec.formats[format], VALUES), np.empty(VALUES, np.float32)
        quantize(draw.standard_normal(VALUES).astype(np.float32), payload)
        dequantize(payload, values)
        total += np.float32(weight) * values
        sent.append(bytes(payload))
    expected = Payload(INT8, VALUES)
    quantize(total / np.float32(200), expected)
    averaged = b""
    for first, last in ((0, 2), (2, codec.block_count)):
        cuts = [slice(*codec.byte_range(first, last, format)) for format in formats]
        blocks = [(each[cut], weight) for each, cut, weight in zip(sent, cuts, weights, strict=True)]
        averaged += codec.average(blocks, first, tokens=200.0, formats=formats)
    assert averaged == bytes(expected)


def test_formats_for_thin_uplinks_are_thinner() -> None:
    assert set(get_args(FormatName)) == set(BITS) == set(FORMATS)
    for kind in BITS:
        section = CodecSection.model_validate({"kind": kind})
        bits = [8 * FORMATS[each].payload_size(1 << 20) / (1 << 20) for each in section.contributions]
        assert section.contributions[0] == kind
        assert bits == sorted(bits, reverse=True)
        assert bits[0] == pytest.approx(BITS[kind], abs=0.02)
        assert len(bits) == 1 or bits[1] < 0.6 * bits[0]
        assert all(BLOCK_VALUES % FORMATS[each].block_values == 0 for each in section.contributions)


@pytest.mark.parametrize("format", FORMATS.values(), ids=str)
def test_a_payload_is_checked_whole(format: Format) -> None:
    codec = BlockCodec(format, VALUES)
    [payload] = contributions(codec, 1)
    assert bytes(codec.checked(payload)) == payload
    for wrong in (payload[:-1], payload + b"\0", payload[: codec.format.block_bytes], b"", b"\xff" * len(payload)):
        with pytest.raises(BadBlocksError):
            codec.checked(wrong)
