"""A machine's key, shown by its peer id."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import AsyncMock, Mock

import pytest
from click.testing import CliRunner

from opendiloco.cli.group import main
from opendiloco.cli.machine import _key_for_doctor
from opendiloco.volunteer.identity import hold_identity, load_identity, usable_path
from peers.errors import IdentityFileError
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
    """Regression: `doctor --identity` made the file, failed beside a `join` with it, and kept it locked."""
    path = tmp_path / "a key.pem"
    _, remedy = _key_for_doctor(path, ())
    assert not path.exists()
    assert f"{path} is missing: make it with `diloco-peer identity show --identity '{path}'`" in remedy
    with hold_identity(path) as own:
        other, remedy = _key_for_doctor(path, ())
        assert own.peer_id != other.peer_id
        assert f"{path} is in use: leave the run first." in remedy
    key, remedy = _key_for_doctor(path, ("/ip4/192.0.2.1/tcp/1/p2p/a",))
    assert (key.peer_id, remedy) == (own.peer_id, "")
    with hold_identity(path):
        pass  # no lock is left


@pytest.mark.parametrize("address", ["/ip4/192.0.2.1/tcp/1/p2p/{}", "{}@example.org"])
def test_doctor_reaches_a_bootstrap_node_with_the_key_of_its_machine(tmp_path: Path, address: str) -> None:
    """Regression: no node talks to itself, so that the node seemed out of reach to its organiser's doctor."""
    path = tmp_path / "key.pem"
    own = load_identity(path)
    key, remedy = _key_for_doctor(path, (address.format(own.peer_id),))
    assert key.peer_id != own.peer_id
    assert f"{path} is the key of the bootstrap node, too: join with another one" in remedy


def test_doctor_goes_on_without_the_default_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Regression: an unreadable key file ended it without a report, and for a missing one its remedy failed."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert "with `diloco-peer identity show`, and" in _key_for_doctor(None, ())[1]
    path = usable_path(None)
    path.write_bytes(b"no key")
    assert f"{path} is unreadable: mend it or move it away." in _key_for_doctor(None, ())[1]
    assert f"warning: {path} is not an identity file" in capsys.readouterr().err
    with pytest.raises(IdentityFileError):
        _key_for_doctor(path, ())


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
