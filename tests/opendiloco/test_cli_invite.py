"""`diloco-peer invite`: tickets given, remembered, signed on and refused."""

from __future__ import annotations

from pathlib import Path
from stat import S_IMODE
from typing import NamedTuple

import pytest
from click.testing import CliRunner, Result

from opendiloco.cli import main
from opendiloco.config.run_config import RunConfig
from opendiloco.issued import Issued
from opendiloco.run import Run
from peers.errors import AdmissionError
from peers.values.identity import Identity
from peers.values.tickets import Ticket, place_of

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
    [path] = party.folder.rglob("issued.jsonl")
    assert S_IMODE(path.stat().st_mode) == 0o600


def test_tickets_are_good_and_remembered(party: Desk) -> None:
    anybodys = party.create(party.manifest, "--places", "3", "--days", "2")
    friends = party.create(party.manifest, "--for", FRIEND.peer_id)
    place = place_of(friends.chain_for(FRIEND.peer_id), party.run.run_id, party.organiser.peer_id)
    assert (place.holder, place.size) == (FRIEND.peer_id, 1)
    assert (anybodys.count, anybodys.is_for_anybody) == (3, True)
    for run in (party.manifest, party.run.run_id):
        first, second = party.invite("list", run).stdout.splitlines()
        assert first.startswith(f"{anybodys.id.hex()}      3 places  until")
        assert first.endswith("good     anybody")
        assert second.endswith(f"good     {FRIEND.peer_id}")


def test_places_of_a_quota_are_given_once(party: Desk) -> None:
    FRIEND.save(party.folder / "friend.pem")
    quota = party.create(party.manifest, "--for", FRIEND.peer_id, "--places", "5")
    (party.folder / "quota.txt").write_text(str(quota))
    signing_on = ("--from", str(party.folder / "quota.txt"), "--identity", str(party.folder / "friend.pem"))
    one, other = party.create(*signing_on), party.create(*signing_on, "--places", "2")
    numbers = []
    for number, ticket in enumerate((one, other, other)):
        guest = Identity.generate().peer_id
        chain = ticket.chain_for(guest, max(0, number - 1))
        numbers.append(place_of(chain, party.run.run_id, party.organiser.peer_id).number)
    assert numbers == [1, 2, 3]
    refused = party.invite("create", *signing_on, "--places", "2")
    assert refused.exit_code == 13
    assert "--places 2: of the ticket's 5 places, 1 can still be given on" in refused.stderr
    assert party.create(*signing_on).parent == quota.id


def test_a_ticket_is_signed_on_no_more_often_than_heartbeats_can_show(party: Desk) -> None:
    keys = [Identity.generate() for _ in range(4)]
    for number, key in enumerate(keys):
        key.save(party.folder / f"{number}.pem")
    ticket = party.create(party.manifest, "--for", keys[0].peer_id, "--places", "9")
    for number in (0, 1):
        (party.folder / f"{number}.txt").write_text(str(ticket))
        given = ("--from", str(party.folder / f"{number}.txt"), "--identity", str(party.folder / f"{number}.pem"))
        ticket = party.create(*given, "--for", keys[number + 1].peer_id, "--places", str(5 - number))
    assert party.invite("create", *given).exit_code == 13, "whoever has it could not sign itself a place"
    (party.folder / "2.txt").write_text(str(ticket))
    last = ("--from", str(party.folder / "2.txt"), "--identity", str(party.folder / "2.pem"))
    refused = party.invite("create", *last, "--for", keys[3].peer_id)
    assert refused.exit_code == 13
    assert "signed on as often as it can be" in refused.stderr


def test_what_is_refused(party: Desk, tmp_path: Path) -> None:
    Identity.generate().save(tmp_path / "other.pem")
    anybodys = str(party.create(party.manifest))
    for code, reason, arguments in (
        (13, "the run's organiser is", ("create", party.manifest, "--identity", str(tmp_path / "other.pem"))),
        (13, "Hand on the ticket itself", ("create", "--from", anybodys)),
        (13, "is not a ticket", ("create", "--from", "nonsense")),
        (2, "is not a peer id", ("create", party.manifest, "--for", "nobody")),
        (2, "give the run's MANIFEST, or --from", ("create",)),
        (2, "give the run's MANIFEST, or --from", ("create", party.manifest, "--from", anybodys)),
        (2, "add --initial-peer", ("revoke", party.manifest, "00" * 8)),
        (3, "cannot be read", ("create", "nowhere.manifest")),
        (3, "is not a run id", ("list", "nowhere")),
    ):
        done = party.invite(*arguments)
        assert done.exit_code == code, (arguments, done.output)
        assert reason in " ".join(done.stderr.split())


def test_an_open_run_needs_none(small_config: RunConfig, tmp_path: Path) -> None:
    refused = desk(small_config, tmp_path, "open").invite("create", str(tmp_path / "run.manifest"))
    assert refused.exit_code == 13
    assert "is open" in refused.stderr


@pytest.mark.parametrize("text", ["zzzz", "35b9", "00" * 9, ""])
def test_what_is_no_tickets_id_is_not_revoked(tmp_path: Path, text: str) -> None:
    """Regression: a part of one was signed, and then seemed to be a bug."""
    with pytest.raises(AdmissionError, match="is not the id of a ticket"):
        Issued("tiny", "me", tmp_path).all_revoked((text,))
