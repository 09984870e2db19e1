"""What the demo prints at the end: a table for people, one JSON object for programs. Only formatting."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from swapper.demo.show import Outcome

Json = dict[str, Any]


def as_json(outcome: Outcome, *, version: str, seconds: float) -> Json:
    """The object of `swapper demo --json`; times in ms unless the name says otherwise."""
    conversations = [
        {
            "model": talk["model"],
            "strategy": talk["strategy"],
            "tokens_saved": talk["tokens"],
            "bytes": talk["bytes"],
            "cache_n": turn.cache_n,
            "result": talk["result"],
            "ttft_ms": round(turn.ttft_ms, 1),
            "reread_ttft_ms": round(reread.ttft_ms, 1),
        }
        for talk, turn, reread in zip(outcome.kept, outcome.turns, outcome.reread, strict=False)
    ]
    return {
        "ok": outcome.ok,
        "conversations": conversations,
        "handover": {"out": outcome.out, "back": outcome.back},
        "lease": {"id": outcome.lease["id"], "wait_ms": round(outcome.wait_ms, 1), "token": outcome.lease["token"]},
        "job": outcome.job,
        "llama_server": {"version": version},
        "seconds": round(seconds, 1),
    }


def show(console: Console, result: Json) -> None:
    """Both tables and the verdict."""
    console.print(_steps(result))
    console.print(_conversations(result))
    warm = sum(talk["result"] == "warm" for talk in result["conversations"])
    wait = result["lease"]["wait_ms"]
    console.print(
        f"{warm} of {len(result['conversations'])} conversations came back warm. The job ({result['job']}) waited "
        f"{wait:,.0f} ms for the card. llama-server {result['llama_server']['version']}; {result['seconds']} s in all."
    )


def _steps(result: Json) -> Table:
    table = Table(title="One handover, step by step", title_justify="left")
    for name, justify in (("", "left"), ("step", "left"), ("ms", "right"), ("server's own ms", "right"), ("", "left")):
        table.add_column(name, justify=justify)  # pyright: ignore[reportArgumentType]
    for way in ("out", "back"):
        swap = result["handover"][way]
        for index, step in enumerate(swap["steps"]):
            backend = step["backend_ms"]
            said = step["detail"] or ("" if step["outcome"] == "done" else step["outcome"])
            own = "" if backend is None else f"{backend:,.1f}"
            table.add_row(way if index == 0 else "", step["step"], f"{step['ms']:,.0f}", own, said)
        table.add_section()
    return table


def _conversations(result: Json) -> Table:
    table = Table(title="The next turn of each conversation", title_justify="left")
    for name in ("saved tokens", "MiB", "reused (cache_n)", "first token ms", "read anew ms", "faster"):
        table.add_column(name, justify="right")
    table.add_column("result")
    for talk in result["conversations"]:
        table.add_row(
            f"{talk['tokens_saved']:,}",
            f"{talk['bytes'] / 2**20:.1f}",
            f"{talk['cache_n']:,}",
            f"{talk['ttft_ms']:,.0f}",
            f"{talk['reread_ttft_ms']:,.0f}",
            f"{talk['reread_ttft_ms'] / talk['ttft_ms']:.0f} x",
            talk["result"],
        )
    return table
