"""`swapper check` reaches a ComfyUI and says who could get past its gate."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from swapper.cli.check import examine
from swapper.config import loads
from tests.support.comfyprocess import ComfyProcess
from tests.support.router import free_port


@pytest.fixture
def comfy(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[ComfyProcess]:
    found = ComfyProcess(tmp_path / "comfy", listen=str(getattr(request, "param", "127.0.0.1")))
    found.start()
    yield found
    found.stop()


async def said(url: str, folder: Path, control: str = "control: command, command: [python3]") -> list[str]:
    text = f"""
cards: {{gpu0: {{probe: declared, vram: 24GiB}}}}
state_dir: {folder}
tenants:
  comfyui: {{kind: comfyui, {control}, url: '{url}', gate: 127.0.0.1:{free_port()}}}
"""
    config = loads(text, folder=folder, environ={"HOME": str(folder)})
    return [one.text for one in await examine(config, {}) if one.text not in config.notices]


async def test_one_that_only_its_own_machine_reaches_is_fine(comfy: ComfyProcess, tmp_path: Path) -> None:
    assert await said(comfy.url, tmp_path) == []


@pytest.mark.parametrize("comfy", ["0.0.0.0"], indirect=True)
async def test_one_that_listens_everywhere_can_be_posted_to_past_the_gate(comfy: ComfyProcess, tmp_path: Path) -> None:
    (found,) = await said(comfy.url, tmp_path)
    assert "ComfyUI listens on 0.0.0.0: prompts posted there get past the gate" in found
    assert found.endswith("start it with --listen 127.0.0.1")


async def test_one_that_is_attached_and_not_there_is_an_error_and_one_that_swapper_starts_is_not(
    tmp_path: Path,
) -> None:
    nobody = f"http://127.0.0.1:{free_port()}"
    (found,) = await said(nobody, tmp_path, "control: attach")
    assert found == f"tenants.comfyui.url: {nobody}: nobody listens there; start ComfyUI, or correct the address"
    assert await said(nobody, tmp_path) == []


async def test_what_is_no_comfyui_is_told(comfy: ComfyProcess, tmp_path: Path) -> None:
    (found,) = await said(f"{comfy.url}/no", tmp_path)
    assert "answered 404" in found
    assert found.endswith("correct the address, or the kind")
