"""`swapper serve`: coordinator, API, gateway and this host's agent in one process, until SIGTERM or Ctrl-C."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
from collections.abc import Coroutine, Sequence
from pathlib import Path

import click
import structlog

from swapper import __version__
from swapper.app import Running, running
from swapper.cli.arrival import Arrivals, observed, watch
from swapper.cli.check import examine
from swapper.cli.common import SEARCHED
from swapper.cli.first import stand_first
from swapper.config import Config, load
from swapper.core.spec import Spec
from swapper.heap import keep_freed
from swapper.log import setup as setup_logging

log = structlog.get_logger(__name__)

_NAMED = 5
"""So many cards or tenants are named in the line for people; of more it says how many."""


@click.command(epilog="Example: swapper serve -c swapper.yaml")
@click.option("-c", "--config", "path", type=click.Path(path_type=Path), help=f"The configuration file; {SEARCHED}.")
def serve(path: Path | None) -> None:
    """Run the scheduler: HTTP lease API, model-by-name gateway and the agent of this host.

    SIGTERM and Ctrl-C stop it; the residents and the servers it started stay as they are. When a part of it fails it
    stops in the same way, with exit status 1.
    """
    stand_first()
    keep_freed()
    setup_logging()
    config = load(path, os.environ)
    _run(_serve(config))


def _run(work: Coroutine[None, None, None]) -> None:
    """On uvloop where it is installed (extra `speed`): the store's and the servers' answers are then read faster."""
    try:
        import uvloop
    except ImportError:
        asyncio.run(work)
    else:
        uvloop.run(work)


async def _serve(config: Config) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    loop.add_signal_handler(signal.SIGHUP, log.warning, "SIGHUP: this version reads its configuration at start only")
    async with running(config) as server, server.unless_failed():
        arrivals = Arrivals(server.spec)
        await observed(server.spec, server.coordinator.seen)
        arrivals.look(await server.store.read(), server.coordinator.seen.states)
        _greet(config, server, arrivals.absent)
        watching = asyncio.create_task(watch(arrivals, server.store, server.coordinator.seen, _say), name="arrivals")
        try:
            for one in await examine(config, os.environ):
                (log.error if one.error else log.warning)("check", finding=one.text)
            gc.collect()
            gc.freeze()  # what start-up made lives as long as we do: a collection in mid-swap (20 ms) need not walk it
            await stop.wait()
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
        log.info("stopping; residents stay as they are")


def _greet(config: Config, server: Running, absent: Sequence[str]) -> None:
    """That it serves, and what: one line to a person at a terminal, else one record of the log."""
    spec = server.spec
    if sys.stderr.isatty():
        return click.echo(greeting(server.url, spec, absent, with_key=bool(config.keys)), err=True)
    cards, tenants = list(spec.cards), list(spec.tenants)
    facts = {"state_dir": str(config.state_dir), "cards": cards, "tenants": tenants, "not_loaded_yet": list(absent)}
    return log.info("serving", url=server.url, **facts)


def _say(text: str) -> None:
    if sys.stderr.isatty():
        return click.echo(text, err=True)
    return log.info(text)


def greeting(url: str, spec: Spec, absent: Sequence[str], *, with_key: bool) -> str:
    """The line for people: address, cards, tenants, which of those loaded at start are `absent` yet, what to try."""
    key = "-H 'Authorization: Bearer KEY' " if with_key else ""
    state = f"not loaded yet: {', '.join(absent)} (calls for it wait)" if absent else "ready"
    return (
        f"swapper {__version__} serves at {url}: {_some('card', list(spec.cards))}, "
        f"{_some('tenant', list(spec.tenants))}; {state}; try: curl -s {key}{url}/api/status "
        "(Ctrl-C ends it, loaded models stay)"
    )


def _some(what: str, names: Sequence[str]) -> str:
    if not names:
        return f"no {what}s"
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"{what}{'s' if len(names) > 1 else ''} {', '.join(names[:_NAMED])}{more}"
