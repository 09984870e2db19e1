"""Which saved conversations will not come back once a server was started anew, told before it is.

Invariant: looks, and changes nothing; a difference is told only where the configuration, the files and the program's
`--version` leave no doubt. Of a server that somebody else starts only its model files are known.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

from swapper.config import Config
from swapper.config.advice import model_options, read_preset
from swapper.config.served import ONE_MODEL, served
from swapper.config.units import show_bytes
from swapper.core.commit import Alert, AlertKind
from swapper.snapshots.copies import newer
from swapper.snapshots.manifest import Manifest, refusal
from workers.control import Control
from workers.llama import foreseen
from workers.llama.fingerprint import local_path
from workers.llama.gguf import GgufIdentities
from workers.llama.slots import SlotFolder


@dataclass(frozen=True, slots=True)
class Loss:
    """Conversations of one tenant that are refused after the restart, for one reason."""

    tenant: str
    count: int
    tokens: int
    bytes: int
    why: str

    def __str__(self) -> str:
        """One sentence."""
        many = f"{self.count} conversation{'s' * (self.count != 1)}"
        size = f"{self.tokens:,} tokens, {show_bytes(self.bytes)}"
        return f"{many} of {self.tenant} ({size}) will not come back after the restart: {self.why}"


async def before_start(config: Config, controls: Mapping[str, Control]) -> list[Alert]:
    """What the servers that are about to be started (those of ours that do not run) will not take back."""
    starting = [
        name for name, one in config.tenants.items() if one.control == "command" and controls[name].alive() is False
    ]
    found = await asyncio.gather(*(asyncio.to_thread(losses, config, name, os.environ) for name in starting))
    return [
        Alert(config.tenants[name].card, str(loss), {"tenant": loss.tenant}, AlertKind.COLD)
        for name, lost in zip(starting, found, strict=True)
        for loss in lost
    ]


def losses(config: Config, server: str, environ: Mapping[str, str]) -> list[Loss]:
    """Of one server, the largest first. Blocking: reads manifests and model headers, asks the program's version."""
    entry = config.tenants[server]
    if entry.slot_dir is None or entry.snapshots.strategy == "off" or not entry.slot_dir.is_dir():
        return []
    folder = SlotFolder(entry.slot_dir)
    saved: dict[str, list[Manifest]] = {}
    for manifest in folder.manifests():
        if folder.problem(manifest, manifest.fingerprint) is None:
            saved.setdefault(manifest.tenant, []).append(manifest)
    if not saved:
        return []
    foresight = Foresight(config, server, environ)
    found = [loss for tenant, manifests in saved.items() for loss in _lost(tenant, manifests, foresight.of(tenant))]
    return sorted(found, key=lambda loss: -loss.tokens)


def _lost(tenant: str, manifests: list[Manifest], known: foreseen.Known) -> Iterator[Loss]:
    reasons: dict[str, dict[str, Manifest]] = {}
    older = newer(manifests)
    for manifest in (one for one in manifests if one.snapshot not in older):
        then = manifest.fingerprint
        certain = {k: v for k, v in known.items() if k != "build" or foreseen.BUILD.fullmatch(then.build)}
        why = refusal(manifest, replace(then, **cast("Mapping[str, Any]", certain)))
        if why is not None:
            reasons.setdefault(why, {})[manifest.snapshot] = manifest
    for why, lost in reasons.items():
        tokens, size = sum(m.tokens for m in lost.values()), sum(m.room for m in lost.values())
        yield Loss(tenant, len(lost), tokens, size, why)


class Foresight:
    """What the tenants of one server would run with."""

    def __init__(self, config: Config, server: str, environ: Mapping[str, str]) -> None:
        self._config = config
        self._server = server
        self._entry = config.tenants[server]
        self._environ = environ
        self._ours = self._entry.control == "command"
        self._folder = config.folder if self._ours else None
        self._identities = GgufIdentities(config.state_dir, keep=False)
        self._build = foreseen.build_of(self._entry.command, self._folder) if self._ours else None

    def of(self, tenant: str) -> foreseen.Known:
        """Fields of its fingerprint; none for a tenant that the configuration does not name."""
        if tenant not in (one.tenant for one in served(self._server, self._entry)):
            return {}
        found = dict(self._known(tenant))
        if not self._ours:
            return {name: value for name, value in found.items() if name == "gguf"}
        return found if self._build is None else {**found, "build": self._build}

    def _known(self, tenant: str) -> foreseen.Known:
        command, local = self._entry.command, self._local
        environ: Mapping[str, str] = self._environ if self._ours else {}
        if self._entry.kind in ONE_MODEL:
            options = model_options(self._config, tenant, environ)
            args = foreseen.own_arguments(command, environ)
        else:
            ini = read_preset(self._config, self._server)
            options = model_options(self._config, tenant, {})
            named = ini is not None and options is not None and options.model in ini.models
            args = foreseen.arguments(options, environ) if options is not None and named else None
        return foreseen.known(args, options, command, self._identities, local) if args and options else {}

    @property
    def _local(self) -> Callable[[str], str]:
        return lambda path: local_path(path, self._entry.path_map, self._folder)
