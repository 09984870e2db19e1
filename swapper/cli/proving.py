"""`swapper snapshots test MODEL`: the card borrowed, the trial run, and what it came to.

Invariant: however it ends, the model is unloaded again, our files are gone, swapper has seen it leave and the lease is
given back, in this order.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import click

from swapper.cli import FAILED, OUT_OF_TIME
from swapper.cli.borrowed import OutOfTime, borrowed
from swapper.cli.common import Json, Server, console, print_json, size
from swapper.cli.reload import ByControl, ByRouter, Reload
from swapper.cli.trial import Found, Report, Trial
from swapper.client import SwapperClient
from swapper.config import Config, load
from swapper.core.conversations import Strategy
from swapper.errors import ApiError, ConfigError
from swapper.gateway.context import Target

KINDS = ("llama-router", "llama-server")
_NOTICED_S, _POLL_S = 10.0, 0.1
_THERE = ("loading", "loaded", "sleeping", "unreachable")
_RIGHTS = "the configuration of the serve that has it is needed here: give it with -c"


@dataclass(frozen=True, slots=True)
class _Subject:
    """What is tried: a tenant, the card it lives on, where its server is, and how it is unloaded and loaded."""

    tenant: str
    card: str
    target: Target
    slot_dir: Path | None
    reload: Reload


def prove(server: Server, model: str, *, wait_s: float | None, tokens: int, as_json: bool) -> int:
    """The exit status. Raises ConfigError, SwapperError."""
    subject = _subject(load(server.config, os.environ, judge=False), model)
    url, key = server.resolve()
    say = _say
    nonce = secrets.token_hex(4)
    trial = Trial(subject.target, subject.slot_dir, subject.reload, tokens=tokens, nonce=nonce, say=say)

    async def work() -> tuple[Report, Strategy | None]:
        _end_by_term()
        async with SwapperClient(url, key) as client:
            label = f"snapshots test {model}"
            async with borrowed(client, subject.card, label, wait_s=wait_s, say=say):
                in_use = _in_use(await client.status(), subject.tenant)
                try:
                    return await trial.run(), in_use
                finally:
                    await asyncio.shield(_noticed(client, subject.tenant))

    try:
        report, in_use = asyncio.run(work())
    except OutOfTime as error:
        _say(str(error))
        return OUT_OF_TIME
    except asyncio.CancelledError:
        _say("ended by a signal; the model is unloaded and the card given back")
        return 128 + signal.SIGTERM
    ok = proved(report, in_use)
    if as_json:
        print_json(_json(subject, report, in_use, ok=ok))
    else:
        _tell(subject, report, in_use)
    return 0 if ok else FAILED


def _end_by_term() -> None:
    """TERM, as a window's end or cron sends it, ends the work as Ctrl-C does."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)


def _subject(config: Config, model: str) -> _Subject:
    """Raises ConfigError where the model is unknown, or cannot be tried, or not from here."""
    tenant = config.models().get(model, model)
    if tenant not in config.served():
        known = ", ".join(config.models()) or "none"
        raise ConfigError([f"{model!r} is no model of {config.path or 'this configuration'} ({known}); {_RIGHTS}"])
    name, one = config.served()[tenant]
    entry = config.tenants[name]
    if entry.kind not in KINDS or entry.url is None:
        said = f"kind {entry.kind} keeps no conversations that could be tested" if entry.url else "needs url"
        raise ConfigError([f"tenants.{name}: {said}; try a model of kind {' or '.join(KINDS)}"])
    if entry.evict == "never":
        said = "evict: never keeps it on its card, also beside a lease, and the test has to unload it"
        raise ConfigError([f"tenants.{name}: {said}: remove that, and test again"])
    key = os.environ.get(entry.api_key_env) if entry.api_key_env else None
    target = Target(tenant, entry.url, one.name, key, router=entry.kind == "llama-router")
    reload = ByRouter(target) if target.router else ByControl(name, entry, config)
    return _Subject(tenant, entry.card, target, entry.slot_dir, reload)


async def _noticed(client: SwapperClient, tenant: str) -> None:
    """Until swapper has seen the model leave: once the lease is over it takes one that it saw loaded for a resident."""
    with suppress(ApiError, TimeoutError):
        async with asyncio.timeout(_NOTICED_S):
            while True:
                states = (one["state"] for one in (await client.status())["tenants"] if one["id"] == tenant)
                if next(states, None) not in _THERE:
                    return
                await asyncio.sleep(_POLL_S)


def _in_use(status: Json, tenant: str) -> Strategy | None:
    """The strategy swapper uses for it, None while it has not found out."""
    found = (one["strategy"] for one in status["tenants"] if one["id"] == tenant)
    name = next(found, None)
    return None if name is None else Strategy(name)


def proved(report: Report, in_use: Strategy | None) -> bool:
    """Whether what is in use came back warm; where that is not known yet, whether anything did."""
    warm = {found.strategy for found in report.found if found.result == "warm"}
    return bool(warm) if in_use is None else in_use in warm


def _tell(subject: _Subject, report: Report, in_use: Strategy | None) -> None:
    from rich.table import Table

    out = console()
    out.print(f"{subject.tenant} on llama-server {report.build}, {report.prompt:,} prompt tokens", soft_wrap=True)
    table = Table("strategy", box=None)
    for heading in ("tokens", "size", "saved ms", "restored ms", "cache_n", "first token ms", "read anew ms"):
        table.add_column(heading, justify="right")
    table.add_column("result")
    for found in report.found:
        table.add_row(*_cells(found, report.reread_ttft_ms, used=found.strategy == in_use))
    out.print(table)
    out.print(verdict(report, in_use), soft_wrap=True)


def _cells(found: Found, reread_ms: float, *, used: bool) -> tuple[str, ...]:
    times = ("" if ms is None else f"{ms:.1f}" for ms in (found.save_ms, found.restore_ms))
    cached = "" if found.cache_n is None else f"{found.cache_n:,}"
    first = ("", "") if found.ttft_ms is None else (f"{found.ttft_ms:.1f}", f"{reread_ms:.1f}")
    tokens = f"{found.tokens:,}" if found.tokens else ""
    name = f"{found.strategy} (in use)" if used else str(found.strategy)
    result = found.result + (f": {found.reason}" if found.reason else "")
    return (name, tokens, size(found.bytes) if found.bytes else "", *times, cached, *first, result)


def verdict(report: Report, in_use: Strategy | None) -> str:
    """One sentence."""
    warm = ", ".join(str(found.strategy) for found in report.found if found.result == "warm") or "none"
    if in_use is None:
        return f"warm: {warm}; swapper has not found out yet which one it uses: it does when it loads the model"
    if in_use is Strategy.OFF:
        return f"its conversations are not kept (strategy off); warm would be: {warm}"
    return f"{in_use}, which is in use, came back {'warm' if proved(report, in_use) else 'cold'}; warm: {warm}"


def _json(subject: _Subject, report: Report, in_use: Strategy | None, *, ok: bool) -> Json:
    return {
        "ok": ok,
        "model": subject.tenant,
        "strategy": in_use,
        "llama_server": {"version": report.build},
        "prompt_tokens": report.prompt,
        "reread_ttft_ms": report.reread_ttft_ms,
        "strategies": [asdict(found) for found in report.found],
    }


def _say(text: str) -> None:
    click.echo(f"swapper snapshots test: {text}", err=True)
