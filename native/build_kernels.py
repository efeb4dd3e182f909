"""The build of the C library `opendiloco._kernels` with cffi in API mode. setup.py names this module, which setuptools
runs.

It must run in the repository's root, because setuptools requires paths relative to setup.py.
"""

from __future__ import annotations

import re
from pathlib import Path

from cffi import FFI

NATIVE = Path("native")
HEADER = NATIVE / "kernels.h"

# The kernels' results must not depend on the compiling machine: no fast-math, no fused multiply-add, no -march. C files
# that need an instruction set enable the set themselves.
COMPILE_ARGS = ["-std=c11", "-O3", "-ffp-contract=off", "-fno-math-errno", "-Wall", "-Wextra", "-pthread"]
ERRORS = ["-Werror=incompatible-pointer-types", "-Werror=implicit-function-declaration"]


def declarations(header: str) -> str:
    """Return the prototypes of a C header, without comments and preprocessor lines."""
    without_comments = re.sub(r"/\*.*?\*/", "", header, flags=re.DOTALL)
    return "\n".join(line for line in without_comments.splitlines() if not line.startswith("#"))


ffibuilder = FFI()
ffibuilder.cdef(declarations(HEADER.read_text(encoding="utf-8")))
ffibuilder.set_source(
    "opendiloco._kernels",
    '#include "kernels.h"',
    sources=sorted(str(path) for path in NATIVE.glob("*.c")),
    depends=sorted(str(path) for path in NATIVE.glob("*.h")),
    include_dirs=["native"],
    extra_compile_args=COMPILE_ARGS + ERRORS,
    extra_link_args=["-pthread"],
    py_limited_api=True,
)
