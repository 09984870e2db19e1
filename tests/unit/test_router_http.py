"""Connections to a router: reads share one within a burst, and nothing that acts is ever sent twice."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator

import pytest

from swapper.errors import BackendDown
from workers.llama.http import RouterHttp

ANSWER = b'HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 11\r\n\r\n{"data":[]}'


class Server:
    """Notes the requests of each connection; hangs up instead of answering where the test says so."""

    def __init__(self) -> None:
        self.connections: list[list[str]] = []
        self.hang_up: set[tuple[int, int]] = set()
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number, requests = len(self.connections), list[str]()
        self.connections.append(requests)
        try:
            while (head := await reader.readuntil(b"\r\n\r\n")) and (number, len(requests)) not in self.hang_up:
                words = head.decode().split()
                requests.append(f"{words[0]} {words[1].partition('?')[0]}")
                length = next((int(value) for name, value in itertools.pairwise(words) if name == LENGTH), 0)
                await reader.readexactly(length)
                writer.write(ANSWER)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


LENGTH = "Content-Length:"


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    fake = Server()
    listening = await asyncio.start_server(fake.serve, "127.0.0.1", 0)
    fake.url = "http://{}:{}".format(*listening.sockets[0].getsockname()[:2])
    async with listening:
        yield fake


async def test_reads_one_after_the_other_share_a_connection_and_each_post_has_its_own(server: Server) -> None:
    async with RouterHttp(server.url) as http:
        await http.models()
        await http.load("a")
        await http.models()
        await http.unload("a")
    assert server.connections == [["GET /models", "GET /models"], ["POST /models/load"], ["POST /models/unload"]]


async def test_a_read_is_asked_again_where_the_server_has_closed_the_connection(server: Server) -> None:
    server.hang_up = {(0, 1)}
    async with RouterHttp(server.url) as http:
        await http.models()
        assert await http.models() == {}
    assert server.connections == [["GET /models"], ["GET /models"]]


async def test_a_post_that_got_no_answer_is_not_sent_again(server: Server) -> None:
    server.hang_up = {(0, 0)}
    async with RouterHttp(server.url) as http:
        with pytest.raises(BackendDown):
            await http.load("a")
    assert server.connections == [[]]
