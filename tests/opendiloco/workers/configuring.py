"""The command with which tests start a worker that is alone, on the CPU."""

from __future__ import annotations

from typing import Any

from opendiloco.config.run_config import RunConfig
from opendiloco.workers.control import Configure
from opendiloco.workers.options import WorkerOptions


def configure(config: RunConfig, memory: int, fresh: bool = True, **options: Any) -> Configure:
    """`memory` is the descriptor of the shared memory; `options` are those of `WorkerOptions`."""
    return Configure(
        manifest_content=config.to_manifest_content(),
        options=WorkerOptions(device="cpu", **options),
        device="cpu",
        rank=0,
        workers=1,
        memory=memory,
        port=0,
        fresh=fresh,
    )
