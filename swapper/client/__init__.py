"""The Python client of swapper's HTTP API."""

from swapper.client.client import Event, SwapperClient

__all__ = ["Event", "SwapperClient"]
