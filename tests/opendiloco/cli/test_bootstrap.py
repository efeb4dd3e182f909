"""What `bootstrap` and `join` make of the options about links."""

from __future__ import annotations

import fcntl
import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

import peers.network.bootstrap
from opendiloco.cli import main
from opendiloco.cli.bootstrap import _show_addresses, _tell_local_network, bootstrap
from peers import metrics
from peers.errors import LocalNetworkError
from peers.network.links import LinkSettings


@pytest.mark.parametrize(
    ("options", "links"),
    [
        ([], LinkSettings(31338, 100)),
        (["--relay-limit", "8", "--data-port", "80"], LinkSettings(80, 8)),
        (["--no-relay"], LinkSettings(31338, None)),
    ],
)
def test_a_bootstrap_node_relays_unless_told_otherwise(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, options: list[str], links: LinkSettings
) -> None:
    seen: list[object] = []

    async def run_bootstrap(*arguments: object) -> None:
        seen.extend(arguments)

    monkeypatch.setattr(peers.network.bootstrap, "run_bootstrap", run_bootstrap)
    done = CliRunner().invoke(main, ["bootstrap", "--identity", str(tmp_path / "key.pem"), *options])
    assert done.exit_code == 0, done.output
    assert seen[-2] == links
    listen = seen[1]
    assert isinstance(listen, tuple)
    assert listen[0] == "/ip4/0.0.0.0/tcp/31337"


@pytest.mark.parametrize(
    ("options", "is_announced"),
    [
        ([], True),
        (["--listen", "/ip4/127.0.0.1/tcp/0"], False),
        (["--listen", "/ip4/127.0.0.1/tcp/0", "--announce", "/ip4/192.0.2.1/tcp/1"], True),
    ],
)
def test_a_node_of_this_machine_is_not_announced(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, options: list[str], is_announced: bool
) -> None:
    beside: list[object] = []

    async def run_bootstrap(*arguments: object) -> None:
        beside.append(arguments[8])

    monkeypatch.setattr(peers.network.bootstrap, "run_bootstrap", run_bootstrap)
    done = CliRunner().invoke(main, ["bootstrap", "--identity", str(tmp_path / "key.pem"), "--local-network", *options])
    assert done.exit_code == 0, done.output
    assert beside == [[_tell_local_network] if is_announced else []]


@pytest.mark.parametrize(("host", "where"), [("127.0.0.1", "this"), ("192.0.2.1", "any")])
def test_the_machines_that_can_use_a_node_are_named(host: str, where: str, capsys: pytest.CaptureFixture[str]) -> None:
    _show_addresses((f"/ip4/{host}/tcp/1/p2p/a",))
    assert f"type on {where} machine, in an environment with torch" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("hosts", "is_warned"),
    [
        (["ip4/10.0.0.5"], True),
        (["ip4/10.0.0.5", "ip6/2600::1"], True),
        (["ip6/2600::1", "ip4/127.0.0.1"], False),
        (["ip4/10.0.0.5", "ip4/8.8.8.8"], False),
        (["dns4/a.org"], False),
    ],
)
def test_a_node_without_a_public_address_names_the_option(
    hosts: list[str], is_warned: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Regression: a public IPv6 address hid that IPv4 had none; and the option was named after it was given."""
    for is_given in (False, True):
        _show_addresses(tuple(f"/{host}/tcp/1/p2p/a" for host in hosts), is_given)
        shown = capsys.readouterr().out
        named = "start this node again with its public one:\n  --announce /ip4/PUBLIC-ADDRESS/tcp/1\n" in shown
        assert named is (is_warned and not is_given)


def test_a_bootstrap_node_serves_metrics(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async def run_bootstrap(*arguments: object) -> None:
        return None

    served: list[tuple[object, ...]] = []
    monkeypatch.setattr(peers.network.bootstrap, "run_bootstrap", run_bootstrap)
    monkeypatch.setattr(metrics, "MetricsServer", lambda *given: served.append(given))
    arguments = ["bootstrap", "--identity", str(tmp_path / "key.pem"), "--metrics-port", "9000"]
    assert CliRunner().invoke(main, arguments).exit_code == 0
    assert CliRunner().invoke(main, [*arguments, "--metrics-host", "0.0.0.0"]).exit_code == 0
    assert served == [(9000, host, metrics.NODE_METRICS) for host in ("127.0.0.1", "0.0.0.0")]


def test_variables_that_a_node_does_not_read_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Regression: DILOCO_LISTEN was ignored without a word, and the port that the volunteer image sets was named."""

    async def run_bootstrap(*arguments: object) -> None:
        return None

    monkeypatch.setattr(peers.network.bootstrap, "run_bootstrap", run_bootstrap)
    variables = {"DILOCO_LISTEN": "/ip4/0.0.0.0/tcp/1", "DILOCO_HUORS": "1", "DILOCO_LOG_LEVEL": "info"}
    variables["DILOCO_METRICS_PORT"] = "31339"
    arguments = ["bootstrap", "--identity", str(tmp_path / "key.pem")]
    done = CliRunner().invoke(main, arguments, env=variables)
    assert "a bootstrap node does not read DILOCO_HUORS, DILOCO_LISTEN: give options instead" in done.output
    assert "does not read" not in CliRunner().invoke(main, arguments).output


def test_an_archive_that_cannot_be_written_is_found_at_the_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Regression: it was found with the first run, hours later."""

    async def run_bootstrap(*arguments: Any) -> None:
        arguments[5](("/ip4/192.0.2.1/tcp/1/p2p/a",))

    monkeypatch.setattr(peers.network.bootstrap, "run_bootstrap", run_bootstrap)
    arguments = ["bootstrap", "--identity", str(tmp_path / "key.pem"), "--archive"]
    good, bad = tmp_path / "deep" / "archive", tmp_path / "key.pem" / "archive"
    done = CliRunner().invoke(main, [*arguments, str(good)])
    assert re.search(f"^The archive is in {good} and may use [0-9.]+ \\w?B$", done.output, re.MULTILINE)
    assert good.is_dir()
    small = CliRunner().invoke(main, [*arguments, str(good), "--max-disk", "0.06"])
    assert f"The archive is in {good} and may use 60 MB\n" in small.output
    assert "the archive may use only 60 MB: free some space, or raise --max-disk" in small.output
    monkeypatch.setattr("opendiloco.storage.archive.LEAST_ROOM", 1 << 60)
    full = CliRunner().invoke(main, [*arguments, str(good)])
    assert re.search(r"may use only .*: free some space$", full.output, re.MULTILINE), "without the option"
    refused = CliRunner().invoke(main, [*arguments, str(bad)])
    assert refused.exit_code == 6
    assert f"the archive's folder {bad} cannot be used: Not a directory." in refused.output
    assert "--archive" in refused.output


def test_an_archive_that_another_node_uses_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Regression: two nodes wrote into one folder, and each counted all of its disk as its own."""
    folder = tmp_path / "archive"
    folder.mkdir()

    async def run_bootstrap(*arguments: Any) -> None:
        with (folder / ".lock").open("rb") as file, pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)

    monkeypatch.setattr(peers.network.bootstrap, "run_bootstrap", run_bootstrap)
    arguments = ["bootstrap", "--identity", str(tmp_path / "key.pem"), "--archive", str(folder)]
    assert CliRunner().invoke(main, arguments).exit_code == 0, "this node holds the lock"
    with (folder / ".lock").open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        refused = CliRunner().invoke(main, arguments)
    assert refused.exit_code == 15
    assert f"the archive {folder} is in use by another process on this machine. Wait until that" in refused.output
    assert "--archive FOLDER" in refused.output


def test_a_node_that_cannot_start_does_not_print_where_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Regression: it printed where its dashboard, metrics and archive were, and then that a port was in use."""

    async def run_bootstrap(*arguments: Any) -> None:
        if not is_free:
            raise LocalNetworkError("the port is in use.")
        arguments[5](("/ip4/192.0.2.1/tcp/1/p2p/a",))

    monkeypatch.setattr(peers.network.bootstrap, "run_bootstrap", run_bootstrap)
    parts = ("--dashboard", "127.0.0.1:0", "--metrics-port", "0", "--archive", str(tmp_path / "archive"))
    for is_free in (False, True):
        done = CliRunner().invoke(main, ["bootstrap", "--identity", str(tmp_path / "key.pem"), *parts])
        assert done.exit_code == (0 if is_free else 5)
        for line in ("The dashboard is at", "metrics are at", "The archive is in"):
            assert (line in done.output) is is_free


@pytest.mark.parametrize(
    "wrong",
    [
        ["--announce", "example.org"],
        ["--announce", "/dns4/bootstrap.example.org"],
        ["--listen", "/ip4/0.0.0.0"],
        ["--initial-peer", "/ip4/192.0.2.1/tcp/1"],
        ["--max-disk", "10"],
        ["--metrics-host", "0.0.0.0"],
        ["--relay-limit", "8", "--no-relay"],
    ],
)
def test_a_wrong_option_is_wrong_usage(tmp_path: Path, wrong: list[str]) -> None:
    """Regression: a malformed address ended with 3, and options that had no effect were ignored."""
    refused = CliRunner().invoke(main, ["bootstrap", "--identity", str(tmp_path / "key.pem"), *wrong])
    assert refused.exit_code == 2
    assert wrong[0] in refused.output
    assert not (tmp_path / "key.pem").exists()


@pytest.mark.parametrize(
    ("typed", "both"),
    [
        (
            ["--listen", "/ip4/0.0.0.0/tcp/31405", "--data-port", "31405"],
            "--listen and --data-port both have port 31405",
        ),
        (["--listen", "/ip6/::1/tcp/31338"], "--listen and --data-port both have port 31338"),
        (["--data-port", "31337"], "--listen and --data-port both have port 31337"),
        (["--metrics-port", "31338"], "--data-port and --metrics-port both have port 31338"),
        (["--metrics-port", "80", "--dashboard", "127.0.0.1:80"], "--metrics-port and --dashboard both have port 80"),
        (["--listen", "/ip4/10.0.0.5/tcp/80", "--dashboard", "127.0.0.1:80"], None),
        (["--listen", "/ip4/0.0.0.0/udp/31338/quic"], None),
        (["--listen", "/ip4/0.0.0.0/tcp/0", "--data-port", "0", "--metrics-port", "0"], None),
    ],
)
def test_two_options_with_one_port_are_both_named(typed: list[str], both: str | None) -> None:
    """Regression: the port was said to be in use by another program."""
    expected = pytest.raises(click.UsageError, match=f"{both}: choose another for") if both else nullcontext()
    with expected:
        bootstrap.make_context("bootstrap", ["--identity", "key.pem", *typed])
