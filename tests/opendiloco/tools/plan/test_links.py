"""`links.toml`: what it may say, and what a person is told about a mistake."""

from __future__ import annotations

from pathlib import Path

import pytest

from opendiloco.tools.plan import LinksFile
from peers.errors import ManifestError

ROOT = Path(__file__).parents[4]
PEER = "[[peers]]\nup_mbit = 100.0\ndown_mbit = 200.0\n"


def links(text: str, folder: Path) -> LinksFile:
    path = folder / "links.toml"
    path.write_text(text, encoding="utf-8")
    return LinksFile.from_toml(path)


def test_the_example_is_right() -> None:
    assert sum(peer.count for peer in LinksFile.from_toml(ROOT / "examples" / "plan" / "links.toml").peers) == 4


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("peers = []", "peers"),
        ("[[peers", "not valid TOML"),
        (PEER + "count = 2\n", "no speed given: give exactly one of step_seconds, tokens_per_second and gpu"),
        (PEER + 'count = 2\nstep_seconds = 1.0\ngpu = "H200"\n', "step_seconds and gpu given"),
        (PEER + "step_seconds = 1.0\n", "add up to 1; give 2 to 1000 peers"),
        (PEER + "count = 2\nstep_seconds = -1.0\n", "peers.0.step_seconds = -1.0: too small. Use a number above 0."),
        (PEER + "count = 2\nstep_seconds = 1\nlatncy_ms = 1.0\n", "Did you mean latency_ms?"),
        (PEER + 'count = 2\nstep_seconds = "1"\n', "peers.0.step_seconds = '1': not a number."),
        (PEER + "count = 2\ngpus = 0\nstep_seconds = 1.0\ngpu_memory_gb = 8.0\n", "gpus = 0 excludes gpu"),
    ],
)
def test_a_mistake_is_named_with_its_remedy(text: str, told: str, tmp_path: Path) -> None:
    with pytest.raises(ManifestError) as raised:
        links(text, tmp_path)
    assert told in str(raised.value)
    assert str(tmp_path) in str(raised.value)
    assert raised.value.exit_code == 3


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match=r"nowhere\.toml: cannot be read"):
        LinksFile.from_toml(tmp_path / "nowhere.toml")
