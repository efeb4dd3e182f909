"""What the README has a person type: a bootstrap node, a run, volunteers, a look at it, the exported model."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.swarm.cli_processes import LOOPBACK, ROOT, Command, Finished, Site, bootstrap, create_run, eventually

pytestmark = pytest.mark.swarm

OUTER_STEPS = 8  # of examples/tiny.toml


def test_the_commands_of_the_readme(tmp_path: Path) -> None:
    site = Site(tmp_path)
    with bootstrap(site) as address:
        invite = create_run(site, ROOT / "examples" / "tiny.toml", address)
        with follow(site, invite) as follower:
            follower.line("no peer trains in the run", "it does not say that it waits")
            with (
                join(site, invite, "one.pem", "--track", "tensorboard:curves") as first,
                join(site, invite, "two.pem") as second,
            ):
                digest = the_follower_has_seen_it(follower.finish(), site)
                everybody_finishes_with_the_same_digests(site, invite, digest)
                status_says_so(site, invite)
                the_exported_model_loads(site, invite)
                for volunteer in (first, second):
                    volunteer.interrupt_terminal()
                    assert volunteer.finish().code == 0
        the_first_has_drawn_curves(site)
        nobody_is_left(site, invite, address)
    site.assert_nothing_is_left()


def join(site: Site, invite: str, identity: str, *options: str) -> Command:
    return site.start("join", "--run", invite, "--identity", identity, "--device", "cpu", *options, *LOOPBACK)


def follow(site: Site, invite: str) -> Command:
    """From before anybody trains to the run's last outer step."""
    return site.start("follow", "--run", invite, "--evaluate", "--every", "2", "--export", "models", "--json")


def the_follower_has_seen_it(finished: Finished, site: Site) -> str:
    """From wherever its first snapshot was."""
    assert finished.code == 0, finished.err
    news = [json.loads(line) for line in finished.out.splitlines()]
    states = [one for one in news if one["event"] in ("snapshot", "entry")]
    models = {one["outer_step"]: one for one in news if one["event"] == "model"}
    assert len(states) + len(models) == len(news), "somebody disagreed"
    steps = [one["outer_step"] for one in states]
    assert steps == sorted(set(steps))
    assert list(models) == [step for step in steps if step % 2 == 0]
    assert states[-1]["outer_step"] == OUTER_STEPS
    assert states[-1]["agreeing"] > 0
    assert models[OUTER_STEPS]["held_out_loss"] < 5.6, "as if it had learned nothing"
    folders = [site.folder / "models" / f"outer-step-{step:06}" for step in models]
    assert sorted((site.folder / "models").iterdir()) == folders
    assert all((folder / "model.safetensors").is_file() for folder in folders)
    return str(states[-1]["state_digest"])


def everybody_finishes_with_the_same_digests(site: Site, invite: str, state_digest: str) -> None:
    def finished() -> bool:
        status = read_status(site, invite)
        assert status["agree"] is not False
        return [peer["outer_step"] for peer in status["peers"]] == [OUTER_STEPS, OUTER_STEPS]

    eventually(finished, "the run does not come to its end")
    status = read_status(site, invite)
    assert status["agree"] is True
    first, second = status["peers"]
    assert first["state"] == second["state"] == "finished"
    assert first["log_digest"] == second["log_digest"]
    assert first["state_digest"] == second["state_digest"] == state_digest


def read_status(site: Site, invite: str) -> dict[str, Any]:
    finished = site.run("status", "--run", invite, "--json")
    assert finished.code == 0, finished.err
    status: dict[str, Any] = json.loads(finished.out)
    return status


def status_says_so(site: Site, invite: str) -> None:
    out = site.run("status", "--run", invite).out
    peers = [line for line in out.splitlines() if line.startswith("…")]
    assert [line.split()[1] for line in peers] == ["finished"] * 2, out
    assert "all log and state digests agree" in out


def the_exported_model_loads(site: Site, invite: str) -> None:
    exported = site.run("export", "--run", invite, "--out", "model")
    assert exported.code == 0, exported.err
    assert f"after {OUTER_STEPS} outer steps" in exported.out
    card = (site.folder / "model" / "README.md").read_text()
    assert invite.partition("@")[0].removeprefix("diloco:") in card

    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(site.folder / "model")
    tokenizer = AutoTokenizer.from_pretrained(site.folder / "model")
    assert model(**tokenizer("import", return_tensors="pt")).logits.shape == (1, 6, 259)


def the_first_has_drawn_curves(site: Site) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    drawn = EventAccumulator(str(site.folder / "curves")).Reload()
    assert {"configuration", "training/loss", "inner_step/learning_rate", "held_out/bits_per_byte"} <= set(
        drawn.Tags()["tensors"]
    )
    last = {name: drawn.Tensors(f"outer_step/{name}")[-1] for name in ("cosine", "momentum_norm", "sent_bytes")}
    assert {event.step for event in last.values()} == {OUTER_STEPS * 10}
    cosine, norm, sent = (event.tensor_proto.float_val[0] for event in last.values())
    assert 0 < cosine <= 1
    assert norm > 0
    assert sent >= 0  # nothing, where the other volunteer came late


def nobody_is_left(site: Site, invite: str, address: str) -> None:
    run_id = invite.partition("@")[0].removeprefix("diloco:")
    assert "no live peers" in site.run("status", "--run", run_id, "--initial-peer", address).out
    refused = site.run("export", "--run", invite, "--out", "other")
    assert refused.code == 4
    assert "no peer trains" in refused.error_line()


@pytest.mark.thorough
def test_a_bootstrap_node_remembers_runs(tmp_path: Path) -> None:
    """Over a restart, at its old address, and with a stranger's manifest among its files."""
    site = Site(tmp_path)
    run = site.write_run("stdlib")
    with bootstrap(site) as address:
        invite = create_run(site, run, address)
    [kept] = (tmp_path / "bootstrap.runs").glob("*.manifest")
    kept.with_name(kept.name.replace("small", "other")).write_bytes(kept.read_bytes())
    listen = ("--listen", address.partition("/p2p/")[0], "--data-port", "0")
    with site.start("bootstrap", "--identity", "bootstrap.pem", *listen) as node:
        node.line(f"^ +{address}$", "its address has changed")
        node.line("skipped .*other.*does not match", "a manifest under another run's name went unnoticed")
        assert "no live peers" in site.run("status", "--run", invite).out
        node.signal(signal.SIGTERM)
        assert node.finish().code == 0
    site.assert_nothing_is_left()
