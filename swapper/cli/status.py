"""`swapper status`: cards, who has them, who waits and why."""

from __future__ import annotations

import click

from swapper.cli.common import Json, Server, console, lease_line, mib, print_json, server_options


@click.command(epilog="Example: swapper status --json")
@server_options
def status(server: Server, as_json: bool) -> None:
    """What is on which card, and who waits for it."""
    found = server.call(lambda client: client.status())
    if as_json:
        return print_json(found)
    return _tell(found)


def _tell(found: Json) -> None:
    from rich.table import Table

    out = console()
    for problem in found["problems"]:
        click.echo(f"warning: {problem}", err=True)
    for card in found["cards"]:
        out.print(_card_line(card))
        for line in _card_notes(card):
            out.print(f"  {line}", soft_wrap=True)
        tenants = [tenant for tenant in found["tenants"] if tenant["card"] == card["name"]]
        table = Table("  tenant", "state", "needs", "gate", "kept by", "conversations", "", box=None)
        for tenant in tenants:
            table.add_row(*_tenant_cells(tenant))
        if tenants:
            out.print(table)
        for line in (note for tenant in tenants for note in _tenant_notes(tenant)):
            out.print(f"  {line}", soft_wrap=True)
    for lease in found["leases"]:
        out.print(lease_line(lease))
        out.print(f"  {lease['explain']}", soft_wrap=True)
    for demand in found["demand"]:
        if demand["waiting"]:
            calls = "call" if demand["waiting"] == 1 else "calls"
            out.print(f"{demand['waiting']} {demand['class']} {calls}: {demand['explain']}", soft_wrap=True)
    if not found["leases"]:
        out.print("no leases")


def _card_line(card: Json) -> str:
    vram = card["vram"]
    used = "" if vram["used_mib"] is None else f"{mib(vram['used_mib']) if vram['used_mib'] else 'nothing'} used of "
    return f"{card['name']}: {card['phase']}, {used}{mib(vram['total_mib'])}"


def _card_notes(card: Json) -> list[str]:
    notes: list[str] = []
    if card["fault"]:
        notes.append(f"fault: {card['fault']['reason']}")
    if card["swap"]:
        notes.append(f"swap {card['swap']['id']}: {card['swap']['cause']}")
    if card["return_to"]:
        notes.append(f"comes back afterwards: {', '.join(card['return_to'])}")
    if card["holders"]:
        notes.append(f"VRAM held by: {'; '.join(map(_holder, card['holders']))}")
    notes += [f"by hand: {errand['explain']}" for errand in card["by_hand"]]
    notes += [f"{tenant} could not be loaded: {failure['reason']}" for tenant, failure in card["failed"].items()]
    return notes


def _holder(holder: Json) -> str:
    name, pid = holder["name"], holder["pid"]
    said = name if pid is None or name == f"pid {pid}" else f"{name} (pid {pid})"
    return f"{said}, foreign" if holder["foreign"] else said


_MARKS = {"default": "default", "pinned": "pinned", "kept_off": "kept off until asked for"}


def _tenant_cells(tenant: Json) -> tuple[str, ...]:
    marks = [said for name, said in _MARKS.items() if tenant[name]]
    return (
        f"  {tenant['id']}",
        tenant["state"] or "not observed",
        _need(tenant),
        "open" if tenant["open"] else "closed",
        tenant["strategy"] or "",
        _talks(tenant),
        ", ".join(marks),
    )


def _need(tenant: Json) -> str:
    """Where it comes from is said of what nobody wrote."""
    source = tenant["need_from"]
    if source == "unknown":
        return "not known, all"
    return mib(tenant["need_mib"]) + (f" {source}" if source != "declared" else "")


_PLACES = {"server": "in the server", "disk": "on disk", "cold": "cold"}


def _talks(tenant: Json) -> str:
    """Where its conversations are, as far as the gateway knows; else what the last swap carried."""
    known = ", ".join(f"{tenant['places'][place]} {said}" for place, said in _PLACES.items() if tenant["places"][place])
    carried = tenant["conversations"]
    if known or not carried:
        return known
    return f"{len(carried)} ({sum(talk['tokens'] for talk in carried)} tokens) in the last swap"


def _tenant_notes(tenant: Json) -> list[str]:
    """What is to be said of it beyond its line in the table."""
    notes = [f"{tenant['id']}: {why}" for why in tenant["demoted"].values()]
    if (costs := tenant["costs"]) and costs["note"]:
        notes.append(f"{tenant['id']}: {costs['note']}")
    cost = tenant["prompt_tokens"]
    again = ", ".join(f"{tokens:,} {why}" for why, tokens in cost["reread"].items())
    if again:
        total = cost["cached"] + cost["processed"]
        notes.append(f"{tenant['id']}: of {total:,} prompt tokens were read again: {again}")
    if tenant["advice"]:
        notes.append(f"{tenant['id']}: {tenant['advice']}")
    return notes
