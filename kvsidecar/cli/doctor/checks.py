"""Derives findings from facts. Pure: the tests are tables of facts."""

from __future__ import annotations

import re
from collections.abc import Iterable

from kvsidecar.cli.doctor.facts import Facts, Gpu
from kvsidecar.cli.doctor.findings import Check, Finding, Result, Verdict
from kvsidecar.cli.doctor.tier_checks import cluster, disk, shared
from kvsidecar.support import memory_limits
from kvsidecar.support.units import count, format_size
from kvsidecar.types import State

SINCE_CUDA = 12080
"""12.8, the first driver with the batched copies; `kvsidecar.device.cuda.status.MIN_CUDA`, which needs the bindings."""
_IPC_INIT_INODE = 0xEFFFFFFF
"""The inode of the machine's first IPC namespace (include/linux/proc_ns.h)."""
_EXCLUSIVE, _PROHIBITED = 3, 2


_OK, _WARNING, _PROBLEM, _NOT_CHECKED = Verdict


def examine(facts: Facts) -> list[Finding]:
    """The findings of every check, in the order of `CHECKS`."""
    return [Finding(name, *result) for name, check in CHECKS.items() for result in check(facts)]


# -- this machine ------------------------------------------------------------------------------------------------


def _settings(facts: Facts) -> Iterable[Result]:
    config = facts.config
    if config.problem:
        yield _PROBLEM, config.problem, "Correct the setting: the daemon does not start with it."
        return
    whose = " of the running daemon" if config.running else ""
    said = f"kvsidecar {facts.version}: pool {format_size(config.pool_bytes)}{whose}, device {config.device}"
    if facts.compiled:
        yield _OK, f"{said}, compiled kernels"
    else:
        fix = "Install the wheel of this processor, or a C compiler and Python's headers and then kvsidecar again."
        yield _WARNING, f"{said}; without compiled kernels lookups and small jobs take two to three times as long", fix


def _kernel(facts: Facts) -> Iterable[Result]:
    kernel = facts.kernel
    if kernel.refused:
        missing = " and ".join(kernel.refused)
        fix = f"Use Linux 5.4 or newer, and a seccomp profile that allows {missing}."
        yield _PROBLEM, f"Linux {kernel.release} without {missing}", fix
    elif not kernel.peer_pidfd:
        fix = "Use Linux 6.5 or newer, or run the daemon and the engines in one PID namespace."
        yield _WARNING, f"Linux {kernel.release} cannot watch processes in other PID namespaces: no SO_PEERPIDFD", fix
    else:
        yield _OK, f"Linux {kernel.release}: pidfd, memfd, SO_PEERPIDFD"


def _host(facts: Facts) -> Iterable[Result]:
    host, on_gpus = facts.host, facts.config.device != "host" and (facts.driver.installed or bool(facts.nvidia_nodes))
    named = f"cgroup v{host.cgroup}" if host.cgroup else "no cgroups"
    if host.gvisor:
        text = "gVisor, whose sandboxes (a pod, a Docker container) share no memory: engines in others cannot attach"
        yield _PROBLEM, text, "Run the daemon and its engines with another runtime (runc), or all in one sandbox."
    elif host.wsl and on_gpus:
        # NVIDIA's guide to WSL: pinned memory is limited, and legacy CUDA IPC is supported since driver 510.
        text = "WSL2, where CUDA can pin only part of the memory, and sharing GPU memory was not tested"
        yield _WARNING, text, "Keep the pool small, use Linux on the machine itself, or --device host for development."
    elif host.confidential:
        # NVIDIA's release notes of trusted computing: cuMemHostRegister is not allowed, and CUDA IPC not everywhere.
        text = f"a confidential virtual machine ({host.confidential}): devices cannot read its memory"
        fix = "Expect that no pool can be pinned, because the CUDA driver refuses cuMemHostRegister there."
        yield (_WARNING if on_gpus else _OK), text, (fix if on_gpus else "")
    else:
        yield _OK, named


def _driver(facts: Facts) -> Iterable[Result]:
    driver, device = facts.driver, facts.config.device
    if device == "host":
        yield _NOT_CHECKED, "device is host, which needs no driver"
        return
    if not driver.installed:
        if facts.nvidia_nodes or driver.module_version:
            module = f"the NVIDIA kernel module {driver.module_version or ''} is loaded".replace("  ", " ")
            fix = "Install libcuda, or set NVIDIA_DRIVER_CAPABILITIES=compute,utility for the container."
            yield _PROBLEM, f"{module}, but libcuda.so.1 is missing", fix
            return
        text = "no CUDA driver (libcuda.so.1)"
        fix = "If this machine has GPUs, install NVIDIA driver 570 or newer, or expose the GPUs to the container."
        if driver.amd:
            text += ", and AMD's (/dev/kfd): AMD GPUs are not supported"
            fix = "Engines on AMD GPUs serve without offload: do not run the daemon on this node."
        if device == "cuda":
            yield _PROBLEM, f"{text}, but device is cuda", fix
        else:
            yield _WARNING, f"{text}: host memory stands in for a GPU, and engines on GPUs cannot attach", fix
        return
    if driver.problem:
        fix = "Check nvidia-smi and the kernel log; reboot, or use one driver version inside and outside the container."
        yield _PROBLEM, driver.problem, fix
        return
    named = f"driver {driver.module_version or 'of unknown version'}, {_cuda(driver.cuda_version)}"
    if driver.cuda_version < SINCE_CUDA:
        yield _PROBLEM, f"{named} is too old", f"Install driver 570 or newer ({_cuda(SINCE_CUDA)})."
    else:
        yield _OK, named


def _cuda(version: int) -> str:
    return f"CUDA {version // 1000}.{version % 1000 // 10}"


def _calls(facts: Facts) -> Iterable[Result]:
    driver = facts.driver
    if not driver.installed or not driver.calls:
        yield _NOT_CHECKED, "there is no CUDA driver to ask"
    elif driver.missing_calls:
        yield _PROBLEM, f"the driver lacks {', '.join(driver.missing_calls)}", "Install driver 570 or newer."
    elif driver.missing_optional_calls:
        names = ", ".join(driver.missing_optional_calls)
        yield _WARNING, f"the driver lacks {names}: copies of small rows are slow", "Install driver 570 or newer."
    else:
        yield _OK, f"all {driver.calls} required calls are available"


def _bindings(facts: Facts) -> Iterable[Result]:
    found = facts.driver.bindings
    if facts.config.device == "host" or not facts.driver.installed:
        yield _NOT_CHECKED, f"cuda-python {found or 'is not installed'}; not needed without a CUDA driver"
    elif not found:
        fix = "Run pip install 'cuda-python>=13.0' in the daemon's environment."
        yield _PROBLEM, "cuda-python is not installed", fix
    elif int(found.split(".", maxsplit=1)[0]) < 13:
        yield _PROBLEM, f"cuda-python {found} is too old", "Run pip install 'cuda-python>=13.0'."
    else:
        yield _OK, f"cuda-python {found}"


def _device_nodes(facts: Facts) -> Iterable[Result]:
    if not facts.nvidia_nodes:
        yield _NOT_CHECKED, "there is no /dev/nvidia*"
        return
    uvm = [node for node in facts.nvidia_nodes if node == "/dev/nvidia-uvm"]
    # nvidia-modeset and the capability devices belong to displays and MIG.
    closed = [node for node in facts.closed_nvidia_nodes if re.fullmatch(r"/dev/nvidia(\d+|ctl|-uvm)", node)]
    if closed:
        fix = f"Give {facts.user} read and write access, for example through the group that owns the file."
        yield _PROBLEM, f"{facts.user} cannot open {', '.join(closed)}", fix
    elif not uvm:
        fix = "Run nvidia-modprobe -u -c 0, or use the NVIDIA container toolkit."
        yield _PROBLEM, "there is no /dev/nvidia-uvm", fix
    else:
        yield _OK, f"{', '.join(facts.nvidia_nodes[:6])}{' ...' if len(facts.nvidia_nodes) > 6 else ''}"


def _gpus(facts: Facts) -> Iterable[Result]:
    driver = facts.driver
    if not driver.installed or driver.problem:
        yield _NOT_CHECKED, "there is no CUDA driver to ask"
        return
    if not driver.gpus:
        verdict = _PROBLEM if facts.config.device == "cuda" else _WARNING
        fix = "Check nvidia-smi, CUDA_VISIBLE_DEVICES and the container's GPU request."
        yield verdict, "the CUDA driver sees no GPU", fix
        return
    for gpu in driver.gpus:
        named = f"{gpu.uuid} {gpu.name}, {format_size(gpu.memory_bytes)}, {gpu.bus_id}"
        yield _gpu_trouble(gpu, named, mps=driver.mps) or (_OK, named)


def _gpu_trouble(gpu: Gpu, named: str, *, mps: bool) -> Result | None:
    if gpu.uuid.startswith("MIG-"):
        return _PROBLEM, f"{named} is a MIG device, which is not supported", "Turn MIG off and use whole GPUs."
    if not gpu.registers_host_memory:
        text = f"{named} cannot register host memory (confidential computing): no pool can be pinned for it"
        return _PROBLEM, text, "Turn confidential computing off for this GPU, or run the engines without offload."
    if gpu.compute_mode == _PROHIBITED or (gpu.compute_mode == _EXCLUSIVE and not mps):
        mode = "PROHIBITED" if gpu.compute_mode == _PROHIBITED else "EXCLUSIVE_PROCESS"
        text = f"{named} has compute mode {mode}: the daemon and an engine cannot both use it"
        return _PROBLEM, text, f"Run nvidia-smi -i {gpu.uuid} -c DEFAULT, or run MPS."
    return None


def _numa(facts: Facts) -> Iterable[Result]:
    nodes, gpus = facts.memory.numa, facts.driver.gpus
    if len(nodes) < 2:
        yield _OK, "one node, no placement needed" if nodes else "no NUMA nodes"
        return
    parts = []
    for number, node in nodes.items():
        near = [gpu.uuid[:12] for gpu in gpus if gpu.numa_node == number]
        parts.append(f"node {number}: {format_size(node.total)}, {', '.join(near) or 'no GPU'}")
    unknown = [gpu.uuid[:12] for gpu in gpus if gpu.numa_node is None]
    text = "; ".join(parts)
    if unknown:
        fix = "Expose the host's NUMA topology to the virtual machine, or accept slower copies for remote GPUs."
        yield _WARNING, f"{text}; the node of {', '.join(unknown)} is unknown", fix
    else:
        yield _OK, text


# -- memory ------------------------------------------------------------------------------------------------------


def _huge_pages(facts: Facts) -> Iterable[Result]:
    memory = facts.memory
    explicit = ", ".join(f"{count} free of {format_size(size)}" for size, count in memory.hugetlb_free.items())
    text = f"transparent (shmem_enabled): {memory.thp or 'not in this kernel'}; explicit: {explicit or 'none'}"
    if memory.page_kind:
        anyway = " all the same, by MADV_COLLAPSE" if (memory.thp, memory.page_kind) == ("never", "thp") else ""
        text += f"; the pool gets {memory.page_kind}{anyway}"
    if memory.page_kind == "small" and facts.config.huge_pages != "none":
        tables = format_size(memory_limits.page_table_bytes(1 << 30))
        cost = f"pages, which are slow to pin and cost {tables} of page tables per GiB in each process that maps it"
        yield _WARNING, f"{text} {cost}", memory_limits.HUGE_PAGES_HINT.capitalize() + "."
    else:
        yield _OK, text


def _memlock(facts: Facts) -> Iterable[Result]:
    limit, pool = facts.memory.memlock, facts.config.pool_bytes
    if limit is None:
        yield _OK, "no limit"
    elif facts.driver.gpus and facts.config.device != "host":
        yield _OK, f"{format_size(limit)}; pinning for a GPU does not count against it"
    elif pool > limit:
        fix = memory_limits.memlock_remedy(pool, limit)
        text = f"{facts.user} may lock {format_size(limit)}, less than the pool of {format_size(pool)}"
        yield _PROBLEM, text, f"{fix[0].upper()}{fix[1:]}."
    else:
        yield _OK, f"{format_size(limit)}, enough for the pool"


def _memory(facts: Facts) -> Iterable[Result]:
    memory, config = facts.memory, facts.config
    if config.problem:
        yield _NOT_CHECKED, "the pool size is unknown"
        return
    have = [] if memory.available is None else [f"{format_size(memory.available)} available"]
    tightest = min(memory.cgroups, key=lambda limit: limit.room, default=None)
    have += [str(tightest)] if tightest is not None else ["no cgroup limit"]
    room = ", ".join(have)
    if facts.daemon.state is not None:
        yield _NOT_CHECKED, f"the running daemon already has its pool; besides: {room}"
    elif memory.refusal:
        text, _, fix = memory.refusal.rpartition(": ")
        yield _PROBLEM, text, f"{fix[:1].upper()}{fix[1:]}."
    elif not config.memory_check:
        yield _NOT_CHECKED, f"memory_check is off; {room}"
    else:
        yield _OK, f"the pool of {format_size(config.pool_bytes)} fits: {room}"


def _kept_pool(facts: Facts) -> Iterable[Result]:
    kept, daemon = facts.kept_pool, facts.daemon
    if daemon.state is not None and daemon.carrier:
        holder = {"systemd": "systemd's descriptor store"}.get(daemon.carrier, f"a {daemon.carrier} in memory")
        yield _OK, f"the cache outlives the running daemon: {holder} holds it"
    elif not kept.directory:
        whose = (
            "the daemon, unless systemd's descriptor store holds it" if daemon.state is None else "the running daemon"
        )
        yield _OK, f"the cache ends with {whose}: --pool-dir is not set"
    elif kept.problem:
        yield _PROBLEM, kept.problem, "Set --pool-dir to a directory on tmpfs that you own."
    else:
        yield _pool_dir(facts)


def _pool_dir(facts: Facts) -> Result:
    kept, pool = facts.kept_pool, facts.config.pool_bytes
    has = f"a pool of {format_size(kept.pool_bytes)}" if kept.pool_bytes is not None else "no pool yet"
    room = "no limit" if kept.room is None else f"room for {format_size(kept.room)}"
    named = f"{kept.directory} ({kept.file_system}, of {kept.owner}): {has}, {room}"
    if not kept.writable:
        fix = f"Give the directory to {facts.user}, or set --pool-dir to another one."
        return _WARNING, f"{named}; {facts.user} may not write to it, so the cache ends with the daemon", fix
    if kept.pool_owner not in ("", facts.user):
        fix = f"Remove {kept.directory}/kvsidecar-*, or run the daemon as {kept.pool_owner}."
        return _WARNING, f"{named}; the pool belongs to {kept.pool_owner} and is not used", fix
    if kept.room is not None and kept.room < pool:
        fix = "Raise its size (sizeLimit of an emptyDir), or lower --pool-size."
        text = f"{named}, less than the pool of {format_size(pool)}, so the cache ends with the daemon"
        return _WARNING, text, fix
    if facts.daemon.state is not None:
        return _WARNING, f"{named}; the running daemon does not use it", "Restart the daemon; its log says why."
    return _OK, f"the cache outlives the daemon in {named}"


# -- namespaces and sockets --------------------------------------------------------------------------------------


def _ipc(facts: Facts) -> Iterable[Result]:
    own = facts.isolation.ipc_namespace
    if own is None:
        yield _NOT_CHECKED, "/proc is not readable"
    elif own == _IPC_INIT_INODE:
        yield _OK, "the host's"
    else:
        yield _OK, "a container's own: engines must share it only to order stores on the device"


def _shm(facts: Facts) -> Iterable[Result]:
    place = facts.isolation
    without = "stores are ordered on the host, which is slightly slower"
    fix = "Mount one tmpfs at /dev/shm for the daemon and the engines."
    if place.shm_device is None:
        yield _WARNING, f"there is no /dev/shm: {without}", fix
    elif not place.shm_writable:
        yield _WARNING, f"{facts.user} may not write to /dev/shm: {without}", fix
    else:
        yield _OK, f"{format_size(place.shm_bytes)}"


def _socket(facts: Facts) -> Iterable[Result]:
    socket, config = facts.socket, facts.config
    directory = config.socket.rpartition("/")[0]
    mode = socket.mode if socket.exists else config.socket_mode
    if socket.closed and mode & 0o070 and (socket.exists or socket.directory_usable):
        fix = f"chmod o+x {socket.closed}, or set --socket to a path in another directory."
        yield _PROBLEM, f"{config.socket} is for a group, which may not search {socket.closed}", fix
    elif socket.exists:
        yield _OK, f"{config.socket}: {_who(socket.mode, socket.owner, socket.group, socket.group_members)}"
    elif directory.startswith("/tmp/") and socket.directory_owner not in (None, facts.uid):
        fix = "Set --socket to a path in a directory that you own."
        yield _PROBLEM, f"{directory} belongs to uid {socket.directory_owner}, who could impersonate the daemon", fix
    elif not socket.directory_usable:
        fix = "Run the daemon as a user who may write there, create the directory, or set --socket."
        yield _PROBLEM, f"{facts.user} cannot create {config.socket}", fix
    else:
        group = config.socket_group or "the daemon's group"
        may = _who(config.socket_mode, facts.user, group, ())
        yield _OK, f"{config.socket} can be created: {may}"


def _who(mode: int, owner: str, group: str, members: tuple[str, ...]) -> str:
    users = f"{owner} and root" if owner != "root" else "root"
    if mode & 0o020:
        listed = f" ({', '.join(members[:8])}{' ...' if len(members) > 8 else ''})" if members else ""
        users += f", and the group {group}{listed}"
    if mode & 0o002:
        users = "everybody"
    return f"mode {mode:04o}, so {users} may connect"


def _daemon(facts: Facts) -> Iterable[Result]:
    daemon = facts.daemon
    if daemon.refused:
        fix = f"Add {facts.user} to the socket's group, and start the daemon with --socket-mode 0660."
        yield _PROBLEM, f"{facts.user} may not connect to {facts.config.socket}", fix
    elif daemon.state is None and facts.socket.exists:
        fix = "Start the daemon, which removes a stale socket; if it is already running, it hangs: read its log."
        yield _PROBLEM, f"the socket exists, but nothing answers: {daemon.reason}", fix
    elif daemon.state is None:
        yield _NOT_CHECKED, f"none is running at {facts.config.socket}"
    elif daemon.state is State.FAILED:
        yield _PROBLEM, f"failed: {daemon.reason}", "Fix the cause, then restart the daemon."
    else:
        named = f"{daemon.version}, pid {daemon.pid or 'in another namespace'}, {count(daemon.ranks, 'rank')} attached"
        if daemon.state is State.READY:
            yield _OK, f"ready: {named}"
        elif daemon.state is State.DRAINING:
            fix = "Run kvsidecar drain --cancel or restart the daemon; it accepts no new work until then."
            yield _WARNING, f"draining: {named}", fix
        else:
            yield _WARNING, f"{daemon.state.value}: {named}", "Wait: kvsidecar top shows the progress."


# -- an engine ---------------------------------------------------------------------------------------------------


def _engine(facts: Facts) -> Iterable[Result]:
    engine = facts.engine
    if engine is None:
        yield _NOT_CHECKED, "name one with --pid PID"
    elif not engine.exists:
        yield _PROBLEM, f"there is no process {engine.pid} here", "Use its pid in this PID namespace."
    else:
        command = " ".join(engine.command)
        yield _OK, f"pid {engine.pid}, uid {engine.uid}: {command[:60]}{'...' if len(command) > 60 else ''}"


def _allocator(facts: Facts) -> Iterable[Result]:
    engine = facts.engine
    if engine is None or not engine.exists:
        return
    if engine.environ is None:
        fix = "Run the doctor as the engine's user or as root."
        yield _NOT_CHECKED, f"{facts.user} may not read the environment of pid {engine.pid}", fix
    else:
        bad = [f"{name}={value}" for name, value in engine.environ.items() if expandable(value)]
        if bad:
            text = f"{' and '.join(bad)}: every 20 MiB takes a descriptor, and a rank may share at most 4,096"
            yield _WARNING, text, "Remove expandable_segments:True if a rank's KV cache is larger than 80 GiB."
        else:
            yield _OK, "no expandable segments in its environment (settings made inside the program are not visible)"
    if "--enable-sleep-mode" in engine.command:
        fix = "Remove --enable-sleep-mode if the engine's log says that its memory cannot be exported."
        yield _WARNING, "memory of vLLM's sleep mode cannot be shared on some GPUs", fix


def expandable(value: str) -> bool:
    """Whether an allocator variable of PyTorch (``name:value,name:value``) turns expandable segments on."""
    found = re.findall(r"(?:^|,)\s*expandable_segments\s*:\s*(\w+)", value)
    return bool(found) and found[-1].lower() == "true"


def _engine_isolation(facts: Facts) -> Iterable[Result]:
    engine, here = facts.engine, facts.isolation
    if engine is None or not engine.exists:
        return
    there = engine.isolation
    if there is None:
        fix = "Run the doctor as the engine's user or as root."
        yield _NOT_CHECKED, f"{facts.user} may not read the namespaces of pid {engine.pid}", fix
        return
    whose = "the daemon" if facts.daemon.pid else "the doctor"
    ipc, shm = here.ipc_namespace == there.ipc_namespace, here.shm_device == there.shm_device
    apart = [name for name, shared in (("IPC namespace", ipc), ("/dev/shm", shm)) if not shared]
    if apart:
        fix = "To order stores on the device, share the IPC namespace and /dev/shm (--ipc, hostIPC)."
        yield _WARNING, f"{' and '.join(apart)} not shared with {whose}: stores are ordered on the host", fix
    else:
        yield _OK, f"shares the IPC namespace and /dev/shm of {whose}"
    if here.pid_namespace != there.pid_namespace:
        fix = "Share the PID namespace if Attach is refused: CUDA cannot open handles of a process with the same PID."
        yield _WARNING, f"runs in another PID namespace than {whose}", fix


CHECKS: dict[str, Check] = {
    "settings": _settings,
    "kernel": _kernel,
    "host": _host,
    "driver": _driver,
    "CUDA calls": _calls,
    "CUDA bindings": _bindings,
    "device files": _device_nodes,
    "GPU": _gpus,
    "NUMA": _numa,
    "huge pages": _huge_pages,
    "memlock": _memlock,
    "memory": _memory,
    "kept pool": _kept_pool,
    "disk": disk,
    "cluster": cluster,
    "shared": shared,
    "IPC namespace": _ipc,
    "/dev/shm": _shm,
    "socket": _socket,
    "daemon": _daemon,
    "engine": _engine,
    "allocator": _allocator,
    "engine isolation": _engine_isolation,
}
