"""What the coordinator orders, and what comes back: commands with their number, reports with the same.

Invariant: values only. A command is known by (token, n), and its answer carries both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Command:
    """An order to one executor: `agent:HOST` or `gateway:ID`.

    (token, n) is its identity: an executor answers an equal pair from its record and refuses one older than the
    mark it keeps for (card, tenant). `verb` is a Step, or `cut` (gateways: end the calls in flight). `tenant` is
    None only for `vacate`, which concerns the card.
    """

    executor: str
    card: str
    tenant: str | None
    token: int
    n: int
    verb: str
    args: Mapping[str, object] = field(default_factory=dict[str, object])


@dataclass(frozen=True, slots=True)
class Report:
    """An executor's answer to a command, or an observation it volunteers (verbs `observed`, `proof`, `hello`).

    Volunteered reports carry token 0 and n 0. `outcome` is `ok`, `failed` or `refused`.
    The `data` of each verb is described where the verb is handled: core/machine.py and workers/backend.py.
    """

    executor: str
    card: str
    tenant: str | None
    token: int
    n: int
    verb: str
    outcome: str
    detail: str | None = None
    backend_ms: float | None = None
    data: Mapping[str, object] = field(default_factory=dict[str, object])


def answer_to(
    command: Command,
    outcome: str,
    detail: str | None = None,
    data: Mapping[str, object] | None = None,
    backend_ms: float | None = None,
) -> Report:
    """The report that answers a command: addressed by its executor, card, tenant, token and number."""
    return Report(
        executor=command.executor,
        card=command.card,
        tenant=command.tenant,
        token=command.token,
        n=command.n,
        verb=command.verb,
        outcome=outcome,
        detail=detail,
        backend_ms=backend_ms,
        data=data or {},
    )
