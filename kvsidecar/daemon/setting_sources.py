"""Where the daemon's settings come from: the first of command-line flag (``--pool-size``), environment
(``KVSIDECAR_POOL_SIZE``), TOML file (``pool_size``), and default.

An unknown or wrong setting stops the start with one sentence that names it as it was given: an ignored typo would show
up weeks later as a cache that is too small.

Imports nothing heavy: ``kvsidecar serve --help`` needs this module.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from difflib import get_close_matches
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, Literal, get_args, get_origin

import click
from pydantic import ValidationError

from kvsidecar.daemon.setting_types import Shown
from kvsidecar.daemon.settings import Settings
from kvsidecar.errors import ConfigError
from kvsidecar.support import config_files

PREFIX = "KVSIDECAR_"
MAX_SHOWN = 300
"""Characters of a value, or of what is wrong with it, that an error shows."""
DEFAULT_FILE = Path("/etc/kvsidecar/kvsidecar.toml")
CONFIG_VARIABLE = "KVSIDECAR_CONFIG"
CLIENT_VARIABLES = tuple(f"KVSIDECAR_CONNECT{suffix}" for suffix in ("", "_CA", "_CERTIFICATE", "_KEY"))
"""Variables that the operator commands read."""
PUBLISH_VARIABLES = tuple(f"KVSIDECAR_PUBLISH_{name}" for name in ("BIND", "REPLAY", "METRICS", "NODE", "TOPIC"))
"""Variables of ``kvsidecar publish``, which may come from the same file."""
RESERVED = frozenset({CONFIG_VARIABLE, "KVSIDECAR_FAILPOINTS", *CLIENT_VARIABLES, *PUBLISH_VARIABLES})
"""Variables with our prefix that are not settings."""
# Kubernetes gives every container variables about every Service of its namespace. For a Service named "kvsidecar" or
# "kvsidecar-metrics" they have our prefix, and must not stop the daemon.
_SERVICE_LINK = re.compile(
    r"KVSIDECAR(_\w+)?_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)"
)
_SERVICE_URL = re.compile(r"(tcp|udp|sctp)://.*")
"""Value of ``<SERVICE>_PORT``: a Service "kvsidecar-http" sets KVSIDECAR_HTTP_PORT, a setting's own name, to one."""


def flag_of(option: str) -> str:
    """``--pool-size`` for ``pool_size``."""
    return "--" + option.replace("_", "-")


def variable_of(option: str) -> str:
    """``KVSIDECAR_POOL_SIZE`` for ``pool_size``."""
    return PREFIX + option.upper()


def load_settings(
    flags: Mapping[str, str | None], environ: Mapping[str, str] | None = None, default_file: Path = DEFAULT_FILE
) -> Settings:
    """Read all sources.

    Args:
        flags: by option name (``pool_size``), None for one that was not given; ``config`` names the TOML file.
        environ: instead of ``os.environ``.
        default_file: the TOML file that is read if none is named and it exists.

    Raises:
        ConfigError: one sentence that names the option as it was given, and its value.
    """
    try:
        return _load(flags, os.environ if environ is None else environ, default_file)
    except ConfigError:
        raise
    except Exception as error:
        # Whatever a file may hold that nobody has thought of: it is a mistake in the settings, of which a start and a
        # reload say so in a sentence. The traceback of a defect is the error's cause.
        raise ConfigError(f"the settings cannot be read: {type(error).__name__}: {_short(str(error))}") from error


def _load(flags: Mapping[str, str | None], environ: Mapping[str, str], default_file: Path) -> Settings:
    given = {option: value for option, value in flags.items() if value is not None}
    variables = {name: value for name, value in environ.items() if _is_ours(name, value)}
    named = given.pop("config", None) or environ.get(CONFIG_VARIABLE)
    file = Path(named) if named else default_file
    from_file = _read_file(file, required=bool(named))

    options = Settings.model_fields
    unknown = (
        _unknown(map(flag_of, given), map(flag_of, options))
        or _unknown(variables, [*map(variable_of, options), *RESERVED])
        or _unknown_table(from_file, options, file)
        or _unknown(from_file, options, f" in {file}")
    )
    if unknown:
        raise ConfigError(unknown)

    from_variables = {option: variables[name] for option in options if (name := variable_of(option)) in variables}
    ways = ((given, flag_of), (from_variables, variable_of), (from_file, str))
    try:
        settings = Settings.model_validate({**from_file, **from_variables, **given})
        settings.name(_names(ways, flag_of if given else variable_of if from_variables else str))
        return settings
    except ValidationError as error:
        first = error.errors()[0]
    option = str(first["loc"][0] if first["loc"] else first["ctx"]["option"])
    value: object
    if option in given:
        shown, value = f"{flag_of(option)}={_short(repr(given[option]))}", given[option]
    elif variable_of(option) in variables:
        value = variables[variable_of(option)]
        shown = f"{variable_of(option)}={_short(repr(value))}"
    elif option in from_file:
        value = from_file[option]
        tables = isinstance(value, list) and any(isinstance(each, dict) for each in value)
        shown = f"{option} in {file}" if tables else f"{option}={_short(repr(value))} in {file}"
    else:
        value = options[option].get_default(call_default_factory=True, validated_data={})
        shown = f"the default {option}={value!r}"
    message = first["msg"]
    if not first["loc"]:
        message = message.format_map(_names(ways, next(name for where, name in ways if option in where)))
    raise ConfigError(f"{shown} {_problem(first['type'], message, value)}")


def _names(ways: Sequence[tuple[Container[str], Callable[[str], str]]], usual: Callable[[str], str]) -> dict[str, str]:
    """Option -> its name where it was given.

    Args:
        ways: the options that were given in each, and what an option is called there; the one that counts first.
        usual: for options that were not given.
    """
    return {each: next((name for where, name in ways if each in where), usual)(each) for each in Settings.model_fields}


def unknown_variable(environ: Mapping[str, str]) -> str:
    """One sentence about a variable with our prefix that nothing reads; empty if there is none."""
    ours = [name for name, value in environ.items() if _is_ours(name, value)]
    return _unknown(ours, [*map(variable_of, Settings.model_fields), *RESERVED])


def _is_ours(name: str, value: str) -> bool:
    """Whether an environment variable is meant for the settings."""
    if not name.startswith(PREFIX) or name in RESERVED:
        return False
    service_url = name.endswith("_PORT") and _SERVICE_URL.fullmatch(value)
    return not (service_url or _SERVICE_LINK.fullmatch(name))


def _read_file(file: Path, *, required: bool) -> dict[str, Any]:
    text = ""
    try:
        text = config_files.read(file).decode()
        return tomllib.loads(text)
    except FileNotFoundError:
        if not required:
            return {}
        raise ConfigError(f"{file} does not exist") from None
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{file} is not a TOML file: {_toml_problem(text, error)}") from error
    except RecursionError:
        raise ConfigError(f"{file} is not a TOML file that can be read: it is nested too deeply") from None


def _toml_problem(text: str, error: ValueError) -> str:
    return config_files.toml_hint(text, error) or config_files.toml_problem(text, error)


def _unknown(names: Iterable[str], known: Iterable[str], place: str = "") -> str:
    """What is wrong with the first of the names that is not known; empty if all are."""
    known = list(known)
    for name in names:
        if name not in known:
            shown = _short(name)
            by_lower = {each.lower(): each for each in known}
            near = get_close_matches(shown.lower(), by_lower, n=1)
            hint = f"did you mean {by_lower[near[0]]}?" if near else "see kvsidecar serve --help"
            return f"{shown}{place} is not a setting: {hint}"
    return ""


def _unknown_table(from_file: Mapping[str, object], known: Container[str], file: Path) -> str:
    """What is wrong with the first table of a file that is no option; empty if there is none."""
    for name, value in from_file.items():
        if isinstance(value, dict) and name not in known:
            return f"{_short(name)} in {file} is a table, and options are in none: remove [{_short(name)}]"
    return ""


_PROBLEMS = {"bool": "must be on or off", "float": "must be a number of seconds", "int": "must be a whole number"}
"""Texts by the first part of pydantic's name of an error, such as ``int_parsing``."""


def _problem(kind: str, message: str, value: object) -> str:
    """The end of a sentence that starts with the option and its value, from pydantic's error."""
    message = message.removeprefix("Value error, ").removeprefix(f"{value!r} ")
    return _PROBLEMS.get(kind.partition("_")[0]) or _short(re.sub(r"^(Input|String|Value) should", "must", message))


def _short(text: str) -> str:
    """A sentence, not a page: the service manager takes no message of many kilobytes."""
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}…"


SECTIONS: Final = {
    "socket": "Sockets",
    "tcp_listen": "TCP",
    "http_host": "HTTP",
    "device": "Device",
    "pool_size": "Pool",
    "disk_dir": "Disk",
    "cluster_master": "Cluster",
    "shared_dir": "Shared directory",
    "store_chunk": "Copies",
    "lease_max": "Leases",
    "drain_timeout": "Start, stop and threads",
    "log_format": "Log",
}
"""First option of each section -> the section's title. The others follow in the order of the model."""


# -- flags -------------------------------------------------------------------------------------------------------


def click_options() -> list[click.Option]:
    """The flags of ``kvsidecar serve``. Values stay text: `load_settings` validates them as it does the others'."""
    config = click.Option(
        ["--config"],
        metavar="PATH",
        help=f"Configuration file, in TOML. [default: {DEFAULT_FILE} if it exists; env: {CONFIG_VARIABLE}]",
    )
    return [config, *(_click_option(option) for option in Settings.model_fields)]


def _click_option(option: str) -> click.Option:
    field = Settings.model_fields[option]
    shown = next((item for item in field.metadata if isinstance(item, Shown)), Shown())
    metavar = shown.metavar
    if metavar is None:
        kind = field.annotation
        choices: tuple[object, ...] = get_args(kind) if get_origin(kind) is Literal else ()
        if isinstance(kind, type) and issubclass(kind, StrEnum):
            choices = tuple(kind)
        metavar = "|".join(map(str, choices))
    default = shown.default or (f"{field.default:g}" if isinstance(field.default, float) else str(field.default))
    return click.Option(
        [flag_of(option)], metavar=metavar, help=f"{field.description} [default: {default}; env: {variable_of(option)}]"
    )
