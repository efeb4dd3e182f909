"""The published settings in docs/runs.md can be put into a run, and have the numbers of their sources."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from opendiloco.config.run_config import RunConfig
from opendiloco.training.optimizers import check_inner_optimizer

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "runs.md").read_text(encoding="utf-8")
ROW = re.compile(r"^\| ([\w -]+?)(?: \(.*?\))? \| (`\w+\.\w+.*) \|$", re.MULTILINE)
RECIPES = {
    name: tomllib.loads("\n".join(re.findall(r"`(\S+ = [^`]+)`", keys)))
    for name, keys in ROW.findall(PAGE[PAGE.index("### Published settings") : PAGE.index("### Uneven machines")])
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


def test_all_recipes_of_the_page_are_known() -> None:
    assert RECIPES.keys() == PUBLISHED.keys()
