"""A machine's key, its encrypted backup, and what is never replaced."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from opendiloco.cli.group import main
from peers.values.identity import Identity


@pytest.fixture
def key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Identity:
    monkeypatch.chdir(tmp_path)
    key = Identity.generate()
    key.save(tmp_path / "key.pem")
    (tmp_path / "secret").write_text("open sesame\nmore")
    return key


def identity(*arguments: str, typed: str = "") -> Result:
    return CliRunner().invoke(main, ["identity", *arguments], input=typed)


def test_the_key_is_shown_by_its_peer_id(key: Identity) -> None:
    shown = identity("show", "--identity", "key.pem")
    assert key.peer_id in shown.stdout
    missing = identity("show", "--identity", "none.pem")
    assert missing.exit_code == 5
    assert not Path("none.pem").exists()


def test_a_backup_is_encrypted_and_leads_to_the_same_peer(key: Identity) -> None:
    made = identity("backup", "backup", "--identity", "key.pem", "--passphrase-file", "secret")
    assert made.exit_code == 0, made.stderr
    assert stat.S_IMODE(Path("backup").stat().st_mode) == 0o600
    assert b"ENCRYPTED" in Path("backup").read_bytes()
    restored = identity("restore", "backup", "--identity", "new.pem", typed="open sesame\n")
    assert restored.exit_code == 0, restored.stderr
    assert stat.S_IMODE(Path("new.pem").stat().st_mode) == 0o600
    assert Identity.load(Path("new.pem")).peer_id == key.peer_id


@pytest.mark.usefixtures("key")
def test_another_passphrase_opens_nothing() -> None:
    assert identity("backup", "backup", "--identity", "key.pem", typed="one\none\n").exit_code == 0
    refused = identity("restore", "backup", "--identity", "new.pem", typed="other\n")
    assert refused.exit_code == 5
    assert "backup cannot be decrypted" in refused.stderr
    assert not Path("new.pem").exists()


@pytest.mark.usefixtures("key")
def test_no_file_is_replaced() -> None:
    before = Path("key.pem").read_bytes()
    assert identity("backup", "backup", "--identity", "key.pem", "--passphrase-file", "secret").exit_code == 0
    for command in (("restore", "backup", "--identity", "key.pem"), ("backup", "key.pem", "--identity", "key.pem")):
        refused = identity(*command, "--passphrase-file", "secret")
        assert refused.exit_code == 5
        assert "key.pem is there already" in refused.stderr
    assert Path("key.pem").read_bytes() == before


@pytest.mark.usefixtures("key")
def test_a_passphrase_file_has_to_have_one() -> None:
    Path("empty").touch()
    Path("long").write_text("x" * 2000)
    cases = (
        ("empty", "the first line of empty is empty"),
        ("long", "more than 1,000 bytes"),
        ("none", "none cannot be read"),
    )
    for file, said in cases:
        refused = identity("backup", "backup", "--identity", "key.pem", "--passphrase-file", file)
        assert refused.exit_code == 5
        assert said in refused.stderr
