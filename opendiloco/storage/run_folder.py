"""Where a machine keeps what it knows of a run: one folder for each run and peer, and the files of lines in it."""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from opendiloco.errors import MachineError
from opendiloco.run import Run
from opendiloco.storage.files import CHECKPOINTS_FOLDER, MANIFEST
from peers.errors import ManifestError
from peers.log.header import Header
from peers.network.first_contact import CONTACT_LIMIT, FILE_NAME, RememberedPeers
from peers.values.manifest import SignedManifest
from peers.values.system import make_private_folder, write_whole
from peers.values.wire import pack, unpack

logger = logging.getLogger(__name__)


def default_state_folder() -> Path:
    """`~/.local/state/diloco-peer`, or where XDG_STATE_HOME says."""
    base = os.environ.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local" / "state") / "diloco-peer"


CURVE = "held_out.jsonl"
COMPILED = "compiled"
"""In the folder with those of all runs: what PyTorch has compiled for this machine, so that it is not done anew."""


class RunFolder:
    """The places of what is kept of a run. Made by `open`. Two peers on one machine share nothing."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.run_id, self.peer_id = path.parent.name, path.name
        self.manifest, self.checkpoints = path / MANIFEST, path / CHECKPOINTS_FOLDER
        self.log, self.download = path / "log", path / "download"
        self.signed_heads = path / "signed_heads"
        """What the run's archives have signed, as far as this peer has heard."""
        self.held_out = path / CURVE
        """The losses on held-out text that this peer has heard of (see `HeldOutCurve`)."""

    @classmethod
    def at(cls, run_id: str, peer_id: str, base: Path | None = None) -> RunFolder:
        """Return `base`/<run id>/<peer id>, whether it is there or not."""
        return cls(((default_state_folder() if base is None else base) / run_id / peer_id).absolute())

    @classmethod
    def open(cls, run: Run, peer_id: str, base: Path | None = None) -> RunFolder:
        """Make the folder, with the run's manifest in it. Raises: MachineError when it cannot be written to."""
        folder = cls.at(run.run_id, peer_id, base)
        try:
            for path in (folder.path, folder.checkpoints, folder.log, folder.download):
                make_private_folder(path)
            write_whole(folder.manifest, [run.manifest.pack()])
        except OSError as error:
            raise MachineError(
                f"the folder {folder.path} for what this machine keeps of the run cannot be used: {error.strerror}.",
                "Name a folder on a disk with space with --state.",
            ) from error
        return folder

    def remove(self) -> None:
        """Remove the folder and all that is in it, as far as that is possible."""
        shutil.rmtree(self.path, ignore_errors=True)
        with suppress(OSError):  # it has another peer's
            self.path.parent.rmdir()

    def remembered_manifest(self) -> SignedManifest | None:
        """Return the run's manifest from when this peer was in the run before; None when there is none to read."""
        try:
            return SignedManifest.unpack(self.manifest.read_bytes(), self.run_id)
        except FileNotFoundError:
            return None
        except (OSError, ManifestError) as error:
            logger.warning("%s is passed over: %s", self.manifest, error)
            return None

    def remembered_peers(self) -> RememberedPeers:
        """Return where this peer has met others of the run; nobody, if it was never in it."""
        return RememberedPeers(self.path / FILE_NAME, self.run_id)


def remembered_addresses(run_id: str, base: Path | None = None) -> tuple[str, ...]:
    """Return where volunteers of this machine have met other peers of a run, the most useful first."""
    folder = (default_state_folder() if base is None else base) / run_id
    found = [RememberedPeers(path, run_id).addresses() for path in sorted(folder.glob(f"*/{FILE_NAME}"))]
    return tuple(dict.fromkeys(address for addresses in found for address in addresses))[:CONTACT_LIMIT]


def kept_losses(run_id: str, base: Path | None = None) -> dict[int, float]:
    """Return the losses on held-out text that volunteers of this machine have heard of, by outer step."""
    folder = (default_state_folder() if base is None else base) / run_id
    return {step: loss for path in sorted(folder.glob(f"*/{CURVE}")) for step, loss in read_curve(path).items()}


def read_manifest(path: Path) -> Run:
    """The run of a signed manifest's file. Raises: ManifestError."""
    try:
        packed = path.read_bytes()
    except OSError as error:
        reason = error.strerror or str(error)
        raise ManifestError(f"{path}: cannot be read ({reason}).", "Give a manifest that exists.") from error
    return Run.from_manifest(SignedManifest.unpack(packed))


# Held-out losses ------------------------------------------------------------------------------------------------------
MOST_BYTES = 1 << 24  # of a file that is read. A loss takes some 40 of them
MOST_LOSSES = 100_000
"""That are kept: an organiser may say that a run has any number of outer steps, and others claim losses of each."""


class HeldOutCurve:
    """Losses by outer step. With a file, each new one is appended to it; a file that cannot be written is given up."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self.losses: dict[int, float] = {} if path is None else read_curve(path)

    def add(self, outer_step: int, loss: float) -> bool:
        """Keep a finite loss, unless there is one of that outer step, or too many. Return whether it was new."""
        if outer_step in self.losses or not math.isfinite(loss) or len(self.losses) >= MOST_LOSSES:
            return False
        self.losses[outer_step] = loss
        if self._path is not None:
            try:
                with self._path.open("a", encoding="utf-8") as lines:
                    lines.write(json.dumps({"outer_step": outer_step, "loss": loss}) + "\n")
            except OSError as error:
                logger.warning("%s is not written any more: %s", self._path, error.strerror or error)
                self._path = None
        return True


def read_curve(path: Path) -> dict[int, float]:
    """Return the losses in a file by outer step; nothing where there is none. Lines that say something else, such as
    half a line of a peer that was killed, are passed over."""
    losses = dict[int, float]()
    try:
        with path.open("rb") as file:
            lines = file.read(MOST_BYTES).splitlines()
    except OSError:
        return losses
    for line in lines:
        try:
            said = json.loads(line)
            outer_step, loss = said["outer_step"], float(said["loss"])
        except (ValueError, TypeError, KeyError):
            continue
        if type(outer_step) is int and outer_step >= 0 and math.isfinite(loss) and len(losses) < MOST_LOSSES:
            losses.setdefault(outer_step, loss)
    return losses


# The journal ----------------------------------------------------------------------------------------------------------
# The entries that a peer applied: what an audit, or the reference, needs to repeat the run. A line holds the entry's
# index, its header (canonical bytes, in hexadecimal) and the state digest after it.
@dataclass(frozen=True)
class Journal:
    """A file that is only ever appended to."""

    path: Path

    def __post_init__(self) -> None:
        """Make the file now, so that a wrong name is not found out later. Raises: MachineError."""
        self._write("")

    def append(self, header: Header, state_digest: bytes) -> None:
        """Raises: MachineError when the disk does not take it."""
        line = {"index": header.index, "header": pack(header).hex(), "state_digest": state_digest.hex()}
        self._write(json.dumps(line) + "\n")

    def _write(self, text: str) -> None:
        try:
            with self.path.open("a") as file:
                file.write(text)
        except OSError as error:
            raise MachineError(
                f"cannot write to the journal {self.path}: {error.strerror}.",
                "Name a file on a disk with space, or leave out --journal.",
            ) from error

    def __iter__(self) -> Iterator[tuple[Header, bytes]]:
        """Headers and state digests, in the order in which they were applied."""
        for text in self.path.read_text().splitlines():
            line = json.loads(text)
            yield unpack(Header, bytes.fromhex(line["header"])), bytes.fromhex(line["state_digest"])
