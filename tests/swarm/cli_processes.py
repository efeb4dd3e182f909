"""`diloco-peer` commands as real processes: started, waited for with a reason and a deadline, and known by a mark."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from opendiloco.config.run_config import RunConfig
from opendiloco.run import Run
from opendiloco.volunteer.volunteer import connected
from peers.network.bootstrap import announce_manifest
from peers.values.identity import Identity
from peers.values.manifest import Invite, SignedManifest
from tests.child_processes import child_processes
from tests.swarm.networks import inside

ROOT = Path(__file__).parent.parent.parent
LOOPBACK = ("--listen", "/ip4/127.0.0.1/tcp/0", "--data-port", "0")
SECONDS = 240.0  # for whatever a command does; on an idle machine 1 to 10, and seen to take 90 on a busy one
MARK, LOCAL_NETWORK = "DILOCO_PEER_TEST", "DILOCO_LOCAL_NETWORK"

SMALL_RUN = """\
name = "small"
outer_steps = {outer_steps}

[model]
init_seed = 3

[model.config]
model_type = "llama"
vocab_size = 259
hidden_size = 16
intermediate_size = 24
num_hidden_layers = 1
num_attention_heads = 2
max_position_embeddings = 32
tie_word_embeddings = true

[data]
source = "{source}"
held_out = 0.2

[training]
inner_steps = {inner_steps}
batch_size = 2
sequence_length = 16

[inner_optimizer]
learning_rate = 0.01

[schedule]
warmup_steps = 2
stable_steps = 1000000
decay_steps = 0

[outer_optimizer]
learning_rate = 0.7
momentum = 0.0

[rounds]
minimum_peers = {peers}
heartbeat_seconds = 0.5
heartbeat_expiry_seconds = 4.0
grace_seconds = 5.0
round_timeout_seconds = 10.0
partition_grace_seconds = 10.0

[snapshots]
every = 2
"""


class Site:
    """A folder to work in, and the environment of all commands started there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.mark = uuid.uuid4().hex
        self.temporary = Path(tempfile.mkdtemp(prefix="site-", dir="/tmp"))  # short, as the paths of sockets have to be
        weakref.finalize(self, shutil.rmtree, self.temporary, ignore_errors=True)
        self.environment = os.environ | {
            MARK: self.mark,
            "TMPDIR": str(self.temporary),
            "XDG_CONFIG_HOME": str(folder / "config"),
            "XDG_STATE_HOME": str(folder / "state"),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
            "PYTHONPATH": str(ROOT),
        }
        self._before = unmapped_files()

    def start(self, *arguments: str, prefix: tuple[str, ...] = ()) -> Command:
        """A command; `prefix` has it run somewhere else, see `networks.Place`."""
        return Command(self, ("-m", "opendiloco.cli", *arguments), prefix)

    def start_script(self, path: Path, *arguments: str) -> Command:
        return Command(self, (str(path), *arguments))

    def run(self, *arguments: str, prefix: tuple[str, ...] = ()) -> Finished:
        """A command to its end."""
        with self.start(*arguments, prefix=prefix) as command:
            return command.finish()

    def write_run(self, source: str, outer_steps: int = 10_000, inner_steps: int = 20, peers: int = 1) -> Path:
        """A run.toml with a model of 6 k parameters. As many `peers` train together, or nobody does."""
        path = self.folder / "run.toml"
        numbers = {"outer_steps": outer_steps, "inner_steps": inner_steps, "peers": peers}
        path.write_text(SMALL_RUN.format(source=source, **numbers))
        return path

    def processes(self) -> dict[int, str]:
        """Command lines of all processes that descend from our commands, adopted by init or not."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if f"{MARK}={self.mark}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                    found[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:  # gone, or not ours
                continue
        return found

    def assert_nothing_is_left(self) -> None:
        """Assert that no process of ours is left, no file in /dev/shm, and no socket or key of libp2p's daemon."""
        eventually(lambda: not self.processes(), "workers or daemons outlive their peer", self.processes)
        eventually(lambda: not self.leftovers(), "files or sockets outlive their peer", self.leftovers)

    def leftovers(self) -> set[Path]:
        """Return the new files in shared memory that no living process has mapped, and our deserted sockets."""
        ours = {path for path in self.temporary.glob("diloco-peer-*") if not path.is_socket() or is_deserted(path)}
        return ours | unmapped_files() - self._before


class Finished:
    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    def error_line(self) -> str:
        """The only line on stderr that is none of the log's."""
        lines = [line for line in self.err.strip().splitlines() if not re.match(r"\d\d:\d\d:\d\d INFO ", line)]
        assert len(lines) == 1, self.err
        [line] = lines
        assert line.startswith("error: ")
        return line


class Command:
    """A running command, given as Python's arguments. A context manager that leaves no process of its own."""

    def __init__(self, site: Site, arguments: tuple[str, ...], prefix: tuple[str, ...] = ()) -> None:
        is_apart = prefix[:3] == inside("")[:3]
        assert is_apart or site.environment.get(LOCAL_NETWORK) == "no", "it would hear of others in the local network"
        self.arguments = arguments
        self._process = subprocess.Popen(
            [*prefix, sys.executable, *arguments],
            cwd=site.folder,
            env=site.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.pid = self._process.pid
        self._said: dict[str, list[str]] = {"out": [], "err": []}
        self._news = threading.Condition()
        self._silent = 0
        streams = {"out": self._process.stdout, "err": self._process.stderr}
        self._readers = [threading.Thread(target=self._read, args=item, daemon=True) for item in streams.items()]
        for reader in self._readers:
            reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        for reader in self._readers:
            reader.join()
        for stream in (self._process.stdout, self._process.stderr):
            assert stream is not None
            stream.close()

    def line(self, pattern: str, why: str, seconds: float = SECONDS) -> str:
        """The first match of a pattern in what it prints; `why` and all the output are shown if none comes in time."""

        def match() -> re.Match[str] | None:
            return next(filter(None, (re.search(pattern, line) for line in self._all())), None)

        with self._news:
            self._news.wait_for(lambda: match() or self._silent == len(self._readers), seconds)
        found = match()
        assert found, f"{why}; it said:\n" + "".join(self._all())
        return found[0]

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def interrupt_terminal(self) -> None:
        """Ctrl-C: the command and all its children get it."""
        os.killpg(self.pid, signal.SIGINT)

    def finish(self, seconds: float = SECONDS) -> Finished:
        """Wait for its end."""
        try:
            code = self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.arguments} does not end; it said:\n" + "".join(self._all())) from None
        for reader in self._readers:
            reader.join()
        return Finished(code, "".join(self._said["out"]), "".join(self._said["err"]))

    def children(self) -> dict[str, int]:
        """Process ids of the direct children by name: `p2pd`, `python3…`."""
        return {name: process for process, name in child_processes(self.pid).items()}

    def said(self, pattern: str) -> list[str]:
        """Return the lines in which a pattern is found, of what it has printed so far."""
        return [line for line in self._all() if re.search(pattern, line)]

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def _all(self) -> list[str]:
        return self._said["out"] + self._said["err"]

    def _read(self, name: str, stream: Iterator[str]) -> None:
        for line in stream:
            with self._news:
                self._said[name].append(line)
                self._news.notify_all()
        with self._news:
            self._silent += 1
            self._news.notify_all()


@contextmanager
def bootstrap(site: Site) -> Iterator[str]:
    """A bootstrap node, ended politely; yields its address."""
    with site.start("bootstrap", "--identity", "bootstrap.pem", *LOOPBACK) as node:
        yield node.line(r"/ip4/\S+/p2p/\w+", "the bootstrap node does not say where it is")
        node.signal(signal.SIGINT)
        assert node.finish().code == 0


def create_run(site: Site, run: Path, address: str, prefix: tuple[str, ...] = ()) -> str:
    """The invite to a new run."""
    created = site.run("run", "create", str(run), "--initial-peer", address, prefix=prefix)
    assert created.code == 0, created.err
    [invite] = re.findall(r"^invite: +(\S+)$", created.out, re.MULTILINE)
    assert isinstance(invite, str)
    return invite


def announce_run(run: Path, address: str) -> str:
    """The invite to a new run, for tests of other commands: `run create` takes seconds to check the model."""
    return announce(sign_run(run, Identity.generate()), address)


def sign_run(run: Path, organiser: Identity) -> SignedManifest:
    """The manifest of a run.toml."""
    return Run.sign(RunConfig.from_toml(run), organiser).manifest


def announce(manifest: SignedManifest, address: str) -> str:
    """Have a node remember a run. Returns the invite through it."""

    async def announced() -> tuple[str, ...]:
        async with connected(Identity.generate(), (address,), LOOPBACK[1:2], client_mode=True) as transport:
            return await announce_manifest(transport, manifest, (address,))

    assert asyncio.run(announced()) == (address,)
    return str(Invite(manifest.run_id, (address,)))


@contextmanager
def volunteers(site: Site, invite: str, *names: str) -> Iterator[list[Command]]:
    """Volunteers that have joined, with the site's corpus and a journal each, and leave politely in the end.

    They start at once: one after another would take as long for each, while those before it train in vain.
    """
    with ExitStack() as stack:
        started = []
        for name in names:
            options = ("--identity", f"{name}.pem", "--journal", f"{name}.jsonl", "--data", "corpus", *LOOPBACK)
            started.append(stack.enter_context(site.start("join", "--run", invite, *options)))
        for name, command in zip(names, started, strict=True):
            command.line("joining as", f"{name} does not start", SECONDS * len(names))
        yield started
        for command in reversed(started):
            leave(command)


def leave(command: Command) -> None:
    """Have a volunteer leave politely, unless it has."""
    command.signal(signal.SIGTERM)
    ended = command.finish()
    assert ended.code == 0, (ended.code, ended.err)


def eventually(condition: Callable[[], object], why: str, shown: Callable[[], object] = str) -> None:
    """Ask again and again until `condition()` is true. A failure shows `why`, and what `shown()` returns then."""
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"{why}: {shown()}"
        time.sleep(0.05)


def unmapped_files() -> set[Path]:
    """Return the files in shared memory that no living process has mapped: other tests may run at the same time."""
    mapped = mapped_files()
    return {path for path in Path("/dev/shm").iterdir() if str(path) not in mapped}


def mapped_files() -> set[str]:
    """What processes have mapped of /dev/shm."""
    found: set[str] = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):  # gone, or not ours
            found |= {line.split(maxsplit=5)[5] for line in maps.read_text().splitlines() if " /dev/shm/" in line}
    return found


def is_deserted(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(str(path)) != 0
