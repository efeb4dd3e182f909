"""The reference page of run.toml is what the models are."""

from __future__ import annotations

from pathlib import Path

from tests.manifest_reference import reference_page

PAGE = Path(__file__).parents[3] / "docs" / "manifest.md"


def row(table: str, key: str) -> str:
    """Return a key's row of the table with this heading."""
    _, _, rest = reference_page().partition(f"\n## {table}\n")
    section, _, _ = rest.partition("\n## ")
    [found] = [line for line in section.splitlines() if line.startswith(f"| `{key}` |")]
    return found


def test_the_page_is_what_the_models_are() -> None:
    remedy = "run `python -m tests.manifest_reference docs/manifest.md`"
    assert PAGE.read_text(encoding="utf-8") == reference_page(), remedy


def test_a_key_has_its_type_bounds_and_default() -> None:
    assert row("`[outer_optimizer]`", "momentum") == "| `momentum` | number, at least 0, below 1 | `0.9` |"
    assert (
        row("`[training]`", "inner_steps")
        == "| `inner_steps` | whole number, at least 1, at most 1,000,000 | required |"
    )
    assert row("`[admission]`", "mode") == '| `mode` | `"open"`, `"invite"` | `"open"` |'
    assert row("`[model]`", "digest") == "| `digest` | digest: 64 hexadecimal digits |  |"


def test_a_key_has_the_text_below_it() -> None:
    assert row("`[rounds]`", "exclusion").endswith("proven to have lied; 0: none. |")


def test_a_kind_that_must_be_named_is_required() -> None:
    assert row('`[inner_optimizer]`, kind = "adamw"', "kind") == '| `kind` | `"adamw"` | `"adamw"` |'
    assert row('`[inner_optimizer]`, kind = "muon"', "kind") == '| `kind` | `"muon"` | required |'
    assert '| `"int8"` |' in row("`[codec]`", "kind")


def test_tables_of_several_kinds_and_lists_of_tables_have_their_own_headings() -> None:
    page = reference_page()
    assert '\n## `[inner_optimizer]`, kind = "muon"\n' in page
    assert "\n## `[inner_optimizer.adamw]`\n" in page
    assert "\n## `[[data.sources]]`\n" in page
