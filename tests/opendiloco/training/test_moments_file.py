"""A machine's own moments in a file: whichever the optimizer, and however many workers share the model."""

from __future__ import annotations

import asyncio
import json
import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.distributed as dist
from pydantic import TypeAdapter
from safetensors.numpy import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from opendiloco.config.optimizers import InnerOptimizerSection
from opendiloco.config.run_config import RunConfig
from opendiloco.data.tokenizer import ByteTokenizer
from opendiloco.data.training_data import load_data
from opendiloco.model.build import build_skeleton
from opendiloco.model.layout import Parameter
from opendiloco.model.parameters import local_part, trainable
from opendiloco.storage.checkpointer import Checkpointer
from opendiloco.storage.files import moments_name
from opendiloco.storage.loading import check_moments_file, newest_moments
from opendiloco.storage.run_folder import RunFolder
from opendiloco.storage.writer import KeepingPlan, _finish
from opendiloco.training import inner
from opendiloco.training.inner import LONG_AGO, ModelReplica
from opendiloco.training.moments_file import digest_place, header_of
from opendiloco.training.team import Team, shard_model
from opendiloco.volunteer.volunteer import _recall_moments
from opendiloco.workers.group import WorkerGroup
from opendiloco.workers.options import WorkerOptions
from opendiloco.workers.supervisor import Supervisor
from peers.values.leases import SampleRange
from peers.values.system import PARTIAL
from peers.values.workload import InnerLoop, SnapshotError
from tests.opendiloco.storage.frozen_states import RUN, frozen
from tests.opendiloco.training.test_inner import make_replica
from tests.opendiloco.training.test_optimizers import KINDS

LEASE, NEXT = (SampleRange(0, 24),), (SampleRange(24, 30),)
PEER = "PeerA"
CPU = torch.device("cpu")


def with_optimizer(content: dict[str, Any], values: dict[str, Any]) -> RunConfig:
    adapter: TypeAdapter[InnerOptimizerSection] = TypeAdapter(InnerOptimizerSection)
    section = adapter.validate_python({"learning_rate": 0.01} | values)
    return RunConfig.from_manifest_content(content | {"inner_optimizer": section.model_dump(mode="json")})


@pytest.mark.parametrize("name", ["a", "ab", "a" * 7, "ü"])
def test_values_begin_where_any_reader_can_map_them(name: str) -> None:
    """safetensors has its header end at a multiple of eight bytes."""
    header = header_of([Parameter(name, (2, 3), 5)], {"format": "pt"})
    assert len(header) % 8 == 0
    assert len(header) - 8 == int.from_bytes(header[:8], "little")
    assert json.loads(header[8:])[name] == {"dtype": "F32", "shape": [2, 3], "data_offsets": [20, 44]}


def keep(replica: ModelReplica, folder: Path, index: int = 6) -> Path:
    """Write a whole file, as workers and the process after them do."""
    path = folder / moments_name(index, PEER)
    replica.keep_moments(path.with_name(path.name + PARTIAL), RUN, index)()
    _finish(path, None)
    return path


def weights(replica: ModelReplica) -> bytes:
    flat = np.empty(replica.layout.size, np.float32)
    replica.store(flat)
    return flat.tobytes()


def trained(config: RunConfig) -> tuple[ModelReplica, Any]:
    replica, theta = make_replica(config)
    replica.train(theta, 0, LEASE, 12)
    return replica, theta


@pytest.fixture(scope="module")
def kept(small_config: RunConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return keep(trained(small_config)[0], tmp_path_factory.mktemp("kept"))


# Whichever optimizer -------------------------------------------------------------------------------------------------
NAMES = ["Adadelta", "Adafactor", "Adagrad", "Adam", "Adamax", "AdamW", "ASGD", "RAdam", "RMSprop", "Rprop"]
OF_TORCH = [*KINDS, *({"kind": "torch", "name": name} for name in NAMES)]


@pytest.mark.parametrize("values", OF_TORCH, ids=lambda values: values.get("name", values["kind"]))
def test_who_goes_on_with_its_own_takes_the_same_steps_bit_for_bit(
    small_content: dict[str, Any], tmp_path: Path, values: dict[str, Any]
) -> None:
    config = with_optimizer(small_content, values)
    replica, theta = trained(config)
    path = keep(replica, tmp_path)
    check_moments_file(path)
    again, _ = make_replica(config)
    again.recall_moments(path, RUN)
    assert weights(again) != weights(replica), "the file has no weights"
    for each in (replica, again):
        each.train(theta, 6, NEXT, 3)
    assert weights(again) == weights(replica)
    fresh, _ = make_replica(config)
    fresh.train(theta, 6, NEXT, 3)
    assert weights(fresh) != weights(replica)


def test_it_is_a_safetensors_file_with_a_tensor_for_each_moment(small_config: RunConfig, kept: Path) -> None:
    tensors = load_file(kept)
    replica, _ = trained(small_config)
    for name, parameter in trainable(replica.model).items():
        for key, value in replica._optimizer.state[parameter].items():
            assert np.array_equal(tensors[f"{name}/{key}"], value.numpy())


def test_a_rewarmup_goes_on_where_it_was_and_begins_anew_after_long(small_config: RunConfig, tmp_path: Path) -> None:
    replica, theta = make_replica(small_config)
    replica.train(theta, 5, LEASE, 3)
    path = keep(replica, tmp_path, index=6)
    for index, expected in ((6, 4), (6 + LONG_AGO, 4), (7 + LONG_AGO, 1)):
        again, _ = make_replica(small_config)
        again.recall_moments(path, RUN)
        again.train(theta, index, NEXT, 1)
        assert again._warmed_up == expected


def test_where_another_worker_cannot_read_them_all_begin_anew(
    small_config: RunConfig, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With smaller steps again where they join in the middle."""
    theta = make_replica(small_config)[1]
    forgetful, fresh = (make_replica(small_config)[0] for _ in range(2))
    forgetful.train(theta, 3, LEASE, 2)
    monkeypatch.setattr(forgetful._team, "smallest", lambda has_read: 0)
    forgetful.recall_moments(kept, RUN)
    for replica in (forgetful, fresh):
        replica.train(theta, 6, NEXT, 3)
    assert weights(forgetful) == weights(fresh)
    assert forgetful.learning_rate == fresh.learning_rate


def test_who_has_made_no_step_keeps_nothing(small_config: RunConfig, tmp_path: Path) -> None:
    replica, _ = make_replica(small_config)
    with pytest.raises(SnapshotError, match="has not made a step"):
        replica.keep_moments(tmp_path / "file", RUN, 3)
    assert list(tmp_path.iterdir()) == []


def test_a_file_has_the_moments_of_when_they_were_kept_whenever_it_is_written(
    small_config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training goes on in between, also to the next file. Where memory has no room for a copy, the file is there at
    once, with the same bits."""
    replica, theta = trained(small_config)
    free, names, writes = [2**40], ("first", "second"), list[Callable[[], None]]()
    monkeypatch.setattr(inner, "available_memory", lambda: free[0])
    for name in names:
        writes.append(replica.keep_moments(tmp_path / name, RUN, 6))
        free[0] = 0
        replica.keep_moments(tmp_path / f"{name} at once", RUN, 6)
        free[0] = 2**40
        replica.train(theta, 6, NEXT, 3)
    assert {path.name for path in tmp_path.iterdir()} == {"first at once", "second at once"}
    for write in reversed(writes):
        write()
    files = [(tmp_path / name).read_bytes() for name in names]
    assert files == [(tmp_path / f"{name} at once").read_bytes() for name in names]
    assert files[0] != files[1]


# However many workers ------------------------------------------------------------------------------------------------
@pytest.fixture
def fake_teams() -> Iterator[Callable[[int], Team]]:
    """Makes a worker of three whose fellows are not there."""

    def one_of_three(rank: int) -> Team:
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("fake", rank=rank, world_size=3, store=FakeStore())
        return Team(CPU, rank, 3, init_device_mesh("cpu", (3,)))

    yield one_of_three
    if dist.is_initialized():
        dist.destroy_process_group()


SHARDABLE = [values for values in KINDS if values["kind"] != "adafactor"]


@pytest.mark.parametrize("values", SHARDABLE, ids=lambda values: values.get("name", values["kind"]))
def test_three_workers_read_and_write_what_one_does(
    small_content: dict[str, Any], tmp_path: Path, fake_teams: Callable[[int], Team], values: dict[str, Any]
) -> None:
    """From one worker's file to three, and from those to the same file again."""
    config = with_optimizer(small_content, values)
    replica, _ = trained(config)
    path, partial = keep(replica, tmp_path), tmp_path / "again"
    whole = {name: replica._optimizer.state[p] for name, p in trainable(replica.model).items()}
    samples = load_data(config, ByteTokenizer()).samples
    for rank in (2, 0, 1):
        team, model = fake_teams(rank), build_skeleton(config, ByteTokenizer())
        shard_model(model, team, config.training)
        part = ModelReplica(config, model, samples, team)
        part.recall_moments(path, RUN)
        for name, parameter in trainable(model).items():
            for key, value in part._optimizer.state[parameter].items():
                expected = whole[name][key]
                if expected.ndim:
                    expected = expected.chunk(3)[rank] if rank < len(expected.chunk(3)) else expected[:0]
                assert torch.equal(local_part(value), expected), (name, key)
        part.keep_moments(partial, RUN, 6)()
    place = digest_place(path.read_bytes())
    first, second = bytearray(path.read_bytes()), bytearray(partial.read_bytes())
    first[place : place + 64] = second[place : place + 64] = b"0" * 64
    assert first == second


# What is not let in --------------------------------------------------------------------------------------------------
def test_one_of_another_run_or_optimizer_is_not_taken(
    small_content: dict[str, Any], small_config: RunConfig, kept: Path
) -> None:
    replica, _ = make_replica(small_config)
    with pytest.raises(SnapshotError, match=r"its run is 'tiny-a+', not 'another'"):
        replica.recall_moments(kept, "another")
    other, _ = make_replica(with_optimizer(small_content, {"learning_rate": 0.02}))
    with pytest.raises(SnapshotError, match="its optimizer is "):
        other.recall_moments(kept, RUN)
    model = small_content["model"]["config"] | {"num_hidden_layers": 0}
    smaller, _ = make_replica(RunConfig.from_manifest_content(small_content | {"model": {"config": model}}))
    with pytest.raises(SnapshotError, match="which no parameter here can have"):
        smaller.recall_moments(kept, RUN)
    for each in (replica, other, smaller):
        assert not each._optimizer.state


@pytest.mark.parametrize(
    ("place", "bytes_there", "said"),
    [
        (0, b"\xff" * 8, "does not begin like"),
        (9, b"\xff", "no safetensors header"),
        (-4, b"\x01\x02\x03\x04", "do not match its digest"),
        (-4, b"\0\0\xc0\x7f", "NaN or infinity"),
    ],
)
def test_damage_is_seen(kept: Path, tmp_path: Path, place: int, bytes_there: bytes, said: str) -> None:
    data = bytearray(kept.read_bytes())
    data[place : place + len(bytes_there) or None] = bytes_there
    (tmp_path / kept.name).write_bytes(data)
    with pytest.raises(SnapshotError, match=said):
        check_moments_file(tmp_path / kept.name)
    (tmp_path / kept.name).write_bytes(kept.read_bytes()[:-4])
    with pytest.raises(SnapshotError, match=r"has \d+ bytes instead of"):
        check_moments_file(tmp_path / kept.name)


def test_a_header_that_we_would_not_write_is_refused(kept: Path, tmp_path: Path) -> None:
    data = kept.read_bytes()
    length = int.from_bytes(data[:8], "little")
    content = json.loads(data[8 : 8 + length])
    first = next(name for name in content if name != "__metadata__")
    content[first]["data_offsets"] = [0, 2**40]
    text = json.dumps(content).encode()
    (tmp_path / "file").write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
    with pytest.raises(SnapshotError, match="a header that diloco-peer does not write"):
        check_moments_file(tmp_path / "file")


# Beside the checkpoints ----------------------------------------------------------------------------------------------
class Workers:
    """Workers whose moments are a replica's."""

    def __init__(self, replica: ModelReplica) -> None:
        self.kept_moments: tuple[Path, str] | None = None
        self._replica = replica
        self.recalled: list[Path] = []

    async def keep_moments(self, path: Path, run: str, index: int) -> None:
        self._replica.keep_moments(path, run, index)()

    async def recall_moments(self, path: Path, run: str) -> None:
        self._replica.recall_moments(path, run)
        self.recalled.append(path)


def checkpoint(plan: KeepingPlan, workers: Workers, *indices: int) -> list[str]:
    """The files that are there once these checkpoints are written."""

    async def main() -> None:
        async with Checkpointer(plan) as checkpointer:
            checkpointer.workers = cast(Supervisor, workers)
            for index in indices:
                checkpointer.take(frozen(index))
                await checkpointer.idle()

    asyncio.run(main())
    return sorted(path.name for path in plan.checkpoints.iterdir())


def plan(base: Path, **more: Any) -> KeepingPlan:
    return KeepingPlan(base / RUN / PEER, **more)


def test_the_newest_lies_beside_the_checkpoints_and_at_the_remote_if_asked_for(
    small_config: RunConfig, tmp_path: Path
) -> None:
    workers = Workers(trained(small_config)[0])
    chosen = plan(tmp_path, keep_newest=2, remote=str(tmp_path / "remote"))
    files = checkpoint(chosen, workers, 3, 4, 5)
    steps = ["outer-step-000004.safetensors", "outer-step-000005.safetensors"]
    assert files == sorted([*steps, moments_name(5, PEER)])
    assert newest_moments(chosen.checkpoints, PEER) == chosen.checkpoints / moments_name(5, PEER)
    assert newest_moments(chosen.checkpoints, "PeerB") is None
    assert workers.kept_moments == (chosen.checkpoints / moments_name(5, PEER), RUN)
    assert sorted(path.name for path in (tmp_path / "remote" / RUN).iterdir()) == steps
    (tmp_path / "remote" / RUN / moments_name(9, "PeerB")).touch()
    checkpoint(replace(chosen, moments="remote"), workers, 6, 7)
    at_remote = sorted(path.name for path in (tmp_path / "remote" / RUN).glob("*moments*"))
    assert at_remote == [moments_name(7, PEER), moments_name(9, "PeerB")], "another peer's is not ours to remove"
    assert moments_name(8, PEER) not in checkpoint(replace(chosen, moments="none"), workers, 8)


def test_moments_that_cannot_be_had_leave_the_checkpoint_and_no_partial_file(
    small_config: RunConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A machine that has joined and not trained has none yet, which is nothing to act on."""
    workers, chosen = Workers(make_replica(small_config)[0]), plan(tmp_path)
    with caplog.at_level(logging.INFO):
        assert checkpoint(chosen, workers, 3) == ["outer-step-000003.safetensors"]
    told = {record.getMessage(): record.levelname for record in caplog.records}
    told = {text: level for text, level in told.items() if not text.startswith("the checkpoint")}
    assert told == {
        "no optimizer moments are saved after outer step 3: its inner optimizer has not made a step": "INFO"
    }
    assert workers.kept_moments is None


def test_who_finishes_the_file_starts_without_what_is_slow_to_import() -> None:
    code = "import sys, opendiloco.storage.writer; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "numpy", "pydantic", "asyncio", "fsspec", "hivemind"} & set(done.stdout.split())


def test_a_machine_that_comes_back_goes_on_with_them_and_says_so(
    small_config: RunConfig, kept: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    replica, _ = make_replica(small_config)
    workers, folder = Workers(replica), RunFolder(tmp_path / RUN / PEER)
    folder.checkpoints.mkdir(parents=True)

    def come_back() -> str:
        caplog.clear()
        with caplog.at_level(logging.INFO):
            asyncio.run(_recall_moments(folder, cast(Supervisor, workers)))
        return caplog.text

    assert "there are no moments beside the checkpoints: the inner optimizer begins anew" in come_back()
    (folder.checkpoints / kept.name).write_bytes(kept.read_bytes()[:-1])
    assert "so the inner optimizer begins anew, with smaller steps at first: " in come_back()
    assert workers.recalled == []
    (folder.checkpoints / kept.name).write_bytes(kept.read_bytes())
    assert f"the inner optimizer continues with the moments loaded from {kept.name}" in come_back()
    assert workers.recalled == [folder.checkpoints / kept.name]


@pytest.mark.thorough
@pytest.mark.swarm
def test_workers_in_the_place_of_lost_ones_go_on_with_what_was_kept(
    small_config: RunConfig,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    options = WorkerOptions(device="cpu", cpu_workers=2, restarts=2)
    path = tmp_path / moments_name(6, PEER)

    async def main() -> None:
        group = await WorkerGroup.start(small_config, options)
        try:
            await group.run_inner_loop(InnerLoop(0, LEASE, 12, 0), lambda progress: None)
            await group.supervisor.keep_moments(path.with_name(path.name + PARTIAL), RUN, 6)
            await asyncio.to_thread(_finish, path, None)
            group.supervisor.kept_moments = path, RUN
            group.supervisor.workers[-1].kill()
            await group.evaluate(2)
            await group.supervisor.keep_moments(tmp_path / "again", RUN, 6)
        finally:
            await group.close()

    with caplog.at_level(logging.INFO):
        asyncio.run(main())
    assert f"the inner optimizer continues with the moments in {path}" in caplog.text
    check_moments_file(path)
    before, after = load_file(path), load_file(tmp_path / "again")
    assert before.keys() == after.keys()
    assert all(np.array_equal(before[name], after[name]) for name in before)
