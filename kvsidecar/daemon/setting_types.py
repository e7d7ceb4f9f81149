"""The types of the daemon's settings: what a value may be, how it is read, and how ``--help`` shows it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from kvsidecar.core import access as policy
from kvsidecar.core import shares
from kvsidecar.core.access import Policy
from kvsidecar.core.shares import ShareRule
from kvsidecar.protocol.paths import socket_path_problem
from kvsidecar.support.kernel_calls import usable_cores
from kvsidecar.support.units import GiB, Size, TiB, format_size, parse_size

MAX_POOL_BYTES = 64 * TiB
"""More than any node has. With a typo beyond it the daemon would prepare slabs for minutes, until the memory check
refused it."""
PAGE_BYTES = 4096
"""Smallest unit of slabs and chunks, on every machine."""
MAX_CHUNK_BYTES = 512 * GiB
"""One registration of this size or more fails in current drivers."""
MAX_SECONDS = 1e9
"""About 31 years. Timers and the service manager's microseconds overflow far beyond it."""


def _size(value: str | int | Size) -> Size:
    size = value if isinstance(value, Size) else Size.parse(value)
    if size.nbytes is not None and size.nbytes < PAGE_BYTES:
        raise ValueError(f"is less than one memory page ({format_size(PAGE_BYTES)}){_unit_hint(value)}")
    if size.nbytes is not None and size.nbytes > MAX_POOL_BYTES:
        raise ValueError(f"is more than {format_size(MAX_POOL_BYTES)}, the most that a pool may be")
    return size


def _whole_pages(value: str | int) -> int:
    nbytes = parse_size(value)
    if nbytes == 0 or nbytes % PAGE_BYTES:
        raise ValueError(f"is not a multiple of the page size ({format_size(PAGE_BYTES)}){_unit_hint(value)}")
    return nbytes


def _unit_hint(value: object) -> str:
    """The end of a sentence about a size that is too small or odd, perhaps because it should have a unit."""
    number = str(value).strip()
    return (
        f": without a unit it is bytes; write {number}GiB or {number}MiB" if number.isdigit() and number != "0" else ""
    )


def _chunk_size(value: str | int) -> int:
    nbytes = _whole_pages(value)
    if nbytes >= MAX_CHUNK_BYTES:
        raise ValueError(
            f"must be less than {format_size(MAX_CHUNK_BYTES)}: drivers fail to register that much in one call"
        )
    return nbytes


def _disk_size(value: str | int | None) -> int | None:
    return None if value is None else _whole_pages(value)


def _size_or_off(value: str | int | None) -> int | None:
    # Also called with the default; in a file, off may be a string or false.
    return None if value in ("off", None, False) else _whole_pages(value)


def _slab_size(value: str | int) -> int | Literal["auto"]:
    return "auto" if value == "auto" else _whole_pages(value)


def _devices(value: object) -> tuple[str, ...]:
    listed = value.split(",") if isinstance(value, str) else value
    if not isinstance(listed, (list, tuple)) or not all(isinstance(each, str) for each in listed):
        raise ValueError('must be a text such as "0,1", or a list of texts')
    devices = tuple(each.strip() for each in listed)
    if devices == ("all",):
        return ()
    if "" in devices and devices:
        raise ValueError("has an empty entry; list UUIDs or indices, such as 0,1, or use all")
    if len(set(devices)) < len(devices):
        raise ValueError("names a device twice")
    return devices


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


def _master(value: str | None) -> str | None:
    group, separator, address = (value or "").rpartition("://")
    _address(address if separator else value)
    if separator and not group:
        raise ValueError("has nothing before ://: name the kind of group, such as etcd://")
    return value


def default_prefault_threads() -> int:
    # Not all cores: an engine that starts at the same time needs some to load its weights.
    return max(1, min(16, usable_cores() // 2))


@dataclass(frozen=True, slots=True)
class Shown:
    """How an option appears in ``--help``, where that does not follow from its type and default."""

    metavar: str | None = None
    default: str | None = None


PoolSize = Annotated[Size, BeforeValidator(_size), Shown("SIZE|PERCENT")]
SlabSize = Annotated[int | Literal["auto"], BeforeValidator(_slab_size), Shown("auto|SIZE")]
StoreChunk = Annotated[int | None, BeforeValidator(_size_or_off), Shown("SIZE|off", "4 MiB")]
PolicyRules = Annotated[Policy | None, BeforeValidator(policy.parse), Shown("TOML", "none")]
ShareRules = Annotated[tuple[ShareRule, ...], BeforeValidator(shares.parse), Shown("TOML", "none")]
ChunkSize = Annotated[int, BeforeValidator(_chunk_size), Shown("SIZE", "1 GiB")]
Directory = Annotated[str | None, Field(min_length=1), Shown("DIRECTORY", "none")]
File = Annotated[str | None, Field(min_length=1), Shown("PATH", "none")]
Seconds = Annotated[float, Field(allow_inf_nan=False, le=MAX_SECONDS), Shown("SECONDS")]
SocketPath = Annotated[
    str,
    AfterValidator(_socket_path),
    Shown("PATH", "/run/kvsidecar/kvsidecar.sock for root, a per-user path for others"),
]
Address = Annotated[str | None, AfterValidator(_address), Shown("HOST:PORT", "off")]
Devices = Annotated[tuple[str, ...], BeforeValidator(_devices), Shown("LIST|all", "all")]
DiskSize = Annotated[int | None, BeforeValidator(_disk_size), Shown("SIZE", "none")]
SizeOrOff = Annotated[int | None, BeforeValidator(_size_or_off), Shown("SIZE|off", "off")]
Master = Annotated[str | None, AfterValidator(_master), Shown("HOST:PORT", "none")]
