"""The finished model as a folder that `AutoModelForCausalLM.from_pretrained` loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from opendiloco.config.data import STANDARD_LIBRARY
from opendiloco.config.run_config import RunConfig
from opendiloco.data.tokenizer import Tokenizer
from opendiloco.errors import MachineError


class RunFacts(BaseModel):
    """What the model card says about the run that made the model. `peers`: how many took the last outer step."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    run_id: str
    manifest_digest: str
    outer_steps: int
    tokens: int
    peers: int
    held_out_loss: float


def export_model(model: Any, tokenizer: Tokenizer, folder: Path, config: RunConfig, facts: RunFacts) -> None:
    """Write weights (safetensors), config, generation config, tokenizer and model card into a new or empty folder.

    Raises: MachineError when the folder has something in it or cannot be written.
    """
    remedy = "Give a new folder on a disk with space, e.g. --out model-2/."
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise MachineError(f"{folder} is not empty.", remedy)
        model.save_pretrained(folder)
        tokenizer.pretrained().save_pretrained(folder)
        (folder / "README.md").write_text(model_card(config, facts), encoding="utf-8")
    except OSError as error:
        raise MachineError(f"{folder} cannot be written ({error.strerror or error}).", remedy) from error


def model_card(config: RunConfig, facts: RunFacts) -> str:
    """The README of an exported model: what it is, from which run, how good, and how to load it."""
    names = [section.source for section in config.data.all_sources]
    text = ", ".join("Python's standard library" if name == STANDARD_LIBRARY else f"`{name}`" for name in names)
    return f"""\
---
library_name: transformers
pipeline_tag: text-generation
tags: [diloco, distributed-training]
# license: to be chosen by the run's organiser
---

# {config.name}

A language model trained by volunteers over the internet with [DiLoCo](https://arxiv.org/abs/2311.08105).

| fact | value |
| --- | --- |
| run | `{facts.run_id}` |
| manifest digest (BLAKE3) | `{facts.manifest_digest}` |
| peers in the last outer step | {facts.peers} |
| outer steps, each of up to {config.training.inner_steps} inner steps a peer | {facts.outer_steps} |
| tokens trained | {facts.tokens:,} |
| training text | {text} |
| held-out loss | {facts.held_out_loss:.4f} nats per token |

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("path/to/this/folder")
tokenizer = AutoTokenizer.from_pretrained("path/to/this/folder")
```
"""
