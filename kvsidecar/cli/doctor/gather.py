"""Reads the facts. A fact that cannot be read is left out and is never an error: the doctor runs where things are
broken."""

from __future__ import annotations

import contextlib
import grp
import json
import os
import pwd
import re
import socket as sockets
import stat
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvsidecar import __version__
from kvsidecar.cache import kernels
from kvsidecar.cli.doctor.facts import (
    DaemonConfig,
    DaemonFacts,
    Driver,
    Facts,
    Gpu,
    Host,
    InspectedEngine,
    Isolation,
    KeptPoolFacts,
    Kernel,
    MemoryFacts,
    SocketFacts,
)
from kvsidecar.cli.doctor.gather_tiers import cluster, disk_tier, existing, name_of, shared_tier, version_of
from kvsidecar.client import Client
from kvsidecar.daemon.pool_geometry import pool_geometry, pool_spec
from kvsidecar.daemon.setting_sources import load_settings
from kvsidecar.daemon.settings import Settings
from kvsidecar.device.host import HostPlatform
from kvsidecar.device.system import mps_runs, pci_numa_node
from kvsidecar.errors import ClientError, ConfigError, PoolRefused
from kvsidecar.pool.host_pool import HostPool
from kvsidecar.pool.kept_files import FILES, PoolDirectory
from kvsidecar.protocol.wire import STATE_FROM_WIRE
from kvsidecar.server.socket_files import closed_to_group, is_private_to_socket
from kvsidecar.support import kernel_calls, memory_limits, peer

PROBE_SECONDS = 20.0
"""A driver without persistence mode takes seconds to initialise."""
GVISOR_BUILD = "#1 SMP Sun Jan 10 15:06:54 PST 2016"
"""The kernel build that gVisor reports."""
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def gather(flags: Mapping[str, str | None], pid: int | None, *, disk_speed: bool = False) -> Facts:
    """All facts for a daemon that this user starts with these flags.

    Args:
        flags: those of `load_settings`.
        pid: an engine's process id.
        disk_speed: write and read a file in the directory of the disk tier.
    """
    settings: Settings | None = None
    try:
        settings = load_settings(flags)
        geometry = pool_geometry(settings)
        config = DaemonConfig(
            device=settings.device,
            pool_bytes=geometry.pool_bytes,
            huge_pages=settings.huge_pages.value,
            memory_check=settings.memory_check,
            socket=settings.socket,
            socket_mode=settings.socket_mode_bits,
            socket_group=settings.socket_group,
        )
    except ConfigError as error:
        settings = None
        config = DaemonConfig(problem=str(error), socket=flags.get("socket") or Settings.model_construct().socket)
    driver = _driver()
    daemon = _daemon(config.socket)
    if settings is not None and daemon.pool_bytes and "pool_size" not in settings.model_fields_set:
        config = replace(config, pool_bytes=daemon.pool_bytes, running=True)
    nodes = tuple(sorted(str(path) for path in Path("/dev").glob("nvidia*") if not path.is_dir()))
    return Facts(
        user=name_of(os.geteuid()),
        uid=os.geteuid(),
        version=__version__,
        compiled=kernels.COMPILED,
        kernel=_kernel(),
        host=host(),
        config=config,
        driver=driver,
        nvidia_nodes=nodes,
        closed_nvidia_nodes=tuple(node for node in nodes if not os.access(node, os.R_OK | os.W_OK)),
        memory=_memory(settings, driver),
        kept_pool=_kept_pool(settings),
        disk=disk_tier(settings, speed=disk_speed),
        cluster=cluster(settings),
        shared=shared_tier(settings),
        socket=_socket(config.socket, config.socket_group),
        daemon=daemon,
        isolation=(_isolation(daemon.pid) if daemon.pid else None) or _isolation("self") or Isolation(None, None, None),
        engine=None if pid is None else _engine(pid),
    )


def _kernel() -> Kernel:
    return Kernel(os.uname().release, kernel_calls.refused(), _peer_pidfd())


def host(root: Path = Path("/")) -> Host:
    """The kind of machine this is, according to the files below ``root``."""
    version = _read(root / "proc/version")
    dev = root / "dev"
    confidential = "Intel TDX" if (dev / "tdx_guest").exists() else "AMD SEV" if (dev / "sev-guest").exists() else ""
    groups = root / "sys/fs/cgroup"
    return Host(
        wsl="microsoft" in version.lower() or (dev / "dxg").exists(),
        gvisor="gvisor" in version.lower() or GVISOR_BUILD in version,
        confidential=confidential,
        cgroup=2 if (groups / "cgroup.controllers").exists() else 1 if (groups / "memory").is_dir() else 0,
    )


def _peer_pidfd() -> bool:
    near, far = sockets.socketpair(sockets.AF_UNIX)
    with near, far:
        fd = peer.kernel_pidfd(near)
    if fd is not None:
        os.close(fd)
    return fd is not None


def _driver() -> Driver:
    command = [sys.executable, "-m", "kvsidecar.cli.doctor.probe"]
    try:
        ran = subprocess.run(
            command, capture_output=True, text=True, timeout=PROBE_SECONDS, check=False, close_fds=False
        )
        found: dict[str, Any] = json.loads(ran.stdout)
    except subprocess.TimeoutExpired:
        found = {"installed": True, "problem": f"the CUDA driver did not start within {PROBE_SECONDS:g} s"}
    except OSError as error:
        found = {"installed": True, "problem": f"the probe of the CUDA driver cannot be started: {error.strerror}"}
    except ValueError:
        last = (ran.stderr.strip().splitlines() or ["no output"])[-1]
        found = {"installed": True, "problem": f"the probe of the CUDA driver exited with {ran.returncode}: {last}"}
    gpus = tuple(Gpu(**each, numa_node=pci_numa_node(each["bus_id"])) for each in found.pop("gpus", ()))
    for name in ("missing_calls", "missing_optional_calls"):
        found[name] = tuple(found.get(name, ()))
    return Driver(
        **found,
        module_version=_read("/sys/module/nvidia/version"),
        bindings=version_of("cuda-bindings", "cuda-python"),
        mps=mps_runs(),
        amd=Path("/dev/kfd").exists(),
        gpus=gpus,
    )


class _Limits(HostPlatform):
    """The platform of a pool that is never pinned. It has no pin limit, because memlock is a separate finding."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def pin_limit(self) -> int | None:
        return None


def _memory(settings: Settings | None, driver: Driver) -> MemoryFacts:
    thp = re.search(r"\[(\w+)\]", _read("/sys/kernel/mm/transparent_hugepage/shmem_enabled"))
    refusal = page_kind = ""
    if settings is not None:
        cuda = settings.device == "cuda" or (settings.device == "auto" and bool(driver.gpus))
        near = [gpu.numa_node for gpu in driver.gpus] if cuda else []
        spec = pool_spec(settings, pool_geometry(settings), near)
        try:
            page_kind = HostPool(spec, _Limits("cuda" if cuda else "host")).check().kind.value
        except PoolRefused as error:
            refusal = str(error)
    return MemoryFacts(
        available=memory_limits.meminfo().get("MemAvailable"),
        cgroups=memory_limits.memory_cgroups(),
        memlock=memory_limits.memlock_limit(),
        thp=thp[1] if thp else "",
        hugetlb_free={size: memory_limits.hugetlb_free(size) for size in memory_limits.hugetlb_page_sizes()},
        numa=memory_limits.numa_nodes(),
        refusal=refusal,
        page_kind=page_kind,
    )


def _kept_pool(settings: Settings | None) -> KeptPoolFacts:
    if settings is None or settings.pool_dir is None:
        return KeptPoolFacts()
    directory = Path(settings.pool_dir)
    place = existing(directory)
    try:
        opened = PoolDirectory(place, settings.table_path and existing(settings.table_path), settings.called)
        opened.close()
        status, limit = place.stat(), os.statvfs(place)
    except (ConfigError, OSError) as error:
        return KeptPoolFacts(str(directory), str(error).replace(f"='{place}'", f"='{directory}'"))
    pool: os.stat_result | None = None
    with contextlib.suppress(OSError):
        pool = os.lstat(directory / FILES[0])
    in_use = pool.st_blocks * 512 if pool else 0
    return KeptPoolFacts(
        directory=str(directory),
        file_system="hugetlbfs" if opened.huge_page_bytes else "tmpfs",
        owner=name_of(status.st_uid),
        writable=os.access(place, os.W_OK | os.X_OK),
        room=limit.f_bavail * limit.f_frsize + in_use if limit.f_blocks else None,
        pool_bytes=pool.st_size if pool else None,
        pool_owner=name_of(pool.st_uid) if pool else "",
    )


def _closed(path: str, gid: int) -> str:
    socket = Path(path)
    return str(closed_to_group(socket, gid) or "") if not is_private_to_socket(socket) else ""


def _socket(path: str, wanted_group: str | None) -> SocketFacts:
    directory = Path(path).parent
    owner: int | None = None
    usable = False
    with contextlib.suppress(OSError):
        owner = directory.stat().st_uid
        usable = os.access(directory, os.W_OK | os.X_OK)
    if owner is None:
        above = next((each for each in directory.parents if each.exists()), Path("/"))
        usable = os.access(above, os.W_OK | os.X_OK)
    try:
        found = os.lstat(path)
    except OSError:
        gid = os.getegid()
        with contextlib.suppress(KeyError):
            gid = grp.getgrnam(wanted_group).gr_gid if wanted_group else gid
        return SocketFacts(owner, usable, closed=_closed(path, gid))
    group, members = str(found.st_gid), tuple[str, ...]()
    with contextlib.suppress(KeyError):
        entry = grp.getgrgid(found.st_gid)
        primary = [user.pw_name for user in pwd.getpwall() if user.pw_gid == found.st_gid]
        group, members = entry.gr_name, tuple(dict.fromkeys([*primary, *entry.gr_mem]))
    mode = stat.S_IMODE(found.st_mode)
    closed = str(closed_to_group(Path(path), found.st_gid) or "")
    return SocketFacts(owner, usable, stat.S_ISSOCK(found.st_mode), mode, name_of(found.st_uid), group, members, closed)


def _daemon(path: str) -> DaemonFacts:
    pid = 0
    with sockets.socket(sockets.AF_UNIX) as probe:
        probe.settimeout(2.0)
        try:
            probe.connect(path)
            pid = peer.credentials(probe).pid
        except PermissionError:
            return DaemonFacts(reason="permission denied", refused=True)
        except FileNotFoundError:
            return DaemonFacts(reason="there is no socket")
        except OSError as error:
            return DaemonFacts(reason=error.strerror or str(error))
    try:
        with Client(path, name="kvsidecar doctor") as client:
            reply = client.status()
    except ClientError as error:
        return DaemonFacts(reason=str(error), pid=pid)
    state = STATE_FROM_WIRE[reply.readiness.state]
    tiers = {tier.name: tier.off for tier in reply.tiers}
    ranks, pool = reply.totals.ranks, reply.pool
    return DaemonFacts(
        state, reply.readiness.reason, False, reply.version, pid, ranks, pool.carrier, tiers, pool.total_bytes
    )


def _isolation(process: int | str) -> Isolation | None:
    """The isolation of a process; None if this user may not inspect it."""
    root = Path("/proc") / str(process)
    try:
        ipc, pid = (os.stat(root / "ns" / name).st_ino for name in ("ipc", "pid"))
    except OSError:
        return None
    try:
        shm = os.stat(root / "root/dev/shm")
        space = os.statvfs(root / "root/dev/shm")
    except OSError:
        return Isolation(ipc, pid, None)
    writable = process != "self" or os.access("/dev/shm", os.W_OK | os.X_OK)
    return Isolation(ipc, pid, shm.st_dev, space.f_bsize * space.f_blocks, writable)


def _engine(pid: int) -> InspectedEngine:
    root = Path("/proc") / str(pid)
    try:
        uid = root.stat().st_uid
    except OSError:
        return InspectedEngine(pid, exists=False)
    environ: dict[str, str] | None = None
    with contextlib.suppress(OSError):
        pairs = (each.partition("=") for each in (root / "environ").read_bytes().decode(errors="replace").split("\0"))
        environ = {name: value for name, _, value in pairs if name in ALLOCATOR_VARIABLES}
    command = tuple(part for part in _read(root / "cmdline").split("\0") if part)
    return InspectedEngine(pid, True, uid, environ, command, _isolation(pid))


def _read(path: str | Path) -> str:
    try:
        return Path(path).read_text(errors="replace").strip()
    except OSError:
        return ""
