"""The finished model as a folder that `AutoModelForCausalLM.from_pretrained` loads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from stat import S_IMODE
from typing import Any, Literal

from opendiloco.config.run_config import RunConfig
from opendiloco.data.tokenizer import Tokenizer
from opendiloco.errors import MachineError
from opendiloco.model.card import CARD, CURVE, RunFacts, curve_picture, model_card
from peers.values.private_folders import make_private_folder

CONFIG_NAME = "config.json"
Dtype = Literal["float32", "bfloat16"]
"""What an exported model's weights are stored as."""


def export_model(
    model: Any, tokenizer: Tokenizer, folder: Path, config: RunConfig, facts: RunFacts, dtype: Dtype = "float32"
) -> None:
    """Write weights (safetensors), config, generation config, tokenizer and model card into a new or empty folder.

    Raises: MachineError when the folder has something in it or cannot be written.
    """
    remedy = "Give a new folder on a disk with space, e.g. --out model-2/."
    try:
        make_private_folder(folder)
        if any(folder.iterdir()):
            raise MachineError(f"{folder} is not empty.", remedy)
        with rounded_to(dtype, model):
            model.save_pretrained(folder)
        open_to_readers(folder)
        tokenizer.pretrained().save_pretrained(folder)
        (folder / CARD).write_text(model_card(config, facts, dtype), encoding="utf-8")
        if len(facts.curve) > 1:
            (folder / CURVE).write_text(curve_picture(facts.curve), encoding="utf-8")
    except OSError as error:
        raise MachineError(f"{folder} cannot be written ({error.strerror or error}).", remedy) from error


def open_to_readers(folder: Path) -> None:
    """Give the weights the mode of the other files, which follows the umask: safetensors lets only their owner read
    them. Raises: OSError."""
    mode = S_IMODE((folder / CONFIG_NAME).stat().st_mode)
    for path in folder.glob("*.safetensors"):
        path.chmod(mode)


@contextmanager
def rounded_to(dtype: Dtype, model: Any) -> Iterator[None]:
    """Round a model's parameters to this type, and give it its own back in the end. Buffers stay as they are."""
    import torch

    parameters = [parameter for parameter in model.parameters() if parameter.dtype != getattr(torch, dtype)]
    own = [parameter.data for parameter in parameters]
    said = model.config.dtype
    try:
        for parameter in parameters:
            parameter.data = parameter.data.to(getattr(torch, dtype))
        yield
    finally:
        model.config.dtype = said  # which `save_pretrained` has changed
        for parameter, values in zip(parameters, own, strict=True):
            parameter.data = values
