"""The demo: a complete swarm on this machine, which `make demo` shows. A bootstrap node and volunteers run as separate
processes. Halfway, the demo kills one volunteer and starts another.

The display reads only the DHT, as any observer could. The demo itself needs no torch: its child processes do.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from opendiloco.config.data import STANDARD_LIBRARY
from opendiloco.config.run_config import RunConfig
from opendiloco.cores import usable_cores
from opendiloco.data.own_files import local_sources, volunteered
from opendiloco.errors import DemoError, MachineError
from opendiloco.model.export import RunFacts
from opendiloco.quantities import duration
from opendiloco.run import Run
from opendiloco.settings.join_settings import without_settings
from opendiloco.view.run_view import Agreement, PeerRow, is_finished, peers_table, plain_line, row_of
from opendiloco.volunteer.local_workload import LocalWorkload, working
from opendiloco.volunteer.states import export_state, fetch_state, history_of, make_folder
from opendiloco.volunteer.volunteer import connected
from peers.network.bootstrap import announce_manifest
from peers.network.daemon import sweep_sockets
from peers.network.transport import HivemindTransport
from peers.presence.heartbeat import Heartbeat, PeerState
from peers.presence.membership import PARTICIPATING
from peers.values.identity import Identity
from peers.values.system import cancel_and_wait, make_private_folder, start_task

LINES_SHOWN = 10  # newest log lines of a child process that an error message shows
LOG_SECONDS = 0.1  # seconds between two reads of a child process's log
STOP_SECONDS = 20.0  # seconds after SIGINT until a child process is killed, because it may first finish a round
EVENTS_SHOWN = 8  # number of newest events on the screen, which must fit a small terminal
PLAIN_SECONDS = 10.0  # seconds between two lines about each peer in plain output
DEFAULT_RUN = Path(__file__).parents[1] / "demo.toml"
LOOPBACK = "/ip4/127.0.0.1/tcp/0"
START_SECONDS = 60.0  # limit in seconds for the bootstrap node's start, which takes a few seconds on an idle machine
WRAP_UP_SECONDS = 10.0  # seconds reserved at the demo's end to fetch the state, evaluate and export it
LOOK_SECONDS = 0.5  # seconds between two updates of the screen
LONGER = "Give it more time: --minutes, or make demo MINUTES=…"
SAMPLE_TOKENS = 160  # number of tokens that the model generates at the demo's end


class _Child:
    """A child process of the demo, whose output goes to the file `log`. Create it with `start`; to end it, `send` a
    signal and await `ended`."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, log: Path) -> None:
        self.name = name
        self.log = log
        self._process = process

    @classmethod
    async def start(cls, name: str, arguments: list[str], folder: Path) -> _Child:
        """Start `diloco-peer ARGUMENTS` as a child process that logs to `folder`. The child has a session of its own,
        so that Ctrl-C does not reach it and the demo can end its children in order."""
        ours = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONUNBUFFERED": "1"}
        log = folder / f"{name.replace(' ', '-')}.log"
        with log.open("wb") as file:
            process = await asyncio.create_subprocess_exec(
                *[sys.executable, "-P", "-m", "opendiloco.cli", *arguments],
                stdin=asyncio.subprocess.DEVNULL,
                stdout=file,
                stderr=asyncio.subprocess.STDOUT,
                env=without_settings(os.environ) | ours,
                start_new_session=True,
            )
        return cls(name, process, log)

    @property
    def exit_code(self) -> int | None:
        return self._process.returncode

    async def line(self, pattern: str, seconds: float) -> str:
        """Wait for text in the log that matches `pattern`, and return that text. Raises: DemoError if the process ends
        or `seconds` pass first."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                has_ended = False
                while not has_ended:
                    has_ended = self.exit_code is not None
                    whole_lines, _, _ = self._output().rpartition("\n")
                    if match := re.search(pattern, whole_lines):
                        return match[0]
                    await asyncio.sleep(LOG_SECONDS)
        raise DemoError(f"{self.name} did not start: {self.last_words()}", f"See {self.log}.")

    def _output(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    def last_words(self) -> str:
        return " | ".join(map(str.strip, self._output().splitlines()[-LINES_SHOWN:])) or "it wrote nothing"

    def send(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            self._process.send_signal(number)

    async def ended(self) -> None:
        """Wait until the process ends, and kill it if it has not ended after `STOP_SECONDS`."""
        try:
            async with asyncio.timeout(STOP_SECONDS):
                await self._process.wait()
        except TimeoutError:
            self.send(signal.SIGKILL)
            await self._process.wait()


class DemoScreen:
    """The display of the demo, a context manager. On a terminal it is a live table of the peers; with `plain`, or
    without a terminal, it prints lines."""

    def __init__(self, seconds: float, plain: bool) -> None:
        self.console = Console()
        self.seconds = seconds
        self._started = time.monotonic()
        self._events: deque[str] = deque(maxlen=EVENTS_SHOWN)
        self._rows: Sequence[PeerRow] = ()
        self._live = None if plain or not self.console.is_terminal else Live(console=self.console, auto_refresh=False)
        self._next_lines = self._started

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._live is not None:
            self._live.stop()

    @property
    def elapsed(self) -> float:
        """The seconds since the display was created."""
        return time.monotonic() - self._started

    def event(self, text: str) -> None:
        """Show the text of an event with the time since the demo's start."""
        line = f"{_clock(self.elapsed)}  {text}"
        self._events.append(line)
        if self._live is None:
            self.say(line)
        else:
            self._draw()

    def show(self, rows: Sequence[PeerRow]) -> None:
        """Show the peers' current states in the live table, or, without a live table, print them every
        `PLAIN_SECONDS`."""
        self._rows = rows
        if self._live is not None:
            self._draw()
        elif time.monotonic() >= self._next_lines:
            self._next_lines = time.monotonic() + PLAIN_SECONDS
            for row in rows:
                self.say(f"{_clock(self.elapsed)}  {plain_line(row)}")

    def say(self, text: str) -> None:
        """Print a line of text, above the live table if there is one."""
        self.console.print(Text(text), soft_wrap=True)

    def _draw(self) -> None:
        assert self._live is not None
        title = f"{_clock(self.elapsed)} of {_clock(self.seconds)}"
        events = [Text(line, style="dim") for line in self._events]
        self._live.update(Group(peers_table(self._rows, title), *events), refresh=True)


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"


@dataclass(frozen=True)
class DemoResult:
    """The outcome of a demo. `before` is the held-out loss of the untrained model; `problems` are texts about
    failures."""

    before: float
    facts: RunFacts
    agreement: Agreement
    sample: str
    folder: Path
    problems: tuple[str, ...]


@dataclass
class _DemoVolunteer:
    name: str
    child: _Child
    heartbeat: Heartbeat | None = None
    trains: bool = False
    fate: str | None = None


@dataclass
class _Swarm:
    """Starts the demo's volunteers, and records their states as the demo observes them."""

    run: Run
    address: str
    folder: Path
    screen: DemoScreen
    children: list[_Child]
    threads: int = 1
    """Threads of each volunteer, which share this machine."""
    agreement: Agreement = field(default_factory=Agreement)
    volunteers: dict[str, _DemoVolunteer] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    newcomer: _DemoVolunteer | None = None
    """The volunteer that joined half way."""

    async def add_volunteer(self) -> _DemoVolunteer:
        name = f"volunteer {len(self.volunteers) + 1}"
        identity, key_file = Identity.generate(), self.folder / f"{name.replace(' ', '-')}.pem"
        identity.save(key_file)
        arguments = ["join", "--plain", "--no-local-network", "--run", self.run.run_id, "--initial-peer", self.address]
        arguments += ["--identity", str(key_file), "--listen", LOOPBACK]
        arguments += ["--state", str(self.folder / "state"), "--threads", str(self.threads)]
        for source in local_sources(self.run.config.data):
            arguments += ["--data", source]
        self.children.append(await _Child.start(name, arguments, self.folder / "logs"))
        self.volunteers[identity.peer_id] = _DemoVolunteer(name, self.children[-1])
        return self.volunteers[identity.peer_id]

    def observe(self, heartbeats: list[Heartbeat]) -> None:
        """Record these heartbeats and the volunteers whose processes have ended, and update the screen."""
        self.agreement.observe(heartbeats)
        for beat in heartbeats:
            volunteer = self.volunteers.get(beat.peer)
            if volunteer is not None and volunteer.fate is None:
                self._report_progress(volunteer, beat)
                volunteer.heartbeat = beat
        for volunteer in self.live():
            if volunteer.child.exit_code is not None:
                volunteer.fate = f"ended with {volunteer.child.exit_code}"
                self.problems.append(f"{volunteer.name} {volunteer.fate}: {volunteer.child.last_words()}")
                self.screen.event(self.problems[-1])
        self.screen.show([self._row(volunteer) for volunteer in self.volunteers.values()])

    def _report_progress(self, volunteer: _DemoVolunteer, beat: Heartbeat) -> None:
        if volunteer.heartbeat is None:
            self.screen.event(f"{volunteer.name} has joined")
        if not volunteer.trains and beat.state in PARTICIPATING:
            volunteer.trains = True
            if beat.index > 0:
                trains = "" if is_finished(beat, self.run.config) else ", and trains"
                self.screen.event(f"{volunteer.name} has fetched the state after outer step {beat.index}{trains}")

    def live(self) -> list[_DemoVolunteer]:
        return [volunteer for volunteer in self.volunteers.values() if volunteer.fate is None]

    def outer_step(self) -> int:
        return max((one.heartbeat.index for one in self.live() if one.heartbeat), default=0)

    def finished(self) -> bool:
        return all(one.heartbeat is not None and is_finished(one.heartbeat, self.run.config) for one in self.live())

    def _row(self, volunteer: _DemoVolunteer) -> PeerRow:
        if volunteer.fate is not None:
            return PeerRow(volunteer.name, (volunteer.fate,), "red")
        if volunteer.heartbeat is None:
            return PeerRow(volunteer.name, (str(PeerState.STARTING),))
        return row_of(volunteer.heartbeat, self.run.config, volunteer.name)


async def run_demo(peers: int, run_toml: Path | None, out: Path | None, screen: DemoScreen) -> DemoResult:
    """Run the demo with `peers` volunteers, and end all its processes. Its files are in the new folder `out` (None: a
    temporary folder). Raises: DilocoPeerError if the demo cannot continue."""
    run_toml = run_toml or DEFAULT_RUN
    config = RunConfig.from_toml(run_toml)
    folders = [run_toml.parent / source for source in local_sources(config.data)]
    config = config.model_copy(update={"data": volunteered(config.data, folders)})
    folder = _prepare_folder(out)
    children: list[_Child] = []
    try:
        screen.event(f"starting a bootstrap node; all processes log to {folder / 'logs'}")
        arguments = ["bootstrap", "--identity", str(folder / "bootstrap.pem"), "--no-local-network"]
        arguments += ["--listen", LOOPBACK, "--data-port", "0"]
        children.append(await _Child.start("bootstrap node", arguments, folder / "logs"))
        address = await children[0].line(r"/ip4/\S+/p2p/\w+", START_SECONDS)
        run = Run.sign(config, Identity.generate())
        async with connected(Identity.generate(), [address], [LOOPBACK], client_mode=True) as transport:
            await announce_manifest(transport, run.manifest, [address])
            screen.event(f"created the run {run.run_id}; starting {peers} volunteers")
            threads = max(1, usable_cores() // (peers + 1))
            swarm = _Swarm(run, address, folder, screen, children, threads)
            for _ in range(peers):
                await swarm.add_volunteer()
            return await _train_and_export(swarm, transport)
    finally:
        for child in reversed(children):  # stops the bootstrap node last
            child.send(signal.SIGINT)
        for child in children:
            await child.ended()
        sweep_sockets()  # deletes the sockets that the killed volunteer left behind


async def _train_and_export(swarm: _Swarm, transport: HivemindTransport) -> DemoResult:
    """Watch the volunteers train until the demo's end, export the model, and return the demo's result."""
    async with AsyncExitStack() as stack:
        # The demo's own worker evaluates the model before and after the training.
        starting = start_task(stack.enter_async_context(working(swarm.run)))
        try:
            while not starting.done():
                await _look(swarm, transport)
            workload = starting.result()
            before = await workload.trainer.held_out(swarm.run.config.evaluation)
            swarm.screen.event(f"held-out loss of the fresh model: {before.loss:.3f} nats per token")
            await _train(swarm, transport)
            return await _finish(swarm, transport, workload, before.loss)
        finally:
            await cancel_and_wait(starting)


async def _train(swarm: _Swarm, transport: HivemindTransport) -> None:
    """Watch the training until the demo's time is up or the run is over. Halfway, kill a volunteer and start
    another."""
    seconds = swarm.screen.seconds - WRAP_UP_SECONDS
    total = swarm.run.config.total_outer_steps
    while swarm.screen.elapsed < seconds and not swarm.finished():
        await _look(swarm, transport)
        if not swarm.live():
            raise DemoError("all volunteers have ended.", f"See {swarm.folder / 'logs'}.")
        half_way = max(swarm.screen.elapsed / seconds, swarm.outer_step() / total) >= 0.5
        if half_way and swarm.newcomer is None and (outer_step := swarm.outer_step()) > 0:
            victim = swarm.live()[-1]
            victim.fate = "killed"
            victim.child.send(signal.SIGKILL)  # the volunteer sends no farewell, like a machine that loses power
            swarm.screen.event(f"{victim.name} was killed (SIGKILL) at outer step {outer_step}; the others go on")
            swarm.newcomer = await swarm.add_volunteer()
            swarm.screen.event(f"{swarm.newcomer.name} starts; it will fetch the run's state from a peer")


async def _look(swarm: _Swarm, transport: HivemindTransport) -> None:
    swarm.observe(await transport.heartbeats(swarm.run.run_id))
    await asyncio.sleep(LOOK_SECONDS)


async def _finish(swarm: _Swarm, transport: HivemindTransport, workload: LocalWorkload, before: float) -> DemoResult:
    """Fetch the state from a volunteer, end all volunteers, export and evaluate the model, and return the demo's
    result."""
    if swarm.outer_step() == 0:
        raise DemoError(f"the demo was too short: no outer step was taken in {duration(swarm.screen.elapsed)}.", LONGER)
    past = history_of(swarm.run, await fetch_state(swarm.run, transport, workload), {})
    reason = "the run is over" if swarm.finished() else "time is up"
    swarm.screen.event(f"{reason}: fetched the state after outer step {past.outer_steps}")
    leaving = swarm.live()
    for volunteer in leaving:
        volunteer.child.send(signal.SIGINT)
    facts = await export_state(swarm.run, past, workload, swarm.folder / "model")
    prompt = "def " if swarm.run.config.data.all_sources[0].source == STANDARD_LIBRARY else ""
    sample = prompt + await workload.trainer.generate(prompt, SAMPLE_TOKENS)
    for volunteer in leaving:
        await volunteer.child.ended()
        volunteer.fate = "left"
        if volunteer.child.exit_code != 0:
            swarm.problems.append(f"{volunteer.name} left with exit code {volunteer.child.exit_code}")
    swarm.observe(await transport.heartbeats(swarm.run.run_id))
    return DemoResult(before, facts, swarm.agreement, sample, swarm.folder, _judge(swarm, facts, before))


def _judge(swarm: _Swarm, facts: RunFacts, before: float) -> tuple[str, ...]:
    """Return texts about the demo's problems, and about parts of the demo for which the time was too short."""
    problems = list(swarm.problems)
    if swarm.agreement.disagreements or (not swarm.agreement.compared and len(swarm.volunteers) > 2):
        problems.append(str(swarm.agreement))
    if facts.held_out_loss is not None and facts.held_out_loss >= before:
        problems.append("the held-out loss has not fallen")
    missing = None
    if swarm.newcomer is None:
        missing = "no volunteer was killed, and none joined half way"
    elif not swarm.newcomer.trains:
        missing = f"{swarm.newcomer.name}, which joined half way, had not fetched the run's state at the end"
    if missing:
        problems.append(f"the demo was too short: {missing}. {LONGER}")
    return tuple(problems)


def _prepare_folder(out: Path | None) -> Path:
    """Create the new folder `out` (None: a temporary folder) with a subfolder for logs, and return its path. Raises:
    MachineError if that fails."""
    if out is not None:
        make_folder(out)
    try:
        folder = Path(tempfile.mkdtemp(prefix="diloco-demo-")) if out is None else out.absolute()
        make_private_folder(folder / "logs")
    except OSError as error:
        raise MachineError(f"{out} cannot be created: {error.strerror}.", "Give a new folder with --out.") from error
    return folder
