"""The checkpointer, which passes frozen states of a run to a writer process and logs the outcome."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from typing import Self

from prometheus_client import Counter

from opendiloco.child_processes import child_environment, last_line, module_command
from opendiloco.storage.loading import metadata_of
from opendiloco.storage.writer import NOT_SAVED, NOT_SENT, SAVED, CheckpointJob, KeepingPlan, MomentsJob
from opendiloco.training.moments_file import NO_STEP
from opendiloco.workers.supervisor import Supervisor
from peers.errors import DilocoPeerError
from peers.metrics import NODE_METRICS
from peers.network.signals import signals_held_back
from peers.transfer.snapshots import FrozenSnapshot
from peers.values.system import PARTIAL, start_task
from peers.values.workload import SnapshotError

logger = logging.getLogger(__name__)

CLOSE_SECONDS = 5.0  # most seconds that a leaving volunteer waits for an unfinished checkpoint
LAST = "the last checkpoint was"  # not finished, in a warning
OUTCOMES = {SAVED: "saved", NOT_SENT: "not_sent", NOT_SAVED: "not_saved"}
CHECKPOINTS = Counter("diloco_peer_checkpoints", "Checkpoints by outcome", ["outcome"])
NODE_METRICS.register(CHECKPOINTS)  # for a node with an archive


class Checkpointer:
    """A writer of checkpoints, one at a time, in a separate process. Failures are logged and do not affect training."""

    def __init__(self, plan: KeepingPlan) -> None:
        self.on_saved: Callable[[], None] = lambda: None
        self.workers: Supervisor | None = None
        """The workers whose moments are kept; None: no moments are kept."""
        self._plan = plan
        self._waiting: FrozenSnapshot | None = None
        self._writing: asyncio.Task[None] | None = None
        self._unfinished = ""  # what the writer process is writing, for a warning
        self._cause: str | None = None  # why the last checkpoint was not written, without its name; None: it was

    def take(self, state: FrozenSnapshot) -> None:
        """Queue a state to be written as a checkpoint, in place of a state that still waits, and return at once. The
        state's memory is kept until the write ends."""
        if not self._plan.keeps(state.index):
            return
        if self._waiting is not None:
            CHECKPOINTS.labels("skipped").inc()
            logger.info("skipped the checkpoint of outer step %d: an earlier one is being written", self._waiting.index)
        self._waiting = state
        if self._writing is None or self._writing.done():
            self._writing = start_task(self._write_waiting())

    async def idle(self) -> None:
        """Wait until all queued checkpoints are written or have failed."""
        if self._writing is not None:
            await asyncio.wait([self._writing])

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *raised: object) -> None:
        """Wait `CLOSE_SECONDS` at most for an unfinished checkpoint, then kill the writer. Earlier checkpoints stay."""
        if self._writing is None:
            return
        try:
            await asyncio.wait([self._writing], timeout=CLOSE_SECONDS)
        finally:
            if self._writing.cancel():
                what = self._unfinished if self._waiting is None else LAST
                logger.warning("%s not finished; earlier ones are in %s", what, self._plan.folder)
            await asyncio.gather(self._writing, return_exceptions=True)

    async def _write_waiting(self) -> None:
        while self._waiting is not None:
            state, self._waiting = self._waiting, None
            self._unfinished = LAST
            job = checkpoint_job(self._plan, state)
            try:
                status, report = await _run_writer(job, job.descriptor)
            except OSError as error:  # the writer process could not start
                status, report = NOT_SAVED, f"the process that writes checkpoints cannot be started: {error.strerror}"
            outcome = OUTCOMES.get(status, "not_saved")
            CHECKPOINTS.labels(outcome).inc()
            name = f"the checkpoint of outer step {state.index}"
            is_written = status in (SAVED, NOT_SENT)
            before, self._cause = self._cause, None if is_written else report.replace(job.path.name, "")
            if outcome == "saved":
                logger.info("%s is saved: %s", name, report)
                self.on_saved()
            elif self._cause is None or self._cause != before:
                logger.warning("%s failed: %s", name, report or f"its process ended with {status}")
            if self.workers is not None and self._plan.moments != "none" and is_written:
                await self._keep_moments(self.workers, state.index)

    async def _keep_moments(self, workers: Supervisor, index: int) -> None:
        """Save the moments of the workers' inner optimizer, after `index` outer steps, beside the checkpoint. Remove
        the older file of moments."""
        self._unfinished = "the last checkpoint is saved, but the inner optimizer's moments were"
        job = MomentsJob(self._plan, index)
        partial = job.path.with_name(job.path.name + PARTIAL)
        try:
            await workers.keep_moments(partial, self._plan.run, index)
            status, report = await _run_writer(job)
        except (SnapshotError, DilocoPeerError, OSError) as error:  # a worker may have died; the trainer handles that
            status, report = NOT_SAVED, str(error)
        finally:
            with suppress(OSError):
                partial.unlink(missing_ok=True)
        if status in (SAVED, NOT_SENT):
            workers.kept_moments = job.path, self._plan.run
        if status == SAVED:
            logger.info("the inner optimizer's moments after outer step %d are saved: %s", index, report)
        elif report == NO_STEP:
            logger.info("no optimizer moments are saved after outer step %d: %s", index, report)
        else:
            reason = report or f"their process ended with {status}"
            logger.warning("the inner optimizer's moments after outer step %d are not saved: %s", index, reason)


def checkpoint_job(plan: KeepingPlan, state: FrozenSnapshot) -> CheckpointJob:
    """Return the job with which a writer process saves a frozen state as a checkpoint."""
    metadata = metadata_of(plan.run, state.last, state.state_digest, state.ends)
    return CheckpointJob(plan, state.index, metadata, state.memory.descriptor, state.memory.data.nbytes)


async def _run_writer(job: CheckpointJob | MomentsJob, *descriptors: int) -> tuple[int, str]:
    """Run a job in a writer process, and kill the process if this call is cancelled. Return the process's exit status
    and its last line on stderr. Raises: OSError if the process cannot be started."""
    with signals_held_back():  # Ctrl-C must not end the writer process, which gets `CLOSE_SECONDS` to finish
        process = await asyncio.create_subprocess_exec(
            *module_command("opendiloco.storage.writer"),
            pass_fds=descriptors,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            env=child_environment(),
        )
    try:
        _, errors = await process.communicate(json.dumps([type(job).__name__, asdict(job)], default=str).encode())
    finally:
        if process.returncode is None:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    return process.returncode or 0, last_line(errors.decode(errors="replace"))
