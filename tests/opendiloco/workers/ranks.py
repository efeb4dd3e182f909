"""Two workers that share a model, each a process of its own that runs a test's script.

To import torch and transformers takes seconds of a process. One process does that for many tests, and forks whenever
one wants two workers: it has no threads.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, Self

BEGIN = """
import json, os, sys, torch, torch.distributed as distributed
from datetime import timedelta
from pathlib import Path

rank, folder = int(sys.argv[1]), Path(sys.argv[2])
store = distributed.FileStore(str(folder / "store"), 2)
distributed.init_process_group("gloo", timeout=timedelta(seconds=120), rank=rank, world_size=2, store=store)
mesh = distributed.init_device_mesh("cpu", (2,))

def end(said):
    print(json.dumps(said), flush=True)
    os._exit(0)  # as workers end: an interpreter that ends while gloo's threads live may abort
"""
IMPORTED = ("opendiloco.workers.assembly", "opendiloco.training.inner", "transformers.models.llama.modeling_llama")
SERVE = "from tests.opendiloco.workers.ranks import serve; serve()"


class Ranks:
    """A context manager: within, two workers run one script after another."""

    def __enter__(self) -> Self:
        self._server = subprocess.Popen(
            [sys.executable, "-c", SERVE],
            env=os.environ
            | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._server:  # waits for it, and closes its pipes
            os.killpg(self._server.pid, signal.SIGKILL)

    def run(self, folder: Path, script: str) -> list[Any]:
        """Return what each has told `end`. A script knows its `rank`, the `folder` and a `mesh` of both."""
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        print(json.dumps([str(folder), BEGIN + script]), file=self._server.stdin, flush=True)
        assert json.loads(self._server.stdout.readline()) == [0, 0], "\n".join(
            (folder / f"{rank}.err").read_text() for rank in range(2)
        )
        return [json.loads((folder / f"{rank}.out").read_text()) for rank in range(2)]


def serve() -> None:
    """Run two workers for each line that comes, and answer with the exit codes."""
    for name in IMPORTED:
        importlib.import_module(name)
    for line in sys.stdin:
        folder, script = json.loads(line)
        workers = [_fork(Path(folder), script, rank) for rank in range(2)]
        codes = [os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1]) for worker in workers]
        print(json.dumps(codes), flush=True)


def _fork(folder: Path, script: str, rank: int) -> int:
    worker = os.fork()
    if worker:
        return worker
    try:
        for name, descriptor in (("out", 1), ("err", 2)):
            os.dup2(os.open(folder / f"{rank}.{name}", os.O_WRONLY | os.O_CREAT, 0o600), descriptor)
        sys.argv[1:] = [str(rank), str(folder)]
        exec(script, {"__name__": "__main__"})
    except BaseException:
        sys.excepthook(*sys.exc_info())
    os._exit(1)
