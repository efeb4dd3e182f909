"""The model of a run at any outer step that a machine's checkpoints and log lead to, without peers or a network."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from opendiloco.data.own_files import NONE, OwnFiles
from opendiloco.errors import CheckpointError
from opendiloco.kernels import FORMATS
from opendiloco.run import Run
from opendiloco.storage.loading import Checkpoint, Checkpoints, load_checkpoint, resume
from opendiloco.storage.run_folder import MANIFEST, RunFolder, read_curve, read_manifest
from opendiloco.volunteer.local_workload import LocalWorkload
from opendiloco.volunteer.origins import Past
from opendiloco.volunteer.volunteer import working
from peers.errors import ManifestError
from peers.log.chain import Chain
from peers.log.folder import ENTRIES, LogFolder, read_chain
from peers.values.workload import SnapshotError


@dataclass(frozen=True)
class Origin:
    """Where a model comes from: the state after `index` outer steps, by a checkpoint and the log from there on."""

    run: Run
    checkpoint: Checkpoint
    index: int
    log: Path
    held_out: Path

    async def bring(self, workload: LocalWorkload) -> Past:
        """Give the workload that state. Return how it came to be. Nothing on the disk is changed.

        Raises: CheckpointError when the checkpoint is of another model, or the log does not lead that far.
        """
        log = self._read_log(workload)
        try:
            reached = await resume(workload, log, self.checkpoint, self.index)
        except SnapshotError as error:
            message = f"{self.checkpoint.path} is not of this run: {error}."
            raise CheckpointError(message, "Use another checkpoint.") from error
        if reached.position.index != self.index:
            raise CheckpointError(
                f"from {self.checkpoint.path} on, the log in {self.log} leads to outer step {reached.position.index} "
                f"and not to {self.index}.",
                "Choose one from there to there, or one of which there is a checkpoint.",
            )
        return Past.of(log, reached.last, read_curve(self.held_out))

    def _read_log(self, workload: LocalWorkload) -> LogFolder:
        """Its peer may be writing to it: what is wrong at its end is passed over."""
        empty_log, file = self.run.settings.empty_log, self.log / ENTRIES
        chain = read_chain(file, empty_log)[0] if file.exists() else Chain(empty_log)
        return LogFolder(self.log, chain, FORMATS[self.run.config.codec.kind].block_bytes)


@asynccontextmanager
async def state_of(origin: Origin) -> AsyncIterator[tuple[Run, Past, LocalWorkload]]:
    """The state there, in a workload that can evaluate, generate and export.

    Raises: CheckpointError (see `Origin.bring`), and what starting a worker raises.
    """
    async with working(origin.run) as workload:
        yield origin.run, await origin.bring(workload), workload


def find_origin(source: Path, index: int | None = None, manifest: Path | None = None, own: OwnFiles = NONE) -> Origin:
    """What to export from: the file of a checkpoint, a peer's folder of a run, or the folder of its checkpoints.

    Without an index it is the checkpoint in the file, or the newest good one. The run's manifest lies beside the
    checkpoints or one folder above, if it is not given.

    Raises: CheckpointError, ManifestError; DataError, see `Run.with_own`.
    """
    if not source.exists():
        raise CheckpointError(f"{source} does not exist.", "Give a checkpoint, or a folder of them or of a run.")
    folder = source if source.is_dir() else source.absolute().parent
    if (inner := RunFolder(folder).checkpoints).is_dir():
        folder = inner
    run = _find_run(folder, manifest).with_own(own)
    if source.is_dir():
        checkpoint = _newest(Checkpoints(folder, run.run_id), index)
    else:
        checkpoint = load_checkpoint(source, run.run_id)
    beside = RunFolder(folder.absolute().parent)
    log = beside.log
    index = checkpoint.index if index is None else index
    if index < checkpoint.index or (index > checkpoint.index and not (log / ENTRIES).exists()):
        raise CheckpointError(
            f"{checkpoint.path} is the state after {checkpoint.index} outer steps, not after {index}, and there is no "
            f"log in {log} that leads from there.",
            "Choose another --at or --from.",
        )
    return Origin(run, checkpoint, index, log, beside.held_out)


def _newest(checkpoints: Checkpoints, index: int | None) -> Checkpoint:
    newest = checkpoints.load_newest(index)
    if newest is None:
        limit = "" if index is None else f" after {index} outer steps or fewer"
        there = ", ".join(map(str, checkpoints.indices())) or "none"
        raise CheckpointError(f"{checkpoints.folder} has no good checkpoint{limit}.", f"Those that are there: {there}.")
    return newest


def _find_run(folder: Path, manifest: Path | None) -> Run:
    if manifest is not None:
        return read_manifest(manifest)
    found = next(filter(Path.exists, (folder / MANIFEST, folder.absolute().parent / MANIFEST)), None)
    if found is None:
        raise ManifestError(
            f"there is no {MANIFEST} in {folder} or the folder above.",
            "Give the run's signed manifest with --manifest; `diloco-peer run create` has written one.",
        )
    return read_manifest(found)
