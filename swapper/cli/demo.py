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

TTL_S = 30


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
        grace_s = on.config.policy.grace_ms // 1000
        for line in what_to_try(server.url, on.router, grace_s=grace_s):
            told.print(line, soft_wrap=True, markup=False)
        told.print(f"Ctrl-C, or kill {os.getpid()}, ends both servers and removes {on.folder}.", soft_wrap=True)
        await asyncio.Event().wait()


def what_to_try(url: str, router: str, *, grace_s: int) -> tuple[str, ...]:
    """The lines for who wants to go on by hand. `grace_s`: how long a card waits for a holder that nobody sees."""
    chat = json.dumps({"model": MODEL, "max_tokens": 16, "messages": [{"role": "user", "content": "hello"}]})
    lease = json.dumps({"card": CARD, "label": "by hand", "ttl_s": TTL_S})
    content = "-H 'Content-Type: application/json'"
    return (
        f"swapper at {url}, llama-server at {router}. Try:",
        f"  curl -s {url}/api/status",
        f"  curl -s {url}/v1/chat/completions {content} -d '{chat}'",
        f"  curl -s '{url}/api/leases?wait=30' {content} -d '{lease}'",
        "The chat is a third conversation, and the model has two slots: it takes the one used least recently.",
        f"The last takes the card. It expires after {TTL_S} s without a heartbeat; {grace_s} s later the model comes",
        "back, as nobody sees whether the holder has ended. To give it back at once, with the id and token it got:",
        f"  curl -s -X DELETE '{url}/api/leases/ID?token=TOKEN'",
    )
