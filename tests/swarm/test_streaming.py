"""A run that streams, by its commands: volunteers, an archive, a joiner that is killed, and the log in the end."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.opendiloco.conftest import write_corpus
from tests.swarm.cli_processes import LOOPBACK, Site, create_run, eventually, volunteers

pytestmark = pytest.mark.swarm
APPLIED = r"outer step \d+ applied"
STREAMING = """[streaming]
layers_per_fragment = 1
overlap = 2

"""


def write_streaming_run(site: Site, corpus: str) -> Path:
    """Write a run.toml with two fragments: one block, and all else."""
    path = site.write_run(corpus, inner_steps=30)
    path.write_text(path.read_text().replace("[rounds]", STREAMING + "[rounds]"))
    return path


@pytest.mark.thorough
def test_a_run_streams_from_its_creation_to_the_verified_log(tmp_path: Path) -> None:
    site = Site(tmp_path)
    run = write_streaming_run(site, str(write_corpus(tmp_path / "corpus")))
    with site.start("bootstrap", "--identity", "bootstrap.pem", "--archive", "archive", *LOOPBACK) as node:
        invite = create_run(site, run, node.line(r"/ip4/\S+/p2p/\w+", "the bootstrap node does not say where it is"))
        with volunteers(site, invite, "one", "two") as (one, two):
            for volunteer in (one, two):
                volunteer.line(APPLIED, "it does not train")
            join = (
                "join",
                "--run",
                invite,
                "--identity",
                "joiner.pem",
                "--data",
                "corpus",
                "--overlap",
                "auto",
                *LOOPBACK,
            )
            with site.start(*join) as joiner:
                joiner.line(APPLIED, "who joins in the middle does not train")
                joiner.signal(signal.SIGKILL)
                joiner.finish()
            before = len(one.said(APPLIED))
            eventually(lambda: len(one.said(APPLIED)) > before + 2, "a death stops the others")
            status = site.run("status", "--run", invite)  # which also sweeps away what the killed peer has left
            assert "digests agree" in status.out, status.out + status.err
            archived = tmp_path / "archive"
            eventually(lambda: list(archived.rglob("*.payload")), "nothing is archived")
        node.signal(signal.SIGINT)
        assert node.finish().code == 0
    logs = sorted(path.parent for path in tmp_path.rglob("entries.jsonl"))
    assert len(logs) == 4
    verified = [site.run("log", "verify", "--folder", str(log)) for log in logs]
    assert [found.code for found in verified] == [0] * 4, [found.err for found in verified]
    states = "verified: states, "
    assert sum(states in found.out for found in verified) >= 2, "whoever left politely has states to verify"
    shown = site.run("log", "show", "--last", "2", "--folder", str(logs[-1]))
    assert [line.split(",")[0].partition("/")[2] for line in shown.out.splitlines()] == ["", "1"]
    site.assert_nothing_is_left()
