"""The generated parts of docs/ are what the program is."""

from __future__ import annotations

from pathlib import Path

import pytest

from opendiloco.settings.join_settings import JoinSettings, settings_of
from tests.reference_pages import PAGES, PART, manifest, page_anew

TABLES = "\n".join(manifest())


def row(table: str, key: str) -> str:
    """Return a key's row of the table with this heading."""
    _, _, rest = TABLES.partition(f"# {table}\n")
    section, _, _ = rest.partition("\n#")
    [found] = [line for line in section.splitlines() if line.startswith(f"| `{key}")]
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_is_what_the_program_is(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert PART.search(text)
    assert text == page_anew(page), "run `python -m tests.reference_pages`"


def test_a_key_has_its_default_bounds_and_meaning() -> None:
    assert row("`[outer_optimizer]`", "momentum ") == (
        "| `momentum = 0.9` | number ≥ 0, < 1 | Outer momentum: 0, or at least 0.001. |"
    )
    assert row("`[training]` (required)", "sequence_length") == (
        "| `sequence_length` (required) | integer ≥ 2 | Tokens in a window. |"
    )
    assert row("`[codec]`", "contributions").startswith("| `contributions` | list of up to 7: as `kind` | Formats")
    assert row("Keys at the top", "name").startswith("| `name` (required) | text `^[a-z0-9]")


def test_kinds_lists_and_tables_with_the_same_keys_have_their_headings() -> None:
    assert row("`[inner_optimizer]` (required)", "kind").startswith('| `kind = "adamw"` | `"adamw"`, `"muon"`, ')
    assert row('`[inner_optimizer]` of kind `"muon"`', "momentum").startswith("| `momentum = 0.95` |")
    assert "\n### `[inner_optimizer.adamw]` (required)\n" in TABLES
    assert "\n## `[[data.sources]]`\n" in TABLES
    assert "\nKeys as in `[schedule]`: `kind`, " in TABLES


def test_an_option_is_named_as_its_key_but_for_one() -> None:
    """As docs/options.md says, which leaves variables and keys out."""
    other = {one.option for one in settings_of(JoinSettings) if one.option != one.name.replace("_", "-")}
    assert other == {"initial-peer"}
