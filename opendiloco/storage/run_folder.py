"""Where a machine keeps what it knows of a run: one folder for each run and peer."""

from __future__ import annotations

import logging
import os
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from opendiloco.errors import MachineError
from opendiloco.run import Run
from peers.errors import ManifestError
from peers.network.first_contact import CONTACT_LIMIT, FILE_NAME, RememberedPeers
from peers.values.manifest import SignedManifest
from peers.values.system import make_private_folder, write_whole

logger = logging.getLogger(__name__)

MANIFEST, SIGNED_HEADS, HELD_OUT = "run.manifest", "signed_heads", "held_out.jsonl"


def default_state_folder() -> Path:
    """`~/.local/state/diloco-peer`, or where XDG_STATE_HOME says."""
    base = os.environ.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local" / "state") / "diloco-peer"


@dataclass(frozen=True)
class RunFolder:
    """Made by `open`. Two peers on one machine share nothing."""

    path: Path

    @classmethod
    def at(cls, run_id: str, peer_id: str, base: Path | None = None) -> RunFolder:
        """`base`/<run id>/<peer id>, whether it is there or not."""
        return cls(((default_state_folder() if base is None else base) / run_id / peer_id).absolute())

    @classmethod
    def open(cls, run: Run, peer_id: str, base: Path | None = None) -> RunFolder:
        """`base`/<run id>/<peer id>, made if need be, with the run's manifest in it.

        Raises: MachineError when it cannot be made or written to.
        """
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

    @property
    def run_id(self) -> str:
        return self.path.parent.name

    @property
    def peer_id(self) -> str:
        return self.path.name

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def log(self) -> Path:
        return self.path / "log"

    @property
    def download(self) -> Path:
        return self.path / "download"

    @property
    def manifest(self) -> Path:
        return self.path / MANIFEST

    @property
    def signed_heads(self) -> Path:
        """What the run's archives have signed, as far as this peer has heard."""
        return self.path / SIGNED_HEADS

    @property
    def held_out(self) -> Path:
        """The losses on held-out text that this peer has heard of (see `HeldOutCurve`)."""
        return self.path / HELD_OUT

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


def read_manifest(path: Path) -> Run:
    """The run of a signed manifest's file. Raises: ManifestError."""
    try:
        packed = path.read_bytes()
    except OSError as error:
        reason = error.strerror or str(error)
        raise ManifestError(f"{path}: cannot be read ({reason}).", "Give a manifest that exists.") from error
    return Run.from_manifest(SignedManifest.unpack(packed))
