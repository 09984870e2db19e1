"""What the tests of saved conversations share: fresh names, and a model that was loaded just now."""

from __future__ import annotations

from itertools import count

from workers.backend import Backend, SaveArgs, Saved

LONG = "Colourless green ideas sleep furiously in the garden. " * 10
_numbers = count(1)


def fresh(model: str) -> str:
    """A file name nobody used."""
    return f"{model}.{next(_numbers)}.kv"


async def save(backend: Backend, model: str, slot: int = 0) -> Saved:
    """Save a slot under a fresh name."""
    return await backend.save(f"llama/{model}", SaveArgs(slot, fresh(model)))


async def fresh_load(backend: Backend, model: str) -> None:
    """Release and load."""
    await backend.release(f"llama/{model}", limit_ms=10_000)
    await backend.load(f"llama/{model}")
