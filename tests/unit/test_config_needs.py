"""When a need may be left out, what may be done about one that is exceeded, and what of that is refused in words."""

from __future__ import annotations

from pathlib import Path

import pytest

from swapper.config import load
from swapper.core.watched import NeedFrom
from swapper.errors import ConfigError

ROUTER = "kind: llama-router, url: http://h:1, snapshots: {strategy: off}"


def written(folder: Path, card: str, tenant: str) -> Path:
    path = folder / "swapper.yaml"
    path.write_text(f"state_dir: state\ncards: {{gpu0: {{{card}}}}}\ntenants:\n  t: {{{tenant}}}\n")
    return path


@pytest.mark.parametrize("probe", ["nvml", "amdgpu"])
def test_where_processes_are_measured_a_models_need_may_be_left_out(tmp_path: Path, probe: str) -> None:
    spec = load(written(tmp_path, f"probe: {probe}", f"{ROUTER}, models: {{m: {{}}, n: {{vram: 4GiB}}}}"), {}).spec()
    assert spec.tenants["t/m"].need_from is NeedFrom.UNKNOWN
    assert spec.tenants["t/n"].need_from is NeedFrom.DECLARED


@pytest.mark.parametrize(
    ("card", "tenant"),
    [
        ("vram: 24GiB", f"{ROUTER}, models: {{m: {{}}}}"),
        ("probe: unified", f"{ROUTER}, models: {{m: {{}}}}"),
        ("probe: nvml", "kind: ollama, url: http://h:1, models: {m: {}}"),
        ("probe: nvml", "kind: none, control: docker, container: c"),
    ],
)
def test_elsewhere_it_may_not(tmp_path: Path, card: str, tenant: str) -> None:
    with pytest.raises(ConfigError, match="needs vram: what it takes on the card"):
        load(written(tmp_path, card, tenant), {})


def test_what_is_foreign_and_what_is_done_is_read_and_a_model_may_differ_from_its_server(tmp_path: Path) -> None:
    models = "{m: {vram: 4GiB, on_over: evict}, n: {vram: 4GiB}}"
    path = written(tmp_path, "probe: nvml, foreign: 1GiB", f"{ROUTER}, on_over: restart, models: {models}")
    spec = load(path, {}).spec()
    assert spec.cards["gpu0"].foreign_mib == 1024
    assert [spec.tenants[name].on_over for name in ("t/m", "t/n")] == ["evict", "restart"]


def test_by_default_it_is_only_told(tmp_path: Path) -> None:
    spec = load(written(tmp_path, "probe: nvml", f"{ROUTER}, models: {{m: {{vram: 4GiB}}}}"), {}).spec()
    assert (spec.cards["gpu0"].foreign_mib, spec.tenants["t/m"].on_over) == (256, "alert")


@pytest.mark.parametrize(
    ("card", "tenant", "said"),
    [
        ("probe: nvml", f"{ROUTER}, models: {{m: {{on_over: evict}}}}", "does nothing without vram: SIZE"),
        ("probe: nvml", f"{ROUTER}, models: {{m: {{vram: all, on_over: evict}}}}", "does nothing without vram: SIZE"),
        ("vram: 24GiB", f"{ROUTER}, models: {{m: {{vram: 4GiB, on_over: evict}}}}", "does nothing on card gpu0"),
        (
            "probe: nvml",
            "kind: none, control: docker, container: c, vram: 1GiB, evict: never, on_over: restart",
            "cannot be restart or evict beside evict: never",
        ),
        (
            "probe: nvml",
            "kind: comfyui, url: 'http://h:1', gate: '127.0.0.1:2', vram: 4GiB, on_over: restart",
            "it is on its card inside a lease",
        ),
        ("probe: nvml", f"{ROUTER}, on_over: kill, models: {{m: {{vram: 4GiB}}}}", "did you mean|alert"),
    ],
)
def test_what_cannot_be_done_is_refused_with_what_to_write(tmp_path: Path, card: str, tenant: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load(written(tmp_path, card, tenant), {})
