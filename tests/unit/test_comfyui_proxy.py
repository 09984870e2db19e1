"""What passes a gate without waiting: any path, uploads, pictures, the websocket; what is heard while all is away."""

from __future__ import annotations

import asyncio
import io
import json
import os
from collections.abc import AsyncIterator, Iterator
from hashlib import sha256
from pathlib import Path

import aiohttp
import pytest

from tests.support.comfyprocess import ComfyProcess, prompt
from tests.support.comfyui import PAGE, PREVIEW
from tests.unit.comfyui_gate import Rig, gated


@pytest.fixture(scope="module")
def comfy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ComfyProcess]:
    found = ComfyProcess(tmp_path_factory.mktemp("comfy"))
    found.start()
    yield found
    found.stop()


@pytest.fixture
async def rig(comfy: ComfyProcess, tmp_path: Path) -> AsyncIterator[Rig]:
    async with gated(comfy, tmp_path) as found:
        yield found


async def text(rig: Rig, path: str, **headers: str) -> tuple[int, str]:
    async with rig.client.get(rig.url + path, headers=headers) as answer:
        return answer.status, await answer.text()


async def test_the_ui_and_every_other_path_pass_without_a_lease(rig: Rig) -> None:
    assert await text(rig, "/") == (200, PAGE)
    for path in ("/queue", "/api/queue", "/history", "/prompt", "/system_stats"):
        assert (await text(rig, path))[0] == 200, path
    assert (await text(rig, "/no/such/thing?a=%2F&b=c"))[0] == 404
    assert (await text(rig, "/forbidden"))[0] == 403
    assert not await rig.leases()


async def test_a_page_from_elsewhere_is_refused_and_the_gates_own_is_not(rig: Rig) -> None:
    ours = rig.url
    async with rig.client.post(rig.url + "/interrupt", json={}, headers={"Origin": ours}) as answer:
        assert answer.status == 200
    evil = {"Origin": "http://evil.example"}
    async with rig.client.post(rig.url + "/interrupt", json={}, headers=evil) as answer:
        assert answer.status == 403


async def test_a_page_from_elsewhere_cannot_have_the_card_asked_for(rig: Rig) -> None:
    for headers in ({"Origin": "http://evil.example"}, {"Origin": rig.url.replace("127.0.0.1", "localhost")}):
        async with rig.client.post(rig.url + "/prompt", json=prompt(), headers=headers) as answer:
            assert answer.status == 403
    assert not await rig.leases()
    ours = rig.post(prompt(), Origin=rig.url)
    await rig.grant()
    assert (await ours)[0] == 200


async def test_an_upload_and_its_picture_pass_to_the_byte(rig: Rig) -> None:
    picture = os.urandom(5 << 20)
    form = aiohttp.FormData()
    form.add_field("image", io.BytesIO(picture), filename="a.png", content_type="image/png")
    async with rig.client.post(rig.url + "/upload/image", data=form) as answer:
        assert await answer.json() == {"name": "a.png", "subfolder": "", "type": "input"}
    async with rig.client.get(rig.url + "/api/view?filename=a.png&type=input") as answer:
        assert sha256(await answer.read()).digest() == sha256(picture).digest()
    async with rig.client.get(rig.url + "/view?filename=a.png", headers={"Range": "bytes=10-19"}) as answer:
        assert (answer.status, await answer.read()) == (206, picture[10:20])


async def test_an_upload_is_not_gathered_before_it_is_passed_on(rig: Rig, comfy: ComfyProcess) -> None:
    begun = asyncio.Event()
    before = comfy.state()["calls"].get("POST /upload/image", 0)

    async def slowly() -> AsyncIterator[bytes]:
        yield b"--b\r\n" + b'Content-Disposition: form-data; name="image"; filename="slow.png"\r\n\r\n' + bytes(1 << 20)
        await begun.wait()
        yield b"\r\n--b--\r\n"

    async def upload() -> int:
        headers = {"Content-Type": "multipart/form-data; boundary=b"}
        async with rig.client.post(rig.url + "/upload/image", data=slowly(), headers=headers) as answer:
            return answer.status

    call = asyncio.create_task(upload())
    await rig.comfy_has(lambda state: state["calls"].get("POST /upload/image", 0) > before)
    assert not call.done()
    begun.set()
    assert await call == 200


async def test_the_websocket_passes_both_ways_with_its_clients_id(rig: Rig, comfy: ComfyProcess) -> None:
    async with rig.client.ws_connect(rig.url + "/ws?clientId=tab-1") as socket:
        first = await socket.receive_json()
        assert (first["type"], first["data"]["sid"]) == ("status", "tab-1")
        await socket.send_json({"type": "feature_flags", "data": {}})
        assert (await socket.receive_json(timeout=10))["type"] == "feature_flags"
        call = rig.post(prompt(client_id="tab-1"))
        await rig.grant()
        told = (await call)[1]["prompt_id"]
        seen: list[str] = []
        pictures = 0
        async with asyncio.timeout(20):
            while not seen or seen[-1] != "executing None":
                message = await socket.receive()
                if message.type is aiohttp.WSMsgType.BINARY:
                    pictures += message.data == PREVIEW
                    continue
                event = json.loads(message.data)
                assert event["data"].get("prompt_id", told) == told
                node = f" {event['data']['node']}" if event["type"] == "executing" else ""
                seen.append(event["type"] + node)
    assert pictures == 3
    assert [one for one in seen if one in ("execution_start", "execution_success", "executing None")] == [
        "execution_start",
        "execution_success",
        "executing None",
    ]
    assert seen[-2] == "status", "the queue is empty before the last word"


async def test_a_socket_whose_client_left_is_closed_at_comfyui_too(rig: Rig) -> None:
    async with rig.client.ws_connect(rig.url + "/ws?clientId=tab-2"):
        await rig.comfy_has(lambda state: "tab-2" in state["clients"])
    await rig.comfy_has(lambda state: "tab-2" not in state["clients"])


async def test_a_prompt_that_stops_coming_is_refused_and_asks_for_no_lease(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swapper.comfyui.proxy.BODY_PAUSE_S", 0.1)

    async def half() -> AsyncIterator[bytes]:
        yield b'{"prompt":'
        await asyncio.Event().wait()

    async with rig.client.post(rig.url + "/prompt", data=half()) as answer:
        assert (answer.status, (await answer.json())["error"]["type"]) == (408, "body_stopped")
    assert not await rig.leases()


async def test_what_is_no_json_gets_comfyuis_own_500(rig: Rig) -> None:
    async def bad() -> int:
        async with rig.client.post(rig.url + "/prompt", data=b"no json") as answer:
            return answer.status

    call = asyncio.create_task(bad())
    await rig.grant()
    assert await call == 500


async def test_while_comfyui_is_away_people_get_a_page_that_comes_again_and_programs_a_sentence(
    comfy: ComfyProcess, tmp_path: Path
) -> None:
    comfy.stop()
    try:
        async with gated(comfy, tmp_path) as rig:
            status, page = await text(rig, "/", Accept="text/html,*/*")
            assert (status, 'http-equiv="refresh"' in page) == (503, True)
            status, said = await text(rig, "/queue")
            assert (status, said) == (
                503,
                "ComfyUI is not running now: it is started by the next prompt that is sent here\n",
            )
            with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
                await rig.client.ws_connect(rig.url + "/ws?clientId=tab")
            assert refused.value.status == 503
            call = rig.post(prompt())
            await rig.grant()
            assert not call.done()
            await asyncio.to_thread(comfy.start)  # as the load of its tenant does
            assert (await call)[0] == 200
    finally:
        comfy.stop()
        comfy.start()


async def test_an_answer_that_breaks_off_does_not_look_whole(comfy: ComfyProcess, tmp_path: Path) -> None:
    async def half(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(half, "127.0.0.1", 0)
    broken = ComfyProcess(tmp_path / "broken")
    broken.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        async with gated(broken, tmp_path) as rig, rig.client.get(rig.url + "/view?filename=a") as answer:
            with pytest.raises(aiohttp.ClientError):
                await answer.read()
    finally:
        server.close()
