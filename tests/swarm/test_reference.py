"""Three volunteers, six processes, real libp2p: the swarm must end with the bits of the algorithm in one process.

The reference knows the log alone. So all have to be in time for each outer step, and none may train anything
that no entry has: what AdamW remembers of that would be in all that follows.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

from opendiloco.config.run_config import RunConfig
from opendiloco.storage.run_folder import Journal
from opendiloco.tools.demo import _Child
from opendiloco.training.reference import Reference, Work
from peers.values.leases import sample_count
from tests.swarm.cli_processes import announce_run

pytestmark = pytest.mark.swarm
LOOPBACK = "/ip4/127.0.0.1/tcp/0"
OUTER_STEPS = 4
VOLUNTEERS = 3
DEADLINE = 240.0
TINY = Path(__file__).parents[2] / "examples" / "tiny.toml"
PATIENT = f"""[rounds]
minimum_peers = {VOLUNTEERS}
heartbeat_seconds = 3.0  # three of these are the least that a leader waits for who still trains
heartbeat_expiry_seconds = 30.0
grace_seconds = 60.0
partition_grace_seconds = 60.0
"""


STREAMING = """[streaming]
layers_per_fragment = 1
overlap = 2
[codec]
kind = "e3m0"
rounding = "stochastic"
error_feedback = 0.9
"""


SPARSE = (
    STREAMING.partition("[codec]")[0]
    + """[codec]
kind = "sparse"
"""
)


MIXED = """[codec]
contributions = ["int8", "e2m1", "sparse"]

"""


def write_run(folder: Path, streaming: str) -> Path:
    """Write a run in which a volunteer that its machine holds up for some seconds is waited for."""
    text = TINY.read_text().replace("outer_steps = 8", f"outer_steps = {OUTER_STEPS}")
    path = folder / "run.toml"
    path.write_text(text.partition("[rounds]")[0] + streaming + PATIENT)
    return path


async def train_as_a_swarm(folder: Path, streaming: str, formats: Sequence[str]) -> list[Journal]:
    """Run a swarm of commands, in which the first volunteers send contributions in these formats. Return the
    volunteers' journals."""
    children: list[_Child] = []

    async def start(name: str, *arguments: str) -> _Child:
        children.append(await _Child.start(name, [*arguments, "--identity", str(folder / f"{name}.pem")], folder))
        return children[-1]

    try:
        ports = ("--listen", LOOPBACK, "--data-port", "0")
        bootstrap = await start("bootstrap", "bootstrap", *ports, "--directory", str(folder))
        address = await bootstrap.line(r"/ip4/\S+/p2p/\w+", DEADLINE)
        toml = write_run(folder, streaming)
        invite = await asyncio.to_thread(announce_run, toml, address)
        journals = [Journal(folder / f"journal-{number}.jsonl") for number in range(VOLUNTEERS)]
        volunteers = [
            await start(
                f"volunteer-{number}",
                *("join", "--run", invite, "--listen", LOOPBACK, "--threads", "1"),
                *("--journal", str(journal.path), "--state", str(folder / "state")),
                *(("--contribution-format", formats[number]) if number < len(formats) else ()),
            )
            for number, journal in enumerate(journals)
        ]
        for volunteer in volunteers:
            await volunteer.line(f"outer step {OUTER_STEPS} applied", DEADLINE)
        for volunteer in volunteers:
            volunteer.send(signal.SIGINT)
        for volunteer in volunteers:
            await volunteer.ended()
            assert volunteer.exit_code == 0, volunteer.last_words()
    finally:
        for child in children:
            child.send(signal.SIGINT)
        for child in children:
            await child.ended()
    return journals


@pytest.mark.parametrize(
    ("streaming", "formats"),
    [
        pytest.param("", (), id="plain"),
        pytest.param(MIXED, ("sparse", "e2m1"), marks=pytest.mark.thorough, id="mixed formats"),
        pytest.param(STREAMING, (), marks=pytest.mark.thorough, id="streaming"),
        pytest.param(SPARSE, (), marks=pytest.mark.thorough, id="sparse"),
    ],
)
def test_a_swarm_of_processes_ends_with_the_bits_of_the_reference(
    streaming: str, formats: tuple[str, ...], tmp_path: Path
) -> None:
    entries, *others = [list(journal) for journal in asyncio.run(train_as_a_swarm(tmp_path, streaming, formats))]
    assert len(entries) == OUTER_STEPS
    assert all(other == entries for other in others)
    config = RunConfig.from_toml(tmp_path / "run.toml")
    for header, _ in entries:
        trained = [sample_count(member.samples) * config.training.sequence_length for member in header.roster]
        assert len(trained) == VOLUNTEERS, "a member was late"
        assert [member.tokens for member in header.roster] == trained, "a member was absent from chunks (R14)"
    for number in range(VOLUNTEERS):
        assert "we trained are lost" not in (tmp_path / f"volunteer-{number}.log").read_text()

    if formats:
        numbers = sorted(config.codec.number_of(format) for format in ("int8", *formats))
        assert all(sorted(member.format for member in header.roster) == numbers for header, _ in entries)

    reference = Reference(config)
    for header, state_digest in entries:
        roster = [
            Work(
                member.peer,
                member.samples,
                config.training.inner_steps,
                formats=(member.format,) * len(reference.state.fragments),
            )
            for member in header.roster
        ]
        assert reference.outer_step(roster) == state_digest
