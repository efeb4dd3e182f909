"""The published settings of docs/recipes.md can be put into a run, and have the numbers of their sources."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from opendiloco.config.run_config import RunConfig
from opendiloco.model.build import sized_skeleton
from opendiloco.model.parameters import layout_of
from opendiloco.training.optimizers import check_inner_optimizer

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
RECIPES = {
    heading: tomllib.loads(block)
    for heading, block in re.findall(r"^## (.+?)\n.*?```toml\n(.*?)```", PAGE, re.MULTILINE | re.DOTALL)
}
PUBLISHED = {  # inner steps, outer learning rate and momentum
    "DiLoCo": (500, 0.7, 0.9),  # arXiv 2311.08105
    "INTELLECT-1": (100, 0.7, 0.9),  # arXiv 2412.01152
    "Streaming DiLoCo": (100, 0.4, 0.9),  # arXiv 2501.18512
    "MuLoCo": (30, 0.8, 0.9),  # arXiv 2505.23725
    "Uneven machines": (100, 0.7, 0.9),  # ours
    "A few inner steps": (10, 0.7, 0.6),  # examples/tiny.toml
}


def with_recipe(recipe: dict[str, Any]) -> RunConfig:
    """Return the tiny run with a recipe's tables instead of its own; what is trained stays the run's."""
    content = tomllib.loads((ROOT / "examples" / "tiny.toml").read_text(encoding="utf-8"))
    training = content["training"] | recipe["training"]
    return RunConfig.from_manifest_content(content | {"outer_steps": 8} | recipe | {"training": training})


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_recipe_has_the_numbers_of_its_source_and_can_be_trained(name: str) -> None:
    config = with_recipe(RECIPES[name])
    outer = config.outer_optimizer
    assert (config.training.inner_steps, outer.learning_rate, outer.momentum) == PUBLISHED[name]
    check_inner_optimizer(config.inner_optimizer)


UNITS = {"M": 1e6, "B": 1e9}


@pytest.mark.parametrize("row", re.findall(r"^\| (\d+[MB]) \| (.+) \| ([\d.]+[MB]) \|$", PAGE, re.MULTILINE))
def test_a_size_of_streaming_diloco_has_as_many_parameters_as_its_name_says(row: tuple[str, str, str]) -> None:
    """And about twenty tokens for each, which is what the paper's token budgets go by."""
    scale, shape, tokens = row
    width, blocks, heads, inner = map(int, shape.split(" | "))
    assert width == 64 * heads
    assert inner == pytest.approx(8 / 3 * width, rel=0.02)
    model = {
        "model_type": "qwen3",
        "vocab_size": 32000,
        "hidden_size": width,
        "num_hidden_layers": blocks,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": 64,
        "intermediate_size": inner,
        "tie_word_embeddings": True,
    }
    content = tomllib.loads((ROOT / "examples" / "tiny.toml").read_text(encoding="utf-8"))
    parameters = layout_of(sized_skeleton(RunConfig.from_manifest_content(content | {"model": {"config": model}})))
    said, budget = (float(text[:-1]) * UNITS[text[-1]] for text in (scale, tokens))
    assert parameters.parameter_count == pytest.approx(said, rel=0.3)
    assert budget / parameters.parameter_count == pytest.approx(19, abs=2.5)


def test_all_recipes_of_the_page_are_known() -> None:
    assert RECIPES.keys() == PUBLISHED.keys()
