"""What the tests of the agent have in common: its store link, its one backend, and how it is run on them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.agent_doubles import MemoryLink, RecordingBackend, Running, at_work


@pytest.fixture
def link() -> MemoryLink:
    return MemoryLink()


@pytest.fixture
def backend() -> RecordingBackend:
    return RecordingBackend("llama/med", "llama/big")


@pytest.fixture
def running(tmp_path: Path, link: MemoryLink, backend: RecordingBackend) -> Running:
    return lambda: at_work(tmp_path / "marks", link, {"llama": backend})
