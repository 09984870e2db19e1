"""Whatever a model is called, its conversations have file names that llama-server takes, each its own."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swapper.core.plan import snapshot_name
from swapper.snapshots.manifest import name_problem

TOKEN = 1_883_206_385_664_001


@pytest.mark.parametrize(
    "tenant",
    [
        *(
            "llama/med",
            "chat",
            "llama/org/model:Q4_K_M",
            "llama/qwen3.6-27b",
            "llama/..",
            "llama/\u6a21\u578b",
            "/",
            ":",
        ),
        "llama/" + "x" * 300,
        "llama/a\nb",
    ],
)
@pytest.mark.parametrize("part", [0, 11, "d", "c3"])
def test_every_tenant_has_safe_names(tenant: str, part: int | str) -> None:
    assert name_problem(snapshot_name(tenant, TOKEN, part)) is None


def test_a_plain_tenant_is_read_in_its_names() -> None:
    assert snapshot_name("llama/med", 0x3E7, "d") == "llama-med.3e7.d.kv"
    assert snapshot_name("llama/org/model:Q4_K_M", 0x3E7, 0).startswith("llama-org-model-Q4_K_M-")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("llama/m:Q4", "llama/m/Q4"),
        ("llama/med", "llama-med"),
        ("a-b/c", "a/b-c"),
        ("llama/" + "x" * 100, "llama/" + "x" * 101),
        ("llama/\u6a21", "llama/\u578b"),
    ],
)
def test_two_tenants_of_one_swap_never_share_a_file(one: str, other: str) -> None:
    assert snapshot_name(one, TOKEN, 0) != snapshot_name(other, TOKEN, 0)


@given(st.text(min_size=1, max_size=300))
def test_no_name_is_too_strange(tenant: str) -> None:
    assert name_problem(snapshot_name(tenant.encode("utf-8", "replace").decode(), TOKEN, 0)) is None
