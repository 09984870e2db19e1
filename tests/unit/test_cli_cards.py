"""`swapper check` reads the cards: what it sees there, and what would not work with it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import nvml
from tests.support.nvml import FakeNvml, Gpu, Process
from tests.unit.test_cli import swapper
from workers.vram.nvml import LIBRARY


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeNvml]:
    fake = FakeNvml(tmp_path, Gpu("GPU-aaaa"))
    monkeypatch.setenv("NVML_STATE", str(fake.state))
    fake.here()
    yield fake
    LIBRARY.close()


async def checked(folder: Path, cards: str, rest: str = "") -> tuple[int, str]:
    path = folder / "swapper.yaml"
    path.write_text(f"state_dir: state\ncards: {cards}\n{rest}")
    result = await swapper("check", "-c", str(path))
    return result.exit_code, result.stdout


async def test_a_card_that_can_be_read_is_told_with_who_holds_it(fake: FakeNvml, tmp_path: Path) -> None:
    fake.gpus[0].used_mib, fake.gpus[0].processes = 300, [Process(4_194_300, 300)]
    fake.tell()
    status, said = await checked(tmp_path, "{gpu0: {probe: nvml, reserve: 512MiB}}")
    assert status == 0
    assert "gpu0: 24 GiB of VRAM, 23.71 GiB free; held by pid 4194300: 300 MiB\n" in said
    assert "0 errors, 0 warnings" in said


async def test_what_the_driver_and_strangers_keep_beyond_the_reserve_is_told_before_a_lease_waits_for_it(
    fake: FakeNvml, tmp_path: Path
) -> None:
    fake.gpus[0].used_mib, fake.gpus[0].reserved_mib = 300, 400
    fake.gpus[0].processes = [Process(4_194_300, 300, "graphics")]
    fake.tell()
    status, said = await checked(tmp_path, "{gpu0: {probe: nvml, reserve: 512MiB}}")
    assert status == 0
    assert (
        "warning: cards.gpu0.reserve: the driver keeps 400 MiB and pid 4194300 holds 300 MiB, so that the whole card "
        "is never free for a lease; write reserve: 768MiB, or end that" in said
    )
    _, said = await checked(tmp_path, "{gpu0: {probe: nvml, reserve: 768MiB}}")
    assert "0 warnings" in said


async def test_what_a_server_of_ours_holds_is_no_reason_for_a_larger_reserve(fake: FakeNvml, tmp_path: Path) -> None:
    fake.gpus[0].used_mib, fake.gpus[0].processes = 8_000, [Process(os.getpid(), 8_000)]
    fake.tell()
    _, said = await checked(tmp_path, "{gpu0: {probe: nvml}}")
    assert "0 warnings" in said  # this process is swapper


@pytest.mark.parametrize(
    ("card", "said"),
    [
        ("{probe: nvml, index: 3}", "cards.gpu0: there is no GPU 3 here; there is 0: NVIDIA Test, GPU-aaaa"),
        ("{probe: nvml, vram: 32GiB}", "cards.gpu0.vram: is more than the 24 GiB it has; write no more, or leave it"),
        ("{probe: nvml, reserve: 24GiB}", "cards.gpu0.reserve: leaves nothing of 24 GiB"),
    ],
)
async def test_what_does_not_fit_the_card_that_is_there_is_an_error(
    fake: FakeNvml, tmp_path: Path, card: str, said: str
) -> None:
    status, told = await checked(tmp_path, f"{{gpu0: {card}}}")
    assert status == 1
    assert f"error: {said}" in told


async def test_a_driver_that_is_not_there_is_an_error_with_what_to_do(fake: FakeNvml, tmp_path: Path) -> None:
    fake.driver = nvml.NOT_LOADED
    fake.tell()
    status, said = await checked(tmp_path, "{gpu0: {probe: nvml}}")
    assert status == 1
    assert "error: cards.gpu0: the NVIDIA driver is not loaded; load it (modprobe nvidia), or restart" in said


async def test_one_gpu_by_its_index_in_one_card_and_by_its_uuid_in_another_is_an_error(
    fake: FakeNvml, tmp_path: Path
) -> None:
    status, said = await checked(tmp_path, "{a: {probe: nvml, index: 0}, b: {probe: nvml, uuid: GPU-aaaa}}")
    assert status == 1
    assert "error: cards.b: GPU-aaaa is already in card a; a GPU belongs to one card" in said


async def test_a_model_that_no_measured_card_can_hold_is_an_error(fake: FakeNvml, tmp_path: Path) -> None:
    router = "kind: llama-router, card: gpu0, url: 'http://127.0.0.1:9', snapshots: {strategy: off}"
    tenants = f"tenants: {{llama: {{{router}, models: {{big: {{vram: 24GiB}}}}}}}}\n"
    _, said = await checked(tmp_path, "{gpu0: {probe: nvml, reserve: 1GiB}}", tenants)
    assert "error: llama/big: 24 GiB do not fit card gpu0, which has 23 GiB to give; write less, or another" in said


async def test_programs_are_told_what_is_there_as_well(fake: FakeNvml, tmp_path: Path) -> None:
    path = tmp_path / "swapper.yaml"
    path.write_text("state_dir: state\ncards: {gpu0: {probe: nvml}}\n")
    result = await swapper("check", "--json", "-c", str(path))
    assert json.loads(result.stdout)["cards"] == ["gpu0: 24 GiB of VRAM, 24 GiB free"]
