"""What several modules of tests of real processes need."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.swarm.networks import NetworkError
from tests.swarm.routers import Internet, internet


@pytest.fixture(scope="module")
def net() -> Iterator[Internet]:
    """An internet of network namespaces; without what that takes, the tests that need it are skipped."""
    try:
        with internet() as net:
            yield net
    except NetworkError as error:
        pytest.skip(f"no internet of namespaces here: {error}")
