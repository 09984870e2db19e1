"""What no lease can be made of: a body that is no JSON, too large, packed, cut off, or with a time nobody can tell."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import aiohttp
import pytest

from swapper.api import bodies
from tests.support.api import served
from tests.unit.test_api_leases import problem


@pytest.fixture
async def http() -> AsyncGenerator[aiohttp.ClientSession]:
    async with served() as api, aiohttp.ClientSession(api.url) as session:
        yield session


@pytest.mark.parametrize("body", [b"", b" ", b"{", b"[", b"\xff", b'{"label": "\\ud800"}'])
async def test_what_is_not_json_is_400(http: aiohttp.ClientSession, body: bytes) -> None:
    async with http.post("/api/leases", data=body) as answer:
        assert (await problem(answer, 400))["type"] == "urn:swapper:bad-json"


@pytest.mark.parametrize("body", [b'{"label": "\\ud800"}', b'{"label": "\\udc00x"}', b'{"label": "\xed\xa0\x80"}'])
async def test_a_lone_surrogate_is_called_one(http: aiohttp.ClientSession, body: bytes) -> None:
    async with http.post("/api/leases", data=body) as answer:
        assert "a lone surrogate, half of a character" in (await problem(answer, 400))["detail"]


async def test_json_that_is_no_object_is_422(http: aiohttp.ClientSession) -> None:
    async with http.post("/api/leases", data=b"[]") as answer:
        assert "object" in (await problem(answer, 422))["detail"]


@pytest.mark.parametrize("announced", [True, False])
async def test_a_body_over_64_kib_is_413(http: aiohttp.ClientSession, announced: bool) -> None:
    async def pieces() -> AsyncGenerator[bytes]:
        for _ in range(3):
            yield b" " * 30_000

    async with http.post("/api/leases", data=b" " * 90_000 if announced else pieces()) as answer:
        await problem(answer, 413)


@pytest.mark.parametrize("encoding", ["gzip", "br", "zstd", "sn\xf6d"])
async def test_a_compressed_body_is_415(http: aiohttp.ClientSession, encoding: str) -> None:
    async with http.post("/api/leases", data=b"{}", headers={"Content-Encoding": encoding}) as answer:
        assert "as it is" in (await problem(answer, 415))["detail"]
    async with http.get("/api/leases") as answer:
        assert (await answer.json())["items"] == []


async def test_a_body_that_stops_coming_is_408(http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "BODY_S", 0.05)
    answered = asyncio.Event()

    async def stops() -> AsyncGenerator[bytes]:
        yield b"{"
        await answered.wait()

    async with http.post("/api/leases", data=stops()) as answer:
        assert "0.05 s" in (await problem(answer, 408))["detail"]
        answered.set()


@pytest.mark.parametrize("moment", ["9999-12-31T23:59:59-23:59", "0001-01-01T00:00:00+23:59"])
@pytest.mark.parametrize("field", ["deadline", "not_before"])
async def test_a_time_no_date_can_tell_is_422_and_poisons_no_list(
    http: aiohttp.ClientSession, field: str, moment: str
) -> None:
    async with http.post("/api/leases", json={field: moment}) as answer:
        assert answer.status == 422
        assert field in await answer.text()
    async with http.get("/api/leases") as answer:
        assert (answer.status, (await answer.json())["items"]) == (200, [])
