"""The facts that the doctor examines. None or an empty string means "could not be read", unless stated otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvsidecar.support.memory_limits import CgroupLimit, NumaNode
from kvsidecar.types import State


@dataclass(frozen=True, slots=True)
class Kernel:
    release: str
    refused: tuple[str, ...]
    """System calls that a daemon needs."""
    peer_pidfd: bool
    """SO_PEERPIDFD, since Linux 6.5."""


@dataclass(frozen=True, slots=True)
class Gpu:
    uuid: str
    name: str
    bus_id: str
    numa_node: int | None
    memory_bytes: int
    compute_mode: int
    """CUcomputemode: 0 default, 2 prohibited, 3 exclusive process."""
    registers_host_memory: bool = True
    """False in confidential computing: the GPU may not read the memory of the host."""


@dataclass(frozen=True, slots=True)
class Host:
    """What kind of machine this is."""

    wsl: bool = False
    """A virtual machine of the Windows Subsystem for Linux."""
    gvisor: bool = False
    """Not Linux, but a sandbox that answers its calls."""
    confidential: str = ""
    """``Intel TDX`` or ``AMD SEV``, whose memory devices cannot read; empty if it is not such a guest."""
    cgroup: int = 2
    """Version of the hierarchy that has the memory limits; 0: there is none."""


@dataclass(frozen=True, slots=True)
class Driver:
    """What libcuda reports, read in a separate process: a driver that hangs or crashes must not affect the doctor."""

    installed: bool
    """libcuda.so.1 exists."""
    problem: str = ""
    """Why it is unusable: it does not load, does not initialise, hangs or crashes."""
    module_version: str = ""
    """Version of the kernel module; empty if it is not loaded."""
    cuda_version: int = 0
    """The version that cuDriverGetVersion returns: 12080 is 12.8."""
    missing_calls: tuple[str, ...] = ()
    missing_optional_calls: tuple[str, ...] = ()
    calls: int = 0
    """Number of calls that the probe looked for."""
    gpus: tuple[Gpu, ...] = ()
    bindings: str = ""
    """Version of cuda-bindings; empty if it is not installed."""
    mps: bool = False
    amd: bool = False
    """AMD's compute driver is there."""


@dataclass(frozen=True, slots=True)
class DaemonConfig:
    """The configuration of a daemon started here, from the file, the environment and the doctor's own flags."""

    problem: str = ""
    """The error with which the daemon would not start; the other fields are then unknown."""
    device: str = "auto"
    pool_bytes: int = 0
    running: bool = False
    """The pool is that of the daemon that runs: none of these sources gives a size."""
    huge_pages: str = "auto"
    memory_check: bool = True
    socket: str = ""
    socket_mode: int = 0o600
    socket_group: str | None = None


@dataclass(frozen=True, slots=True)
class MemoryFacts:
    available: int | None
    cgroups: tuple[CgroupLimit, ...]
    memlock: int | None
    """None: no limit."""
    thp: str
    """The selected value of transparent_hugepage/shmem_enabled."""
    hugetlb_free: Mapping[int, int] = field(default_factory=dict)
    """Free pages by page size in bytes."""
    numa: Mapping[int, NumaNode] = field(default_factory=dict)
    refusal: str = ""
    """The daemon's error if the pool does not fit; empty if it does."""
    page_kind: str = ""
    """The kind of pages that the pool would get."""


@dataclass(frozen=True, slots=True)
class KeptPoolFacts:
    """The directory that keeps the pool over the daemon's end. Sizes in bytes."""

    directory: str = ""
    """``--pool-dir``; empty if it is not set."""
    problem: str = ""
    """The error with which the daemon would not start; the other fields are then unknown."""
    file_system: str = ""
    """``tmpfs`` or ``hugetlbfs``."""
    owner: str = ""
    """Owner of the directory, or of the one in which it will be made."""
    writable: bool = False
    room: int | None = None
    """Free bytes, including those of an existing pool, which a new one replaces; None: no limit."""
    pool_bytes: int | None = None
    """Size of the existing pool; None: there is none."""
    pool_owner: str = ""


@dataclass(frozen=True, slots=True)
class DiskTier:
    """The directory of a tier. Sizes in bytes."""

    directory: str = ""
    """``--disk-dir``; empty if it is not set."""
    capacity: int = 0
    problem: str = ""
    """Why it cannot be examined; the other fields are then unknown."""
    exists: bool = True
    """False: the daemon makes it; ``owner``, ``mode`` and ``writable`` are then those of the directory above."""
    owner: str = ""
    owned: bool = True
    """Whether this user owns it."""
    mode: int = 0o700
    writable: bool = True
    file_system: str = ""
    """Type of its file system, as in mountinfo; empty: unknown."""
    in_use: bool = False
    """Whether a process uses it."""
    held: int = 0
    """Size of the files of an earlier run."""
    room: int = 0
    """Free space, including that of the earlier files."""
    need: int = 0
    """Space that the daemon needs, including the index."""
    direct: bool | None = None
    """Whether a page can be written past the page cache; None: it was not tried."""
    speed: tuple[float, float] | None = None
    """Measured bytes a second of writing and of reading; None: not measured."""
    speed_problem: str = ""


@dataclass(frozen=True, slots=True)
class Cluster:
    master: str = ""
    """``--cluster-master``; empty if it is not set."""
    package: str = ""
    """Version of Mooncake's client; empty if it is not installed."""
    problem: str = ""
    """Why the client cannot be loaded."""
    unreached: str = ""
    """Why the master is not reached; empty if it is, or was not tried."""
    tried: bool = True
    """False: the address is that of a group of masters."""


@dataclass(frozen=True, slots=True)
class SocketFacts:
    directory_owner: int | None
    """uid; None: the directory does not exist."""
    directory_usable: bool
    """Whether this user can create files in it, or make it."""
    exists: bool = False
    mode: int = 0
    owner: str = ""
    group: str = ""
    group_members: tuple[str, ...] = ()
    closed: str = ""
    """A directory on the way that the socket's group may not search, so that the daemon's start does not change it."""


@dataclass(frozen=True, slots=True)
class DaemonFacts:
    """The daemon that answers at the socket."""

    state: State | None = None
    """None: nothing answers."""
    reason: str = ""
    """Reason of the state, or why nothing answers."""
    refused: bool = False
    """Whether the kernel denied this user the connection."""
    version: str = ""
    pid: int = 0
    ranks: int = 0
    carrier: str = ""
    """What holds its pool after it ends: ``systemd``, ``directory``, or nothing."""
    tiers: Mapping[str, str] = field(default_factory=dict)
    """Why each slower tier is off, by name; empty while it is used. Only those that this user may see."""
    pool_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Isolation:
    """The Linux namespaces of a process, and its /dev/shm."""

    ipc_namespace: int | None
    """Inode of /proc/PID/ns/ipc."""
    pid_namespace: int | None
    shm_device: int | None
    """st_dev of its /dev/shm; None if there is none."""
    shm_bytes: int = 0
    shm_writable: bool = False


@dataclass(frozen=True, slots=True)
class InspectedEngine:
    """The process of --pid."""

    pid: int
    exists: bool
    uid: int | None = None
    environ: Mapping[str, str] | None = None
    """The allocator's variables when the process started; None if this user may not read them."""
    command: tuple[str, ...] = ()
    isolation: Isolation | None = None


@dataclass(frozen=True, slots=True)
class Facts:
    user: str
    uid: int
    version: str
    compiled: bool
    """Whether the cache has compiled kernels (`kvsidecar.cache.kernels`)."""
    kernel: Kernel
    host: Host
    config: DaemonConfig
    driver: Driver
    nvidia_nodes: tuple[str, ...]
    """Existing /dev/nvidia*."""
    closed_nvidia_nodes: tuple[str, ...]
    """The ``nvidia_nodes`` that this user may not open."""
    memory: MemoryFacts
    kept_pool: KeptPoolFacts
    disk: DiskTier
    cluster: Cluster
    shared: DiskTier
    """The directory of the shared tier; nothing of it is measured or locked."""
    socket: SocketFacts
    daemon: DaemonFacts
    isolation: Isolation
    """The running daemon's, if its /proc entry is readable; otherwise the doctor's."""
    engine: InspectedEngine | None
    """None: no --pid was given."""
