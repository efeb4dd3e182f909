"""`diloco-peer invite`: tickets given, remembered and refused."""

from __future__ import annotations

from pathlib import Path
from stat import S_IMODE
from typing import NamedTuple

import pytest
from click.testing import CliRunner, Result

from opendiloco.cli import main
from opendiloco.config.run_config import RunConfig
from opendiloco.errors import SettingsError
from opendiloco.run import Run
from opendiloco.volunteer.admission import IssuedTickets
from peers.values.identity import Identity
from peers.values.tickets import Ticket, check_ticket

FRIEND = Identity.generate()


class Desk(NamedTuple):
    """An organiser's folder, with the manifest of a run in it."""

    folder: Path
    run: Run
    organiser: Identity

    def invite(self, *arguments: str) -> Result:
        named = () if "--identity" in arguments else ("--identity", str(self.folder / "organiser.pem"))
        state = ("--state", str(self.folder / "state")) if arguments[0] != "help" else ()
        return CliRunner().invoke(main, ["invite", *arguments, *named, *state])

    @property
    def manifest(self) -> str:
        return str(self.folder / "run.manifest")

    def create(self, *arguments: str) -> Ticket:
        made = self.invite("create", *arguments)
        assert made.exit_code == 0, made.output
        return Ticket.parse(made.stdout)


def desk(config: RunConfig, folder: Path, mode: str) -> Desk:
    organiser = Identity.generate()
    organiser.save(folder / "organiser.pem")
    content = config.to_manifest_content() | {"admission": {"mode": mode}}
    run = Run.sign(RunConfig.from_manifest_content(content), organiser)
    (folder / "run.manifest").write_bytes(run.manifest.pack())
    return Desk(folder, run, organiser)


@pytest.fixture
def party(small_config: RunConfig, tmp_path: Path) -> Desk:
    return desk(small_config, tmp_path, "invite")


def test_tickets_are_for_their_giver_to_read(party: Desk) -> None:
    (party.folder / "state" / party.run.run_id / party.organiser.peer_id).mkdir(parents=True)
    party.create(party.manifest)
    [path] = party.folder.rglob("given.tickets")
    assert S_IMODE(path.stat().st_mode) == 0o600


def test_tickets_are_good_and_remembered(party: Desk) -> None:
    anybodys = party.create(party.manifest, "--days", "2")
    friends = party.create(party.manifest, "--for", FRIEND.peer_id)
    assert (anybodys.peer, friends.peer) == (None, FRIEND.peer_id)
    for ticket in (anybodys, friends):
        checked = check_ticket(
            ticket.shown_by(FRIEND.peer_id), FRIEND.peer_id, party.run.run_id, party.organiser.peer_id
        )
        assert checked == (ticket.id, ticket.expires)
    for run in (party.manifest, party.run.run_id):
        first, second = party.invite("list", run).stdout.splitlines()
        assert first.startswith(f"{anybodys.id.hex()}  until")
        assert first.endswith("good     any peer")
        assert second.endswith(f"good     {FRIEND.peer_id}")


def test_what_is_refused(party: Desk, tmp_path: Path) -> None:
    Identity.generate().save(tmp_path / "other.pem")
    for code, reason, arguments in (
        (13, "the run's organiser is", ("create", party.manifest, "--identity", str(tmp_path / "other.pem"))),
        (2, "is not a peer id", ("create", party.manifest, "--for", "nobody")),
        (2, "add --initial-peer", ("revoke", party.manifest, "00" * 8)),
        (3, "cannot be read", ("create", "nowhere.manifest")),
        (3, "is not a run id", ("list", "nowhere")),
    ):
        done = party.invite(*arguments)
        assert done.exit_code == code, (arguments, done.output)
        assert reason in " ".join(done.stderr.split())


def test_a_malformed_id_is_a_wrong_argument_and_no_refused_admission(party: Desk, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="'deadbeef' is not the id of a ticket") as caught:
        IssuedTickets("party", "12D3KooW", tmp_path).revoke(["deadbeef"], Identity.generate())
    assert caught.value.exit_code == 2


def test_an_open_run_needs_none(small_config: RunConfig, tmp_path: Path) -> None:
    refused = desk(small_config, tmp_path, "open").invite("create", str(tmp_path / "run.manifest"))
    assert refused.exit_code == 13
    assert "is open" in refused.stderr
