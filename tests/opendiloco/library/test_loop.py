"""What one's own loop begins with, and how it ends. (tests/examples has it in a swarm.)"""

from __future__ import annotations

import asyncio
import copy
import signal
import threading
import warnings
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from opendiloco.config.run_config import RunConfig, StreamingSection
from opendiloco.data.ahead import AheadTokenizer
from opendiloco.data.sample_order import numbers_of
from opendiloco.data.tokenizer import ByteTokenizer
from opendiloco.data.training_data import load_data
from opendiloco.errors import DataError, LoopError, MachineError
from opendiloco.evaluation_turns import HeldOut
from opendiloco.library import DiLoCo
from opendiloco.library import swarm as swarm_module
from opendiloco.library.loop import CyclePlan
from opendiloco.library.model import LoopReplica, check_own_model, initial_weights
from opendiloco.library.ranks import Ranks
from opendiloco.library.swarm import Joined, LoopWorker
from opendiloco.model.build import build_model, initial_theta
from opendiloco.model.layout import Layout
from opendiloco.model.parameters import layout_of
from opendiloco.run import Run
from opendiloco.shared_memory import SharedVectors
from opendiloco.training.reference import Reference
from opendiloco.volunteer.identity import hold_identity
from peers.errors import InUseError, ManifestError
from peers.presence.heartbeat import PeerState
from peers.values.identity import Identity
from peers.values.leases import SampleRange
from peers.values.manifest import Invite, SignedManifest
from peers.values.workload import InnerLoop
from tests.opendiloco.config.test_data import sharded
from tests.opendiloco.conftest import InterruptedWhenItDies
from tests.opendiloco.library.test_swarm import new_run, new_worker
from tests.peers.heartbeats import beat
from tests.peers.logs import LOG


@pytest.fixture
def layout(small_config: RunConfig) -> Layout:
    return layout_of(build_model(small_config, ByteTokenizer()))


def renamed(layout: Layout) -> list[tuple[str, tuple[int, ...]]]:
    return [(f"transformer.{place.name}", place.shape) for place in layout]


def test_a_model_of_the_same_shapes_begins_with_the_runs_weights(small_config: RunConfig, layout: Layout) -> None:
    own, vectors = initial_weights(small_config, Layout(renamed(layout)))
    assert [(place.name, place.shape) for place in own] == renamed(layout)
    assert np.array_equal(vectors.theta, initial_theta(small_config))


def test_another_model_is_refused_by_its_first_difference(small_config: RunConfig, layout: Layout) -> None:
    places = renamed(layout)
    name, shape = places[1]
    with pytest.raises(ManifestError, match=rf"parameter {name} has the shape \({shape[0]}, 3\)"):
        initial_weights(small_config, Layout([places[0], (name, (shape[0], 3)), *places[2:]]))
    with pytest.raises(ManifestError, match=f"the run's has {layout.size}"):
        initial_weights(small_config, Layout(places[:-1]))


def test_weights_that_differ_from_the_organisers_are_refused(small_content: dict[str, Any], layout: Layout) -> None:
    model = small_content["model"] | {"digest": "ab" * 32}
    with pytest.raises(MachineError, match="initial weights have the digest abab"):
        initial_weights(RunConfig.from_manifest_content(small_content | {"model": model}), layout)


@pytest.fixture
def _process_group_ends() -> Iterator[None]:
    yield
    dist.destroy_process_group()


def begin_process_group(kind: str) -> None:
    if kind == "alone":
        dist.init_process_group("gloo", rank=0, world_size=1, store=HashStore())
    else:
        dist.init_process_group("fake", rank=1, world_size=2, store=FakeStore())


def test_what_steps_no_torch_optimizer_is_refused_before_anything_is_joined() -> None:
    """Regression: it joined, and raised AttributeError in the middle of the first outer step."""
    with pytest.raises(LoopError, match=r"the inner optimizer is a SimpleNamespace, not one of torch\.optim"):
        DiLoCo(torch.nn.Linear(3, 2), SimpleNamespace(step=print), "tiny-1")  # type: ignore[arg-type]


def test_an_optimizer_of_another_model_is_refused_before_anything_is_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: a whole run learned nothing. An optimizer of a part is fine: a loop may have two."""
    monkeypatch.setattr(Invite, "parse", lambda text: Invite("tiny-1", ()))
    model = torch.nn.Linear(3, 2)
    others = torch.optim.SGD(copy.deepcopy(model).parameters())
    with pytest.raises(LoopError, match="optimizer has none of the model's trainable parameters") as caught:
        DiLoCo(model, others, run="diloco:tiny-1")
    assert "parameters of this model" in caught.value.remedy
    DiLoCo(model, torch.optim.SGD([model.bias]), run="diloco:tiny-1")


def test_the_key_may_be_given_as_its_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Regression: a path raised AttributeError after the first contact with the swarm."""
    monkeypatch.setattr(Invite, "parse", lambda text: Invite("tiny-1", ()))
    model, file, peers = torch.nn.Linear(3, 2), tmp_path / "me.pem", list[str]()

    async def begin(thread: swarm_module.SwarmThread) -> None:
        peers.append(thread.identity.peer_id)
        raise LoopError("seen enough.", "")

    monkeypatch.setattr(swarm_module.SwarmThread, "_begin", begin)

    def error_with(identity: Identity | Path | str) -> BaseException | None:
        swarm = DiLoCo(model, torch.optim.SGD(model.parameters()), run="diloco:tiny-1", identity=identity)._swarm
        swarm.run()
        return swarm.joined.exception()

    for identity in (file, str(file), Identity.load_or_create(file)):
        assert isinstance(error_with(identity), LoopError)
    assert peers == 3 * [Identity.load(file).peer_id]
    with hold_identity(file):
        assert isinstance(error_with(file), InUseError), "two peers would sign with one key"


def test_a_model_in_a_type_that_cannot_be_trained_is_refused_in_one_line() -> None:
    model = torch.nn.Linear(3, 2).to(torch.float8_e4m3fn)
    with pytest.raises(LoopError, match="parameter weight is float8_e4m3fn") as caught:
        DiLoCo(model, torch.optim.SGD(model.parameters()), run="diloco:x")
    assert "float32" in caught.value.remedy
    assert "\n" not in str(caught.value)
    model.requires_grad_(False)  # theta does not have it
    check_own_model(model)
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        check_own_model(torch.nn.Linear(3, 2).to(dtype))


@pytest.mark.usefixtures("_process_group_ends")
def test_a_model_that_some_of_the_processes_share_is_refused() -> None:
    begin_process_group("of two")
    model = torch.nn.Linear(3, 2)
    check_own_model(model)
    fully_shard(model, mesh=DeviceMesh("cpu", [1]))
    with pytest.raises(LoopError, match=r"parameter weight is shared by 1 of 2 processes") as caught:
        check_own_model(model)
    assert "FSDP2" in caught.value.remedy


@pytest.mark.usefixtures("_process_group_ends")
def test_shards_of_fsdp2_are_taken_and_those_of_fsdp_are_not() -> None:
    begin_process_group("alone")
    check_own_model(DistributedDataParallel(torch.nn.Linear(3, 2)))
    sharded = torch.nn.Linear(3, 2)
    fully_shard(sharded, mesh=init_device_mesh("cpu", (1,)))
    check_own_model(sharded)
    flat = torch.nn.Sequential(FullyShardedDataParallel(torch.nn.Linear(3, 2), device_id=torch.device("cpu")))
    with pytest.raises(LoopError, match="the model is wrapped in FSDP") as caught:
        check_own_model(flat)
    assert "fully_shard" in caught.value.remedy
    with pytest.raises(LoopError, match="has no memory"):
        check_own_model(torch.nn.Linear(3, 2, device="meta"))


def loop_of_its_own(monkeypatch: pytest.MonkeyPatch, **options: Any) -> DiLoCo:
    monkeypatch.setattr(Invite, "parse", lambda text: Invite("tiny-1", ()))
    model = torch.nn.Linear(3, 2)
    return DiLoCo(model, torch.optim.SGD(model.parameters()), run="diloco:tiny-1", **options)


def test_a_folder_may_be_a_text_and_must_exist_before_anything_is_joined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: a text raised AttributeError after joining."""
    for data in (str(tmp_path), tmp_path, [str(tmp_path)], [tmp_path]):
        assert loop_of_its_own(monkeypatch, data=data)._text.folders == [tmp_path]
    with pytest.raises(DataError, match=r"data: there is no 'texts'.* data=\[FOLDER\]"):
        loop_of_its_own(monkeypatch, data="texts")


def test_a_loop_outside_of_its_with_block_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: most methods raised AttributeError, and the learning rate's factor was 0."""
    loop = loop_of_its_own(monkeypatch)
    for use in (
        loop.batches,
        lambda: loop.report(1.0),
        lambda: loop.track("tensorboard:x"),
        lambda: loop.learning_rate_factor,
    ):
        with pytest.raises(LoopError, match="Use it in a with block"):
            use()


def test_an_interrupt_while_it_joins_leaves_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, closed = loop_of_its_own(monkeypatch), threading.Event()
    connecting = threading.Event()

    @asynccontextmanager
    async def connected(*arguments: object) -> AsyncIterator[None]:
        connecting.set()
        try:
            await asyncio.Event().wait()
            yield
        finally:
            closed.set()

    def interrupt() -> None:
        assert connecting.wait(30)
        raise KeyboardInterrupt

    monkeypatch.setattr(swarm_module, "connected", connected)
    monkeypatch.setattr(loop._swarm.joined, "result", interrupt)
    with pytest.raises(KeyboardInterrupt):
        loop.__enter__()
    assert closed.is_set()
    assert not loop._swarm.is_alive()


@pytest.mark.parametrize("when", ["waits for its first outer step", "says that it leaves", "leaves"])
def test_an_interrupt_in_the_run_leaves_no_thread(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = loop_of_its_own(monkeypatch)

    def interrupt() -> None:
        raise KeyboardInterrupt

    async def take_part() -> None:
        leave = interrupt if "says" in when else lambda: None
        loop._swarm.joined.set_result(Joined(new_run(), new_worker(), leave))
        await asyncio.Event().wait()

    monkeypatch.setattr(loop._swarm, "_take_part", take_part)
    monkeypatch.setattr(loop, "_begin_outer_step", interrupt if "waits" in when else lambda: None)
    if "waits" in when:
        with pytest.raises(KeyboardInterrupt):
            loop.__enter__()
    else:
        loop.__enter__()
        join, calls = loop._swarm.join, list[None]()

        def join_or_interrupt() -> None:
            calls.append(None)
            if len(calls) == 1 and "says" not in when:
                raise KeyboardInterrupt
            join(30)

        monkeypatch.setattr(loop._swarm, "join", join_or_interrupt)
        with pytest.raises(KeyboardInterrupt):
            loop.__exit__(None, None, None)
    assert not loop._swarm.is_alive()


def test_a_loop_that_has_ended_without_a_word_leaves_the_run(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    looked, left = list[None](), list[None]()
    monkeypatch.setattr(swarm_module, "LOOK_SECONDS", 0.0)

    class Leaving:
        def leave(self) -> None:
            left.append(None)

    def is_abandoned() -> bool:
        assert not left
        looked.append(None)
        return len(looked) == 3

    loop = loop_of_its_own(monkeypatch, is_abandoned=is_abandoned)
    asyncio.run(asyncio.wait_for(loop._swarm._leave_when_abandoned(Leaving()), 30))  # type: ignore[arg-type]
    assert (len(looked), len(left)) == (3, 1)
    assert "ended without leaving the run" in caplog.text


@pytest.mark.parametrize(("trained", "counted"), [(5120, 0), (5120, 640), (0, 0)])
def test_a_loop_that_trained_in_vain_is_told_so(trained: int, counted: int, caplog: pytest.LogCaptureFixture) -> None:
    """Regression: a loop printed falling losses to the end, and no entry of the run counted any of its work."""
    swarm_module.warn_if_in_vain("tiny-1", trained, counted)
    is_in_vain = trained > 0 and counted == 0
    assert ("run tiny-1 counted none of the 5,120 tokens that this loop trained" in caplog.text) == is_in_vain


@pytest.mark.parametrize(
    ("state", "index", "is_told"),
    [(PeerState.ARCHIVING, 8, False), (PeerState.TRAINING, 8, False), (PeerState.TRAINING, 1, True)],
)
def test_a_loop_that_has_the_only_copy_is_told_so(
    state: PeerState, index: int, is_told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Regression: of two loops, one took all outer steps alone and left; the run went on from its first, in silence."""
    swarm_module.warn_if_only_copy([beat("other", LOG, state, index=index)], 8)
    assert ("hears no other machine that has outer step 8" in caplog.text) == is_told


def test_a_loop_in_a_run_that_is_over_is_warned_that_it_trains_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Regression: it yielded no batch, without a word."""
    loop = loop_of_its_own(monkeypatch)
    worker = worker_of(loop)
    worker.run_is_over(4)

    async def take_part() -> None:
        loop._swarm.joined.set_result(Joined(new_run(), worker, lambda: None))

    monkeypatch.setattr(loop._swarm, "_take_part", take_part)
    with loop:
        assert loop.finished
    assert caplog.text.count("is over (4 outer steps): nothing is trained; the model has its final weights") == 1


@pytest.mark.parametrize("asked", ["inner step", "batch"])
@pytest.mark.usefixtures("_handler_of_python", "_lost_in_silence")
def test_an_interrupt_that_python_has_lost_ends_the_loop_at_its_next_step(
    asked: str, small_config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = loop_of_its_own(monkeypatch)
    loop._text.folders = (Path(small_config.data.source or ""),)
    run = Run.sign(small_config, Identity.generate())
    left = asyncio.Event()

    async def take_part() -> None:
        call = asyncio.get_running_loop().call_soon_threadsafe

        def leave() -> None:
            call(left.set)

        loop._swarm.joined.set_result(Joined(run, new_worker(), leave))
        await left.wait()

    def begin_outer_step() -> None:
        work = InnerLoop(0, (SampleRange(0, 64),), 10, 0)
        at(loop, work, 0)

    monkeypatch.setattr(loop._swarm, "_take_part", take_part)
    monkeypatch.setattr(loop, "_begin_outer_step", begin_outer_step)
    with loop:
        batches = loop.batches()
        next(batches)
        InterruptedWhenItDies()
        with pytest.raises(KeyboardInterrupt):
            next(batches) if asked == "batch" else loop._inner_optimizer.step()
    assert not loop._swarm.is_alive()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.usefixtures("_handler_of_python")
def test_a_loop_that_does_not_join_leaves_the_former_handler(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = loop_of_its_own(monkeypatch)

    async def take_part() -> None:
        raise ManifestError("no such run.")

    monkeypatch.setattr(loop._swarm, "_take_part", take_part)
    with pytest.raises(ManifestError):
        loop.__enter__()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_what_keeps_it_from_joining_is_raised_and_leaves_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = loop_of_its_own(monkeypatch)

    @asynccontextmanager
    async def connected(*arguments: object) -> AsyncIterator[None]:
        raise ManifestError("no such run.")
        yield

    monkeypatch.setattr(swarm_module, "connected", connected)
    with pytest.raises(ManifestError, match="no such run"):
        loop.__enter__()
    assert not loop._swarm.is_alive()


def evaluate(loop: DiLoCo) -> HeldOut | None:
    return loop._text.evaluate(loop.run, loop._worker, loop._replica)


def worker_of(loop: DiLoCo) -> LoopWorker:
    """With weights of zeros."""
    layout = layout_of(loop._model)
    loop._replica = LoopReplica(loop._model, layout, Ranks())
    return LoopWorker(SharedVectors.create(layout.size), layout, 10, torch.device("cpu"))


def loop_that_may_evaluate(config: RunConfig, monkeypatch: pytest.MonkeyPatch, **options: Any) -> DiLoCo:
    """It has joined, and its model is a run's."""
    model = build_model(config, ByteTokenizer())
    monkeypatch.setattr(Invite, "parse", lambda text: Invite("tiny-1", ()))
    loop = DiLoCo(model, torch.optim.SGD(model.parameters()), run="diloco:tiny-1", **options)
    layout, vectors = initial_weights(config, layout_of(model))
    worker = LoopWorker(vectors, layout, 10, torch.device("cpu"))
    loop._replica = LoopReplica(model, layout, Ranks())
    loop.run = Run.sign(config, Identity.generate())
    loop._swarm.joined.set_result(Joined(loop.run, worker, lambda: None))
    with torch.no_grad():
        model.lm_head.weight.zero_()  # theta is what counts
    return loop


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("reads", ["the run's text", "text of its own"])
def test_a_loop_evaluates_theta_as_everybody_does(
    small_config: RunConfig, mode: str, reads: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that trains on text of its own, as the Trainer does."""
    folders = [Path(small_config.data.all_sources[0].source)] if reads == "text of its own" else []
    loop = loop_that_may_evaluate(small_config, monkeypatch, data=folders)
    model = loop._model.train(mode == "train")
    if reads == "the run's text":
        monkeypatch.setattr(Run, "with_data", lambda run, folders: run)
        loop._text.opened = load_data(small_config, ByteTokenizer())
    found = evaluate(loop)
    assert found is not None
    assert found.loss == pytest.approx(Reference(small_config).held_out_loss(), rel=1e-5)
    assert found.is_runs_text == (reads == "the run's text"), "nobody can tell of a folder of its own"
    text = loop._text.opened
    assert evaluate(loop) == found
    assert loop._text.opened is text, "it is read once"
    assert model.training == (mode == "train")
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_loop_that_cannot_or_is_not_to_read_the_runs_text_takes_no_turns(
    small_config: RunConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    without = loop_that_may_evaluate(small_config, monkeypatch)  # the run's text is in a folder of its organiser
    assert [evaluate(without) for _ in range(3)] == [None] * 3
    assert caplog.text.count("does not evaluate theta any more") == 1
    folder = Path(small_config.data.all_sources[0].source)
    unwilling = loop_that_may_evaluate(small_config, monkeypatch, data=[folder], evaluates=False)
    assert evaluate(unwilling) is None
    assert unwilling._text.opened is None


def test_text_that_cannot_be_read_is_an_error_where_batches_are_asked_for(
    small_config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: the first batch raised it."""
    with pytest.raises(DataError, match="may mean files on this machine"):
        loop_that_may_evaluate(small_config, monkeypatch).batches()


def test_a_loss_is_reported_without_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it comes from the model, with its gradient."""
    loop = loop_of_its_own(monkeypatch)
    loop.run = new_run()
    with warnings.catch_warnings(action="error"):
        loop.report(torch.tensor(1.5, requires_grad=True))
    assert loop._loss == 1.5


def at(loop: DiLoCo, work: InnerLoop, steps_done: int) -> None:
    """Have a loop be after so many inner steps."""
    loop._work = work
    loop._cycle = CyclePlan(1, StreamingSection())
    loop._cycle.begin(work.steps, goes_on=False, is_last=False)
    loop._cycle.steps_done = steps_done


def test_a_loop_has_the_next_shard_tokenized_as_a_worker_does(
    small_content: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shards that its lease visits, and then the one after it; by a process that ends with the iterator."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    source, _ = sharded(tmp_path)
    data = {"sources": [source], "held_out": 0.2}
    config = RunConfig.from_manifest_content(small_content | {"data": data})
    foreseen, asked, closed = list[tuple[int, int]](), list[tuple[int, int]](), list[AheadTokenizer]()
    samples = load_data(config, ByteTokenizer(), None, lambda *wanted: foreseen.append(wanted)).samples
    monkeypatch.setattr(AheadTokenizer, "tokenize", lambda ahead, *wanted: asked.append(wanted))
    monkeypatch.setattr(AheadTokenizer, "close", lambda ahead: closed.append(ahead))
    loop = loop_of_its_own(monkeypatch)
    worker = worker_of(loop)
    loop.run = Run.sign(config, Identity.generate())
    loop._swarm.joined.set_result(Joined(loop.run, worker, lambda: None))
    lease = (SampleRange(0, 2), SampleRange(60, 64))
    loop._text.folders = (tmp_path / "text",)
    numbers, batches = numbers_of(lease), loop.batches()
    samples.expect(numbers)
    for steps_done in range(3):
        at(loop, InnerLoop(0, lease, 3, 0), steps_done)
        assert np.array_equal(next(batches).numpy(), samples.read(numbers[2 * steps_done : 2 * steps_done + 2]))
    assert asked == foreseen
    assert len(set(asked)) == 2, "the lease's second shard, and the one after the lease"
    loop._work = None
    assert not closed
    assert next(batches, None) is None
    assert len(closed) == 1
    at(loop, InnerLoop(0, lease, 3, 0), 0)
    batches = loop.batches()
    next(batches)
    monkeypatch.setattr(loop._swarm, "join", lambda: None)
    loop.__exit__(None, None, None)
    assert len(set(closed)) == 2, "also of an iterator that outlives its loop"


def test_a_model_that_is_called_in_another_way_leaves_its_turns_out(
    small_config: RunConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    loop = loop_of_its_own(monkeypatch)
    run = Run.sign(small_config, Identity.generate())
    worker = worker_of(loop)
    loop.run = run
    loop._swarm.joined.set_result(Joined(run, worker, lambda: None))
    loop._text.opened = load_data(small_config, ByteTokenizer())
    assert evaluate(loop) is None
    assert "does not evaluate theta any more" in caplog.text


class Unseen:
    """Stands where the network does: it finds the run, and fails where more than that is asked of it."""

    def __init__(self, run: Run) -> None:
        self._run = run

    async def find_manifest(self, run_id: str) -> SignedManifest:
        return self._run.manifest


@pytest.mark.parametrize("refused", ["another model", "weights of another digest", "two folders for one source"])
def test_what_is_refused_is_refused_before_any_peer_has_seen_it(
    refused: str, small_content: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checks that need the run's manifest come before its members are told anything."""
    content = copy.deepcopy(small_content)
    if refused == "weights of another digest":
        content["model"]["digest"] = "ab" * 32
    run = Run.sign(RunConfig.from_manifest_content(content), Identity.generate())

    @asynccontextmanager
    async def connected(*arguments: object) -> AsyncIterator[Unseen]:
        yield Unseen(run)

    monkeypatch.setattr(swarm_module, "connected", connected)
    monkeypatch.setattr(Invite, "parse", lambda text: Invite(run.run_id, ("/ip4/192.0.2.1/tcp/1",)))
    model = torch.nn.Linear(3, 2) if refused == "another model" else build_model(run.config, ByteTokenizer())
    data = [tmp_path, tmp_path] if refused == "two folders for one source" else []
    loop = DiLoCo(model, torch.optim.SGD(model.parameters()), run="diloco:small-1", data=data)
    with pytest.raises((ManifestError, MachineError, DataError)):
        loop.__enter__()
    assert not loop._swarm.is_alive()
