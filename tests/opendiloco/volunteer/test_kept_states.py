"""The model from checkpoints and the log, with no network: by the command that people type."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result
from transformers import AutoModelForCausalLM

from opendiloco.cli.group import main
from opendiloco.config.run_config import RunConfig
from opendiloco.data.tokenizer import ByteTokenizer
from opendiloco.errors import CheckpointError, DataError
from opendiloco.model.build import build_model
from opendiloco.run import Run
from opendiloco.storage.files import file_header, file_name
from opendiloco.storage.loading import metadata_of
from opendiloco.storage.run_folder import HeldOutCurve, RunFolder
from opendiloco.volunteer.local_workload import LocalWorkload
from opendiloco.volunteer.states import History, find_origin
from opendiloco.workers.options import WorkerOptions
from peers.errors import SwarmUnreachableError
from peers.log.folder import LogFolder, RunLog
from peers.values.identity import Identity
from tests.opendiloco.training.recorded_run import BLOCK_BYTES, RecordedRun, amendment, record
from tests.opendiloco.volunteer.test_local_workload import StateOnly

ENTRIES = 6


@dataclass(frozen=True)
class Kept:
    """A peer's folder with checkpoints after 1, 3 and 5 outer steps, the last of them damaged, and a log of 6 entries
    without the payloads of the first."""

    recorded: RecordedRun
    folder: RunFolder

    @property
    def text(self) -> str:
        return self.recorded.run.config.data.all_sources[0].source

    def checkpoint(self, index: int) -> Path:
        return self.folder.checkpoints / file_name(index)


@pytest.fixture(scope="module")
def kept(small_config: RunConfig, tmp_path_factory: pytest.TempPathFactory) -> Kept:
    run = Run.sign(small_config, Identity.generate())
    size = sum(parameter.numel() for parameter in build_model(small_config, ByteTokenizer()).parameters())
    kept = Kept(
        record(run, np.ones(size, np.float32), ENTRIES), RunFolder.open(run, "PeerA", tmp_path_factory.mktemp("state"))
    )
    log = LogFolder.open(kept.folder.log, run.settings.empty_log, BLOCK_BYTES)
    kept.recorded.fill(log)
    log.prune(1)
    for index in (1, 3, 5):
        state = kept.recorded.states[index]
        metadata = metadata_of(run.run_id, state.last, state.state_digest)
        kept.checkpoint(index).write_bytes(file_header(len(state.data), metadata) + state.data)
    curve = HeldOutCurve(kept.folder.held_out)
    for index, loss in ((2, 5.5), (5, 5.25)):
        curve.add(index, loss)
    kept.checkpoint(5).write_bytes(kept.checkpoint(5).read_bytes()[:-1])
    return kept


def export(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["export", *map(str, arguments)])


@pytest.mark.swarm
def test_a_sample_of_a_checkpoint(kept: Kept, tmp_path: Path) -> None:
    """The prompt comes first, and nothing but text is on the standard output. None of the run's text is needed."""
    arguments = [
        "--from",
        str(kept.folder.path),
        "--tokens",
        "5",
        "--samples",
        "2",
        "--temperature",
        "2",
        "peers ",
    ]
    elsewhere = Path(kept.text).rename(tmp_path / "text")
    try:
        done = CliRunner().invoke(main, ["sample", *arguments])
    finally:
        elsewhere.rename(kept.text)
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("peers ")
    assert done.stdout.count("peers ") == 2
    assert "after 6 outer steps" in done.stderr


def test_text_that_the_manifest_names_is_not_opened(
    kept: Kept, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    options = list[WorkerOptions]()

    @asynccontextmanager
    async def working(run: Run, chosen: WorkerOptions) -> AsyncIterator[None]:
        options.append(chosen)
        raise DataError("no worker is started")
        yield

    monkeypatch.setattr("opendiloco.volunteer.states.working", working)
    done = export("--out", "model", "--from", kept.folder.path)
    assert "no worker is started" in done.output
    assert [chosen.reads for chosen in options] == [False]
    assert "with --data to measure it" in done.output
    assert not list(tmp_path.iterdir())


def test_the_history_names_the_amendments_that_were_in_force(small_config: RunConfig) -> None:
    """Regression: the model card gave the manifest's values, though the organiser had changed them."""
    organiser = Identity.generate()
    run = Run.sign(small_config, organiser)
    amendments = {
        entry: amendment(run, number, organiser, outer_learning_rate=rate)
        for number, (entry, rate) in enumerate([(1, 0.3), (3, 0.2), (5, 0.1)], 1)
    }
    recorded = record(run, np.ones(8, np.float32), ENTRIES, amendments=amendments)
    whole, only_last = RunLog(run.settings.empty_log, BLOCK_BYTES), RunLog(run.settings.empty_log, BLOCK_BYTES)
    recorded.fill(whole)
    first, second, third = (f"amendment {number} (outer learning rate 0.{4 - number})" for number in (1, 2, 3))
    assert History.of(whole, recorded.headers[5], {}).amendments == (
        f"after outer step 2: {first}",
        f"after outer step 4: {second}",
    ), "the third was in force in no outer step of this state"
    by = "by outer step 6: "
    assert History.of(only_last, recorded.headers[5], {}).amendments == (by + first, by + second, by + third)
    assert History.of(whole, recorded.headers[1], {}).amendments == ()


def values_of(folder: Path) -> torch.Tensor:
    """All of a model's parameters, one after another."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@pytest.mark.thorough
@pytest.mark.swarm
def test_the_model_between_two_checkpoints_is_written_and_pushed(kept: Kept, tmp_path: Path) -> None:
    out, there = tmp_path / "model", f"file://{tmp_path}/there"
    before = {path: path.stat().st_mtime_ns for path in kept.folder.path.rglob("*")}
    done = export("--from", kept.folder.path, "--at", 4, "--data", kept.text, "--out", out, "--push-to", there)
    assert done.exit_code == 0, done.output
    tokens = f"{kept.recorded.headers[3].lineage_tokens:,}"
    card = (out / "README.md").read_text()
    assert "diloco-peer export --from FOLDER --at 4 --data TEXTS --out model" in card
    assert "Here `FOLDER` is a volunteer's" in card
    assert "| peers that contributed | 2 |" in card
    assert "| 2 | 512 | 5.5000 |" in card
    assert "| 5 |" not in card
    assert str(kept.folder.path) not in card
    assert f"wrote the model after 4 outer steps and {tokens} tokens to {out} and {there}" in done.output
    theta = torch.frombuffer(bytearray(kept.recorded.states[4].data), dtype=torch.float32).reshape(2, -1)[1]
    for folder in (out, tmp_path / "there"):
        assert torch.equal(values_of(folder), theta)
        assert f"`{kept.recorded.run.run_id}`" in (folder / "README.md").read_text()
    assert before == {path: path.stat().st_mtime_ns for path in kept.folder.path.rglob("*")}


@pytest.mark.parametrize(
    ("index", "start", "end"), [(None, 3, None), (1, 1, 1), (2, 1, 2), (3, 3, 3), (5, 3, 5), (6, 3, 6)]
)
def test_where_a_model_comes_from(index: int | None, start: int, end: int, kept: Kept) -> None:
    for source in (kept.folder.path, kept.folder.checkpoints):
        origin = find_origin(source, index)
        assert (origin.run, origin.checkpoint.index, origin.index) == (kept.recorded.run, start, end)
        assert origin.folder.log == kept.folder.log
    one = find_origin(kept.checkpoint(1), index)
    assert (one.checkpoint.index, one.index) == (1, index or 1)


def test_a_folder_above_will_do_where_it_has_one_run(kept: Kept, tmp_path: Path) -> None:
    here = kept.folder.path
    for above in (here.parent, here.parent.parent):
        assert find_origin(above).folder.log == kept.folder.log
    for name in ("PeerA", "PeerB"):
        (tmp_path / "run" / name).mkdir(parents=True)
        shutil.copy(kept.folder.manifest, tmp_path / "run" / name)
    with pytest.raises(CheckpointError, match=r"has 2 runs or peers. Choose one: .*PeerA, .*PeerB"):
        find_origin(tmp_path)


def test_a_checkpoint_alone_will_do(kept: Kept, tmp_path: Path) -> None:
    shutil.copy(kept.checkpoint(3), tmp_path / "renamed.safetensors")
    origin = find_origin(tmp_path / "renamed.safetensors", manifest=kept.folder.manifest)
    assert (origin.run, origin.index) == (kept.recorded.run, 3)
    assert origin.checkpoint.data == kept.recorded.states[3].data


def test_what_is_not_there(kept: Kept, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, here, alone = ("--out", tmp_path / "model"), kept.folder.path, tmp_path / "alone"
    alone.mkdir()
    shutil.copy(kept.checkpoint(3), alone)
    manifest = ("--manifest", kept.folder.manifest)
    for arguments, code, said in (
        (
            ("--from", here, "--at", 0),
            9,
            "no good checkpoint after 0 outer steps or fewer. Available outer steps: 5, 3, 1",
        ),
        (("--from", kept.checkpoint(5)), 9, "bytes instead of"),
        (("--from", kept.checkpoint(3), "--at", 1), 9, "is the state after 3 outer steps, not after 1"),
        (("--from", alone, "--at", 4, *manifest), 9, "not after 4, and there is no log"),
        (("--from", alone), 3, "there is no run.manifest in"),
        (("--from", here / "log", *manifest), 9, "has no good checkpoint. Available outer steps: none"),
        (("--from", alone, "--manifest", kept.checkpoint(3)), 3, "not a manifest"),
        (("--from", tmp_path / "missing"), 9, "does not exist"),
        (("--from", here, "--push-to", "nonsense://there"), 10, "Protocol not known"),
    ):
        done = export(*arguments, *out)
        assert (done.exit_code, said in done.output) == (code, True), done.output
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize(
    "typed",
    [
        "export --identity key.pem --data 'my texts' --data . --out other --dtype bfloat16",
        "export --model . --push-to memory://bucket/model",
        "sample --identity key.pem --tokens 7 'It says'",
        "sample --tokens 7 -- '- First'",
    ],
)
def test_a_run_that_no_peer_trains_is_taken_from_this_disk(
    typed: str, kept: Kept, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: the command in the remedy lacked options that were typed, such as --identity and --push-to."""
    command, *options = shlex.split(typed)

    @asynccontextmanager
    async def newest_state(*_: object) -> AsyncIterator[None]:
        raise SwarmUnreachableError("no peer trains.", "Ask a volunteer to join it again.")
        yield

    monkeypatch.setattr("opendiloco.volunteer.states.newest_state", newest_state)
    monkeypatch.chdir(tmp_path)
    Path("my texts").mkdir()
    run = ["--run", kept.folder.run_id, "--initial-peer", "/ip4/192.0.2.1"]
    for state in (tmp_path, kept.folder.path.parents[1]):
        monkeypatch.setattr("opendiloco.storage.run_folder.default_state_folder", lambda state=state: state)
        refused = CliRunner().invoke(main, [command, *run, *options])
        assert refused.exit_code == SwarmUnreachableError.exit_code
        named = shlex.split(refused.output.partition("has a checkpoint of the run: ")[2])
        if state == tmp_path:
            assert not named
        else:
            assert named[:4] == ["diloco-peer", command, "--from", str(kept.folder.path)]
            assert sorted(named[4:]) == sorted(options)


@pytest.mark.parametrize(("values", "said"), [(0, "leads to outer step 6 and not to 9"), (7, "is not of this run")])
def test_what_is_found_out_late_leaves_nothing(
    values: int, said: str, kept: Kept, small_config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @asynccontextmanager
    async def working(run: Run, *options: object) -> AsyncIterator[LocalWorkload]:
        yield LocalWorkload(StateOnly(values or len(kept.recorded.states[0].data) // 8), run.config)

    monkeypatch.setattr("opendiloco.volunteer.states.working", working)
    done = export("--from", kept.folder.path, "--at", 9, "--data", kept.text, "--out", tmp_path / "model")
    assert (done.exit_code, said in done.output) == (9, True), done.output
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
