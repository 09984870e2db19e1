"""What each way of starting and stopping needs to be told, and what a tenant that is only started and stopped may say.

Invariant: pure over the document; gives every problem at once, as (path, sentence).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from swapper.config.schema import TenantEntry
from swapper.config.yamltext import Loc

Said = tuple[Loc, str]

KEYS: Mapping[str, frozenset[str]] = {
    "attach": frozenset({"command"}),  # told by the kind that it is never run
    "command": frozenset({"command"}),
    "docker": frozenset({"container"}),
    "kubernetes": frozenset({"deployment", "namespace"}),
    "systemd": frozenset({"unit", "user"}),
}
"""Keys of each control, beside those of the kind."""
CONTROLS = frozenset(KEYS)
ON_OFF = "none"
"""The kind of what is only started and stopped."""
ON_OFF_KEYS = frozenset({"vram"})

_COMPOSE_PARTS = 2


def check(entry: TenantEntry, loc: Loc) -> Iterator[Said]:
    """Problems of how one tenant is started and stopped. `control: command` is judged by its kind."""
    match entry.control:
        case "docker":
            yield from _docker(entry, loc)
        case "kubernetes" if not entry.deployment:
            yield loc, "control: kubernetes needs deployment: its name (and namespace:, else that of the kubeconfig)"
        case "systemd" if not entry.unit:
            yield loc, "control: systemd needs unit: its name, like comfyui.service"
        case _:
            return


def _docker(entry: TenantEntry, loc: Loc) -> Iterator[Said]:
    if not entry.container:
        said = "control: docker needs container: its name or id, or PROJECT/SERVICE of Compose"
        yield loc, said
        return
    parts = entry.container.split("/")
    if len(parts) > _COMPOSE_PARTS or not all(parts):
        said = f"{entry.container!r} is neither the name of a container nor PROJECT/SERVICE of Compose"
        yield (*loc, "container"), said


def thing(entry: TenantEntry) -> tuple[str, str] | None:
    """Key and text of what a tenant starts and stops, where that has a name by which another could mean it, too."""
    match entry.control:
        case "docker" if entry.container:
            return "container", entry.container
        case "kubernetes" if entry.deployment:
            return "deployment", f"{entry.namespace or ''}/{entry.deployment}"
        case "systemd" if entry.unit:
            unit = entry.unit if "." in entry.unit else f"{entry.unit}.service"
            return "unit", f"{unit} of the user" if entry.user else unit
        case _:
            return None


def on_off(entry: TenantEntry, loc: Loc) -> Iterator[Said]:
    """Problems of one tenant of kind `none`."""
    if entry.control == "command" and not entry.command:
        yield loc, "control: command needs command: the program and its arguments"
    if entry.control == "attach":
        if entry.command:
            yield (*loc, "command"), "is never run with control: attach; write control: command, or remove it"
        elif entry.evict != "never":
            said = "cannot be ended with control: attach; write how it is started and stopped"
            yield (*loc, "control"), f"{said} (command, docker, kubernetes, systemd), or evict: never"
