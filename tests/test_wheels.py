"""What the builder of wheels makes of what auditwheel says. `make wheels` builds and tries them."""

from __future__ import annotations

import pytest

from native.wheels import compiler, platform_of

CONSISTENT = """

diloco_peer-0.1.0-cp311-abi3-manylinux_2_17_x86_64.whl is consistent
with the following platform tag: "manylinux_2_5_x86_64".

The wheel references external versioned symbols in these
system-provided shared libraries: libc.so.6 with versions
{'GLIBC_2.2.5'}, libpthread.so.0 with versions {'GLIBC_2.2.5'}
"""


def test_auditwheel_names_the_oldest_system_that_will_do() -> None:
    assert platform_of(CONSISTENT) == ((2, 5), "x86_64")
    assert platform_of(CONSISTENT.replace("2_5_x86_64", "2_36_aarch64")) == ((2, 36), "aarch64")


def test_a_wheel_for_this_machine_alone_is_none_of_many_linux() -> None:
    assert platform_of('is consistent with the following platform tag: "linux_x86_64".') is None


@pytest.mark.parametrize("processor", ["x86_64", "aarch64"])
def test_the_compiler_and_the_wheel_are_told_the_same_processor(processor: str) -> None:
    variables = compiler(processor)
    assert f"-target {processor}-linux-gnu.2.17" in variables["CC"]
    assert variables["LDSHARED"].startswith(variables["CC"])
    assert variables["_PYTHON_HOST_PLATFORM"] == f"linux-{processor}"
