"""What strangers' manifests would have a volunteer's machine do, as real processes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from opendiloco.config.run_config import RunConfig
from opendiloco.volunteer.volunteer import connected
from peers.network.bootstrap import announce_manifest
from peers.values.identity import Identity
from peers.values.manifest import Invite, SignedManifest
from tests.opendiloco.conftest import write_corpus
from tests.swarm.cli_processes import LOOPBACK, Site, bootstrap
from tests.swarm.terminals import Terminal

pytestmark = pytest.mark.swarm

EVIL = {"auto_map": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}, "model_type": "evil"}


@dataclass(frozen=True)
class Swarm:
    """A bootstrap node, and what runs of strangers begin with."""

    site: Site
    address: str
    content: dict[str, Any]

    def announce(self, **changes: Any) -> Invite:
        """Sign a run past all checks of `run create`. Return its invite."""
        signed = SignedManifest.create(Identity.generate(), "stranger", self.content | {"name": "stranger"} | changes)

        async def announce() -> tuple[str, ...]:
            async with connected(Identity.generate(), (self.address,), LOOPBACK[1:2], client_mode=True) as transport:
                return await announce_manifest(transport, signed, (self.address,))

        return Invite(signed.run_id, asyncio.run(announce()))

    def config(self, **changes: Any) -> dict[str, Any]:
        return {"config": self.content["model"]["config"] | changes}


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Swarm]:
    site = Site(tmp_path_factory.mktemp("site"))
    run = RunConfig.from_toml(site.write_run(str(write_corpus(site.folder / "corpus"))))
    with bootstrap(site) as address:
        yield Swarm(site, address, run.to_manifest_content())
    site.assert_nothing_is_left()


@pytest.fixture
def evil(swarm: Swarm) -> Path:
    """The mark that a model's code would leave."""
    folder, mark = swarm.site.folder / "evil", swarm.site.folder / "mark"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(EVIL), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps({"auto_map": {"AutoTokenizer": ["evil.T", None]}}))
    (folder / "evil.py").write_text(f"open({str(mark)!r}, 'w')\n", encoding="utf-8")
    return mark


@pytest.mark.parametrize("table", ["model", pytest.param("tokenizer", marks=pytest.mark.thorough)])
def test_nobody_is_asked_whether_code_may_run(swarm: Swarm, evil: Path, table: str) -> None:
    """On a terminal, where transformers would ask."""
    run = swarm.site.folder / f"{table}.toml"
    text = (swarm.site.folder / "run.toml").read_text(encoding="utf-8")
    command: tuple[str, ...]
    if table == "model":
        before, rest = text.split("[model.config]")
        text = before.replace("[model]", '[model]\npath = "./evil"') + rest.partition("\n\n")[2]
        command = ("run", "needs", run.name)
    else:
        text += '\n[tokenizer]\nkind = "pretrained"\npath = "./evil"\n'
        command = ("tokenize", run.name, "--out", "tokens")
    run.write_text(text, encoding="utf-8")
    with Terminal(swarm.site, *command) as terminal:
        refusal = b"no such architecture" if table == "model" else b"cannot be loaded"
        terminal.wait_for(refusal, "it does not say what is wrong")
        assert terminal.finish() == (3 if table == "model" else 7)
    assert b"[y/N]" not in terminal.shown
    assert not evil.exists()


@pytest.mark.thorough
def test_no_command_builds_what_was_not_named(swarm: Swarm, evil: Path) -> None:
    invite = swarm.announce(model={"path": str(swarm.site.folder / "evil"), "digest": "0" * 64})
    site, run = swarm.site, ("--run", str(invite))
    for command in (
        ("join", *run, *LOOPBACK, "--data", "corpus"),
        ("export", *run, "--out", "exported", "--data", "corpus"),
        ("sample", *run, "text"),
        ("follow", *run, "--evaluate", "--data", "corpus"),
    ):
        refused = site.run(*command)
        assert refused.code == 7, (command, refused.err)
        assert "model.path = " in refused.error_line()
        assert "--model PATH" in refused.error_line()
    checked = site.run("doctor", *run, "--json", "--no-trial", *LOOPBACK, "--data", "corpus")
    assert checked.code == 16, checked.err
    assert "--model PATH" in checked.out
    named = site.run("join", *run, *LOOPBACK, "--data", "corpus", "--model", "evil")
    assert named.code == 3, named.err
    assert "transformers knows no such architecture" in named.err
    assert not evil.exists()


@pytest.mark.thorough
def test_one_bad_run_has_a_line_and_the_others_are_listed(swarm: Swarm) -> None:
    good = swarm.announce(model=swarm.config())
    slow, _ = (swarm.announce(model=swarm.config(num_hidden_layers=(1 << 24) - less)) for less in (0, 1))
    huge = swarm.announce(model=swarm.config(num_hidden_layers=100_000_000))
    assert not huge.addresses, "the node keeps a run that it could refuse by its numbers"
    local = swarm.announce(model={"path": "/etc", "digest": "0" * 64})
    listed = swarm.site.run("runs", "--initial-peer", swarm.address, "--json")
    assert listed.code == 0, listed.err
    runs = {run["run"]: run for run in json.loads(listed.out)}
    assert runs[good.run_id]["problem"] is None
    assert runs[good.run_id]["needs"]["parameters"] > 0
    for invite, problem in (
        (slow, "model.config: to lay out this model"),
        (local, "model.path = '/etc'"),
    ):
        assert problem in runs[invite.run_id]["problem"]
    with swarm.site.start("runs", "--initial-peer", swarm.address) as command:
        command.line("^stranger-", "no run is listed")
        assert not command.has_ended, "it waits for the slow ones before it lists any"
        shown = command.finish()
    assert shown.code == 0, shown.err
    assert all(invite.run_id in shown.out for invite in (good, slow, local))
    assert "  model.config: to lay out this model" in shown.out


@pytest.mark.thorough
def test_a_model_without_end_ends_join(swarm: Swarm) -> None:
    slow = swarm.announce(model=swarm.config(num_hidden_layers=1 << 24))
    options = ("--data", "corpus", "--restarts", "0", "--max-memory", "8")
    refused = swarm.site.run("join", "--run", str(slow), *LOOPBACK, *options)
    assert refused.code == 3, refused.err
    assert "model.config: to lay out this model" in refused.err
