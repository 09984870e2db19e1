"""The product without one mechanism against a lie of a server of another kind, by name: see mutants.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any

import pytest

from workers import ollama, openai, several, vllm
from workers.backend import TenantState
from workers.comfyui import server as comfyui


async def _nothing(*_: object, **__: object) -> None:
    """What is missing does nothing."""


def _silent(_: object) -> None:
    """The same, of what is not waited for."""


def _late(patch: pytest.MonkeyPatch) -> None:
    """What an Ollama lists no more has given its VRAM back."""
    patch.setattr(ollama.Ollama, "_ended", _nothing)


def _stolen(patch: pytest.MonkeyPatch) -> None:
    """What an Ollama was told to unload counts as gone until we load it again, whoever had it loaded meanwhile."""
    seen: Callable[..., Any] = ollama.Ollama._running  # pyright: ignore[reportPrivateUsage]
    asked: Callable[..., Any] = ollama.Ollama._unload  # pyright: ignore[reportPrivateUsage]
    bring: Callable[..., Any] = ollama.Ollama._bring  # pyright: ignore[reportPrivateUsage]
    away: set[str] = set()

    async def running(self: Any) -> Mapping[str, TenantState]:  # noqa: ANN401
        return {name: state for name, state in (await seen(self)).items() if name not in away}

    async def unload(self: Any, name: str, limit_s: float) -> None:  # noqa: ANN401
        await asked(self, name, limit_s)
        away.add(name)

    async def brought(self: Any, name: str, *, runs: bool) -> None:  # noqa: ANN401
        away.discard(name)
        await bring(self, name, runs=runs)

    patch.setattr(ollama.Ollama, "_running", running)
    patch.setattr(ollama.Ollama, "_unload", unload)
    patch.setattr(ollama.Ollama, "_bring", brought)


def _kept(patch: pytest.MonkeyPatch) -> None:
    """A server that is stuck on a model is not started anew."""

    async def gone(*_: object) -> bool:
        return True

    patch.setattr(several.Several, "_gone_by", gone)


def _slept(patch: pytest.MonkeyPatch) -> None:
    """A vLLM that said so sleeps."""
    patch.setattr(vllm.Vllm, "_until", _nothing)


def _half(patch: pytest.MonkeyPatch) -> None:
    """What woke up in part is left as it is, and forgotten."""
    load: Callable[..., Any] = openai.OpenAiServer.load

    async def loaded(self: Any, tenant: str) -> Any:  # noqa: ANN401
        with pytest.MonkeyPatch.context() as within:
            within.setattr(self._control, "stop", _nothing)
            return await load(self, tenant)

    patch.setattr(openai.OpenAiServer, "load", loaded)
    patch.setattr(vllm.Vllm, "_note", _silent)


def _mute(patch: pytest.MonkeyPatch) -> None:
    """A vLLM that answers nobody is waited for."""
    patch.setattr(openai.OpenAiServer, "end_hung", _nothing)


def _freed(patch: pytest.MonkeyPatch) -> None:
    """A ComfyUI that was asked to free its VRAM has."""
    patch.setattr(comfyui.ComfyUI, "_settled", _nothing)
    patch.setattr(comfyui.ComfyUI, "_says", _nothing)


def _posted(patch: pytest.MonkeyPatch) -> None:
    """Only what a ComfyUI was loaded for by us loads anything there."""
    noted: Callable[..., Any] = comfyui.ComfyUI._note  # pyright: ignore[reportPrivateUsage]
    seen: Callable[..., Any] = comfyui.ComfyUI.observe
    looks: ContextVar[bool] = ContextVar("looks", default=False)

    async def observe(self: Any) -> Any:  # noqa: ANN401
        before = looks.set(True)
        try:
            return await seen(self)
        finally:
            looks.reset(before)

    async def note(self: Any, run: str, *, loaded: bool) -> None:  # noqa: ANN401
        if not looks.get():
            await noted(self, run, loaded=loaded)

    patch.setattr(comfyui.ComfyUI, "observe", observe)
    patch.setattr(comfyui.ComfyUI, "_note", note)


BESIDE: Mapping[str, Callable[[pytest.MonkeyPatch], None]] = {
    "runner": _late,
    "stolen": _stolen,
    "kept": _kept,
    "slept": _slept,
    "half": _half,
    "mute": _mute,
    "freed": _freed,
    "posted": _posted,
}
