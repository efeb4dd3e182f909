"""transformers' Trainer as a peer that leaves, however its training ends. (tests/examples has it in a swarm.)"""

from __future__ import annotations

import asyncio
import importlib.util
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from opendiloco.config.run_config import RunConfig
from opendiloco.data.tokenizer import ByteTokenizer
from opendiloco.library import DiLoCo, DiLoCoCallback
from opendiloco.library import loop as loop_module
from opendiloco.library import swarm as swarm_module
from opendiloco.library import trainer as trainer_module
from opendiloco.library.swarm import Joined, SwarmThread
from opendiloco.library.trainer import _Call
from opendiloco.model.build import build_model
from peers.values.leases import SampleRange
from peers.values.manifest import Invite
from tests.opendiloco.library.played_swarm import playing
from tests.opendiloco.library.test_swarm import new_run, new_worker

pytestmark = pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="the Trainer needs accelerate")


class JoinedLoop:
    """Stands where DiLoCo does."""

    def __init__(self, *arguments: Any, is_abandoned: Callable[[], bool]) -> None:
        self.is_abandoned = is_abandoned
        self.finished = False
        self.seen = list[str]()
        made.append(self)

    def __enter__(self) -> JoinedLoop:
        self.seen.append("enter")
        return self

    def __exit__(self, *error: object) -> None:
        self.seen.append("exit")

    def report(self, loss: float) -> None:
        pass


made: list[JoinedLoop] = []


@pytest.fixture(autouse=True)
def _joined(monkeypatch: pytest.MonkeyPatch) -> None:
    made.clear()
    monkeypatch.setattr(trainer_module, "DiLoCo", JoinedLoop)


def in_another_thread(question: Callable[[], bool]) -> bool:
    answers = list[bool]()
    thread = threading.Thread(target=lambda: answers.append(question()))
    thread.start()
    thread.join()
    return answers[0]


def trainer_of(folder: Path, callback: DiLoCoCallback, watch: Callable[[], None]) -> Any:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(2, 1)

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": (self.layer(x) - labels).square().mean()}

    class Watching(TrainerCallback):
        def on_step_end(self, *arguments: Any, **values: Any) -> None:
            watch()

    quiet: dict[str, Any] = {"save_strategy": "no", "report_to": "none", "disable_tqdm": True, "use_cpu": True}
    arguments = TrainingArguments(str(folder), max_steps=3, **quiet)
    samples: Any = [{"x": torch.ones(2), "labels": torch.zeros(1)}] * 8
    return Trainer(Model(), arguments, train_dataset=samples, callbacks=[callback, Watching()])


def test_a_trainer_that_raises_is_known_to_have_ended_and_the_next_one_begins_anew(tmp_path: Path) -> None:
    callback, seen = DiLoCoCallback("diloco:tiny-1"), list[bool]()
    failing = [True]

    def watch() -> None:
        seen.append(in_another_thread(made[-1].is_abandoned))
        if failing[0]:
            raise ValueError("out of something")

    trainer = trainer_of(tmp_path, callback, watch)
    with pytest.raises(ValueError, match="out of something"):
        trainer.train()
    assert in_another_thread(made[0].is_abandoned)
    assert made[0].seen == ["enter"]
    failing[0] = False
    trainer.train()
    assert seen == [False] * 4
    assert [one.seen for one in made] == [["enter", "exit"]] * 2


def test_a_trainer_that_raises_leaves_no_thread_in_the_swarm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The swarm's part is played by one that does nothing but to look whether the loop has been abandoned."""
    swarms = list[SwarmThread]()

    class Alone(SwarmThread):
        async def _take_part(self) -> None:
            swarms.append(self)
            left = asyncio.Event()

            class Volunteer:
                def leave(self) -> None:
                    left.set()

            volunteer: Any = Volunteer()
            watching = asyncio.create_task(self._leave_when_abandoned(volunteer))
            self.joined.set_result(Joined(new_run(), new_worker(), left.set))
            await left.wait()
            await watching

    monkeypatch.setattr(swarm_module, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(Invite, "parse", lambda text: Invite("tiny-1", ()))
    monkeypatch.setattr(trainer_module, "DiLoCo", DiLoCo)
    monkeypatch.setattr(loop_module, "SwarmThread", Alone)
    monkeypatch.setattr(DiLoCo, "_begin_outer_step", lambda loop: None)

    def fail() -> None:
        assert swarms[0].is_alive()
        raise ValueError("out of something")

    with pytest.raises(ValueError, match="out of something"):
        trainer_of(tmp_path, DiLoCoCallback("diloco:tiny-1"), fail).train()
    [swarm] = swarms
    swarm.join(60)
    assert not swarm.is_alive()


def test_a_call_is_under_way_until_it_returns_or_raises() -> None:
    import sys

    calls = list[_Call]()

    def outer(fails: bool) -> None:
        calls.append(_Call(sys._getframe()))
        assert in_another_thread(calls[-1].is_under_way)
        if fails:
            raise RuntimeError

    outer(fails=False)
    assert not in_another_thread(calls[-1].is_under_way)
    with pytest.raises(RuntimeError):
        outer(fails=True)
    assert not in_another_thread(calls[-1].is_under_way)


@pytest.mark.parametrize(("batch", "accumulated", "tokens"), [(2, 1, 128), (1, 1, 64), (1, 2, 128), (4, 2, 128)])
def test_a_trainers_effective_batch_is_what_it_claims(
    small_content: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    batch: int,
    accumulated: int,
    tokens: int,
) -> None:
    """At most the lease of each outer step, of 4 inner steps of 2 samples of 16 tokens."""
    from transformers import Trainer, TrainingArguments

    monkeypatch.setattr(trainer_module, "DiLoCo", DiLoCo)
    config = RunConfig.from_manifest_content(small_content | {"outer_steps": 2})
    arguments = TrainingArguments(
        str(tmp_path),
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=accumulated,
        num_train_epochs=1000,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    window = torch.randint(0, 256, (16,))
    windows: Any = [{"input_ids": window, "labels": window}] * 64
    callback = DiLoCoCallback("diloco:small-1", evaluates=False)
    with playing(config, [(SampleRange(0, 8),), (SampleRange(8, 16),)]) as played:
        Trainer(build_model(config, ByteTokenizer()), arguments, train_dataset=windows, callbacks=[callback]).train()
        [swarm] = played.swarms
    assert [trained.tokens for trained in swarm.trained] == [tokens, tokens]
