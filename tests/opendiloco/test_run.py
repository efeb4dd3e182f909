"""A run's two sides come from one manifest."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from click.testing import CliRunner

from opendiloco.cli import main
from opendiloco.cli.run import _with_held_out_text_named
from opendiloco.config.run_config import RunConfig
from opendiloco.errors import DataError
from opendiloco.model.export import Dtype, RunFacts
from opendiloco.run import Run, find_run
from opendiloco.storage.loading import Checkpoint
from opendiloco.storage.run_folder import RunFolder
from opendiloco.volunteer.local_workload import NO_TEXT
from opendiloco.volunteer.states import History, StateSource, with_text
from peers.errors import ManifestError, SwarmUnreachableError
from peers.log.header import Header
from peers.network.transport import HivemindTransport
from peers.values.identity import Identity
from peers.values.manifest import Invite, SignedManifest

FACTS = RunFacts(run_id="a", manifest_digest="00", outer_steps=3, tokens=1, peers=1, held_out_loss=1.0)


async def export_state(*arguments: object) -> RunFacts:
    """Write nothing."""
    return FACTS


def after_outer_steps(number: int) -> Header:
    """Return the last of so many entries, of which nothing but their number is asked."""
    return cast(Header, SimpleNamespace(index=number - 1))


class Network:
    def __init__(self, manifest: SignedManifest | None) -> None:
        self._manifest = manifest

    def learn(self, manifest: SignedManifest) -> None:
        """It knows nobody."""

    async def find_manifest(self, run_id: str) -> SignedManifest | None:
        return self._manifest


def network(manifest: SignedManifest | None) -> HivemindTransport:
    return cast(HivemindTransport, Network(manifest))


def test_what_the_protocol_gets(small_config: RunConfig) -> None:
    run = Run.sign(small_config, Identity.generate())
    settings = run.settings
    assert settings.run == run.run_id
    assert settings.manifest_digest == run.manifest.digest
    assert (settings.inner_steps, settings.samples_per_lease) == (4, 8)
    assert settings.tokens_per_sample == small_config.training.sequence_length
    assert settings.exclusion == small_config.rounds.exclusion == 1000
    assert settings.timing.heartbeat == small_config.rounds.heartbeat_seconds
    assert settings.timing.partition_grace == small_config.rounds.partition_grace_seconds


def test_a_volunteers_folder_changes_what_is_read_and_nothing_else(small_config: RunConfig, tmp_path: Path) -> None:
    run = Run.sign(small_config, Identity.generate())
    here = run.with_data([tmp_path])
    assert here.config.data == small_config.data.model_copy(update={"source": str(tmp_path)})
    assert here.config.training == small_config.training
    assert (here.manifest, here.settings) == (run.manifest, run.settings)
    with pytest.raises(DataError, match=r"data\.source"):
        run.with_data()  # its source is a folder


def test_the_network_gives_it_back(small_config: RunConfig) -> None:
    run = Run.sign(small_config, Identity.generate())
    assert asyncio.run(find_run(network(run.manifest), run.run_id)) == run


def test_a_remembered_manifest_needs_nobody(small_config: RunConfig) -> None:
    run = Run.sign(small_config, Identity.generate())
    assert asyncio.run(find_run(network(None), run.run_id, run.manifest)) == run
    other = Run.sign(small_config, Identity.generate())
    assert asyncio.run(find_run(network(other.manifest), other.run_id, run.manifest)) == other


def test_an_unknown_run() -> None:
    with pytest.raises(SwarmUnreachableError, match="knows the run small-x"):
        asyncio.run(find_run(network(None), "small-x"))


def test_a_manifest_that_is_no_run() -> None:
    manifest = SignedManifest.create(Identity.generate(), "small", {"name": "small"})
    with pytest.raises(ManifestError, match="training: is missing"):
        asyncio.run(find_run(network(manifest), manifest.run_id))


@pytest.mark.parametrize(
    ("source", "digest", "folders", "has_runs_text"),
    [
        ("stdlib", None, 0, True),
        ("stdlib", None, 1, False),  # a folder in the place of the run's only source
        ("./texts", None, 1, False),  # the run has each volunteer name one, and nothing says that they are the same
        ("./texts", "ab" * 32, 1, True),
        ("allenai/c4", "ab" * 32, 1, True),  # the digest says whether it is the same text
    ],
)
def test_text_in_the_place_of_the_runs_is_not_the_runs(
    small_config: RunConfig, source: str, digest: str | None, folders: int, has_runs_text: bool, tmp_path: Path
) -> None:
    data = small_config.data.model_copy(update={"source": source})
    evaluation = small_config.evaluation.model_copy(update={"digest": digest})
    config = small_config.model_copy(update={"data": data, "evaluation": evaluation})
    run = Run.sign(config, Identity.generate()).with_data([tmp_path] * folders)
    assert run.has_runs_text == has_runs_text


def test_the_organiser_is_warned_where_no_curve_can_come_of_it(
    small_config: RunConfig, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    data = small_config.data.model_copy(update={"source": str(tmp_path / "elsewhere")})
    config = small_config.model_copy(update={"data": data})
    assert _with_held_out_text_named(config) == config
    assert "volunteers will not publish held-out losses" in caplog.text
    caplog.clear()
    known = config.model_copy(update={"data": data.model_copy(update={"digest": "ab" * 32})})
    assert _with_held_out_text_named(known) == known
    assert not caplog.text


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Run, str]]:
    """The runs of which a model is exported, and the command that its card names; no worker starts."""
    seen = list[tuple[Run, str]]()
    past = History(cast(Header, SimpleNamespace(index=2)))

    @asynccontextmanager
    async def state_of(origin: StateSource, data: tuple[Path, ...]) -> AsyncIterator[tuple[Run, History, None]]:
        yield origin.run.with_data(data), past, None

    @asynccontextmanager
    async def newest_state(invite: Invite, *options: object) -> AsyncIterator[tuple[Run, History, None]]:
        manifest = SimpleNamespace(is_by_invitation=invite.run_id.startswith("invited"))
        yield cast(Run, SimpleNamespace(run_id=invite.run_id, manifest=manifest)), past, None

    async def export_state(
        run: Run, past: History, workload: None, folder: Path, command: str, dtype: Dtype
    ) -> RunFacts:
        seen.append((run, command))
        return RunFacts(run_id="a", manifest_digest="00", outer_steps=3, tokens=1, peers=1, held_out_loss=1.0)

    monkeypatch.setattr("opendiloco.volunteer.states.state_of", state_of)
    monkeypatch.setattr("opendiloco.volunteer.states.newest_state", newest_state)
    monkeypatch.setattr("opendiloco.volunteer.states.export_state", export_state)
    return seen


def test_export_evaluates_on_the_folder_that_it_is_given(
    small_config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exported: list[tuple[Run, str]]
) -> None:
    origin = StateSource(Run.sign(small_config, Identity.generate()), cast(Checkpoint, None), 3, RunFolder(tmp_path))
    monkeypatch.setattr("opendiloco.volunteer.states.find_origin", lambda *_: origin)
    (tmp_path / "texts").mkdir()
    arguments = ["export", "--from", str(tmp_path), "--out", str(tmp_path / "out")]
    assert with_text(origin.run, ()) == (origin.run, NO_TEXT), "it opens a folder that only the manifest names"
    assert CliRunner().invoke(main, [*arguments, "--data", str(tmp_path / "texts")]).exit_code == 0
    [(run, command)] = exported
    assert run.config.data.source == str(tmp_path / "texts")
    assert not run.has_runs_text
    assert command == "diloco-peer export --from FOLDER --at 3 --data TEXTS --out model"


@pytest.mark.parametrize(
    ("given", "options"),
    [
        ([], ""),
        (["--dtype", "bfloat16"], " --dtype bfloat16"),
        (["--data", ".", "--data", ".", "--model", "."], " --data TEXTS --data TEXTS --model PATH"),
    ],
)
@pytest.mark.parametrize(("name", "key"), [("open", ""), ("invited", " --identity KEY")])
def test_the_card_names_commands_that_make_the_model_again(
    small_config: RunConfig,
    tmp_path: Path,
    exported: list[tuple[Run, str]],
    given: list[str],
    options: str,
    name: str,
    key: str,
) -> None:
    """Regression: there was no address in the command, so that it could not be used, no outer step, no text, and no
    key for a run by invitation."""
    run_id = Run.sign(small_config.model_copy(update={"name": name}), Identity.generate()).run_id
    where = ["--initial-peer", f"/ip4/192.0.2.2/tcp/1/p2p/{Identity.generate().peer_id}"]
    done = CliRunner().invoke(main, ["export", "--run", run_id, *where, "--out", str(tmp_path / "out"), *given])
    assert done.exit_code == 0, done.output
    assert [command for _, command in exported] == [
        f"diloco-peer export --run {run_id} --initial-peer ADDRESS{key}{options} --out model"
        "  # while outer step 3 is the newest\n"
        f"diloco-peer export --from FOLDER --at 3{options} --out model"
    ]
