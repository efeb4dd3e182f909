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
from tests.opendiloco.conftest import write_corpus
from tests.swarm.cli_processes import LOOPBACK, Command, Site, bootstrap, leave

pytestmark = pytest.mark.swarm


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

    def join(self, identity: str, ticket: str | None = None) -> Command:
        shown = () if ticket is None else ("--ticket", ticket)
        here = ("--identity", identity, "--device", "cpu", "--data", "corpus")
        return self.site.start("join", "--run", self.invite, *here, *shown, *LOOPBACK)


@pytest.fixture
def party(tmp_path: Path) -> Iterator[Party]:
    site = Site(tmp_path)
    run = site.write_run(str(write_corpus(site.folder / "corpus")))
    run.write_text(run.read_text() + '\n[admission]\nmode = "invite"\n')
    with bootstrap(site) as address:
        created = site.run("run", "create", "run.toml", "--initial-peer", address, "--identity", "organiser.pem")
        assert created.code == 0, created.err
        [invite] = re.findall(r"^invite: +(\S+)$", created.out, re.MULTILINE)
        [manifest] = re.findall(r"diloco-peer invite create (\S+)", created.out, re.MULTILINE)
        yield Party(site, address, invite, manifest)
    site.assert_nothing_is_left()


def test_guests_and_others(party: Party) -> None:
    site = party.site
    friend = Identity.generate()
    friend.save(site.folder / "friend.pem")
    anybodys, name = party.ticket()
    (site.folder / "ticket.txt").write_text(party.ticket("--for", friend.peer_id, "--places", "2")[0])
    with party.join("nobody.pem") as uninvited:
        ended = uninvited.finish()
        assert ended.code == 13
        assert "is by invitation. Ask its organiser for a ticket; join with --ticket." in ended.err
    with party.join("one.pem", anybodys) as one, party.join("friend.pem", "ticket.txt") as other:
        other.line("outer step .* 2 peers", "the two guests do not train together")
        one.line("outer step .* 2 peers", "the first guest does not train with the second")
        with party.join("late.pem", anybodys) as late:
            ended = late.finish()
            assert ended.code == 13
            assert "is taken by" in ended.err
        seen = site.run("status", "--run", party.invite, "--identity", "organiser.pem", "--json")
        assert seen.code == 0, seen.err
        assert len(json.loads(seen.out)["peers"]) == 2
        given = site.run("invite", "create", "--from", "ticket.txt", "--identity", "friend.pem")
        assert given.code == 0, given.err
        again = site.run("invite", "create", "--from", "ticket.txt", "--identity", "friend.pem")
        assert again.code == 13
        assert "of the ticket's 2 places, 0 can still be given on" in again.err
        how = ("--identity", "organiser.pem", "--initial-peer", party.address)
        revoked = site.run("invite", "revoke", party.manifest, name, *how)
        assert revoked.code == 0, revoked.err
        listed = site.run("invite", "list", party.manifest, "--identity", "organiser.pem")
        assert re.search(rf"{name} +1 places .* revoked +anybody", listed.out)
        ended = one.finish()
        assert ended.code == 13
        assert "its ticket was revoked" in ended.err
        other.line("outer step .* 1 peers", "the other guest does not go on")
        leave(other)
    with party.join("friend.pem") as again_there:
        again_there.line("outer step", "a guest that comes back is not admitted with the ticket of before")
        again_there.signal(signal.SIGTERM)
        assert again_there.finish().code == 0
