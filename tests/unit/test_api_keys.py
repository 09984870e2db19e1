"""How a key is looked for: in a time that tells nothing of it."""

from __future__ import annotations

import hmac

import aiohttp
import pytest

from swapper.api import auth
from tests.support.api import key, served

KEYS = tuple(key(name, "admin") for name in ("ann", "bob", "eve"))


@pytest.mark.parametrize("secret", ["ann-secret", "eve-secret", "ann-secre", "", "x" * 1000])
async def test_each_key_is_compared_with_every_one_there_is_by_digests_of_one_length(
    secret: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared = list[tuple[bytes, bytes]]()

    def compare(one: bytes, other: bytes) -> bool:
        compared.append((one, other))
        return hmac.compare_digest(one, other)

    class Recording:
        compare_digest = staticmethod(compare)

    monkeypatch.setattr(auth, "hmac", Recording)
    headers = {"x-api-key": secret}
    async with served(KEYS) as api, aiohttp.ClientSession(api.url, headers=headers) as http:
        answer = await http.get("/api/status")
        assert answer.status == (200 if secret in ("ann-secret", "eve-secret") else 401)
    assert len(compared) == len(KEYS)
    assert {len(text) for pair in compared for text in pair} == {32}
