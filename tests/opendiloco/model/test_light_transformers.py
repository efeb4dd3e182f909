"""transformers is loaded without scipy and looks through its models once, and all of it still works afterwards."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import transformers
from transformers.utils import import_utils

from opendiloco.model.build import _scanned_once, _scipy_comes_later

LOAD_LIGHT = """
import sys
opened = []
sys.addaudithook(lambda event, arguments: opened.append(str(arguments[0])) if event == "open" else None)
import opendiloco.model.build
import transformers.models.llama.modeling_llama
looks = [path for path in opened if path.endswith("modeling_gpt2.py")]
assert len(looks) == 1, "all models are looked through again"
"""

WITHOUT_SCIPY = """
assert "transformers.loss.loss_for_object_detection" in sys.modules
assert not [name for name in sys.modules if name.partition(".")[0] == "scipy"]
"""

OBJECTS_ARE_MATCHED = """
import numpy
from transformers.loss.loss_for_object_detection import linear_sum_assignment
rows, columns = linear_sum_assignment(numpy.array([[1, 9], [9, 1]]))
assert columns.tolist() == [0, 1]
import scipy.optimize
assert scipy.optimize.linear_sum_assignment and scipy.optimize.Bounds
"""


def test_without_scipy_and_with_one_look_at_all_models() -> None:
    """In a fresh interpreter. 240 s: importing torch takes a while on a loaded machine."""
    code = LOAD_LIGHT + WITHOUT_SCIPY + OBJECTS_ARE_MATCHED
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr


def test_what_the_first_look_has_found_is_what_a_second_one_would_find() -> None:
    look, models = import_utils.define_import_structure, Path(transformers.__file__).parent / "models"
    for asked in (models / "__init__.py", models / "auto" / "__init__.py"):
        with _scanned_once(transformers):
            known = import_utils.define_import_structure(str(asked))
        assert known == look(str(asked))
        assert known
    assert import_utils.define_import_structure is look


def test_scipy_that_is_there_stays() -> None:
    optimizers = importlib.import_module("scipy.optimize")
    with _scipy_comes_later():
        assert sys.modules["scipy.optimize"] is optimizers
    assert sys.modules["scipy.optimize"] is optimizers
