"""The model of a run at an outer step of which there is a checkpoint: no peer, and no network, is needed."""

from __future__ import annotations

from pathlib import Path

from opendiloco.checkpoints import Checkpoint, Checkpoints, load_checkpoint
from opendiloco.control import RunFacts
from opendiloco.errors import CheckpointError
from opendiloco.follower import export_state, new_folder
from opendiloco.run import Run
from opendiloco.run_folder import MANIFEST, read_manifest
from opendiloco.volunteer import working
from peers.errors import ManifestError
from peers.workload import SnapshotError


async def export_checkpoint(run: Run, checkpoint: Checkpoint, folder: Path) -> RunFacts:
    """Write a checkpoint's model into a new folder; returns what its card says.

    Raises: MachineError when the folder is not new, CheckpointError when the state is not one of this run's model, and
    what starting a worker raises.
    """
    with new_folder(folder):
        async with working(run) as workload:
            try:
                await workload.restore(checkpoint.state, checkpoint.state_digest)
            except SnapshotError as error:
                raise CheckpointError(f"{checkpoint.path} is not of this run: {error}.", "Use another one.") from error
            return await export_state(run, checkpoint.last, workload, folder)


def find_run_of(source: Path, manifest: Path | None = None) -> Run:
    """The run that checkpoints belong to, by the manifest that is given, or that lies beside them or one folder above.

    Raises: CheckpointError when there is nothing at `source`; ManifestError.
    """
    if not source.exists():
        raise CheckpointError(
            f"{source} does not exist.", "Give a checkpoint, or the folder of a run or its checkpoints."
        )
    if manifest is not None:
        return read_manifest(manifest)
    folder = source if source.is_dir() else source.parent
    found = next(filter(Path.exists, (folder / MANIFEST, folder.absolute().parent / MANIFEST)), None)
    if found is None:
        raise ManifestError(
            f"there is no {MANIFEST} beside {source} or in the folder above.",
            "Give the run's signed manifest with --manifest; `diloco-peer run create` has written one.",
        )
    return read_manifest(found)


def find_checkpoint(source: Path, run: Run, index: int | None = None) -> Checkpoint:
    """The checkpoint in a file; or in a folder, which may be a run's: the one after `index` outer steps, or the newest.

    Raises: CheckpointError.
    """
    if source.is_file():
        checkpoint = load_checkpoint(source, run.run_id)
        steps = checkpoint.index
        if index not in (None, steps):
            raise CheckpointError(
                f"{source} is the state after {steps} outer steps, not after {index}.",
                "Give the folder that it is in, or leave out --at.",
            )
        return checkpoint
    inner = source / "checkpoints"
    checkpoints = Checkpoints(inner if inner.is_dir() else source, run.run_id)
    if index is not None:
        return checkpoints.load(index)
    newest = checkpoints.load_newest()
    if newest is None:
        raise CheckpointError(f"{checkpoints.folder} has no good checkpoint.", "Give a folder or file that has one.")
    return newest
