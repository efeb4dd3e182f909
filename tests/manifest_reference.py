"""The reference page of `run.toml`: `python -m tests.manifest_reference docs/manifest.md` writes it anew."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from opendiloco.config.run_config import RunConfig
from opendiloco.config.section import Section, models_in

HEADING = """\
# Every key of run.toml

<!-- Made by `python -m tests.manifest_reference docs/manifest.md`: change the models in opendiloco/config. -->

`run.toml` defines a run; `diloco-peer run create` signs all its values, defaults included, as the run's *manifest*
([runs.md](runs.md)). The file is checked as a whole: an unknown key, a value of another type or out of its bounds, and
values that contradict each other are errors (exit code 3) that name the key, the value and the remedy. Nothing is
converted: a text needs quotes, a whole number has no decimals. A key without a default may be left out, unless it is
required. A table may be left out if it has no required key.
"""
TYPES = {"integer": "whole number", "number": "number", "string": "text", "boolean": "`true` or `false`"}
FORMATS = {"digest": "digest: 64 hexadecimal digits", "peer id": "peer id: `12D3KooW…`"}


def reference_page() -> str:
    """Return the page's text."""
    return "\n".join([HEADING, *_table("Keys at the top", "", RunConfig)])


def _table(title: str, path: str, model: type[BaseModel], needs_kind: bool = False) -> Iterator[str]:
    """Yield the lines about one table, and then those about the tables in it.

    A table that `needs_kind` would be taken for another one without that key, so that its own default never counts.
    """
    yield f"## {title}\n"
    yield from (f"{text}\n" for text in _docstrings(model))
    schema = model.model_json_schema()
    meanings = {name: " ".join(about.get("description", "").split()) for name, about in schema["properties"].items()}
    has_meanings = any(meanings.values())
    required = {*schema.get("required", ()), *(["kind"] if needs_kind else [])}
    yield f"| key | type | default |{' meaning |' if has_meanings else ''}"
    yield f"| --- | --- | --- |{' --- |' if has_meanings else ''}"
    for name, about in schema["properties"].items():
        cells = [f"`{name}`", _type(about), _default(about, is_required=name in required)]
        yield f"| {' | '.join([*cells, meanings[name]] if has_meanings else cells)} |"
    yield ""
    for name, field in model.model_fields.items():
        tables = list(models_in(field.annotation))
        inner = f"{path}.{name}".removeprefix(".")
        is_list = schema["properties"][name].get("type") == "array"
        for table in tables:
            title = f"[[{inner}]]" if is_list else f"[{inner}]"
            kind = f", kind = {_toml(table.model_fields['kind'].default)}" if len(tables) > 1 else ""
            yield from _table(f"`{title}`{kind}", inner, table, needs_kind=table is not tables[0])


def _docstrings(model: type[BaseModel]) -> Iterator[str]:
    """Yield the model's docstring, and those of the models whose keys it shares."""
    for each in model.__mro__:
        if issubclass(each, Section) and each is not Section and each.__doc__:
            yield inspect.cleandoc(each.__doc__)


def _type(about: dict[str, Any]) -> str:
    """Return what a key may be, and its bounds, from its JSON schema."""
    if "$ref" in about or "discriminator" in about:
        return "table, below"
    if "anyOf" in about:
        return " or ".join(_type(each) for each in about["anyOf"] if each != {"type": "null"})
    if "const" in about or "enum" in about:
        return ", ".join(f"`{_toml(value)}`" for value in about.get("enum", [about.get("const")]))
    match about.get("type"):
        case "array" if "prefixItems" in about:
            return f"list of {len(about['prefixItems'])}, each: {_type(about['prefixItems'][0])}"
        case "array":
            most = f"at most {about['maxItems']}, each: " if "maxItems" in about else ""
            return f"list: {most}{_type(about['items'])}"
        case "object":
            return "table with any keys"
        case str(name):
            return FORMATS.get(about.get("format", ""), TYPES[name] + _bounds(about))
    return "any value"


def _bounds(about: dict[str, Any]) -> str:
    words = {
        "minimum": "at least",
        "exclusiveMinimum": "above",
        "maximum": "at most",
        "exclusiveMaximum": "below",
        "pattern": "of the form",
    }
    said = [f"{word} {_shown(about[key])}" for key, word in words.items() if key in about]
    if about.get("minLength"):
        said.append("not empty")
    return "".join(f", {each}" for each in said)


def _shown(bound: float | str) -> str:
    if isinstance(bound, str):
        return f"`{bound}`"
    return f"{bound:,}" if isinstance(bound, int) else f"{bound:g}"


def _default(about: dict[str, Any], is_required: bool) -> str:
    default = about.get("default")
    if is_required:
        return "required"
    return "" if default is None or isinstance(default, dict) else f"`{_toml(default)}`"


def _toml(value: Any) -> str:
    return json.dumps(value)  # the same for texts, numbers, truth values and lists of them


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(reference_page(), encoding="utf-8")
