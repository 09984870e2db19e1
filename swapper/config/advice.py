"""What the servers' own settings would cost: presets read and judged together with the configuration that names them.

Invariant: reads preset files, changes nothing; never raises for what a server's file says. Used by `check`, when serve
starts, and by workers that have a running model's own arguments.
"""

from __future__ import annotations

import difflib
import os.path
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from presets import (
    Finding,
    Ini,
    Level,
    ModelOptions,
    RouterOptions,
    effective,
    from_child_args,
    model_losses,
    named,
    parse,
    router_losses,
)
from swapper.config.config import Config
from swapper.config.schema import TenantEntry
from swapper.config.served import LLAMA, ONE_MODEL, served


@dataclass(frozen=True, slots=True)
class Advice:
    """One finding about a server of the configuration. `file` is the preset it concerns, if it concerns one."""

    server: str
    finding: Finding
    file: str | None = None

    @property
    def error(self) -> bool:
        """True where something fails or a promise of swapper cannot be kept."""
        return self.finding.level is Level.ERROR

    def __str__(self) -> str:
        """One sentence: where, what happens, what to do."""
        said = self.finding.sentence(self.file or "")
        return said if self.file is not None and self.finding.line is not None else f"{self.server}: {said}"


def preset_path(config: Config, server: str) -> Path | None:
    """The preset file of a server: its `preset:`, else what its command's --models-preset names."""
    entry = config.tenants[server]
    return entry.preset or _command_path(config, entry, "--models-preset")


def read_preset(config: Config, server: str) -> Ini | None:
    """The parsed preset of a server; None when it has none, or none that can be read from here."""
    path = preset_path(config, server)
    if path is None:
        return None
    try:
        return parse(path.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return None


def model_options(config: Config, tenant: str, environ: Mapping[str, str]) -> ModelOptions | None:
    """The options a tenant would be started with as far as files tell; None without a readable preset (or command)."""
    server, model = config.server_of(tenant), config.name_of(tenant)
    entry = config.tenants[server]
    if entry.kind not in LLAMA:
        return None
    plain = entry.kind in ONE_MODEL
    ini = parse("") if plain else read_preset(config, server)
    if ini is None or (plain and not entry.command):
        return None
    return effective(ini, model, entry.command[1:], _inherited(entry, environ))


def advise(config: Config, environ: Mapping[str, str]) -> list[Advice]:
    """Everything the files tell about every server, without asking any of them."""
    return [one for server in config.tenants for one in _server(config, server, environ)]


def advise_live(
    config: Config, server: str, models: Sequence[Mapping[str, object]], props: Mapping[str, object]
) -> list[Advice]:
    """The same about a running router: `models` is `data` of its `GET /models`, `props` its `GET /props`."""
    entry = config.tenants[server]
    known = {str(one.get("id")): one for one in models}
    names = {alias: model for model, one in known.items() for alias in _strings(one.get("aliases"))}
    router = RouterOptions.from_props(props)
    found = [Advice(server, finding) for finding in router_losses(router)]
    for model in entry.models:
        name = model if model in known else names.get(model)
        if name is None:
            found.append(Advice(server, _absent(model, list(known), "the running router has no such model")))
            continue
        status = known[name].get("status")
        args = cast("Mapping[str, object]", status).get("args") if isinstance(status, Mapping) else None
        found += _losses(config, server, from_child_args(_strings(args)), None)
    return found


def _server(config: Config, server: str, environ: Mapping[str, str]) -> Iterator[Advice]:
    entry = config.tenants[server]
    if entry.kind not in LLAMA:
        return
    if entry.kind in ONE_MODEL:
        options = model_options(config, server, environ)
        if options is not None:
            yield from _losses(config, server, options, None)
            yield from (Advice(server, finding) for finding in _alias(server, entry, environ))
        return
    path = preset_path(config, server)
    ini = read_preset(config, server)
    if path is not None and ini is None:
        text = f"the preset {path} cannot be read from here, so that its settings are not judged"
        mend = "give who runs swapper the right to read it, or correct its path"
        yield Advice(server, Finding(Level.WARNING, "no-preset", text, mend))
    if ini is not None:
        yield from (Advice(server, problem, str(path)) for problem in ini.problems)
    router = RouterOptions.from_args(entry.command, environ) if entry.command else None
    if router is not None:
        yield from (Advice(server, finding) for finding in router_losses(router))
        yield from (Advice(server, finding) for finding in _other_preset(config, entry))
    for model in entry.models if ini is not None else ():
        assert ini is not None
        options = model_options(config, f"{server}/{model}", environ)
        if options is None or (options.model not in ini.models and "--models-dir" not in entry.command):
            yield Advice(server, _absent(model, ini.models, f"{path} has no section for it"))
        elif router is not None:
            yield from _losses(config, server, options, router, str(path))


def _alias(server: str, entry: TenantEntry, environ: Mapping[str, str]) -> Iterator[Finding]:
    """What a server without a router calls its model is what every client reads, whatever it asked for."""
    (one,) = served(server, entry)
    said = named(entry.command[1:], _inherited(entry, environ))
    if said and {*said} <= {*one.names}:
        return
    what = f"the name {', '.join(said)}, which no client asks for," if said else "the path of the model file"
    text = f"its answers have {what} as their model"
    yield Finding(Level.WARNING, "alias", text, f"start it with --alias {one.name}")


def _losses(
    config: Config, server: str, options: ModelOptions, router: RouterOptions | None, file: str | None = None
) -> Iterator[Advice]:
    entry = config.tenants[server]
    kept = entry.snapshots.strategy != "off"
    slot_dir = entry.slot_dir if kept else None
    folder = config.folder if entry.control == "command" else None
    for finding in model_losses(options, router, slot_dir=slot_dir, folder=folder, path_map=entry.path_map):
        if kept or finding.code in ("load-on-startup", "no-metrics"):
            yield Advice(server, finding, file)


def _other_preset(config: Config, entry: TenantEntry) -> Iterator[Finding]:
    started = _command_path(config, entry, "--models-preset")
    if started is None or entry.preset is None or os.path.realpath(started) == os.path.realpath(entry.preset):
        return
    text = f"preset: {entry.preset} is not the file the command starts with, {started}"
    yield Finding(Level.ERROR, "other-preset", text, "give both the same file")


def _absent(model: str, known: Sequence[str], why: str) -> Finding:
    near = difflib.get_close_matches(model, known, n=1)
    names = ", ".join(known) or "none"
    mend = f"did you mean {near[0]}?" if near else f"write one of its names in swapper.yaml ({names})"
    return Finding(Level.ERROR, "no-such-model", why, mend, model)


def _command_path(config: Config, entry: TenantEntry, option: str) -> Path | None:
    words = list(entry.command)
    if option not in words or words.index(option) + 1 >= len(words):
        return None
    return config.folder / words[words.index(option) + 1]


def _inherited(entry: TenantEntry, environ: Mapping[str, str]) -> Mapping[str, str]:
    return environ if entry.control == "command" else {}


def _strings(value: object) -> list[str]:
    return [str(one) for one in cast("list[object]", value)] if isinstance(value, list) else []
