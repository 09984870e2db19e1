"""The HTTP API: leases, jobs, by hand, status, swaps, events, snapshots, metrics, health.

`app.py` adds `routes` and `middlewares` to its application.
"""

from __future__ import annotations

from aiohttp import web
from aiohttp.typedefs import Middleware

from swapper.api.auth import auth_middleware
from swapper.api.byhand import ByHandRoutes
from swapper.api.context import ApiContext, Live
from swapper.api.errors import error_middleware
from swapper.api.events import EventRoutes
from swapper.api.jobs import JobRoutes
from swapper.api.leases import LeaseRoutes
from swapper.api.metrics import MetricsRoutes
from swapper.api.problem import Problem
from swapper.api.snapshots import SnapshotRoutes
from swapper.api.status import StatusRoutes
from swapper.api.swaps import SwapRoutes

__all__ = ["ApiContext", "Live", "Problem", "middlewares", "routes"]


def routes(ctx: ApiContext) -> list[web.RouteDef]:
    """Every route of the API; call `ctx.close()` when the server shuts down, before it waits for handlers."""
    rooms = (
        LeaseRoutes(ctx),
        StatusRoutes(ctx),
        SwapRoutes(ctx),
        ByHandRoutes(ctx),
        EventRoutes(ctx),
        SnapshotRoutes(ctx),
        JobRoutes(ctx),
        MetricsRoutes(ctx),
    )
    return [route for room in rooms for route in room.table()]


def middlewares(ctx: ApiContext) -> list[Middleware]:
    """For `web.Application(middlewares=...)`, outermost first; they serve the model routes too.

    A request that passed them has `owner` (str), `scopes` (frozenset of str), `classes` (frozenset of WorkClass) and
    `default_class` (WorkClass).
    """
    return [error_middleware(), auth_middleware(ctx)]
