"""A training with transformers' Trainer as a peer of a run. Needs `pip install -c constraints.txt '.[trainer]'`.

    python examples/trainer_callback.py run.toml diloco:tiny-qz3h…4a@/ip4/… --text FOLDER

Each effective batch has the run's size, so that it counts as much as a volunteer's. The caller chooses its content,
here text from a folder.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments

from opendiloco.config.run_config import RunConfig
from opendiloco.library import DiLoCoCallback


class Text(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """The text of a folder's .txt files as a data set: windows of `length` bytes, whose token ids are the bytes."""

    def __init__(self, folder: Path, length: int) -> None:
        text = b"".join(path.read_bytes() for path in sorted(folder.rglob("*.txt")))
        if len(text) < length:
            raise SystemExit(f"--text {folder}: its .txt files have {len(text)} bytes; one window needs {length}.")
        self._windows = torch.frombuffer(bytearray(text), dtype=torch.uint8).unfold(0, length, length)

    def __len__(self) -> int:
        return len(self._windows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        window = self._windows[index].long()
        return {"input_ids": window, "labels": window}


def train(config: RunConfig, invite: str, text: Path) -> None:
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**(config.model.config or {})))
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            per_device_train_batch_size=config.training.batch_size,
            num_train_epochs=1000,  # more than needed: training stops when the run is over
            learning_rate=config.inner_optimizer.learning_rate,
            lr_scheduler_type="constant",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            logging_steps=1,
        )
        dataset = Text(text, config.training.sequence_length)
        Trainer(model, arguments, train_dataset=dataset, callbacks=[DiLoCoCallback(invite)]).train()
    print(f"the sum of all final weights is {sum(value.double().sum() for value in model.parameters()):.12f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="the run.toml from which the run was created")
    parser.add_argument("invite", help="the invite that `diloco-peer run create` printed")
    parser.add_argument("--text", type=Path, required=True, help="a folder with .txt files")
    options = parser.parse_args()
    try:
        train(RunConfig.from_toml(options.run), options.invite, options.text)
    except KeyboardInterrupt:
        sys.exit(130)  # torch's exit handlers can make Python lose the exit code of an interrupt


if __name__ == "__main__":
    main()
