"""A researcher's own training loop that joins a run as a peer, beside volunteers who run `diloco-peer join`.

    python examples/own_loop.py run.toml diloco:tiny-qz3h…4a@/ip4/… [--data FOLDER]

It prints a line at its start, and the loss of each outer step's last inner step, until the run is over.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from opendiloco import DiLoCo
from opendiloco.config.run_config import RunConfig


def train(config: RunConfig, invite: str, data: list[Path]) -> None:
    print("joining the run, and training up to its next outer step", flush=True)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**(config.model.config or {})))
    inner_optimizer = torch.optim.AdamW(model.parameters(), lr=config.inner_optimizer.learning_rate)
    with DiLoCo(model, inner_optimizer, run=invite, data=data) as diloco:
        outer_step = diloco.outer_step
        for windows in diloco.batches():
            logits = model(input_ids=windows[:, :-1]).logits
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
            loss.backward()
            diloco.report(loss)
            inner_optimizer.step()  # the last of an outer step's calls waits for the other peers, and loads theta
            inner_optimizer.zero_grad()
            if diloco.outer_step != outer_step:
                outer_step = diloco.outer_step
                print(f"outer step {outer_step}: loss {loss.item():.3f}", flush=True)
    print(f"the sum of all final weights is {sum(value.double().sum() for value in model.parameters()):.12f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="the run.toml from which the run was created")
    parser.add_argument("invite", help="the invite that `diloco-peer run create` printed")
    parser.add_argument("--data", type=Path, action="append", default=[], help="a folder, if the run reads a local one")
    options = parser.parse_args()
    try:
        train(RunConfig.from_toml(options.run), options.invite, options.data)
    except KeyboardInterrupt:
        sys.exit(130)  # torch's exit handlers can make Python lose the exit code of an interrupt


if __name__ == "__main__":
    main()
