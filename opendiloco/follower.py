"""Following a run without training in it: taking over the state of the peer that is furthest on, to look at it."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from opendiloco.anchorage import ask_for_anchors
from opendiloco.errors import MachineError
from opendiloco.local_workload import LocalWorkload
from opendiloco.model.export import RunFacts
from opendiloco.run import Run, find_run
from opendiloco.volunteer import connected, working
from peers.log.header import Header
from peers.net.transport import HivemindTransport
from peers.transfer.following import CannotFollowError, Following, nobody_trains
from peers.transfer.storage import MemoryStorage
from peers.values.identity import Identity
from peers.values.manifest import Invite

logger = logging.getLogger(__name__)


async def export_run(invite: Invite, folder: Path, key: Identity) -> RunFacts:
    """Write the newest state of a run as a model folder; returns what its card says.

    Raises: MachineError when the folder is not new, SwarmUnreachableError when no peer gives a state, and what starting
    a worker raises.
    """
    with new_folder(folder):
        async with connected(key, invite.addresses) as transport:
            run = await find_run(transport, invite.run_id)
            await ask_for_anchors(transport, run, invite.addresses)
            if not await transport.heartbeats(run.run_id):  # that should not cost the start of a worker
                raise nobody_trains(run.run_id)
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


async def fetch_state(run: Run, transport: HivemindTransport, workload: LocalWorkload) -> Header | None:
    """Take over the newest state. Returns the log's last header there.

    Raises: SwarmUnreachableError when no peer gives a state that holds up.
    """
    following = Following(transport, workload, run.settings, MemoryStorage())
    await following.begin()
    while True:
        try:
            if await following.advance() is None:
                return following.log.last
        except CannotFollowError as error:  # perhaps nobody keeps the payload any more
            await following.begin(error.least)


def warn_of_other_text(workload: LocalWorkload) -> None:
    """Say so where a loss is of other text than the run's."""
    if not workload.has_held_out_text:
        logger.warning("the held-out text here is not the run's: its loss is not to be compared with the run's curve")


async def export_state(run: Run, last: Header | None, workload: LocalWorkload, folder: Path) -> RunFacts:
    """Evaluate and write the state that `workload` has."""
    evaluated = await workload.evaluate()
    warn_of_other_text(workload)
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
