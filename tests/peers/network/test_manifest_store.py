"""Which manifests a bootstrap node remembers."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

import pytest

from opendiloco.errors import MachineError
from peers.errors import FolderError, ManifestError
from peers.network import manifest_store
from peers.network.channel import RefusalError
from peers.network.manifest_store import MANIFEST_LIMIT, QUIET_LIMIT, REVOKED_SUFFIX, SIGNED_SUFFIX, ManifestStore
from peers.values.identity import Identity
from peers.values.manifest import SignedManifest

ORGANISER = Identity.generate()
FIRST, SECOND, THIRD = (SignedManifest.create(ORGANISER, name, {}) for name in ("first", "second", "third"))
HERE, THERE = "192.0.2.0/24", "2001:db8::/48"


def made(name: str, organiser: Identity | None = None) -> SignedManifest:
    return SignedManifest.create(organiser or Identity.generate(), name, {})


def quiet(folder: Path, *manifests: SignedManifest) -> None:
    """Have nobody use these runs for more than a day."""
    for manifest in manifests:
        age(folder / f"{manifest.run_id}.manifest")


def age(path: Path, more: float = 0) -> None:
    """Have a file be older than a quiet run's, with `more` seconds on top."""
    long_ago = time.time() - QUIET_LIMIT - 1 - more
    os.utime(path, (long_ago, long_ago))


def kept(store: ManifestStore) -> set[str]:
    return {manifest.name for manifest in store}


def test_runs_that_nobody_uses_make_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: once somebody had announced a thousand runs, no other could be announced, ever."""
    monkeypatch.setattr(manifest_store, "MANIFEST_LIMIT", 2)
    store = ManifestStore(tmp_path)
    for manifest in (FIRST, SECOND):
        store.add(manifest, HERE)
        store.touch(manifest.run_id)
    with pytest.raises(RefusalError, match="remembers 2 runs, all in use; ask again tomorrow"):
        store.add(THIRD, THERE)
    quiet(tmp_path, FIRST, SECOND)
    store.touch(FIRST.run_id)
    store.touch(THIRD.run_id)
    assert store.add(THIRD, THERE) == [SECOND.run_id]
    assert kept(store) == {"first", "third"}


def test_nothing_is_forgotten_while_there_is_room(tmp_path: Path) -> None:
    """Regression: of 600 quiet runs 201 were forgotten when one more came."""
    manifests = [made(f"quiet-{number}") for number in range(600)]
    for manifest in manifests:
        (tmp_path / f"{manifest.run_id}.manifest").write_bytes(manifest.pack())
    quiet(tmp_path, *manifests)
    store = ManifestStore(tmp_path)
    assert store.add(FIRST, HERE) == []
    assert len(kept(store)) == 601


def test_no_more_are_kept_than_the_limit_says(tmp_path: Path) -> None:
    manifests = [made(f"quiet-{number}") for number in range(MANIFEST_LIMIT + 20)]
    for seconds, manifest in enumerate(manifests):
        path = tmp_path / f"{manifest.run_id}.manifest"
        path.write_bytes(manifest.pack())
        age(path, seconds)
    store = ManifestStore(tmp_path)
    oldest = [manifest.run_id for manifest in reversed(manifests[-21:])]
    assert store.add(FIRST, HERE) == oldest
    assert len(kept(store)) == MANIFEST_LIMIT
    assert store.add(SECOND, HERE) == [FIRST.run_id], "which never had a peer"


def test_one_network_does_not_take_all_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: 500 junk manifests closed the node to all others for a day. A key costs nothing."""
    monkeypatch.setattr(manifest_store, "SHARE_LIMIT", 5)
    monkeypatch.setattr(manifest_store, "MANIFEST_LIMIT", 8)
    store = ManifestStore(tmp_path)
    store.add(FIRST, THERE)
    junk = [made(f"junk-{number}") for number in range(40)]
    forgotten = [run for manifest in junk for run in store.add(manifest, HERE)]
    assert forgotten == [manifest.run_id for manifest in junk[:35]], "their own, the oldest first"
    store.add(SECOND, THERE)
    assert kept(store) == {"first", "second", *(manifest.name for manifest in junk[35:])}


def test_who_announces_most_makes_room_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after a restart, since who announced a run is on the disk."""
    monkeypatch.setattr(manifest_store, "MANIFEST_LIMIT", 4)
    store = ManifestStore(tmp_path)
    store.add(FIRST, THERE)
    quiet(tmp_path, FIRST)
    junk = [made(f"junk-{number}") for number in range(3)]
    for manifest in junk:
        store.add(manifest, HERE)
    store = ManifestStore(tmp_path)
    assert store.add(SECOND, THERE) == [junk[0].run_id]
    store.touch(SECOND.run_id)
    for run_id in (junk[1].run_id, junk[2].run_id):
        store.touch(run_id)
    store = ManifestStore(tmp_path)
    assert store.add(THIRD, HERE) == [FIRST.run_id], "all others have had peers"


def test_a_network_whose_runs_are_all_in_use_is_refused_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever feigns a peer in each of many runs takes no more places than these."""
    monkeypatch.setattr(manifest_store, "SHARE_LIMIT", 2)
    store = ManifestStore(tmp_path)
    for number in range(2):
        used = made(f"used-{number}")
        store.add(used, HERE)
        store.touch(used.run_id)
    with pytest.raises(RefusalError, match="remembers 2 runs announced from your network, all in use"):
        store.add(THIRD, HERE)
    assert store.add(THIRD, THERE) == []


def test_one_key_does_not_take_all_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest_store, "SHARE_LIMIT", 2)
    store = ManifestStore(tmp_path)
    store.add(FIRST, HERE)
    store.add(SECOND, THERE)
    other = made("other")
    assert store.add(other, "198.51.100.0/24") == []
    assert store.add(THIRD, "203.0.113.0/24") == [FIRST.run_id]
    for manifest in (SECOND, THIRD):
        store.touch(manifest.run_id)
    with pytest.raises(RefusalError, match="remembers 2 runs of this organiser, all in use"):
        store.add(FIRST, "203.0.113.0/24")


def test_nothing_is_forgotten_for_a_run_that_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest_store, "SHARE_LIMIT", 2)
    store = ManifestStore(tmp_path)
    store.add(FIRST, THERE)
    store.add(SECOND, THERE)
    for number in range(2):
        used = made(f"used-{number}")
        store.add(used, HERE)
        store.touch(used.run_id)
    with pytest.raises(RefusalError, match="from your network"):
        store.add(THIRD, HERE)
    assert kept(store) == {"first", "second", "used-0", "used-1"}


def test_a_spoiled_note_of_where_a_run_came_from_is_no_matter(tmp_path: Path) -> None:
    ManifestStore(tmp_path).add(FIRST, HERE)
    (tmp_path / f"{FIRST.run_id}.origin").write_bytes(b"\xff\xfe")
    assert kept(ManifestStore(tmp_path)) == {"first"}


def test_to_announce_a_run_again_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest_store, "MANIFEST_LIMIT", 2)
    store = ManifestStore(tmp_path)
    store.add(FIRST, HERE)
    store.add(SECOND, HERE)
    for manifest in (FIRST, SECOND):
        store.touch(manifest.run_id)
    quiet(tmp_path, FIRST)
    assert store.add(FIRST, THERE) == []
    assert store.add(THIRD, THERE) == [FIRST.run_id]


def test_what_fails_the_check_is_neither_taken_nor_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An older version may have kept it. It is named once."""

    def check(manifest: SignedManifest) -> None:
        if manifest.name == "first":
            raise ManifestError("heartbeat_seconds = 1e-09: too small.")
        if manifest.name == "second":
            raise RuntimeError("a mistake of ours")

    for manifest in (FIRST, SECOND, THIRD):
        (tmp_path / f"{manifest.run_id}.manifest").write_bytes(manifest.pack())
    store = ManifestStore(tmp_path, check)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert kept(store) == {"third"}
    assert len(caplog.records) == 2
    assert f"{FIRST.run_id}.manifest: heartbeat_seconds = 1e-09: too small." in caplog.text
    with pytest.raises(ManifestError, match="heartbeat_seconds"):
        store.add(FIRST, HERE)


def test_a_disk_that_takes_nothing_is_a_clear_error(tmp_path: Path) -> None:
    store = ManifestStore(tmp_path / "manifests")
    (tmp_path / "manifests").rmdir()
    with pytest.raises(FolderError, match="cannot keep manifests in "):
        store.add(FIRST, HERE)


def test_a_folder_that_cannot_be_made_is_no_problem_of_the_network(tmp_path: Path) -> None:
    """Regression: the exit code was that of a network problem, and systemd restarted the node for ever."""
    (tmp_path / "file").touch()
    with pytest.raises(FolderError, match=r"Not a directory\. Name a folder .* with --directory") as refused:
        ManifestStore(tmp_path / "file" / "manifests")
    assert refused.value.exit_code == MachineError.exit_code


def test_what_archives_have_signed_is_kept_as_long_as_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest_store, "MANIFEST_LIMIT", 1)
    store = ManifestStore(tmp_path)
    assert store.kept(SIGNED_SUFFIX, FIRST.run_id) == b""
    store.add(FIRST, HERE)
    store.keep(SIGNED_SUFFIX, FIRST.run_id, b"signed")
    store.keep(REVOKED_SUFFIX, FIRST.run_id, b"revoked")
    assert (ManifestStore(tmp_path).kept(SIGNED_SUFFIX, FIRST.run_id), store.kept(REVOKED_SUFFIX, FIRST.run_id)) == (
        b"signed",
        b"revoked",
    )
    store.add(SECOND, HERE)
    assert {path.stem for path in tmp_path.iterdir()} == {SECOND.run_id}


def test_each_manifest_is_checked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node with a thousand runs did nothing else for a third of a second, every ten seconds."""
    store, checked = ManifestStore(tmp_path), list[str | None]()
    unpack = SignedManifest.unpack

    def counted(data: bytes, run_id: str | None = None) -> SignedManifest:
        checked.append(run_id)
        return unpack(data, run_id)

    monkeypatch.setattr(SignedManifest, "unpack", counted)
    store.add(FIRST, HERE)
    for _ in range(3):
        assert kept(store) == {"first"}
    store.add(SECOND, HERE)
    assert kept(store) == {"first", "second"}
    assert sorted(map(str, checked)) == sorted([FIRST.run_id, SECOND.run_id])
    (tmp_path / f"{FIRST.run_id}.manifest").unlink()
    assert kept(store) == {"second"}
