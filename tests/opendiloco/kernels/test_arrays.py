"""What becomes of payloads when nobody needs them any more."""

from __future__ import annotations

import subprocess
import sys

import pytest

from opendiloco.kernels import INT8, Payload

COLLECTED = """
import gc
from opendiloco.kernels import INT8, Payload

class Cycle:
    def __init__(self, payload):
        self.payload, self.itself = payload, self

gc.disable()
payload = Payload(INT8, 1)
view, cycle = payload.buffer, Cycle(payload)
del payload
gc.collect()  # from here on the collector comes by the view before it comes by the payload
del view, cycle
gc.collect()
"""


def test_the_garbage_collector_frees_a_payload_in_a_cycle() -> None:
    """Python 3.11 crashes on a memoryview that it frees before whoever has exported it (python/cpython#77894)."""
    done = subprocess.run([sys.executable, "-c", COLLECTED], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_payloads_memory_stays_where_it_is() -> None:
    buffer = bytearray(INT8.payload_size(1))
    payload = Payload(INT8, 1, buffer)
    with pytest.raises(BufferError):
        buffer.clear()
    del payload
    buffer.clear()
