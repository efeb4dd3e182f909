"""What a machine that comes back goes on with, and what its run's model writes; and a preset as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from opendiloco.storage.run_folder import Journal
from tests.opendiloco.conftest import write_corpus
from tests.swarm.cli_processes import LOOPBACK, ROOT, Site, announce_run, bootstrap, leave

pytestmark = pytest.mark.swarm


@pytest.mark.thorough
def test_a_lone_peer_goes_on_with_its_moments(tmp_path: Path) -> None:
    """Its model can be asked meanwhile."""
    site = Site(tmp_path)
    corpus = str(write_corpus(tmp_path / "corpus"))
    run = site.write_run(corpus, inner_steps=12)
    text = run.read_text()
    run.write_text(re.sub(r"(\[inner_optimizer\]\n)", r"\1rewarmup_steps = 2\n", text))
    assert run.read_text() != text
    with bootstrap(site) as address:
        invite = announce_run(run, address)
        join = ("join", "--run", invite, "--identity", "one.pem", "--device", "cpu", "--data", corpus, *LOOPBACK)
        with site.start(*join) as first:
            first.line("moments after outer step .* are saved", "it keeps no moments")
            leave(first)
        with site.start(*join) as again:
            again.line(r"this machine goes on after outer step \d", "it begins anew")
            again.line(r"continues with the moments loaded from outer-step-\d+\S*\.moments", "its moments are lost")
            again.line(r"outer step \d+ applied", "it does not train")
            sample = ("sample", "--run", invite, "--tokens", "5", "--seed", "1", "peers train")
            sampled = site.run(*sample)
            assert sampled.code == 0, sampled.err
            assert sampled.out.startswith("peers train")
            assert re.search(r"after \d+ outer steps:", sampled.err)
            leave(again)
            assert not again.said("begins anew")
    site.assert_nothing_is_left()


@pytest.mark.thorough
def test_a_preset_trains_as_it_stands_with_two_volunteers(tmp_path: Path) -> None:
    """llama-2m: nothing is changed but how many outer steps there are, and inner steps in one."""
    site = Site(tmp_path)
    text = (ROOT / "examples" / "llama-2m.toml").read_text()
    shorter = re.sub(r"^inner_steps = 50$", "inner_steps = 2", text, flags=re.MULTILINE)
    assert shorter != text
    run = tmp_path / "run.toml"
    run.write_text(f"outer_steps = 2\n{shorter}\n[rounds]\nminimum_peers = 2\n")
    with bootstrap(site) as address:
        invite = announce_run(run, address)
        started = []
        for name in ("one", "two"):
            options = ("--identity", f"{name}.pem", "--journal", f"{name}.jsonl", "--device", "cpu", *LOOPBACK)
            started.append(site.start("join", "--run", invite, *options))
        with started[0], started[1]:
            for volunteer in started:
                volunteer.line("outer step 2 applied", "the preset does not train", seconds=400)
            for volunteer in started:
                leave(volunteer)
    digests = [[digest for _, digest in Journal(tmp_path / f"{name}.jsonl")] for name in ("one", "two")]
    assert len(digests[0]) == 2
    assert digests[0] == digests[1]
    site.assert_nothing_is_left()
