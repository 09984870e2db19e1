"""`swapper serve`: coordinator, API, gateway and this host's agent in one process, until SIGTERM or Ctrl-C."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
from collections.abc import Coroutine
from pathlib import Path

import click
import structlog

from swapper.app import running
from swapper.cli.check import examine
from swapper.config import Config, load
from swapper.log import setup as setup_logging

log = structlog.get_logger(__name__)


@click.command(epilog="Example: swapper serve -c swapper.yaml")
@click.option("-c", "--config", "path", type=click.Path(path_type=Path), help="The configuration file.")
def serve(path: Path | None) -> None:
    """Run the scheduler: HTTP lease API, model-by-name gateway and the agent of this host.

    SIGTERM and Ctrl-C stop it; the residents and the servers it started stay as they are. When a part of it fails it
    stops in the same way, with exit status 1.
    """
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
        log.info("serving", url=server.url, state_dir=str(config.state_dir), cards=list(server.spec.cards))
        for one in await examine(config, os.environ):
            (log.error if one.error else log.warning)("check", finding=one.text)
        gc.collect()
        gc.freeze()  # what start-up made lives as long as we do: a collection in mid-swap (20 ms) need not walk it
        await stop.wait()
        log.info("stopping; residents stay as they are")
