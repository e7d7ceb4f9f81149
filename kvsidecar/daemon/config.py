"""Every setting of the daemon, written once: name, type, default and description are the fields of `Settings`.

A value comes from the first of: command-line flag (``--pool-size``), environment (``KVSIDECAR_POOL_SIZE``), TOML file
(``pool_size``), default. The flags of ``kvsidecar serve`` are made from the same fields, so nothing can be missing in
one of the four. Whatever is unknown or wrong stops the start with one sentence that names it as it was given: a typo
that is ignored shows up weeks later as a cache that is too small.

Imports nothing heavy: ``kvsidecar serve --help`` needs this module.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import click
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from kvsidecar.core import access as policy
from kvsidecar.core.access import Policy
from kvsidecar.errors import ConfigError
from kvsidecar.protocol.paths import default_socket_path, socket_path_problem
from kvsidecar.support import memory_limits
from kvsidecar.support.memory_limits import HugePages
from kvsidecar.support.units import GiB, MiB, Size, TiB, format_size, parse_size
from kvsidecar.types import Verify

PREFIX = "KVSIDECAR_"
DEFAULT_FILE = Path("/etc/kvsidecar/kvsidecar.toml")
CONFIG_VARIABLE = "KVSIDECAR_CONFIG"
CLIENT_VARIABLES = (
    "KVSIDECAR_CONNECT",
    "KVSIDECAR_CONNECT_CA",
    "KVSIDECAR_CONNECT_CERTIFICATE",
    "KVSIDECAR_CONNECT_KEY",
)
"""Of the operators' commands."""
RESERVED = frozenset({CONFIG_VARIABLE, "KVSIDECAR_FAILPOINTS", *CLIENT_VARIABLES})
"""Variables that are ours but not settings."""
MAX_POOL_BYTES = 64 * TiB
"""More than any node has. A typo beyond it would keep the daemon busy for minutes with the bookkeeping of its slabs
before the memory check could refuse it."""
PAGE_BYTES = 4096
"""Smallest unit of slabs and chunks, on every machine."""
MAX_CHUNK_BYTES = 512 * GiB
"""One registration of this size or more fails in current drivers."""

# Kubernetes gives every container variables about every Service of its namespace. For a Service named "kvsidecar" or
# "kvsidecar-metrics" they begin like our own, and refusing them would stop the daemon for the name of its Service.
_SERVICE_LINK = re.compile(
    r"KVSIDECAR(_\w+)?_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)"
)
_SERVICE_URL = re.compile(r"(tcp|udp|sctp)://.*")
"""Value of ``<SERVICE>_PORT``: a Service "kvsidecar-http" sets KVSIDECAR_HTTP_PORT, a setting's own name, to one."""


def _size(value: str | int | Size) -> Size:
    size = value if isinstance(value, Size) else Size.parse(value)
    if size.nbytes is not None and size.nbytes < PAGE_BYTES:
        raise ValueError(f"is less than one memory page ({format_size(PAGE_BYTES)})")
    if size.nbytes is not None and size.nbytes > MAX_POOL_BYTES:
        raise ValueError(f"is more than {format_size(MAX_POOL_BYTES)}, the most that a pool may be")
    return size


def _whole_pages(value: str | int) -> int:
    nbytes = parse_size(value)
    if nbytes == 0 or nbytes % PAGE_BYTES:
        raise ValueError(f"is not a multiple of the page size ({format_size(PAGE_BYTES)})")
    return nbytes


def _chunk_size(value: str | int) -> int:
    nbytes = _whole_pages(value)
    if nbytes >= MAX_CHUNK_BYTES:
        raise ValueError(
            f"must be less than {format_size(MAX_CHUNK_BYTES)}: drivers fail to register that much in one call"
        )
    return nbytes


def _store_chunk(value: str | int) -> int | None:
    # The default goes through this too, and off in a file may be a bare word or false.
    return None if value in ("off", None, False) else _whole_pages(value)


def _slab_size(value: str | int) -> int | Literal["auto"]:
    return "auto" if value == "auto" else _whole_pages(value)


def _socket_path(value: str) -> str:
    if problem := socket_path_problem(value):
        raise ValueError(problem)
    return value


def _address(value: str | None) -> str | None:
    if value is None:
        return None
    host, _, port = value.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ValueError("is not HOST:PORT, such as 0.0.0.0:9465 or [::]:9465")
    if ":" in host and not (host.startswith("[") and host.endswith("]")):
        raise ValueError("has an IPv6 address without brackets, such as [::]:9465")
    return value


def _default_prefault_threads() -> int:
    # Not all of them: an engine that starts beside the daemon needs some to load its weights.
    return max(1, min(16, len(os.sched_getaffinity(0)) // 2))


@dataclass(frozen=True, slots=True)
class Shown:
    """How an option appears in ``--help``, where its type and default do not say it."""

    metavar: str | None = None
    default: str | None = None


_PoolSize = Annotated[Size, BeforeValidator(_size), Shown("SIZE|PERCENT")]
_SlabSize = Annotated[int | Literal["auto"], BeforeValidator(_slab_size), Shown("auto|SIZE")]
_StoreChunk = Annotated[int | None, BeforeValidator(_store_chunk), Shown("SIZE|off", "4 MiB")]
_Policy = Annotated[Policy | None, BeforeValidator(policy.parse), Shown("TOML", "none")]
_ChunkSize = Annotated[int, BeforeValidator(_chunk_size), Shown("SIZE", "1 GiB")]
_Seconds = Annotated[float, Field(allow_inf_nan=False), Shown("SECONDS")]


class Settings(BaseModel):
    """What the daemon is told. Build it with `load_settings`, which adds the file and the error sentences."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)

    socket: Annotated[
        str, AfterValidator(_socket_path), Shown("PATH", "/run/kvsidecar/kvsidecar.sock for root, else per user")
    ] = Field(
        default_factory=default_socket_path,
        description="Path of the Unix socket for gRPC; the attach socket lies beside it with the suffix .attach.",
    )
    socket_mode: Literal["0600", "0660"] = Field(
        "0600", description="Who may connect: 0600 the daemon's user only, 0660 its group too."
    )
    socket_group: Annotated[str | None, Shown("GROUP", "the daemon's group")] = Field(
        None, min_length=1, description="Group that owns the sockets, with --socket-mode 0660."
    )
    admin_group: Annotated[str | None, Shown("GROUP", "none")] = Field(
        None,
        min_length=1,
        description="Group whose members are admins, as root and the daemon's user are: they may clear, drain and see "
        "everything.",
    )
    policy: _Policy = Field(
        None,
        description="Who may use which namespaces: [[policy]] tables in the file (docs/security.md). Without one, "
        "whoever may open the socket may use all.",
    )
    fast_lane: Annotated[bool, Shown("on|off", "on")] = Field(
        True,
        description="Offer clients on this host gRPC's messages over the attach socket, at a fifth of its latency.",
    )
    tcp_listen: Annotated[str | None, AfterValidator(_address), Shown("HOST:PORT", "off")] = Field(
        None,
        description="Listen for gRPC over TCP too, with mTLS only: lookups and operators' calls from other hosts, for "
        "the certificates that the policy names. Engines attach over the Unix socket.",
    )
    tls_certificate: Annotated[str | None, Shown("PATH", "none")] = Field(
        None, min_length=1, description="PEM file with the daemon's certificate chain, for --tcp-listen."
    )
    tls_key: Annotated[str | None, Shown("PATH", "none")] = Field(
        None, min_length=1, description="PEM file with its key, mode 0640 or less."
    )
    tls_client_ca: Annotated[str | None, Shown("PATH", "none")] = Field(
        None, min_length=1, description="PEM file with the certificates of who signs those of clients."
    )
    http_host: Annotated[str, Shown("ADDRESS")] = Field(
        "127.0.0.1",
        min_length=1,
        description="Address for /health, /ready, /metrics and /status; 0.0.0.0 where a probe comes from outside.",
    )
    http_port: Annotated[int, Shown("PORT")] = Field(
        9464, ge=0, le=65535, description="TCP port for HTTP; 0 takes any free one."
    )
    device: Literal["auto", "cuda", "host"] = Field(
        "auto",
        description="Whose memory is offloaded: GPUs, or the host standing in for one; auto: GPUs if there are any.",
    )
    # 8 GiB: 64 Ki tokens of Llama-3.1-8B (128 KiB each), enough to see hits on the first day; pinned in a few seconds,
    # and less than any machine that carries a data-centre GPU can spare. Whoever goes into production sets it.
    pool_size: _PoolSize = Field(
        Size(nbytes=8 * GiB),
        description="Host memory to pin: a size, or a percentage of the machine's memory or the container's limit, "
        "whichever is less. Rounded down to whole memory pages.",
    )
    slab_size: _SlabSize = Field(
        "auto",
        description="Unit in which the pool is handed to blocks of one size; auto: about an eighth, at most 64 MiB.",
    )
    chunk_size: _ChunkSize = Field(
        GiB, description="Memory pinned by one driver call, a multiple of the slab size; small ones keep /health quick."
    )
    huge_pages: HugePages = Field(
        HugePages.AUTO,
        description="Pages of the pool: thp transparent, hugetlb reserved by the operator, none 4 KiB; "
        "auto: hugetlb if enough are free, else thp.",
    )
    prefault_threads: Annotated[int, Shown("COUNT", "one for two cores, at most 16")] = Field(
        default_factory=_default_prefault_threads,
        ge=1,
        le=1024,
        description="Threads that fault the pool in before it is pinned.",
    )
    numa: Literal["auto", "off"] = Field(
        "auto", description="Where there are several NUMA nodes: auto binds the pool to those of the GPUs in use."
    )
    on_pin_failure: Literal["stay", "exit"] = Field(
        "stay", description="When the pool cannot be pinned: stay alive and not ready with the reason, or exit."
    )
    memory_check: Annotated[bool, Shown("on|off", "on")] = Field(
        True,
        description="Refuse a pool that exceeds a memory limit before touching it; off for virtual machines whose "
        "memory grows as it is used.",
    )
    # The curve is in docs/benchmarks.md, "Pacing": with 4 MiB a sampled token's copy takes about 50 µs (99 %: below
    # 100) while stores go at two thirds of the link; without a bound they have all of it and the token waits 500 µs.
    store_chunk: _StoreChunk = Field(
        4 * MiB,
        description="Bytes of stores in flight at a time while an engine is busy on their GPU, so that its own small "
        "copies, such as sampled tokens, pass; off: stores always use the whole link.",
    )
    verify: Verify = Field(
        Verify.OFF,
        description="Checksum slots when they are sealed and compare before they are loaded: never, one block in 16, "
        "or every one. A mismatch is a miss, and its slot is withdrawn.",
    )
    lease_max: _Seconds = Field(
        60.0, gt=0, description="Seconds a client's lease may last at most; it keeps blocks from eviction."
    )
    drain_timeout: _Seconds = Field(
        10.0, ge=0, description="Seconds to wait for running copies at shutdown; must lie inside the grace period."
    )
    light_sleep: _Seconds = Field(
        0.001,
        ge=0,
        le=10,
        description="Seconds after a job during which the daemon's threads sleep so lightly that they wake up at once, "
        "for a tenth of two cores; 0: never, as with fewer than four cores.",
    )
    # Longer than the drain_timeout of the daemon that ends, which finishes its copies and unpins before it gives way.
    lock_wait: _Seconds = Field(
        15.0, ge=0, description="Seconds to wait at start for another daemon on the same socket to end; 0: do not wait."
    )
    stuck_after: _Seconds = Field(
        60.0,
        gt=0,
        description="Seconds after which a copy still in flight makes /health fail, and soon after ends the daemon.",
    )
    tracing: Literal["off", "otlp"] = Field(
        "off",
        description="Spans of jobs that belong to a sampled trace, exported by OTLP as the standard variables OTEL_* "
        "say; needs kvsidecar[tracing].",
    )
    log_format: Literal["auto", "text", "json"] = Field(
        "auto", description="Form of the log on standard error; auto: text on a terminal, else one JSON object a line."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="Least important level logged.")

    @property
    def socket_mode_bits(self) -> int:
        return int(self.socket_mode, 8)

    @model_validator(mode="after")
    def _fit_together(self) -> Settings:
        """What one option alone cannot show. Blames the option that was given, where only one of the two was."""
        if self.slab_size != "auto":
            pool = self.pool_size.nbytes
            if pool is not None and self.slab_size > pool:
                self._blame("slab_size", f"is more than pool_size ({format_size(pool)})")
                self._blame("pool_size", f"is less than slab_size ({format_size(self.slab_size)})")
            if self.chunk_size % self.slab_size:
                self._blame("slab_size", f"does not divide chunk_size ({format_size(self.chunk_size)})")
                self._blame("chunk_size", f"is not a multiple of slab_size ({format_size(self.slab_size)})")
        files = {option: getattr(self, option) for option in ("tls_certificate", "tls_key", "tls_client_ca")}
        if self.tcp_listen:
            if missing := [option for option, path in files.items() if not path]:
                self._blame("tcp_listen", f"needs {missing[0]}: TCP is served with mTLS only")
            if self.policy is None or not self.policy.names_certificates:
                self._blame("tcp_listen", "needs a rule of the policy with certificates: without one all are refused")
        else:
            for option, path in files.items():
                if path:
                    self._blame(option, "has no effect without tcp_listen")
        if self.socket_group and self.socket_mode == "0600":
            self._blame("socket_group", "has no effect with socket_mode 0600: use 0660")
        return self

    def _blame(self, option: str, problem: str) -> None:
        if option in self.model_fields_set:
            raise PydanticCustomError("fit_together", "{problem}", {"option": option, "problem": problem})


# -- sources -----------------------------------------------------------------------------------------------------


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
    environ = os.environ if environ is None else environ
    given = {option: value for option, value in flags.items() if value is not None}
    variables = {name: value for name, value in environ.items() if _is_ours(name, value)}
    named = given.pop("config", None) or environ.get(CONFIG_VARIABLE)
    file = Path(named) if named else default_file
    from_file = _read_file(file, required=bool(named))

    options = Settings.model_fields
    _refuse_unknown(map(flag_of, given), map(flag_of, options))
    _refuse_unknown(variables, map(variable_of, options))
    _refuse_unknown(from_file, options, f" in {file}")

    from_variables = {option: variables[name] for option in options if (name := variable_of(option)) in variables}
    try:
        return Settings.model_validate({**from_file, **from_variables, **given})
    except ValidationError as error:
        first = error.errors()[0]
    option = str(first["loc"][0] if first["loc"] else first["ctx"]["option"])
    value: object
    if option in given:
        shown, value = f"{flag_of(option)}={given[option]!r}", given[option]
    elif variable_of(option) in variables:
        value = variables[variable_of(option)]
        shown = f"{variable_of(option)}={value!r}"
    elif option in from_file:
        value = from_file[option]
        tables = isinstance(value, list) and any(isinstance(each, dict) for each in value)
        shown = f"{option} in {file}" if tables else f"{option}={value!r} in {file}"
    else:
        value = options[option].get_default(call_default_factory=True, validated_data={})
        shown = f"the default {option}={value!r}"
    raise ConfigError(f"{shown} {_problem(first['type'], first['msg'], value)}")


def _is_ours(name: str, value: str) -> bool:
    """Whether an environment variable is meant for the settings."""
    if not name.startswith(PREFIX) or name in RESERVED:
        return False
    service_url = name.endswith("_PORT") and _SERVICE_URL.fullmatch(value)
    return not (service_url or _SERVICE_LINK.fullmatch(name))


def _read_file(file: Path, *, required: bool) -> dict[str, Any]:
    try:
        with file.open("rb") as stream:
            return tomllib.load(stream)
    except FileNotFoundError:
        if not required:
            return {}
        raise ConfigError(f"{file} does not exist") from None
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{file} is not a TOML file: {error}") from error


def _refuse_unknown(names: Iterable[str], known: Iterable[str], place: str = "") -> None:
    known = list(known)
    for name in names:
        if name not in known:
            near = get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else "see kvsidecar serve --help"
            raise ConfigError(f"{name}{place} is not a setting: {hint}")


_PROBLEMS = {
    "bool_parsing": "must be on or off",
    "bool_type": "must be on or off",
    "float_parsing": "must be a number of seconds",
    "float_type": "must be a number of seconds",
    "int_parsing": "must be a whole number",
    "int_from_float": "must be a whole number",
    "int_type": "must be a whole number",
}


def _problem(kind: str, message: str, value: object) -> str:
    """The end of a sentence that starts with the option and its value, from pydantic's error."""
    message = message.removeprefix("Value error, ").removeprefix(f"{value!r} ")
    return _PROBLEMS.get(kind) or re.sub(r"^(Input|String|Value) should", "must", message)


# -- flags -------------------------------------------------------------------------------------------------------


def click_options() -> list[click.Option]:
    """The flags of ``kvsidecar serve``. Values stay text: `load_settings` validates them as it does the others'."""
    config = click.Option(
        ["--config"],
        metavar="PATH",
        help=f"TOML file with settings. [default: {DEFAULT_FILE} if it exists; env: {CONFIG_VARIABLE}]",
    )
    return [config, *(_click_option(option) for option in Settings.model_fields)]


def _click_option(option: str) -> click.Option:
    field = Settings.model_fields[option]
    shown = next((item for item in field.metadata if isinstance(item, Shown)), Shown())
    metavar = shown.metavar
    if metavar is None:
        kind = field.annotation
        choices = get_args(kind) if get_origin(kind) is Literal else tuple(kind) if kind in (HugePages, Verify) else ()
        metavar = "|".join(map(str, choices))
    default = shown.default or (f"{field.default:g}" if isinstance(field.default, float) else str(field.default))
    return click.Option(
        [flag_of(option)], metavar=metavar, help=f"{field.description} [default: {default}; env: {variable_of(option)}]"
    )


# -- the pool's geometry -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PoolGeometry:
    """Sizes in bytes. A chunk is a whole number of slabs, so no slot can straddle two pinned chunks."""

    pool_bytes: int
    slab_bytes: int
    chunk_bytes: int


def auto_slab_bytes(pool_bytes: int) -> int:
    """The largest power of two up to an eighth of the pool, but 4 MiB to 64 MiB (the whole pool if it is smaller).

    Large slabs keep blocks of one size together; eight or more let several sizes have some.
    """
    eighth = max(1, pool_bytes // 8)
    smallest = min(pool_bytes, 4 * MiB) // PAGE_BYTES * PAGE_BYTES
    return max(smallest, min(1 << (eighth.bit_length() - 1), 64 * MiB))


def pool_geometry(settings: Settings, root: Path = memory_limits.ROOT) -> PoolGeometry:
    """Settle percentages and "auto" for this machine.

    Raises:
        ConfigError: a percentage comes to less than one slab.
    """
    pool, chunk = memory_limits.resolve_size(settings.pool_size, root), settings.chunk_size
    slab = auto_slab_bytes(pool) if settings.slab_size == "auto" else settings.slab_size
    if settings.slab_size == "auto" and chunk % slab:
        # The lowest set bit is the largest power of two that divides the chunk.
        slab = min(slab, chunk & -chunk)
        if chunk % slab:
            chunk = slab  # The pool is one slab of an odd size, and the chunk is larger.
    if pool < max(slab, PAGE_BYTES):
        here = f"pool_size={settings.pool_size} comes to {format_size(pool)} on this machine"
        raise ConfigError(f"{here}, less than one slab ({format_size(max(slab, PAGE_BYTES))})")
    return PoolGeometry(pool, slab, chunk)
