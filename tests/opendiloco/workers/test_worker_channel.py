"""A worker's end of the control channel: what it hears while it trains, and what it does between inner steps."""

from __future__ import annotations

import gc
import queue
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.numpy import load_file

from opendiloco.config.run_config import RunConfig
from opendiloco.model.build import initial_theta
from opendiloco.shared_memory import create_memory_file, reserve
from opendiloco.training import optimizers
from opendiloco.training.inner import InnerStep, ReplicaTrained
from opendiloco.training.moments_file import NO_STEP
from opendiloco.training.team import Team
from opendiloco.workers.control import (
    ControlMessage,
    CountDevices,
    EndInnerLoop,
    Hold,
    InnerLoopDone,
    KeepMoments,
    MomentsMoved,
    RecallMoments,
    Reply,
    RunInnerLoop,
)
from opendiloco.workers.worker import COLLECTED_EVERY, ControlChannel, InnerLoops, Worker
from peers.values.leases import SampleRange
from tests.opendiloco.workers.configuring import configure


class Pair:
    """A channel, and the peer process's end of it."""

    def __init__(self) -> None:
        self._ours, theirs = socket.socketpair()
        self.channel = ControlChannel(theirs)
        self.channel.start()

    def close(self) -> None:
        """The peer process is gone."""
        self._ours.close()

    def tell(self, *messages: ControlMessage) -> None:
        """Returns once the channel has heard all of them."""
        for message in (*messages, CountDevices()):
            self._ours.sendall(message.line())
        self.channel.commands.get(timeout=60)


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    ends = queue.SimpleQueue[int]()
    monkeypatch.setattr("opendiloco.workers.worker.os._exit", ends.put)
    pair = Pair()
    yield pair
    pair.close()
    assert ends.get(timeout=60) == 0  # or the thread would end the tests, once `_exit` is the real one again


def test_a_training_is_held_until_the_pause_is_over(pair: Pair) -> None:
    assert not pair.channel.is_held(1)
    pair.tell(Hold(held=True))
    assert pair.channel.is_held(1)
    pair.tell(Hold(held=False))
    assert not pair.channel.is_held(1)


def test_a_training_that_is_to_end_is_not_held(pair: Pair) -> None:
    pair.tell(Hold(held=True), EndInnerLoop(number=1))
    assert not pair.channel.is_held(1)
    assert pair.channel.is_held(2)


class Steps:
    """Inner steps of no replica, of which some change nothing. Fails after the last one if so wanted."""

    planned, planned_tokens, planned_samples = 2 * COLLECTED_EVERY + 7, 64, (SampleRange(0, 4),)
    trained = ReplicaTrained(planned_samples, planned_tokens, 2.0, planned, 1.0, 0, 0.0)

    def __init__(self, fails: bool) -> None:
        self.fails, self.taken = fails, 0

    def every(self) -> Iterator[InnerStep]:
        for number in range(1, self.planned + 1):
            assert not gc.isenabled()
            self.taken = number
            yield InnerStep(number, float("nan") if number == COLLECTED_EVERY else 2.0, 1.0, number)
        if self.fails:
            raise ArithmeticError


@pytest.mark.parametrize("fails", [False, True])
def test_garbage_is_collected_after_the_same_inner_steps_on_all_workers(
    small_config: RunConfig, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That is also so where such a step changed nothing. In training Python does not collect by itself."""
    steps, collected = Steps(fails), list[int]()
    layout = SimpleNamespace(fragments=(slice(0, 1),))
    replica: Any = SimpleNamespace(
        layout=layout, learning_rate=0.1, inner_steps=lambda *arguments: steps, store=lambda *arguments: None
    )
    vectors: Any = SimpleNamespace(theta=None, local=None)
    channel: Any = SimpleNamespace(stopped_number=0, is_held=lambda number: False, send=lambda message: None)
    loops = InnerLoops(small_config, replica, Team(torch.device("cpu")), vectors, channel, lambda: None)
    monkeypatch.setattr(gc, "collect", lambda: collected.append(steps.taken))
    command = RunInnerLoop(number=1, index=0, samples=steps.planned_samples, steps=steps.planned, tokens=0)
    if fails:
        with pytest.raises(ArithmeticError):
            loops.run(command)
    else:
        loops.run(command)
    assert collected == [COLLECTED_EVERY, 2 * COLLECTED_EVERY]
    assert gc.isenabled()


def test_a_worker_trains_while_its_moments_are_written(
    small_config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The peer process is told when the file is there, or what is wrong with it; the worker can go on with it then."""
    created, may_write, disk_is_full = optimizers._created, threading.Event(), threading.Event()

    def created_later(*arguments: Any) -> Any:
        assert may_write.wait(60)
        if disk_is_full.is_set():
            raise OSError("no space left on device")
        return created(*arguments)

    monkeypatch.setattr(optimizers, "_created", created_later)
    memory, (ours, theirs) = create_memory_file(), socket.socketpair()
    reserve(memory, initial_theta(small_config).size)
    command = configure(small_config, memory, micro_batch=2)
    worker, replies = Worker(command, ControlChannel(theirs)), map(Reply.parse, ours.makefile("rb"))

    def train(number: int) -> None:
        training = RunInnerLoop(number=number, index=number, samples=(SampleRange(0, 8),), steps=4, tokens=0)
        assert isinstance(worker.carry_out(training), InnerLoopDone)

    def keep(name: str) -> ControlMessage | None:
        return worker.carry_out(KeepMoments(path=str(tmp_path / name), run="run", index=1))

    def moved() -> MomentsMoved:
        return next(reply for reply in replies if isinstance(reply, MomentsMoved))

    assert keep("too early") == MomentsMoved(problem=NO_STEP)
    train(1)
    assert keep("first") is None
    train(2)
    assert keep("second") is None
    train(3)
    assert list(tmp_path.iterdir()) == []
    may_write.set()
    assert [moved(), moved()] == [MomentsMoved()] * 2
    steps = [
        {float(values) for name, values in load_file(tmp_path / file).items() if name.endswith("/step")}
        for file in ("first", "second")
    ]
    assert steps == [{4.0}, {8.0}]
    assert worker.carry_out(RecallMoments(path=str(tmp_path / "first"), run="run")) == MomentsMoved()
    assert keep("recalled") is None
    assert moved() == MomentsMoved()
    assert (tmp_path / "recalled").read_bytes() == (tmp_path / "first").read_bytes()
    disk_is_full.set()
    assert keep("third") is None
    assert moved() == MomentsMoved(problem="no space left on device")
    train(4)
