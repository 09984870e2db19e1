"""How a tenant is started and stopped, in the configuration: each control with its keys, and kind `none`."""

from __future__ import annotations

from pathlib import Path

import pytest

from swapper.backends import backend_of
from swapper.config import Config, loads
from swapper.controls import control_of
from swapper.errors import ConfigError
from workers.control.docker import DockerControl
from workers.control.systemd import SystemdControl
from workers.llama.router import LlamaRouter
from workers.llama.server import LlamaServer
from workers.onoff import OnOff

CARDS = "cards: {gpu0: {probe: declared, vram: 24GiB}}\ntenants:\n"
DOCKER = CARDS + "  ml: {kind: none, control: docker, container: immich_ml, card: gpu0, vram: 4GiB, grace: 45s}\n"
UNIT = CARDS + "  ml: {kind: none, control: systemd, unit: ml.service, user: true, card: gpu0, vram: 4GiB}\n"
TRIAGE = CARDS + "  ml: {kind: none, control: kubernetes, namespace: immich, deployment: ml, card: gpu0, vram: 4GiB}\n"
COMMAND = CARDS + "  ml: {kind: none, control: command, command: [sleep, '9'], card: gpu0, vram: all}\n"
ATTACHED = CARDS + "  ml: {kind: none, card: gpu0, vram: 4GiB, evict: never}\n"
LLAMA = "url: http://127.0.0.1:8080, slot_dir: slots, card: gpu0"
ROUTER = CARDS + f"  l: {{kind: llama-router, control: docker, container: l, {LLAMA}, models: {{a: {{vram: 1GiB}}}}}}\n"
SERVER = CARDS + f"  l: {{kind: llama-server, control: systemd, unit: l, {LLAMA}, vram: 1GiB}}\n"


def parsed(text: str) -> Config:
    return loads(text, folder=Path("/etc/swapper"), environ={"HOME": "/home/ann"})


def problem(text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parsed(text)
    [said] = caught.value.problems
    return said


@pytest.mark.parametrize("text", [DOCKER, UNIT, TRIAGE, COMMAND, ATTACHED])
def test_what_is_only_started_and_stopped_is_one_tenant_that_no_caller_names(text: str) -> None:
    config = parsed(text)
    assert list(config.spec().tenants) == ["ml"]
    assert config.models() == {}
    assert config.notices == ()
    entry = config.tenants["ml"]
    assert isinstance(backend_of("ml", entry, config, control_of("ml", entry, config)), OnOff)


@pytest.mark.parametrize(
    ("text", "control", "backend"), [(ROUTER, DockerControl, LlamaRouter), (SERVER, SystemdControl, LlamaServer)]
)
def test_any_kind_of_server_may_live_in_a_container_or_a_unit(text: str, control: type, backend: type) -> None:
    config = parsed(text)
    made = control_of("l", config.tenants["l"], config)
    assert isinstance(made, control)
    assert isinstance(backend_of("l", config.tenants["l"], config, made), backend)


@pytest.mark.parametrize(
    ("text", "old", "new", "said"),
    [
        (DOCKER, "container: immich_ml, ", "", "swapper.yaml:3: tenants.ml: control: docker needs container: its name"),
        (DOCKER, "immich_ml", "a/b/c", "tenants.ml.container: 'a/b/c' is neither the name of a container nor PROJECT"),
        (DOCKER, "container: immich_ml", "container: x, unit: y", "tenants.ml.unit: is not a key of kind none with"),
        (DOCKER, "container: immich_ml", "container: x, command: [y]", "tenants.ml.command: is not a key of kind none"),
        (DOCKER, "container: immich_ml", "container: x, url: http://x:1", "tenants.ml.url: is not a key of kind none"),
        (DOCKER, ", vram: 4GiB", "", "swapper.yaml:3: tenants.ml: needs vram: what it takes on the card"),
        (DOCKER, "vram: 4GiB", "vram: 40GiB", "tenants.ml.vram: 40 GiB do not fit card gpu0"),
        (UNIT, "unit: ml.service, ", "", "tenants.ml: control: systemd needs unit: its name, like comfyui.service"),
        (TRIAGE, "deployment: ml, ", "", "tenants.ml: control: kubernetes needs deployment: its name (and namespace:"),
        (COMMAND, "command: [sleep, '9'], ", "", "tenants.ml: control: command needs command: the program and its"),
        (ATTACHED, ", evict: never", "", "ml.control: cannot be ended with control: attach; write how it is started"),
        (ROUTER, "container: l", "container: l, command: [x]", "l.command: is not a key of kind llama-router with"),
    ],
)
def test_what_does_not_fit_is_told_where_it_stands(text: str, old: str, new: str, said: str) -> None:
    assert old in text
    assert said in problem(text.replace(old, new))


def test_the_grace_of_a_tenant_is_its_own(tmp_path: Path) -> None:
    assert parsed(DOCKER).tenants["ml"].grace_ms == 45_000
    assert parsed(UNIT).tenants["ml"].user


@pytest.mark.parametrize(
    ("one", "other", "key"),
    [
        ("control: docker, container: ml", "control: docker, container: ml", "container"),
        ("control: systemd, unit: ml", "control: systemd, unit: ml.service", "unit"),
        ("control: kubernetes, deployment: ml", "control: kubernetes, deployment: ml", "deployment"),
    ],
)
def test_what_one_tenant_starts_and_stops_is_no_other_ones(one: str, other: str, key: str) -> None:
    rest = "kind: none, card: gpu0, vram: 4GiB"
    said = problem(f"{CARDS}  a: {{{one}, {rest}}}\n  b: {{{other}, {rest}}}\n")
    assert said.endswith(
        f"tenants.b.{key}: is that of tenants.a, too, and a release of one would end both: write it as one tenant"
    )


def test_units_and_deployments_of_one_name_may_be_different_ones() -> None:
    rest = "kind: none, card: gpu0, vram: 4GiB"
    pair = f"  a: {{control: systemd, unit: ml, {rest}}}\n  b: {{control: systemd, unit: ml, user: true, {rest}}}\n"
    where = "control: kubernetes, deployment: ml, namespace"
    spaces = f"  c: {{{where}: x, {rest}}}\n  d: {{{where}: y, {rest}}}\n"
    assert set(parsed(CARDS + pair + spaces).spec().tenants) == {"a", "b", "c", "d"}


def test_foreign_does_nothing_where_nobody_tells_who_holds_what_and_that_is_said() -> None:
    [said] = parsed("cards: {gpu0: {vram: 24GiB, foreign: 1GiB}}\ntenants: {}\n").notices
    assert said.endswith("cards.gpu0.foreign: is read, but its probe does not tell who holds what; leave it out")
    assert parsed("cards: {gpu0: {probe: nvml, foreign: 1GiB}}\ntenants: {}\n").notices == ()
