"""The tables of docs/options.md: `python -m tests.settings_reference` writes them anew."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from opendiloco.settings.join_settings import SECTIONS, LogSettings, Setting, settings_of

OPTIONS = Path(__file__).parent.parent / "docs" / "options.md"


def reference_page() -> str:
    """Return the page's text: what it says before the first section, and a table for each."""
    before, _, _ = OPTIONS.read_text(encoding="utf-8").partition("## ")
    return before + "\n".join(_tables())


def _tables() -> Iterator[str]:
    for section in SECTIONS:
        note = " (options of `diloco-peer` itself: before the command)" if section is LogSettings else ""
        yield f"## {section.TITLE}{note}\n"
        yield "| option | variable | key | default | meaning |"
        yield "| --- | --- | --- | --- | --- |"
        yield from map(_row, settings_of(section))
        yield ""


def _row(setting: Setting) -> str:
    value = "" if setting.kind is bool else f" {setting.metavar or '|'.join(setting.choices) or 'TEXT'}"
    option = f"{setting.spelling.replace('/', ' / ')}{value}".replace("|", "\\|")
    shown = setting.default_text or ("required" if setting.is_required else "")
    return f"| `{option}` | `{setting.variable}` | `{setting.name}` | {shown} | {setting.help} |"


if __name__ == "__main__":
    OPTIONS.write_text(reference_page(), encoding="utf-8")
