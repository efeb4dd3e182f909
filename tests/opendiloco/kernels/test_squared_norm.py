"""The norm that members commit to: what the decoded values have, and the same bits with every instruction set."""

from __future__ import annotations

import numpy as np
import pytest

from opendiloco import kernels
from opendiloco.kernels import FORMATS, CorruptPayloadError, FloatArray, Format, Payload
from opendiloco.training.codec import BlockCodec

COUNT = 5 * 1024 + 77


def encoded(format: Format, count: int = COUNT, scale: float = 1e-3) -> tuple[Payload, FloatArray]:
    values = np.random.default_rng(count).standard_normal(count).astype(np.float32) * np.float32(scale)
    payload, decoded = Payload(format, count), np.empty(count, np.float32)
    kernels.quantize(values, payload)
    kernels.dequantize(payload, decoded)
    return payload, decoded


@pytest.mark.parametrize("count", [0, 1, 7, 1023, 1024, COUNT])
@pytest.mark.parametrize("name", FORMATS)
def test_it_is_that_of_the_decoded_values(name: str, count: int) -> None:
    payload, decoded = encoded(FORMATS[name], count)
    exact = float(np.sum(decoded.astype(np.float64) ** 2))
    assert kernels.squared_norm(payload) == pytest.approx(exact, rel=1e-7 if name == "int8" else 1e-12)


@pytest.mark.parametrize("name", FORMATS)
def test_all_sets_agree_bit_for_bit(name: str) -> None:
    payload, _ = encoded(FORMATS[name])
    before, norms = kernels.chosen_kernels(), set[float]()
    try:
        for chosen in kernels.supported_kernels():
            kernels.choose_kernels(chosen)
            norms.add(kernels.squared_norm(payload))
    finally:
        kernels.choose_kernels(before)
    assert len(norms) == 1


def test_it_is_this_one_everywhere() -> None:
    """A block of units of 2^-10 with the codes -127 to 127: their squares add up to 127 * 128 * 255 / 3."""
    data = np.float32(2.0**-10).tobytes() + np.arange(-127, 128, dtype=np.int8).tobytes()
    assert kernels.squared_norm(Payload(kernels.INT8, 255, bytearray(data))) == 1381760 / 2**20


def test_the_largest_block_does_not_overflow() -> None:
    values = np.full(1024, 2.0**63, np.float32)
    payload = Payload(kernels.INT8, 1024)
    kernels.quantize(values, payload)
    assert kernels.squared_norm(payload) == pytest.approx(1024 * 2.0**126, rel=1e-6)


def test_what_no_encoder_makes_has_none() -> None:
    payload, _ = encoded(kernels.INT8)
    payload.buffer[3 * 1028 + 4] = 0x80
    with pytest.raises(CorruptPayloadError, match="block 3"):
        kernels.squared_norm(payload)


def test_one_with_a_huge_scale_moves_an_average_no_further_than_four_of_the_others() -> None:
    """Measured before contributions were clipped: with an eighth of the tokens one such block moved theta to 3e18."""
    from peers.protocol.contributions import clipped

    codec = BlockCodec(kernels.INT8, 8 * 1024)
    payloads = {f"honest{number}": encoded(kernels.INT8, 8 * 1024)[0].buffer for number in range(7)}
    spoilt = Payload(kernels.INT8, 8 * 1024)
    values = encoded(kernels.INT8, 8 * 1024)[1].copy()
    values[:1024] = 2.0**57
    kernels.quantize(values, spoilt)
    payloads["liar"] = spoilt.buffer
    tokens = dict.fromkeys(payloads, 1000)
    squares = {peer: codec.squared_norm(blocks, 0) for peer, blocks in payloads.items()}
    factors = clipped(tokens, squares, 4.0)
    assert factors.keys() == {"liar"}
    weighted = [(blocks, tokens[peer] * factors.get(peer, 1)) for peer, blocks in payloads.items()]
    average, without = codec.average(weighted, 0, None, 8000), codec.average(weighted[:7], 0, None, 8000)
    moved = np.sqrt(codec.squared_norm(average, 0)) - np.sqrt(codec.squared_norm(without, 0))
    normal = np.sqrt(squares["honest0"])
    assert 0 < moved <= 1.01 * 4 * normal / 8
