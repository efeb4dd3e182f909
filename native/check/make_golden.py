"""The writer of golden.txt: payloads of each format, made by reference.py, that every implementation must reproduce.

Run `python -m native.check.make_golden` in the repository's root only after a format has changed on purpose. Each line
has the format, the rounding, the seed, the index of the first block, and in hex the values (fp32), their payload and
the decoded values. Each payload has a whole tile and a ragged one, with ties, zeros, subnormals, and both signs.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from native.check import reference

RAGGED = 45
SEED = 20_241_121


def golden_values(name: str) -> reference.Floats:
    """Return the values to encode in format `name`: normal noise with blocks of different magnitudes, in which every
    ninth value is a multiple of 1/4, so that some values lie half way between two levels."""
    generator, count = np.random.default_rng(SEED), max(1024, reference.BLOCK[name]) + RAGGED
    values = generator.standard_normal(count).astype(np.float32)
    values[:128] *= np.float32(1e-3)
    ties = np.arange(count) % 9 == 0
    values[ties] = (generator.integers(-24, 25, count)[ties] / 4).astype(np.float32)
    values[200:204] = np.float32(0), np.float32(-0.0), np.float32(1e-40), np.float32(-1e-42)
    # The next lines make the scale of one block 1, so that some multiples of 1/4 in the block are exact rounding ties.
    if name == "uint4":
        block = values[512:768]
        block[:2] = -1, 14
        np.clip(block, -1, 14, out=block)
    else:
        values[600] = {"int8": 127, "e3m0": -64, "fp16": 1}.get(name, 12)
    return values


def golden_line(name: str, seed: int | None, first_block: int) -> str:
    """Return a line of golden.txt with values and their payload in the format `name`. With a seed, the rounding is
    random and depends on `seed` and `first_block`, the first block's number; with None, it is to nearest."""
    values = golden_values(name)
    payload = reference.encode(name, values, seed, first_block)
    decoded = reference.decode(name, payload, values.size)
    rounding = "nearest" if seed is None else "stochastic"
    hexadecimal = " ".join(data.hex() for data in (values.tobytes(), payload, decoded.tobytes()))
    return f"{name} {rounding} {seed or 0} {first_block} {hexadecimal}\n"


def main() -> None:
    lines = [golden_line(name, None, 0) for name in reference.BLOCK]
    lines += [golden_line(name, SEED, 7) for name in reference.BLOCK if name not in ("fp16", "sparse")]
    Path(__file__).with_name("golden.txt").write_text("".join(lines), encoding="ascii")


if __name__ == "__main__":
    main()
