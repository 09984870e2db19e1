"""What the commands share: which server, with which key, durations, and how things are printed.

Invariant: a key that the configuration holds is only ever sent to the address the configuration gives. Standard
output carries the answer, standard error everything said beside it.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from swapper.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from swapper.client import SwapperClient
    from swapper.config import Config

    _Param = click.ParamType[float]
else:
    _Param = click.ParamType

Json = dict[str, Any]
_T = TypeVar("_T")
_Command = TypeVar("_Command", bound=Callable[..., Any])
DEFAULT_URL = "http://127.0.0.1:9292"
SEARCHED = "without it the first of ./swapper.yaml, ~/.config/swapper/swapper.yaml and /etc/swapper/swapper.yaml"
"""What `swapper.config.load.SEARCH` says, for helps: importing it from there would cost each of them pydantic."""


@dataclass(frozen=True, slots=True)
class Server:
    """Where swapper is, as far as the command line and the environment say it."""

    url: str | None
    key: str | None
    config: Path | None

    def resolve(self) -> tuple[str, str | None]:
        """Address and key: --url and --key, SWAPPER_URL and SWAPPER_KEY, else the configuration's.

        Raises ConfigError.
        """
        if self.url is not None:
            return self.url, self.key
        from swapper.config.load import PREFIX, WHERE, find, load

        named = self.config is not None or find(os.environ) is not None
        if not named and not any(name.startswith(PREFIX) for name in os.environ):
            return DEFAULT_URL, self.key
        config = load(self.config, os.environ, judge=False, only=WHERE)
        return _address(config), self.key or _own_key(config)

    def call(self, work: Callable[[SwapperClient], Awaitable[_T]]) -> _T:
        """Run `work` with a client of that server."""
        from swapper.client import SwapperClient

        url, key = self.resolve()

        async def connected() -> _T:
            async with SwapperClient(url, key) as client:
                return await work(client)

        return asyncio.run(connected())


def _address(config: Config) -> str:
    host, port = config.listen
    if port == 0:
        raise ConfigError(["listen: the port is left to the system; say where swapper is with --url"])
    host = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _own_key(config: Config) -> str | None:
    """The key with the most rights of those the configuration has and whose secrets can be had here.

    Raises ConfigError where there are keys, and none of them can.
    """
    by_rights = sorted(config.keys, key=lambda key: ("admin" in key.scopes, len(key.scopes)), reverse=True)
    named = [str(entry.key_env or entry.key_file) for entry in config.document.auth.keys]
    if named and not by_rights:
        raise ConfigError([f"a key is needed: give one with --key or SWAPPER_KEY, or set {' or '.join(named)}"])
    return by_rights[0].secret if by_rights else None


def server_options(command: _Command) -> _Command:
    """Adds --url, --key, -c and --json; the command gets `server: Server` and `as_json: bool`."""

    def pack(context: click.Context, _parameter: click.Parameter, value: Path | None) -> Path | None:
        given = context.params
        context.params["server"] = Server(given.pop("url", None), given.pop("key", None), value)
        return value

    options = [
        click.option(
            "--url", envvar="SWAPPER_URL", is_eager=True, show_envvar=True,
            help=f"Where swapper is; without it the configuration's listen, else {DEFAULT_URL}.",
        ),
        click.option(
            "--key", envvar="SWAPPER_KEY", is_eager=True, show_envvar=True,
            help="API key; without it, and without --url, the configuration's with the most rights.",
        ),
        click.option(
            "-c", "--config", "_config", type=click.Path(path_type=Path), callback=pack, expose_value=False,
            help=f"Configuration to take address and key from; {SEARCHED}.",
        ),
        click.option("--json", "as_json", is_flag=True, help="Print JSON."),
    ]  # fmt: skip
    for option in reversed(options):
        command = option(command)
    return command


class Duration(_Param):
    """`30s`, `10m`, `2h` -> seconds; a bare number is seconds, as `timeout` and `sleep` take it."""

    name = "duration"

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        """What stands in the help: the units, instead of a word that tells nothing of them."""
        del param, ctx
        return "10s|5m|2h"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:  # noqa: ANN401
        """Seconds as float; a wrong text is a usage error that says what to write."""
        if isinstance(value, int | float):
            return float(value)
        from swapper.config.units import duration_ms

        text = str(value).strip()
        try:
            return duration_ms(f"{text}s" if re.fullmatch(r"[0-9]+(\.[0-9]+)?", text) else text) / 1000
        except ValueError as error:
            self.fail(str(error), param, ctx)


def print_json(value: object) -> None:
    """JSON on standard output."""
    click.echo(json.dumps(value, indent=2, ensure_ascii=False))


def console() -> Console:
    """Standard output for people: colours on a terminal only, no markup in what the server says, no cut cells."""
    from rich.console import Console

    made = Console(markup=False, highlight=False, emoji=False)
    return made if made.is_terminal else Console(markup=False, highlight=False, emoji=False, width=200)


def mib(value: object) -> str:
    """MiB for people: `19.5 GiB`, `512 MiB`, `?` when unknown."""
    if not isinstance(value, int):
        return "?"
    return f"{value / 1024:.4g} GiB" if value >= 1024 else f"{value} MiB"


def size(count: int) -> str:
    """Bytes for people: `262 MiB`."""
    from swapper.config.units import show_bytes

    return show_bytes(count)


def ago(moment: str | None, now: datetime | None = None) -> str:
    """How long before now an RFC 3339 time was: `3 min`; nothing for none."""
    if moment is None:
        return ""
    gone = max(((now or datetime.now(UTC)) - datetime.fromisoformat(moment)).total_seconds(), 0.0)
    for limit, seconds, unit in ((120, 1, "s"), (7_200, 60, "min"), (172_800, 3_600, "h")):
        if gone < limit:
            return f"{gone // seconds:.0f} {unit}"
    return f"{gone // 86_400:.0f} d"


def out_of_time(lease: Mapping[str, Any]) -> bool:
    """True for a lease that was not granted because the time was over: it still waits, or its deadline passed."""
    return lease["state"] in ("queued", "preparing") or (lease["state"] == "expired" and lease["granted_at"] is None)


def lease_line(lease: Mapping[str, Any]) -> str:
    """One lease in one line."""
    size = "whole card" if lease["vram_mib"] is None else mib(lease["vram_mib"])
    label = f" {lease['label']!r}" if lease["label"] else ""
    holder = lease["holder"]
    if holder and not holder.startswith("process:"):
        label += f" for {holder}"
    return f"{lease['id']} {lease['state']} on {lease['card'] or 'any card'} ({size}, {lease['owner']}){label}"
