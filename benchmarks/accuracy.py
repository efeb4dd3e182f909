"""The error that each payload format adds to pseudo-gradients, and that other libraries' codecs add: `python -m
benchmarks.accuracy`.

It is measured on real pseudo-gradients, from training the demo's model on four workers for some outer steps, and on
noise with heavy tails (Student's t with 3 degrees of freedom). Errors are L2 norms relative to the exact vector's. For
the average, four workers' payloads are averaged and the average is encoded again, as in a round.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np
import numpy.typing as npt
import torch

from benchmarks.reporting import Bar, json_option, report
from opendiloco import kernels
from opendiloco.config.run_config import RunConfig
from opendiloco.data.tokenizer import build_tokenizer
from opendiloco.data.training_data import load_data
from opendiloco.kernels import FloatArray, Format, Payload, Rounding
from opendiloco.model.build import build_model
from opendiloco.training.inner import ModelReplica
from peers.values.leases import SamplePool

WORKERS = 4
NOISE_VALUES = 1 << 20
Codec = Callable[[FloatArray, int], FloatArray]
"""A function that encodes and decodes a vector. The number is a seed."""


def train_pseudo_gradients(config: RunConfig, outer_steps: int) -> list[FloatArray]:
    """Train for `outer_steps` outer steps, and return each worker's last pseudo-gradient: theta minus the worker's
    weights. Each outer step subtracts the workers' mean pseudo-gradient from theta."""
    tokenizer = build_tokenizer(config.tokenizer)
    data, pool = load_data(config, tokenizer), SamplePool()
    replicas = [ModelReplica(config, build_model(config, tokenizer), data.samples) for _ in range(WORKERS)]
    theta: FloatArray = np.empty(replicas[0].layout.size, np.float32)
    replicas[0].store(theta)
    steps = config.training.inner_steps
    for index in range(outer_steps):
        gradients = []
        for replica in replicas:
            (lease,), pool = pool.deal([steps * config.training.batch_size])
            replica.train(theta, index, lease, steps)
            local = np.empty_like(theta)
            replica.store(local)
            gradients.append(theta - local)
        theta -= np.mean(gradients, axis=0)
    return gradients


def heavy_tails() -> list[FloatArray]:
    """Return a test vector for each worker: a signal common to all workers plus the worker's own noise, both drawn from
    Student's t distribution with 3 degrees of freedom."""
    generator = np.random.default_rng(3)
    common = generator.standard_t(3, NOISE_VALUES)
    return [(common + generator.standard_t(3, NOISE_VALUES)).astype(np.float32) for _ in range(WORKERS)]


def ours(format: Format, rounding: Callable[[int], Rounding]) -> Codec:
    def code(values: FloatArray, seed: int) -> FloatArray:
        payload, decoded = Payload(format, values.size), np.empty_like(values)
        kernels.quantize(values, payload, rounding(seed))
        kernels.dequantize(payload, decoded)
        return decoded

    return code


def hivemind(name: str) -> Codec:
    """Return the hivemind codec of this class name, as a function that encodes and decodes a vector. The function
    decodes with the codec's codebook, because hivemind's `extract` fails with numpy 2.4 and newer."""
    import hivemind.compression

    codec: Any = getattr(hivemind.compression, name)()

    def code(values: FloatArray, seed: int) -> FloatArray:
        indices, codebook = codec.quantize(torch.from_numpy(values.copy()))
        decoded: FloatArray = np.asarray(codebook, np.float32)[np.asarray(indices)]
        return decoded

    return code


def cast(dtype: torch.dtype) -> Codec:
    def code(values: FloatArray, seed: int) -> FloatArray:
        decoded: FloatArray = torch.from_numpy(values).to(dtype).float().numpy()
        return decoded

    return code


def codecs() -> dict[str, tuple[float, Codec]]:
    """Return each compared codec with its bits per value, by the name of its row in the table."""
    rows: dict[str, tuple[float, Codec]] = {}
    for format in kernels.FORMATS.values():
        bits = 8 * format.block_bytes / format.block_values
        rows[f"{format}"] = bits, ours(format, lambda seed: kernels.NEAREST)
        if format.is_stochastic:
            rows[f"{format}, stochastic"] = bits, ours(format, kernels.stochastic)
    rows["torch bf16"] = 16.0, cast(torch.bfloat16)
    rows["torch fp16"] = 16.0, cast(torch.float16)
    rows["hivemind Uniform8Bit"] = 8.0, hivemind("Uniform8BitQuantization")
    rows["hivemind Quantile8Bit"] = 8.0, hivemind("Quantile8BitQuantization")
    return rows


def relative_error(exact: npt.NDArray[np.float64], values: npt.NDArray[Any]) -> float:
    return float(np.linalg.norm(values - exact) / np.linalg.norm(exact))


def figures(vectors: Sequence[FloatArray], code: Codec) -> tuple[float, float, float]:
    """Return three measures of a codec: the relative error of the first decoded vector, the cosine between this vector
    and the exact one, and the relative error of the decoded average."""
    decoded = [code(vector, seed).astype(np.float64) for seed, vector in enumerate(vectors)]
    exact = [vector.astype(np.float64) for vector in vectors]
    cosine = float(decoded[0] @ exact[0] / np.linalg.norm(decoded[0]) / np.linalg.norm(exact[0]))
    average = code(np.mean(decoded, axis=0).astype(np.float32), len(vectors))
    return relative_error(exact[0], decoded[0]), cosine, relative_error(np.mean(exact, axis=0), average)


def measure(config: RunConfig, outer_steps: int) -> list[dict[str, Any]]:
    real, noise = train_pseudo_gradients(config, outer_steps), heavy_tails()
    rows = []
    for name, (bits, code) in codecs().items():
        error, cosine, average = figures(real, code)
        tail_error, tail_cosine, tail_average = figures(noise, code)
        rows.append(
            {
                "codec": name,
                "bits/value": bits,
                "error": error,
                "cosine": cosine,
                "error of average": average,
                "t3: error": tail_error,
                "t3: cosine": tail_cosine,
                "t3: error of average": tail_average,
            }
        )
    return rows


@click.command(help=__doc__)
@click.option("--run", "run", type=click.Path(exists=True, path_type=Path), default=Path("opendiloco/demo.toml"))
@click.option("--outer-steps", default=4, show_default=True, help="Outer steps up to the measured pseudo-gradients.")
@json_option
def main(run: Path, outer_steps: int, json_file: Path | None) -> None:
    torch.set_num_threads(1)
    rows = measure(RunConfig.from_toml(run), outer_steps)
    by_name = {row["codec"]: row for row in rows}
    uniform, int8 = by_name["hivemind Uniform8Bit"], by_name["int8"]
    bars = [
        Bar("hivemind Uniform8Bit's error / int8's", uniform["error"] / int8["error"], 1.5),
        Bar("the same on heavy tails", uniform["t3: error"] / int8["t3: error"], 5.0),
        Bar("int8's cosine", int8["cosine"], 0.9999),
    ]
    report(f"accuracy: {run}, {outer_steps} outer steps, {WORKERS} workers", rows, bars, json_file)


if __name__ == "__main__":
    main()
