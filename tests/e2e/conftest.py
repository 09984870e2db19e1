"""The serve that all tests of a file share, where starting one for each would take longer than the tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.matrix import Held, with_its_own_router


@pytest.fixture(scope="module")
def living(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Held]:
    """One that started its router itself."""
    with with_its_own_router(tmp_path_factory.mktemp("living")) as server:
        yield server
