"""`diloco-peer doctor` for real: with a run and without, and where things are broken."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from opendiloco.settings.join_settings import JoinSettings
from opendiloco.tools.doctor import examination
from opendiloco.tools.doctor.examination import Examination
from opendiloco.tools.doctor.findings import CHECKS, Finding, Verdict, passed
from peers.errors import ManifestError
from peers.network.daemon import P2P
from peers.values.identity import Identity
from peers.values.manifest import Invite
from tests.opendiloco.conftest import write_corpus
from tests.swarm.cli_processes import LOOPBACK, Command, Site, announce_run, bootstrap, volunteers
from tests.swarm.routers import Internet, Kind

pytestmark = pytest.mark.swarm

LISTEN = (LOOPBACK[1],)
SWARM = ("bootstrap", "clock", "reach", "run", "admission", "data", "peers", "bandwidth")
GONE = "/ip4/127.0.0.1/tcp/9/p2p/12D3KooWADA2vJXLmyk1SHLyFogztmUkYfacm9C2finbispzbjcL"
UNKNOWN_RUN = "tiny-aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"


def checks_of(command: Command) -> dict[str, dict[str, Any]]:
    """What a doctor with `--json` says, by check."""
    done = command.finish()
    assert done.code == 0, done.out + done.err
    return {check["name"]: check for check in json.loads(done.out)["checks"]}


@pytest.mark.thorough
def test_with_a_run_and_without(tmp_path: Path) -> None:
    site = Site(tmp_path)
    corpus = write_corpus(tmp_path / "corpus")
    with bootstrap(site) as address:
        invite = announce_run(site.write_run(str(corpus)), address)
        how = ("--run", invite, "--device", "cpu", "--json", "--state", "kept", *LOOPBACK)
        with (
            volunteers(site, invite, "one"),
            site.start("doctor", *how, "--data", "corpus") as dry,
            site.start("doctor", "--state", "kept", *LOOPBACK) as alone,
        ):
            able = checks_of(dry)
            without = alone.finish()
            with site.start("doctor", *how[:5], *LOOPBACK, "--data", "corpus") as beside:
                speed = checks_of(beside)["speed"]
    assert speed["verdict"] == "skipped"
    assert "a volunteer runs on this machine" in speed["found"]
    assert able.keys() == CHECKS.keys()
    assert not [check for check in able.values() if check["verdict"] == "fail"]
    assert able["run"]["values"]["peers"] == able["peers"]["values"]["open"] == 1
    assert able["reach"]["values"]["reach"] == "open"
    assert abs(able["clock"]["values"]["offset_seconds"]) < 1, "it is the same clock"
    assert able["bandwidth"]["values"]["measured_with"] == "a peer"
    assert able["memory"]["values"]["needed"] > 0
    assert able["speed"]["values"]["is_measured"]
    assert able["round"]["values"]["sent_bytes_a_day"] > 0
    assert able["round"]["values"]["peers"] == 2
    assert without.code == 0, without.out + without.err
    assert "p2pd" in without.out
    assert "skipped bootstrap" in without.out
    assert without.out.splitlines()[-1].startswith("This machine can train")
    assert not without.err
    assert not (tmp_path / "kept").exists(), "it changes nothing"
    site.assert_nothing_is_left()


# In this process, of a machine without faults ------------------------------------------------------------------------
@pytest.fixture
def faultless(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examination, "probed_torch", lambda torch: None)
    monkeypatch.setattr(examination, "machine_findings", lambda torch, options: [])
    monkeypatch.setattr(examination, "check_kernels", lambda: passed("kernels", "fine"))
    monkeypatch.setattr(examination, "check_memory", lambda *of_a_run: passed("memory", "enough"))
    monkeypatch.setattr(examination, "check_disk", lambda state, *of_a_run: passed("disk", "enough"))


def examine(*addresses: str, run: str | None = None, remedy: str = "") -> dict[str, Finding]:
    settings = JoinSettings(run=run or "", initial_peers=addresses, listen=LISTEN)
    invite = Invite(run, addresses) if run else None
    heard: list[Finding] = []
    made = Examination(settings, invite, Identity.generate(), True, heard.append, lambda what: None, remedy)
    assert asyncio.run(made.run()) == heard
    return {finding.name: finding for finding in heard}


def failing(findings: dict[str, Finding]) -> set[str]:
    return {name for name, finding in findings.items() if finding.verdict is Verdict.FAIL}


@pytest.mark.thorough
@pytest.mark.usefixtures("faultless")
def test_without_libp2ps_daemon(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    missing = str(tmp_path / "p2pd")
    monkeypatch.setattr(P2P, "_make_process_args", staticmethod(lambda *args, **options: [missing]))
    findings = examine(GONE, run=UNKNOWN_RUN)
    assert failing(findings) == {"p2pd"}
    assert "Reinstall hivemind" in findings["p2pd"].remedy
    assert {findings[name].verdict for name in SWARM} == {Verdict.SKIPPED}


@pytest.mark.usefixtures("faultless")
def test_without_the_bootstrap_node() -> None:
    findings = examine(GONE, run=UNKNOWN_RUN)
    assert failing(findings) == {"bootstrap"}
    assert findings["bootstrap"].values == {"nodes": 1, "answering": 0}
    assert {findings[name].verdict for name in (*SWARM[1:], "speed", "round")} == {Verdict.SKIPPED}


@pytest.mark.thorough
@pytest.mark.usefixtures("faultless")
def test_an_address_that_is_none_is_wrong_usage() -> None:
    with pytest.raises(ManifestError, match="'nonsense' is not a multiaddress"):
        examine("nonsense")


@pytest.mark.usefixtures("faultless")
def test_a_run_that_nobody_knows_and_one_that_does_not_admit_us(tmp_path: Path) -> None:
    site = Site(tmp_path)
    with bootstrap(site) as address:
        findings = examine(address, run=UNKNOWN_RUN)
        path = site.write_run(str(write_corpus(tmp_path / "corpus")))
        path.write_text(path.read_text() + '\n[admission]\nmode = "invite"\n')
        invited = Invite.parse(announce_run(path, address)).run_id
        refused = examine(address, run=invited)
        with_new_key = examine(address, run=invited, remedy="Make a key.")
    assert failing(findings) == {"run"}
    assert findings["bandwidth"].values["measured_with"] == "a bootstrap node"
    assert findings["peers"].verdict is findings["round"].verdict is Verdict.SKIPPED
    assert failing(refused) == {"admission", "data"}, "nor was its text named"
    assert "--ticket" in refused["admission"].remedy
    assert with_new_key["admission"].remedy == "Make a key."
    assert "--data" in refused["data"].remedy
    assert "see data" in refused["speed"].found
    assert refused["speed"].verdict is refused["round"].verdict is Verdict.SKIPPED


# Behind routers ------------------------------------------------------------------------------------------------------
@pytest.mark.thorough
def test_how_others_reach_machines_behind_routers(net: Internet, tmp_path: Path) -> None:
    site, public = Site(tmp_path), net.machine(Kind.OPEN)
    with site.start("bootstrap", "--identity", "bootstrap.pem", prefix=public.prefix) as node:
        address = node.line(rf"/ip4/{public.address}/\S+/p2p/\w+", "the bootstrap node does not say where it is")
        for kind, reach in ((Kind.OPEN, "open"), (Kind.CONE, "punched"), (Kind.SYMMETRIC, "relayed")):
            machine = net.machine(kind)
            with site.start("doctor", "--initial-peer", address, "--json", prefix=machine.prefix) as command:
                checks = checks_of(command)
            assert checks["reach"]["values"]["reach"] == reach, kind
            assert checks["reach"]["values"]["seen_at"] == machine.public_address
            assert checks["ipv6"]["values"]["is_public_ipv4"] == (kind is Kind.OPEN)
