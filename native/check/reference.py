"""The formats of native/formats.h in numpy, implemented from their definition: the levels that codes stand for, and the
rounding thresholds half way between levels.

It shares no code with the C kernels, so that golden.txt and its tests show a mistake in either.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Integers = npt.NDArray[np.int64]

BLOCK = {"int8": 1024, "uint4": 256, "e2m1-block32": 32, "e2m1": 1024, "e3m0": 1024, "fp16": 1024, "sparse": 4096}
KEPT = 64  # values of a sparse block for each value that is kept
LEVELS = {"e2m1": np.array([0, 1, 2, 3, 4, 6, 8, 12]), "e3m0": np.array([0, 1, 2, 4, 8, 16, 32, 64])}
SMALLEST_UNIT = np.finfo(np.float32).tiny


def random_bits(count: int, seed: int, block: int) -> Integers:
    """Return 16 random bits for each of the `count` values in block `block`, as native/random.h does."""
    mask = (1 << 64) - 1
    state = (seed + (block + 1) * 0x9E3779B97F4A7C15) & mask
    state = ((state ^ state >> 30) * 0xBF58476D1CE4E5B9) & mask
    state = ((state ^ state >> 27) * 0x94D049BB133111EB) & mask
    state ^= state >> 31
    value = np.arange(count, dtype=np.uint32)
    word: npt.NDArray[Any] = value // 32 * 16 + value % 16 + np.uint32(state & 0xFFFFFFFF)
    word = (word ^ word >> 16) * np.uint32(0x21F0AAAD) ^ np.uint32(state >> 32)
    word = (word ^ word >> 15) * np.uint32(0x735A2D97)
    word = word ^ word >> 15
    bits: Integers = np.where(value % 32 < 16, word & 0xFFFF, word >> 16).astype(np.int64)
    return bits


def _linear(v: Floats, random: Integers | None) -> Integers:
    if random is None:
        return np.asarray(np.rint(v), np.int64)
    fixed_point = np.asarray(np.rint(v * np.float32(65536)), np.int64)
    return (fixed_point + random) // 65536


def _exponential(w: Floats, levels: Integers, random: Integers | None) -> Integers:
    """Return a 4-bit code for each scaled value in `w`: that of the nearest level, or with `random`, of one of the two
    neighbouring levels. To measure distances, each magnitude x of a value or level is mapped to x + max(x, 2)."""
    magnitude = np.abs(w)
    t = (magnitude + np.maximum(magnitude, np.float32(2))).astype(np.float64)
    places = (levels + np.maximum(levels, 2)).astype(np.float64)
    below = np.clip(np.searchsorted(places, t, side="right") - 1, 0, 6)
    fraction = (t - places[below]) / (places[below + 1] - places[below])
    if random is None:
        goes_up = (fraction > 0.5) | ((fraction == 0.5) & (below % 2 == 1))
    else:
        goes_up = np.floor(fraction * 65536).astype(np.int64) + random >= 65536
    level = below + goes_up
    return np.asarray(np.where((w < 0) & (level > 0), level + 8, level), np.int64)


def _half_bytes(codes: Integers) -> bytes:
    even = np.append(codes, np.zeros(codes.size % 2, codes.dtype)).astype(np.uint8)
    return bytes(even[0::2] | even[1::2] << 4)


def _unit(span: np.float32, largest: int) -> tuple[np.float32, np.float32]:
    unit = span / np.float32(largest)
    return (unit, np.float32(largest) / span) if unit >= SMALLEST_UNIT else (np.float32(0), np.float32(0))


def _bfloat16(value: np.float64) -> int:
    """Return the 16 bits of the bfloat16 that is nearest to a positive value, after the value is rounded to fp32."""
    mantissa, exponent = np.frexp(np.float64(np.float32(value)))
    return (int(exponent) + 126 << 7) + int(np.rint(mantissa * 256)) - 128


def _mean(values: npt.NDArray[np.float64]) -> np.float64:
    """Return the mean, computed by adding the values one after the other; numpy's `sum` adds them in another order."""
    mean: np.float64 = np.cumsum(values)[-1] / values.size
    return mean


def _encode_sparse(values: Floats) -> bytes:
    count = -(-values.size // KEPT)
    magnitudes = np.abs(values).astype(np.float64)
    kept = np.sort(np.argsort(-magnitudes, kind="stable")[:count])
    kept = kept[magnitudes[kept] >= SMALLEST_UNIT]
    if not kept.size:
        return bytes(4 + (14 * count + 7) // 8)
    is_high = magnitudes[kept] > _mean(magnitudes[kept])
    low = high = _bfloat16(_mean(magnitudes[kept[~is_high]]))
    if is_high.any():
        high = _bfloat16(_mean(magnitudes[kept[is_high]]))
    codes = kept + (is_high & (low < high)) * 4096 + (values[kept] < 0) * 8192
    bits = sum(int(code) << 14 * place for place, code in enumerate(codes))
    return np.array([low, high], np.uint16).tobytes() + bits.to_bytes((14 * count + 7) // 8, "little")


def _decode_sparse(block: bytes, count: int) -> Floats:
    values = np.zeros(count, np.float32)
    levels = np.frombuffer(bytes(2) + block[:2] + bytes(2) + block[2:4], np.float32)
    bits = int.from_bytes(block[4:], "little")
    for place in range(-(-count // KEPT) if levels[0] else 0):
        code = bits >> 14 * place & 0x3FFF
        if code or place == 0:
            values[code % 4096] = levels[code >> 12 & 1] * (-1 if code >> 13 else 1)
    return values


def encode_block(name: str, values: Floats, random: Integers | None) -> bytes:
    """Return the bytes of one block in format `name`. `random` has 16 random bits for each value, or is None to round
    to nearest."""
    absmax = np.abs(values).max()
    if name == "fp16":
        return values.astype(np.float16).tobytes()
    if name == "sparse":
        return _encode_sparse(values)
    if name == "int8":
        unit, inverse = _unit(absmax, 127)
        return unit.tobytes() + _linear(values * inverse, random).astype(np.int8).tobytes()
    if name == "uint4":
        minimum = values.min() + np.float32(0)
        unit, inverse = _unit(values.max() - minimum, 15)
        header = np.array([unit, minimum], np.float32).tobytes()
        return header + _half_bytes(_linear((values - minimum) * inverse, random))
    levels = LEVELS[name[:4]]
    unit, inverse = _unit(absmax, int(levels[-1]))
    # The kernels double e3m0's values before they round them (see native/formats.h), and so must this code.
    factor = 2 if name == "e3m0" else 1
    return unit.tobytes() + _half_bytes(_exponential(values * (factor * inverse), levels * factor, random))


def decode_block(name: str, block: bytes, count: int) -> Floats:
    """Return the `count` values of one encoded block in format `name`."""
    if name == "fp16":
        return np.frombuffer(block, "<f2").astype(np.float32)
    if name == "sparse":
        return _decode_sparse(block, count)
    unit = np.frombuffer(block[:4], np.float32)
    if name == "int8":
        return unit * np.frombuffer(block[4:], np.int8).astype(np.float32)
    pairs = np.frombuffer(block[8 if name == "uint4" else 4 :], np.uint8)
    codes = np.stack([pairs & 15, pairs >> 4], axis=1).reshape(-1)[:count]
    if name == "uint4":
        return np.frombuffer(block[4:8], np.float32) + unit * codes.astype(np.float32)
    levels = LEVELS[name[:4]].astype(np.float32)
    return np.asarray(np.where(codes < 8, unit, -unit) * levels[codes % 8], np.float32)


def encode(name: str, values: Floats, seed: int | None = None, first_block: int = 0) -> bytes:
    """Return the payload of finite values in format `name`, rounded stochastically with `seed`, or to nearest if `seed`
    is None."""
    payload = b""
    for index, start in enumerate(range(0, values.size, BLOCK[name])):
        block = values[start : start + BLOCK[name]]
        random = None if seed is None else random_bits(block.size, seed, first_block + index)
        payload += encode_block(name, block, random)
    return payload


def decode(name: str, payload: bytes, count: int) -> Floats:
    """Return the `count` values that a payload in format `name` encodes."""
    values = []
    for start in range(0, count, BLOCK[name]):
        length = min(BLOCK[name], count - start)
        codes = -(-length // KEPT) if name == "sparse" else length
        bits = {"int8": 8, "fp16": 16, "sparse": 14}.get(name, 4)
        size = {"uint4": 8, "fp16": 0}.get(name, 4) + (codes * bits + 7) // 8
        values.append(decode_block(name, payload[:size], length))
        payload = payload[size:]
    return np.concatenate([np.zeros(0, np.float32), *values])
