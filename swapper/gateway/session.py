"""The HTTP client for what the gateway itself asks servers: slots, models, handshakes. Calls go by links.py."""

from __future__ import annotations

import aiohttp


def open_session() -> aiohttp.ClientSession:
    """For what the gateway itself asks servers: no limit of its own, bodies as they are. The caller closes it."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=30),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=10),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        skip_auto_headers=("User-Agent", "Accept", "Content-Type"),
    )
