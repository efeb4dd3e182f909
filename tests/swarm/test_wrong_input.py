"""What goes wrong for people, and what they are told: one line with cause and remedy, and a documented exit code."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from opendiloco.cli.group import EXIT_CODES
from peers.values.identity import Identity
from tests.opendiloco.conftest import write_corpus
from tests.swarm.cli_processes import LOOPBACK, ROOT, Site, announce, announce_run, bootstrap, sign_run

pytestmark = pytest.mark.swarm

STRANGER = f"/ip4/127.0.0.1/tcp/9/p2p/{Identity.generate().peer_id}"
UNKNOWN = "tiny-" + "a" * 32
TINY = str(ROOT / "examples" / "tiny.toml")


@dataclass(frozen=True)
class Place:
    """A site with a bootstrap node and a run that nobody trains in."""

    site: Site
    address: str
    invite: str

    def refuses(self, code: int, *arguments: str) -> str:
        """The one line that a command ends with."""
        [line] = self.refuses_each(code, arguments)
        return line

    def refuses_each(self, code: int, *commands: Sequence[str]) -> list[str]:
        """The same of several commands, run at once: most of their time is what Python takes to start."""
        assert code in EXIT_CODES
        with ExitStack() as stack:
            running = [stack.enter_context(self.site.start(*command)) for command in commands]
            ended = [command.finish() for command in running]
        assert [finished.code for finished in ended] == [code] * len(commands), [finished.err for finished in ended]
        return [finished.error_line() for finished in ended]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    site = Site(tmp_path_factory.mktemp("site"))
    corpus = write_corpus(site.folder / "corpus")
    manifest = sign_run(site.write_run(str(corpus)), Identity.generate())
    (site.folder / f"{manifest.run_id}.manifest").write_bytes(manifest.pack())
    with bootstrap(site) as address:
        yield Place(site, address, announce(manifest, address))
    site.assert_nothing_is_left()


@pytest.mark.thorough
def test_unreachable_bootstrap(place: Place) -> None:
    commands = (["run", "create", TINY], ["join", "--run", UNKNOWN], ["status", "--run", UNKNOWN])
    for line in place.refuses_each(4, *([*command, "--initial-peer", STRANGER] for command in commands)):
        assert STRANGER in line


def test_unknown_run(place: Place) -> None:
    commands = (["join", *LOOPBACK], ["status"])
    at = ("--run", UNKNOWN, "--initial-peer", place.address)
    for line in place.refuses_each(4, *([*command, *at] for command in commands)):
        assert f"knows the run {UNKNOWN}" in line


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("change", "cause"),
    [
        (("inner_steps = 20", "inner_steps = 0"), "training.inner_steps = 0: too small"),
        (("inner_steps = 20", "inner_step = 20"), "Did you mean inner_steps?"),
        (("[data]", "[data"), "not valid TOML"),
        (("num_attention_heads", "num_atention_heads"), "Did you mean num_attention_heads?"),
    ],
)
def test_bad_run_toml(place: Place, change: tuple[str, str], cause: str) -> None:
    text = (place.site.folder / "run.toml").read_text()
    path = place.site.folder / "bad.toml"
    path.write_text(text.replace(*change))
    finished = place.site.run("run", "create", "bad.toml", "--initial-peer", place.address)
    assert finished.code == 3
    assert cause in finished.err
    assert "Traceback" not in finished.err


@pytest.mark.thorough
def test_missing_run_toml(place: Place) -> None:
    assert "nowhere.toml" in place.refuses(3, "run", "create", "nowhere.toml", "--initial-peer", place.address)


def test_tampered_invite(place: Place) -> None:
    run_id = place.invite.partition("@")[0]
    assert "not a run id" in place.refuses(3, "join", "--run", place.invite.replace(run_id, run_id[:-1]))
    assert "not a multiaddress" in place.refuses(3, "join", "--run", place.invite.replace("/ip4/", "ip4/"))


@pytest.mark.thorough
def test_tampered_manifest(place: Place) -> None:
    [path] = place.site.folder.glob(f"{place.invite.partition('@')[0].removeprefix('diloco:')}.manifest")
    assert place.site.run("run", "show", path.name).code == 0
    (place.site.folder / "tampered").write_bytes(path.read_bytes().replace(b"0.01", b"9.99"))
    assert "signature is not that of its organiser" in place.refuses(3, "run", "show", "tampered")


def test_port_in_use(place: Place) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        listen = ("--listen", f"/ip4/127.0.0.1/tcp/{port}", "--data-port", "0")
        assert f"port {port} " in place.refuses(15, "bootstrap", "--identity", "other.pem", *listen)
        assert f"port {port} " in place.refuses(15, "join", "--run", place.invite, *listen)
        data_port = ("--data-port", str(port))
        assert f"port {port} " in place.refuses(15, "bootstrap", "--identity", "other.pem", *LOOPBACK, *data_port)


@pytest.mark.thorough
def test_identity_file(place: Place) -> None:
    (place.site.folder / "text.pem").write_text("not a key")
    join = ("join", "--run", place.invite, *LOOPBACK, "--identity")
    assert "text.pem is not an identity file" in place.refuses(2, *join, "text.pem")
    assert "bootstrap.pem is in use" in place.refuses(15, *join, "bootstrap.pem")
    assert "nowhere" in place.refuses(2, *join, "nowhere/identity.pem")


@pytest.mark.thorough
def test_no_corpus(place: Place, tmp_path: Path) -> None:
    run = Site(tmp_path).write_run("/nowhere/at/all")
    create = ("run", "create", str(run), "--initial-peer", place.address)
    assert "there is no /nowhere/at/all" in place.refuses(7, *create)
    created = place.site.run(*create, "--without-text")
    assert created.code == 0
    assert "data.source = '/nowhere/at/all' is not on this machine" in created.err
    [invite] = re.findall(r"^invite: +(\S+)$", created.out, re.MULTILINE)
    (place.site.folder / "empty").mkdir()
    assert "empty', split" in place.refuses(7, "join", "--run", invite, *LOOPBACK, "--data", "empty")


def test_files_that_a_volunteer_has_not_named(place: Place) -> None:
    line = place.refuses(7, "join", "--run", place.invite, *LOOPBACK)
    assert f"data.source = '{place.site.folder / 'corpus'}'" in line
    assert "--data FOLDER" in line


@pytest.mark.thorough
def test_a_manifest_whose_source_is_a_format(place: Place, tmp_path: Path) -> None:
    """Nothing is read, nor looked for, in the folder in which the command is typed."""
    (place.site.folder / "private.json").write_text('[{"text": "not for strangers"}]')
    (place.site.folder / "private.txt").write_text("not for strangers")
    for name in ("json", "text"):
        invite = announce_run(Site(tmp_path).write_run(name), place.address)
        line = place.refuses(7, "join", "--run", invite, *LOOPBACK)
        assert f"data.source = '{name}' may mean files on this machine; what you have not named is not read" in line
        assert "--data FOLDER" in line
        assert "private" not in line
    Site(tmp_path).write_run("json").rename(place.site.folder / "json.toml")
    line = place.refuses(7, "tokenize", "json.toml", "--out", "tokens")
    assert "data.source = 'json' is not on this machine" in line


@pytest.mark.thorough
def test_no_gpu(place: Place) -> None:
    place.site.environment["CUDA_VISIBLE_DEVICES"] = ""
    join = ("join", "--run", place.invite, "--data", "corpus", *LOOPBACK)
    assert "--device cuda cannot be used" in place.refuses(6, *join, "--device", "cuda")


@pytest.mark.thorough
def test_nowhere_to_write(place: Place) -> None:
    create = ("run", "create", "run.toml", "--initial-peer")
    out_of_reach = ("--run", place.invite.partition("@")[0].removeprefix("diloco:"), "--initial-peer", STRANGER)
    commands = {
        ("export", "--run", place.invite, "--out", "."): "not empty",
        ("--log-file", "nowhere/log", "status", "--run", place.invite): "cannot log",
        (*create, place.address, "--out", "/dev/null/folder"): "/dev/null",
        (*create, STRANGER, "--out", "/dev/null/folder"): "/dev/null",  # out of reach, if it came to that
        ("export", *out_of_reach, "--out", "/proc/model"): "/proc/model",
        ("join", *out_of_reach, "--journal", "nowhere/log", "--identity", "new.pem"): "nowhere/log",
    }
    for line, cause in zip(place.refuses_each(6, *commands), commands.values(), strict=True):
        assert cause in line
