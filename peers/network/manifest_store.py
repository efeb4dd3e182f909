"""The manifests that a bootstrap node stores, and the choice of manifests to delete when a limit is reached.

Identities cost nothing and addresses do, so the number of runs that one network may announce is limited. A run that had
a peer lately is never forgotten for a new one.
"""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from peers import metrics
from peers.errors import FolderError, remedy_for
from peers.network.channel import RefusalError
from peers.values.manifest import SignedManifest
from peers.values.system import make_private_folder, write_whole
from peers.values.wire import printable

logger = logging.getLogger(__name__)

MANIFEST_LIMIT = 1000  # runs whose manifests one node stores, at most: 64 MB in all
SHARE_LIMIT = 250  # stored runs of one organiser's key, at most; also stored runs announced from one network, at most
QUIET_LIMIT = 24 * 3600.0  # seconds without a peer after which a run's manifest may be deleted for another run
SUFFIX = ".manifest"
REVOKED_SUFFIX = ".revocations"
SIGNED_SUFFIX = ".signed"
ORIGIN_SUFFIX = ".origin"
IS_USED = "used"


@dataclass
class _Origin:
    """The network from which a run was announced, and whether the run has had a peer since."""

    network: str
    is_used: bool = False


class ManifestStore:
    """The manifests in a directory, one file per run. `check` raises ManifestError for a manifest to be rejected."""

    def __init__(self, directory: Path, check: Callable[[SignedManifest], object] = lambda manifest: None) -> None:
        """Create the directory if it is missing, and read from which network each of its runs was announced.

        Raises: FolderError if that fails.
        """
        self._directory = directory
        self._check = check
        self._read = dict[str, SignedManifest | None]()  # manifests read so far, by run id; None: the file is invalid
        # By run id: the network from which the run was announced, and if the run has had a peer since. Runs whose files
        # the operator added are missing here.
        self._origins = dict[str, _Origin]()
        try:
            make_private_folder(directory)
            for path in directory.glob(f"*{ORIGIN_SUFFIX}"):
                run_id = path.name.removesuffix(ORIGIN_SUFFIX)
                network, _, used = self.kept(ORIGIN_SUFFIX, run_id).decode(errors="replace").partition(" ")
                self._origins[run_id] = _Origin(network, used == IS_USED)
        except OSError as error:
            raise self._unusable(error) from error

    def __iter__(self) -> Iterator[SignedManifest]:
        """Yield each valid manifest whose run id is its file's name; skip other files with a warning.

        Each file is read once, since a run's id fixes its manifest, and checking a thousand signatures takes long.
        """
        there = self._all()
        self._read = {run_id: manifest for run_id, manifest in self._read.items() if run_id in there}
        yield from filter(None, map(self._manifest, sorted(there)))

    def _manifest(self, run_id: str) -> SignedManifest | None:
        """Return the manifest in a run's file; None if the file is missing or invalid."""
        if run_id not in self._read:
            path = self._directory / f"{run_id}{SUFFIX}"
            try:
                manifest = SignedManifest.unpack(path.read_bytes(), run_id)
                self._check(manifest)
                self._read[run_id] = manifest
            except Exception as error:  # any error, so that one bad file does not affect the others
                logger.warning("skipped the manifest %s: %s", path, printable(str(error)))
                if not isinstance(error, OSError):  # after an OSError, the file is read again next time
                    self._read[run_id] = None
        return self._read.get(run_id)

    def run_ids(self) -> list[str]:
        """Return the ids of all stored runs, sorted by the time of their last announcement or use, the latest first."""
        used_at = self._all()
        return sorted(used_at, key=lambda run_id: (used_at[run_id], run_id), reverse=True)

    def _all(self) -> dict[str, float]:
        """Return the time of each stored run's last announcement or use, in seconds since the epoch, by run id."""
        return {path.name.removesuffix(SUFFIX): path.stat().st_mtime for path in self._directory.glob(f"*{SUFFIX}")}

    def knows(self, run_id: str) -> bool:
        """Return True if a valid manifest of the run is stored."""
        return (self._directory / f"{run_id}{SUFFIX}").exists() and self._manifest(run_id) is not None

    def add(self, manifest: SignedManifest, network: str) -> list[str]:
        """Store a manifest in a file, as a whole or not at all. Return the ids of runs that were deleted to make room.

        `network` is the one from which it was announced. For a known run nothing changes.
        Raises: ManifestError when the check fails; RefusalError when there is no room; FolderError.
        """
        if self.knows(manifest.run_id):
            return []
        self._check(manifest)
        path = self._directory / f"{manifest.run_id}{SUFFIX}"
        try:
            forgotten = [] if path.exists() else self._make_room(manifest.organiser, network)
            self._keep_origin(manifest.run_id, _Origin(network))
            write_whole(path, [manifest.pack()], is_durable=True)
        except OSError as error:
            raise self._unusable(error) from error
        self._read.pop(manifest.run_id, None)  # forgets an invalid file that was read before
        return forgotten

    def _keep_origin(self, run_id: str, origin: _Origin) -> None:
        self._origins[run_id] = origin
        text = f"{origin.network} {IS_USED if origin.is_used else ''}"
        write_whole(self._directory / f"{run_id}{ORIGIN_SUFFIX}", [text.encode()])

    def keep(self, suffix: str, run_id: str, packed: bytes) -> None:
        """Write a run's revoked tickets (REVOKED_SUFFIX) or signed heads (SIGNED_SUFFIX) to a file in the directory.

        A failure of the disk is logged.
        """
        try:
            write_whole(self._directory / f"{run_id}{suffix}", [packed], is_durable=True)
        except OSError as error:
            logger.error("%s", self._unusable(error))

    def kept(self, suffix: str, run_id: str) -> bytes:
        """Return the bytes of a run's file with this suffix; empty if the file cannot be read."""
        try:
            return (self._directory / f"{run_id}{suffix}").read_bytes()
        except OSError:
            return b""

    def touch(self, run_id: str) -> None:
        """Record that the run has a peer now, so that its manifest is not deleted for QUIET_LIMIT seconds."""
        with suppress(OSError):
            os.utime(self._directory / f"{run_id}{SUFFIX}")
            origin = self._origins.get(run_id)
            if origin is not None and not origin.is_used:
                self._keep_origin(run_id, _Origin(origin.network, is_used=True))

    def _make_room(self, organiser: str, network: str) -> list[str]:
        """Delete runs until the limits allow one more of this organiser and network. Return the deleted runs' ids.

        Raises: RefusalError, and deletes no run, when too few runs may be deleted; OSError.
        """
        used_at = self._all()
        forgotten = list[str]()
        for limit, kind, runs in (
            (SHARE_LIMIT, " of this organiser", self._runs_of(organiser, used_at)),
            (SHARE_LIMIT, " announced from your network", [one for one in used_at if self._network_of(one) == network]),
            (MANIFEST_LIMIT, "", list(used_at)),
        ):
            remaining = [run_id for run_id in runs if run_id in used_at]
            while len(remaining) >= limit:
                run_id = self._least_needed(remaining, used_at)
                if run_id is None:
                    raise RefusalError(f"this node remembers {limit} runs{kind}, all in use; ask again tomorrow")
                remaining.remove(run_id)
                del used_at[run_id]
                forgotten.append(run_id)
        for run_id in forgotten:
            self._forget(run_id)
        return forgotten

    def _runs_of(self, organiser: str, run_ids: Iterable[str]) -> list[str]:
        """Return the ids of the announced runs among `run_ids` whose manifest this organiser has signed."""
        manifests = ((run_id, self._manifest(run_id)) for run_id in run_ids if run_id in self._origins)
        return [run_id for run_id, manifest in manifests if manifest is not None and manifest.organiser == organiser]

    def _network_of(self, run_id: str) -> str | None:
        return self._origins[run_id].network if run_id in self._origins else None

    def _least_needed(self, run_ids: Collection[str], used_at: Mapping[str, float]) -> str | None:
        """Return the id of the run to delete first; None if all had a peer within QUIET_LIMIT seconds.

        It is the oldest run that never had a peer, from the network that has announced most of those; without any, the
        run without a peer for longest.
        """
        unused = [run_id for run_id in run_ids if run_id in self._origins and not self._origins[run_id].is_used]
        if unused:
            count = Counter(map(self._network_of, unused))
            return min(unused, key=lambda run_id: (-count[self._network_of(run_id)], used_at[run_id]))
        oldest = min(run_ids, key=lambda run_id: used_at[run_id])
        return oldest if time.time() - used_at[oldest] >= QUIET_LIMIT else None

    def _forget(self, run_id: str) -> None:
        for suffix in (SUFFIX, ORIGIN_SUFFIX, REVOKED_SUFFIX, SIGNED_SUFFIX):
            (self._directory / f"{run_id}{suffix}").unlink(missing_ok=True)
        self._origins.pop(run_id, None)
        for gauge in (metrics.RUN_LIVE_PEERS, metrics.ARCHIVED_OUTER_STEP, metrics.ARCHIVED_STEPS_LEFT):
            with suppress(KeyError):
                gauge.remove(run_id)
        logger.info("forgot the run %s: no peer uses it", run_id)

    def _unusable(self, error: OSError) -> FolderError:
        return FolderError(
            f"cannot keep manifests in {self._directory}: {error.strerror or error}.",
            remedy_for(error, "Name a folder that you may write to with --directory."),
        )
