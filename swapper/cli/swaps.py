"""`swapper swaps [ID]`: which swaps ran, and one of them step by step on a time axis."""

from __future__ import annotations

from datetime import datetime

import click

from swapper.cli.common import Json, Server, ago, console, print_json, server_options, size
from swapper.cli.telling import moves, talks, took

_WIDTH = 40


@click.command(epilog="Example: swapper swaps sw_01J...")
@click.argument("swap_id", metavar="[ID]", required=False)
@click.option("--card", help="Only swaps of this card.")
@click.option("--limit", type=click.IntRange(1, 1000), default=20, show_default=True, help="So many at most.")
@server_options
def swaps(server: Server, as_json: bool, swap_id: str | None, card: str | None, limit: int) -> None:
    """Swaps, the newest first; with an ID its steps and conversations."""
    if swap_id is not None:
        found = server.call(lambda client: client.swap(swap_id))
        return print_json(found) if as_json else _one(found)
    items = server.call(lambda client: client.swaps(limit=limit, card=card))
    if as_json:
        return print_json({"items": items, "next_cursor": None})
    return _many(items)


def _many(items: list[Json]) -> None:
    if not items:
        return click.echo("no swaps yet")
    from rich.table import Table

    table = Table(box=None)
    for name in ("id", "age"):
        table.add_column(name, no_wrap=True)
    for name in ("card", "who", "outcome"):
        table.add_column(name)
    table.add_column("took", justify="right", no_wrap=True)
    for name in ("conversations", "cause"):
        table.add_column(name)
    for item in items:
        taken = "" if item["overhead_ms"] is None else took(item["overhead_ms"])
        outcome = item["outcome"] or f"running: {item['stage']}"
        when, carried = ago(item["started_at"]), talks(item["conversations"])
        table.add_row(item["id"], when, item["card"], moves(item), outcome, taken, carried, item["cause"])
    return console().print(table)


def swap_line(swap: Json) -> str:
    """Card, outcome, time and cause of a swap, without its id."""
    outcome = swap["outcome"] or (f"running: {swap['stage']}" if swap["stage"] else "queued")
    total = "" if swap["overhead_ms"] is None else f" in {took(swap['overhead_ms'])}"
    return f"{swap['card']}: {outcome}{total}; cause: {swap['cause']}"


def _one(swap: Json) -> None:
    from rich.table import Table

    out = console()
    out.print(f"{swap['id']} on {swap_line(swap)}", soft_wrap=True)
    out.print(f"  {moves(swap)}; began {datetime.fromisoformat(swap['started_at']).astimezone():%Y-%m-%d %H:%M:%S}")
    if why := swap["reason"] or swap["explain"]:
        out.print(f"  {why}", soft_wrap=True)
    start, span = _axis(swap)
    table = Table("step", "tenant", box=None)
    table.add_column("took", justify="right", no_wrap=True)
    table.add_column("server's own", justify="right")
    table.add_column("when", no_wrap=True, min_width=_WIDTH)
    table.add_column("outcome")
    for step in swap["steps"]:
        taken = step["ms"]
        backend = step["backend_ms"]
        offset = _ms(step["started_at"]) - start
        said = step["outcome"] + (f": {step['detail']}" if step["detail"] else "")
        table.add_row(
            step["step"],
            step["tenant"] or "",
            "" if taken is None else took(taken),
            "" if backend is None else took(round(backend)),
            _bar(offset, span - offset if taken is None else taken, span),
            said,
        )
    out.print(table)
    _conversations(swap)


def _conversations(swap: Json) -> None:
    if not swap["conversations"]:
        return
    from rich.table import Table

    table = Table("conversation of", box=None)
    for name in ("slot", "tokens", "size", "saved", "restored", "reused"):
        table.add_column(name, justify="right")
    table.add_column("result")
    for talk in swap["conversations"]:
        result = ": ".join(said for said in (talk["result"], talk["reason"]) if said)
        slot = str(talk["slot"]) if talk["slot"] >= 0 else ""  # on disk it is in none
        figures = (slot, f"{talk['tokens']:,}", size(talk["bytes"]))
        marks = ("yes" if talk["saved"] else "no", "yes" if talk["restored"] else "no")
        reused = "" if talk["cache_n"] is None else f"{talk['cache_n']:,}"
        table.add_row(talk["model"], *figures, *marks, reused, result)
    console().print(table)


def _axis(swap: Json) -> tuple[float, float]:
    """Start of the swap and its length so far, in ms."""
    start = _ms(swap["started_at"])
    ends = [_ms(step["started_at"]) + (step["ms"] or 0) for step in swap["steps"]]
    if swap["ended_at"] is not None:
        ends.append(_ms(swap["ended_at"]))
    return start, max(max(ends, default=start) - start, 1.0)


def _bar(offset: float, taken: float, span: float) -> str:
    begin = min(_WIDTH - 1, max(0, int(offset / span * _WIDTH)))
    length = max(1, min(_WIDTH - begin, round(taken / span * _WIDTH)))
    return " " * begin + "━" * length


def _ms(text: str) -> float:
    return datetime.fromisoformat(text).timestamp() * 1000
