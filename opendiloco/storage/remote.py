"""A remote folder at any URL that fsspec supports: s3://, gs://, hf://, sftp://, or a path on this machine.

Each kind of storage raises exceptions of its own, so any exception here becomes RemoteError.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from opendiloco.errors import RemoteError, first_line
from opendiloco.storage.files import file_name, indices_in, kept
from peers.values.system import PARTIAL, make_private_folder

PIECE = 1 << 20  # most bytes sent between two waits for the rate limit


class RateLimit:
    """A limit on a transfer's rate in bytes a second: makes a transfer that is too fast wait after each piece."""

    def __init__(self, rate: float | None, wait: Callable[[float], None] = time.sleep) -> None:
        """Limit the transfer that begins now to `rate` bytes a second (None: no limit). `wait` sleeps for a number of
        seconds."""
        self._rate = rate
        self._wait = wait
        self._began = time.monotonic()

    def piece(self, limit: int) -> int:
        """Return how many bytes to transfer before the next wait: `limit`, or fewer if that takes over 0.1 seconds."""
        return limit if self._rate is None else max(1, min(limit, int(self._rate / 10)))

    def passed(self, done: int) -> None:
        """Wait until the limit allows that `done` bytes have been transferred since the transfer began."""
        if self._rate is not None:
            self._wait(max(0.0, self._began + done / self._rate - time.monotonic()))

    def read(self, file: BinaryIO, limit: int) -> Iterator[bytes]:
        """Yield the rest of a file in pieces of at most `limit` bytes, waiting after each to keep to the rate."""
        done = 0
        while piece := file.read(self.piece(limit)):
            yield piece
            done += len(piece)
            self.passed(done)


def check_url(url: str) -> None:
    """Check, without connecting, that fsspec and its package for this URL are installed, and that for hf:// a token is
    here. Raises: RemoteError if not."""
    import fsspec

    with _as_remote_error(url):
        protocol = fsspec.utils.get_protocol(url)
        fsspec.get_filesystem_class(protocol)
        if protocol == "hf":
            from huggingface_hub import get_token

            if not (get_token() or fsspec.config.conf.get("hf", {}).get("token")):
                raise RemoteError(
                    f"{without_secrets(url)} cannot be written to: this machine has no token of the Hugging Face hub.",
                    "Log in with `hf auth login`, or set HF_TOKEN to a token that may write there.",
                )


class Remote:
    """A remote folder at a URL. If the folder does not exist, it is created."""

    def __init__(self, url: str) -> None:
        import fsspec

        self._url = url
        check_url(url)
        with _as_remote_error(self._url):
            self._files, root = fsspec.core.url_to_fs(url)
            self._root = root.rstrip("/")
            self._make_folder(self._root)

    def names(self) -> list[str]:
        """Return the names of the files in the remote folder. Raises: RemoteError."""
        with _as_remote_error(self._url):
            self._files.invalidate_cache()
            try:
                found = self._files.ls(self._root, detail=False)
            except FileNotFoundError:  # in object storage an empty folder does not exist
                return []
        return [str(path).rstrip("/").rpartition("/")[2] for path in found]

    def send(self, path: Path, name: str) -> None:
        """Copy the local file `path` into the remote folder under `name`, without a rate limit. Raises: RemoteError."""
        with _as_remote_error(self._url):
            self._make_folder(self._path(name).rpartition("/")[0])
            self._files.put_file(str(path), self._path(name))

    def send_whole(self, path: Path, name: str, owner: str, rate: float | None = None) -> None:
        """Copy the local file `path` into the remote folder at `rate` bytes a second, and name the copy `name` when it
        is complete. Remove partial copies of earlier senders with the same `owner`. Raises: RemoteError."""
        suffix = f".{owner}{PARTIAL}"
        for left in self.names():
            if left.endswith(suffix):
                self.remove(left)
        partial = self._path(name + suffix)
        with _as_remote_error(self._url):
            try:
                with path.open("rb") as source, self._files.open(partial, "wb") as file:
                    for piece in RateLimit(rate).read(source, PIECE):
                        file.write(piece)
                self._files.mv(partial, self._path(name))
            except BaseException:
                with suppress(Exception):
                    self._files.rm_file(partial)
                raise

    def prune(self, keep_newest: int, keep_every: int, last: int) -> None:
        """Remove the remote checkpoints that `kept` does not return. Keep the checkpoint of outer step `last`, which
        was just sent, even if peers that are ahead have sent later ones. Raises: RemoteError."""
        indices = indices_in(self.names())
        for index in set(indices) - kept(indices, keep_newest, keep_every) - {last}:
            self.remove(file_name(index))

    def remove(self, name: str) -> None:
        """Remove a file from the remote folder if the file exists. Raises: RemoteError."""
        with _as_remote_error(self._url), suppress(FileNotFoundError):
            self._files.rm_file(self._path(name))

    def _make_folder(self, path: str) -> None:
        from fsspec.implementations.local import LocalFileSystem

        if isinstance(self._files, LocalFileSystem):
            make_private_folder(Path(path))
        else:
            self._files.makedirs(path, exist_ok=True)

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"


def push_folder(folder: Path, url: str) -> None:
    """Copy a local folder to a URL. README.md is copied last, so that a new README.md shows that the copy is complete.
    Raises: RemoteError."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    remote = Remote(url)
    for path in sorted(paths, key=lambda path: (path.name == "README.md", path.stat().st_size)):
        remote.send(path, path.relative_to(folder).as_posix())


def without_secrets(url: str) -> str:
    """Return the URL without its password, for display."""
    return re.sub(r"(//[^/@:]*):[^/@]*@", r"\1@", url)


@contextmanager
def _as_remote_error(url: str) -> Iterator[None]:
    try:
        yield
    except RemoteError:
        raise
    except Exception as error:
        raise RemoteError(
            f"{without_secrets(url)} cannot be used: {first_line(error)}",
            "Check the URL, the credentials, and that fsspec's package for it is installed (s3fs, gcsfs, paramiko).",
        ) from error
