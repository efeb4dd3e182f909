"""Rounding by chance, with seeds that follow from the log."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from opendiloco import kernels
from opendiloco.config.run_config import CodecSection, RunConfig
from opendiloco.kernels import NEAREST, Rounding, quantize_difference
from opendiloco.training.codec import BlockCodec, RunRounding
from peers.errors import ManifestError
from peers.values.leases import SampleRange

VALUES = 8 * 1024
CHANCE = RunRounding(CodecSection(rounding="stochastic"))
LEASE = (SampleRange(8, 16),)
STOCHASTIC = [name for name, format in kernels.FORMATS.items() if format.is_stochastic]


def encoded(codec: BlockCodec, values: Any, rounding: Rounding) -> bytes:
    out = codec.empty_payload()
    quantize_difference(values, np.zeros_like(values), out, rounding)
    return bytes(out.buffer)


def test_a_run_rounds_to_nearest_unless_it_says_otherwise() -> None:
    nearest = RunRounding(CodecSection())
    assert nearest.of_contribution(3, 1, LEASE) == nearest.of_average(3, 1, 7) == NEAREST


def test_whoever_makes_the_same_again_has_the_same_chance_and_nobody_else() -> None:
    assert CHANCE.of_contribution(3, 1, LEASE) == CHANCE.of_contribution(3, 1, (SampleRange(8, 10),)), "of its lease"
    mine, another = CHANCE.of_contribution(3, 1, LEASE), CHANCE.of_contribution(3, 1, (SampleRange(16, 24),))
    assert mine == CHANCE.of_contribution(3, 1, LEASE)
    later, elsewhere = CHANCE.of_contribution(4, 1, LEASE), CHANCE.of_contribution(3, 0, LEASE)
    seeds = {each.seed for each in (mine, another, later, elsewhere, CHANCE.of_average(3, 1))}
    assert len(seeds) == 5


@pytest.mark.parametrize("kind", STOCHASTIC)
def test_an_average_in_parts_is_the_same_as_one_of_the_whole(kind: str) -> None:
    codec, values = BlockCodec(kernels.FORMATS[kind], VALUES), np.random.default_rng(1).standard_normal(VALUES)
    payloads = []
    for scale in (1, 2, 3):
        rounding = CHANCE.of_contribution(2, 0, (SampleRange(scale, 9),))
        payloads.append((encoded(codec, (values * scale).astype(np.float32), rounding), 1.0))
    whole = bytes(codec.average(payloads, 0, rounding=CHANCE.of_average(2, 0)))
    codec.checked(whole)
    parts, count = b"", codec.block_count
    for first, last in ((0, 3), (3, 4), (4, count)):
        start, stop = codec.byte_range(first, last)
        blocks = [(payload[start:stop], weight) for payload, weight in payloads]
        parts += bytes(codec.average(blocks, first, rounding=CHANCE.of_average(2, 0, first)))
    assert parts == whole
    assert whole != bytes(codec.average(payloads, 0))


def test_on_average_nothing_is_lost() -> None:
    """Rounded to nearest, the smaller values of a block are all zeros in four bits."""
    codec, values = BlockCodec(kernels.E3M0, 1024), np.full(1024, 0.004, np.float32)
    values[0] = 1.0
    decoded = np.empty((200, 1024), np.float32)
    for index, row in enumerate(decoded):
        payload = encoded(codec, values, CHANCE.of_contribution(index, 0, LEASE))
        kernels.dequantize(kernels.Payload(kernels.E3M0, 1024, bytearray(payload)), row)
    assert decoded[:, 1:].mean() == pytest.approx(0.004, rel=0.02)
    assert not decoded.all()


@pytest.mark.parametrize("kind", ["fp16", "sparse"])
def test_what_has_no_chance_is_refused(small_content: dict[str, Any], kind: str) -> None:
    with pytest.raises(ManifestError, match=f'codec: kind = "{kind}" always rounds to nearest; remove rounding'):
        RunConfig.from_manifest_content(small_content | {"codec": {"kind": kind, "rounding": "stochastic"}})
