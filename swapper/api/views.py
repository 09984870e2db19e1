"""The JSON of leases, swaps and cards, exactly as the contract names the fields.

Invariant: plain functions from values to JSON objects; times RFC 3339 in UTC with milliseconds, sizes MiB, cards and
tenants by name. Touches nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime

from swapper.core.conversations import Conversation, Keeping
from swapper.core.types import FINAL, Card, Hold, Lease, LeaseState, StepRecord, Swap
from swapper.snapshots.index import Index
from swapper.snapshots.shelf import Judged

Json = dict[str, object]
_NO_ENV: Mapping[str, str | None] = {"CUDA_VISIBLE_DEVICES": None, "HIP_VISIBLE_DEVICES": None}


_FIRST_MS, _LAST_MS = -62_135_596_800_000, 253_402_300_799_999
"""The moments a date can tell (years 1 to 9999): beyond them the nearest is shown."""


def iso(ms: int | None) -> str | None:
    """Milliseconds since the epoch -> `2026-03-01T04:00:00.123Z`."""
    if ms is None:
        return None
    moment = datetime.fromtimestamp(min(max(ms, _FIRST_MS), _LAST_MS) / 1000, UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def seconds(ms: int | None) -> float | int | None:
    """Milliseconds -> seconds, whole ones without a fraction."""
    if ms is None:
        return None
    return ms // 1000 if ms % 1000 == 0 else ms / 1000


def holder_of(lease: Lease) -> str | None:
    """`process:PID` when the request named one, else the holder it has (`job:ID`, `window:NAME`, a tenant id)."""
    if lease.request.holder is None and lease.request.holder_pid is not None:
        return f"process:{lease.request.holder_pid}"
    return lease.request.holder


def lease_json(
    lease: Lease,
    *,
    position: int | None,
    explain: str | None,
    env: Mapping[str, str | None] | None = None,
) -> Json:
    """A lease as in the contract, section 3. `eta_s` is 0 once granted and null while nobody can know it."""
    request = lease.request
    return {
        "id": lease.id,
        "card": lease.card,
        "owner": request.owner,
        "label": request.label,
        "class": request.klass,
        "vram_mib": request.vram_mib,
        "state": lease.state,
        "reason": lease.reason,
        "token": lease.token,
        "holder": holder_of(lease),
        "position": position,
        "eta_s": 0.0 if lease.state == LeaseState.GRANTED else None,
        "explain": explain,
        "ttl_s": seconds(request.ttl_ms),
        "max_hold_s": seconds(request.max_hold_ms),
        "expected_s": seconds(request.expected_ms),
        "progress": lease.progress,
        "preemptible": request.preemptible,
        "not_before": iso(request.not_before_ms),
        "deadline": iso(request.deadline_ms),
        "expires_at": iso(lease.expires_ms),
        "created_at": iso(lease.created_ms),
        "granted_at": iso(lease.granted_ms),
        "ended_at": iso(lease.ended_ms),
        "revoke_at": iso(lease.revoke_ms),
        "swap_id": lease.swap_id,
        "env": {**_NO_ENV, **(env or {})},
    }


def settled(lease: Lease) -> bool:
    """True once `?wait` has nothing more to wait for: granted, or ended."""
    return lease.state == LeaseState.GRANTED or lease.state in FINAL


def swap_json(swap: Swap) -> Json:
    """A swap as in the contract, section 7; `outcome` is null and `stage` set while it runs."""
    ended = swap.ended_ms
    return {
        "id": swap.id,
        "card": swap.card,
        "cause": swap.cause,
        "lease": swap.lease,
        "from": list(swap.from_),
        "to": list(swap.to),
        "outcome": swap.outcome,
        "reason": swap.reason,
        "stage": None if swap.outcome is not None else swap.stage,
        "forced": swap.forced_ms is not None,
        "started_at": iso(swap.started_ms),
        "ended_at": iso(ended),
        "overhead_ms": None if ended is None else ended - swap.started_ms,
        "steps": [_step_json(step) for step in swap.steps],
        "conversations": [conversation_json(conversation) for conversation in swap.conversations],
    }


def _step_json(step: StepRecord) -> Json:
    return {
        "step": step.step,
        "tenant": step.tenant,
        "ms": step.ms,
        "backend_ms": step.backend_ms,
        "outcome": step.outcome,
        "detail": step.detail,
        "started_at": iso(step.started_ms),
    }


def conversation_json(conversation: Conversation) -> Json:
    """One conversation of a swap; `model` is the tenant's id."""
    return {
        "model": conversation.tenant,
        "slot": conversation.slot,
        "snapshot": conversation.snapshot,
        "tokens": conversation.tokens,
        "bytes": conversation.bytes,
        "strategy": conversation.strategy,
        "saved": conversation.saved,
        "restored": conversation.restored,
        "result": conversation.result,
        "cache_n": conversation.cache_n,
        "reason": conversation.reason,
    }


def keeping_json(keeping: Keeping | None) -> Json:
    """How a tenant's conversations are kept; `strategy` is null while its agent has not said what suits the model.

    `demoted` names the strategies that are not used any more, each with what was seen. `costs`, null until enough was
    measured: ms for 1,000 tokens to read a prompt, to save and restore it, and what follows from that.
    """
    if keeping is None:
        return {"strategy": None, "strategies": [], "demoted": {}, "costs": None}
    costs = keeping.costs
    return {
        "strategy": keeping.strategy,
        "strategies": list(keeping.strategies),
        "demoted": dict(keeping.demoted),
        "costs": costs and {"read_ms": costs.read, "keep_ms": costs.keep, "note": costs.words},
    }


def index_json(index: Index, tenant: str, n_slots: int | None) -> Json:
    """What this process's gateway knows of a tenant's prompts: what they cost so far.

    `reread`: tokens that were read again though they had been read before, by cause. `advice` is null while there is
    little to spare.
    """
    counts = index.counts(tenant)
    return {
        "prompt_tokens": {
            "cached": counts.cached,
            "processed": counts.processed,
            "reread": {why: tokens for why, tokens in counts.reread.items() if tokens},
        },
        "advice": index.advice(tenant, n_slots),
    }


def snapshot_json(judged: Judged, *, newer: str | None = None) -> Json:
    """A snapshot from its manifest. `refused`: why it could not be restored now, null where nothing speaks against it.

    `compared`: its model runs, so that build and settings were compared as well; else only the file was looked at.
    `newer`: the newest snapshot of the same conversation, null where this is it.
    """
    saved = judged.manifest
    then = saved.fingerprint
    return {
        "id": saved.snapshot,
        "model": saved.tenant,
        "slot": saved.slot,
        "tokens": saved.tokens,
        "bytes": saved.bytes,
        "strategy": saved.strategy,
        "saved_at": iso(saved.saved_ms),
        "used_at": iso(saved.used_ms or None),
        "restored_at": iso(saved.restored_ms),
        "digest": saved.digest,
        "build": then.build,
        "conversation": saved.id or None,
        "newer": newer,
        "refused": judged.refused,
        "compared": judged.compared,
        "fingerprint": {
            "model": then.model,
            "gguf": {"path": then.gguf.path, "digest": then.gguf.digest or None, "bytes": then.gguf.size},
            "n_ctx_slot": then.n_ctx_slot,
            "n_parallel": then.n_parallel,
            "kv_unified": then.kv_unified,
            "cache_types": list(then.cache_types),
            "flash_attn": then.flash_attn,
            "rope": list(then.rope),
            "lora": list(then.lora),
            "drafter": then.drafter or None,
            "mmproj": then.mmproj or None,
            "template": then.template or None,
        },
    }


def card_json(
    card: Card,
    *,
    reading: Mapping[str, object],
    capacity_mib: int | None,
    total_mib: int | None,
    holders: Iterable[Json] = (),
    foreign: Iterable[Json] = (),
) -> Json:
    """A card with what its probe read; `foreign`: those of the `holders` that were told of. VRAM: null until read."""
    return {
        "name": card.name,
        "phase": card.phase,
        "version": card.version,
        "residents": list(card.residents),
        "return_to": None if card.return_to is None else list(card.return_to),
        "lease": None if card.whole is None else card.whole.lease,
        "holds": [_hold_json(hold) for hold in card.holds],
        "swap": None if card.swap is None else swap_json(card.swap),
        **_troubles_json(card),
        "departed": [
            {"lease": gone.lease, "label": gone.label, "pid": gone.pid, "free_at": iso(gone.free_ms)}
            for gone in card.departed
        ],
        "capacity_mib": capacity_mib,
        "vram": {
            "total_mib": reading.get("total_mib", total_mib),
            "used_mib": reading.get("used_mib"),
            "free_mib": reading.get("free_mib"),
        },
        "holders": list(holders),
        "foreign": list(foreign),
        "probe": {"pool": reading.get("pool"), "note": reading.get("note"), "unread": reading.get("unread")},
    }


def _hold_json(hold: Hold) -> Json:
    return {
        "lease": hold.lease,
        "label": hold.label,
        "vram_mib": hold.vram_mib,
        "granted": hold.granted,
        "tenant": hold.tenant,
        "pid": hold.pid,
    }


def _troubles_json(card: Card) -> Json:
    """What went wrong: with the card itself, and with the loads of each tenant."""
    fault = card.fault
    return {
        "fault": None
        if fault is None
        else {"reason": fault.reason, "need_mib": fault.need_mib, "since": iso(fault.since_ms)},
        "failed": {
            tenant: {"reason": failure.reason, "count": failure.count, "retry_at": iso(failure.retry_ms)}
            for tenant, failure in card.failed.items()
        },
    }
