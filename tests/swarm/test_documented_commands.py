"""Every `diloco-peer …` that README and docs have a person type, typed in turn beside a small swarm."""

from __future__ import annotations

import re
import shlex
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from opendiloco.storage.loading import Checkpoints
from peers.values.identity import Identity
from peers.values.manifest import Invite
from tests.documents import DOCUMENTS, commands
from tests.opendiloco.conftest import write_corpus
from tests.swarm.cli_processes import LOOPBACK, ROOT, Finished, Site, create_run, eventually

pytestmark = [pytest.mark.swarm, pytest.mark.thorough, pytest.mark.timeout(1800)]

DATA = """\
[data]
held_out = 0.2

[[data.sources]]
source = "stdlib"
weight = 1

[[data.sources]]
source = "{corpus}"
weight = 1
"""
ENDLESS = {
    "bootstrap": r"/ip4/\S+/p2p/\w+",
    "join": "joining as|paused",
    "follow": "outer step",
    "status": "on this machine",
}
"""Commands that go on until Ctrl-C (`status` with --watch), and what each prints once it works."""

LAST = ("amend", "finish")
"""These change the run or end the volunteer: other commands come before."""

CODES = {"doctor": (0, 16)}
"""Exit codes other than 0 alone: a test's machine may well be busy or have no way to the internet."""


@dataclass(frozen=True)
class World:
    """A node that is an archive, a run with one volunteer, and a run by invitation; all by the organiser's key."""

    site: Site
    address: str
    invite: str
    invite_only: str
    manifest: Path
    ticket: str
    """Its id."""

    def filled_in(self, arguments: list[str]) -> list[str]:
        """Return a page's command with what its placeholders stand for."""
        folder = self.volunteers_folder
        needs_ticket = "--ticket" in arguments or (arguments[0] == "status" and "--identity" in arguments)
        meant = {
            "$INVITE": self.invite_only if needs_ticket else self.invite,
            "$ADDRESS": self.address,
            "tiny-….manifest": str(self.manifest),
            "12D3KooW…": Identity.generate().peer_id,
            "1f0c…": self.ticket,
            "run.toml": "one_source.toml" if arguments[0] == "tokenize" else "run.toml",
            "FOLDER": "corpus" if arguments[0] == "join" else str(folder),
            "hf://me/model": f"file://{self.site.folder}/pushed",
        }
        # Ports are chosen by the system, since others may be in use.
        given = [re.sub(r"^(127\.0\.0\.1:)?\d{4,5}$", r"\g<1>0", meant.get(one, one)) for one in arguments]
        if "--at" in given:
            newest = max(Checkpoints(folder / "checkpoints", folder.parent.name).indices())
            given[given.index("--at") + 1] = str(newest)
        return given

    @property
    def volunteers_folder(self) -> Path:
        peer = Identity.load(self.site.folder / "volunteer.pem").peer_id
        [folder] = (self.site.folder / "state" / "diloco-peer").glob(f"*/{peer}")
        return folder


def everything() -> list[list[str]]:
    """All commands of the pages, each once. Those about a log come before other volunteers of this machine have one."""
    found = {tuple(arguments): None for page in DOCUMENTS for arguments in commands(page.read_text(encoding="utf-8"))}
    return [list(one) for one in sorted(found, key=lambda one: (any(word in one for word in LAST), one[0] != "log"))]


@contextmanager
def small_world(tmp_path: Path) -> Iterator[World]:
    site = Site(tmp_path)
    site.environment["WANDB_MODE"] = "offline"
    corpus = write_corpus(tmp_path / "corpus")
    write_what_commands_read(tmp_path)
    with site.start("bootstrap", "--identity", "node.pem", "--archive", "archive", *LOOPBACK) as node:
        address = node.line(r"/ip4/\S+/p2p/\w+", "the bootstrap node does not say where it is")
        text = site.write_run(str(corpus)).read_text(encoding="utf-8")
        (tmp_path / "closed.toml").write_text(text + '\n[admission]\nmode = "invite"\n')
        (tmp_path / "one_source.toml").write_text(text)
        text = text.replace(f'[data]\nsource = "{corpus}"\nheld_out = 0.2\n', DATA.format(corpus=corpus))
        (tmp_path / "run.toml").write_text(f'archives = ["{address.rpartition("/")[2]}"]\n{text}')
        invite = create_run(site, tmp_path / "run.toml", address)
        invite_only = create_run(site, tmp_path / "closed.toml", address)
        manifest = tmp_path / f"{Invite.parse(invite_only).run_id}.manifest"
        made = site.run("invite", "create", str(manifest))
        (tmp_path / "ticket.txt").write_text(made.out)
        [ticket] = re.findall(r"^id: (\w+)", made.err)
        options = ("--identity", "volunteer.pem", "--device", "cpu", "--data", "corpus", *LOOPBACK)
        with site.start("join", "--run", invite, *options) as volunteer:
            volunteer.line("outer step 1 applied", "the volunteer does not train")
            world = World(site, address, invite, invite_only, manifest, ticket)
            kept = world.volunteers_folder / "checkpoints"
            eventually(lambda: kept.exists() and len(list(kept.iterdir())) > 1, "it keeps no checkpoint")
            yield world
            assert volunteer.finish().code == 0, "`finish` does not end it"
        node.signal(signal.SIGINT)
        assert node.finish().code == 0
    site.assert_nothing_is_left()


def write_what_commands_read(folder: Path) -> None:
    """Files and folders that the pages' commands name, and the organiser's key, also as the machine's default key."""
    shutil.copytree(folder / "corpus", folder / "texts")
    (folder / "examples").symlink_to(ROOT / "examples")
    shutil.copy(ROOT / "examples" / "plan" / "links.toml", folder)
    (np.arange(2000, dtype=np.uint16) % 250).tofile(folder / "FILE")
    Identity.generate().save(folder / "organiser.pem")
    (folder / "config" / "diloco-peer").mkdir(parents=True)
    shutil.copy(folder / "organiser.pem", folder / "config" / "diloco-peer" / "identity.pem")


def test_the_commands_of_all_pages(tmp_path: Path) -> None:
    failed = []
    with small_world(tmp_path) as world:
        for arguments in everything():
            for made in ("model", "models", "tokens", "pushed"):
                shutil.rmtree(tmp_path / made, ignore_errors=True)
            try:
                ended = typed(world.site, world.filled_in(arguments))
                assert ended.code in CODES.get(arguments[0], (0,)), (
                    f"{ended.code}\n{ended.out[-1000:]}\n{ended.err[-1000:]}"
                )
            except AssertionError as error:
                failed.append(f"diloco-peer {shlex.join(arguments)}: {error}")
        assert not failed, "\n".join(failed)


def typed(site: Site, arguments: list[str]) -> Finished:
    """A command to its end, which for an endless one is Ctrl-C."""
    name = arguments[0]
    if name in ("bootstrap", "join"):
        arguments = [*arguments, *LOOPBACK]
    if name == "join":
        arguments = [*arguments, "--device", "cpu"]
    if (name == "join" or "--evaluate" in arguments) and "--data" not in arguments:
        arguments = [*arguments, "--data", "corpus"]
    with site.start(*arguments) as command:
        if any(word.startswith("wandb:") for word in arguments) and find_spec("wandb") is None:
            ended = command.finish()
            return Finished(0 if "wandb" in ended.error_line() else ended.code, ended.out, ended.err)
        if name in ENDLESS and (name != "status" or "--watch" in arguments):
            command.line(ENDLESS[name], f"{shlex.join(arguments)} does not work")
            command.signal(signal.SIGINT)
        return command.finish()
