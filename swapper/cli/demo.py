"""`swapper demo`: the real product on a real llama-server with a tiny model, without GPU or configuration."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import time
from typing import Any

import click
from rich.console import Console

from swapper.demo.show import play
from swapper.demo.stage import CARD, MODEL, Stage, stage
from swapper.demo.table import as_json, show
from swapper.log import setup as setup_logging


@click.command(epilog="Example: swapper demo --json")
@click.option("--keep", is_flag=True, help="Keep everything running afterwards, until Ctrl-C.")
@click.option("--json", "json_", is_flag=True, help="Print one JSON object instead of tables.")
def demo(keep: bool, json_: bool) -> None:
    """Show a card changing hands: two conversations, a media job takes the card, both come back.

    Nothing of yours is touched: it runs on the processor, in a temporary folder, on ports of its own. Exit status 0
    only if every conversation came back warm.
    """
    setup_logging(level=logging.WARNING)
    raise SystemExit(asyncio.run(_until_told(_demo(keep=keep, json_=json_))))


async def _until_told(work: Any) -> int:  # noqa: ANN401
    """Run to the end, or until SIGTERM or Ctrl-C: then everything is taken down all the same."""
    task: asyncio.Task[int] = asyncio.ensure_future(work)
    loop = asyncio.get_running_loop()
    told: list[signal.Signals] = []

    def stop(number: signal.Signals) -> None:
        if not told:  # a second Ctrl-C must not cut short the taking down that the first began
            task.cancel()
        told.append(number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        loop.add_signal_handler(number, stop, number)
    try:
        return await task
    except asyncio.CancelledError:
        return 128 + told[0]


async def _demo(*, keep: bool, json_: bool) -> int:
    console, told = Console(), Console(stderr=True, highlight=False)
    begun = time.perf_counter()

    def say(text: str) -> None:
        told.print(f"{time.perf_counter() - begun:5.1f} s  {text}", markup=False, soft_wrap=True)

    async with stage(say) as on:
        outcome = await play(on, say)
        result = as_json(outcome, version=on.llama.version, seconds=time.perf_counter() - begun)
        if json_:
            click.echo(json.dumps(result))
        else:
            show(console, result)
        if keep:
            with contextlib.suppress(asyncio.CancelledError):  # Ctrl-C is how it is meant to end
                await _keep(on, told)
    return 0 if outcome.ok else 1


async def _keep(on: Stage, told: Console) -> None:
    async with on.swapper() as server:
        chat = json.dumps({"model": MODEL, "max_tokens": 16, "messages": [{"role": "user", "content": "hello"}]})
        lease = json.dumps({"card": CARD, "label": "by hand", "ttl_s": 30})
        content = "-H 'Content-Type: application/json'"
        for line in (
            f"swapper at {server.url}, llama-server at {on.router}. Try:",
            f"  curl -s {server.url}/api/status",
            f"  curl -s {server.url}/v1/chat/completions {content} -d '{chat}'",
            f"  curl -s '{server.url}/api/leases?wait=30' {content} -d '{lease}'",
            "The last one takes the card for 30 s. Give it back earlier with the id and the token of its answer:",
            f"  curl -s -X DELETE '{server.url}/api/leases/ID?token=TOKEN'",
            f"Ctrl-C, or kill {os.getpid()}, ends both servers and removes {on.folder}.",
        ):
            told.print(line, soft_wrap=True, markup=False)
        await asyncio.Event().wait()
