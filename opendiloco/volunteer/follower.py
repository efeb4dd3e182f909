"""Following a run without training in it: taking over the state of the peer that is furthest on, to look at it."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path

from opendiloco.data.own_files import NONE, OwnFiles
from opendiloco.errors import MachineError
from opendiloco.evaluation_turns import HeldOut, bits_per_byte
from opendiloco.model.export import Dtype, RunFacts
from opendiloco.run import Run, find_run
from opendiloco.view.curves import versions
from opendiloco.view.run_view import RunView
from opendiloco.volunteer.local_workload import LocalWorkload
from opendiloco.volunteer.origins import Past
from opendiloco.volunteer.signed_heads import ask_for_signed_heads
from opendiloco.volunteer.volunteer import connected, working
from peers.network.transport import HivemindTransport
from peers.transfer.following import CannotFollowError, Following, nobody_trains
from peers.transfer.storage import Storage
from peers.values.identity import Identity
from peers.values.manifest import Invite
from peers.values.system import make_private_folder

logger = logging.getLogger(__name__)


@asynccontextmanager
async def newest_state(
    invite: Invite, key: Identity, data: Sequence[Path] = (), own: OwnFiles = NONE
) -> AsyncIterator[tuple[Run, Past, LocalWorkload]]:
    """The newest state of a run's peers, in a workload that can evaluate, generate and export.

    The local text of the run is in the folders `data`, its local model and tokenizer in `own`: nothing else of this
    machine is read.

    Raises: DataError when these do not name all that is local; SwarmUnreachableError when no peer gives a state; what
    starting a worker raises.
    """
    async with connected(key, invite.addresses) as transport:
        run = await find_run(transport, invite.run_id)
        run = run.with_data(data).with_own(own)
        await ask_for_signed_heads(transport, run, invite.addresses)
        if not await transport.heartbeats(run.run_id):  # that should not cost the start of a worker
            raise nobody_trains(run.run_id)
        async with working(run) as workload:
            yield run, past_of(run, await fetch_state(run, transport, workload)), workload


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
        make_private_folder(folder)
        if any(folder.iterdir()):
            raise MachineError(f"{folder} is not empty.", remedy)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise MachineError(f"{folder} cannot be used: {error.strerror}.", remedy) from error


async def fetch_state(run: Run, transport: HivemindTransport, workload: LocalWorkload) -> Following:
    """Take over the newest state. Return what has followed the run to there.

    Raises: SwarmUnreachableError when no peer gives a state that holds up.
    """
    following = Following(transport, workload, run.settings, Storage())
    await following.begin()
    while True:
        try:
            if await following.advance() is None:
                return following
        except CannotFollowError as error:  # perhaps nobody keeps the payload any more
            await following.begin(error.least)


def past_of(run: Run, following: Following) -> Past:
    """Return how the state came to be that was followed to."""
    found = RunView.of(run, following.donors.heartbeats).held_out
    return Past.of(following.past, following.log.last, {one.index: one.loss for one in found})


def warn_of_other_text(found: HeldOut) -> None:
    """Say so where a loss is of other text than the run's."""
    if not found.is_runs_text:
        logger.warning("the held-out text here is not the run's: its loss is not to be compared with the run's curve")


async def export_state(
    run: Run, past: Past, workload: LocalWorkload, folder: Path, command: str = "", dtype: Dtype = "float32"
) -> RunFacts:
    """Evaluate and write the state that `workload` has. The card says that `command` makes it."""
    workers, last = workload.trainer, past.last
    found = await workers.held_out(run.config.evaluation)
    warn_of_other_text(found)
    facts = RunFacts(
        run_id=run.run_id,
        manifest_digest=run.manifest.digest.hex(),
        outer_steps=past.outer_steps,
        tokens=last.lineage_tokens if last else 0,
        peers=len(last.roster) if last else 0,
        held_out_loss=found.loss,
        bits_per_byte=bits_per_byte(found.loss, workers.bytes_per_token),
        contributors=past.contributors,
        knows_all=past.is_whole,
        curve=past.curve(found.loss),
        command=command,
        versions=versions(),
    )
    await workers.export(folder, facts, dtype)
    return facts
