"""A simulated peer's disk: named files that outlive its process, unless the story takes them away."""

from __future__ import annotations


class SimulatedDisk:
    """Files by name. A write is on the disk at once and whole, as after fsync and rename."""

    def __init__(self) -> None:
        self._files: dict[str, bytes] = {}

    def write(self, name: str, data: bytes) -> None:
        """Put a file in place of the one before."""
        self._files[name] = data

    def read(self, name: str) -> bytes | None:
        """Return what a file has; None: there is no such file."""
        return self._files.get(name)

    def remove(self, name: str) -> None:
        """Drop a file, if it is there."""
        self._files.pop(name, None)

    # What a story does to it ----------------------------------------------------------------------------------
    def image(self) -> dict[str, bytes]:
        """Return a copy of all files, as a snapshot of a virtual machine has them."""
        return dict(self._files)

    def set_back(self, image: dict[str, bytes]) -> None:
        """Have the files of an earlier image again, and no others."""
        self._files = dict(image)

    def lose(self) -> None:
        """Lose all files."""
        self._files.clear()
