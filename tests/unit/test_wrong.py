"""A wrong value in the configuration or in a body is told in our words, whichever it is: pydantic has none of them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from pydantic_core import ErrorDetails

from swapper.config import loads
from swapper.config.schema import Document
from swapper.errors import ConfigError
from swapper.wrong import wrong
from tests.support.api import served

THEIRS = re.compile(r"Input|String should|should be|should have|Field required|Value error|Invalid JSON")
JUNK: list[Any] = [None, True, 0, -1, 1.5, 10**30, "", "x", "x" * 5_000, [], {}, [1], {"a": 1}, "2026-13-01T00:00:00Z"]
FIELDS = ["card", "vram", "label", "class", "ttl_s", "max_hold_s", "not_before", "deadline", "preemptible"]
MORE = ["holder_pid", "holder_started", "webhook", "no_such_field"]


@pytest.mark.parametrize("field", [*FIELDS, *MORE])
async def test_no_field_of_a_body_is_refused_in_words_of_pydantic(field: str) -> None:
    refused = 0
    async with served() as api, aiohttp.ClientSession(api.url) as http:
        for value in JUNK:
            async with http.post("/api/leases", json={field: value}) as answer:
                said = await answer.text()
                refused += answer.status == 422
            assert not THEIRS.search(said), said
    assert refused >= 5


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("[]", "the body must be a JSON object, at least {}"),
        ('{"card": 5}', "card: must be text"),
        ('{"card": ""}', "card: must not be empty"),
        ('{"label": "' + "x" * 201 + '"}', "label: must have 200 characters at most"),
        ('{"class": "fast"}', "class: must be one of interactive, normal, batch or maintenance"),
        ('{"preemptible": 1}', "preemptible: must be true or false"),
        ('{"holder_pid": "12"}', "holder_pid: must be a whole number"),
        ('{"holder_pid": 1, "ttl_s": 1}', "ttl_s: must be 5 or more; holder_pid: must be 2 or more"),
        ('{"deadline": "soon"}', "deadline: must be a time with its zone, like 2026-03-01T04:00:00Z"),
        ("{", "The body is not JSON: EOF while parsing an object at line 1 column 1."),
    ],
)
async def test_what_a_body_must_have_is_told_in_a_sentence(body: str, said: str) -> None:
    async with served() as api, aiohttp.ClientSession(api.url) as http, http.post("/api/leases", data=body) as answer:
        assert (await answer.json())["detail"] == said


def document(path: str, value: object) -> str:
    """A configuration whose only mistake is the value at the path."""
    tenant: dict[str, Any] = {"kind": "llama-router", "card": "gpu0", "url": "http://127.0.0.1:8080", "slot_dir": "s"}
    data: dict[str, Any] = {"cards": {"gpu0": {"vram": "24GiB"}}, "tenants": {"llama": tenant}}
    tenant["models"] = {"med": {"vram": "6GiB"}}
    here = data
    *sections, key = path.split(".")
    for section in sections:
        here = here.setdefault(section, {})
    here[key] = value
    return json.dumps(data)


def refusal(path: str, value: object) -> str | None:
    try:
        loads(document(path, value), folder=Path("/etc/swapper"), environ={"HOME": "/home/ann"})
    except ConfigError as error:
        return str(error)
    return None


PATHS = [
    *Document.model_fields,
    *(f"policy.{key}" for key in ("overhead", "max_queue", "drain", "on_drain_limit", "max_hold")),
    *(f"gateway.{key}" for key in ("max_wait", "keepalive_style", "body_limit")),
    *(f"cards.gpu0.{key}" for key in ("probe", "index", "reserve", "host")),
    *(f"tenants.llama.{key}" for key in ("kind", "card", "command", "path_map", "snapshots", "models", "evict")),
    *(f"tenants.llama.snapshots.{key}" for key in ("strategy", "required", "budget", "keep", "every", "privacy")),
    *(f"tenants.llama.models.med.{key}" for key in ("vram", "aliases", "ttl", "default", "concurrency")),
    "auth.keys",
]


@pytest.mark.parametrize("path", PATHS)
def test_no_key_of_the_configuration_is_refused_in_words_of_pydantic(path: str) -> None:
    refused = list(filter(None, (refusal(path, value) for value in JUNK)))
    assert len(refused) >= 3
    assert [said for said in refused if THEIRS.search(said)] == []


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("policy.overhead", 1, "must be less than 1, not 1"),
        ("policy.overhead", 0, "must be more than 0, not 0"),
        ("policy.max_queue", 0, "must be 1 or more, not 0"),
        ("policy.max_queue", "many", "must be a whole number, not 'many'"),
        ("tenants.llama.models.med.concurrency", 1.5, "must be a whole number, not 1.5"),
    ],
)
def test_what_a_key_must_have_is_told_with_its_place(path: str, value: object, said: str) -> None:
    assert refusal(path, value) == f"swapper.yaml:1: {path}: {said}"


def test_a_kind_that_nobody_has_words_for_has_none_of_pydantics_either() -> None:
    detail = ErrorDetails(type="set_item_not_hashable", loc=("a",), msg="Set items should be hashable", input=1)
    assert wrong(detail) == "cannot have this value"
