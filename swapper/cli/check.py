"""`swapper check`: what would fail with this configuration, and how to mend it.

Invariant: looks, and changes nothing: no server is started, no model is loaded or woken.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import click

from swapper.cli.cards import look_at
from swapper.cli.common import SEARCHED, print_json
from swapper.cli.local import relied_on, relied_on_by_recipes
from swapper.cli.managed import managed
from swapper.cli.reach import missing_hooks, reach
from swapper.cli.reach_comfyui import reach_comfyui
from swapper.config import Config, TenantEntry, load, recipes
from swapper.config.advice import advise, advise_live, model_options
from swapper.config.comfyui import KIND as COMFYUI
from swapper.config.kinds import SERVED, WHO
from swapper.config.served import ONE_MODEL, served
from swapper.errors import ConfigError, StoreDown
from swapper.estimates import estimates, told, too_large
from swapper.foresee import losses
from swapper.notify.post import look, send, trial_message
from swapper.ourselves import Ourselves
from swapper.slotclaim import taken

_TIMEOUT_S = 5.0
_LOADING = 503
_KEY = (401, 403)
_PUT_BACK = "to keep them, put that back as it was before you restart the server"
_WHO = {"llama-router": "llama-server in router mode", "llama-server": "llama-server"}
_SWAPPER = (
    "a swapper answers there and no llama-server: write the router's own address; swapper's clients come to `listen`"
)


@dataclass(frozen=True, slots=True)
class Finding:
    """One sentence; an `error` fails, a warning costs something."""

    error: bool
    text: str


@click.command(epilog="Example: swapper check -c swapper.yaml")
@click.option("-c", "--config", "path", type=click.Path(path_type=Path), help=f"The configuration file; {SEARCHED}.")
@click.option("--notify", is_flag=True, help="Send a test message to everybody in notify as well.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def check(path: Path | None, notify: bool, as_json: bool) -> None:
    """Say what would fail with this configuration, and how to mend it.

    Exit status 0 (warnings at most), 1 (an error), 2 (the configuration cannot be read at all).
    """
    config = load(path, os.environ)
    seen = asyncio.run(look_at(config, _ourselves(config)))
    found = asyncio.run(examine(config, os.environ))
    found += [Finding(one.error, one.text) for one in seen.findings]
    lines = [*seen.lines, *(told(tenant, one) for tenant, one in estimates(config, os.environ).items())]
    found.sort(key=lambda one: not one.error)
    untold = asyncio.run(_try_recipients(config)) if notify else []
    found = [*untold, *found]
    errors = sum(one.error for one in found)
    if as_json:
        problems = [{"level": "error" if one.error else "warning", "text": one.text} for one in found]
        print_json({"ok": errors == 0, "problems": problems, "cards": lines})
    else:
        for line in lines:
            click.echo(line)
        for one in found:
            click.echo(f"{'error' if one.error else 'warning'}: {one.text}")
        where = config.path or "the environment"
        if notify and config.recipients:
            click.echo(f"{_count(len(config.recipients) - len(untold), 'test message')} sent")
        counts = f"{_count(errors, 'error')}, {_count(len(found) - errors, 'warning')}"
        click.echo(f"{where}: {counts}; {_inventory(config)}")
    raise SystemExit(1 if errors else 0)


async def examine(config: Config, environ: Mapping[str, str]) -> list[Finding]:
    """Every finding, errors first, each once."""
    found = [Finding(False, notice) for notice in config.notices]
    found += [Finding(one.error, str(one)) for one in advise(config, environ)]
    if not config.keys and not config.listen[0].startswith(("127.", "localhost", "::1")):
        text = f"listen: {config.document.listen} without auth.keys: whoever reaches the port may take the cards"
        found.append(Finding(False, f"{text}; add keys, or listen on 127.0.0.1"))
    found += [Finding(False, text) for text in recipes.advice(config.document, environ)]
    found += [one async for one in _recipients(config)]
    found += [Finding(True, text) for text in taken(config)]
    for server in config.tenants:
        lost = await asyncio.to_thread(losses, config, server, environ)
        found += [Finding(False, f"{loss}; {_PUT_BACK}") for loss in lost]
    found += [one async for one in _store(config)]
    found += [Finding(error, text) for error, text in relied_on_by_recipes(config)]
    found += [Finding(True, text) for text in await asyncio.to_thread(too_large, config, environ)]
    for server, entry in config.tenants.items():
        found += [one async for one in _server(config, server, entry, environ)]
    return sorted(dict.fromkeys(found), key=lambda one: not one.error)


async def _recipients(config: Config) -> AsyncIterator[Finding]:
    """What apprise makes of the addresses of `notify`; nothing is sent."""
    for one, looked in zip(config.recipients, await asyncio.gather(*map(look, config.recipients)), strict=True):
        if looked.problem is not None:
            yield Finding(True, f"{one.name}: {looked.problem}")
        elif looked.secret and one.in_file:
            text = f"{one.name}: the address holds a secret, which whoever reads the file then knows"
            yield Finding(False, f"{text}; write {{url_env: NAME}} or {{url_file: PATH}}")


async def _try_recipients(config: Config) -> list[Finding]:
    """Send each a test message; what became of it where it did not arrive."""
    message = trial_message(time.time_ns() // 1_000_000)
    sent = await asyncio.gather(*(send(one, message) for one in config.recipients))
    if not sent:
        return [Finding(True, "notify: nobody is to be told; write whom, like notify: [ntfy://ntfy.lan/gpu]")]
    return [
        Finding(True, f"{one.name}: the test message was not sent: {why}; correct the address, or start that server")
        for one, why in zip(config.recipients, sent, strict=True)
        if why is not None
    ]


async def _store(config: Config) -> AsyncIterator[Finding]:
    if config.redis is None:
        folder = _nearest(config.state_dir)
        if not os.access(folder, os.W_OK | os.X_OK):
            yield Finding(True, f"state_dir: {config.state_dir} cannot be written; choose another, or give us {folder}")
        return
    from swapper.store.redis import RedisStore

    try:
        store = await RedisStore.open(config.redis)
    except (StoreDown, ConfigError) as error:
        yield Finding(True, f"redis: {error}; start it, or correct the address")
    else:
        await store.close()
        from swapper.cli.reach_store import reach_store

        for text in await reach_store(config.redis):
            yield Finding(False, text)


async def _server(
    config: Config, server: str, entry: TenantEntry, environ: Mapping[str, str]
) -> AsyncIterator[Finding]:
    for error, text in relied_on(config, server, entry):
        yield Finding(error, text)
    for error, text in await managed(config, server, entry):
        yield Finding(error, text)
    for error, text in missing_hooks(config, server, entry):
        yield Finding(error, text)
    if entry.url is None:
        return
    if entry.kind in SERVED or entry.kind == COMFYUI:
        if await _is_swapper(entry.url):
            who = WHO.get(entry.kind, "ComfyUI")
            text = f"tenants.{server}.url: {entry.url}: a swapper answers there and no {who} of its own"
            yield Finding(True, f"{text}: write the server's own address; swapper's clients come to `listen`")
            return
        own = entry.kind == COMFYUI
        found = await (reach_comfyui(server, entry) if own else reach(config, server, entry, environ))
        for error, text in found:
            yield Finding(error, text)
        return
    try:
        models, props = await _ask(entry, environ)
    except ValueError as error:
        why = _SWAPPER if await _is_swapper(entry.url) else str(error)
        yield Finding(True, f"tenants.{server}.url: {entry.url}: {why}")
        return
    except (OSError, TimeoutError) as error:
        if entry.control == "attach":
            why = str(error) or "no answer in time"
            yield Finding(True, f"tenants.{server}.url: {entry.url}: {why}; start the server, or correct the address")
        return
    for one in advise_live(config, server, models, props) if entry.kind not in ONE_MODEL else ():
        yield Finding(one.error, str(one))
    tenants = served(server, entry)
    for missing in filter(None, (_missing_file(config, server, one.tenant, environ) for one in tenants)):
        yield missing


def _ourselves(config: Config) -> Ourselves:
    """What of the machine's processes is of a configured server."""
    from swapper.app import control_of

    controls = {name: control_of(name, entry, config) for name, entry in config.tenants.items()}
    urls = {name: entry.url for name, entry in config.tenants.items() if entry.url is not None}
    return Ourselves(servers={name: control.pid for name, control in controls.items()}, urls=urls)


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"


def _missing_file(config: Config, server: str, tenant: str, environ: Mapping[str, str]) -> Finding | None:
    """A model file that the preset names with its whole path and that is not here: a warning, since it may be there."""
    options = model_options(config, tenant, environ)
    setting = options.settings.get("model") if options is not None else None
    if setting is None or not os.path.isabs(setting.value) or config.tenants[server].path_map:
        return None
    if os.path.exists(setting.value):
        return None
    plain = config.tenants[server].kind in ONE_MODEL
    where, what = ("command", "--model ") if plain else ("preset", f"[{config.name_of(tenant)}] model = ")
    text = f"{server}: {what}{setting.value}: no such file here, its load would fail"
    return Finding(False, f"{text}; correct the path in the {where}")


async def _ask(entry: TenantEntry, environ: Mapping[str, str]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """`GET /models` and `GET /props`. Raises OSError, TimeoutError, ValueError (it is not of the configured kind)."""
    import aiohttp

    key = environ.get(entry.api_key_env) if entry.api_key_env else None
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
    answers: list[dict[str, Any]] = []
    async with aiohttp.ClientSession(headers=headers, timeout=timeout) as session:
        for path in ("/models", "/props"):
            try:
                async with session.get(f"{entry.url}{path}", params={"autoload": "false"}) as answer:
                    body = _json(path, answer.status, await answer.read(), _WHO[entry.kind])
            except aiohttp.ClientConnectorError as error:
                raise OSError(error.os_error.strerror or str(error)) from None
            except aiohttp.ClientError as error:
                raise OSError(str(error)) from None
            if answer.status != 200 or not isinstance(body, dict):
                if answer.status == _LOADING and entry.kind in ONE_MODEL:
                    raise OSError("it is loading its model; ask again once it is there")
                if answer.status in _KEY:
                    mend = "name the variable that holds the server's --api-key with api_key_env"
                    raise ValueError(f"{path} answered {answer.status}, for want of the right key: {mend}")
                raise ValueError(f"{path} answered {answer.status}, a {_WHO[entry.kind]} answers 200")
            answers.append(cast("dict[str, Any]", body))
    models: object = answers[0].get("data")
    if not isinstance(models, list):
        raise ValueError(f"/models has no list of models; is it a {_WHO[entry.kind]}?")
    is_router = answers[1].get("role") == "router"
    if is_router and entry.kind in ONE_MODEL:
        raise ValueError("this llama-server is a router: write kind: llama-router, and its models")
    if not is_router and entry.kind not in ONE_MODEL:
        mend = "start it with --models-preset FILE and without -m, or write kind: llama-server"
        raise ValueError(f"this llama-server serves one model and is no router: {mend}")
    return cast("list[dict[str, Any]]", models), answers[1]


def _json(path: str, status: int, raw: bytes, who: str) -> object:
    try:
        return json.loads(raw)
    except ValueError:
        raise ValueError(f"{path} answered {status} and no JSON; is it a {who}?") from None


async def _is_swapper(url: str) -> bool:
    """Whether what answers there is a swapper; with keys it tells so when it asks for one."""
    import aiohttp

    timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
    try:
        async with aiohttp.ClientSession(timeout=timeout) as session, session.get(f"{url}/ready") as answer:
            if 'realm="swapper"' in answer.headers.get("WWW-Authenticate", ""):
                return True
            body: object = await answer.json(content_type=None)
    except (aiohttp.ClientError, OSError, TimeoutError, ValueError):
        return False
    return isinstance(body, dict) and {"ready", "reasons"} <= cast("dict[str, object]", body).keys()


def _nearest(folder: Path) -> Path:
    """The folder, or the nearest parent that exists."""
    return next(parent for parent in (folder, *folder.parents) if parent.exists())


def _inventory(config: Config) -> str:
    cards, models = len(config.cards), sum(one.serves_models for one in config.spec().tenants.values())
    return f"{cards} card{'s' * (cards != 1)}, {models} model{'s' * (models != 1)}"
