"""Settings: where they come from, and what is said when one of them is wrong."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import SecretStr

from kvtier.config import (
    HostSettings,
    LoadedSettings,
    MemorySnapshot,
    Settings,
    load_settings,
    load_settings_with_sources,
)
from kvtier.config.sizes import parse_size
from kvtier.config.sources import setting_fields, variable_name
from kvtier.errors import ConfigError
from kvtier.keys import Namespace, Shard
from kvtier.layout import KVLayout
from kvtier.store import Store

DOCUMENT = Path(__file__).parents[2] / "docs" / "configuration.md"
GIB = 1 << 30

# For each setting: text that the environment may give, its value, and what is refused.
VALUES: dict[str, tuple[str, object, str]] = {
    "host.pool": ("server", "server", "shared"),
    "host.size": ("4.1GiB", int(4.1 * GIB), "8GB"),
    "host.workers": ("4", 4, "two"),
    "host.slab": ("128MiB", 128 << 20, "-1"),
    "host.pin": ("prefer", "prefer", "yes"),
    "host.policy": ("s3fifo", "s3fifo", "least recent"),
    "host.quotas": ("a=8GiB, *=1048576", {"a": 8 * GIB, "*": 1 << 20}, "lots"),
    "disk.path": ("/mnt/a:/mnt/b", ("/mnt/a", "/mnt/b"), ":"),
    "disk.size": ("2TiB", 2 << 40, "2TB"),
    "disk.min_free": ("1GiB", GIB, "5%"),
    "disk.threads": ("8", 8, "0"),
    "disk.codec": ("lz4", "lz4", "gzip"),
    "disk.min_uses": ("2", 2, "0"),
    "disk.max_write_rate": ("200MiB", 200 << 20, "fast"),
    "disk.timeout_s": ("0.5", 0.5, "inf"),
    "redis.url": ("rediss://a:6380", ("rediss://a:6380",), "http://a"),
    "redis.mode": ("cluster", "cluster", "ring"),
    "redis.service": ("cache", "cache", ""),
    "redis.username": ("kv", "kv", ""),
    "redis.password": ("s3cret", SecretStr("s3cret"), ""),
    "redis.password_file": ("/run/secrets/redis", "/run/secrets/redis", ""),
    "redis.tls_ca_file": ("/etc/ca.pem", "/etc/ca.pem", ""),
    "redis.tls_cert_file": ("/etc/cert.pem", "/etc/cert.pem", ""),
    "redis.tls_key_file": ("/etc/key.pem", "/etc/key.pem", ""),
    "redis.prefix": ("prod:kv", "prod:kv", "a{b}"),
    "redis.tenant": ("team-a", "team-a", "a:b"),
    "redis.ttl_s": ("3600", 3600.0, "0"),
    "redis.connections": ("8", 8, "0"),
    "redis.timeout_s": ("0.25", 0.25, "nan"),
    "redis.min_uses": ("2", 2, "0"),
    "redis.max_write_rate": ("200MiB", 200 << 20, "fast"),
    "server.url": ("kvtier+tcp://a:9408", "kvtier+tcp://a:9408", "http://a"),
    "server.token_file": ("/run/secrets/kvtier", "/run/secrets/kvtier", ""),
    "server.tls_ca_file": ("/etc/ca.pem", "/etc/ca.pem", ""),
    "server.tls_cert_file": ("/etc/cert.pem", "/etc/cert.pem", ""),
    "server.tls_key_file": ("/etc/key.pem", "/etc/key.pem", ""),
    "server.connections": ("8", 8, "0"),
    "server.timeout_s": ("0.25", 0.25, "nan"),
    "server.min_uses": ("2", 2, "0"),
    "server.max_write_rate": ("200MiB", 200 << 20, "fast"),
    "daemon.socket": ("/run/kv.sock", "/run/kv.sock", ""),
    "daemon.socket_group": ("1000", "1000", "two words"),
    "daemon.listen": ("0.0.0.0:9408", "0.0.0.0:9408", "9408"),
    "daemon.http": ("[::1]:9407", "[::1]:9407", "9407"),
    "daemon.admin_socket": ("off", "off", ""),
    "daemon.tenants": ("default=4GiB", {"default": 4 * GIB}, "lots"),
    "daemon.credentials": ("default=uid:1000", "default=uid:1000", "default=pw:x"),
    "daemon.tls_cert_file": ("/etc/cert.pem", "/etc/cert.pem", ""),
    "daemon.tls_key_file": ("/etc/key.pem", "/etc/key.pem", ""),
    "daemon.tls_client_ca_file": ("/etc/ca.pem", "/etc/ca.pem", ""),
    "daemon.checksums": ("false", False, "maybe"),
    "daemon.reservation_s": ("5", 5.0, "nan"),
    "daemon.dma_grace_s": ("0", 0.0, "nan"),
    "daemon.client_timeout_s": ("2.5", 2.5, "nan"),
    "daemon.max_clients": ("64", 64, "0"),
    "daemon.credits": ("8", 8, "0"),
    "daemon.drain_s": ("0", 0.0, "inf"),
    "daemon.log_level": ("debug", "debug", "all"),
    "daemon.log_format": ("json", "json", "xml"),
    "store.policy": ("off", "off", "on-evict"),
    "store.horizon_steps": ("4", 4.0, "nan"),
    "store.max_inflight_blocks": ("9", 9, "0"),
    "store.max_age_s": ("2.5", 2.5, "inf"),
    "restore.enabled": ("false", False, "perhaps"),
    "restore.max_inflight_blocks": ("1", 1, "1.5"),
    "restore.max_wait_s": ("0", 0.0, "soon"),
    "restore.max_staging": ("64MiB", 64 << 20, "none"),
    "restore.margin": ("0.5", 0.5, "-0.1"),
    "restore.capacity_bound_s": ("0", 0.0, "inf"),
    "restore.episode_budget_s": ("2.5", 2.5, "nan"),
    "restore.max_attempts": ("1", 1, "0"),
    "restore.on_failure": ("fail", "fail", "abort"),
    "events.endpoint": ("tcp://127.0.0.1:5557", "tcp://127.0.0.1:5557", "tcp://127.0.0.1"),
    "events.replay_endpoint": ("ipc:///run/kv-replay", "ipc:///run/kv-replay", "ipc://kv-replay"),
    "events.topic": ("kv@node-1", "kv@node-1", "two words"),
    "events.buffer_batches": ("100", 100, "0"),
}


def value_of(settings: Settings, name: str) -> object:
    section, _, leaf = name.partition(".")
    return getattr(getattr(settings, section), leaf)


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_the_test_knows_every_setting() -> None:
    assert list(VALUES) == list(setting_fields())


def test_settings_without_any_source_are_the_defaults_and_frozen() -> None:
    settings = load_settings(env={})
    assert settings == Settings()
    with pytest.raises(ValueError, match="frozen"):
        settings.host.workers = 2


def test_arguments_win_over_environment_over_file_over_defaults(tmp_path: Path) -> None:
    path = write(tmp_path / "kvtier.toml", '[host]\nsize = "1GiB"\nworkers = 2\npin = "prefer"\n')
    env = {"KVTIER_CONFIG": str(path), "KVTIER_HOST__WORKERS": "3", "KVTIER_HOST__PIN": "require", "HOME": "/"}
    loaded = load_settings_with_sources(env=env, overrides={"host": {"pin": "off"}})
    assert loaded.settings.host == HostSettings(size=GIB, workers=3, pin="off")
    assert loaded.sources["host.size"] == f"{path}: host.size"
    assert loaded.sources["host.workers"] == "environment variable KVTIER_HOST__WORKERS"
    assert loaded.sources["host.pin"] == "argument host.pin"
    assert loaded.sources["store.policy"] == "default"
    assert isinstance(loaded, LoadedSettings)


def test_a_path_wins_over_the_variable(tmp_path: Path) -> None:
    path = write(tmp_path / "given.toml", "[host]\nworkers = 7\n")
    assert load_settings(path, env={"KVTIER_CONFIG": "/nowhere.toml"}).host.workers == 7


def test_the_process_environment_is_read_when_none_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTIER_HOST__WORKERS", "5")
    assert load_settings().host.workers == 5


@pytest.mark.bug("US04")
@pytest.mark.parametrize("name", VALUES)
def test_each_setting_works_from_each_source(name: str, tmp_path: Path) -> None:
    text, value, _ = VALUES[name]
    section, _, leaf = name.partition(".")
    written = str(value).lower() if isinstance(value, bool | int | float) else f"'{value}'"
    written = str(list(value)) if isinstance(value, tuple) else written
    if isinstance(value, dict):
        written = "{ " + ", ".join(f'"{key}" = {number}' for key, number in value.items()) + " }"
    written = repr(value.get_secret_value()) if isinstance(value, SecretStr) else written
    path = write(tmp_path / "kvtier.toml", f"[{section}]\n{leaf} = {written}\n")
    assert value_of(load_settings(env={variable_name(name): text}), name) == value
    assert value_of(load_settings(path, env={}), name) == value
    assert value_of(load_settings(env={}, overrides={name: value}), name) == value
    assert value_of(load_settings(env={}, overrides={section: {leaf: value}}), name) == value


@pytest.mark.bug("US04")
@pytest.mark.parametrize("name", VALUES)
def test_garbage_names_setting_source_and_value(name: str) -> None:
    garbage = VALUES[name][2]
    with pytest.raises(ConfigError) as caught:
        load_settings(env={variable_name(name): garbage})
    shown = r"\*\*\*" if name == "redis.password" else f"'?{garbage}'?"
    assert re.match(rf"{name} = {shown} \(environment variable {variable_name(name)}\): \w", str(caught.value))


@pytest.mark.bug("US01")
@pytest.mark.parametrize(
    ("load", "source"),
    [
        (lambda path: load_settings(path, env={}), "kvtier.toml: host.sizs"),
        (lambda path: load_settings(env={"KVTIER_HOST__SIZS": "1GiB"}), "environment variable KVTIER_HOST__SIZS"),
        (lambda path: load_settings(env={}, overrides={"host": {"sizs": 1}}), "argument host.sizs"),
        (lambda path: load_settings(env={}, overrides={"host.sizs": 1}), "argument host.sizs"),
    ],
    ids=["file", "environment", "nested argument", "dotted argument"],
)
def test_an_unknown_setting_is_refused_with_the_nearest_name(
    load: Callable[[Path], Settings], source: str, tmp_path: Path
) -> None:
    path = write(tmp_path / "kvtier.toml", "[host]\nsizs = 1\n")
    with pytest.raises(ConfigError) as caught:
        load(path)
    assert source in str(caught.value)
    assert "did you mean host.size?" in str(caught.value) or "did you mean KVTIER_HOST__SIZE?" in str(caught.value)


@pytest.mark.bug("US01")
@pytest.mark.parametrize("variable", ["KVTIER_HOST_SIZE", "kvtier_host__size", "KVTIER_Host__Size"])
def test_a_variable_that_is_nearly_one_of_ours_is_refused(variable: str) -> None:
    with pytest.raises(ConfigError, match=rf"{variable} is no setting: did you mean KVTIER_HOST__SIZE\?"):
        load_settings(env={variable: "1GiB"})


@pytest.mark.bug("US01")
@pytest.mark.parametrize(
    ("env", "overrides", "words"),
    [
        ({}, {"zzz": 1}, r"zzz .* is no setting; `kvtier config --defaults` lists all settings$"),
        ({"KVTIER_FOO": "1"}, {}, r"KVTIER_FOO is no setting; `kvtier config --defaults` lists all settings$"),
        (
            {"KVTIER_HOST_SIZE": "1"},
            {},
            r"is no setting: did you mean KVTIER_HOST__SIZE\? `kvtier config --defaults` lists all settings$",
        ),
    ],
)
def test_an_unknown_setting_names_the_nearest_and_where_all_are(
    env: dict[str, str], overrides: dict[str, object], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        load_settings(env=env, overrides=overrides)


@pytest.mark.parametrize(
    "value", ["0", 0, -1, "-1", "nan", float("nan"), float("inf"), "inf", "1e9", 1.5, True, None, "8GB", ""]
)
def test_sizes_that_are_none_are_refused(value: object) -> None:
    with pytest.raises(ConfigError, match=r"host\.size = .*write bytes as a positive integer"):
        load_settings(env={}, overrides={"host.size": value})


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0, 0.0, 1000.5, 10**400, "2.5", True])
def test_numbers_that_are_none_are_refused(value: object) -> None:
    with pytest.raises(ConfigError, match=r"store\.horizon_steps = .*\(argument store\.horizon_steps\)"):
        load_settings(env={}, overrides={"store.horizon_steps": value})


@given(st.integers(1, 1 << 40), st.sampled_from(["B", "KiB", "MiB", "GiB", "TiB"]), st.sampled_from(["", " "]))
def test_sizes_are_read_to_the_byte(number: int, unit: str, gap: str) -> None:
    num_bytes = number * 1024 ** ["B", "KiB", "MiB", "GiB", "TiB"].index(unit)
    assert parse_size(f"{number}{gap}{unit}") == num_bytes
    assert parse_size(str(num_bytes)) == parse_size(num_bytes) == num_bytes


@pytest.mark.bug("US01")
@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"host.size": 1 << 20}, ["host.size 1048576 is smaller than one slab", "argument host.size"]),
        ({"host.slab": 3 << 20}, ["host.slab must be a power of two", "argument host.slab"]),
        ({"host.size": GIB, "host": {"size": 2 * GIB}}, ["host.size is set twice"]),
        ({"host": 3}, ["host = 3", "is a group: set one of host.pool, host.size"]),
        ({"host.slab": 2048}, ["host.slab = 2048", "4096"]),
        (
            {"host.size": GIB, "host.quotas": {"a": "1MiB", "b": "2GiB"}},
            ["host.quotas: 'b' may have 2147483648 bytes", "host.size = 1073741824", "argument host.quotas"],
        ),
    ],
)
def test_settings_that_contradict_are_refused(overrides: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_settings(env={}, overrides=overrides)
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read: No such file"),
        (b"host = ", "is not TOML"),
        (b"\xff\xfe", r"is not TOML: .*save it as UTF-8"),
        (b"host.size = " + b"[" * 5000, "cannot be read: its values are nested too deeply"),
        (b"host.size = " + b"9" * 5000, "cannot be read: a number in it has too many digits"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(content: bytes | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "kvtier.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=rf"KVTIER_CONFIG = '{path}' {message}.*name a readable TOML file, or none"):
        load_settings(env={"KVTIER_CONFIG": str(path)})
    with pytest.raises(ConfigError, match=r"KVTIER_CONFIG is empty"):
        load_settings(env={"KVTIER_CONFIG": ""})


@pytest.mark.parametrize(
    ("name", "reason"),
    [("\0", "embedded null byte"), ("/", "Is a directory"), ("/proc/self/mem", "Input/output error")],
)
def test_a_file_that_is_none_is_named(name: str, reason: str) -> None:
    for path, env in ((None, {"KVTIER_CONFIG": name}), (Path(name), {})):
        with pytest.raises(ConfigError) as caught:
            load_settings(path, env)
        assert f"= {name!r} cannot be read: {reason}; name a readable TOML file" in str(caught.value)


@pytest.mark.parametrize("name", ["host.size", "host.workers", "host.slab", "restore.max_inflight_blocks"])
def test_a_number_beyond_63_bits_is_refused_and_one_below_is_not(name: str, tmp_path: Path) -> None:
    for digits in ("8" + "0" * 15, "f" * 5000):
        path = write(tmp_path / "kvtier.toml", f"{name} = 0x{digits}\n")
        with pytest.raises(ConfigError, match=rf"^{re.escape(name)} = .*write a number below 2\*\*63$"):
            load_settings(path, env={})
    assert value_of(load_settings(env={}, overrides={name: 1 << 62}), name) == 1 << 62


@pytest.mark.parametrize("name", ["host", "host.size", "host.pin"])
def test_a_value_too_deep_to_show_is_refused_by_name(name: str, tmp_path: Path) -> None:
    value: Any = 1
    for _ in range(5000):
        value = [value]
    with pytest.raises(ConfigError, match=rf"^{re.escape(name)} = <list> \(argument {re.escape(name)}\)"):
        load_settings(env={}, overrides={name: value})


def test_a_value_too_long_for_a_line_is_cut() -> None:
    with pytest.raises(ConfigError, match=r"host\.size = '9{199}\.\.\. \(environment") as caught:
        load_settings(env={"KVTIER_HOST__SIZE": "9" * 5000})
    assert len(str(caught.value)) < 500


@pytest.mark.bug("CR21")
def test_auto_is_half_of_the_smaller_limit_divided_by_the_workers() -> None:
    container = MemorySnapshot(total_bytes=64 * GIB, available_bytes=60 * GIB, cgroup_limit_bytes=4_000_000_000)
    host = HostSettings(workers=4)
    assert host.pool_bytes(container) * 4 <= 2_000_000_000
    assert host.pool_bytes(container) % host.slab == 0
    assert HostSettings().pool_bytes(MemorySnapshot(64 * GIB, 1 * GIB)) == 32 * GIB


@pytest.mark.bug("CR21")
def test_an_explicit_size_is_held_or_refused_with_the_numbers() -> None:
    container = MemorySnapshot(total_bytes=64 * GIB, available_bytes=60 * GIB, cgroup_limit_bytes=4 * GIB)
    assert HostSettings(size=4 * GIB).pool_bytes(container) == 4 * GIB
    with pytest.raises(ConfigError) as caught:
        HostSettings(size=2 * GIB, workers=4).pool_bytes(container)
    for number in (2 * GIB, 8 * GIB, 64 * GIB, 4 * GIB, "host.workers = 4"):
        assert str(number) in str(caught.value)
    with pytest.raises(ConfigError, match=r"less than host\.slab"):
        HostSettings(workers=100).pool_bytes(container)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("a=1GiB,a=2GiB", "name each tenant once"),
        ("a", "write a table of tenant = size"),
        ({"a": 0}, "write a table of tenant = size"),
        ({"": 1}, "'' is no name of a tenant"),
        ({"two words": 1}, "'two words' is no name of a tenant"),
        ({"a": 1 << 63}, r"write numbers below 2\*\*63"),
        ([1], "write a table of tenant = size"),
        (3, "write a table of tenant = size"),
        ("a=8", "a may have 8 bytes only: write a unit, such as 'a=8GiB', or leave a out"),
        ("b=2GiB,a=1048575", "a may have 1048575 bytes only: write a unit, such as 'a=1048575B'"),
        ({"a": 64}, "a may have 64 bytes"),
        ("a=4095B", "a may have 4095 bytes"),
    ],
)
def test_quotas_that_are_none_are_refused(value: object, words: str) -> None:
    with pytest.raises(ConfigError, match=rf"^host\.quotas = .*\(argument host\.quotas\): .*{words}"):
        load_settings(env={}, overrides={"host.quotas": value})


def test_quotas_may_be_more_than_the_pool_together_and_each_no_more_than_it() -> None:
    machine = MemorySnapshot(total_bytes=64 * GIB, available_bytes=60 * GIB)
    assert HostSettings(quotas={"a": 32 * GIB, "*": 20 * GIB}).pool_bytes(machine) == 32 * GIB
    with pytest.raises(ConfigError, match=rf"'a' may have {33 * GIB} bytes.* host.size = auto has \({32 * GIB}\)"):
        HostSettings(quotas={"a": 33 * GIB}).pool_bytes(machine)


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        (
            {"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/memory.max": "max", "sys/fs/cgroup/a/memory.max": "5"},
            5,
        ),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/memory.max": "7"}, 7),
        ({"proc/self/cgroup": "0::/../x\n", "sys/fs/cgroup/memory.max": "7"}, 7),
        ({"proc/self/cgroup": "4:cpu,memory:/d\n", "sys/fs/cgroup/memory/d/memory.limit_in_bytes": "9"}, 9),
        (
            {"proc/self/cgroup": "4:memory:/\n", "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712"},
            None,
        ),
        ({"proc/self/cgroup": "1:cpu:/\n0::/\n"}, None),
        ({}, None),
    ],
    ids=["v2 parent", "v2 in a container", "v2 outside the namespace", "v1", "v1 unlimited", "no memory", "no cgroups"],
)
def test_control_group_limits_are_found(files: dict[str, str], limit: int | None, tmp_path: Path) -> None:
    for name, text in {"proc/meminfo": "MemTotal:  100 kB\nMemAvailable: 50 kB\nHugePages_Total: 0\n", **files}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert MemorySnapshot.read(tmp_path) == MemorySnapshot(102_400, 51_200, limit)


def test_memory_that_cannot_be_read_asks_for_a_size(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"set host\.size to a number of bytes"):
        MemorySnapshot.read(tmp_path)


@pytest.mark.bug("US02")
def test_the_document_lists_each_setting_variable_and_default() -> None:
    rows = re.findall(r"^\| `(\S+)` \| `(\S+)` \| `(\S+)` \| \S.* \|$", DOCUMENT.read_text(), re.MULTILINE)
    assert [name for name, _, _ in rows] == list(setting_fields())
    assert [variable for _, variable, _ in rows] == [variable_name(name) for name in setting_fields()]
    documented = load_settings(env={variable: default for _, variable, default in rows})
    assert documented == Settings()


@pytest.mark.parametrize(
    "variable",
    [
        "KVTIER_SERVICE_HOST",
        "KVTIER_SERVICE_PORT",
        "KVTIER_SERVICE_PORT_HTTP",
        "KVTIER_PORT",
        "KVTIER_PORT_8080_TCP",
        "KVTIER_PORT_8080_TCP_ADDR",
        "KVTIER_SERVER_SERVICE_HOST",
        "KVTIER_SERVER_PORT_9100_UDP_PROTO",
    ],
)
def test_what_kubernetes_sets_for_a_service_named_kvtier_is_no_mistake(variable: str) -> None:
    assert load_settings(env={variable: "tcp://10.0.0.1:8080"}) == Settings()


@pytest.mark.parametrize("variable", ["KVTIER_HOST_SIZE", "KVTIER_PORTS", "KVTIER_DEBUG"])
def test_what_only_looks_like_it_is_refused(variable: str) -> None:
    with pytest.raises(ConfigError, match=variable):
        load_settings(env={variable: "1"})


@pytest.mark.parametrize(
    "url",
    [
        "redis://u:hunter2@h",
        "u:hunter2@h:6379",
        "redis:u:hunter2@h:6379",
        "redis://h:6379?password=hunter2",
        "redis://u:hun,ter2hunter2@h",
    ],
)
def test_a_password_is_in_no_message_of_a_url(url: str) -> None:
    places: list[dict[str, Any]] = [
        {"env": {"KVTIER_REDIS__URL": url}},
        {"env": {}, "overrides": {"redis.url": url}},
        {"env": {}, "overrides": {"redis.url": [url]}},
    ]
    for place in places:
        with pytest.raises(ConfigError) as caught:
            load_settings(**place)
        assert "ter2" not in str(caught.value)


@pytest.mark.parametrize("value", [12345, ["hunter2"], {"hunter2": 1}])
def test_a_password_is_in_no_message(value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        load_settings(env={}, overrides={"redis.password": value})
    assert "hunter2" not in str(caught.value)
    assert "12345" not in str(caught.value)
    with pytest.raises(ConfigError, match="twice") as caught:
        load_settings(env={}, overrides={"redis.password": "hunter2", "redis": {"password": "hunter2"}})
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"listen": "0.0.0.0:9408"}, ["daemon.listen = '0.0.0.0:9408'", "daemon.credentials", "tls_client_ca_file"]),
        ({"listen": "127.0.0.1:9408", "credentials": "default=uid:0"}, ["daemon.listen", "token"]),
        ({"socket": "off"}, ["daemon.socket", "daemon.listen", "set one"]),
        (
            {"socket": "off", "socket_group": "kv", "listen": "[::1]:1", "credentials": "default=token:/t"},
            ["daemon.socket_group = 'kv'", "needs daemon.socket"],
        ),
        ({"admin_socket": "/run/kvtier/kvtier.sock"}, ["daemon.admin_socket", "another path"]),
        ({"tls_cert_file": "/c"}, ["daemon.tls_cert_file", "daemon.tls_key_file", "together"]),
        ({"tls_client_ca_file": "/c"}, ["daemon.tls_client_ca_file", "daemon.tls_cert_file"]),
        ({"credentials": "default=cert:x"}, ["'x'", "daemon.tls_client_ca_file"]),
        ({"credentials": "a=uid:0"}, ["'a'", "daemon.tenants", "default"]),
        ({"tenants": "a=1GiB,b=1GiB", "credentials": "a=uid:0"}, ["daemon.tenants", "'b'", "daemon.credentials"]),
        ({"tenants": "a=1GiB"}, ["daemon.tenants", "'a'", "daemon.credentials"]),
    ],
)
def test_a_daemon_is_not_started_with_what_nobody_could_use_or_anybody(
    overrides: dict[str, Any], words: list[str]
) -> None:
    daemon = load_settings(env={}, overrides={"daemon": overrides}).daemon
    with pytest.raises(ConfigError) as caught:
        daemon.check()
    assert all(word in str(caught.value) for word in words), caught.value


def test_credentials_are_read() -> None:
    daemon = load_settings(
        env={}, overrides={"daemon.credentials": ["a=uid:007", " b=cert:engine 1", "a=token:/run/secrets/a"]}
    ).daemon
    assert [tuple(each) for each in daemon.bound_credentials] == [
        ("a", "uid", "7"),
        ("b", "cert", "engine 1"),
        ("a", "token", "/run/secrets/a"),
    ]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("a=token:secret", "whole path"),
        ("a=uid:root", "'root' is no user's number"),
        ("a=uid:1,b=uid:01", "named twice"),
        ("a=password:x", "write what shows a tenant"),
        (["a=uid:1", 3], "write what shows a tenant"),
        ("..=uid:1,", "write what shows a tenant"),
    ],
)
def test_credentials_that_are_none_are_refused(value: object, words: str) -> None:
    with pytest.raises(ConfigError, match=rf"^daemon\.credentials = .*: .*{words}"):
        load_settings(env={}, overrides={"daemon.credentials": value})


@pytest.mark.parametrize("name", ["*", ".", ".."])
def test_a_tenant_has_a_name_that_a_directory_may_have(name: str) -> None:
    with pytest.raises(ConfigError, match=r"^daemon\.tenants = .*is no name of a tenant here"):
        load_settings(env={}, overrides={"daemon.tenants": {name: 1 << 30}})


@pytest.mark.parametrize(
    "url",
    ["http://h:1", "kvtier+tcp://h", "kvtier+tcp://h:1/x", "kvtier+unix://h/x", "kvtier+unix:///", "kvtier+tcp://[:1"],
)
def test_a_server_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match=r"^server\.url = .*write kvtier\+unix:///path or kvtier\+tcp://host:port"):
        load_settings(env={}, overrides={"server.url": url})


def test_a_token_stands_in_no_url() -> None:
    with pytest.raises(ConfigError, match=r"server\.token_file") as caught:
        load_settings(env={}, overrides={"server.url": "kvtier+tcp://hunter2@h:1"})
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("url", ["redis://h/3", "rediss://h:6380/0", "redis://a:1,redis://h:7/12"])
def test_the_number_of_a_redis_database_is_refused_by_name(url: str) -> None:
    with pytest.raises(
        ConfigError, match=r"^redis\.url = .*KVTIER_REDIS__URL.*number of a database.*not supported.*write"
    ):
        load_settings(env={"KVTIER_REDIS__URL": url})


def test_a_quota_of_less_than_one_block_is_refused_when_the_block_is_known() -> None:
    layout = KVLayout(num_layers=4, num_kv_heads=8, head_dim=128, dtype="float16", block_tokens=16)
    settings = load_settings(env={}, overrides={"host.size": "64MiB", "host.quotas": {"a": "64KiB"}})
    words = r"host\.quotas: 'a' may have 65536 bytes, and one block takes \d+"
    with Store(settings, touch=False) as store, pytest.raises(ConfigError, match=words):
        store.open_space(Namespace("m", "r", layout, "g", Shard(0, 1)))
