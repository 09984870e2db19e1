"""How long a call may wait, and what it is told that waited in vain or need not wait at all.

Invariant: whoever is refused hears why, who has the card and until when, as far as that is known, and when to come
again: by an estimate where there is one. Nothing is refused because the store does not answer.
"""

from __future__ import annotations

from swapper.config.units import duration_ms
from swapper.errors import StoreDown
from swapper.gateway import errors
from swapper.gateway.admission import Call
from swapper.gateway.context import GatewayContext, Why
from swapper.gateway.downstream import Arrived
from swapper.gateway.turns import Turn
from swapper.problem import Problem

MAX_WAIT = "X-Swapper-Max-Wait"


def max_wait(ctx: GatewayContext, arrived: Arrived) -> int | Problem:
    """Milliseconds this call may wait: its own word where it has one, `gateway.max_wait` at most."""
    if not (said := arrived.wait):
        return ctx.limits.max_wait_ms
    try:
        asked = duration_ms(f"{said}s" if said.replace(".", "", 1).isdigit() else said)
    except ValueError as error:
        return errors.bad_request(f"{MAX_WAIT}: {error}", param=MAX_WAIT)
    return min(asked, ctx.limits.max_wait_ms)


def rests(ctx: GatewayContext, model: str, tenant: str) -> Problem | None:
    """Its load failed, and is not tried again yet: nobody waits for that."""
    failure = ctx.member.resting(tenant)
    return None if failure is None else errors.load_failed(model, failure.reason, ctx.member.left_ms(failure))


async def waited(ctx: GatewayContext, model: str, call: Call, turn: Turn) -> Problem:
    """What a call is told whose load failed, or that waited as long as it may."""
    if turn is Turn.FAILED:
        failure = ctx.member.resting(call.tenant)
        left_ms = None if failure is None else ctx.member.left_ms(failure)
        return errors.load_failed(model, call.error or "the server gave no reason", left_ms)
    waited_ms = call.waited_ms + ctx.admission.now() - call.since_ms
    try:
        why = await ctx.why(call.tenant)
    except StoreDown:
        why = Why("the store does not answer, so that nothing is loaded meanwhile")
    late = errors.load_timeout if ctx.member.loading(call.tenant) else errors.gpu_busy
    return late(model, waited_ms, why.text, why.there_in_ms)
