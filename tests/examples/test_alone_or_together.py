from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.thorough
@pytest.mark.swarm
def test_it_runs_and_reports_both() -> None:
    script, run = str(EXAMPLES / "alone_or_together.py"), str(EXAMPLES / "tiny.toml")
    command = [sys.executable, script, run, "--outer-steps", "1"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    assert [int(count) for count in re.findall(r"replicas (\d) .*held-out loss \d\.\d+", ran.stdout)] == [1, 3]
