"""How findings are shown: on a terminal, as lines, as JSON, and what docs/volunteer.md says of them."""

from __future__ import annotations

import io
import json
import math
import re
from pathlib import Path

import pytest
from rich.console import Console

from opendiloco.tools.doctor.findings import CHECKS, as_json, conclusion, failed, passed, show, skipped, warned

FINE, BETTER = passed("gpu", "an [H100]", gpus=1), warned("heat", "hot", "Give it air.")
BROKEN, NOTHING = failed("disk", "full", "Name another."), skipped("clock", "nobody")
PAGE = (Path(__file__).parents[4] / "docs" / "volunteer.md").read_text(encoding="utf-8")


def shown(is_terminal: bool) -> str:
    console = Console(file=io.StringIO(), force_terminal=is_terminal, width=80, color_system=None)
    for finding in (FINE, BETTER):
        show(console, finding)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_line_for_each_finding_where_there_is_no_terminal() -> None:
    assert shown(is_terminal=False).splitlines() == [
        "pass    gpu       an [H100]",
        "warn    heat      hot",
        "                  -> Give it air.",
    ]


def test_a_terminal_shows_what_libraries_say_as_it_is() -> None:
    said = shown(is_terminal=True)
    assert "an [H100]" in said
    assert "→ Give it air." in said


@pytest.mark.parametrize(
    ("findings", "run", "says"),
    [
        ([FINE, NOTHING], None, "This machine can train."),
        ([FINE, BETTER], "tiny-x", "This machine can take part in tiny-x, and could do better: see heat."),
        ([BETTER, BROKEN, FINE], None, "This machine cannot train as it is: see disk."),
    ],
)
def test_the_conclusion(findings: list[object], run: str | None, says: str) -> None:
    assert conclusion(findings, run) == says  # type: ignore[arg-type]


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_finding_does_not_rewrite_a_terminal(is_terminal: bool) -> None:
    console = Console(file=io.StringIO(), force_terminal=is_terminal, no_color=True, width=200)
    show(console, failed("disk", "a stranger's \x1b]0;title\x07", "words \x1b[2J"))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "\x1b]" not in shown
    assert "\x1b[2J" not in shown
    assert "\x07" not in shown


def test_json_is_json() -> None:
    odd = passed("speed", "x", tokens_per_second=math.inf)
    content = json.loads(as_json([FINE, BETTER, odd], "tiny-x"))
    assert content["verdict"] == "warn"
    assert content["run"] == "tiny-x"
    assert content["checks"][0] == {
        "name": "gpu",
        "verdict": "pass",
        "found": "an [H100]",
        "remedy": "",
        "values": {"gpus": 1},
    }
    assert content["checks"][2]["values"] == {"tokens_per_second": None}


def test_the_page_has_every_check_in_its_order() -> None:
    table = PAGE.split("## What doctor checks")[1].split("##")[0]
    assert re.findall(r"^\| (\w+) \| ", table, re.MULTILINE)[1:] == list(CHECKS)
