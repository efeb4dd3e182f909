"""One identity file on two machines: the later start says so and ends, and the earlier one goes on."""

from __future__ import annotations

import os
import re
import shutil
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.opendiloco.conftest import write_corpus
from tests.swarm.cli_processes import LOOPBACK, Command, Site, announce_run, bootstrap, leave

pytestmark = pytest.mark.swarm


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    site = Site(tmp_path)
    write_corpus(site.folder / "corpus")
    yield site
    site.assert_nothing_is_left()


def join(site: Site, invite: str, identity: str, state: str) -> Command:
    here = ("--identity", identity, "--state", state, "--device", "cpu", "--data", "corpus")
    return site.start("join", "--run", invite, *here, *LOOPBACK)


@pytest.mark.thorough
@pytest.mark.parametrize("others", [0, 1], ids=["alone", "with another"])
def test_the_later_start_says_so_and_ends(site: Site, others: int) -> None:
    with bootstrap(site) as address, ExitStack() as stack:
        invite = announce_run(site.write_run("corpus"), address)
        names = ("one", "two")[: 1 + others]
        first, *rest = [stack.enter_context(join(site, invite, f"{name}.pem", name)) for name in names]
        first.line(f"outer step .* applied, {others + 1} peer", "it does not train")
        shutil.copy(site.folder / "one.pem", site.folder / "copy.pem")
        with join(site, invite, "copy.pem", "copy") as second:
            ended = second.finish()
        assert ended.code == 14, ended.err
        assert "takes part in" in ended.err
        assert "join with --identity and a new file" in ended.err
        assert not re.search(r"outer step \d+ applied", ended.err)
        for volunteer in (*rest, first):
            leave(volunteer)


@pytest.mark.thorough
def test_a_restart_after_a_crash_is_no_copy(site: Site) -> None:
    with bootstrap(site) as address:
        invite = announce_run(site.write_run("corpus"), address)
        with join(site, invite, "other.pem", "other") as other:
            with join(site, invite, "one.pem", "one") as before:
                other.line("outer step .* 2 peers", "the two do not train together")
                os.killpg(before.pid, signal.SIGKILL)
                before.finish()
            with join(site, invite, "one.pem", "one") as back:
                back.line("outer step .* 2 peers", "it does not come back")
                leave(back)
            leave(other)
