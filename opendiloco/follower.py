"""Following a run without training in it: taking over the state of the peer that is furthest on, to look at it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from opendiloco.control import RunFacts
from opendiloco.errors import MachineError
from opendiloco.local_workload import LocalWorkload
from opendiloco.run import Run, find_run
from opendiloco.volunteer import connected, working
from peers.errors import RemoteProtocolError, SwarmUnreachableError
from peers.hivemind_transport import HivemindTransport
from peers.identity import Identity
from peers.log import Header
from peers.manifest import Invite
from peers.membership import PARTICIPATING
from peers.snapshots import pull_snapshot
from peers.streams import PeerUnreachableError
from peers.workload import SnapshotError

HELD_OUT_WINDOWS = 256  # for the loss on the model card: about 1 % of the default corpus


async def export_run(invite: Invite, folder: Path) -> RunFacts:
    """Write the newest state of a run as a model folder; returns what its card says.

    Raises: MachineError when the folder is not new, SwarmUnreachableError when no peer gives a state, and what starting
    a worker raises.
    """
    with new_folder(folder):
        async with connected(Identity.generate(), invite.addresses) as transport:
            run = await find_run(transport, invite.run_id)
            await donors(transport, run)  # a run that nobody trains in should not cost the start of a worker
            async with working(run) as workload:
                last = await fetch_state(run, transport, workload)
                return await export_state(run, last, workload, folder)


@contextmanager
def new_folder(folder: Path) -> Iterator[None]:
    """Made now and found to be usable, before minutes of work; gone again if those fail and leave it empty.

    Raises: see `make_folder`.
    """
    missing = [one for one in (folder, *folder.parents) if not one.exists()]
    make_folder(folder)
    try:
        yield
    except BaseException:
        with suppress(OSError):
            for one in missing:  # from the innermost
                one.rmdir()
        raise


def make_folder(folder: Path) -> None:
    """Raises: MachineError when it cannot be made or written to, or has something in it."""
    remedy = "Give a new folder with --out."
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise MachineError(f"{folder} is not empty.", remedy)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise MachineError(f"{folder} cannot be used: {error.strerror}.", remedy) from error


async def donors(transport: HivemindTransport, run: Run) -> list[str]:
    """The live peers that have the run's state, the furthest on first. Raises: SwarmUnreachableError if nobody has."""
    heartbeats = [beat for beat in await transport.heartbeats(run.run_id) if beat.state in PARTICIPATING]
    heartbeats.sort(key=lambda beat: (beat.lineage_tokens, beat.sequence), reverse=True)
    for beat in heartbeats:
        await transport.connect(beat.peer, beat.addresses)
    if not heartbeats:
        raise SwarmUnreachableError(
            f"nobody trains in the run {run.run_id} now, so nobody has its state.", "Ask a volunteer to join it again."
        )
    return [beat.peer for beat in heartbeats]


async def fetch_state(run: Run, transport: HivemindTransport, workload: LocalWorkload) -> Header | None:
    """Take over the state of the peer furthest on, or of the next one. Returns the log's last header there.

    Raises: SwarmUnreachableError when no peer gives a state that holds up.
    """
    log = run.settings.empty_log
    reasons = []
    for donor in await donors(transport, run):
        try:
            header, state_digest, snapshot = await pull_snapshot(transport, donor, log, workload.snapshot_limit)
            await workload.restore(snapshot, state_digest)
            return header.last
        except (PeerUnreachableError, RemoteProtocolError, SnapshotError) as error:
            reasons.append(f"{donor}: {error}")
    raise SwarmUnreachableError(f"no peer gave its state: {'; '.join(reasons)}.", "Try again in a minute.")


async def export_state(run: Run, last: Header | None, workload: LocalWorkload, folder: Path) -> RunFacts:
    """Evaluate and write the state that `workload` has."""
    evaluated = await workload.evaluate(HELD_OUT_WINDOWS)
    facts = RunFacts(
        run_id=run.run_id,
        manifest_digest=run.manifest.digest.hex(),
        outer_steps=last.index + 1 if last else 0,
        tokens=last.lineage_tokens if last else 0,
        peers=len(last.roster) if last else 0,
        held_out_loss=evaluated.loss,
    )
    await workload.export(folder, facts)
    return facts
