"""A volunteer that is killed and starts again is the same voter: its run goes on, on one lineage, and loses nothing."""

from __future__ import annotations

import signal
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from opendiloco.storage.run_folder import Journal
from tests.opendiloco.conftest import write_corpus
from tests.swarm.cli_processes import LOOPBACK, Command, Site, announce_run, bootstrap, eventually, leave

pytestmark = pytest.mark.swarm


@pytest.mark.parametrize("number", [1, pytest.param(2, marks=pytest.mark.thorough)])
def test_volunteers_that_are_killed_again_and_again_go_on_with_their_lineage(tmp_path: Path, number: int) -> None:
    """R10. The first one is killed before a vote is on the disk, before it has left, and amid training; with a second
    one, that waits, since it decides nothing alone."""
    site = Site(tmp_path)
    corpus = write_corpus(tmp_path / "corpus")
    names = ["one", "two"][:number]
    with bootstrap(site) as address:
        invite = announce_run(site.write_run(str(corpus), peers=number), address)
        with ExitStack() as others:
            for name in names[1:]:
                others.enter_context(leaving(joined(site, invite, name)))
            for moment in ("before", "after"):
                with joined(site, invite, "one", "-m", "tests.swarm.dying_volunteer", moment, "7") as dying:
                    ended = dying.finish()
                    assert ended.code == -signal.SIGKILL, ended.err
            with joined(site, invite, "one") as killed:
                made = len(entries(site, "one"))
                eventually(lambda: len(entries(site, "one")) >= made + 2, "a killed volunteer does not go on")
                killed.signal(signal.SIGKILL)
                killed.finish()
            with leaving(joined(site, invite, "one")):
                made = len(entries(site, "one"))
                eventually(lambda: len(entries(site, "one")) >= made + 2, "a killed volunteer does not go on")
        for index, heads in entries(site, *names).items():
            assert len(heads) == 1, f"two entries at outer step {index}"
        for folder in (site.folder / "state" / "diloco-peer").glob("*/*"):
            verified = site.run("log", "verify", "--folder", str(folder))
            assert verified.code == 0, verified.out + verified.err
            assert "alone" not in verified.out, "some peers went on without a quorum"
    site.assert_nothing_is_left()


def joined(site: Site, invite: str, name: str, *program: str) -> Command:
    """Return a volunteer that joins, with the site's corpus and a journal."""
    options = ("--identity", f"{name}.pem", "--journal", f"{name}.jsonl", "--data", "corpus", *LOOPBACK)
    return Command(site, (*(program or ("-m", "opendiloco.cli")), "join", "--run", invite, *options))


@contextmanager
def leaving(volunteer: Command) -> Iterator[None]:
    """Have a volunteer leave politely in the end."""
    with volunteer:
        volunteer.line("joining as", "it does not start")
        yield
        leave(volunteer)


def entries(site: Site, *names: str) -> dict[int, set[bytes]]:
    """Return the digests of the entries that these volunteers have applied, by their index."""
    found = defaultdict[int, set[bytes]](set)
    for name in names:
        if (site.folder / f"{name}.jsonl").exists():
            for header, _ in Journal(site.folder / f"{name}.jsonl"):
                found[header.index].add(header.digest)
    return found
