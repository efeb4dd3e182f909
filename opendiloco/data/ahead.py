"""The process that tokenizes a source's next shard in advance, while workers train: `python -m opendiloco.data.ahead`.

A machine runs one such process at a time, at the lowest priority. The first worker starts the process, and all workers
find the result in the token cache. The process ends after its job, or at once when the worker that started it ends.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading

from opendiloco.child_processes import NICENESS, child_environment, module_command
from opendiloco.config.run_config import RunConfig
from opendiloco.data.token_files import FEW_TOKENS


class AheadTokenizer:
    """A starter of processes that tokenize shards in advance: one process at a time, and only for shards so large that
    the token cache stores them on disk.

    A failure of a process costs only time: the worker that needs the shard tokenizes it itself, and reports the error.
    """

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._process: subprocess.Popen[bytes] | None = None
        self._begun: tuple[int, int] | None = None

    def tokenize(self, source: int, shard: int) -> None:
        """Start a process that tokenizes a shard into the token cache, and return at once. Do nothing while an
        earlier process runs, if the shard is small, or if the last process was for this shard. `source` is the
        source's index."""
        windows = self._config.data.all_sources[source].windows_per_shard or 0
        lies_on_disk = windows * self._config.training.sequence_length > FEW_TOKENS
        is_busy = self._process is not None and self._process.poll() is None
        if self._begun == (source, shard) or is_busy or not lies_on_disk:
            return
        self._begun = (source, shard)
        job = json.dumps([self._config.to_manifest_content(), source, shard]).encode() + b"\n"
        try:
            self._process = subprocess.Popen(
                module_command("opendiloco.data.ahead"),
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=child_environment(),
            )
            assert self._process.stdin is not None
            self._process.stdin.write(job)
            self._process.stdin.flush()  # `stdin` stays open, because the process exits when `stdin` closes
        except OSError:  # the process could not start, or exited before it read the job
            self.close()

    def close(self) -> None:
        """Kill the tokenizing process, if there is one, and wait until it has exited."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


def main() -> None:
    """Read a job from standard input, and tokenize its shard into the token cache. The job is a line of JSON with the
    manifest, a source's index and a shard's number."""
    content, source, shard = json.loads(sys.stdin.buffer.readline())
    threading.Thread(target=_end_with_standard_input, daemon=True).start()
    os.nice(NICENESS)
    _prepare_shard(RunConfig.from_manifest_content(content), source, shard)


def _prepare_shard(config: RunConfig, source: int, shard: int) -> None:
    """Tokenize a shard of the source with index `source` into the token cache, unless the cache already has the shard.
    Raises: DataError, MachineError."""
    from opendiloco.data.token_files import TokenCache
    from opendiloco.data.tokenizer import build_tokenizer
    from opendiloco.data.training_data import shards_of

    section, tokenizer = config.data.all_sources[source], build_tokenizer(config.tokenizer)
    shards_of(section, config, tokenizer, TokenCache(few=0)).shard(shard)


def _end_with_standard_input() -> None:
    sys.stdin.buffer.read()
    os._exit(1)


if __name__ == "__main__":
    main()
