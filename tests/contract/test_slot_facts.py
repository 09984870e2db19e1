"""What llama-server's slots really do: the facts that saving and restoring rest on."""

from __future__ import annotations

import asyncio

import pytest

from tests.contract.conftest import World
from tests.contract.talk import Talk

ALWAYS = {"id", "n_ctx", "speculative", "is_processing"}


async def test_a_fresh_slot_shows_nothing_but_its_id_context_and_whether_it_works(talk: Talk) -> None:
    await talk.reload("alpha")
    slot = await talk.slot("alpha", 0)
    assert set(slot) == ALWAYS
    assert slot["n_ctx"] == 4096


async def test_after_a_task_a_slot_shows_its_tokens_without_the_last_one_sampled(talk: Talk) -> None:
    await talk.reload("alpha")
    await talk.say("alpha", "abcdef", slot=0, n=4)
    slot = await talk.slot("alpha", 0)
    assert slot["n_prompt_tokens"] == 7 + 4 - 1  # beginning-of-text, six letters, four answers
    assert {"id_task", "n_prompt_tokens_processed", "n_prompt_tokens_cache"} <= set(slot)


async def test_after_an_erase_a_slot_shows_no_tokens(talk: Talk) -> None:
    await talk.reload("alpha")
    await talk.say("alpha", "abcdef", slot=0, n=4)
    status, answer = await talk.act("erase", 0, "alpha")
    assert (status, answer) == (200, {"id_slot": 0, "n_erased": 10})
    assert (await talk.slot("alpha", 0))["n_prompt_tokens"] == 0


async def test_a_restored_slot_shows_its_tokens_only_if_a_task_ran_in_it_before(talk: Talk) -> None:
    await talk.reload("alpha")
    await talk.say("alpha", "abcdef", slot=0, n=4)
    await talk.act("save", 0, "alpha", "fresh-or-used.bin")
    await talk.reload("alpha")
    await talk.say("alpha", "xyz", slot=1, n=1)
    for slot in (0, 1):
        assert (await talk.act("restore", slot, "alpha", "fresh-or-used.bin"))[1]["n_restored"] == 10
    assert "n_prompt_tokens" not in await talk.slot("alpha", 0)
    assert (await talk.slot("alpha", 1))["n_prompt_tokens"] == 10


async def test_a_save_and_a_restore_tell_tokens_and_bytes(talk: Talk, world: World) -> None:
    await talk.reload("alpha")
    await talk.say("alpha", "abcdef", slot=1, n=4)
    status, saved = await talk.act("save", 1, "alpha", "told.bin")
    assert status == 200
    assert (saved["id_slot"], saved["filename"], saved["n_saved"]) == (1, "told.bin", 10)
    assert saved["n_written"] == (world.slots / "told.bin").stat().st_size
    assert saved["timings"]["save_ms"] > 0
    status, restored = await talk.act("restore", 0, "alpha", "told.bin")
    assert (status, restored["n_restored"], restored["n_read"]) == (200, 10, saved["n_written"])
    assert restored["timings"]["restore_ms"] > 0


async def test_an_empty_slot_saves_a_file_with_no_tokens(talk: Talk, world: World) -> None:
    await talk.reload("alpha")
    status, saved = await talk.act("save", 0, "alpha", "empty.bin")
    assert (status, saved["n_saved"], saved["n_written"]) == (200, 0, 40)
    assert (world.slots / "empty.bin").exists()


async def test_the_model_of_a_slot_action_is_read_from_the_body_alone(talk: Talk) -> None:
    await talk.reload("alpha")
    status, answer = await talk.post("/slots/0", {"filename": "query.bin"}, action="save", model="alpha")
    assert status == 400
    assert "model name is missing" in answer["error"]["message"]
    assert (await talk.act("save", 0, "alpha", "body.bin"))[0] == 200


async def test_a_slot_number_beyond_the_last_wraps_round_in_silence(talk: Talk) -> None:
    await talk.reload("alpha")
    await talk.say("alpha", "abcdef", slot=1, n=4)
    status, saved = await talk.act("save", 9, "alpha", "wrapped.bin")
    assert (status, saved["id_slot"], saved["n_saved"]) == (200, 9, 10)


@pytest.mark.parametrize("name", ["a:b.bin", "a/b.bin", "../b.bin", " b.bin", "b.", "b|c"])
async def test_an_unsafe_file_name_is_refused(talk: Talk, name: str) -> None:
    await talk.load("alpha")
    status, answer = await talk.act("save", 0, "alpha", name)
    assert status == 400
    assert "Invalid filename" in answer["error"]["message"]


async def test_a_refused_restore_says_no_reason_and_leaves_the_slot_empty(talk: Talk, world: World) -> None:
    await talk.reload("alpha")
    await talk.say("alpha", "abcdef", slot=0, n=4)
    (world.slots / "rubbish.bin").write_bytes(b"no slot file")
    status, answer = await talk.act("restore", 0, "alpha", "rubbish.bin")
    assert status == 400
    assert "Unable to restore slot" in answer["error"]["message"]
    assert (await talk.slot("alpha", 0))["n_prompt_tokens"] == 0


async def test_a_restored_conversation_is_reused_to_its_last_token(talk: Talk) -> None:
    await talk.reload("alpha")
    prompt = "The quick brown fox jumps over the lazy dog. " * 20
    answer = await talk.say("alpha", prompt, slot=0)
    _, saved = await talk.act("save", 0, "alpha", "reused.bin")
    await talk.reload("alpha")
    await talk.act("restore", 1, "alpha", "reused.bin")
    following = await talk.say("alpha", prompt + answer["content"] + " And then?")
    assert following["timings"]["cache_n"] == saved["n_saved"]
    assert following["id_slot"] == 1


async def test_a_call_without_a_slot_goes_to_the_one_most_like_it_even_if_another_is_empty(talk: Talk) -> None:
    await talk.reload("alpha")
    first = await talk.say("alpha", "abcdefgh", n=1)
    assert (await talk.say("alpha", "abcdefgh!", n=1))["id_slot"] == first["id_slot"]
    other = 1 - first["id_slot"]
    await talk.say("alpha", "abcdefgh and so on", slot=other, n=1)
    assert (await talk.say("alpha", "abcdefgh and so forth", n=1))["id_slot"] == other
    assert (await talk.say("alpha", "abcdefgh!", n=1))["id_slot"] == first["id_slot"]


@pytest.mark.parametrize("model", ["gemma", "lfm"])
async def test_sliding_windows_and_hybrids_restore_with_success_and_reuse_nothing(talk: Talk, model: str) -> None:
    await talk.reload(model)
    prompt = "The quick brown fox jumps over the lazy dog. " * 8
    await talk.say(model, prompt, slot=0)
    _, saved = await talk.act("save", 0, model, f"{model}.bin")
    await talk.reload(model)
    assert (await talk.act("restore", 0, model, f"{model}.bin"))[1]["n_restored"] == saved["n_saved"]
    assert (await talk.say(model, prompt, slot=0))["timings"]["cache_n"] == 0
    await talk.unload(model)


async def test_the_server_restores_the_file_of_another_model_of_the_same_shape(talk: Talk) -> None:
    await talk.reload("alpha")
    await talk.say("alpha", "abcdef", slot=0, n=4)
    await talk.act("save", 0, "alpha", "of-alpha.bin")
    await talk.reload("beta")
    status, restored = await talk.act("restore", 0, "beta", "of-alpha.bin")
    assert (status, restored["n_restored"]) == (200, 10)


async def test_a_file_one_byte_short_aborts_the_whole_child(talk: Talk, world: World) -> None:
    await talk.reload("beta")
    await talk.say("beta", "abcdef", slot=0, n=4)
    await talk.act("save", 0, "beta", "whole.bin")
    (world.slots / "short.bin").write_bytes((world.slots / "whole.bin").read_bytes()[:-1])
    async with talk.events() as events:
        status, answer = await talk.act("restore", 1, "beta", "short.bin")
        assert status == 500
        assert "proxy error" in str(answer)
        async for event in events:
            if event["model"] == "beta" and event["data"]["status"] == "unloaded":
                assert event["data"]["exit_code"] != 0
                break


async def test_a_save_of_a_busy_slot_waits_for_it(talk: Talk) -> None:
    await talk.reload("alpha")
    async with talk.streaming("alpha", 200) as stream:
        saving = asyncio.create_task(talk.act("save", 1, "alpha", "busy.bin"))
        await stream.read()
        status, saved = await saving
    assert status == 200
    assert saved["n_saved"] == 7 + 200 - 1


async def test_without_a_slot_folder_every_slot_action_is_not_implemented(bare: Talk) -> None:
    await bare.load("alpha")
    for action in ("save", "restore", "erase"):
        status, answer = await bare.act(action, 0, "alpha", "x.bin")
        assert status == 501
        assert "--slot-save-path" in answer["error"]["message"]
