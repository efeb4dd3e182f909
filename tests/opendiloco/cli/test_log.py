"""`diloco-peer log`: what it prints, and that it finds out what was changed."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from opendiloco.cli import main
from opendiloco.config.run_config import RunConfig
from opendiloco.model.build import initial_theta
from opendiloco.run import Run
from opendiloco.storage.audit import Findings, _entries, _Proofs
from opendiloco.storage.files import file_header
from opendiloco.storage.loading import metadata_of
from opendiloco.storage.run_folder import RunFolder
from peers.audit.proofs import BadContribution, TwoCommitments
from peers.log.chain import Entry
from peers.log.folder import ENTRIES, NO_RUN, PAYLOADS, LogFolder, _entry_line, _first_line, payload_path, read_chain
from peers.log.header import FAULT_AGE, Fault, Position
from peers.messages.commitment import Author, ChunkProof, CommittedChunk, commit_to
from peers.values.chunks import ChunkedPayload, Sum
from peers.values.identity import Identity
from peers.values.manifest import Amendment
from peers.values.signed_heads import SignedHead, pack_heads
from peers.values.wire import digest_of, pack
from tests.opendiloco.training.recorded_run import (
    BLOCK_BYTES,
    IDENTITIES,
    PEERS,
    RecordedRun,
    amendment,
    certificate,
    record,
)
from tests.peers.logs import next_header

ENTRIES_OF_RUN = 5
ORGANISER = Identity.generate()


@pytest.fixture(scope="module")
def recorded(small_config: RunConfig) -> RecordedRun:
    return record(Run.sign(small_config, ORGANISER), initial_theta(small_config), ENTRIES_OF_RUN)


@pytest.fixture
def folder(recorded: RecordedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """A volunteer's folder of the run, with the whole log."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    folder = RunFolder.open(recorded.run, "peer")
    recorded.fill(LogFolder.open(folder.log, recorded.empty_log, BLOCK_BYTES))
    return folder


def log(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["log", *map(str, arguments)])


def verify(folder: RunFolder, *arguments: object) -> list[str]:
    """What it says of a sound log."""
    result = log("verify", "--folder", folder.path, *arguments)
    assert result.exit_code == 0, result.output
    return result.stdout.splitlines()


def assert_wrong(folder: RunFolder, index: int, what: str, *arguments: object) -> str:
    """It names the first bad entry, and changes nothing. Returns all that it says."""
    before = {path: path.read_bytes() for path in folder.path.rglob("*") if path.is_file()}
    result = log("verify", "--folder", folder.path, *arguments)
    assert result.exit_code == 11, result.output
    assert f"does not match its digests from entry {index} on: " in result.stderr
    assert what in result.stderr
    assert before == {path: path.read_bytes() for path in folder.path.rglob("*") if path.is_file()}
    return result.output


def payload_file(folder: RunFolder, recorded: RecordedRun, index: int) -> Path:
    return payload_path(folder.log / PAYLOADS, index, recorded.headers[index].payload)


def rewrite(folder: RunFolder, change: Callable[[list[Entry]], list[Entry]]) -> None:
    """Change entries as somebody would who knows how they are written."""
    file = folder.log / ENTRIES
    chain, _ = read_chain(file)
    changed = change(chain.entries)
    file.write_bytes(_first_line(chain.empty_log) + b"".join(_entry_line(entry) for entry in changed))


def checkpoint(folder: RunFolder, recorded: RecordedRun, index: int) -> Path:
    saved = recorded.states[index]
    path = folder.checkpoints / f"outer-step-{index:06}.safetensors"
    metadata = metadata_of(recorded.run.run_id, saved.last, saved.state_digest)
    path.write_bytes(file_header(len(saved.data), metadata) + saved.data)
    return path


def test_amendments_are_verified_and_shown(small_config: RunConfig, tmp_path: Path) -> None:
    """From the manifest, from a checkpoint at which one is in force, and by the log alone."""
    run = Run.sign(small_config, ORGANISER)
    signed = {
        index: amendment(run, number, ORGANISER, outer_learning_rate=learning_rate, outer_momentum=0.5)
        for index, number, learning_rate in ((1, 1, 0.4), (3, 7, 0.2))
    }
    amended = record(run, initial_theta(small_config), ENTRIES_OF_RUN, amendments=signed)
    plain = record(run, initial_theta(small_config), ENTRIES_OF_RUN)
    same = [one.state_digest == other.state_digest for one, other in zip(amended.states, plain.states, strict=True)]
    assert same == [True, True, True, False, False, False], "from the outer step after the entry on"
    folder = RunFolder.open(run, "peer", tmp_path)
    amended.fill(LogFolder.open(folder.log, amended.empty_log, BLOCK_BYTES))
    assert "verified: states, from the manifest on: entries 0 to 4" in verify(folder)
    for index in (1, 2, 3, 4):
        path = checkpoint(folder, amended, index)
        said = verify(folder, "--checkpoint", path)
        last = f"entries {index} to 4" if index < 4 else "entry 4"
        assert f"verified: states, from the checkpoint of outer step {index} on: {last}" in said
    lines = log("show", "--folder", folder.path).stdout.splitlines()
    first, second = (
        f"amendment {number} (outer learning rate {rate}, outer momentum 0.5)" for number, rate in ((1, 0.4), (7, 0.2))
    )
    assert [line.rpartition("in force ")[2] for line in lines] == ["-", first, first, second, second]
    shown = json.loads(log("show", "--folder", folder.path, "--json").stdout)
    assert shown[2]["amendment"] == {"number": 1, "outer_learning_rate": 0.4, "outer_momentum": 0.5}


def test_states_that_follow_from_an_amendment_that_is_not_understood_are_not_verified(
    small_config: RunConfig, tmp_path: Path
) -> None:
    run = Run.sign(small_config, ORGANISER)
    later = Amendment.sign(run.run_id, 1, b'{"loss_scale":2}', ORGANISER)
    log_state, headers = run.settings.empty_log, record(run, initial_theta(small_config), 2)
    folder = RunFolder.open(run, "peer", tmp_path)
    kept = LogFolder.open(folder.log, log_state, BLOCK_BYTES)
    for index in range(2):
        log_state = log_state.in_state(headers.states[index].state_digest)
        taken_in = later if index == 0 else None
        header = next_header(
            log_state, headers.headers[index].roster, headers.payloads[index].digest, amendment=taken_in
        )
        kept.append(header, None, headers.payloads[index], certificate(log_state, header))
        log_state = log_state.append(header)
    result = log("verify", "--folder", folder.path)
    assert result.exit_code == 3
    assert "Upgrade diloco-peer" in result.stderr
    assert "an amendment that this version does not understand" in result.stdout
    assert "does not understand it" in log("show", "--folder", folder.path).stdout


# Show -------------------------------------------------------------------------------------------------------------
def test_show_prints_a_line_per_entry(folder: RunFolder, recorded: RecordedRun) -> None:
    result = log("show", "--run", recorded.run.run_id)
    lines = result.stdout.splitlines()
    assert len(lines) == ENTRIES_OF_RUN
    header, state = recorded.headers[3], recorded.states[4].state_digest
    assert lines[3] == (
        f"entry 3, peers 2, tokens 256, in all 1,024, payload {header.payload.hex()[:8]}, "
        f"header {header.digest.hex()[:8]}, state {state.hex()[:8]}, in force -"
    )


def test_show_prints_json(folder: RunFolder, recorded: RecordedRun) -> None:
    for place in (folder.path, folder.log):
        [shown] = json.loads(log("show", "--folder", place, "--json", "--last", 1).stdout)
        assert shown["index"] == ENTRIES_OF_RUN - 1
        assert [member["peer"] for member in shown["peers"]] == list(PEERS)
        assert (shown["tokens"], shown["lineage_tokens"]) == (256, 1280)
        assert shown["previous"] == recorded.headers[-2].digest.hex()
        assert shown["header"] == recorded.headers[-1].digest.hex()
        assert shown["payload"] == recorded.headers[-1].payload.hex()
        assert shown["state"] == recorded.states[-1].state_digest.hex()
        assert shown["amendment"] is None


def test_show_has_a_table_for_a_terminal(recorded: RecordedRun, capsys: pytest.CaptureFixture[str]) -> None:
    from opendiloco.cli.log import _cells, _print_table

    _print_table([_cells(Entry.whole(header, None), header) for header in recorded.headers[:2]])
    heading, first, _ = capsys.readouterr().out.splitlines()
    assert heading.split() == ["entry", "peers", "tokens", "in", "all", "payload", "header", "state", "in", "force"]
    assert first.split()[-3:] == [recorded.headers[0].digest.hex()[:8], "-", "-"]


def test_show_ends_where_a_line_is_damaged(folder: RunFolder) -> None:
    file = folder.log / ENTRIES
    file.write_bytes(file.read_bytes()[:-9])
    result = log("show", "--folder", folder.path)
    assert len(result.stdout.splitlines()) == ENTRIES_OF_RUN - 1
    assert "line 6: it is corrupt, or cut short" in result.stderr


# Which log --------------------------------------------------------------------------------------------------------
def test_which_log(folder: RunFolder, recorded: RecordedRun, tmp_path: Path) -> None:
    run_id = recorded.run.run_id
    assert log("show", "--run", f"diloco:{run_id}@/ip4/192.0.2.2/tcp/1/p2p/abc").exit_code == 0
    assert "both --run and --folder are given" in log("show", "--run", run_id, "--folder", folder.path).stderr
    for arguments in ((), ("--folder", folder.path.parent), ("--folder", folder.path.parent.parent)):
        assert log("show", *arguments).exit_code == 0, "there is only one"
    assert log("show", "--run", "no run").exit_code == 3
    other = run_id[:-1] + ("a" if run_id[-1] != "a" else "b")
    assert "there is no log in" in log("show", "--run", other).stderr
    (tmp_path / "empty").mkdir()
    assert "--folder ARCHIVE/RUN" in log("verify", "--folder", tmp_path / "empty").stderr
    second = RunFolder.open(recorded.run, "second")
    LogFolder.open(second.log, recorded.empty_log, BLOCK_BYTES)
    result = log("show", "--run", run_id)
    assert result.exit_code == 2
    assert f"choose one with --folder FOLDER: {folder.path}, {second.path}" in result.stderr
    assert verify(second) == []


def test_which_manifest(folder: RunFolder, recorded: RecordedRun, small_config: RunConfig, tmp_path: Path) -> None:
    moved = folder.manifest.rename(tmp_path / "other.manifest")
    assert verify(folder, "--manifest", moved)
    result = log("verify", "--folder", folder.log)
    assert result.exit_code == 3
    assert f"{folder.manifest} does not exist. Give" in result.stderr
    moved.write_bytes(Run.sign(small_config, Identity.generate()).manifest.pack())
    assert_wrong(folder, 0, "line 1: it is of the run small-", "--manifest", moved)


# Verify -----------------------------------------------------------------------------------------------------------
def test_a_sound_log_is_verified_from_the_manifest_on(folder: RunFolder) -> None:
    assert verify(folder) == [
        "verified: signatures of a quorum of the voters before: entries 0 to 4",
        "verified: headers, from the manifest on: entries 0 to 4",
        "verified: payloads: entries 0 to 4",
        "verified: states, from the manifest on: entries 0 to 4",
    ]


def test_what_was_verified_as_json(folder: RunFolder, recorded: RecordedRun) -> None:
    everything = list(range(ENTRIES_OF_RUN))
    assert json.loads("\n".join(verify(folder, "--json"))) == {
        "run": recorded.run.run_id,
        "verified": {
            "signatures of a quorum of the voters before": everything,
            "headers, from the manifest on": everything,
            "payloads": everything,
            "states, from the manifest on": everything,
        },
        "not_verified": {},
        "wrong": [],
    }
    path = payload_file(folder, recorded, 3)
    path.write_bytes(b"")
    done = log("verify", "--folder", folder.path, "--json")
    assert done.exit_code == 11
    what = f"{path} is not the payload that its header names"
    assert json.loads(done.stdout)["wrong"] == [{"entry": 3, "what": what}]


def test_a_sound_log_is_verified_from_a_checkpoint_on(folder: RunFolder, recorded: RecordedRun) -> None:
    path = checkpoint(folder, recorded, 2)
    LogFolder.open(folder.log, recorded.empty_log, BLOCK_BYTES).prune(2)
    assert verify(folder, "--checkpoint", path) == [
        "verified: signatures of a quorum of the voters before: entries 0 to 4",
        "verified: headers, from the manifest on: entries 0 to 4",
        "verified: states, as in the checkpoint of outer step 2: entry 1",
        "verified: payloads: entries 2 to 4",
        "verified: states, from the checkpoint of outer step 2 on: entries 2 to 4",
        "not verified: payloads, which are missing: entries 0 to 1",
        "not verified: states before the checkpoint of outer step 2: entry 0",
    ]
    assert verify(folder) == verify(folder, "--checkpoint", path), "it is found beside the log"
    path.unlink()
    lacking = "not verified: states, because the first payload and a checkpoint are missing: entries 0 to 4"
    assert lacking in verify(folder)


def test_of_a_finished_run_the_last_state_is_verified(folder: RunFolder, recorded: RecordedRun) -> None:
    """Regression: the checkpoint was not looked for, so that no state was verified of a run that had just ended."""
    checkpoint(folder, recorded, ENTRIES_OF_RUN)
    LogFolder.open(folder.log, recorded.empty_log, BLOCK_BYTES).prune(ENTRIES_OF_RUN)
    assert verify(folder)[2:] == [
        "verified: states, as in the checkpoint of outer step 5: entry 4",
        "not verified: payloads, which are missing: entries 0 to 4",
        "not verified: states before the checkpoint of outer step 5: entries 0 to 3",
    ]


def test_the_oldest_good_checkpoint_that_leads_to_the_end_is_taken(folder: RunFolder, recorded: RecordedRun) -> None:
    paths = {index: checkpoint(folder, recorded, index) for index in (1, 2, 3, 4)}
    LogFolder.open(folder.log, recorded.empty_log, BLOCK_BYTES).prune(2)
    assert "verified: states, from the checkpoint of outer step 2 on: entries 2 to 4" in verify(folder)
    paths[2].write_bytes(paths[2].read_bytes()[:-4] + b"\1\2\3\4")
    assert "verified: states, from the checkpoint of outer step 3 on: entries 3 to 4" in verify(folder)
    for index in (3, 4):
        paths[index].unlink()
    said = verify(folder)
    assert "verified: states, as in the checkpoint of outer step 1: entry 0" in said
    assert "not verified: states, without the payload of entry 1: entries 1 to 4" in said


def test_a_log_from_the_middle(folder: RunFolder, recorded: RecordedRun) -> None:
    first = Entry.whole(recorded.headers[2], recorded.states[3].state_digest)
    rewrite(folder, lambda found: [first, *(replace(one, state_digest=None) for one in found[3:])])
    path = checkpoint(folder, recorded, 2)
    assert verify(folder, "--checkpoint", path) == [
        "verified: signatures of a quorum of the voters before: entries 3 to 4",
        "verified: headers, from the first stored one on: entries 2 to 4",
        "verified: payloads: entries 2 to 4",
        "verified: states, from the checkpoint of outer step 2 on: entry 2",
        "not verified: signatures, because the entries before are missing: entry 2",
        "not verified: states whose digest was not recorded: entries 3 to 4",
    ]


def test_entries_that_no_quorum_has_signed_are_named(folder: RunFolder, recorded: RecordedRun) -> None:
    log = recorded.empty_log.at(recorded.headers[1])
    alone = certificate(log, recorded.headers[2], IDENTITIES[:1])

    def change(found: list[Entry]) -> list[Entry]:
        second, third = replace(found[1], certificate=None), replace(found[2], certificate=pack(alone))
        return [found[0], second, third, *found[3:]]

    rewrite(folder, change)
    said = verify(folder)
    assert "verified: signatures of a quorum of the voters before: entries 0, 3 to 4" in said
    assert "not verified: signatures, which are missing: entry 1" in said
    assert "not verified: entries that a minority made: entry 2" in said


def test_a_certificate_of_another_entry_is_found(folder: RunFolder, recorded: RecordedRun) -> None:
    other = pack(recorded.certificates[1])
    rewrite(folder, lambda found: [*found[:2], replace(found[2], certificate=other), *found[3:]])
    assert_wrong(folder, 2, "the certificate is for another entry or group")


def sign(folder: RunFolder, index: int, head: bytes, by: Identity = ORGANISER) -> None:
    """A head that this machine has heard of."""
    signed = SignedHead.sign(folder.run_id, index, head, by.peer_id, by)
    folder.signed_heads.write_bytes(pack_heads([signed]))


def test_signed_heads_are_those_of_the_log(folder: RunFolder, recorded: RecordedRun) -> None:
    sign(folder, 3, recorded.headers[2].digest)
    assert "verified: heads that the run's archives have signed: entry 2" in verify(folder)
    sign(folder, 9, bytes(32))
    assert not [line for line in verify(folder) if "archives" in line], "the log has not come so far"


def test_another_log_than_the_signed_one_is_found(folder: RunFolder) -> None:
    sign(folder, 3, bytes(32))
    assert_wrong(folder, 2, f"the archive {ORGANISER.peer_id} has signed another entry")
    sign(folder, 3, bytes(32), Identity.generate())
    assert_wrong(folder, 0, "is not an archive of the run")


def test_states_are_verified_up_to_a_gap(folder: RunFolder, recorded: RecordedRun) -> None:
    payload_file(folder, recorded, 2).unlink()
    said = verify(folder)
    assert "verified: payloads: entries 0 to 1, 3 to 4" in said
    assert "not verified: payloads, which are missing: entry 2" in said
    assert "not verified: states, without the payload of entry 2: entries 2 to 4" in said


def test_a_checkpoint_of_another_lineage(folder: RunFolder, recorded: RecordedRun, small_config: RunConfig) -> None:
    other = record(recorded.run, initial_theta(small_config), 2, seed=2)
    said = verify(folder, "--checkpoint", checkpoint(folder, other, 2))
    lacking = "the log does not have the last entry of the checkpoint of outer step 2"
    assert f"not verified: states, because {lacking}: entries 0 to 4" in said


def test_a_changed_header_is_found(folder: RunFolder, recorded: RecordedRun) -> None:
    lines = (folder.log / ENTRIES).read_bytes().splitlines(keepends=True)
    (folder.log / ENTRIES).write_bytes(b"".join([*lines[:4], lines[4].replace(b"a", b"b", 1), *lines[5:]]))
    said = assert_wrong(folder, 3, "line 5: it is corrupt")
    assert "verified: states, from the manifest on: entries 0 to 2\n" in said


def test_a_changed_header_is_found_though_its_line_is_sound(folder: RunFolder, recorded: RecordedRun) -> None:
    richer = recorded.headers[3].model_copy(update={"lineage_tokens": 10**9})
    rewrite(folder, lambda found: [*found[:3], Entry.whole(richer, found[3].state_digest), *found[4:]])
    assert_wrong(folder, 3, "line 5: entry 3: its lineage_tokens does not follow from the log")


def test_a_removed_entry_is_found(folder: RunFolder) -> None:
    rewrite(folder, lambda found: [*found[:2], *found[3:]])
    assert_wrong(folder, 2, "line 4: entry 3 does not follow from 2:")


def test_a_changed_payload_is_found(folder: RunFolder, recorded: RecordedRun) -> None:
    path = payload_file(folder, recorded, 3)
    changed = bytearray(path.read_bytes())
    changed[100] ^= 1
    path.write_bytes(changed)
    said = assert_wrong(folder, 3, f"{path} is not the payload that its header names")
    assert "not verified: states, without the payload of entry 3: entries 3 to 4\n" in said


def test_a_payload_that_no_encoder_makes_is_found(folder: RunFolder, recorded: RecordedRun) -> None:
    nonsense = ChunkedPayload.cut(memoryview(b"\xff" * len(recorded.payloads[0].data)), BLOCK_BYTES)
    log_folder = LogFolder.open(folder.log, recorded.empty_log, BLOCK_BYTES)
    at = recorded.empty_log.at(recorded.headers[2])
    log_folder.append(next_header(at, recorded.headers[3].roster, nonsense.digest), None, nonsense)
    said = assert_wrong(folder, 3, "its payload cannot be applied")
    assert "verified: states, from the manifest on: entries 0 to 2\n" in said


@pytest.mark.parametrize("start", [None, 1, 2])
def test_a_wrong_state_digest_is_found(folder: RunFolder, recorded: RecordedRun, start: int | None) -> None:
    def lie(found: list[Entry]) -> list[Entry]:
        return [*found[:2], replace(found[2], state_digest=digest_of(b"other")), *found[3:]]

    rewrite(folder, lie)
    arguments = () if start is None else ("--checkpoint", checkpoint(folder, recorded, start))
    said = assert_wrong(folder, 2, "leads to another state than the recorded one", *arguments)
    assert "not verified: states, which follow from the wrong entry 2: entries 3 to 4\n" in said


def test_a_state_digest_that_is_not_the_checkpoints_is_found(folder: RunFolder, recorded: RecordedRun) -> None:
    rewrite(folder, lambda found: [found[0], replace(found[1], state_digest=digest_of(b"other")), *found[2:]])
    path = checkpoint(folder, recorded, 2)
    assert_wrong(folder, 1, "the recorded state is not that of the checkpoint of outer step 2", "--checkpoint", path)


def test_a_damaged_checkpoint_is_refused(folder: RunFolder, recorded: RecordedRun) -> None:
    path = checkpoint(folder, recorded, 2)
    path.write_bytes(path.read_bytes()[:-4] + b"\1\2\3\4")
    assert log("verify", "--folder", folder.path, "--checkpoint", path).exit_code == 9


def test_a_disk_that_cannot_be_read(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreadable(path: Path, block_bytes: int) -> ChunkedPayload:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("opendiloco.storage.audit.read_payload", unreadable)
    result = log("verify", "--folder", folder.path)
    assert result.exit_code == 6
    assert f"the log in {folder.log} cannot be read: Input/output error." in result.stderr


def test_the_first_of_several_wrong_entries_is_named(folder: RunFolder, recorded: RecordedRun) -> None:
    for index in (3, 1):
        payload_file(folder, recorded, index).write_bytes(b"")
    said = assert_wrong(folder, 1, "1-")
    assert said.index("wrong: entry 1: ") < said.index("wrong: entry 3: ")


def test_indices_in_words() -> None:
    assert _entries([7]) == "entry 7"
    assert _entries([1, 2, 3]) == "entries 1 to 3"
    assert _entries([0, 2, 3, 9]) == "entries 0, 2 to 3, 9"


# What excludes peers ----------------------------------------------------------------------------------------------
def two_commitments(position: Position, liar: int = 0, is_lie: bool = True) -> TwoCommitments:
    author = Author(peer=PEERS[liar], incarnation=0, position=position, number=0)
    roots = [Sum(digest_of(b"%d" % (number * is_lie)), 1.0) for number in range(2)]
    first, second = (commit_to(root, author, IDENTITIES[liar]) for root in roots)
    return TwoCommitments(author=author, first=first, second=second)


def position(recorded: RecordedRun, index: int) -> Position:
    header = recorded.headers[index]
    return Position(index=index, head=header.previous)


def found_of(recorded: RecordedRun, folder: Path, fault: Fault, index: int = 2, first: int = 0) -> Findings:
    """What is found where an entry names this fault, in a log that begins with the entry `first`."""
    findings = Findings()
    proofs = _Proofs(folder, recorded.run, findings)
    naming = recorded.headers[2].model_copy(update={"faults": (fault,), "index": index})
    log = recorded.empty_log
    for header in (*recorded.headers[first:2], naming):
        proofs.check(header, log)
        log = log.at(header)
    return findings


def keep(folder: Path, proof: bytes) -> None:
    LogFolder.open(folder, NO_RUN, BLOCK_BYTES).keep_proofs([proof])


def test_what_excludes_a_peer_is_verified_where_its_proof_is_here(recorded: RecordedRun, tmp_path: Path) -> None:
    proof = two_commitments(position(recorded, 1))
    lacking = f"the proof that {proof.accused} lied, which is missing"
    assert found_of(recorded, tmp_path, proof.fault).unverified == {lacking: {2}}
    keep(tmp_path, pack(proof))
    assert found_of(recorded, tmp_path, proof.fault).verified == {"proofs of faults": {2}}
    assert found_of(recorded, tmp_path, proof.fault, FAULT_AGE).verified == {"proofs of faults": {FAULT_AGE}}


def test_a_proof_of_what_came_before_the_log_is_not_verified(recorded: RecordedRun, tmp_path: Path) -> None:
    proof = two_commitments(position(recorded, 1))
    keep(tmp_path, pack(proof))
    assert found_of(recorded, tmp_path, proof.fault, first=1).unverified == {
        "proofs of faults, because the entries before are missing": {2}
    }


@pytest.mark.parametrize(("told_at", "named_in"), [(0, 2), (1, FAULT_AGE + 1), (2, 1)])
def test_a_lie_is_named_only_when_members_would_sign_that(
    told_at: int, named_in: int, recorded: RecordedRun, tmp_path: Path
) -> None:
    """Regression: a proof of any age was found good, and one for the first entry."""
    proof = two_commitments(position(recorded, told_at))
    keep(tmp_path, pack(proof))
    wrong = f"it names {proof.accused} for a lie at entry {told_at}, which this entry may not name"
    assert found_of(recorded, tmp_path, proof.fault, named_in).wrong == [(named_in, wrong)]


@pytest.mark.parametrize("what", ["no lie", "another log", "another peer", "no proof"])
def test_what_proves_nothing_is_found(what: str, recorded: RecordedRun, tmp_path: Path) -> None:
    place = position(recorded, 1)
    if what == "another log":
        place = place.model_copy(update={"head": digest_of(b"another")})
    proof = two_commitments(place, is_lie=what != "no lie")
    fault, data = proof.fault, pack(proof)
    if what == "another peer":
        fault = fault.model_copy(update={"peer": PEERS[1]})
    if what == "no proof":
        data = b"nonsense"
        fault = fault.model_copy(update={"proof": digest_of(data)})
    keep(tmp_path, data)
    assert found_of(recorded, tmp_path, fault).wrong == [(2, f"the stored proof does not convict {fault.peer}")]


def test_a_false_contribution_is_not_verified_without_the_model(recorded: RecordedRun, tmp_path: Path) -> None:
    author = Author(peer=PEERS[0], incarnation=0, position=position(recorded, 1), number=0)
    said = commit_to(Sum(digest_of(b"root"), 1.0), author, IDENTITIES[0])
    shown = CommittedChunk(commitment=said, chunk=0, proof=ChunkProof(squares=1.0, path=b""), data=b"chunk")
    proof = BadContribution(author=author, evidence=shown)
    keep(tmp_path, pack(proof))
    (what,) = found_of(recorded, tmp_path, proof.fault).unverified
    assert what == "proofs of false contributions, which need the model"
