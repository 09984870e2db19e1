"""Backend of an Ollama server: its models are loaded by their first call and unloaded by a keep-alive of zero.

Invariant: nothing but `/api/ps` says what is loaded. Source: Ollama's server/routes.go and sched.go. The answer to an
unload comes before it happens: calls in flight end first, and one with a keep-alive of its own takes it back, so it is
asked for again. An entry leaves `/api/ps` up to some seconds before its VRAM is back.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress

import msgspec
import psutil

from swapper.errors import BackendDown, BackendRefused
from workers.backend import TenantState
from workers.client import NO_LIMIT_S, ServerClient, decoded
from workers.control import Control
from workers.kind import Limits
from workers.several import Several

_WHO = "Ollama"
_DOT = "."
_FOR_EVER = -1
_NUM_CTX = re.compile(r"^num_ctx\s+(\d+)$", re.MULTILINE)
_RUNNER = "runner"
"""`ollama runner ...`, before that `ollama_llama_server` below a folder `runners`."""


class _Ps(msgspec.Struct):
    class Entry(msgspec.Struct):
        name: str = ""
        model: str = ""
        context_length: object = None

    models: list[Entry] | None = None


class _Show(msgspec.Struct):
    """`parameters`: lines of the model's own, of which `num_ctx` is what is used where a call names none."""

    capabilities: list[str] | None = None
    parameters: str | None = None


def same(name: str) -> str:
    """Names differ neither in case nor by the tag that stands for none."""
    name = name.lower()
    return name if ":" in name.rpartition("/")[2] else f"{name}:latest"


async def names(http: ServerClient) -> list[str]:
    """The models it has on its disk."""
    tags = decoded(await http.get("/api/tags"), _Ps, _WHO)
    return [one.model or one.name for one in tags.models or ()]


def runners(servers: Iterable[int]) -> int:
    """How many processes of models these servers have, as far as they can be seen. Blocking, some ms."""
    found = 0
    for pid in servers:
        with suppress(psutil.Error):
            for child in psutil.Process(pid).children():
                with suppress(psutil.Error):
                    found += child.status() != psutil.STATUS_ZOMBIE and _RUNNER in " ".join(child.cmdline()[:2])
    return found


class Ollama(Several):
    """Implements `workers.backend.Backend`. `keep_alive_ms` None: what is loaded stays until it is released."""

    def __init__(
        self,
        url: str,
        *,
        server: str,
        tenants: Mapping[str, str],
        control: Control,
        ours: bool = True,
        api_key: str | None = None,
        keys: Mapping[str, str] | None = None,
        keep_alive_ms: int | None = None,
        limits: Limits | None = None,
    ) -> None:
        http = ServerClient(url, _WHO, api_key, read_s=(limits or Limits()).read_s)
        super().__init__(
            http, server=server, tenants=tenants, control=control, ours=ours, keys=keys, same=same, limits=limits
        )
        self._keep: int | str = _FOR_EVER if keep_alive_ms is None else f"{keep_alive_ms}ms"

    async def _running(self) -> Mapping[str, TenantState]:
        ps = decoded(await self._http.get("/api/ps"), _Ps, _WHO)
        for one in ps.models or ():
            self._told(one.model or one.name, one.context_length)
        return {one.model or one.name: TenantState.LOADED for one in ps.models or ()}

    def _told(self, name: str, tokens: object) -> None:
        for tenant, model in self._lodgers.called(name):
            self._tells(tenant, model, tokens)

    async def _unload(self, name: str, limit_s: float) -> None:
        limit_s, key = min(limit_s, self._http.read_s), self._keys.get(name)
        try:
            await self._http.post("/api/generate", {"model": name, "keep_alive": 0}, limit_s=limit_s, key=key)
        except BackendRefused as refused:
            if refused.status != 400:
                raise
            # Older ones ask first whether it can generate: an embedding model is unloaded where it embeds.
            await self._http.post("/api/embed", {"model": name, "input": [], "keep_alive": 0}, limit_s=limit_s, key=key)

    async def _ended(self, name: str) -> None:
        """Of those runners that are processes of this machine no more live than there are models; bounded.

        An entry leaves `/api/ps` first, and where nobody measures the card, nothing else would tell.
        """
        async for waited in self.looks():
            servers = tuple(self.processes().pids)
            try:
                models = len(await self._running())
            except BackendDown:
                return
            if await asyncio.to_thread(runners, servers) <= models or waited >= self._limits.settle_s:
                return

    async def _bring(self, name: str, *, runs: bool) -> None:
        can = await self._capabilities(name)
        if can is None or "completion" in can:
            asked: dict[str, object] = {"prompt": "" if runs else _DOT, "options": {"num_predict": 1}, "stream": False}
            try:
                await self._ask("/api/generate", name, asked)
            except BackendRefused as refused:
                if can is not None or refused.status != 400:
                    raise
            else:
                return
        elif "embedding" not in can:  # it draws or speaks: an empty prompt loads it, and a picture is no small call
            await self._ask("/api/generate", name, {"prompt": "", "stream": False})
            return
        await self._ask("/api/embed", name, {"input": [] if runs else _DOT})

    async def _ask(self, path: str, name: str, asked: Mapping[str, object]) -> None:
        body = {"model": name, "keep_alive": self._keep, **asked}
        call = self._http.post(path, body, limit_s=NO_LIMIT_S, key=self._keys.get(name))
        await self._patience(blind_s=self._limits.load_s).over(call)

    async def _capabilities(self, name: str) -> list[str] | None:
        """What the model can do; None where an older Ollama does not tell. An unknown one is refused in words."""
        try:
            show = await self._http.post("/api/show", {"model": name}, key=self._keys.get(name))
        except BackendRefused as refused:
            if refused.status != 404:
                raise
            mend = f"run `ollama pull {name}` there, or correct the name under models"
            raise self._unknown(name, await names(self._http), mend) from refused
        shown = decoded(show, _Show, _WHO)
        if (own := _NUM_CTX.search(shown.parameters or "")) is not None:
            self._told(name, int(own[1]))
        return shown.capabilities
