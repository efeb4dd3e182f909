"""Settings that all tests share."""

from __future__ import annotations

import os

from hypothesis import settings

# Several processes share the machine's cores in many tests; more threads than that make everything slower.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# No deadline for an example: the time that one takes says more about the machine's load than about our code.
settings.register_profile("diloco-peer", deadline=None, derandomize=True, database=None)
settings.load_profile("diloco-peer")
