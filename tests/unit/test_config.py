from __future__ import annotations

from pathlib import Path

import pytest

from swapper.config import Config, load, loads
from swapper.core.spec import CardSpec, TenantSpec
from swapper.core.types import WorkClass
from swapper.errors import ConfigError

GOOD = """\
listen: 127.0.0.1:9292
cards:
  gpu0: {probe: declared, index: 0, vram: 24GiB, reserve: 512MiB}
tenants:
  llama:
    kind: llama-router
    control: command
    command: [llama-server, --port, "8080"]
    card: gpu0
    url: http://127.0.0.1:8080
    slot_dir: slots
    snapshots: {strategy: auto, required: true}
    models:
      qwen3.6-27b: {vram: 19.5GiB, aliases: [gpt-4o, chat], default: true}
      small: {vram: 512MiB}
"""
HOME = {"HOME": "/home/ann"}


def parsed(text: str, environ: dict[str, str] | None = None, folder: Path = Path("/etc/swapper")) -> Config:
    return loads(text, folder=folder, environ=HOME | (environ or {}))


def problems(text: str, environ: dict[str, str] | None = None) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parsed(text, environ)
    return caught.value.problems


def test_the_spec_has_one_tenant_for_each_model_with_its_need_in_mib() -> None:
    spec = parsed(GOOD).spec()
    assert spec.cards == {"gpu0": CardSpec("gpu0", total_mib=24 * 1024, reserve_mib=512)}
    assert spec.tenants["llama/qwen3.6-27b"] == TenantSpec(
        id="llama/qwen3.6-27b",
        server="llama",
        card="gpu0",
        host="main",
        need_mib=19_968,
        default=True,
        save_required=True,
    )
    assert not spec.tenants["llama/small"].default


def test_a_model_of_vram_all_needs_what_its_card_can_give() -> None:
    spec = parsed(GOOD.replace("vram: 19.5GiB", "vram: all")).spec()
    assert spec.tenants["llama/qwen3.6-27b"].need_mib == 24 * 1024 - 512


def test_models_are_found_by_name_and_by_alias() -> None:
    assert parsed(GOOD).models() == {
        "qwen3.6-27b": "llama/qwen3.6-27b",
        "gpt-4o": "llama/qwen3.6-27b",
        "chat": "llama/qwen3.6-27b",
        "small": "llama/small",
    }


def test_the_policy_of_the_file_reaches_the_spec_in_ms() -> None:
    policy = parsed(GOOD + "policy: {drain: {interactive: 90s}, on_drain_limit: reopen, grace: 1m}\n").spec().policy
    assert policy.drain_ms[WorkClass.INTERACTIVE] == 90_000
    assert policy.drain_ms[WorkClass.BATCH] == 600_000
    assert (policy.on_drain_limit, policy.grace_ms) == ("reopen", 60_000)


def test_paths_start_at_the_folder_of_the_file_and_home() -> None:
    config = parsed(GOOD)
    assert config.tenants["llama"].slot_dir == Path("/etc/swapper/slots")
    assert config.state_dir == Path("/home/ann/.local/state/swapper")


def test_snapshots_off_need_no_slot_folder_and_save_nothing() -> None:
    text = GOOD.replace("    slot_dir: slots\n", "").replace("strategy: auto, required: true", "strategy: off")
    assert not parsed(text).spec().tenants["llama/small"].save


def test_a_wrong_word_is_told_with_its_line_and_the_nearest_right_one() -> None:
    assert problems(GOOD.replace("declared", "nvmll")) == [
        "swapper.yaml:3: cards.gpu0.probe: 'nvmll' is not one of nvml, amdgpu, unified, declared; did you mean nvml?"
    ]


def test_an_unknown_key_is_told_with_its_line_and_the_nearest_right_one() -> None:
    assert problems(GOOD + "gatewy: {}\n") == ["swapper.yaml:16: gatewy: unknown key; did you mean gateway?"]


def test_a_key_is_suggested_by_the_name_it_has_in_the_file() -> None:
    said = problems(GOOD.replace("vram: 512MiB", "vrm: 512MiB"))
    assert said == ["swapper.yaml:15: tenants.llama.models.small.vrm: unknown key; did you mean vram?"]


def test_all_problems_are_told_at_once_in_the_order_of_the_file() -> None:
    said = problems(GOOD.replace("24GiB", "24GB") + "policy: {max_hold: 60}\ngateway: {keepalive_style: date}\n")
    assert [line.split(": ")[1] for line in said] == [
        "cards.gpu0.vram",
        "policy.max_hold",
        "gateway.keepalive_style",
    ]
    assert "did you mean 24GiB?" in said[0]
    assert "write 60s for seconds" in said[1]


def test_a_number_beyond_all_sense_is_told_like_any_other() -> None:
    (said,) = problems(GOOD.replace("24GiB", "9" * 300 + "GiB"))
    assert said.startswith("swapper.yaml:")
    assert ": cards.gpu0.vram: '9999" in said
    assert "is more than any card or disk has" in said


def test_a_key_given_twice_is_an_error() -> None:
    assert problems(GOOD + "listen: 127.0.0.1:1\n") == [
        "swapper.yaml:16: listen: stands twice in the same section; keep one"
    ]


def test_broken_yaml_is_told_with_its_line() -> None:
    (said,) = problems(GOOD + "policy: {max_hold: 1h\n")
    assert said.startswith("swapper.yaml:17: this is not YAML: ")


@pytest.mark.parametrize("text", ["- a\n", "word\n", "5\n"])
def test_a_file_without_keys_is_an_error(text: str) -> None:
    assert problems(text) == ["swapper.yaml:1: the file must be keys with values, like `cards:`"]


def test_an_empty_file_lacks_cards() -> None:
    assert problems("") == ["swapper.yaml:1: cards: is required"]


def test_off_is_a_word_and_not_a_truth_value() -> None:
    assert problems(GOOD.replace("required: true", "required: off")) == [
        "swapper.yaml:12: tenants.llama.snapshots.required: must be true or false, not 'off'"
    ]


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("index: 0", "host: attic", "cards.gpu0.host: an agent on another host is not supported by this version"),
    ],
)
def test_what_this_version_cannot_do_is_refused_in_words(old: str, new: str, said: str) -> None:
    assert said in problems(GOOD.replace(old, new))[0]


@pytest.mark.parametrize(
    "extra",
    [
        "windows: {sunday: {cron: '0 4 * * SUN', tz: Europe/Berlin, card: gpu0, run: [[a, b]], on_missed: run_once}}",
    ],
)
def test_documented_sections_of_later_versions_are_known_but_refused(extra: str) -> None:
    (said,) = problems(GOOD + extra + "\n")
    assert "is not supported by this version; remove it" in said


@pytest.mark.parametrize(("strategy", "refused"), [("replay", True), ("off", True), ("auto", False), ("rewind", False)])
def test_slots_are_saved_by_the_clock_where_slots_are_saved(strategy: str, *, refused: bool) -> None:
    text = GOOD.replace("{strategy: auto, required: true}", f"{{strategy: {strategy}, every: 5m}}")
    if refused:
        (said,) = problems(text)
        assert f"snapshots.every: does nothing with strategy: {strategy}" in said
    else:
        assert {t.every_ms for t in parsed(text).spec().tenants.values()} == {300_000}


@pytest.mark.parametrize("every", ["0", "0s", "9999ms"])
def test_slots_are_not_saved_all_the_time(every: str) -> None:
    (said,) = problems(GOOD.replace("required: true", f"every: {every}"))
    place = "swapper.yaml:12: tenants.llama.snapshots.every"
    why = "for each save keeps all slots of the model waiting"
    assert said == f"{place}: must be 10s or longer, {why}; null saves none by the clock"


@pytest.mark.parametrize(("every", "ms"), [("10s", 10_000), ("null", None)])
def test_the_shortest_time_between_two_saves_is_as_good_as_none_at_all(every: str, ms: int | None) -> None:
    spec = parsed(GOOD.replace("required: true", f"every: {every}")).spec()
    assert {tenant.every_ms for tenant in spec.tenants.values()} == {ms}


@pytest.mark.parametrize(("more", "why"), [("privacy: strict", "keeps no text"), ("sweep: false", "saves slots only")])
def test_what_could_hold_a_card_for_ever_is_refused_where_conversations_are_required(more: str, why: str) -> None:
    (said,) = problems(GOOD.replace("required: true", f"required: true, {more}"))
    assert why in said
    assert "write required: false, or leave that out" in said
    parsed(GOOD.replace("required: true", more))


def test_requests_on_disk_and_strict_privacy_contradict_each_other() -> None:
    (said,) = problems(GOOD.replace("required: true", "bodies: disk, privacy: strict"))
    place = "swapper.yaml:12: tenants.llama.snapshots.bodies"
    why = "disk keeps the text of requests, and privacy: strict keeps none"
    assert said == f"{place}: {why}; write bodies: memory, or privacy: normal"


@pytest.mark.parametrize("kept", ["bodies: disk", "privacy: strict", "bodies: memory, privacy: strict"])
def test_each_of_them_alone_is_taken(kept: str) -> None:
    assert parsed(GOOD.replace("required: true", kept)).tenants["llama"].snapshots.sweep


def test_settings_that_are_not_acted_on_are_noticed_not_swallowed() -> None:
    text = GOOD + "policy: {overhead: 0.2, patience: {batch: 1h}}\n"
    told = dict(notice.split(": ")[1:] for notice in parsed(text).notices)
    assert sorted(told) == ["policy.overhead", "policy.patience"]
    assert all(s.startswith("is read, but this version ") and s.endswith("; leave it out") for s in told.values())


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("card: gpu0", "card: gpu1", "tenants.llama.card: there is no card 'gpu1'; cards are gpu0"),
        ("vram: 512MiB", "default: false", "tenants.llama.models.small: needs vram: what it takes"),
        ("19.5GiB", "23.6GiB", "23.6 GiB do not fit card gpu0, which has 23.5 GiB to give"),
        ("vram: 512MiB", "vram: 512MiB, aliases: [chat]", "'chat' is already a name of llama/qwen3.6-27b"),
        ("slot_dir: slots", "evict: auto", "tenants.llama: needs slot_dir: the folder of --slot-save-path"),
        ('command: [llama-server, --port, "8080"]', "evict: auto", "control: command needs command"),
        ("control: command", "control: attach", "command: is never run with control: attach"),
        ("slot_dir: slots", "slot_dir: slots\n    gate: 127.0.0.1:1", "gate: is not a key of kind llama-router"),
        ("url: http://127.0.0.1:8080", "url: 127.0.0.1:8080", "is not a server's address; write it like http://"),
        ("url: http://127.0.0.1:8080", "evict: auto", "tenants.llama: needs url"),
        ("slot_dir: slots", "slot_dir: slots\n    preset: no.ini", "preset: /etc/swapper/no.ini does not exist"),
        ("listen: 127.0.0.1:9292", "listen: 9292", "listen: '9292' is not host:port"),
        ("listen: 127.0.0.1:9292", "listen: 127.0.0.1:\u00b2", "listen: '127.0.0.1:\u00b2' is not host:port"),
        ("vram: 24GiB, ", "", "cards.gpu0: probe: declared needs vram: SIZE"),
        ("reserve: 512MiB", "reserve: 25GiB", "cards.gpu0.reserve: leaves nothing of 24 GiB"),
        ("index: 0", "index: {a: 1}", "cards.gpu0.index: must be a GPU's index"),
        ("listen: 127.0.0.1:9292", "redis: http://x", "redis: must be redis://, rediss:// or unix://"),
        ("listen: 127.0.0.1:9292", "redis: redis://:pw@x", "set the whole address in SWAPPER__REDIS"),
    ],
)
def test_sections_that_do_not_fit_each_other_are_told(old: str, new: str, said: str) -> None:
    assert said in "\n".join(problems(GOOD.replace(old, new)))


@pytest.mark.parametrize(
    ("listen", "url"),
    [
        ("127.0.0.1:9292", "http://127.0.0.1:9292"),
        ("127.0.0.1:9292", "http://localhost:9292/"),
        ("0.0.0.0:9292", "http://127.0.0.1:9292"),
        ("'[::]:9292'", "'http://[::1]:9292'"),
        ("gpu.lan:80", "http://gpu.lan"),
    ],
)
def test_a_router_at_swappers_own_address_is_told(listen: str, url: str) -> None:
    text = GOOD.replace("127.0.0.1:9292", listen).replace("http://127.0.0.1:8080", url)
    [said] = problems(text)
    assert said.startswith("swapper.yaml:10: tenants.llama.url: is swapper's own address (listen: ")


@pytest.mark.parametrize("url", ["http://127.0.0.1:9293", "http://gpu2.lan:9292", "https://127.0.0.1", "http://h:x"])
def test_a_router_elsewhere_is_not_taken_for_swapper(url: str) -> None:
    assert parsed(GOOD.replace("http://127.0.0.1:8080", url)).tenants["llama"].url == url


def second(url: str, slot_dir: str = "others", strategy: str = "auto") -> str:
    """A configuration with two routers; the second one's own."""
    return f"""{GOOD}  other:
    kind: llama-router
    card: gpu0
    url: {url}
    slot_dir: {slot_dir}
    snapshots: {{strategy: {strategy}}}
    models: {{tiny: {{vram: 512MiB}}}}
"""


@pytest.mark.parametrize("url", ["http://127.0.0.1:8080", "http://localhost:8080/", "'http://[::1]:8080'"])
def test_a_server_is_one_entry(url: str) -> None:
    (said,) = problems(second(url))
    assert said == ("swapper.yaml:19: tenants.other.url: is that of tenants.llama, too: write one server as one entry")


@pytest.mark.parametrize("slot_dir", ["slots", "./slots/", "/etc/swapper/slots"])
def test_two_servers_do_not_share_a_slot_folder(slot_dir: str) -> None:
    (said,) = problems(second("http://127.0.0.1:8081", slot_dir))
    assert said.startswith("swapper.yaml:20: tenants.other.slot_dir: is that of tenants.llama, too, and each deletes")


@pytest.mark.parametrize(
    ("url", "slot_dir", "strategy"),
    [
        ("http://127.0.0.1:8081", "others", "auto"),
        ("http://gpu2.lan:8080", "others", "auto"),
        ("http://127.0.0.1:8080/other", "others", "auto"),
        ("http://127.0.0.1:8081", "slots", "off"),
    ],
)
def test_two_servers_with_nothing_in_common_are_two_entries(url: str, slot_dir: str, strategy: str) -> None:
    assert list(parsed(second(url, slot_dir, strategy)).tenants) == ["llama", "other"]


MEASURED = GOOD.replace("probe: declared, index: 0, vram: 24GiB", "probe: nvml, index: 0")


def test_what_a_measured_card_has_is_left_to_its_probe_and_what_takes_all_of_it_grows_with_that() -> None:
    spec = parsed(MEASURED.replace("vram: 512MiB", "vram: all, default: true")).spec()
    assert (spec.cards["gpu0"].total_mib, spec.tenants["llama/small"].need_mib) == (0, 0)
    known = spec.learned({"gpu0": 16_384})
    assert known.cards["gpu0"] == CardSpec("gpu0", 16_384, 512, measured=True)
    assert known.tenants["llama/small"].need_mib == 16_384 - 512
    assert known.tenants["llama/qwen3.6-27b"].need_mib == 19_968
    assert known.learned({"gpu0": 16_384}) is known
    assert known.learned({"gpu0": 0, "other": 5}) is known


def test_what_the_configuration_says_a_card_has_no_probe_corrects() -> None:
    spec = parsed(GOOD.replace("probe: declared", "probe: nvml")).spec()
    assert spec.learned({"gpu0": 99}) is spec


@pytest.mark.parametrize(
    ("card", "gpus"),
    [
        ("{probe: nvml}", ()),
        ("{probe: nvml, index: [0, 1]}", ("0", "1")),
        ("{probe: nvml, uuid: GPU-1}", ("GPU-1",)),
        ("{probe: amdgpu, uuid: '0000:03:00.0'}", ("0000:03:00.0",)),
        ("{reserve: 1GiB}", ()),
        ("{probe: unified}", ()),
    ],
)
def test_cards_are_measured_by_index_by_uuid_or_as_the_only_one(card: str, gpus: tuple[str, ...]) -> None:
    found = parsed(f"cards: {{gpu0: {card}}}\n").cards["gpu0"]
    assert (found.gpus, found.read_by) == (gpus, found.probe or "nvml")


@pytest.mark.parametrize(
    ("cards", "said"),
    [
        ("{a: {probe: nvml, index: [0, 0]}}", "cards.a.index: names a GPU twice; name each once"),
        ("{a: {probe: nvml, index: 0, uuid: GPU-1}}", "cards.a.uuid: stands beside index; name the GPU by one of the"),
        ("{a: {probe: nvml, uuid: GPU-1}, b: {probe: nvml, uuid: gpu-1}}", "cards.b.uuid: GPU gpu-1 is already in"),
        ("{a: {probe: nvml, index: 0}, b: {probe: nvml}}", "cards.b: a and b are both read by nvml: say which GPU"),
        ("{a: {probe: unified}, b: {probe: unified}}", "cards.b: the machine's memory is already card a; make one"),
        ("{a: {probe: nvml, vram: 4GiB, reserve: 4GiB}}", "cards.a.reserve: leaves nothing of 4 GiB"),
    ],
)
def test_cards_that_would_be_the_same_memory_are_told(cards: str, said: str) -> None:
    assert said in problems(f"cards: {cards}\n")[0]


def test_whether_defaults_fit_a_measured_card_is_not_judged_before_it_is_read() -> None:
    assert parsed(MEASURED.replace("vram: 512MiB", "vram: 512MiB, default: true")).notices == ()


def test_a_gpu_belongs_to_one_card() -> None:
    (said,) = problems(GOOD.replace("tenants:", "  both: {vram: 48GiB, index: [0, 1]}\ntenants:"))
    assert said == "swapper.yaml:4: cards.both.index: GPU 0 is already in card gpu0; a GPU belongs to one card"


def test_defaults_that_do_not_fit_together_are_noticed() -> None:
    config = parsed(GOOD.replace("small: {vram: 512MiB}", "small: {vram: 5GiB, default: true}"))
    assert config.notices == (
        "swapper.yaml:15: tenants.llama.models.small.default: does not fit beside the other defaults of gpu0"
        " (4 GiB left), so that it waits for its first call; take default: true from it, or from one before it",
    )


def test_without_a_path_the_file_in_the_working_folder_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "home/.config/swapper").mkdir(parents=True)
    at_home = tmp_path / "home/.config/swapper/swapper.yaml"
    at_home.write_text(GOOD)
    here = tmp_path / "swapper.yaml"
    monkeypatch.chdir(tmp_path)
    environ = {"HOME": str(tmp_path / "home")}
    assert load(None, environ).path == at_home
    here.write_text(GOOD)
    config = load(None, environ)
    assert (config.path, config.folder) == (here, tmp_path)


def test_no_file_anywhere_is_told_with_the_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"none of swapper\.yaml, ~/\.config/swapper/swapper\.yaml"):
        load(None, {"HOME": str(tmp_path)})


def test_a_file_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        load(tmp_path / "nothing.yaml", {})
    (tmp_path / "latin.yaml").write_bytes(b"listen: \xff\n")
    with pytest.raises(ConfigError, match="not UTF-8"):
        load(tmp_path / "latin.yaml", {})
