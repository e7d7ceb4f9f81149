"""``kvsidecar serve --check``: refuses the settings that a start would refuse, without one.

It touches nothing: no socket, lock, directory, pool or device. So it can be run beside the daemon that it is for, and
the unit runs it before a reload. What depends on the moment (ports, memory, GPUs, another daemon) is the doctor's. What
a start goes on without is named, and is no failure here either.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping
from pathlib import Path

from kvsidecar.daemon.pool_geometry import PoolGeometry, pool_geometry
from kvsidecar.daemon.setting_sources import load_settings
from kvsidecar.daemon.settings import Settings
from kvsidecar.errors import ConfigError
from kvsidecar.server.socket_files import check_path, group_id, socket_group_id
from kvsidecar.support import failpoints, kernel_calls
from kvsidecar.support.addresses import at, cannot_listen
from kvsidecar.support.private_files import takes_none
from kvsidecar.support.units import format_size
from kvsidecar.tiers.private_directory import problem_of


def check(flags: Mapping[str, str | None]) -> str:
    """Check all settings, in the order of a start. Returns their result in one line.

    Args:
        flags: see `kvsidecar.daemon.serve.serve`.

    Raises:
        ConfigError, KernelRefuses, SocketInUse: a start with these settings would raise it.
    """
    settings = load_settings(flags)
    failpoints.configure_from_environment()
    kernel_calls.check()
    geometry = pool_geometry(settings)
    socket_group_id(settings.called("socket_group"), settings.socket_group)
    check_path(Path(settings.socket))
    http = at(settings.http_host, settings.http_port)
    _check_address("HTTP", settings.http_host, http, "--http-host and --http-port")
    _check_what_is_imported_late(settings, geometry)
    if settings.tcp_listen is not None:
        host = settings.tcp_listen.rpartition(":")[0].strip("[]")
        _check_address("gRPC", host, settings.tcp_listen, "--tcp-listen")
    remarks = [f"; without {settings.called(option)}: {problem}" for option, problem in _what_stays_off(settings)]
    return f"ok: a pool of {format_size(geometry.pool_bytes)}, served at {settings.socket}{''.join(remarks)}"


def _what_stays_off(settings: Settings) -> Iterator[tuple[str, str]]:
    """The tiers and directories without which a daemon starts, until they can be made or written to."""
    for option, named in (("disk_dir", settings.disk_dir), ("shared_dir", settings.shared_dir)):
        if named is None:
            continue
        directory = Path(named)
        if directory.exists():
            owned = problem_of(directory.stat()) if directory.is_dir() else ""
            if problem := owned or takes_none(directory):
                yield option, f"{named} {problem}"
        elif problem := takes_none(directory.parent):
            yield option, f"{named} cannot be made: {directory.parent} {problem}"
    for option, named in (("pool_dir", settings.pool_dir), ("table_dir", settings.table_dir)):
        if named is not None and Path(named).exists() and (problem := takes_none(Path(named))):
            yield option, f"{named} {problem}"


def _check_what_is_imported_late(settings: Settings, geometry: PoolGeometry) -> None:
    from kvsidecar.core.metrics import Metrics
    from kvsidecar.core.shares import resolve, resolve_disk
    from kvsidecar.daemon.serve import tracing_of
    from kvsidecar.pool.kept_files import check_directories

    if settings.pool_dir is not None:
        check_directories(Path(settings.pool_dir), settings.table_path, settings.called)
    if (open_tracing := tracing_of(settings)) is not None:
        open_tracing(Metrics("host"))
    resolve(settings.share, settings.policy, geometry.pool_bytes)
    resolve_disk(settings.share, settings.policy, settings.disk_size or 0)
    group_id(settings.called("admin_group"), settings.admin_group)
    if settings.tcp_listen is not None:
        from kvsidecar.server.tls import Certificates, TlsFiles

        Certificates(TlsFiles(*settings.tls_files), settings.called)


def _check_address(service: str, host: str, address: str, option: str) -> None:
    try:
        socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        refused = cannot_listen(service, address, option, error)
        if isinstance(refused, ConfigError):  # otherwise a name server does not answer just now
            raise refused from error
