"""`swapper job ...`: recipes of the configuration, run under a lease by swapper itself."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING

import click

from swapper.cli import FAILED, OUT_OF_TIME
from swapper.cli.common import Duration, Json, Server, ago, console, print_json, server_options

if TYPE_CHECKING:
    from swapper.client import SwapperClient

_CLASSES = ("interactive", "normal", "batch", "maintenance")
_STATES = ("queued", "running", "done", "failed", "cancelled")
_OVER = frozenset({"done", "failed", "cancelled"})
_LOOK_S = 1.0


@click.group(epilog="Example: swapper job submit encode input=/srv/media/a.mkv output=/srv/media/b.mkv --wait 2h")
def job() -> None:
    """Recipes under a lease: submit them, look at them, read what they say, end them."""


@job.command(epilog="Example: swapper job submit encode input=/srv/media/a.mkv output=/srv/media/b.mkv --wait 2h")
@click.argument("recipe")
@click.argument("params", nargs=-1, metavar="[NAME=VALUE]...")
@click.option("--class", "klass", type=click.Choice(_CLASSES), help="How urgent it is; normal where the key may.")
@click.option(
    "--wait",
    type=Duration(),
    help="Wait this long for its end, showing how far it is; exit status 75 when it did not come (the job goes on), 1 "
    "when it failed or was cancelled.",
)
@server_options
def submit(
    server: Server, as_json: bool, recipe: str, params: tuple[str, ...], klass: str | None, wait: float | None
) -> None:
    """Queue a recipe: it waits for its lease, runs on the card's host and ends by itself."""
    given = dict(_pair(param) for param in params)
    body = {"recipe": recipe, "params": given, **({} if klass is None else {"class": klass})}

    async def ask(client: SwapperClient) -> Json:
        asked = await client.submit_job(body)
        return asked if wait is None else await _over(client, asked, wait)

    found = server.call(ask)
    _show(found, as_json=as_json)
    if wait is not None and found["state"] != "done":
        raise SystemExit(FAILED if found["state"] in _OVER else OUT_OF_TIME)


@job.command("list", epilog="Example: swapper job list --state running")
@click.option("--state", type=click.Choice(_STATES), help="Only those in this state.")
@click.option("--recipe", help="Only those of this recipe.")
@click.option("--limit", type=click.IntRange(1, 1000), default=50, show_default=True, help="So many at most.")
@server_options
def list_(server: Server, as_json: bool, state: str | None, recipe: str | None, limit: int) -> None:
    """Jobs, the newest first."""
    page = server.call(lambda client: client.jobs(state=state, recipe=recipe, limit=limit))
    if as_json:
        return print_json(page)
    if not page["items"]:
        return click.echo("no jobs")
    from rich.table import Table

    table = Table("id", "recipe", "state", "done", "owner", "age", "why", box=None)
    for item in page["items"]:
        cells = (item["id"], item["recipe"], item["state"], _percent(item), item["owner"], ago(item["created_at"]))
        table.add_row(*cells, item["reason"] or item["explain"] or "")
    console().print(table)


@job.command(epilog="Example: swapper job show jb_01J... --wait 10m")
@click.argument("job_id", metavar="ID")
@click.option("--wait", type=Duration(), help="First wait this long for its end.")
@server_options
def show(server: Server, as_json: bool, job_id: str, wait: float | None) -> None:
    """One job: its state and why it is in it, its parameters and what it leaves."""

    async def ask(client: SwapperClient) -> Json:
        found = await client.job(job_id)
        return found if wait is None else await _over(client, found, wait)

    _show(server.call(ask), as_json=as_json)


@job.command(epilog="Example: swapper job log jb_01J... --follow")
@click.argument("job_id", metavar="ID")
@click.option("-f", "--follow", is_flag=True, help="Go on until it is over.")
@server_options
def log(server: Server, as_json: bool, job_id: str, follow: bool) -> None:
    """What it says, as it says it."""
    del as_json

    async def pass_on(client: SwapperClient) -> None:
        async for chunk in client.job_log(job_id, follow=follow):
            sys.stdout.buffer.write(chunk)
            sys.stdout.buffer.flush()

    server.call(pass_on)


@job.command(epilog="Example: swapper job cancel jb_01J...")
@click.argument("job_id", metavar="ID")
@click.option("--wait", type=Duration(), default="1m", show_default=True, help="Wait this long until it is gone.")
@server_options
def cancel(server: Server, as_json: bool, job_id: str, wait: float) -> None:
    """End a job: at once where it waits, else its process is asked to, and killed after the recipe's grace."""

    async def ask(client: SwapperClient) -> Json:
        return await _over(client, await client.cancel_job(job_id), wait)

    _show(server.call(ask), as_json=as_json)


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise click.UsageError(f"{text!r} is no parameter; write NAME=VALUE, like input=/srv/media/a.mkv")
    return name, value


async def _over(client: SwapperClient, job: Json, wait_s: float) -> Json:
    """The job once it is over, or as it is after `wait_s`; what becomes of it meanwhile is told on a terminal."""
    loop = asyncio.get_running_loop()
    deadline, told = loop.time() + wait_s, ""
    while job["state"] not in _OVER and loop.time() < deadline:
        said = f"{job['state']} {_percent(job)}".rstrip() + (f": {job['explain']}" if job["state"] == "queued" else "")
        if said != told and sys.stderr.isatty():
            click.echo(said, err=True)
        told = said
        job = await client.job(job["id"], wait_s=min(_LOOK_S, max(deadline - loop.time(), 0.0)))
    return job


def _percent(job: Json) -> str:
    return "" if job["progress"] is None else f"{job['progress']:.0%}"


def _show(found: Json, *, as_json: bool) -> None:
    if as_json:
        return print_json(found)
    click.echo(f"{found['id']} {found['recipe']} {found['state']} {_percent(found)}".rstrip())
    for name in ("reason", "explain", "lease"):
        if found[name] is not None:
            click.echo(f"  {name}: {found[name]}")
    for name, value in found["params"].items():
        click.echo(f"  {name} = {value}")
    return None
