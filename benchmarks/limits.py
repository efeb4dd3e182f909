"""A library of the C functions in limits.c, which measure the speed of the memory. It is compiled for this
processor."""

from __future__ import annotations

import importlib.util
import tempfile
from pathlib import Path
from typing import Any

from cffi import FFI

DECLARATIONS = """
void limit_read_4_write_1(uintptr_t values, uintptr_t out, int64_t count, int32_t threads);
void limit_read_8_write_1(uintptr_t first, uintptr_t second, uintptr_t out, int64_t count, int32_t threads);
void limit_read_1_update_8(uintptr_t bytes, uintptr_t theta, uintptr_t momentum, int64_t count, int32_t threads);
void limit_add(uintptr_t values, uintptr_t sum, int64_t count, int32_t threads);
"""


def build_limits() -> Any:
    """Compile limits.c with a C compiler, and return the library of its functions."""
    builder = FFI()
    builder.cdef(DECLARATIONS)
    source = Path(__file__).with_name("limits.c").read_text(encoding="utf-8")
    builder.set_source("_limits", source, extra_compile_args=["-O3", "-march=native", "-pthread"])
    with tempfile.TemporaryDirectory() as folder:
        compiled = builder.compile(tmpdir=folder)
        spec = importlib.util.spec_from_file_location("_limits", compiled)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return module.lib
