"""The model from a checkpoint, with no network: by the command that people type."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from transformers import AutoModelForCausalLM

from opendiloco import checkpoint_export
from opendiloco.checkpoint_export import find_checkpoint, find_run_of
from opendiloco.checkpoint_files import file_name
from opendiloco.checkpoint_writer import write_checkpoint
from opendiloco.checkpoints import metadata_of
from opendiloco.cli.group import main
from opendiloco.config import RunConfig
from opendiloco.model import build_model
from opendiloco.run import Run
from opendiloco.run_folder import RunFolder
from opendiloco.tokenizer import ByteTokenizer
from peers.identity import Identity
from peers.workload import SnapshotError
from tests.opendiloco.frozen_states import FrozenState, frozen


@dataclass(frozen=True)
class Kept:
    """A run's folder with checkpoints after 5 and 10 outer steps; that after 15 is damaged."""

    run: Run
    folder: RunFolder
    states: dict[int, FrozenState]


@pytest.fixture(scope="module")
def kept(small_config: RunConfig, tmp_path_factory: pytest.TempPathFactory) -> Kept:
    run = Run.sign(small_config, Identity.generate())
    folder = RunFolder.open(run, "PeerA", tmp_path_factory.mktemp("state"))
    size = sum(parameter.numel() for parameter in build_model(small_config, ByteTokenizer()).parameters())
    states = {index: frozen(index, size, run.run_id) for index in (5, 10, 15)}
    for index, state in states.items():
        path, metadata = folder.checkpoints / file_name(index), metadata_of(run.run_id, state.last, state.state_digest)
        write_checkpoint(path, state.memory.descriptor, state.memory.data.nbytes, metadata)
    damaged = folder.checkpoints / file_name(15)
    damaged.write_bytes(damaged.read_bytes()[:-1])
    return Kept(run, folder, states)


def export(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["export", *map(str, arguments)])


def values_of(folder: Path) -> torch.Tensor:
    """All of a model's parameters, one after another."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def theta_of(state: FrozenState) -> torch.Tensor:
    return torch.frombuffer(bytearray(state.memory.data), dtype=torch.float32).reshape(2, -1)[1]


def test_the_model_at_an_index_is_written_and_pushed(kept: Kept, tmp_path: Path) -> None:
    out, there = tmp_path / "model", f"file://{tmp_path}/there"
    done = export("--from", kept.folder.checkpoints, "--at", 5, "--out", out, "--push-to", there)
    assert done.exit_code == 0, done.output
    assert f"the model after 5 outer steps and 80 tokens is in {out} and {there}" in done.output
    for folder in (out, tmp_path / "there"):
        assert torch.equal(values_of(folder), theta_of(kept.states[5]))
        assert f"`{kept.run.run_id}`" in (folder / "README.md").read_text()


def test_without_an_index_it_is_the_newest_good_one(kept: Kept) -> None:
    for source in (kept.folder.path, kept.folder.checkpoints):
        assert find_run_of(source) == kept.run
        assert find_checkpoint(source, kept.run).state == kept.states[10].memory.data
    one = kept.folder.checkpoints / file_name(5)
    assert find_run_of(one) == kept.run
    assert find_checkpoint(one, kept.run).index == 5


def test_a_state_of_another_model(kept: Kept, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Workload:
        async def restore(self, state: memoryview, state_digest: bytes) -> None:
            raise SnapshotError("it is not the state with that digest")

    @asynccontextmanager
    async def working(run: Run) -> AsyncIterator[Workload]:
        yield Workload()

    monkeypatch.setattr(checkpoint_export, "working", working)
    done = export("--from", kept.folder.path, "--at", 5, "--out", tmp_path / "model")
    assert done.exit_code == 9
    assert f"{file_name(5)} is not of this run" in done.output
    assert not (tmp_path / "model").exists()


def test_what_is_not_there(kept: Kept, tmp_path: Path) -> None:
    out = ("--out", tmp_path / "model")
    one = kept.folder.checkpoints / file_name(5)
    for arguments, code, said in (
        (("--from", kept.folder.path, "--at", 6), 9, "no checkpoint after 6 outer steps. Choose one"),
        (("--from", kept.folder.path, "--at", 15), 9, f"{file_name(15)} has "),
        (("--from", kept.folder.checkpoints / file_name(15)), 9, "bytes instead of"),
        (("--from", one, "--at", 10), 9, "is the state after 5 outer steps, not after 10"),
        (("--from", tmp_path), 3, "there is no run.manifest beside"),
        (("--from", tmp_path, "--manifest", kept.folder.manifest), 9, "has no good checkpoint"),
        (("--from", tmp_path, "--manifest", one), 3, "not a manifest"),
        (("--from", tmp_path / "missing"), 9, "does not exist"),
        (("--from", kept.folder.path, "--push-to", "nonsense://there"), 10, "Protocol not known"),
    ):
        done = export(*arguments, *out)
        assert (done.exit_code, said in done.output) == (code, True), done.output
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "either --run or --from"),
        (("--run", "tiny", "--from", "."), "either --run or --from"),
        (("--run", "tiny", "--at", "3"), "--from"),
        (("--from", "."), "--out, --push-to or both"),
    ],
)
def test_options_that_do_not_go_together(arguments: tuple[str, ...], said: str) -> None:
    done = export(*arguments)
    assert done.exit_code == 2
    assert said in done.output
