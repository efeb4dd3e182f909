"""A machine's key, shown by its peer id."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import AsyncMock, Mock

import pytest
from click.testing import CliRunner

from opendiloco.cli.group import main
from opendiloco.cli.machine import _examining
from opendiloco.volunteer.identity import hold_identity
from peers.values.identity import Identity


def test_the_key_is_shown_by_its_peer_id(tmp_path: Path) -> None:
    key, missing = tmp_path / "key.pem", tmp_path / "none.pem"
    identity = Identity.generate()
    identity.save(key)
    shown = CliRunner().invoke(main, ["identity", "show", "--identity", str(key)])
    assert identity.peer_id in shown.stdout
    assert str(key) in shown.stdout
    made = CliRunner().invoke(main, ["identity", "show", "--identity", str(missing)])
    assert Identity.load(missing).peer_id in made.stdout
    missing.write_bytes(b"no key")
    refused = CliRunner().invoke(main, ["identity", "show", "--identity", str(missing)])
    assert refused.exit_code == 2, "systemd must not start the service again"


def test_doctor_makes_no_key_file_and_leaves_alone_one_in_use(tmp_path: Path) -> None:
    """Regression: `doctor --identity` made the file, and failed beside a `join` with it."""
    path = tmp_path / "key.pem"
    with _examining(path) as (_, remedy):
        assert not path.exists()
        assert f"{path} is missing or in use. " in remedy
    with hold_identity(path) as own, _examining(path) as (other, remedy):
        assert own.peer_id != other.peer_id
        assert f"{path} is missing or in use. " in remedy
    with _examining(path) as (key, remedy):
        assert (key.peer_id, remedy) == (own.peer_id, "")


def test_doctor_asks_for_admission_with_the_key_that_join_would_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: it took a new key, which a run refused although the machine's own key had a ticket."""
    path = tmp_path / "diloco-peer" / "identity.pem"
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    shown = CliRunner().invoke(main, ["identity", "show"]).stdout
    examination = Mock(return_value=Mock(run=AsyncMock(return_value=[])))
    monkeypatch.setattr("opendiloco.tools.doctor.examination.Examination", examination)
    assert CliRunner().invoke(main, ["doctor"]).exit_code == 0
    assert examination.call_args.args[2].peer_id == Identity.load(path).peer_id
    assert Identity.load(path).peer_id in shown
