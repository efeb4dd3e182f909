"""Where a machine keeps what it knows of a run."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from opendiloco.config.run_config import RunConfig
from opendiloco.errors import MachineError
from opendiloco.run import Run
from opendiloco.storage.run_folder import RunFolder, read_manifest, remembered_addresses
from peers.errors import ManifestError
from peers.network.first_contact import FILE_NAME
from peers.values.identity import Identity


@pytest.fixture
def run(small_config: RunConfig) -> Run:
    return Run.sign(small_config, Identity.generate())


def test_the_default_is_in_the_users_state(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    folder = RunFolder.open(run, "PeerA")
    assert folder.path == tmp_path / "state" / "diloco-peer" / run.run_id / "PeerA"
    assert folder.path.stat().st_mode & 0o777 == 0o700
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    folder = RunFolder.open(run, "PeerA")
    assert folder.path == tmp_path / "home" / ".local" / "state" / "diloco-peer" / run.run_id / "PeerA"


def test_what_is_in_it(run: Run, tmp_path: Path) -> None:
    for _ in range(2):  # it may be there already
        folder = RunFolder.open(run, "PeerA", tmp_path)
    assert folder.path == tmp_path / run.run_id / "PeerA"
    assert (folder.run_id, folder.peer_id) == (run.run_id, "PeerA")
    assert {path.name for path in folder.path.iterdir()} == {"checkpoints", "log", "download", "run.manifest"}
    assert read_manifest(folder.manifest) == run


def test_who_comes_back_knows_the_manifest(run: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    before = RunFolder.at(run.run_id, "PeerA", tmp_path)
    assert before.remembered_manifest() is None
    assert before.remembered_peers().addresses() == ()
    assert not caplog.records
    assert not before.path.exists()
    assert RunFolder.open(run, "PeerA", tmp_path).path == before.path
    assert before.remembered_manifest() == run.manifest
    before.manifest.write_bytes(Run.sign(run.config, Identity.generate()).manifest.pack())
    assert before.remembered_manifest() is None
    assert "does not match the run id" in caplog.text


def test_the_addresses_that_were_stored_last_come_first(run: Run, tmp_path: Path) -> None:
    """Regression: the peer id that came first in the alphabet hid all others, however old its addresses were."""
    for name, stored_at in (("Old", 1.0), ("PeerA", 3.0), ("PeerB", 2.0)):
        others = [Identity.generate().peer_id for _ in range(6)]
        peers = [
            {"peer": peer, "addresses": [f"/ip4/11.77.0.9/tcp/{int(stored_at)}/p2p/{peer}"], "since": 1, "seen": 1}
            for peer in others
        ]
        path = RunFolder.open(run, name, tmp_path).path / FILE_NAME
        path.write_text(json.dumps({"run": run.run_id, "peers": peers}))
        os.utime(path, (stored_at, stored_at))
    found = remembered_addresses(run.run_id, tmp_path)
    assert [address.split("/")[4] for address in found] == ["3"] * 6 + ["2"] * 2


def test_one_that_cannot_be_made(run: Run, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(
        MachineError, match=r"cannot be used: Not a directory\. Name a folder .* with --state"
    ) as caught:
        RunFolder.open(run, "PeerA", tmp_path / "file")
    assert caught.value.exit_code == 6


def test_a_manifest_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "run.manifest").write_bytes(b"nonsense")
    with pytest.raises(ManifestError, match=r"run\.manifest: this is not a manifest: .* `run create` with the same"):
        read_manifest(tmp_path / "run.manifest")  # regression: the organiser was told to ask the organiser
    with pytest.raises(ManifestError, match="cannot be read"):
        read_manifest(tmp_path / "missing")
