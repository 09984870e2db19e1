"""A ComfyUI in the configuration: what it needs, what would let somebody past its gate, and what the core is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from swapper.backends import backend_of
from swapper.config import Config, loads
from swapper.controls import control_of
from swapper.errors import ConfigError
from workers.comfyui.server import ComfyUI

GOOD = """
listen: 127.0.0.1:9292
cards: {gpu0: {probe: declared, vram: 24GiB}}
tenants:
  comfyui: {kind: comfyui, control: docker, container: comfyui, card: gpu0, url: http://127.0.0.1:8188,
    gate: 127.0.0.1:8189, vram: all, linger: 20s}
"""


def config(text: str = GOOD) -> Config:
    return loads(text, folder=Path("/etc/swapper"), environ={"HOME": "/home/ann"})


def problem(old: str, new: str) -> str:
    with pytest.raises(ConfigError) as refused:
        config(GOOD.replace(old, new))
    return "\n".join(refused.value.problems)


def test_it_is_on_its_card_by_lease_only_and_nobody_calls_it_by_name() -> None:
    found = config()
    tenant = found.spec().tenants["comfyui"]
    assert (tenant.by_lease, tenant.serves_models, tenant.save, tenant.need_mib) == (True, False, False, 24 * 1024)
    assert found.models() == {}
    assert found.notices == ()
    assert config(GOOD.replace("vram: all, ", "")).spec().tenants["comfyui"].need_mib == 24 * 1024
    assert config(GOOD.replace("vram: all", "vram: 10GiB")).spec().tenants["comfyui"].need_mib == 10 * 1024


def test_its_backend_is_one_of_a_comfyui() -> None:
    found = config(GOOD.replace("control: docker, container: comfyui", "control: command, command: [python, main.py]"))
    entry = found.tenants["comfyui"]
    assert isinstance(backend_of("comfyui", entry, found, control_of("comfyui", entry, found)), ComfyUI)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("gate: 127.0.0.1:8189, ", "", "tenants.comfyui: needs gate: where its clients come to in its place"),
        ("url: http://127.0.0.1:8188,", "", "tenants.comfyui: needs url: the address of the ComfyUI"),
        ("8189", "8188", "tenants.comfyui.gate: is ComfyUI's own address (url); give the gate another port"),
        ("8189", "9292", "tenants.comfyui.gate: is swapper's own address (listen: 127.0.0.1:9292)"),
        ("vram: all", "vram: all, evict: never", "tenants.comfyui.evict: never cannot be"),
        ("control: docker, container: comfyui", "control: command", "needs command: how it is started"),
        ("linger: 20s", "linger: 20", "20 has no unit; write 20s for seconds"),
        ("vram: all", "vram: all, models: {a: {}}", "models: is not a key of kind comfyui"),
    ],
)
def test_what_would_not_work_is_refused_in_words(old: str, new: str, said: str) -> None:
    assert said in problem(old, new)


def test_two_gates_at_one_address_are_refused() -> None:
    second = "  other: {kind: comfyui, card: gpu0, url: http://127.0.0.1:8190, gate: 127.0.0.1:8189, control: attach}\n"
    with pytest.raises(ConfigError, match=r"tenants\.other\.gate: is that of tenants\.comfyui, too"):
        config(GOOD + second)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("control: docker, container: comfyui", "control: attach", "cannot be restarted, so VRAM that it keeps"),
        ("gate: 127.0.0.1:8189", "gate: 0.0.0.0:8189", "whoever reaches it may use ComfyUI, which knows no keys"),
        ("probe: declared, vram: 24GiB", "probe: nvml", "reserve: is 0 MiB, and an idle comfyui keeps more of it"),
    ],
)
def test_what_is_accepted_and_had_better_be_known_is_said(old: str, new: str, said: str) -> None:
    (notice,) = config(GOOD.replace(old, new)).notices
    assert said in notice
