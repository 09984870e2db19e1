"""The smallest real answer of each sort of model: proof that it computes, not only that it is listed.

Invariant: asked only of a model that was just loaded (on a live one it could push a conversation out), and its own
trace is wiped: the slot that answered is empty afterwards. If we die before that, whoever comes next still knows the
trace: our call carries a seed of its own, and the server shows the seed of the last call a slot took. So a slot with
it was spoken to by nobody since. It holds our few tokens, or what a restore has put there and a file still holds.
"""

from __future__ import annotations

import asyncio
import contextlib

import msgspec

from swapper.errors import BackendDown, BackendRefused
from workers.llama.fingerprint import Args
from workers.llama.http import Model, RouterHttp, Slot

_PROMPT = "."
_SEED = 0x73776170
_TRACE = 4
"""Tokens our call leaves at most: the prompt's one or two, and what a vocabulary puts before and behind them."""
_PAUSE_S = 0.02


class _Completion(msgspec.Struct):
    id_slot: int = 0


async def smallest_answer(http: RouterHttp, model: Model) -> None:
    """One token, one embedding or one ranking, however long that takes; raises BackendError when there is none."""
    args = Args.of(model.status.args)
    if args.matching("--rerank"):
        body: dict[str, object] = {**http.named(model.id), "query": _PROMPT, "documents": [_PROMPT]}
        await http.post("/v1/rerank", body)
    elif args.matching("--embedding"):
        # Not /v1/embeddings: that one refuses a model without pooling.
        await http.post("/embedding", {**http.named(model.id), "content": _PROMPT})
    else:
        await _wipe(http, model.id, await _one_token(http, model.id))
        return
    with contextlib.suppress(BackendRefused):  # 501: without --slots nobody can know what a slot holds
        for slot in await http.slots(model.id):  # these answers do not tell theirs
            if not slot.is_processing and 0 < (slot.n_prompt_tokens or 0) <= _TRACE:
                await _wipe(http, model.id, slot.id)


async def _one_token(http: RouterHttp, model: str) -> int:
    """The slot that answered."""
    asked: dict[str, object] = {"prompt": _PROMPT, "n_predict": 1, "cache_prompt": False, "seed": _SEED}
    body = {**http.named(model), **asked}
    answer = await http.post("/completion", body)
    return msgspec.json.decode(answer, type=_Completion).id_slot


async def _wipe(http: RouterHttp, model: str, slot: int) -> None:
    with contextlib.suppress(BackendRefused):  # 501: without --slot-save-path nothing is ever saved from it
        await http.erase(model, slot)


async def answer_over(http: RouterHttp, model: str, limit_s: float) -> bool:
    """Wait until no slot is at work on a smallest answer that somebody who died asked for; False after `limit_s`."""
    try:
        async with asyncio.timeout(limit_s):
            while True:
                if not await _at_work_on_ours(http, model):
                    return True
                await asyncio.sleep(_PAUSE_S)
    except TimeoutError:
        return False
    except BackendRefused:  # nobody can know
        return True


async def _at_work_on_ours(http: RouterHttp, model: str) -> bool:
    try:
        return any(slot.is_processing and last_was_ours(slot) for slot in await http.slots(model))
    except BackendDown:  # its first batch can take a while, and it answers nothing before the end of that
        return True


def last_was_ours(slot: Slot) -> bool:
    """Whether the last call this slot took was a smallest answer; False where the server does not tell."""
    return slot.params is not None and slot.params.seed == _SEED and slot.params.n_predict == 1


def only_trace(slot: Slot) -> bool:
    """Whether all that is in this slot is what a smallest answer left."""
    return last_was_ours(slot) and (slot.n_prompt_tokens or 0) <= _TRACE
