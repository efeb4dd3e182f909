"""Finds a model's transformer blocks, whatever its architecture."""

from __future__ import annotations

from typing import Any

import torch


def transformer_blocks(model: Any) -> list[Any]:
    """Return the members of the model's lists of layers that transformers, too, would keep on one device.

    They are the same before and after sharding, which makes each block's class a subclass of what it was.
    """
    names = set(getattr(model, "_no_split_modules", None) or ())
    lists = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList)]
    return [block for blocks in lists for block in blocks if names & {kind.__name__ for kind in type(block).__mro__}]
