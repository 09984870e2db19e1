"""Configuration: `load(path, environ)` gives a valid `Config` or one ConfigError with every problem and its line."""

from swapper.config.config import Config, tenant_id
from swapper.config.keys import ApiKey
from swapper.config.load import load, loads
from swapper.config.models import ModelEntry
from swapper.config.schema import CardEntry, GatewayEntry, PolicyEntry, SnapshotsEntry, TenantEntry

__all__ = [
    "ApiKey",
    "CardEntry",
    "Config",
    "GatewayEntry",
    "ModelEntry",
    "PolicyEntry",
    "SnapshotsEntry",
    "TenantEntry",
    "load",
    "loads",
    "tenant_id",
]
