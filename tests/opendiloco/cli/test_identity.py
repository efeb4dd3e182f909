"""A machine's key, shown by its peer id."""

from __future__ import annotations

from pathlib import Path

from click.testing import CliRunner

from opendiloco.cli.group import main
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
