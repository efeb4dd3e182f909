"""What a bootstrap node and a volunteer leave on a disk where the umask hides nothing: it is for their owner alone."""

from __future__ import annotations

import signal
from pathlib import Path
from stat import S_IMODE

import pytest

from tests.opendiloco.conftest import write_corpus
from tests.swarm.cli_processes import LOOPBACK, Site, create_run, eventually

pytestmark = [pytest.mark.swarm, pytest.mark.thorough]

OPEN = ("sh", "-c", 'umask 000; exec "$@"', "sh")
"""Runs a command under a umask that takes nothing away."""


def open_to_others(folder: Path, how: int = 0o077) -> list[Path]:
    """Return the folders below this one that others may use: how, as bits of a mode."""
    return [path for path in folder.rglob("*") if path.is_dir() and S_IMODE(path.stat().st_mode) & how]


def test_folders_are_private_and_sockets_do_not_stay(tmp_path: Path) -> None:
    site = Site(tmp_path / "site")
    site.folder.mkdir()
    corpus = write_corpus(site.folder / "corpus")
    made = [site.folder / name for name in ("state", "config", "cache", "made")]
    for folder in made:
        folder.mkdir(mode=0o755)
    site.environment |= {"XDG_CACHE_HOME": str(made[2])}
    node = ("bootstrap", "--identity", "bootstrap.pem", "--directory", "made/a/runs", "--archive", "made/b/archive")

    with site.start(*node, *LOOPBACK, prefix=OPEN) as bootstrap:
        address = bootstrap.line(r"/ip4/\S+/p2p/\w+", "the bootstrap node does not say where it is")
        invite = create_run(site, site.write_run(str(corpus)), address, prefix=OPEN)
        join = ("join", "--run", invite, "--data", "corpus", *LOOPBACK)
        with site.start(*join, prefix=OPEN) as volunteer:
            archived = site.folder / "made" / "b" / "archive"
            eventually(lambda: any(archived.rglob("log/payloads/*")), "no entry is archived")
            sockets = [path for path in site.temporary.rglob("*") if path.is_socket()]
            assert len({path.parent for path in sockets}) == 2, "one folder for each of the two daemons"
            volunteer.interrupt_terminal()
            assert volunteer.finish().code == 0
        [of_the_node] = site.temporary.glob("diloco-peer-*")
        assert not [path for folder in made for path in open_to_others(folder)]
        assert S_IMODE(of_the_node.stat().st_mode) == 0o700
        assert not open_to_others(site.temporary, 0o022), "nor may they write where libraries keep something"
        assert any(made[0].iterdir()), "the volunteer has kept something"
        keys = [site.folder / "bootstrap.pem", *made[1].rglob("*.pem")]
        assert [S_IMODE(key.stat().st_mode) for key in keys] == [0o600, 0o600]
        bootstrap.signal(signal.SIGKILL)
        bootstrap.finish()
    assert of_the_node.exists(), "a killed process tidies nothing up"

    with site.start(*node, *LOOPBACK, prefix=OPEN) as bootstrap:
        bootstrap.line(r"/ip4/\S+/p2p/\w+", "the bootstrap node does not say where it is")
        assert not of_the_node.exists()
        bootstrap.interrupt_terminal()
        assert bootstrap.finish().code == 0
    site.assert_nothing_is_left()
