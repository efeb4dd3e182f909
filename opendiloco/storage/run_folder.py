"""The folder with one peer's data of a run on this machine, its file of held-out losses, and the journal, which is a
file with the entries that the peer has applied."""

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
from opendiloco.storage.files import CHECKPOINTS_FOLDER, MANIFEST, index_of
from peers.errors import ManifestError
from peers.log.header import Header
from peers.network.first_contact import CONTACT_LIMIT, FILE_NAME, RememberedPeers
from peers.values.manifest import ASK_AGAIN, SignedManifest
from peers.values.system import make_private_folder, write_whole
from peers.values.wire import pack, unpack

logger = logging.getLogger(__name__)


def default_state_folder() -> Path:
    """Return the folder `diloco-peer` in XDG_STATE_HOME, or in `~/.local/state` if that variable is unset."""
    base = os.environ.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local" / "state") / "diloco-peer"


CURVE = "held_out.jsonl"
COMPILED = "compiled"
"""The folder beside the runs' folders that caches PyTorch's compiled code for this machine."""


class RunFolder:
    """The paths of one peer's data of a run, in a folder of its own on this machine. `open` creates the folders."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.run_id, self.peer_id = path.parent.name, path.name
        self.manifest, self.checkpoints = path / MANIFEST, path / CHECKPOINTS_FOLDER
        self.log, self.download = path / "log", path / "download"
        self.signed_heads = path / "signed_heads"
        """The heads that the run's archives have signed, as far as this peer knows them."""
        self.held_out = path / CURVE
        """The held-out losses that this peer knows (see `HeldOutCurve`)."""

    @classmethod
    def at(cls, run_id: str, peer_id: str, base: Path | None = None) -> RunFolder:
        """Return the RunFolder at `base`/<run id>/<peer id>, which need not exist."""
        return cls(((default_state_folder() if base is None else base) / run_id / peer_id).absolute())

    @classmethod
    def open(cls, run: Run, peer_id: str, base: Path | None = None) -> RunFolder:
        """Create and return the folder of a peer's data, and write the run's manifest into it. Raises: MachineError."""
        folder = cls.at(run.run_id, peer_id, base)
        try:
            for path in (folder.path, folder.checkpoints, folder.log, folder.download):
                make_private_folder(path)
            write_whole(folder.manifest, [run.manifest.pack()])
        except OSError as error:
            raise MachineError(
                f"the run's folder {folder.path} cannot be used: {error.strerror}.",
                "Name a folder on a disk with space with --state.",
            ) from error
        return folder

    def remove(self) -> None:
        """Remove the peer's folder with its content, and the run's folder if it is then empty. Ignore errors."""
        shutil.rmtree(self.path, ignore_errors=True)
        with suppress(OSError):  # fails if the run's folder contains another peer's folder
            self.path.parent.rmdir()

    def remembered_manifest(self) -> SignedManifest | None:
        """Return the run's manifest from an earlier session; None if the file is missing, unreadable or invalid."""
        try:
            return SignedManifest.unpack(self.manifest.read_bytes(), self.run_id)
        except FileNotFoundError:
            return None
        except (OSError, ManifestError) as error:
            logger.warning("the stored manifest %s is ignored: %s", self.manifest, error)
            return None

    def remembered_peers(self) -> RememberedPeers:
        """Return the peers' addresses that an earlier session stored; empty if there was no earlier session."""
        return RememberedPeers(self.path / FILE_NAME, self.run_id)


def remembered_addresses(run_id: str, base: Path | None = None) -> tuple[str, ...]:
    """Return addresses of a run's peers that volunteers on this machine have stored, `CONTACT_LIMIT` at most. Those
    that were stored last come first."""
    folder = (default_state_folder() if base is None else base) / run_id
    paths = sorted(folder.glob(f"*/{FILE_NAME}"), key=os.path.getmtime, reverse=True)
    found = [RememberedPeers(path, run_id).addresses() for path in paths]
    return tuple(dict.fromkeys(address for addresses in found for address in addresses))[:CONTACT_LIMIT]


def kept_losses(run_id: str, base: Path | None = None) -> dict[int, float]:
    """Return, by outer step, the held-out losses that volunteers on this machine have stored for a run."""
    folder = (default_state_folder() if base is None else base) / run_id
    return {step: loss for path in sorted(folder.glob(f"*/{CURVE}")) for step, loss in read_curve(path).items()}


def kept_folder(run_id: str) -> Path | None:
    """Return the peer's folder on this machine with the newest checkpoint of a run, or None without a checkpoint."""
    files = default_state_folder().glob(f"{run_id}/*/{CHECKPOINTS_FOLDER}/*")
    newest = {index: path.parents[1] for path in files if (index := index_of(path.name)) is not None}
    return newest[max(newest)] if newest else None


def read_manifest(path: Path) -> Run:
    """Return the run that a manifest's file defines. Raises: ManifestError if the file is unreadable or invalid."""
    try:
        packed = path.read_bytes()
    except OSError as error:
        reason = error.strerror or str(error)
        raise ManifestError(f"{path}: cannot be read ({reason}).", "Give a manifest that exists.") from error
    try:
        manifest = SignedManifest.unpack(packed)
    except ManifestError as error:
        again = "The organiser's `run create` with the same run.toml and key writes the file again."
        remedy = again if error.remedy == ASK_AGAIN else error.remedy
        raise ManifestError(f"{path}: {error.message}", remedy) from error
    return Run.from_manifest(manifest)


# Held-out losses ------------------------------------------------------------------------------------------------------
MOST_BYTES = 1 << 24  # most bytes of a loss file that are read; a loss takes about 40 bytes
MOST_LOSSES = 100_000
"""Most losses of a curve. A run may name any number of outer steps, and peers may claim a loss for each."""


class HeldOutCurve:
    """The held-out losses of a run by outer step. `add` also appends each new loss to the file `path`, if given, until
    a write fails."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self.losses: dict[int, float] = {} if path is None else read_curve(path)

    def add(self, outer_step: int, loss: float) -> bool:
        """Add a loss and return True. Return False if the loss is not finite, its outer step already has a loss, or the
        curve is full."""
        if outer_step in self.losses or not math.isfinite(loss) or len(self.losses) >= MOST_LOSSES:
            return False
        self.losses[outer_step] = loss
        if self._path is not None:
            try:
                with self._path.open("a", encoding="utf-8") as lines:
                    lines.write(json.dumps({"outer_step": outer_step, "loss": loss}) + "\n")
            except OSError as error:
                logger.warning("writing held-out losses to %s has stopped: %s", self._path, error.strerror or error)
                self._path = None
        return True


def read_curve(path: Path) -> dict[int, float]:
    """Return the held-out losses in a file, by outer step, or no losses if the file cannot be read. Skip invalid lines,
    such as a line that a killed peer wrote in part."""
    losses = dict[int, float]()
    try:
        with path.open("rb") as file:
            lines = file.read(MOST_BYTES).splitlines()
    except OSError:
        return losses
    for line in lines:
        try:
            values = json.loads(line)
            outer_step, loss = values["outer_step"], float(values["loss"])
        except (ValueError, TypeError, KeyError):
            continue
        if type(outer_step) is int and outer_step >= 0 and math.isfinite(loss) and len(losses) < MOST_LOSSES:
            losses.setdefault(outer_step, loss)
    return losses


# The journal ----------------------------------------------------------------------------------------------------------
# The entries that a peer has applied, to compare with other peers or with training/reference.py. A line has the entry's
# index, its header (canonical bytes, in hexadecimal) and the state digest after it.
@dataclass(frozen=True)
class Journal:
    """An append-only file of the entries that a peer has applied, with the state's digest after each entry."""

    path: Path

    def __post_init__(self) -> None:
        """Create the journal's file at once, so that a wrong path fails when the peer starts. Raises: MachineError."""
        self._write("")

    def append(self, header: Header, state_digest: bytes) -> None:
        """Append an entry, and the state digest after the entry. Raises: MachineError if the file cannot be written."""
        line = {"index": header.index, "header": pack(header).hex(), "state_digest": state_digest.hex()}
        self._write(json.dumps(line) + "\n")

    def _write(self, text: str) -> None:
        try:
            with self.path.open("a") as file:
                file.write(text)
        except OSError as error:
            raise MachineError(
                f"the journal {self.path} cannot be written: {error.strerror}.",
                "Name a file on a disk with space, or remove --journal.",
            ) from error

    def __iter__(self) -> Iterator[tuple[Header, bytes]]:
        """Yield the applied entries' headers, with the state digest after each entry, in the order of application."""
        for text in self.path.read_text().splitlines():
            line = json.loads(text)
            yield unpack(Header, bytes.fromhex(line["header"])), bytes.fromhex(line["state_digest"])
