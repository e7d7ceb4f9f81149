"""Settings: each option from four places, one sentence for every mistake, and nothing silently ignored."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsidecar.core.access import Policy, Rule
from kvsidecar.core.shares import ShareRule
from kvsidecar.daemon.pool_geometry import auto_slab_bytes, pool_geometry
from kvsidecar.daemon.setting_sources import click_options, flag_of, load_settings, variable_of
from kvsidecar.daemon.settings import Settings
from kvsidecar.device.host import HostPlatform
from kvsidecar.errors import ConfigError
from kvsidecar.pool.host_pool import HostPool, PoolSpec
from kvsidecar.protocol import paths
from kvsidecar.support.memory_limits import HugePages
from kvsidecar.support.units import GiB, KiB, MiB, Size
from kvsidecar.tiers.policy import Admission
from kvsidecar.types import Eviction, Verify
from tests.marks import processes

NO_FILE = Path("no such file")

SAMPLES: dict[str, tuple[str, Any]] = {
    "socket": ("/run/x/kv.sock", "/run/x/kv.sock"),
    "socket_mode": ("0660", "0660"),
    "socket_group": ("vllm", "vllm"),
    "admin_group": ("operators", "operators"),
    "policy": (
        "[{uids=[7], namespaces=['m*']}]",
        Policy((Rule(uids=frozenset({7}), namespaces=("m*",)),)),
    ),
    "share": (
        "[{name='chat', namespaces=['m*'], guaranteed='25%'}]",
        (ShareRule("chat", ("m*",), guaranteed=Size(percent=25.0)),),
    ),
    "local_protocol": ("off", False),
    "tcp_listen": ("[::]:9465", "[::]:9465"),
    "tls_certificate": ("/etc/x/tls.crt", "/etc/x/tls.crt"),
    "tls_key": ("/etc/x/tls.key", "/etc/x/tls.key"),
    "tls_client_ca": ("/etc/x/ca.crt", "/etc/x/ca.crt"),
    "http_host": ("0.0.0.0", "0.0.0.0"),
    "http_port": ("0", 0),
    "http_page": ("off", False),
    "device": ("host", "host"),
    "devices": ("host-1, host", ("host-1", "host")),
    "pin_max": ("5%", Size(percent=5.0)),
    "zero_freed": ("on", True),
    "eviction": ("rhythm", Eviction.RHYTHM),
    "pool_size": ("75%", Size(percent=75.0)),
    "slab_size": ("16MiB", 16 * MiB),
    "chunk_size": ("256MiB", 256 * MiB),
    "store_chunk": ("off", None),
    "huge_pages": ("thp", HugePages.THP),
    "verify": ("sample", Verify.SAMPLE),
    "tracing": ("otlp", "otlp"),
    "prefault_threads": ("3", 3),
    "numa": ("off", "off"),
    "pool_dir": ("/dev/shm/kv", "/dev/shm/kv"),
    "table_dir": ("/dev/shm/kv", "/dev/shm/kv"),
    "cold_start": ("on", True),
    "disk_dir": ("/var/cache/kv", "/var/cache/kv"),
    "disk_size": ("1TiB", 1 << 40),
    "disk_admission": ("all", Admission.ALL),
    "disk_writes_per_day": ("2TiB", 2 << 40),
    "disk_deadline": ("0.5", 0.5),
    "cluster_master": ("kv-master:50051", "kv-master:50051"),
    "cluster_hostname": ("10.0.0.7", "10.0.0.7"),
    "cluster_segment": ("64GiB", 64 << 30),
    "cluster_protocol": ("rdma", "rdma"),
    "cluster_devices": ("mlx5_0,mlx5_1", "mlx5_0,mlx5_1"),
    "cluster_replicas": ("2", 2),
    "cluster_soft_pin": ("60", 60.0),
    "cluster_tenant": ("blue", "blue"),
    "cluster_admission": ("on_evict", Admission.ON_EVICT),
    "cluster_deadline": ("0.5", 0.5),
    "shared_dir": ("/mnt/kv", "/mnt/kv"),
    "shared_size": ("9TiB", 9 << 40),
    "shared_admission": ("all", Admission.ALL),
    "shared_deadline": ("0.5", 0.5),
    "on_pin_failure": ("exit", "exit"),
    "memory_check": ("off", False),
    "lease_max": ("12.5", 12.5),
    "drain_timeout": ("0", 0.0),
    "light_sleep": ("0", 0.0),
    "lock_wait": ("0", 0.0),
    "stuck_after": ("5", 5.0),
    "log_format": ("json", "json"),
    "log_level": ("debug", "debug"),
}
"""For each option a value that is not its default, as text and as the setting."""


def load(flags: dict[str, str | None] | None = None, environ: dict[str, str] | None = None) -> Settings:
    return load_settings(flags or {}, environ or {}, NO_FILE)


def refusal(flags: dict[str, str | None] | None = None, environ: dict[str, str] | None = None) -> str:
    with pytest.raises(ConfigError) as raised:
        load(flags, environ)
    return str(raised.value)


def toml(path: Path, text: str) -> Path:
    file = path / "kvsidecar.toml"
    file.write_text(text)
    return file


TLS: dict[str, str | None] = {
    "tcp_listen": "0.0.0.0:9465",
    "tls_certificate": "c",
    "tls_key": "k",
    "tls_client_ca": "a",
    "policy": "[{certificates=['ops'], admin=true}]",
}


@pytest.mark.parametrize("missing", ["tls_certificate", "tls_key", "tls_client_ca"])
def test_tcp_is_refused_without_all_of_mtls(missing: str) -> None:
    assert load(TLS).tcp_listen == "0.0.0.0:9465"
    said = refusal({**TLS, missing: None})
    assert said == f"--tcp-listen='0.0.0.0:9465' needs {flag_of(missing)}: TCP is served with mTLS only"


def test_tcp_needs_a_rule_for_certificates_and_its_files_need_tcp() -> None:
    for policy in (None, "[{uids=[1], namespaces=['*']}]"):
        assert "needs a rule of the policy with certificates" in refusal({**TLS, "policy": policy})
    assert refusal({"tls_key": "k"}) == "--tls-key='k' has no effect without --tcp-listen"


@pytest.mark.parametrize("address", ["9465", ":9465", "host", "host:", "host:x", "host:70000", "::1:9465"])
def test_an_address_that_is_none_is_refused(address: str) -> None:
    assert f"--tcp-listen={address!r} " in refusal({**TLS, "tcp_listen": address})


# -- sources -----------------------------------------------------------------------------------------------------


def test_every_option_has_a_sample_here() -> None:
    assert SAMPLES.keys() == Settings.model_fields.keys()


def companions(option: str) -> dict[str, str | None]:
    """What must be set beside an option for it to be valid at all."""
    if option in TLS and option != "policy":
        return {name: text for name, text in TLS.items() if name != option}
    disk: dict[str, str | None] = {"disk_dir": "/var/cache/kv", "disk_size": "1TiB"}
    if option.startswith("disk_"):
        return {name: text for name, text in disk.items() if name != option}
    shared: dict[str, str | None] = {"shared_dir": "/mnt/kv", "shared_size": "9TiB"}
    if option.startswith("shared_"):
        return {name: text for name, text in shared.items() if name != option}
    if option.startswith("cluster_"):
        return {} if option == "cluster_master" else {"cluster_master": "kv-master:50051"}
    needs: dict[str, dict[str, str | None]] = {
        "socket_group": {"socket_mode": "0660"},
        "table_dir": {"pool_dir": "/dev/shm/kv"},
    }
    return needs.get(option, {})


@pytest.mark.parametrize("option", SAMPLES)
def test_every_option_can_come_from_flag_variable_and_file(option: str, tmp_path: Path) -> None:
    text, value = SAMPLES[option]
    file = toml(tmp_path, f'{option} = "{text}"\n')
    beside = companions(option)
    assert getattr(load({option: text, **beside}), option) == value
    assert getattr(load(beside, {variable_of(option): text}), option) == value
    assert getattr(load_settings(beside, {}, file), option) == value
    assert getattr(load(), option) != value


@pytest.mark.parametrize(
    ("line", "option", "value"),
    [
        ("pool_size = 1073741824", "pool_size", Size(nbytes=GiB)),
        ("http_port = 0", "http_port", 0),
        ("memory_check = false", "memory_check", False),
        ("lease_max = 2", "lease_max", 2.0),
        ("slab_size = 8388608", "slab_size", 8 * MiB),
    ],
)
def test_the_file_may_use_tomls_own_types(line: str, option: str, value: object, tmp_path: Path) -> None:
    assert getattr(load_settings({}, {}, toml(tmp_path, line)), option) == value


def test_a_flag_beats_a_variable_which_beats_the_file_which_beats_the_default(tmp_path: Path) -> None:
    file = toml(tmp_path, "http_port = 1\nlease_max = 1\nstuck_after = 1\n")
    environ = {"KVSIDECAR_HTTP_PORT": "2", "KVSIDECAR_LEASE_MAX": "2"}
    settings = load_settings({"http_port": "3", "lease_max": None}, environ, file)
    assert (settings.http_port, settings.lease_max, settings.stuck_after, settings.drain_timeout) == (3, 2.0, 1.0, 10.0)


def test_the_file_is_the_one_named_by_flag_else_by_variable(tmp_path: Path) -> None:
    for name in ("flag", "variable", "default"):
        (tmp_path / name).write_text(f'http_host = "{name}"')
    flag, variable, default = (str(tmp_path / name) for name in ("flag", "variable", "default"))
    environ = {"KVSIDECAR_CONFIG": variable}
    assert load_settings({"config": flag}, environ, Path(default)).http_host == "flag"
    assert load_settings({"config": None}, environ, Path(default)).http_host == "variable"
    assert load_settings({}, {}, Path(default)).http_host == "default"
    assert load_settings({}, {}, NO_FILE).http_host == "127.0.0.1"


def test_the_real_environment_is_read_unless_another_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSIDECAR_HTTP_PORT", "77")
    monkeypatch.setenv("KVSIDECAR_POOL_SIZE", "50%")
    settings = load_settings({}, default_file=NO_FILE)
    assert (settings.http_port, settings.pool_size) == (77, Size(percent=50.0))
    assert load().http_port == 9464
    assert load().pool_size == Size(nbytes=8 * GiB)


def test_settings_do_not_change(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="frozen"):
        load().http_port = 1


# -- mistakes ----------------------------------------------------------------------------------------------------

NOT_A_SIZE = "is not a size: use a number with KiB, MiB, GiB or TiB, or a percentage such as 80%"


def test_a_bad_value_is_named_as_it_was_given(tmp_path: Path) -> None:
    file = toml(tmp_path, 'pool_size = "lots"\n')
    assert refusal({"pool_size": "lots"}) == f"--pool-size='lots' {NOT_A_SIZE}"
    assert refusal({}, {"KVSIDECAR_POOL_SIZE": "lots"}) == f"KVSIDECAR_POOL_SIZE='lots' {NOT_A_SIZE}"
    with pytest.raises(ConfigError) as raised:
        load_settings({}, {}, file)
    assert str(raised.value) == f"pool_size='lots' in {file} {NOT_A_SIZE}"


def test_a_daemon_may_have_all_tiers() -> None:
    disk, shared = {"disk_dir": "/var/cache/kv", "disk_size": "1TiB"}, {"shared_dir": "/mnt/kv", "shared_size": "9TiB"}
    all_of_them = load({**disk, **shared, "cluster_master": "kv-master:50051"})
    found = (all_of_them.disk_dir, all_of_them.cluster_master, all_of_them.shared_dir)
    assert found == ("/var/cache/kv", "kv-master:50051", "/mnt/kv")


def test_the_value_that_counts_is_the_one_blamed() -> None:
    environ = {"KVSIDECAR_HTTP_PORT": "also wrong"}
    assert refusal({"http_port": "wrong"}, environ) == "--http-port='wrong' must be a whole number"
    assert load({"http_port": "1"}, environ).http_port == 1


@pytest.mark.parametrize(
    ("option", "text", "problem"),
    [
        ("socket", "kv.sock", "is not an absolute path"),
        ("socket_mode", "0777", "must be '0600' or '0660'"),
        ("socket_mode", "660", "must be '0600' or '0660'"),
        ("socket_group", "vllm", "has no effect with {socket_mode} 0600: use 0660"),
        ("disk_dir", "/var/cache/kv", "needs {disk_size}: how many bytes of it to use"),
        ("disk_size", "1TiB", "has no effect without {disk_dir}"),
        ("cluster_master", "kv-master", "is not HOST:PORT, such as 0.0.0.0:9465 or [::]:9465"),
        ("cluster_replicas", "2", "has no effect without {cluster_master}"),
        ("shared_dir", "/mnt/kv", "needs {shared_size}: how many bytes of it to use"),
        ("shared_size", "1TiB", "has no effect without {shared_dir}"),
        ("http_host", "", "must have at least 1 character"),
        ("http_port", "65536", "must be less than or equal to 65535"),
        ("http_port", "-1", "must be greater than or equal to 0"),
        ("http_port", "80.5", "must be a whole number"),
        ("device", "tpu", "must be 'auto', 'cuda' or 'host'"),
        ("pool_size", "101%", "is not a size: a percentage is more than 0 and at most 100"),
        ("pool_size", "0", "is less than one memory page (4 KiB)"),
        ("pool_size", "64", "is less than one memory page (4 KiB): without a unit it is bytes; write 64GiB or 64MiB"),
        ("pool_size", "64g", "is ambiguous: write 64GiB, or 64GB (59.6 GiB)"),
        ("pool_size", "900TiB", "is more than 64 TiB, the most that a pool may be"),
        ("slab_size", "1001B", "is not a multiple of the page size (4 KiB)"),
        (
            "slab_size",
            "1000",
            "is not a multiple of the page size (4 KiB): without a unit it is bytes; write 1000GiB or 1000MiB",
        ),
        ("slab_size", "0", "is not a multiple of the page size (4 KiB)"),
        ("slab_size", "3MiB", "does not divide {chunk_size} (1 GiB)"),
        ("slab_size", "16GiB", "is more than {pool_size} (8 GiB)"),
        ("store_chunk", "fast", "is not a size: use a number with KiB, MiB, GiB or TiB"),
        ("store_chunk", "0", "is not a multiple of the page size (4 KiB)"),
        ("chunk_size", "1GB", "is not a multiple of the page size (4 KiB)"),
        ("chunk_size", "80%", "is not a size: use a number with KiB, MiB, GiB or TiB"),
        ("chunk_size", "512GiB", "must be less than 512 GiB: drivers fail to register that much in one call"),
        ("huge_pages", "yes", "must be 'auto', 'thp', 'hugetlb' or 'none'"),
        ("prefault_threads", "0", "must be greater than or equal to 1"),
        ("memory_check", "maybe", "must be on or off"),
        ("lease_max", "soon", "must be a number of seconds"),
        ("lease_max", "0", "must be greater than 0"),
        ("lease_max", "inf", "must be a finite number"),
        ("drain_timeout", "-1", "must be greater than or equal to 0"),
        ("log_level", "INFO", "must be 'debug', 'info', 'warning' or 'error'"),
    ],
)
def test_every_bad_value_is_one_sentence(option: str, text: str, problem: str) -> None:
    for name, refused in (
        (flag_of, refusal({option: text})),
        (variable_of, refusal({}, {variable_of(option): text})),
    ):
        named = problem.format_map({each: name(each) for each in Settings.model_fields})
        assert refused == f"{name(option)}={text!r} {named}"


def test_of_two_that_do_not_fit_together_the_one_that_was_given_is_blamed() -> None:
    assert refusal({"pool_size": "2MiB", "slab_size": "4MiB"}).startswith("--slab-size='4MiB' is more than --pool-size")
    assert refusal({"chunk_size": "32MiB"}, {"KVSIDECAR_SLAB_SIZE": "24MiB"}) == (
        "KVSIDECAR_SLAB_SIZE='24MiB' does not divide --chunk-size (32 MiB)"
    )
    assert load({"pool_size": "10%", "slab_size": "1GiB"}).slab_size == GiB


def test_one_that_was_not_given_is_called_as_the_one_that_needs_it() -> None:
    said = refusal({"pool_size": "1GiB"}, {"KVSIDECAR_DISK_DIR": "/disk"})
    assert said == "KVSIDECAR_DISK_DIR='/disk' needs KVSIDECAR_DISK_SIZE: how many bytes of it to use"


def test_of_two_in_the_file_both_are_keys(tmp_path: Path) -> None:
    file = toml(tmp_path, 'disk_dir = "/var/cache/kv"\n')
    with pytest.raises(ConfigError) as raised:
        load_settings({}, {}, file)
    assert str(raised.value) == f"disk_dir='/var/cache/kv' in {file} needs disk_size: how many bytes of it to use"


def test_later_errors_can_name_an_option_as_it_was_given(tmp_path: Path) -> None:
    file = toml(tmp_path, 'pool_dir = "/dev/shm/a"\nsocket_mode = "0660"\n')
    variables = {"KVSIDECAR_POOL_DIR": "/dev/shm/b", "KVSIDECAR_DEVICES": "0"}
    mixed = load_settings({"devices": "1"}, variables, file)
    called = [mixed.called(each) for each in ("devices", "pool_dir", "socket_mode", "table_dir")]
    assert called == ["--devices", "KVSIDECAR_POOL_DIR", "socket_mode", "--table-dir"]
    assert load_settings({}, variables, file).called("table_dir") == "KVSIDECAR_TABLE_DIR"
    assert load_settings({}, {}, file).called("table_dir") == "table_dir"


def test_a_socket_path_leaves_room_for_the_attach_socket() -> None:
    longest = "/" + "a" * 99
    assert load({"socket": longest}).socket == longest
    assert len(paths.attach_path(longest)) == 107
    assert refusal({"socket": longest + "a"}).endswith("is 101 bytes long; a Unix socket path has at most 100 here")
    assert refusal({"socket": "/" + "é" * 50}).endswith("is 101 bytes long; a Unix socket path has at most 100 here")


def test_a_default_that_cannot_work_here_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/" + "x" * 100)
    assert refusal().startswith("the default socket='/run/xxx")


@pytest.mark.parametrize(
    ("flags", "environ", "said"),
    [
        ({"poolsize": "1"}, {}, "--poolsize is not a setting: did you mean --pool-size?"),
        ({}, {"KVSIDECAR_POOLSIZE": "1"}, "KVSIDECAR_POOLSIZE is not a setting: did you mean KVSIDECAR_POOL_SIZE?"),
        ({}, {"KVSIDECAR_HTP_PORT": "1"}, "KVSIDECAR_HTP_PORT is not a setting: did you mean KVSIDECAR_HTTP_PORT?"),
        ({}, {"KVSIDECAR_pool_size": "1"}, "KVSIDECAR_pool_size is not a setting: did you mean KVSIDECAR_POOL_SIZE?"),
        ({}, {"KVSIDECAR_": "1"}, "KVSIDECAR_ is not a setting: "),
        ({"frobnicate": "1"}, {}, "--frobnicate is not a setting: see kvsidecar serve --help"),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest_known_one(
    flags: dict[str, str | None], environ: dict[str, str], said: str
) -> None:
    assert refusal(flags, environ).startswith(said)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("poolsize = 1", "poolsize in {} is not a setting: did you mean pool_size?"),
        ("POOL_SIZE = 1", "POOL_SIZE in {} is not a setting: did you mean pool_size?"),
        ("[serve]\npool_size = 1", "serve in {} is a table, and options are in none: remove [serve]"),
        ("pool_size", "{} is not a TOML file: "),
        ("pool_size = 64MiB", '{} is not a TOML file: quote the value in line 1: pool_size = "64MiB"'),
        ("\ndisk_dir = /var/kv # fast", '{} is not a TOML file: quote the value in line 2: disk_dir = "/var/kv"'),
        ('pool_size = "64MiB\n', "{} is not a TOML file: close the quotes in line 1"),
        ("http_port = 1\nhttp_port = 2\n", "{} is not a TOML file: http_port is there again in line 2: remove one"),
        ("http_port = 1 2", "{} is not a TOML file: quote the value in line 1: "),
        ("[[policy]]\nuids = [*]", "{} is not a TOML file: Invalid value at '*]' of line 2"),
        ("pool_size = 1.5", "pool_size=1.5 in {} is not a size: "),
        ("pool_size = [1]", "pool_size=[1] in {} is not a size: "),
        ("http_host = 1", "http_host=1 in {} must be a valid string"),
        ("socket_mode = 0o600", "socket_mode=384 in {} must be '0600' or '0660'"),
    ],
)
def test_a_mistake_in_the_file_names_key_and_file(text: str, said: str, tmp_path: Path) -> None:
    file = toml(tmp_path, text)
    with pytest.raises(ConfigError) as raised:
        load_settings({}, {}, file)
    assert str(raised.value).startswith(said.format(file))
    assert "\n" not in str(raised.value)


def test_a_named_file_must_exist_and_be_readable(tmp_path: Path) -> None:
    assert refusal({"config": str(tmp_path / "none")}) == f"{tmp_path / 'none'} does not exist"
    assert refusal({}, {"KVSIDECAR_CONFIG": str(tmp_path)}) == f"{tmp_path} cannot be read: Is a directory"
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    assert "is not a TOML file" in refusal({"config": str(tmp_path / "binary")})


def test_our_other_variables_are_no_settings() -> None:
    load({}, {"KVSIDECAR_FAILPOINTS": "pool.reserve=kill", "PATH": "/bin", "kvsidecar_pool_size": "wrong"})


@pytest.mark.parametrize("service", ["KVSIDECAR", "KVSIDECAR_METRICS", "KVSIDECAR_HTTP"])
def test_what_kubernetes_says_about_a_service_of_our_name_is_ignored(service: str) -> None:
    """Names and values as the kubelet makes them, for a Service with the ports 9464 (named http) and 53/UDP."""
    environ = {
        f"{service}_SERVICE_HOST": "10.0.0.11",
        f"{service}_SERVICE_PORT": "9464",
        f"{service}_SERVICE_PORT_HTTP": "9464",
        f"{service}_PORT": "tcp://10.0.0.11:9464",
        f"{service}_PORT_9464_TCP": "tcp://10.0.0.11:9464",
        f"{service}_PORT_9464_TCP_PROTO": "tcp",
        f"{service}_PORT_9464_TCP_PORT": "9464",
        f"{service}_PORT_9464_TCP_ADDR": "10.0.0.11",
        f"{service}_PORT_53_UDP": "udp://10.0.0.11:53",
        f"{service}_PORT_53_UDP_ADDR": "10.0.0.11",
    }
    assert load({}, environ).model_fields_set == set()


# -- flags -------------------------------------------------------------------------------------------------------


def test_there_is_a_flag_for_every_option_that_says_default_and_variable() -> None:
    options = {option.name: option for option in click_options()}
    assert options.keys() == {"config", *Settings.model_fields}
    for name in Settings.model_fields:
        option = options[name]
        assert option.opts == [flag_of(name)]
        assert option.metavar
        assert isinstance(option.help, str)
        assert option.help.endswith(f"; env: {variable_of(name)}]")
        assert "[default: " in option.help
        assert "None" not in option.help


def test_flags_that_are_not_given_leave_the_other_sources_alone() -> None:
    seen: dict[str, str | None] = {}
    command = click.Command("serve", params=[*click_options()], callback=lambda **flags: seen.update(flags))
    command.main(["--pool-size", "3GiB", "--log-level=debug"], standalone_mode=False)
    settings = load_settings(seen, {"KVSIDECAR_HTTP_PORT": "5", "KVSIDECAR_LOG_LEVEL": "error"}, NO_FILE)
    assert (settings.pool_size, settings.log_level, settings.http_port) == (Size(nbytes=3 * GiB), "debug", 5)


def test_help_says_the_same_default_that_the_settings_have() -> None:
    shown = {option.name: option.help or "" for option in click_options()}
    for option in ("http_port", "http_host", "lease_max", "device", "huge_pages", "socket_mode"):
        default = load().model_dump(mode="json")[option]
        text = f"{default:g}" if isinstance(default, float) else str(default)
        assert f"[default: {text};" in shown[option]
    assert f"[default: {load().pool_size};" in shown["pool_size"]
    assert load().chunk_size == GiB
    assert "[default: 1 GiB;" in shown["chunk_size"]


@processes
def test_importing_the_settings_is_cheap() -> None:
    heavy = "{'torch', 'grpc', 'aiohttp', 'numpy', 'cuda'}"
    program = f"import sys, kvsidecar.daemon.setting_sources; print(sorted({heavy} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"


# -- defaults and geometry ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("uid", "environ", "path"),
    [
        (0, {"XDG_RUNTIME_DIR": "/run/user/0"}, "/run/kvsidecar/kvsidecar.sock"),
        (7, {"XDG_RUNTIME_DIR": "/run/user/7"}, "/run/user/7/kvsidecar/kvsidecar.sock"),
        (7, {"XDG_RUNTIME_DIR": "relative"}, "/tmp/kvsidecar-7/kvsidecar.sock"),
        (7, {}, "/tmp/kvsidecar-7/kvsidecar.sock"),
    ],
)
def test_daemon_and_client_of_one_user_agree_on_the_socket(uid: int, environ: dict[str, str], path: str) -> None:
    assert paths.default_socket_path(environ, uid) == path
    assert paths.socket_path_problem(path) is None


def test_the_default_socket_is_that_of_this_user() -> None:
    assert load().socket == paths.default_socket_path()


def test_the_socket_mode_is_octal() -> None:
    assert load({"socket_mode": "0660"}).socket_mode_bits == 0o660


@pytest.mark.parametrize(
    ("pool", "slab"),
    [
        (4 * KiB, 4 * KiB),
        (3 * MiB, 3 * MiB),
        (4 * MiB, 4 * MiB),
        (100 * MiB, 4 * MiB),
        (2 * GiB, 64 * MiB),
        (2 * GiB - MiB, 32 * MiB),
        (1024 * GiB, 64 * MiB),
    ],
)
def test_an_automatic_slab_is_about_a_32nd_from_4_to_64_mib(pool: int, slab: int) -> None:
    assert auto_slab_bytes(pool) == slab


def pages(largest: int) -> st.SearchStrategy[int]:
    return st.integers(1, largest // (4 * KiB)).map(lambda count: count * 4 * KiB)


@given(pool=pages(2 * GiB), chunk=pages(GiB) | st.sampled_from([MiB, 96 * MiB, GiB]))
def test_any_pool_and_chunk_make_a_geometry_that_the_pool_accepts(pool: int, chunk: int) -> None:
    geometry = pool_geometry(load({"pool_size": str(pool), "chunk_size": str(chunk)}))
    assert geometry.pool_bytes == pool
    assert geometry.chunk_bytes <= chunk
    HostPool(PoolSpec(geometry.pool_bytes, geometry.slab_bytes, geometry.chunk_bytes), HostPlatform()).close()


def test_an_explicit_slab_is_taken_and_a_percentage_must_hold_one(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 1048576 kB\n")
    settings = load({"pool_size": "50%", "slab_size": "256MiB"})
    geometry = pool_geometry(settings, tmp_path)
    assert (geometry.pool_bytes, geometry.slab_bytes, geometry.chunk_bytes) == (512 * MiB, 256 * MiB, GiB)
    with pytest.raises(ConfigError, match=r"--pool-size=10% comes to 102 MiB on this machine, less than one slab"):
        pool_geometry(load({"pool_size": "10%", "slab_size": "256MiB"}), tmp_path)
    with pytest.raises(ConfigError, match=r"comes to 0 B on this machine"):
        pool_geometry(load({"pool_size": "10%"}), tmp_path / "nothing")
