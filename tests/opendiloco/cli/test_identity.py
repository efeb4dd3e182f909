"""A machine's key, shown by its peer id."""

from __future__ import annotations

from pathlib import Path

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


def test_doctor_makes_no_key_file_and_leaves_alone_one_in_use(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Regression: `doctor --identity` made the file, and failed beside a `join` with it."""
    path = tmp_path / "key.pem"
    with _examining(path):
        assert not path.exists()
    with hold_identity(path) as own, _examining(path) as other:
        assert own.peer_id != other.peer_id
    assert capsys.readouterr().err.count(f"{path} is missing or in use: ") == 2
    with _examining(path) as key:
        assert key.peer_id == own.peer_id
    assert capsys.readouterr().err == ""
