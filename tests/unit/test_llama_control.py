"""A plain llama-server under a control that knows its process only by asking somebody: an engine, a manager, an API."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.fake_control import FakeControl
from tests.support.router import free_port
from workers.backend import TenantState
from workers.control import Phase, Seen
from workers.llama.server import LlamaServer


@pytest.mark.parametrize(
    ("phase", "expected"),
    [
        (Phase.GONE, TenantState.UNLOADED),
        (Phase.MISSING, TenantState.UNLOADED),
        (Phase.STARTING, TenantState.LOADING),
        (Phase.UP, TenantState.LOADING),
        (Phase.UNREACHABLE, TenantState.UNREACHABLE),
    ],
)
async def test_while_nobody_answers_at_its_address_its_control_says_what_is_there(
    tmp_path: Path, phase: Phase, expected: TenantState
) -> None:
    control = FakeControl(Phase.GONE)
    backend = LlamaServer(f"http://127.0.0.1:{free_port()}", tenant="chat", control=control, state_dir=tmp_path)
    control.show(Seen(phase))
    assert await backend.observe() == {"chat": expected}
    await backend.close()


async def test_what_was_remarkable_about_its_end_is_told(tmp_path: Path) -> None:
    control = FakeControl(Phase.UP)
    control.note = "it was killed after 30 s"
    backend = LlamaServer(f"http://127.0.0.1:{free_port()}", tenant="chat", control=control, state_dir=tmp_path)
    assert await backend.release("chat", limit_ms=30_000) == "it was killed after 30 s"
    assert control.orders == ["stop None"], "with its own grace"
    await backend.close()
