from __future__ import annotations

import asyncio
import math
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from opendiloco.cli.run import _with_held_out_text_named
from opendiloco.config.run_config import RunConfig
from opendiloco.data.sample_order import HeldOutWindows, Windows
from opendiloco.data.tokenizer import ByteTokenizer
from opendiloco.errors import DataError
from opendiloco.model.build import build_model
from opendiloco.shared_memory import create_memory_file
from opendiloco.training.evaluation import generate_sample, held_out_loss
from opendiloco.training.reference import Reference
from opendiloco.training.team import Team
from opendiloco.workers.control import Evaluate, Evaluated
from opendiloco.workers.group import WorkerGroup
from opendiloco.workers.worker import ControlChannel, Worker
from tests.opendiloco.workers.configuring import configure


def test_a_model_that_knows_nothing_loses_the_logarithm_of_its_vocabulary(small_config: RunConfig) -> None:
    model = build_model(small_config, ByteTokenizer())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    windows = HeldOutWindows([Windows(np.arange(163, dtype=np.uint16) % 256, sequence_length=16)])
    loss, tokens = held_out_loss(model, windows, windows=100, batch_size=3)
    assert loss == pytest.approx(math.log(259), rel=1e-6)
    assert tokens == 10 * 16


def test_few_windows_are_spread_over_the_text_and_batches_do_not_matter(small_config: RunConfig) -> None:
    model = build_model(small_config, ByteTokenizer())
    tokens_of_text = np.random.default_rng(0).integers(0, 256, 1601).astype(np.uint16)
    windows = HeldOutWindows([Windows(tokens_of_text, sequence_length=16)])
    loss, tokens = held_out_loss(model, windows, windows=7, batch_size=3)
    assert tokens == 7 * 16
    assert held_out_loss(model, windows, windows=7, batch_size=7)[0] == pytest.approx(loss, rel=1e-5)
    first_seven, _ = held_out_loss(model, HeldOutWindows([Windows(tokens_of_text[: 7 * 16 + 1], 16)]), 7, 7)
    assert first_seven != loss


@pytest.mark.parametrize("windows", [1, 2, 7])
def test_workers_share_an_evaluation_and_all_make_as_many_forward_passes(small_config: RunConfig, windows: int) -> None:
    """Some have nothing to read: they pass something through the model all the same, which counts nothing."""
    model = build_model(small_config, ByteTokenizer())
    text = np.random.default_rng(0).integers(0, 256, 1601).astype(np.uint16)
    held_out = HeldOutWindows([Windows(text, sequence_length=16)])
    told, passes = list[list[float]](), list[int]()

    class Third(Team):
        def sums(self, values: Sequence[torch.Tensor | float]) -> list[float]:
            told.append([float(value) for value in values])
            return [told[-1][0], max(told[-1][1], 1)]

    for rank in range(3):
        passes.append(0)
        hook = model.register_forward_pre_hook(lambda *_: passes.append(passes.pop() + 1))
        held_out_loss(model, held_out, windows, 2, team=Third(torch.device("cpu"), rank, 3))
        hook.remove()
    loss, tokens = held_out_loss(model, held_out, windows, 2)
    totals = [sum(column) for column in zip(*told, strict=True)]
    assert totals[1] == tokens == windows * 16
    assert totals[0] / totals[1] == pytest.approx(loss, rel=1e-6)
    assert passes == [2 if windows == 7 else 1] * 3


def test_modules_keep_their_own_modes(small_config: RunConfig) -> None:
    """Regression: a loop's frozen part was put into training mode after each evaluation."""
    model = build_model(small_config, ByteTokenizer()).train()
    model.model.norm.eval()
    before = [module.training for module in model.modules()]
    tokens = np.arange(163, dtype=np.uint16) % 256
    held_out_loss(model, HeldOutWindows([Windows(tokens, sequence_length=16)]), 2, 2)
    generate_sample(model, ByteTokenizer(), "peers", 2, seed=0)
    assert [module.training for module in model.modules()] == before
    assert len(set(before)) == 2


def test_samples_leave_out_compiled_blocks(small_config: RunConfig) -> None:
    """Regression: on a GPU each new length was compiled anew."""
    model, compiled = build_model(small_config, ByteTokenizer()), list[int]()

    def backend(graph: Any, inputs: Any) -> Any:
        compiled.append(len(inputs))
        return graph.forward

    for block in model.model.layers:
        block.forward = torch.compile(block.forward, backend=backend)
    generate_sample(model, ByteTokenizer(), "peers", 5, seed=1)
    assert not compiled
    model(torch.ones(1, 4, dtype=torch.long))
    assert compiled


def test_the_likeliest_text_needs_no_seed(small_config: RunConfig) -> None:
    model = build_model(small_config, ByteTokenizer())
    first, second = (generate_sample(model, ByteTokenizer(), "peers", 10, seed, temperature=0) for seed in (1, 2))
    assert first == second


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_one_number_for_one_theta_whoever_asks(small_content: dict[str, Any], precision: str) -> None:
    """The swarm's curve, `export`, `follow --evaluate` and the reference: the manifest's windows, in its precision."""
    content = small_content | {
        "evaluation": {"windows": 5},
        "training": small_content["training"] | {"precision": precision},
    }
    config = RunConfig.from_manifest_content(content)
    reference = Reference(config)
    loss = asyncio.run(Asked(config).held_out(config.evaluation)).loss
    assert loss == reference.held_out_loss()
    exact = Reference(RunConfig.from_manifest_content(small_content | {"evaluation": {"windows": 5}})).held_out_loss()
    assert (loss == exact) == (precision == "fp32")
    assert loss == pytest.approx(exact, rel=1e-3)


class Asked(WorkerGroup):
    """A worker in this process."""

    def __init__(self, config: RunConfig) -> None:
        channel = ControlChannel(socket.socketpair()[0])
        self._worker = Worker(configure(config, create_memory_file(), trains=False, micro_batch=2), channel)
        self.held_out_digest = self._worker.description.held_out_digest

    async def evaluate(self, windows: int) -> Evaluated:
        reply = self._worker.carry_out(Evaluate(windows=windows))
        assert isinstance(reply, Evaluated)
        return reply


def test_the_digest_is_that_of_what_is_read(small_config: RunConfig) -> None:
    tokens = np.random.default_rng(0).integers(0, 256, 1601).astype(np.uint16)
    windows = HeldOutWindows([Windows(tokens, sequence_length=16)])
    digest = windows.digest(7)
    assert digest == HeldOutWindows([Windows(tokens.astype(np.uint32), sequence_length=16)]).digest(7)
    tokens[-1] += 1  # behind the last window that is read
    assert windows.digest(7) == digest
    tokens[3] += 1
    assert (
        len({digest, windows.digest(7), windows.digest(8), HeldOutWindows([Windows(tokens, 16)], None, 0).digest(7)})
        == 4
    )


def test_a_run_names_the_held_out_text_that_is_on_the_organisers_machine(
    small_config: RunConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def with_folder(folder: Path) -> RunConfig:
        return small_config.model_copy(update={"data": small_config.data.model_copy(update={"source": str(folder)})})

    named = _with_held_out_text_named(small_config)
    assert named.evaluation.digest is not None
    assert _with_held_out_text_named(named) == named
    assert _with_held_out_text_named(with_folder(tmp_path / "nowhere")).evaluation.digest is None
    (tmp_path / "own.txt").write_text("a few words, too few")
    with pytest.raises(DataError, match="1 training windows"):
        _with_held_out_text_named(with_folder(tmp_path))
    assert "the run gets no evaluation.digest" in caplog.text
    other = named.evaluation.model_copy(update={"digest": "cd" * 32})
    with pytest.raises(DataError, match=r"evaluation\.digest = cdcd"):
        _with_held_out_text_named(named.model_copy(update={"evaluation": other}))


def test_samples_are_the_same_for_the_same_seed(small_config: RunConfig) -> None:
    model = build_model(small_config, ByteTokenizer())
    first = generate_sample(model, ByteTokenizer(), "peers", 10, seed=1)
    assert first == generate_sample(model, ByteTokenizer(), "peers", 10, seed=1)
    assert first != generate_sample(model, ByteTokenizer(), "peers", 10, seed=2)
    assert generate_sample(model, ByteTokenizer(), "", 5, seed=0)


def test_the_reference_puts_few_windows_through_its_model_at_once(small_content: dict[str, Any]) -> None:
    """A run's batch may be far more than fits: its workers take it in parts."""
    training = small_content["training"] | {"batch_size": 32}
    config = RunConfig.from_manifest_content(small_content | {"training": training, "evaluation": {"windows": 32}})
    reference, seen = Reference(config), list[int]()
    model: Any = reference._judge.model
    model.register_forward_hook(lambda module, inputs, output: seen.append(len(output.logits)))
    reference.held_out_loss()
    assert sum(seen) > max(seen)
    assert max(seen) <= 4
