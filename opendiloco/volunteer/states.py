"""A run's state to view or export without training, fetched from the run's peers or loaded from this machine's disk."""

from __future__ import annotations

import logging
import shlex
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from opendiloco.data.own_files import NONE, OwnFiles, local_sources
from opendiloco.errors import CheckpointError, MachineError
from opendiloco.evaluation_turns import HeldOut, bits_per_byte
from opendiloco.model.export import CurvePoint, Dtype, RunFacts
from opendiloco.run import Run
from opendiloco.storage.files import MANIFEST
from opendiloco.storage.loading import Checkpoint, Checkpoints, load_checkpoint, resume
from opendiloco.storage.run_folder import RunFolder, kept_losses, read_curve, read_manifest
from opendiloco.training.codec import block_bytes
from opendiloco.view.amended import amendment_in_words
from opendiloco.view.curves import versions
from opendiloco.view.run_view import RunView
from opendiloco.volunteer.admission import ask_for_signed_heads
from opendiloco.volunteer.local_workload import NO_TEXT, NO_TRAINING, LocalWorkload, working
from opendiloco.volunteer.volunteer import reading
from opendiloco.workers.options import WorkerOptions
from peers.errors import ManifestError
from peers.log.chain import Chain
from peers.log.folder import ENTRIES, LogFolder, RunLog, read_chain
from peers.log.header import Header
from peers.network.transport import HivemindTransport
from peers.transfer.following import CannotFollowError, Following, no_training_peer_error
from peers.values.manifest import Amendment, Invite
from peers.values.system import make_private_folder
from peers.values.workload import SnapshotError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class History:
    """The history of a run's state, up to its newest entry `last` (None: the initial state). `is_whole` is true if this
    machine's log has all entries of the history, and false if earlier entries are missing.

    `contributors` is the number of peers that have trained in the known entries. `tokens` has the lineage's tokens by
    outer step, and `losses` the peers' losses on held-out text. `amendments` are those that changed outer steps of this
    state, in words.
    """

    last: Header | None
    contributors: int = 0
    is_whole: bool = False
    tokens: Mapping[int, int] = field(default_factory=dict)
    losses: Mapping[int, float] = field(default_factory=dict)
    amendments: tuple[str, ...] = ()

    @classmethod
    def of(cls, log: RunLog, last: Header | None, losses: Mapping[int, float]) -> History:
        """Return the history of the state to which the entry `last` of `log` leads. `losses` are by outer step."""
        if last is None:
            return cls(None, 0, True)
        contributors, tokens, amended = set[str](), dict[int, int](), dict[Amendment, str]()
        headers = [*log.headers(0, last.index + 1), last]
        for header in headers:
            contributors.update(member.peer for member in header.roster if member.tokens)
            tokens[header.index + 1] = header.lineage_tokens
            # "by outer step 5" means that an amendment entered the log then or earlier: the oldest known entry may
            # repeat amendments of earlier entries. Those that the last entry adds are left out: not yet in force.
            since = "by" if header.index == headers[0].index > 0 else "after" if header.index < last.index else ""
            for logged in (header.amendments or ()) if since else ():
                amended.setdefault(logged.amendment, f"{since} outer step {header.index + 1}")
        words = tuple(f"{since}: {amendment_in_words(amendment)}" for amendment, since in amended.items())
        return cls(last, len(contributors), len(tokens) == last.index + 1, tokens, losses, words)

    @property
    def outer_steps(self) -> int:
        return self.last.index + 1 if self.last else 0

    def curve(self, loss: float | None) -> tuple[CurvePoint, ...]:
        """Return the points of the held-out loss curve up to this state, in order. `loss` is the loss of this state, or
        None if it was not measured."""
        losses = {step: found for step, found in self.losses.items() if step <= self.outer_steps}
        if loss is not None:
            losses[self.outer_steps] = loss
        return tuple(
            CurvePoint(outer_step=step, loss=losses[step], tokens=self.tokens.get(step)) for step in sorted(losses)
        )


def run_options(run: Run) -> list[str]:
    """Return the options with which `diloco-peer` commands find the run, with the words ADDRESS and KEY in place of a
    node's address and the user's key file."""
    key = ["--identity", "KEY"] if run.manifest.is_by_invitation else []
    return ["--run", run.run_id, "--initial-peer", "ADDRESS", *key]


def command_line(*words: str | Sequence[str]) -> str:
    """Return a shell command line that runs `diloco-peer` with these words."""
    flat = [word for part in words for word in ([part] if isinstance(part, str) else part)]
    return shlex.join(["diloco-peer", *flat])


@asynccontextmanager
async def newest_state(
    invite: Invite, identity: Path | None, data: Sequence[Path] | None, own: OwnFiles
) -> AsyncIterator[tuple[Run, History, LocalWorkload]]:
    """Yield a run, its newest state's history, and a workload with that state, fetched from the run's peers.

    The run's local text is in the folders `data`, its local model and tokenizer in `own`; no other file of this machine
    is read. Without `data` (None) no text is read, and the workload can only generate; see `with_text`.

    Raises: DataError when these do not name all local files of the run; SwarmUnreachableError when no peer gives a
    state; see `reading` and `working`.
    """
    async with reading(invite, identity) as (found, transport):
        run = found.with_own(own)
        run, options = with_text(run, data)
        await ask_for_signed_heads(transport, run, invite.addresses)
        if not await transport.heartbeats(run.run_id):  # checked before workers start, which takes longer
            raise no_training_peer_error(run.run_id)
        async with working(run, options) as workload:
            following = await fetch_state(run, transport, workload)
            yield run, history_of(run, following, kept_losses(run.run_id)), workload


def with_text(run: Run, data: Sequence[Path] | None) -> tuple[Run, WorkerOptions]:
    """Return the run with the folders `data` as its local text, and the options of a worker that evaluates on the run's
    text.

    The worker reads no text if `data` is None, or names none of the run's local text. Raises: DataError, see
    `Run.with_data`.
    """
    if data is None:
        return run, NO_TEXT
    if not data and local_sources(run.config.data):
        logger.warning("the held-out loss is not measured; name a copy of the run's text with --data to measure it")
        return run, NO_TEXT
    return run.with_data(data), NO_TRAINING


@contextmanager
def new_folder(folder: Path) -> Iterator[None]:
    """Create a folder, as `make_folder` does, before the minutes of work in the `with` block. If the work fails, remove
    the folder if it is empty."""
    missing = [one for one in (folder, *folder.parents) if not one.exists()]
    make_folder(folder)
    try:
        yield
    except BaseException:
        with suppress(OSError):
            for one in missing:  # innermost folder first
                one.rmdir()
        raise


def make_folder(folder: Path) -> None:
    """Create a folder. Raises: MachineError if the folder cannot be created or written to, or is not empty."""
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
    """Fetch the run's newest state into the workload. Return the follower that has fetched the state. Raises:
    SwarmUnreachableError."""
    following = Following(transport, workload, run.settings)
    await following.begin()
    while True:
        try:
            if await following.advance() is None:
                return following
        except CannotFollowError as error:  # perhaps no peer keeps the next payload any more
            await following.begin(error.least)


def history_of(run: Run, following: Following, losses: Mapping[int, float]) -> History:
    """Return the history of the state that `following` has fetched. Each loss in `losses`, by outer step, replaces the
    loss that peers report."""
    found = RunView(run, following.donors.heartbeats).held_out
    return History.of(following.past, following.log.last, {one.index: one.loss for one in found} | dict(losses))


def warn_of_other_text(found: HeldOut) -> None:
    """Log a warning if a loss was measured on other text than the run's."""
    if not found.is_runs_text:
        logger.warning(
            "this machine's held-out text is not the run's, so its loss does not compare with the run's curve"
        )


async def export_state(
    run: Run, past: History, workload: LocalWorkload, folder: Path, command: str = "", dtype: Dtype = "float32"
) -> RunFacts:
    """Write the workload's model and a model card to `folder`, and return the facts in the card. These include
    `command`, which repeats the export, and the held-out loss, which is None if the workers have no text."""
    workers, last = workload.trainer, past.last
    found = await workers.held_out(run.config.evaluation) if workers.reads else None
    if found is not None:
        warn_of_other_text(found)
    loss = None if found is None else found.loss
    facts = RunFacts(
        run_id=run.run_id,
        manifest_digest=run.manifest.digest.hex(),
        outer_steps=past.outer_steps,
        tokens=last.lineage_tokens if last else 0,
        peers=len(last.roster) if last else 0,
        held_out_loss=loss,
        bits_per_byte=None if loss is None else bits_per_byte(loss, workers.bytes_per_token),
        contributors=past.contributors,
        knows_all=past.is_whole,
        curve=past.curve(loss),
        amendments=past.amendments,
        sources=Run.from_manifest(run.manifest).config.data.all_sources,
        command=command,
        versions=versions(),
    )
    await workers.export(folder, facts, dtype)
    return facts


@dataclass(frozen=True)
class StateSource:
    """The place of a state on the disk: a checkpoint, and the log in `folder`, whose later entries lead to the state.

    The state is the one after `index` outer steps, or the last one to which the log leads if `index` is None.
    """

    run: Run
    checkpoint: Checkpoint
    index: int | None
    folder: RunFolder

    async def load_into(self, workload: LocalWorkload) -> History:
        """Load the state into the workload, without changing files. Return the state's history.

        Raises: CheckpointError when the checkpoint is of another model, or the log does not lead that far.
        """
        empty_log, file = self.run.settings.empty_log, self.folder.log / ENTRIES
        # A peer may be writing to the log, so errors at the log's end are ignored.
        chain = read_chain(file, empty_log)[0] if file.exists() else Chain(empty_log)
        log = LogFolder(self.folder.log, chain, block_bytes(self.run.config.codec))
        try:
            reached = await resume(workload, log, self.checkpoint, self.index)
        except SnapshotError as error:
            message = f"{self.checkpoint.path} is not of this run: {error}."
            raise CheckpointError(message, "Use another checkpoint.") from error
        if self.index not in (None, reached.position.index):
            raise CheckpointError(
                f"from {self.checkpoint.path} on, the log in {self.folder.log} leads to outer step "
                f"{reached.position.index} and not to {self.index}.",
                "Choose an outer step between these, or one with a checkpoint.",
            )
        return History.of(log, reached.last, read_curve(self.folder.held_out))


@asynccontextmanager
async def state_of(
    origin: StateSource, data: Sequence[Path] | None
) -> AsyncIterator[tuple[Run, History, LocalWorkload]]:
    """Yield the run, the state's history, and a workload with the state at `origin`. Raises: DataError; see
    `StateSource.load_into` and `working`."""
    run, options = with_text(origin.run, data)
    async with working(run, options) as workload:
        yield run, await origin.load_into(workload), workload


def find_origin(
    source: Path, index: int | None = None, manifest: Path | None = None, own: OwnFiles = NONE
) -> StateSource:
    """Find the state after `index` outer steps on the disk. `source` is a checkpoint's file, a peer's folder of a run,
    or the folder of that peer's checkpoints.

    Without an index, a file means its checkpoint, and a folder means its newest good checkpoint and the log after it.
    The manifest, if not given, lies beside the checkpoints or one folder above. A folder higher up, such as an
    archive's, works if it contains one run of one peer.

    Raises: CheckpointError, ManifestError; DataError, see `Run.with_own`.
    """
    if not source.exists():
        raise CheckpointError(f"{source} does not exist.", "Give a checkpoint, or a folder of them or of a run.")
    folder = _only_run(source) if source.is_dir() else source.absolute().parent
    if (inner := RunFolder(folder).checkpoints).is_dir():
        folder = inner
    run = _find_run(folder, manifest).with_own(own)
    checkpoints = Checkpoints(folder, run.run_id)
    checkpoint = checkpoints.load_newest(index) if source.is_dir() else load_checkpoint(source, run.run_id)
    if checkpoint is None:
        limit = "" if index is None else f" after {index} outer steps or fewer"
        there = ", ".join(map(str, checkpoints.indices())) or "none"
        raise CheckpointError(f"{folder} has no good checkpoint{limit}.", f"Available outer steps: {there}.")
    beside = RunFolder(folder.absolute().parent)
    if index is None:
        return StateSource(run, checkpoint, None if source.is_dir() else checkpoint.index, beside)
    if index < checkpoint.index or (index > checkpoint.index and not (beside.log / ENTRIES).exists()):
        raise CheckpointError(
            f"{checkpoint.path} is the state after {checkpoint.index} outer steps, not after {index}, and there is no "
            f"log in {beside.log} that leads from there.",
            "Choose another --at or --from.",
        )
    return StateSource(run, checkpoint, index, beside)


def _only_run(folder: Path) -> Path:
    """Return the folder with a run's manifest: `folder` itself, or the only one at most two levels below it. If there
    is none, return `folder`. Raises: CheckpointError if there are several."""
    if (folder / MANIFEST).exists():
        return folder
    found = sorted(folder.glob(f"*/{MANIFEST}")) or sorted(folder.glob(f"*/*/{MANIFEST}"))
    if len(found) > 1:
        there = ", ".join(str(path.parent) for path in found)
        raise CheckpointError(f"{folder} has {len(found)} runs or peers.", f"Choose one: {there}.")
    return found[0].parent if found else folder


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
