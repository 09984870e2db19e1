"""ComfyUI over HTTP: its queue, its websocket's status, and the few requests that change something.

Invariant: answers are told as they came, not believed: what an answer of /free, /interrupt or /queue is worth is the
caller's to find out. Each request that changes something waits for the fence first. Seen on ComfyUI 0.3.64.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import aiohttp

from swapper.errors import BackendDown, BackendGone, BackendRefused

LIMIT_S = 10.0
MIB = 1 << 20

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Item:
    """One prompt in the queue: the lowest `number` is next. `outputs`: ids of the nodes it is executed for."""

    number: float
    id: str
    prompt: Mapping[str, object]
    extra_data: Mapping[str, object]
    outputs: tuple[str, ...]

    def body(self) -> Json:
        """What posts it again, under the same id and in the same place."""
        client = self.extra_data.get("client_id")
        return {
            "prompt": self.prompt,
            "prompt_id": self.id,
            "number": self.number,
            "extra_data": self.extra_data,
            "partial_execution_targets": list(self.outputs),
            **({} if client is None else {"client_id": client}),
        }


@dataclass(frozen=True, slots=True)
class Queue:
    """What runs, and what waits in the order in which it will run."""

    running: tuple[Item, ...]
    pending: tuple[Item, ...]


class ComfyHttp:
    """Requests to one ComfyUI at `url`. Raises BackendGone, BackendDown (retry may help) or BackendRefused."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self.fence: Callable[[], Awaitable[None]] = _unfenced
        self._opened: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        """Drop the connections."""
        if self._opened is not None:
            await self._opened.close()

    async def remaining(self) -> int:
        """How many prompts run or wait."""
        told = await self._json("GET", "/prompt")
        try:
            return int(told["exec_info"]["queue_remaining"])
        except (KeyError, TypeError, ValueError):
            raise BackendRefused(f"{self.url}/prompt tells no queue_remaining; is it a ComfyUI?") from None

    async def queue(self) -> Queue:
        """See Queue; what the server tells as pending is in no order."""
        told = await self._json("GET", "/queue")
        try:
            running, pending = (tuple(map(_item, told[name])) for name in ("queue_running", "queue_pending"))
        except (KeyError, TypeError, ValueError, IndexError):
            raise BackendRefused(f"{self.url}/queue tells no queue as ComfyUI does") from None
        return Queue(running, tuple(sorted(pending, key=lambda item: (item.number, item.id))))

    async def known(self, prompt_id: str) -> bool:
        """Whether it was executed, well or not, in the life of this process."""
        return prompt_id in await self._json("GET", f"/history/{prompt_id}")

    async def stats(self) -> Json:
        """`system` and `devices`; the smallest request that only a ComfyUI answers."""
        told = await self._json("GET", "/system_stats")
        if not isinstance(told.get("devices"), list) or not isinstance(told.get("system"), dict):
            raise BackendRefused(f"{self.url}/system_stats tells no devices; is it a ComfyUI?")
        return told

    async def torch_mib(self) -> int | None:
        """What PyTorch has of the GPUs for models and their work, MiB; None on a CPU, where it means something else.

        Not what the process has: its CUDA context, and what nodes take past PyTorch, is in no such number.
        """
        devices = cast("list[Json]", (await self.stats())["devices"])
        if any(one.get("type") == "cpu" for one in devices):
            return None
        return sum(int(one.get("torch_vram_total") or 0) for one in devices) // MIB

    async def free(self) -> None:
        """Ask it to unload all; answered at once, done after the running prompt and before the next one."""
        await self._change("/free", {"unload_models": True, "free_memory": True})

    async def interrupt(self) -> None:
        """Ask it to end the running prompt at its next step; may be lost right after that began."""
        await self._change("/interrupt", {})

    async def delete(self, ids: Sequence[str]) -> None:
        """Take prompts out of what waits; answered alike for those that are not there."""
        await self._change("/queue", {"delete": list(ids)})

    async def post(self, body: Json) -> Json:
        """Post a prompt. Raises BackendRefused with the server's words where it does not take it."""
        await self.fence()
        return await self._json("POST", "/prompt", body)

    async def statuses(self, client_id: str) -> AsyncGenerator[int]:
        """How many prompts run or wait, now and at each change, until the connection breaks.

        The id must be nobody else's: whoever comes with one that is in use takes the socket from its owner.
        """
        try:
            async with self._session().ws_connect(
                f"{self.url}/ws", params={"clientId": client_id}, max_msg_size=0, heartbeat=20.0
            ) as socket:
                async for message in socket:
                    if message.type is aiohttp.WSMsgType.TEXT and (count := _status(message.data)) is not None:
                        yield count
        except aiohttp.ClientConnectorError as error:
            raise BackendGone(f"nobody listens at {self.url}: {error.os_error.strerror or error}") from None
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise BackendDown(f"{self.url}/ws: {error}") from None

    async def _change(self, path: str, body: Json) -> None:
        await self.fence()
        await self._text("POST", path, body)

    async def _json(self, method: str, path: str, body: Json | None = None) -> Json:
        raw = await self._text(method, path, body)
        try:
            told: object = json.loads(raw)
        except ValueError:
            told = None
        if not isinstance(told, dict):
            raise BackendRefused(f"{self.url}{path} answered no JSON; is it a ComfyUI?")
        return cast("Json", told)

    async def _text(self, method: str, path: str, body: Json | None = None) -> bytes:
        timeout = aiohttp.ClientTimeout(total=LIMIT_S)
        try:
            async with self._session().request(method, self.url + path, json=body, timeout=timeout) as answer:
                raw = await answer.read()
        except aiohttp.ClientConnectorError as error:
            raise BackendGone(f"nobody listens at {self.url}: {error.os_error.strerror or error}") from None
        except TimeoutError:
            raise BackendDown(f"{self.url}{path} did not answer within {LIMIT_S:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise BackendDown(f"{self.url}{path}: {error}") from None
        if answer.status >= 400:
            said = raw[:300].decode(errors="replace").strip()
            raise BackendRefused(f"{self.url}{path} answered {answer.status}: {said}", answer.status)
        return raw

    def _session(self) -> aiohttp.ClientSession:
        if self._opened is None or self._opened.closed:
            connector = aiohttp.TCPConnector(limit=0, force_close=True)
            self._opened = aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar())
        return self._opened


async def _unfenced() -> None:
    """Nobody else could do it."""


def _item(raw: Any) -> Item:  # noqa: ANN401
    number, prompt_id, prompt, extra, outputs, *_ = raw
    return Item(float(number), str(prompt_id), dict(prompt), dict(extra), tuple(str(one) for one in outputs))


def _status(text: str) -> int | None:
    """The count in a `status` message; None for any other."""
    try:
        told = json.loads(text)
        return int(told["data"]["status"]["exec_info"]["queue_remaining"]) if told["type"] == "status" else None
    except (ValueError, KeyError, TypeError):
        return None
