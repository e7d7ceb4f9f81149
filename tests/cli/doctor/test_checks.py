"""Tables of facts, and what the doctor says about them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvsidecar.cli.doctor.checks import CHECKS, examine, expandable
from kvsidecar.cli.doctor.facts import (
    Cluster,
    DaemonConfig,
    DaemonFacts,
    DiskTier,
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
from kvsidecar.cli.doctor.findings import Finding, Verdict
from kvsidecar.cli.doctor.view import as_json, summary
from kvsidecar.support.memory_limits import CgroupLimit, NumaNode
from kvsidecar.support.units import GiB, MiB
from kvsidecar.types import State

H200 = Gpu("GPU-aaaaaaaa-0000", "NVIDIA H200", "0000:17:00.0", 0, 140 * GiB, 0)
DRIVER = Driver(
    installed=True, module_version="580.95.05", cuda_version=13000, calls=38, gpus=(H200,), bindings="13.0.3"
)  # fmt: skip
NO_DRIVER = Driver(installed=False)
HERE = Isolation(ipc_namespace=0xEFFFFFFF, pid_namespace=1, shm_device=5, shm_bytes=64 * GiB, shm_writable=True)
ENGINE = InspectedEngine(77, True, 0, {}, ("vllm", "serve"), HERE)
MEMORY = MemoryFacts(
    available=400 * GiB,
    cgroups=(CgroupLimit("/", "memory.max", 300 * GiB, 0),),
    memlock=8 * MiB,
    thp="advise",
    hugetlb_free={2 * MiB: 0},
    numa={0: NumaNode(500 * GiB, 400 * GiB)},
    page_kind="thp",
)
KEPT = KeptPoolFacts("/dev/shm/kvs", file_system="tmpfs", owner="kv", writable=True, room=250 * GiB)
DISK = DiskTier(
    "/var/cache/kv", GiB, owner="kv", file_system="xfs", room=9 * GiB, need=GiB + MiB, direct=True, speed=(2e9, 5e9)
)
CLUSTER = Cluster("kv-master:50051", package="0.3.13")
SHARED = DiskTier("/mnt/kv", GiB, owner="kv", file_system="lustre", room=9 * GiB)
USED = {"disk": "", "cluster": "", "shared": ""}
SOCKET = "/run/kvsidecar/kvsidecar.sock"
GOOD = Facts(
    user="kv",
    uid=990,
    version="1.0",
    compiled=True,
    kernel=Kernel("6.8.0", refused=(), peer_pidfd=True),
    host=Host(),
    config=DaemonConfig(pool_bytes=200 * GiB, socket=SOCKET, socket_mode=0o660, socket_group="llm"),
    driver=DRIVER,
    nvidia_nodes=("/dev/nvidia-uvm", "/dev/nvidia0", "/dev/nvidiactl"),
    closed_nvidia_nodes=(),
    memory=MEMORY,
    kept_pool=KEPT,
    disk=DISK,
    cluster=CLUSTER,
    shared=SHARED,
    socket=SocketFacts(0, True, True, 0o660, "kv", "llm", ("alice", "bob")),
    daemon=DaemonFacts(State.READY, "", False, "1.0", 4242, 2, "directory", USED),
    isolation=HERE,
    engine=ENGINE,
)


def found(check: str, facts: Facts) -> list[Finding]:
    return [finding for finding in examine(facts) if finding.check == check]


def test_a_machine_where_all_is_well_has_no_problem_and_no_warning() -> None:
    findings = examine(GOOD)
    # The pool of a running daemon is not asked for again.
    assert {finding.check for finding in findings if finding.verdict is not Verdict.OK} == {"memory"}
    assert {finding.check for finding in findings} == set(CHECKS)


def changed(**parts: Any) -> Facts:
    return replace(GOOD, **parts)


def gpu(**fields: Any) -> Facts:
    return changed(driver=replace(DRIVER, gpus=(replace(H200, **fields),)))


def driver(**fields: Any) -> Facts:
    return changed(driver=replace(DRIVER, **fields))


def config(**fields: Any) -> DaemonConfig:
    return replace(GOOD.config, **fields)


def memory(**fields: Any) -> Facts:
    return changed(memory=replace(MEMORY, **fields), daemon=DaemonFacts())


def kept_pool(**fields: Any) -> Facts:
    return changed(kept_pool=replace(KEPT, **fields), daemon=DaemonFacts())


def disk(**fields: Any) -> Facts:
    return changed(disk=replace(DISK, **fields), daemon=DaemonFacts())


def cluster(**fields: Any) -> Facts:
    return changed(cluster=replace(CLUSTER, **fields))


def shared(**fields: Any) -> Facts:
    return changed(shared=replace(SHARED, **fields), daemon=DaemonFacts())


def off(**tiers: str) -> Facts:
    return changed(daemon=replace(GOOD.daemon, tiers={**USED, **tiers}))


def carrier(name: str, **parts: Any) -> Facts:
    return changed(daemon=replace(GOOD.daemon, carrier=name), **parts)


def engine(**fields: Any) -> Facts:
    return changed(engine=replace(ENGINE, **fields))


HOST = {"driver": NO_DRIVER, "nvidia_nodes": ()}
EXPANDABLE = "expandable_segments:True"
OK, WARNING, PROBLEM, NOT_CHECKED = Verdict

TABLE: list[tuple[str, Facts, Verdict, str, str]] = [
    (
        "settings",
        changed(config=DaemonConfig(problem="--pool-size='x' is not a size")),
        PROBLEM,
        "'x' is not",
        "Correct",
    ),
    ("settings", GOOD, OK, ", compiled kernels", ""),
    ("settings", changed(compiled=False), WARNING, "without compiled kernels", "C compiler"),
    ("kernel", changed(kernel=Kernel("4.1", ("pidfd_open",), False)), PROBLEM, "without pidfd_open", "Linux 5.4"),
    ("kernel", changed(kernel=Kernel("5.15", (), False)), WARNING, "SO_PEERPIDFD", "6.5"),
    ("host", GOOD, OK, "cgroup v2", ""),
    ("host", changed(host=Host(cgroup=0)), OK, "no cgroups", ""),
    ("host", changed(host=Host(cgroup=1)), OK, "cgroup v1", ""),
    ("host", changed(host=Host(gvisor=True)), PROBLEM, "gVisor", "runc"),
    ("host", changed(host=Host(wsl=True)), WARNING, "WSL2", "--device host"),
    ("host", changed(**HOST, host=Host(wsl=True)), OK, "cgroup v2", ""),
    ("host", changed(host=Host(wsl=True), config=config(device="host")), OK, "cgroup v2", ""),
    ("host", changed(host=Host(confidential="Intel TDX")), WARNING, "Intel TDX", "cuMemHostRegister"),
    ("host", changed(**HOST, host=Host(confidential="AMD SEV")), OK, "AMD SEV", ""),
    ("driver", changed(**HOST), WARNING, "no CUDA driver", "570"),
    (
        "driver",
        changed(driver=replace(NO_DRIVER, amd=True), nvidia_nodes=()),
        WARNING,
        "AMD GPUs are not supported",
        "serve without offload",
    ),
    ("driver", changed(**HOST, config=config(device="cuda")), PROBLEM, "device is cuda", "570"),
    ("driver", changed(driver=NO_DRIVER, config=config(device="host")), NOT_CHECKED, "device is host", ""),
    ("driver", changed(driver=NO_DRIVER), PROBLEM, "libcuda.so.1 is missing", "NVIDIA_DRIVER_CAPABILITIES"),
    ("driver", driver(problem="the CUDA driver does not start: CUDA_ERROR_X"), PROBLEM, "CUDA_ERROR_X", "nvidia-smi"),
    ("driver", driver(cuda_version=12040), PROBLEM, "CUDA 12.4 is too old", "CUDA 12.8"),
    ("driver", GOOD, OK, "driver 580.95.05, CUDA 13.0", ""),
    ("CUDA calls", driver(missing_calls=("cuInit",)), PROBLEM, "lacks cuInit", "570"),
    ("CUDA calls", driver(missing_optional_calls=("cuMemcpyBatchAsync",)), WARNING, "cuMemcpyBatchAsync", "570"),
    ("CUDA bindings", driver(bindings=""), PROBLEM, "not installed", "pip install"),
    ("CUDA bindings", driver(bindings="12.9.1"), PROBLEM, "12.9.1 is too old", "pip install"),
    ("device files", changed(closed_nvidia_nodes=("/dev/nvidiactl",)), PROBLEM, "kv cannot open /dev/nvidiactl", "kv"),
    ("device files", changed(closed_nvidia_nodes=("/dev/nvidia-modeset",)), OK, "/dev/nvidia0", ""),
    ("device files", changed(nvidia_nodes=("/dev/nvidia0", "/dev/nvidiactl")), PROBLEM, "nvidia-uvm", "modprobe"),
    ("GPU", driver(gpus=()), WARNING, "sees no GPU", "CUDA_VISIBLE_DEVICES"),
    ("GPU", changed(driver=replace(DRIVER, gpus=()), config=config(device="cuda")), PROBLEM, "no GPU", "nvidia-smi"),
    ("GPU", gpu(compute_mode=3), PROBLEM, "EXCLUSIVE_PROCESS", "nvidia-smi -i GPU-aaaaaaaa-0000 -c DEFAULT"),
    ("GPU", changed(driver=replace(DRIVER, gpus=(replace(H200, compute_mode=3),), mps=True)), OK, "H200", ""),
    ("GPU", gpu(registers_host_memory=False), PROBLEM, "confidential computing", "without offload"),
    ("GPU", gpu(compute_mode=2), PROBLEM, "PROHIBITED", "DEFAULT"),
    ("GPU", gpu(uuid="MIG-1"), PROBLEM, "MIG", "whole GPUs"),
    ("GPU", GOOD, OK, "GPU-aaaaaaaa-0000 NVIDIA H200, 140 GiB, 0000:17:00.0", ""),
    ("NUMA", memory(numa={0: NumaNode(GiB, 0), 1: NumaNode(GiB, 0)}), OK, "node 0: 1 GiB, GPU-aaaaaaaa; node 1", ""),
    (
        "NUMA",
        replace(gpu(numa_node=None), memory=replace(MEMORY, numa={0: NumaNode(GiB, 0), 1: NumaNode(GiB, 0)})),
        WARNING,
        "is unknown",
        "topology",
    ),
    ("huge pages", memory(thp="never"), OK, "never; explicit: 0 free of 2 MiB; the pool gets thp all the same", ""),
    ("huge pages", memory(thp="deny", page_kind="small"), WARNING, "2 MiB of page tables per GiB", "advise to"),
    (
        "huge pages",
        changed(memory=replace(MEMORY, page_kind="small"), config=config(huge_pages="none")),
        OK,
        "small",
        "",
    ),
    ("memlock", changed(**HOST), PROBLEM, "kv may lock 8 MiB, less than the pool of 200 GiB", "LimitMEMLOCK"),
    ("memlock", GOOD, OK, "does not count", ""),
    ("memlock", changed(**HOST, memory=replace(MEMORY, memlock=None)), OK, "no limit", ""),
    ("memory", memory(), OK, "200 GiB fits: 400 GiB available, the container's cgroup allows 300 GiB", ""),
    (
        "memory",
        memory(refusal="the pool needs 400 GiB but the container's cgroup allows 300 GiB: lower --pool-size"),
        PROBLEM,
        "the pool needs 400 GiB but the container's cgroup allows 300 GiB",
        "Lower --pool-size.",
    ),
    ("memory", changed(config=DaemonConfig(problem="x")), NOT_CHECKED, "unknown", ""),
    ("kept pool", kept_pool(), OK, "outlives the daemon in /dev/shm/kvs (tmpfs, of kv): no pool yet, room for 250", ""),
    ("kept pool", kept_pool(pool_bytes=GiB, pool_owner="kv", room=None), OK, "a pool of 1 GiB, no limit", ""),
    ("kept pool", kept_pool(problem="pool_dir='/x' is not in memory"), PROBLEM, "not in memory", "tmpfs"),
    ("kept pool", kept_pool(room=GiB), WARNING, "room for 1 GiB, less than the pool of 200 GiB", "sizeLimit"),
    ("kept pool", kept_pool(writable=False), WARNING, "kv may not write to it", "Give the directory to kv"),
    ("kept pool", kept_pool(pool_bytes=1, pool_owner="eve"), WARNING, "belongs to eve and is not used", "Remove"),
    ("kept pool", kept_pool(directory=""), OK, "ends with the daemon, unless systemd's descriptor store", ""),
    ("kept pool", carrier("systemd"), OK, "outlives the running daemon: systemd's descriptor store", ""),
    ("kept pool", carrier("directory"), OK, "outlives the running daemon: a directory in memory holds it", ""),
    (
        "kept pool",
        carrier("", kept_pool=KeptPoolFacts()),
        OK,
        "ends with the running daemon: --pool-dir is not set",
        "",
    ),
    ("kept pool", carrier(""), WARNING, "the running daemon does not use it", "its log"),
    ("IPC namespace", changed(isolation=replace(HERE, ipc_namespace=7)), OK, "container", ""),
    ("/dev/shm", changed(isolation=replace(HERE, shm_device=None)), WARNING, "no /dev/shm", "tmpfs"),
    ("/dev/shm", changed(isolation=replace(HERE, shm_writable=False)), WARNING, "kv may not write", "tmpfs"),
    ("socket", GOOD, OK, "mode 0660, so kv and root, and the group llm (alice, bob) may connect", ""),
    (
        "socket",
        changed(socket=SocketFacts(0, True, True, 0o660, "root", "llm", closed="/run/kvsidecar")),
        PROBLEM,
        f"{SOCKET} is for a group, which may not search /run/kvsidecar",
        "chmod o+x /run/kvsidecar",
    ),
    (
        "socket",
        changed(socket=SocketFacts(0, True, closed="/root")),
        PROBLEM,
        "may not search /root",
        "chmod o+x /root",
    ),
    ("socket", changed(socket=SocketFacts(0, True, True, 0o600, "root", "llm", closed="/root")), OK, "mode 0600", ""),
    ("socket", changed(socket=SocketFacts(0, False)), PROBLEM, f"kv cannot create {SOCKET}", "--socket"),
    ("socket", changed(socket=SocketFacts(None, True)), OK, "can be created: mode 0660", ""),
    (
        "socket",
        changed(socket=SocketFacts(1001, True), config=config(socket="/tmp/kvsidecar-990/k.sock")),
        PROBLEM,
        "/tmp/kvsidecar-990 belongs to uid 1001",
        "--socket",
    ),
    ("daemon", GOOD, OK, "ready: 1.0, pid 4242, 2 ranks attached", ""),
    ("daemon", changed(daemon=DaemonFacts(refused=True)), PROBLEM, "kv may not connect", "the socket's group"),
    ("daemon", changed(daemon=DaemonFacts(reason="Connection refused")), PROBLEM, "nothing answers", "stale"),
    ("daemon", changed(daemon=DaemonFacts(), socket=SocketFacts(0, True)), NOT_CHECKED, "none is running", ""),
    ("daemon", changed(daemon=DaemonFacts(State.FAILED, "no memory")), PROBLEM, "failed: no memory", "restart"),
    ("daemon", changed(daemon=DaemonFacts(State.PINNING)), WARNING, "pinning", "kvsidecar top"),
    ("daemon", changed(daemon=DaemonFacts(State.DRAINING)), WARNING, "draining", "drain --cancel"),
    ("engine", changed(engine=None), NOT_CHECKED, "--pid", ""),
    ("engine", engine(exists=False), PROBLEM, "no process 77", "PID namespace"),
    ("allocator", engine(environ=None), NOT_CHECKED, "may not read", "root"),
    (
        "allocator",
        engine(environ={"PYTORCH_CUDA_ALLOC_CONF": EXPANDABLE}),
        WARNING,
        "PYTORCH_CUDA_ALLOC_CONF",
        "Remove",
    ),
    ("allocator", engine(environ={"PYTORCH_ALLOC_CONF": f"a:1,{EXPANDABLE}"}), WARNING, "PYTORCH_ALLOC_CONF", "Remove"),
    ("allocator", engine(environ={"PYTORCH_ALLOC_CONF": "a:1"}), OK, "no expandable", ""),
    ("engine isolation", engine(isolation=None), NOT_CHECKED, "may not read", "root"),
    (
        "engine isolation",
        engine(isolation=replace(HERE, shm_device=6)),
        WARNING,
        "/dev/shm not shared with the daemon",
        "host",
    ),
    ("engine isolation", engine(isolation=replace(HERE, ipc_namespace=6)), WARNING, "IPC namespace", "share"),
]


@pytest.mark.parametrize(
    ("check", "facts", "verdict", "text", "fix"), TABLE, ids=[f"{row[0]}-{row[2]}-{row[3][:24]}" for row in TABLE]
)
def test_each_fact_has_its_verdict_and_its_fix(check: str, facts: Facts, verdict: Verdict, text: str, fix: str) -> None:
    (finding,) = found(check, facts)
    assert finding.verdict is verdict
    assert text in finding.text
    assert fix in finding.fix
    assert bool(finding.fix) == bool(fix)


TIERS: list[tuple[str, Facts, Verdict, str, str]] = [
    ("disk", GOOD, OK, "(xfs, of kv): nothing yet, room for 9 GiB, writes 2 GB/s, reads 5 GB/s one call at a time", ""),
    ("disk", disk(directory=""), OK, "no disk behind the pool", ""),
    ("disk", disk(speed=None, held=GiB), OK, "1 GiB of an earlier run, room for 9 GiB, --disk-speed measures it", ""),
    ("disk", disk(speed=None, speed_problem="no"), OK, "its speed is unknown: no", ""),
    ("disk", disk(problem="No such file or directory"), WARNING, "/var/cache/kv cannot be used: No such", "Create"),
    ("disk", disk(owned=False, owner="eve"), WARNING, "belongs to eve, so kv does not use it", "Give"),
    ("disk", disk(mode=0o770), WARNING, "has mode 0770", "chmod 0700 /var/cache/kv"),
    ("disk", disk(exists=False, mode=0o755, owned=False, owner="root"), OK, "of root", ""),
    ("disk", disk(exists=False, writable=False), WARNING, "kv may not create", "give it to kv"),
    ("disk", disk(room=GiB), WARNING, "room for 1 GiB, less than the 1 GiB that", "Lower --disk-size"),
    ("disk", disk(file_system="nfs4"), WARNING, "nfs4 is a network file system", "a disk of this node"),
    ("disk", disk(file_system="fuse.sshfs"), WARNING, "fuse.sshfs is a network file system", "a disk of this node"),
    ("disk", disk(file_system="tmpfs"), WARNING, "tmpfs is memory", "a disk of this node"),
    ("disk", disk(file_system="overlay"), WARNING, "the container's own layer", "volume"),
    ("disk", disk(direct=False), WARNING, "does not support O_DIRECT", "XFS"),
    ("disk", disk(in_use=True), WARNING, "another process uses it", "its own directory"),
    ("disk", changed(disk=replace(DISK, in_use=True)), OK, "/var/cache/kv", ""),
    ("disk", off(disk="it hangs"), WARNING, "the running daemon does not use it: it hangs", "tries again"),
    ("cluster", GOOD, OK, "the master kv-master:50051 accepts connections", ""),
    ("cluster", cluster(master=""), OK, "no cluster behind the pool", ""),
    ("cluster", cluster(package=""), WARNING, "is not installed", "pip install"),
    ("cluster", cluster(problem="libnuma.so.1: not found"), WARNING, "cannot be loaded: libnuma.so.1", "libnuma1"),
    ("cluster", cluster(unreached="the master is not reached"), WARNING, "not reached", "Start the master"),
    ("cluster", cluster(tried=False), NOT_CHECKED, "a group of masters", ""),
    ("cluster", off(cluster="code -900"), WARNING, "does not use it: code -900", "tries again"),
    ("shared", GOOD, OK, "/mnt/kv (lustre, of kv): room for 9 GiB", ""),
    ("shared", shared(directory=""), OK, "no directory", ""),
    ("shared", shared(file_system=""), OK, "unknown file system", ""),
    ("shared", shared(problem="Stale file handle"), WARNING, "cannot be used: Stale", "--shared-dir"),
    ("shared", shared(owned=False, owner="eve"), WARNING, "belongs to eve", "--shared-dir"),
    ("shared", shared(file_system="xfs"), WARNING, "xfs is a file system of one node", "that the nodes mount"),
    ("shared", off(shared="it hangs"), WARNING, "does not use it: it hangs", "tries again"),
]


@pytest.mark.parametrize(
    ("check", "facts", "verdict", "text", "fix"), TIERS, ids=[f"{row[0]}-{row[2]}-{row[3][:24]}" for row in TIERS]
)
def test_each_fact_of_a_tier_has_its_verdict_and_its_fix(
    check: str, facts: Facts, verdict: Verdict, text: str, fix: str
) -> None:
    told = found(check, facts)
    (finding,) = [each for each in told if text in each.text]
    assert finding.verdict is verdict
    assert fix in finding.fix
    assert bool(finding.fix) == bool(fix)
    if verdict is OK:
        assert all(each.verdict is OK for each in told)
    else:
        assert [each for each in told if each.verdict not in (OK, verdict)] == []


def test_another_pid_namespace_and_sleep_mode_are_warnings_of_their_own() -> None:
    place = found("engine isolation", engine(isolation=replace(HERE, pid_namespace=2)))
    assert [finding.verdict for finding in place] == [OK, WARNING]
    sleeping = found("allocator", engine(command=("vllm", "serve", "--enable-sleep-mode")))
    assert [finding.verdict for finding in sleeping] == [OK, WARNING]


@pytest.mark.parametrize("row", [*TABLE, *TIERS], ids=range(len(TABLE) + len(TIERS)))
def test_every_problem_and_warning_has_a_fix_of_one_sentence(row: tuple[str, Facts, Verdict, str, str]) -> None:
    for finding in examine(row[1]):
        if finding.verdict in (PROBLEM, WARNING):
            assert finding.fix.endswith("."), finding
            assert ". " not in finding.fix, finding


@pytest.mark.parametrize(
    ("value", "on"),
    [
        ("expandable_segments:True", True),
        ("max_split_size_mb:64, expandable_segments : True", True),
        ("expandable_segments:False", False),
        ("expandable_segments:True,expandable_segments:False", False),
        ("", False),
        ("pinned_use_expandable_segments:True", False),
    ],
)
def test_expandable_segments_are_read_as_pytorch_reads_them(value: str, on: bool) -> None:
    assert expandable(value) is on


def test_a_program_gets_every_finding_and_the_number_of_problems() -> None:
    findings = examine(changed(**HOST, config=config(device="cuda")))
    body = as_json(findings)
    assert body["problems"] == 2  # the driver, and memlock
    assert len(body["findings"]) == len(findings)
    assert set(body["findings"][0]) == {"check", "verdict", "text", "fix"}
    assert summary(findings).startswith("2 problems, no warnings, ")
