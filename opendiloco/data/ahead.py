"""The process that tokenizes the next shard while the workers train on the present one: `python -m
opendiloco.data.ahead`.

A machine runs one at a time, at the lowest priority. The first worker starts it, and all workers find its result in the
token cache. It ends when its job is done, or at once when the worker that started it has ended.
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


class Ahead:
    """Tokenizes shards ahead in a process of its own: one at a time, each once, and only shards that the cache keeps on
    disk.

    A failure there costs only time: the worker that needs the shard tokenizes it itself, and reports the error.
    """

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._process: subprocess.Popen[bytes] | None = None
        self._begun: tuple[int, int] | None = None

    def tokenize(self, source: int, shard: int) -> None:
        """Start to tokenize a shard, unless another one is under way. Workers call this repeatedly. Returns at once."""
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
            self._process.stdin.flush()  # not closed: the process ends when its standard input closes
        except OSError:  # the process could not start, or ended at once
            self.close()

    def close(self) -> None:
        """Kill the process and wait for its end."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


def main() -> None:
    """Run the job on the standard input, a line of JSON."""
    content, source, shard = json.loads(sys.stdin.buffer.readline())
    threading.Thread(target=_end_with_standard_input, daemon=True).start()
    os.nice(NICENESS)
    _prepare_shard(RunConfig.from_manifest_content(content), source, shard)


def _prepare_shard(config: RunConfig, source: int, shard: int) -> None:
    """Tokenize a shard into the cache, unless it is there. Raises: DataError, MachineError."""
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
