"""Which probe a card has, and by which variables a process sees that card only."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from swapper.config import Config
from swapper.probes import Devices, look, probes_of, totals
from tests.unit.test_config import parsed
from workers.backend import Reading
from workers.vram.amdgpu import Amdgpu
from workers.vram.declared import Declared
from workers.vram.nvml import Nvml
from workers.vram.unified import Unified

CARDS = """
cards:
  a: {probe: nvml, index: 0}
  b: {probe: nvml, uuid: [GPU-1, GPU-2]}
  c: {probe: amdgpu, index: 1}
  d: {probe: unified}
  e: {vram: 8GiB, reserve: 1GiB, index: 7}
"""


@pytest.fixture
def config() -> Config:
    return parsed(CARDS)


def test_each_card_is_read_by_what_it_names(config: Config) -> None:
    kinds = {name: type(probe) for name, probe in probes_of(config, config.spec(), "main").items()}
    assert kinds == {"a": Nvml, "b": Nvml, "c": Amdgpu, "d": Unified, "e": Declared}
    assert probes_of(config, config.spec(), "attic") == {}


async def test_what_every_card_has_is_read_at_once_and_what_cannot_be_read_is_left_out(config: Config) -> None:
    known = {name: probe for name, probe in probes_of(config, config.spec(), "main").items() if name in "cde"}
    readings = await look(known)
    assert isinstance(readings["e"], Reading)
    assert totals(readings).keys() == {name for name, one in readings.items() if isinstance(one, Reading)}
    assert totals(readings)["e"] == 8_192


def test_a_process_sees_its_card_by_what_the_probe_read_and_until_then_by_what_is_surely_it(config: Config) -> None:
    read: dict[str, Mapping[str, object]] = {}
    devices = Devices(config.cards, lambda: read)
    none = {"CUDA_VISIBLE_DEVICES": None, "HIP_VISIBLE_DEVICES": None}
    assert devices["a"] == none | {"CUDA_VISIBLE_DEVICES": "0", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert devices["c"] == devices["d"] == none
    assert devices["b"] == none | {"CUDA_VISIBLE_DEVICES": "GPU-1,GPU-2"}
    assert devices["e"] == {"CUDA_VISIBLE_DEVICES": "7", "HIP_VISIBLE_DEVICES": "7"}
    read |= {"a": {"env": {"CUDA_VISIBLE_DEVICES": "GPU-9"}}, "c": {"env": {"HIP_VISIBLE_DEVICES": "1"}}}
    assert devices["a"] == none | {"CUDA_VISIBLE_DEVICES": "GPU-9"}
    assert devices["c"] == none | {"HIP_VISIBLE_DEVICES": "1"}
    read["a"] = {"unread": "the driver is gone", "env": {"CUDA_VISIBLE_DEVICES": "GPU-9"}}
    assert devices["a"] == none | {"CUDA_VISIBLE_DEVICES": "GPU-9"}
    assert sorted(devices) == ["a", "b", "c", "d", "e"]
