"""The generated parts of the pages in docs/: `python -m tests.reference_pages` writes them anew.

In a page each part stands between `<!-- generated: NAME -->` and `<!-- end -->`. The text around it is written by hand.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import click
import yaml  # type: ignore[import-untyped]
from prometheus_client import REGISTRY
from prometheus_client.metrics import MetricWrapperBase
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

import opendiloco.storage.checkpointer
import opendiloco.workers.telemetry  # noqa: F401  (both define metrics, as does peers.metrics)
from opendiloco.cli import main
from opendiloco.cli.group import EXIT_CODES
from opendiloco.config.run_config import RunConfig
from opendiloco.config.section import models_in
from opendiloco.settings.join_settings import SECTIONS, LogSettings, Setting, settings_of
from peers.metrics import NODE_METRICS

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "docs" / name for name in ("commands.md", "manifest.md", "metrics.md", "options.md")]
PART = re.compile(r"(<!-- generated: ([\w ]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def page_anew(path: Path) -> str:
    """Return the text of a page with its generated parts made anew."""
    return PART.sub(lambda part: f"{part[1]}\n{_part(part[2])}\n\n{part[3]}", path.read_text(encoding="utf-8"))


def _part(name: str) -> str:
    return re.sub(r"\n\n\n+", "\n\n", "\n".join(PARTS[name]()).strip())


def _linked(text: str) -> str:
    return re.sub(r"\bdocs/(\w+\.md)", r"[\1](\1)", text)


def _filled(text: str) -> str:
    return textwrap.fill(" ".join(text.split()), 120, break_on_hyphens=False) + "\n"


def _table(*headings: str) -> str:
    return f"| {' | '.join(headings)} |\n{'|---' * len(headings)}|"


# commands.md ----------------------------------------------------------------------------------------------------------
def commands(group: click.Group = main, path: str = "") -> Iterator[str]:
    """Yield a table of all commands."""
    if not path:
        yield _table("command", "purpose")
    context = click.Context(group, info_name=path)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        if isinstance(command, click.Group):
            yield from commands(command, f"{path}{name} ")
            continue
        words = command.collect_usage_pieces(click.Context(command, info_name=name))
        arguments = " ".join(word for word in words if word != "[OPTIONS]").replace("|", "\\|")
        yield f"| `{f'{path}{name} {arguments}'.strip()}` | {command.get_short_help_str(limit=200)} |"


def exit_codes() -> Iterator[str]:
    """Yield a table of all exit codes."""
    yield _table("code", "meaning")
    yield from (f"| {code} | {meaning} |" for code, meaning in EXIT_CODES.items())


# options.md -----------------------------------------------------------------------------------------------------------
def options() -> Iterator[str]:
    """Yield a table for each section of the settings."""
    for section in SECTIONS:
        yield f"## {section.TITLE}\n"
        if section is LogSettings:
            yield "Options of all commands. They stand before the command: `diloco-peer --log-level info join`.\n"
        yield _table("option", "default", "meaning")
        yield from map(_option, settings_of(section))
        yield ""


def _option(setting: Setting) -> str:
    value = "" if setting.kind is bool else f" {setting.metavar or '|'.join(setting.choices) or 'TEXT'}"
    option = f"{setting.spelling.replace('/--no-', ' / --no-')}{value}".replace("|", "\\|")
    return f"| `{option}` | {setting.default_text or ('required' if setting.is_required else '')} | {setting.help} |"


# manifest.md ----------------------------------------------------------------------------------------------------------
TYPES = {"integer": "integer", "number": "number", "string": "text", "boolean": "boolean"}
FORMATS = {"digest": "digest", "peer id": "peer id"}
LEAST, MOST = 1e-30, 10**6  # of the bounds that are shown


def manifest() -> Iterator[str]:
    """Yield a table of keys for each table of run.toml."""
    yield from _tables("Keys at the top", "", RunConfig, {})


def _tables(title: str, path: str, model: type[BaseModel], shown: dict[type[BaseModel], str]) -> Iterator[str]:
    """Yield the lines about a table, and then those about the tables in it. `shown` has the titles of those before."""
    yield f"## {title}\n"
    yield from _lines(title, model, shown)
    schema = model.model_json_schema()
    for name, field in model.model_fields.items():
        inner, about = f"{path}.{name}".removeprefix("."), schema["properties"][name]
        kinds = list(models_in(field.annotation))
        heading = f"`[[{inner}]]`" if about.get("type") == "array" else f"`[{inner}]`"
        if len(kinds) == 1:
            required = " (required)" if name in schema.get("required", ()) else ""
            yield from _tables(heading + required, inner, kinds[0], shown)
        elif kinds:
            common = next(
                base
                for base in kinds[0].__mro__
                if issubclass(base, BaseModel) and all(issubclass(kind, base) for kind in kinds)
            )
            yield f"## {heading} (required)\n"
            names = [f"`{_toml(kind.model_fields['kind'].default)}`" for kind in kinds]
            default = kinds[0].model_fields["kind"].default
            row = f"| {_key('kind', default)} | {', '.join(names)} | The tables below have its other keys. |"
            yield from _lines(heading, common, shown, row)
            for kind, quoted in zip(kinds, names, strict=True):
                yield f"### {heading} of kind {quoted}\n"
                yield from _lines(f"kind {quoted}", kind, shown, leave_out={"kind", *common.model_fields})
                for name_, field_ in kind.model_fields.items():
                    for table in models_in(field_.annotation):
                        yield f"### `[{inner}.{name_}]` (required)\n"
                        yield from _lines(f"`[{inner}.{name_}]`", table, shown)


def _lines(
    title: str,
    model: type[BaseModel],
    shown: dict[type[BaseModel], str],
    *rows: str,
    leave_out: Collection[str] = (),
) -> Iterator[str]:
    """Yield the docstring of a table, and a row for each key that has a docstring itself."""
    yield _filled(_linked(model.__doc__ or ""))
    same = next((place for other, place in shown.items() if issubclass(other, model)), None)
    if same is not None:
        names = [f"`{name}`" for name in model.model_fields]
        yield _filled(f"Keys as in {same}: {', '.join(names)}.")
        return
    shown[model] = title.removesuffix(" (required)")
    schema = model.model_json_schema()
    for name, field in model.model_fields.items():
        if name not in leave_out and field.description:
            key = f"`{name}` (required)" if field.is_required() else _key(name, field.default)
            rows += (f"| {key} | {_type(schema['properties'][name])} | {' '.join(field.description.split())} |",)
    yield "\n".join([_table("key", "value", "meaning"), *rows, ""]) if rows else ""


def _type(about: dict[str, Any]) -> str:
    """Return what a key may be, and its bounds, from its JSON schema."""
    if "anyOf" in about:
        return " or ".join(_type(each) for each in about["anyOf"] if each != {"type": "null"})
    if "const" in about or "enum" in about:
        return ", ".join(f"`{_toml(value)}`" for value in about.get("enum", [about.get("const")]))
    match about.get("type"):
        case "array" if "prefixItems" in about:
            return f"{len(about['prefixItems'])} of: {_type(about['prefixItems'][0])}"
        case "array":
            each = "as `kind`" if "enum" in about["items"] else _type(about["items"])
            return f"list of up to {about['maxItems']}: {each}"
        case "object":
            return "table"
        case str(name):
            return FORMATS.get(about.get("format", ""), TYPES[name] + _bounds(about))
    return "any value"


def _bounds(about: dict[str, Any]) -> str:
    """Return the bounds of a number. Those that are far beyond all sensible values are left out."""
    low, high = about.get("minimum"), about.get("maximum")
    if low is not None and high is not None and low != LEAST and high < MOST:
        return f" {low:,} to {high:,}"
    bounds = {
        ">": 0 if low == LEAST else about.get("exclusiveMinimum"),
        "≥": low if low != LEAST else None,
        "≤": high,
        "<": about.get("exclusiveMaximum"),
    }
    words = [f" {sign} {bound:,}" for sign, bound in bounds.items() if bound is not None and bound < MOST]
    return ",".join(words) or (f" `{about['pattern']}`" if "pattern" in about else "")


def _key(name: str, default: Any) -> str:
    return f"`{name}`" if default in (None, ()) or default is PydanticUndefined else f"`{name} = {_toml(default)}`"


def _toml(value: Any) -> str:
    return json.dumps(value)  # the same in TOML for texts, numbers, booleans and lists of them


# metrics.md -----------------------------------------------------------------------------------------------------------
def exposed() -> dict[str, tuple[tuple[str, ...], str]]:
    """Return the labels and the meaning of each metric, by its name in Prometheus. The meaning of a bootstrap node's
    metric ends in an asterisk."""
    found = {}
    for collector in list(REGISTRY._collector_to_names):
        if isinstance(collector, MetricWrapperBase):
            [family] = collector.describe()
            suffix = {"counter": "_total", "info": "_info"}.get(family.type, "")
            mark = "\\*" if collector in NODE_METRICS._collector_to_names else ""
            found[family.name + suffix] = collector._labelnames, family.documentation + mark
    return {name: found[name] for name in sorted(found) if name.startswith("diloco_peer_")}


def metrics(*prefixes: str) -> Iterator[str]:
    """Yield a table of the metrics whose names begin with a prefix, or without one, of all others."""
    yield _table("metric", "meaning")
    for name, (labels, meaning) in exposed().items():
        about = tuple(prefix for prefix in TELEMETRY if name.startswith(prefix) and name != "diloco_peer_outer_step")
        if about == prefixes:
            yield f"| `{name}{{{','.join(labels)}}}` | {meaning} |" if labels else f"| `{name}` | {meaning} |"


NAMED = {"instance": "", "value": "some", "what": "message", "run": "a run"}


def alerts() -> Iterator[str]:
    """Yield a table of the alert rules."""
    yield _table("alert", "condition")
    rules = yaml.safe_load((ROOT / "docker" / "prometheus" / "alerts.yml").read_text(encoding="utf-8"))
    for rule in (rule for group in rules["groups"] for rule in group["rules"]):
        summary = rule["annotations"]["summary"]
        text = re.sub(r"\{\{ \$(?:labels\.)?(\w+) \}\}", lambda label: NAMED[label[1]], summary).strip()
        yield f"| {rule['alert']} | {text[0].upper()}{text[1:]}{', for ' + rule['for'] if 'for' in rule else ''} |"


TELEMETRY = ("diloco_peer_training_", "diloco_peer_outer_")
PARTS: dict[str, Callable[[], Iterator[str]]] = {
    "commands": commands,
    "exit codes": exit_codes,
    "options": options,
    "manifest": manifest,
    "metrics": metrics,
    "metrics of training": lambda: metrics(TELEMETRY[0]),
    "metrics of outer steps": lambda: metrics(TELEMETRY[1]),
    "alerts": alerts,
}

if __name__ == "__main__":
    for page in PAGES:
        page.write_text(page_anew(page), encoding="utf-8")
