"""docs/configuration.md, from `kvsidecar.daemon.settings.Settings`."""

from __future__ import annotations

import re

import click

from docs.generate.markdown import code, prose, table
from kvsidecar.daemon.reload import RELOADABLE
from kvsidecar.daemon.setting_sources import (
    CONFIG_VARIABLE,
    DEFAULT_FILE,
    SECTIONS,
    click_options,
    flag_of,
    variable_of,
)
from kvsidecar.daemon.settings import Settings

HEAD = f"""\
<!-- Made by `make docs` from kvsidecar/daemon/settings.py: change that. -->
# Configuration

Most installations set only these options, in `{DEFAULT_FILE}`; the rest have defaults that rarely need a change:

```toml
pool_size = "64GiB"                  # how much host memory to pin
pool_dir = "/dev/shm/kvsidecar"      # keep the cache over restarts; not needed with the shipped systemd unit
http_host = "0.0.0.0"                # if probes or Prometheus connect from outside the host or container
socket_mode = "0660"                 # if engines run as other users of a group:
socket_group = "kvsidecar"
disk_dir = "/var/cache/kvsidecar"    # a disk tier behind the pool
disk_size = "1TiB"
```

Every option of `kvsidecar serve` can be set by a flag, an environment variable or a line of a TOML file. The first of
these sources that sets it wins:

1. the flag: `kvsidecar serve --pool-size 64GiB`
2. the environment: `KVSIDECAR_POOL_SIZE=64GiB`
3. the file: `pool_size = "64GiB"` in `{DEFAULT_FILE}`, or in the file named by `--config` or `{CONFIG_VARIABLE}`
4. the default

If a name is unknown or a value is invalid, the daemon prints one sentence that names it and exits with code 78.
`kvsidecar doctor` reads the same sources and checks them against the machine.

**Sizes** are a number of bytes, or a number with a unit: `KiB`, `MiB`, `GiB`, `TiB` (powers of 1024; `Ki`, `Mi`, ...
mean the same) or `KB`, `MB`, `GB`, `TB` (powers of 1000; `K`, `M`, ... mean the same). `64g`, which is 64 GiB to Docker
and Java, is refused as ambiguous. **Seconds** are a number, such as `0.5`. **on|off** also accepts `true|false` and, in
the file, a bare `true`.

**Reload**: SIGHUP (`systemctl reload kvsidecar`) makes the daemon read the file again. Some options, marked below, take
effect at once. The log names other options that have changed and need a restart. A reload does not change flags and
environment variables. At a terminal SIGHUP [stops the daemon](operating.md#run).
`kvsidecar serve --check` says what is wrong with a file before that; `systemctl reload` fails for one that is invalid.

These variables are not options: `{CONFIG_VARIABLE}`; `KVSIDECAR_CONNECT` and variables that begin with it, which are
for the admin commands ([operating.md](operating.md#from-another-host)); `KVSIDECAR_FAILPOINTS`, which injects faults in
tests ([faults.md](faults.md)); and the variables that Kubernetes creates for a Service whose name begins with
`kvsidecar`, which are ignored.
"""

EXAMPLES = {
    "socket": "/run/kvsidecar/kvsidecar.sock",
    "socket_group": "kvsidecar",
    "admin_group": "operators",
    "pool_dir": "/dev/shm/kvsidecar",
    "table_dir": "/dev/shm/kvsidecar",
    "disk_dir": "/var/cache/kvsidecar",
    "disk_size": "1TiB",
    "shared_dir": "/mnt/kv/kvsidecar",
    "shared_size": "10TiB",
    "cluster_master": "kv-master:50051",
    "cluster_hostname": "10.0.0.7",
    "cluster_devices": "mlx5_0,mlx5_1",
    "policy": '[{uids = [1001], namespaces = ["meta-llama/*"]}]',
    "share": '[{name = "chat", namespaces = ["chat/*"], guaranteed = "40%"}]',
    "tcp_listen": "0.0.0.0:9465",
    "tls_certificate": "/etc/kvsidecar/tls.crt",
    "tls_key": "/etc/kvsidecar/tls.key",
    "tls_client_ca": "/etc/kvsidecar/clients.crt",
    "prefault_threads": "8",
}
"""Example values of options that have no default, or a sentence for one."""
_UNITS = {"SIZE": "bytes", "SECONDS": "seconds", "PORT": "TCP port"}


def page() -> str:
    flags = {str(option.name): option for option in click_options()}
    parts = [
        HEAD,
        "## All options\n",
        table(("Option", "Default", "What it does"), (_line(name, flags[name]) for name in Settings.model_fields))
        + "\n",
    ]
    for name in Settings.model_fields:
        if name in SECTIONS:
            parts.append(f"## {SECTIONS[name]}\n")
        parts.append(_section(name, flags[name]))
    return "\n".join(parts)


def _line(name: str, option: click.Option) -> tuple[str, str, str]:
    """An option's line in the table of all."""
    default = default_of(option)
    first, _, _ = (Settings.model_fields[name].description or "").partition(". ")
    shown = default if _is_sentence(default) else code(default)
    return f"[{code(name)}](#{name})", shown, prose(first.rstrip(".") + ".")


def default_of(option: click.Option) -> str:
    """The default, as ``--help`` shows it."""
    shown = re.search(r"\[default: (.*); env: \w+\]$", option.help or "")
    assert shown, option.name
    return shown[1]


def file_line(name: str, values: str, default: str) -> str:
    """A line of the TOML file with the default, or with an example if the default is a sentence."""
    value = EXAMPLES.get(name, default)
    if values == "TOML":
        return f"{name} = {value}"
    if values == "on|off":
        value = {"on": "true", "off": "false"}[value]
    elif not re.fullmatch(r"\d+(\.\d+)?", value) or "|" in values:
        value = f'"{value.replace(" ", "") if "SIZE" in values else value}"'
    return f"{name} = {value}"


def _section(name: str, option: click.Option) -> str:
    values = str(option.metavar)
    default = default_of(option)
    units = [unit for word, unit in _UNITS.items() if word in values.split("|")]
    rows = [
        ("Variable", code(variable_of(name))),
        ("File", code(file_line(name, values, default))),
        ("Values", " or ".join(code(value) for value in values.split("|"))),
    ]
    if units:
        rows.append(("Unit", units[0]))
    rows.append(("Default", default if _is_sentence(default) else code(default)))
    rows.append(("Reload", "takes effect on reload" if name in RELOADABLE else "requires a restart"))
    text = prose(Settings.model_fields[name].description or "")
    return f"### {name}\n\n{text}\n\n{table(('Flag', code(flag_of(name))), rows)}\n"


def _is_sentence(default: str) -> bool:
    """Such as "the daemon's group"; not "4 MiB"."""
    return " " in default and not default[0].isdigit()
