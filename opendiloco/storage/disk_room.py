"""The disk that a node gives the runs that it keeps: a stranger decides how large a run is."""

from __future__ import annotations

import asyncio
import shutil
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from opendiloco.errors import MachineError
from opendiloco.quantities import in_words
from opendiloco.storage.writer import folder_bytes

DISK_SHARE = 0.9
"""Of what is free, or taken by the runs already, that they may take unless their owner says how much."""
RUN_SHARE = 4
"""One run may take one such part of all."""


class NoRoomError(MachineError):
    """The disk's owner gives no room for what is to be fetched of a run."""


class DiskRoom:
    """What the runs in a folder may take, each in a folder of its own that has its id as a name, and what they take."""

    def __init__(self, folder: Path, limit: int | None = None) -> None:
        """`limit` is in bytes; None: a share of the disk that leaves the rest free, whoever fills it."""
        self._folder = folder
        self._limit = limit
        self._taken: dict[str, int] = {}
        self._held: defaultdict[str, int] = defaultdict(int)  # for what is being fetched

    def measure(self) -> None:
        """Look at all that is in the folder, also of runs that are kept no more."""
        if self._folder.is_dir():
            self._taken = {path.name: folder_bytes(path) for path in self._folder.iterdir()}

    @asynccontextmanager
    async def held(self, run: str, needed: int) -> AsyncIterator[None]:
        """Hold so many bytes for a run while they are fetched. Raises: NoRoomError; nothing is held then."""
        here = await asyncio.to_thread(folder_bytes, self._folder / run)
        self._taken[run] = here
        taken, held, limit = sum(self._taken.values()), sum(self._held.values()), self._limit
        if limit is None:
            limit = int(DISK_SHARE * (taken + shutil.disk_usage(self._folder).free))
        if here + needed > limit // RUN_SHARE or taken + held + needed > limit:
            raise NoRoomError(
                f"to keep more of it takes {in_words(needed)} of disk. It has {in_words(here)}, and may have "
                f"{in_words(limit // RUN_SHARE)}; all runs have {in_words(taken + held)} of {in_words(limit)}.",
                "Nothing more of it is fetched until there is room; --max-disk gives more.",
            )
        self._held[run] += needed
        try:
            yield
        finally:
            try:
                self._taken[run] = await asyncio.to_thread(folder_bytes, self._folder / run)
            finally:
                self._held[run] -= needed

    def forget(self, run: str) -> None:
        """Count a run no more, whose folder is gone."""
        self._taken.pop(run, None)
        self._held.pop(run, None)
