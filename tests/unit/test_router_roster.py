"""A model that a router runs and nobody configured is told of, followed to its end, and can only be sent away."""

from __future__ import annotations

import pytest

from swapper.errors import BackendRefused
from workers.backend import TenantState
from workers.llama.http import Model, Status
from workers.llama.known import state_of
from workers.llama.roster import Roster

URL = "http://127.0.0.1:9"


def models(**states: str) -> dict[str, Model]:
    return {name: Model(name, Status(state), name=name) for name, state in states.items()}


def roster() -> Roster:
    return Roster(URL, {"llama/med": "med"}, None)


@pytest.mark.parametrize("state", ["loading", "loaded", "sleeping"])
def test_a_model_that_holds_vram_and_is_not_configured_is_seen_under_its_server(state: str) -> None:
    seen = roster().seen(models(med="unloaded", old=state, idle="unloaded"), state_of)
    assert seen == {"llama/med": TenantState.UNLOADED, "llama/old": TenantState(state)}


def test_a_configured_model_is_no_stranger_by_whichever_of_its_names_it_was_configured() -> None:
    model = Model("qwen", Status("loaded"), ["gpt", "qwen"])
    seen = Roster(URL, {"llama/gpt": "gpt"}, None).seen({"qwen": model, "gpt": model}, state_of)
    assert seen == {"llama/gpt": TenantState.LOADED}


def test_a_stranger_is_told_of_when_it_has_gone_as_well() -> None:
    known = roster()
    known.seen(models(med="loaded", old="loaded"), state_of)
    assert known.seen(models(med="loaded", old="unloaded"), state_of)["llama/old"] is TenantState.UNLOADED
    assert known.seen(models(med="loaded"), state_of)["llama/old"] is TenantState.FAILED


def test_a_stranger_counts_while_the_router_does_not_answer_only_if_it_held_vram() -> None:
    known = roster()
    known.seen(models(med="loaded", old="loaded", older="loaded"), state_of)
    known.seen(models(med="loaded", old="loaded", older="unloaded"), state_of)
    silent = known.unseen(lambda _: TenantState.UNREACHABLE)
    assert silent == dict.fromkeys(["llama/med", "llama/old"], TenantState.UNREACHABLE)


def test_a_server_without_a_configured_model_is_named_by_who_made_it() -> None:
    assert Roster(URL, {}, "llama").seen(models(old="loaded"), state_of) == {"llama/old": TenantState.LOADED}
    assert Roster(URL, {}, None).seen(models(old="loaded"), state_of) == {}


def test_a_stranger_is_resolved_by_its_id_but_is_no_configured_tenant() -> None:
    assert (roster().known("llama/med"), roster().known("llama/org/old:Q4")) == ("med", "org/old:Q4")
    with pytest.raises(BackendRefused, match="no tenant of the router"):
        roster().configured("llama/old")
    with pytest.raises(BackendRefused, match="no tenant of the router"):
        roster().known("other/old")
