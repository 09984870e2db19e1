"""`swapper snapshots ...`: which conversations are saved, what is known of each, deleting them, proving them."""

from __future__ import annotations

import sys

import click

from swapper.cli.common import Duration, Json, Server, ago, console, print_json, server_options, size
from swapper.errors import SwapperError

_SAVED = ("model", "conversation", "slot", "strategy", "build", "digest")


@click.group(epilog="Example: swapper snapshots list")
def snapshots() -> None:
    """Saved conversations: look at them, delete them, prove that they come back."""


@snapshots.command("list", epilog="Example: swapper snapshots list qwen3.6-27b")
@click.argument("model", required=False)
@click.option("--limit", type=click.IntRange(1, 1000), default=50, show_default=True, help="So many at most.")
@click.option("--all", "every", is_flag=True, help="Also the older copies of each conversation.")
@server_options
def list_(server: Server, as_json: bool, model: str | None, limit: int, every: bool) -> None:
    """Saved conversations (of a model), the last used first, each by its newest snapshot.

    What could not be restored now says why. Where its model does not run only the file was looked at, and build and
    settings are compared when it is loaded.
    """
    page = server.call(lambda client: client.snapshots(model=model, limit=limit, newest=None if every else 1))
    if as_json:
        return print_json(page)
    if not page["items"]:
        return click.echo("nothing is saved" if model is None else f"nothing is saved of {model}")
    from rich.table import Table

    table = Table("snapshot", "model", box=None)
    for heading in ("tokens", "size", "saved", "used"):
        table.add_column(heading, justify="right", no_wrap=True)
    for heading in ("strategy", "restorable"):
        table.add_column(heading)
    for item in page["items"]:
        figures = (f"{item['tokens']:,}", size(item["bytes"]), ago(item["saved_at"]), ago(item["used_at"]))
        table.add_row(item["id"], item["model"], *figures, item["strategy"], _told(item))
    console().print(table)
    if page["next_cursor"] is not None:
        click.echo(f"and more: --limit {limit} was reached", err=True)
    return None


def _restorable(item: Json) -> str:
    if item["refused"]:
        return f"no: {item['refused']}"
    return "yes" if item["compared"] else "yes, as far as its file tells: the model does not run"


def _told(item: Json) -> str:
    """Whether it could be restored, and whether anybody would rather have another one."""
    return _restorable(item) + (f"; an older copy of {item['newer']}" if item["newer"] else "")


@snapshots.command(epilog="Example: swapper snapshots show llama_qwen3.6-27b.1883206385664001.0.kv")
@click.argument("snapshot", metavar="SNAPSHOT")
@server_options
def show(server: Server, as_json: bool, snapshot: str) -> None:
    """All that is known of one: what was saved, when, under which model, build and settings."""
    found = server.call(lambda client: client.snapshot(snapshot))
    if as_json:
        return print_json(found)
    out = console()
    out.print(f"{found['id']}: {found['tokens']:,} tokens, {size(found['bytes'])}", soft_wrap=True)
    out.print(f"  restorable: {_told(found)}", soft_wrap=True)
    for name in ("saved", "used", "restored"):
        moment = found[f"{name}_at"]
        out.print(f"  {name}: {moment} ({ago(moment)} ago)" if moment else f"  {name}: never, or nobody knows")
    for name in _SAVED:
        out.print(f"  {name}: {found[name] if found[name] is not None else 'not known'}", soft_wrap=True)
    out.print("  saved under:")
    for name, value in found["fingerprint"].items():
        if value not in (None, [], ""):
            out.print(f"    {name}: {_plain(value)}", soft_wrap=True)
    return None


def _plain(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {one}" for name, one in value.items() if one is not None)  # pyright: ignore[reportUnknownVariableType]
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)  # pyright: ignore[reportUnknownArgumentType]


@snapshots.command(epilog="Example: swapper snapshots prune")
@server_options
def prune(server: Server, as_json: bool) -> None:
    """Apply `keep` and `budget` of the configuration now, and say what went and why.

    It happens by itself after every release. What may be the only copy of a conversation goes by age alone.
    """
    found = server.call(lambda client: client.prune_snapshots())
    if as_json:
        return print_json(found)
    for item in found["items"]:
        click.echo(f"{item['id']} ({size(item['bytes'])}): {item['why']}")
    return click.echo(_freed(found) if found["items"] else "nothing had to go")


@snapshots.command(epilog="Example: swapper snapshots purge qwen3.6-27b --yes")
@click.argument("model", required=False)
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option(
    "--force", is_flag=True, help="Also those that are needed: by a swap, or by a model that is to come back."
)
@server_options
def purge(server: Server, as_json: bool, model: str | None, yes: bool, force: bool) -> None:
    """Delete all saved conversations (of a model), and the requests kept of them. What is in the server stays there."""
    if not yes:
        _ask(server, model)
    found = server.call(lambda client: client.purge_snapshots(model, force=force))
    if as_json:
        return print_json(found)
    for item in found["kept"]:
        click.echo(f"{item['id']} stays: {item['why']} (--force deletes it)", err=True)
    return click.echo(_freed(found) if found["items"] else "nothing was deleted")


def _ask(server: Server, model: str | None) -> None:
    """Raises SwapperError where nobody can be asked, click.Abort where the answer is no."""
    if not on_a_terminal():
        raise SwapperError("purge deletes conversations for good and nobody can be asked here: say --yes")
    page = server.call(lambda client: client.snapshots(model=model, limit=1000))
    found = page["items"]
    more = "at least " if page["next_cursor"] is not None else ""
    of = "" if model is None else f" of {model}"
    total = size(sum(item["bytes"] for item in found))
    click.confirm(f"Delete {more}{_count(len(found))}{of} ({total}) for good?", abort=True, err=True)


@snapshots.command(epilog="Example: swapper snapshots test qwen3.6-27b")
@click.argument("model")
@click.option("--wait", type=Duration(), help="Give up after this long without the card, with exit status 75.")
@click.option(
    "--tokens", type=click.IntRange(200, 100_000), default=3000, show_default=True,
    help="So long a conversation, if half of a slot has room for it.",
)  # fmt: skip
@server_options
def test(server: Server, as_json: bool, model: str, wait: float | None, tokens: int) -> None:
    """Prove on your own server and build that a model's conversations come back.

    What it costs: the whole card until it is done, while calls to the models on it wait: up to five loads of the model,
    and three to six readings of a conversation of --tokens. It is for models of a llama-server, with a router or
    without, that may leave their card (not evict: never).

    Takes the card by a lease (conversations are saved for it and come back afterwards), then saves a conversation of
    its own, unloads, loads, restores and goes on, by each strategy. Inside a window's or a run's lease it uses that
    one. Exit status 0 only if the strategy in use came back warm. It has to run where the configuration and the
    server's slot folder are; for a server without a router where serve runs, as serve's user.
    """
    from swapper.cli.proving import prove

    raise SystemExit(prove(server, model, wait_s=wait, tokens=tokens, as_json=as_json))


def on_a_terminal() -> bool:
    """Whether somebody can be asked."""
    return sys.stdin.isatty()


def _count(number: int) -> str:
    return "1 saved conversation" if number == 1 else f"{number} saved conversations"


def _freed(found: Json) -> str:
    return f"{_count(len(found['items']))} deleted, {size(found['bytes'])} freed"
