"""A call whose body is there: what it asks for, whether it may, and its way through admission to its end.

Invariant: whoever served the request, a call is refused, admitted, answered and counted here, once; large bodies are
parsed one in a pass of the loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple, TypeVar

from swapper.core.types import WorkClass
from swapper.gateway import errors, heads
from swapper.gateway.admission import Call
from swapper.gateway.context import LEFT, GatewayContext, Held
from swapper.gateway.downstream import Arrived, Downstream, refuse
from swapper.gateway.filters import Filter
from swapper.gateway.form import form_with, form_with_model, is_form, parse_form
from swapper.gateway.parse import CHECKED_BYTES, Ask, not_utf8, parse_body, parse_class, with_model
from swapper.gateway.pipe import Exchange
from swapper.gateway.routes import Way
from swapper.gateway.turns import Full
from swapper.gateway.vain import max_wait, rests
from swapper.problem import Problem

_T = TypeVar("_T")
_JSON = "application/json"
FAILED = 500
"""The code of a call that swapper failed over."""
LARGE_BYTES = 1 << 20
"""From here on a body is parsed in a pass of its own: 64 MiB take up to a quarter of a second."""


class Asked(NamedTuple):
    """What a request asks for, and how that goes upstream."""

    ask: Ask
    way: Way


def class_of(arrived: Arrived) -> WorkClass | Problem:
    """The class of a call: its header, else its key's default, else interactive."""
    caller = arrived.caller
    header = heads.header(arrived.headers, b"x-swapper-class") or None
    return parse_class(header, caller.default_class, caller.classes)


async def in_body(ctx: GatewayContext, kind: str, held: Held, way: Way) -> Asked | Problem:
    """What a body of Content-Type `kind` asks for: the model stands in it, and its entry may change the body."""
    form = is_form(kind) if kind != _JSON else False
    ask = await parsed(ctx, held.body, partial(parse_form, content_type=kind) if form else parse_body)
    if isinstance(ask, Ask) and (found := ctx.filters.get(ask.model)) is not None:
        ask = await _filtered(ctx, held, ask, found, kind if form else None)
    if isinstance(ask, Problem):
        return ask
    if form:
        return Asked(ask, replace(way, rename=partial(form_with_model, content_type=kind)))
    return Asked(ask, way if way.rename is with_model else replace(way, rename=with_model))


async def _filtered(ctx: GatewayContext, held: Held, ask: Ask, found: Filter, form: str | None) -> Ask | Problem:
    """The body as its model's entry has it, and what it asks for then: what is followed is what the server reads.

    `form`: the Content-Type, where it is one.
    """
    change = found.body if form is None else partial(form_with, values=found.form(), content_type=form)
    body = await parsed(ctx, held.body, change)
    if body is held.body:
        return ask
    if not held.add(max(len(body) - held.size, 0)):
        return errors.body_budget(ctx.limits.body_budget)
    held.body = body
    return await parsed(ctx, body, parse_body if form is None else partial(parse_form, content_type=form))


async def parsed(ctx: GatewayContext, body: bytes, parse: Callable[[bytes], _T]) -> _T:
    """What `parse` makes of the body, in its turn."""
    if len(body) <= LARGE_BYTES:
        return parse(body)
    async with ctx.parsing:
        await asyncio.sleep(0)  # a pass for everybody else; in a thread the parser would keep the interpreter, too
        return parse(body)


async def answer(
    ctx: GatewayContext, arrived: Arrived, klass: WorkClass, asked: Asked, held: Held, down: Downstream
) -> None:
    """Answer one call."""
    tenant = ctx.names.get(asked.ask.model)
    if tenant is None:
        refuse(down, errors.model_not_found(asked.ask.model, ctx.names))
        return
    call = _admitted(ctx, arrived, klass, tenant, asked, held.body)
    if isinstance(call, Problem):
        ctx.told(tenant, call.status, 0)
        refuse(down, call)
        return
    code = FAILED
    try:
        exchange = Exchange(ctx, arrived, down, ctx.targets[tenant], asked.ask, asked.way, held, call)
        del asked  # views of the body, which may go before the answer has passed
        code = await exchange.run()
    except asyncio.CancelledError:
        code = LEFT
        raise
    finally:
        call.finish()
        ctx.told(tenant, code, call.waited_ms)


def _admitted(
    ctx: GatewayContext, arrived: Arrived, klass: WorkClass, tenant: str, asked: Asked, body: bytes
) -> Call | Problem:
    if (problem := _refused(ctx, tenant, asked, body)) is not None:
        return problem
    if isinstance(may_wait := max_wait(ctx, arrived), Problem):
        return may_wait
    call = ctx.admission.admit(tenant, klass, arrived.caller.owner, may_wait, looks=asked.way.route.looks)
    return errors.queue_full(call.waiting) if isinstance(call, Full) else call


def _refused(ctx: GatewayContext, tenant: str, asked: Asked, body: bytes) -> Problem | None:
    """Why a call is not even to wait, if so.

    What can be seen to be no JSON brings no model onto its card; a model that is there says its own error.
    """
    way, is_open = asked.way, ctx.admission.gate(tenant).open
    if (problem := rests(ctx, asked.ask.model, tenant)) is not None or is_open:
        return problem
    if not way.route.brings:
        return errors.not_there(asked.ask.model)
    return not_utf8(body) if way.rename is with_model and len(body) > CHECKED_BYTES else None
