"""A comparison of one machine that trains alone with three that train together, each for the same number of inner
steps.

    python examples/alone_or_together.py opendiloco/demo.toml --outer-steps 40

It runs DiLoCo's reference in one process, without a network. Held-out losses are in nats per token.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from opendiloco.config.run_config import RunConfig
from opendiloco.training.reference import Reference, Work
from peers.values.leases import SamplePool

REPORTS = 4


def train(config: RunConfig, replicas: int, outer_steps: int) -> None:
    """Train `replicas` replicas for `outer_steps` outer steps, and print theta's held-out loss about `REPORTS`
    times."""
    reference, pool = Reference(config), SamplePool()
    steps = config.training.inner_steps
    for outer_step in range(1, outer_steps + 1):
        leases, pool = pool.deal([steps * config.training.batch_size] * replicas)
        roster = [Work(f"replica {number}", lease, steps) for number, lease in enumerate(leases)]
        reference.outer_step(roster)
        if outer_step % max(1, outer_steps // REPORTS) == 0:
            loss = reference.held_out_loss()
            print(f"replicas {replicas}   outer steps {outer_step:4}   held-out loss {loss:.3f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="a run.toml")
    parser.add_argument("--outer-steps", type=int, default=40)
    parser.add_argument("--replicas", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    config = RunConfig.from_toml(options.run)
    for replicas in (1, options.replicas):
        train(config, replicas, options.outer_steps)


if __name__ == "__main__":
    main()
