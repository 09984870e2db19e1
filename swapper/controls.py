"""What starts and stops a configured server: its control.

Invariant: nothing is started or asked here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from swapper.config import Config
from swapper.config.schema import TenantEntry
from workers.control import Control
from workers.control.attach import AttachControl
from workers.control.command import CommandControl
from workers.control.docker import DockerControl
from workers.control.kubernetes import KubernetesControl
from workers.control.systemd import SystemdControl


def control_of(name: str, entry: TenantEntry, config: Config, env: Mapping[str, str] | None = None) -> Control:
    """What starts and stops a configured server. It finds a server that another process started, too.

    It has the tenant's own grace, whatever the kind that has it stopped.
    """
    grace_ms = entry.grace_ms
    match entry.control:
        case "command":
            folder = config.state_dir / "servers" / name
            return CommandControl(name, entry.command, folder, env, config.folder, grace_ms=grace_ms)
        case "docker":
            return DockerControl(name, cast("str", entry.container), grace_ms=grace_ms)
        case "kubernetes":
            return KubernetesControl(name, cast("str", entry.deployment), entry.namespace, grace_ms=grace_ms)
        case "systemd":
            return SystemdControl(name, cast("str", entry.unit), user=entry.user, grace_ms=grace_ms)
        case _:
            return AttachControl(name)
