"""A run by invitation, with real processes: who gets in, who looks at it, and what becomes of revoked tickets."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from peers.values.identity import Identity
from peers.values.manifest import SignedManifest
from tests.opendiloco.conftest import write_corpus
from tests.swarm.cli_processes import LOOPBACK, Command, Site, announce, bootstrap, eventually, leave, sign_run

pytestmark = pytest.mark.swarm

SECONDS_TO_EXPIRY = 60


class Party(NamedTuple):
    site: Site
    address: str
    invite: str
    manifest: str

    def ticket(self, *arguments: str) -> tuple[str, str]:
        """A new ticket, and its id."""
        made = self.site.run("invite", "create", self.manifest, "--identity", "organiser.pem", *arguments)
        assert made.code == 0, made.err
        [name] = re.findall(r"^id: (\w+)", made.err)
        return made.out.strip(), name

    def join(self, identity: str, ticket: str | None = None, *options: str) -> Command:
        shown = () if ticket is None else ("--ticket", ticket)
        here = ("--identity", identity, "--device", "cpu", "--data", "corpus")
        return self.site.start("join", "--run", self.invite, *here, *shown, *options, *LOOPBACK)


@pytest.fixture
def party(tmp_path: Path) -> Iterator[Party]:
    site = Site(tmp_path)
    run = site.write_run(str(write_corpus(site.folder / "corpus")))
    run.write_text(run.read_text() + '\n[admission]\nmode = "invite"\n')
    organiser = Identity.generate()
    organiser.save(site.folder / "organiser.pem")
    manifest = sign_run(run, organiser)
    (site.folder / "run.manifest").write_bytes(manifest.pack())
    with bootstrap(site) as address:
        yield Party(site, address, announce(manifest, address), "run.manifest")
    site.assert_nothing_is_left()


def test_guests_and_others(party: Party) -> None:
    site = party.site
    friend = Identity.generate()
    friend.save(site.folder / "friend.pem")
    anybodys, name = party.ticket()
    (site.folder / "ticket.txt").write_text(party.ticket("--for", friend.peer_id)[0])
    for shown, reason in (
        (None, "has no ticket. Its organiser creates one, `invite create MANIFEST --for 12D3KooW"),
        ("ticket.txt", f"the ticket is for the peer {friend.peer_id}; this machine is"),
    ):
        with party.join("nobody.pem", shown) as uninvited:
            ended = uninvited.finish()
            assert ended.code == 13
            assert reason in ended.err
    with party.join("one.pem", anybodys) as one, party.join("friend.pem", "ticket.txt") as other:
        for guest in (one, other):
            guest.line("outer step .* 2 peers", "the guests do not train together")
        how = ("--identity", "organiser.pem", "--initial-peer", party.address)
        revoked = site.run("invite", "revoke", party.manifest, name, *how)
        assert revoked.code == 0, revoked.err
        assert "live peers that are shut out by this: 1" in revoked.err
        ended = one.finish()
        assert ended.code == 13
        assert "its ticket was revoked" in ended.err
        other.line("outer step .* 1 peer, ", "the other guest does not go on")
        exported = site.run("export", "--run", party.invite, "--identity", "nobody.pem", "--out", "model")
        assert exported.code == 13, exported.err
        exported = site.run("export", "--run", party.invite, "--identity", "organiser.pem", "--out", "model")
        assert exported.code == 0, exported.err
        assert "with --data to measure it" in exported.err
        seen = site.run("status", "--run", party.invite, "--identity", "organiser.pem", "--json")
        assert seen.code == 0, seen.err
        assert len(json.loads(seen.out)["peers"]) == 1
        leave(other)
    listed = site.run("invite", "list", party.manifest, "--identity", "organiser.pem")
    assert re.search(rf"{name} .* revoked +any peer", listed.out)
    [log] = site.folder.glob(f"state/diloco-peer/*/{friend.peer_id}/log")
    verified = site.run("log", "verify", "--folder", str(log))
    assert verified.code == 0, verified.err
    # Its farewell counts it out, but not of an entry that it may have voted on (R11): a minority may have made that.
    alone = re.findall(r"entries that a minority made: (.*)", verified.out)
    assert alone == [] or re.fullmatch(r"entry \d+", alone[0]), alone
    with party.join("friend.pem") as again_there:
        again_there.line("outer step", "a guest that comes back is not admitted with the ticket of before")
        leave(again_there)


@pytest.mark.thorough
def test_an_archive_and_a_ticket_that_expires(party: Party) -> None:
    site = party.site
    archive = Identity.generate()
    archive.save(site.folder / "archive.pem")
    kept = ("--archive", "archive", "--ticket", party.ticket("--for", archive.peer_id)[0])
    with site.start("bootstrap", "--identity", "archive.pem", *kept, *LOOPBACK) as node:
        address = node.line(r"/ip4/\S+/p2p/\w+", "the archive does not say where it is")
        invite = announce(SignedManifest.unpack((site.folder / party.manifest).read_bytes()), address)
        there = party._replace(invite=invite)
        soon = str(SECONDS_TO_EXPIRY / 86400)
        with (
            there.join("guest.pem", party.ticket("--days", soon)[0]) as guest,
            there.join("organiser.pem", None, "--cpu-workers", "2") as organiser,
        ):
            organiser.line("outer step", "the organiser does not train without a ticket")
            payloads = (site.folder / "archive").rglob
            eventually(lambda: any(payloads("*.payload")), "the archive does not follow the run")
            ended = guest.finish()
            assert ended.code == 13
            assert "its ticket is expired" in ended.err
            leave(organiser)
        node.signal(signal.SIGINT)
        assert node.finish().code == 0
