"""Limits of host memory for this process, read from /proc, /sys and cgroup files, and whether a pool fits them.

Pinned memory cannot be reclaimed or swapped: a pool that exceeds a limit gets this process or an engine killed. So
every readable limit is checked before any memory is touched, and a refusal names the limit. A missing or unreadable
file means "no such limit" and is never an error: the kernel enforces its limits anyway.

Every function takes ``root``, a directory to use as ``/``; tests pass a fake tree.
"""

from __future__ import annotations

import mmap
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from kvsidecar.errors import PoolRefused
from kvsidecar.support.units import MiB, Size, format_size

ROOT = Path("/")

PIN_BOOKKEEPING_BYTES = 24
"""Kernel memory per pinned 4 KiB page under CUDA, also with huge pages: 8 for the ``struct page *`` that
pin_user_pages fills in and 16 for NVIDIA's ``nvidia_pte_t`` (open kernel module 595.45.04). About 0.6 %."""

HEADROOM_BYTES = 256 * MiB
"""Estimated growth of the daemon after the check: CUDA contexts, gRPC, the cache's index."""

THP_BYTES = 2 * MiB
HUGE_PAGES_HINT = (
    "write advise to /sys/kernel/mm/transparent_hugepage/shmem_enabled, or reserve huge pages with vm.nr_hugepages"
)
_UNLIMITED = 1 << 60
"""cgroup v1 writes "no limit" as the largest multiple of the page size below 2**63."""
_CAP_IPC_LOCK = 14


class HugePages(StrEnum):
    """The setting ``huge_pages``."""

    AUTO = "auto"
    THP = "thp"
    HUGETLB = "hugetlb"
    NONE = "none"


class PageKind(StrEnum):
    HUGETLB = "hugetlb"
    THP = "thp"
    SMALL = "small"


@dataclass(frozen=True, slots=True)
class Pages:
    kind: PageKind
    nbytes: int
    """Bytes of one page; for transparent huge pages, of the huge page that the kernel tries to use."""


@dataclass(frozen=True, slots=True)
class CgroupLimit:
    """One limit of one cgroup, in bytes."""

    path: str
    """The cgroup as this process sees it: in a cgroup namespace ``/`` is the container itself."""
    source: str
    """Name of the file."""
    limit: int
    in_use: int
    """Without reclaimable page cache."""

    @property
    def room(self) -> int:
        return max(0, self.limit - self.in_use)

    def __str__(self) -> str:
        name = "the container's cgroup" if self.path == "/" else f"the cgroup {self.path}"
        return f"{name} allows {format_size(self.limit)} ({format_size(self.in_use)} in use)"


@dataclass(frozen=True, slots=True)
class NumaNode:
    """Memory of a NUMA node, in bytes."""

    total: int
    available: int
    """Free memory and reclaimable page cache."""


# -- readers -----------------------------------------------------------------------------------------------------


def meminfo(root: Path = ROOT) -> dict[str, int]:
    """``/proc/meminfo`` in bytes, by name."""
    return _meminfo(_read(root / "proc/meminfo"))


def memlock_limit(root: Path = ROOT) -> int | None:
    """Bytes that this process may ``mlock`` (RLIMIT_MEMLOCK). None: there is no limit, or CAP_IPC_LOCK lifts it.

    CUDA's registration does not count against it: the open kernel module does no such accounting.
    """
    found = re.search(r"^Max locked memory\s+(\S+)", _read(root / "proc/self/limits"), re.MULTILINE)
    if found is None or found[1] == "unlimited" or _has_cap_ipc_lock(root):
        return None
    return int(found[1])


def memlock_remedy(nbytes: int, limit: int, root: Path = ROOT) -> str:
    """What to do where ``nbytes`` are to be locked and only ``limit`` may be: commands to type as they are."""
    found = re.search(r"^Max locked memory\s+\S+\s+(\S+)", _read(root / "proc/self/limits"), re.MULTILINE)
    hard = found[1] if found else "0"
    kilobytes = -(-nbytes // 1024)
    if hard == "unlimited" or int(hard) >= nbytes:
        raised = f"ulimit -l {kilobytes}"
    else:
        raised = "sudo prlimit --memlock=unlimited --pid $$"  # a user may not raise a hard limit
    smaller = f"use --pool-size {limit // MiB}MiB, or " if limit >= MiB else ""
    return (
        f"{smaller}raise the limit: in a shell with {raised}, for systemd with LimitMEMLOCK=infinity, for Docker with "
        "--ulimit memlock=-1"
    )


def memory_cgroups(root: Path = ROOT) -> tuple[CgroupLimit, ...]:
    """All memory limits, v1 and v2, from this process's cgroup up to the topmost visible cgroup."""
    limits = []
    for path, directory in _cgroup_levels("memory", root):
        stat = dict(line.split(maxsplit=1) for line in _read(directory / "memory.stat").splitlines() if " " in line)
        # Above memory.high the kernel throttles every allocation, and pinned memory cannot be reclaimed to get below.
        for source, usage, cache in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.high", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            limit = _read_int(directory / source)
            if limit is not None and limit < _UNLIMITED:
                used = (_read_int(directory / usage) or 0) - int(stat.get(cache, 0))
                limits.append(CgroupLimit(path, source, limit, max(0, used)))
    return tuple(limits)


def hugetlb_cgroups(page_bytes: int, root: Path = ROOT) -> tuple[CgroupLimit, ...]:
    """Limits of the hugetlb controller for one page size. Kubernetes sets 0 for a pod that requests no huge pages."""
    size = f"{page_bytes >> 30}GB" if page_bytes >= 1 << 30 else f"{page_bytes >> 20}MB"
    limits = []
    for path, directory in _cgroup_levels("hugetlb", root):
        for kind in ("", "rsvd."):
            for maximum, usage in (("max", "current"), ("limit_in_bytes", "usage_in_bytes")):
                source = f"hugetlb.{size}.{kind}{maximum}"
                limit = _read_int(directory / source)
                if limit is not None and limit < _UNLIMITED:
                    in_use = _read_int(directory / f"hugetlb.{size}.{kind}{usage}") or 0
                    limits.append(CgroupLimit(path, source, limit, in_use))
    return tuple(limits)


def hugetlb_page_sizes(root: Path = ROOT) -> tuple[int, ...]:
    """Sizes of the kernel's explicit huge pages, smallest first."""
    directories = (root / "sys/kernel/mm/hugepages").glob("hugepages-*kB")
    return tuple(sorted(int(each.name[len("hugepages-") : -len("kB")]) << 10 for each in directories))


def hugetlb_free(page_bytes: int, root: Path = ROOT, node: int | None = None) -> int:
    """Number of free, unreserved explicit huge pages of one size, on one NUMA node or on all."""
    where = "sys/kernel/mm" if node is None else f"sys/devices/system/node/node{node}"
    directory = root / where / "hugepages" / f"hugepages-{page_bytes >> 10}kB"
    # Free pages include those that another mapping has reserved but not touched. (Nodes do not report these.)
    return max(0, (_read_int(directory / "free_hugepages") or 0) - (_read_int(directory / "resv_hugepages") or 0))


def thp_enabled(root: Path = ROOT) -> bool:
    """Whether a pool in shared memory gets transparent huge pages in this process.

    Page faults create them if ``shmem_enabled`` allows it. Since Linux 6.1 MADV_COLLAPSE does too, unless it is "deny".
    """
    mode = re.search(r"\[(\w+)\]", _read(root / "sys/kernel/mm/transparent_hugepage/shmem_enabled"))
    if mode is None or mode[1] == "deny":
        return False
    if re.search(r"^THP_enabled:\s*0", _read(root / "proc/self/status"), re.MULTILINE):
        return False
    release = re.match(r"(\d+)\.(\d+)", _read(root / "proc/sys/kernel/osrelease"))
    collapses = release is not None and (int(release[1]), int(release[2])) >= (6, 1)
    return mode[1] != "never" or collapses


def page_table_bytes(nbytes: int) -> int:
    """Bytes of page tables for this many bytes of small pages, in each process that maps them."""
    return nbytes // mmap.PAGESIZE * 8


def parse_ranges(text: str) -> tuple[int, ...]:
    """The kernel's list format: ``0-1,4`` is 0, 1, 4."""
    numbers: list[int] = []
    for part in text.split(",") if text.strip() else ():
        first, _, last = part.strip().partition("-")
        numbers.extend(range(int(first), int(last or first) + 1))
    return tuple(numbers)


def numa_nodes(root: Path = ROOT) -> dict[int, NumaNode]:
    """NUMA nodes that are online, have memory, and are in this process's cpuset, in order of their numbers."""
    directory = root / "sys/devices/system/node"
    online = set(parse_ranges(_read(directory / "online")))
    if with_memory := _read(directory / "has_memory"):
        online &= set(parse_ranges(with_memory))
    # mbind to a node outside the cpuset fails with EINVAL.
    if allowed := re.search(r"^Mems_allowed_list:\s*(\S+)", _read(root / "proc/self/status"), re.MULTILINE):
        online &= set(parse_ranges(allowed[1]))
    nodes = {}
    for node in sorted(online):
        text = _read(directory / f"node{node}/meminfo")
        info = _meminfo(re.sub(r"^Node \d+ ", "", text, flags=re.MULTILINE))
        available = sum(info.get(name, 0) for name in ("MemFree", "Inactive(file)", "SReclaimable"))
        nodes[node] = NumaNode(info.get("MemTotal", 0), available)
    return nodes


# -- decisions ---------------------------------------------------------------------------------------------------


def resolve_size(size: Size, root: Path = ROOT) -> int:
    """Bytes of a pool size. A percentage refers to the machine's memory, or to the lowest cgroup limit if that is less.

    The result is rounded down to whole pages; a percentage to 64 MiB (2 MiB below 512 MiB), a multiple of slabs and
    huge pages.
    """
    whole = min([meminfo(root).get("MemTotal", 0), *(limit.limit for limit in memory_cgroups(root))])
    nbytes = size.of(whole)
    unit = mmap.PAGESIZE
    if size.percent is not None and nbytes >= 2 * MiB:
        unit = 64 * MiB if nbytes >= 512 * MiB else 2 * MiB
    return nbytes // unit * unit


def page_candidates(wish: HugePages, nbytes: int, root: Path = ROOT) -> tuple[Pages, ...]:
    """The kinds of pages for a pool of ``nbytes``, best first; explicit huge pages even if too few are free.

    Raises:
        PoolRefused: the setting is impossible on this machine or with this size.
    """
    small = Pages(PageKind.SMALL, mmap.PAGESIZE)
    if wish is HugePages.NONE:
        return (small,)
    thp = Pages(PageKind.THP, THP_BYTES) if thp_enabled(root) else None
    if wish is HugePages.THP:
        if thp is None:
            raise PoolRefused(
                "shared memory cannot have transparent huge pages here: write advise to "
                "/sys/kernel/mm/transparent_hugepage/shmem_enabled, or use --huge-pages auto",
                lasting=True,
            )
        return (thp,)
    sizes = hugetlb_page_sizes(root)
    hugetlb = tuple(Pages(PageKind.HUGETLB, size) for size in sizes if nbytes % size == 0)
    if wish is HugePages.AUTO:
        return (*hugetlb, thp or small)
    if not sizes:
        raise PoolRefused("the kernel has no explicit huge pages: use --huge-pages thp", lasting=True)
    if not hugetlb:
        raise PoolRefused(
            f"the pool of {nbytes} bytes is not a multiple of the huge page size {format_size(sizes[0])}: "
            f"use such a --pool-size, or --huge-pages thp",
            lasting=True,
        )
    return hugetlb


def pages_of_file(wish: HugePages, nbytes: int, huge_page_bytes: int, root: Path = ROOT) -> Pages:
    """The pages for a pool in a file that exists, or in a directory.

    Args:
        huge_page_bytes: of its file system, as `host_memory.huge_page_bytes` returns it.

    Raises:
        PoolRefused: the file system has other pages than the setting says, or the pool is no multiple of them.
    """
    if not huge_page_bytes:
        if wish is HugePages.HUGETLB:
            raise PoolRefused(
                "--huge-pages hugetlb needs a --pool-dir on hugetlbfs, and this one is on tmpfs", lasting=True
            )
        kind = HugePages.THP if wish is HugePages.AUTO and thp_enabled(root) else wish
        return page_candidates(HugePages.NONE if kind is HugePages.AUTO else kind, nbytes, root)[0]
    if wish in (HugePages.THP, HugePages.NONE):
        raise PoolRefused(
            f"--huge-pages {wish} needs a --pool-dir on tmpfs, and this one is on hugetlbfs", lasting=True
        )
    if nbytes % huge_page_bytes:
        raise PoolRefused(
            f"the pool of {nbytes} bytes is not a multiple of the huge page size {format_size(huge_page_bytes)} of "
            f"--pool-dir: use such a --pool-size",
            lasting=True,
        )
    return Pages(PageKind.HUGETLB, huge_page_bytes)


def hugetlb_problem(nbytes: int, page_bytes: int, node_bytes: Mapping[int, int], root: Path = ROOT) -> str | None:
    """Why a pool does not fit the explicit huge pages of one size, as a sentence, or None.

    Args:
        node_bytes: as for `check_fits`.
    """
    size = format_size(page_bytes)
    free = hugetlb_free(page_bytes, root)
    if nbytes > free * page_bytes:
        return (
            f"the pool needs {nbytes // page_bytes} huge pages of {size} but {free} are free: "
            f"raise vm.nr_hugepages, lower --pool-size or use --huge-pages auto"
        )
    for node, part in node_bytes.items():
        free = hugetlb_free(page_bytes, root, node)
        if part > free * page_bytes:
            return (
                f"the pool needs {part // page_bytes} huge pages of {size} on NUMA node {node} but {free} are free "
                f"there: raise the node's nr_hugepages, lower --pool-size or use --numa off"
            )
    for limit in hugetlb_cgroups(page_bytes, root):
        if nbytes > limit.room:
            return (
                f"the pool needs {format_size(nbytes)} of {size} huge pages but {limit}: "
                f"raise the container's limit of huge pages, lower --pool-size or use --huge-pages auto"
            )
    return None


def bookkeeping_bytes(nbytes: int) -> int:
    """Kernel memory that CUDA needs to register ``nbytes``."""
    return -(-nbytes // 4096) * PIN_BOOKKEEPING_BYTES


def check_fits(
    nbytes: int,
    *,
    pages: Pages,
    bookkeeping: int = 0,
    pin_limit: int | None = None,
    node_bytes: Mapping[int, int] | None = None,
    present: int = 0,
    root: Path = ROOT,
) -> None:
    """Refuse a pool that exceeds a limit. Changes nothing.

    Args:
        bookkeeping: kernel memory for pinning in addition to the pool, see `bookkeeping_bytes`.
        pin_limit: the platform's own limit of pinned bytes.
        node_bytes: bytes of the pool to bind, by NUMA node.
        present: bytes of the pool that an earlier daemon has left in memory. They are in use already, and some cgroup
            counts them: perhaps the pod's, and not that of a container that was restarted.

    Raises:
        PoolRefused: names the need, the limit and a remedy.
    """
    if pin_limit is not None and nbytes > pin_limit:
        raise PoolRefused(
            f"the pool needs {_apart(nbytes, pin_limit)} but this process may lock {format_size(pin_limit)} "
            f"(RLIMIT_MEMLOCK): {memlock_remedy(nbytes, pin_limit, root)}",
            lasting=True,
        )
    if present:
        node_bytes = {node: part * (nbytes - present) // nbytes for node, part in (node_bytes or {}).items()}
        nbytes -= present
    hugetlb = pages.kind is PageKind.HUGETLB
    if hugetlb and (problem := hugetlb_problem(nbytes, pages.nbytes, node_bytes or {}, root)):
        raise PoolRefused(problem)
    beside = bookkeeping + HEADROOM_BYTES
    # Explicit huge pages are no longer part of available memory; a cgroup's memory limit counts them only if cgroup2
    # is mounted with memory_hugetlb_accounting (commit 8cba9576df60, Linux 6.6).
    options = [options for _, fstype, options in mounts(root) if fstype == "cgroup2"]
    counted = not hugetlb or any("memory_hugetlb_accounting" in each for each in options)
    in_cgroup = nbytes if counted else 0
    for limit in memory_cgroups(root):
        if in_cgroup + beside > limit.room:
            raise PoolRefused(
                f"the pool needs {_need(in_cgroup, beside, limit.room)} but {limit}: "
                f"raise the container's memory limit or lower --pool-size",
                lasting=in_cgroup + beside > limit.limit,
            )
    if hugetlb:
        return
    info = meminfo(root)
    available = info.get("MemAvailable")
    if available is not None and nbytes + beside > available:
        raise PoolRefused(
            f"the pool needs {_need(nbytes, beside, available)} but {format_size(available)} of the machine's "
            f"{format_size(info.get('MemTotal', 0))} are available: lower --pool-size, or use --memory-check off "
            f"where memory is added as it is used",
            lasting=nbytes + beside > info.get("MemTotal", 0),
        )
    # A bound page must come from its node: the kernel kills a process rather than use another node.
    for number, node in numa_nodes(root).items():
        part = (node_bytes or {}).get(number, 0)
        if part > node.available:
            raise PoolRefused(
                f"the pool needs {_apart(part, node.available)} on NUMA node {number} but "
                f"{format_size(node.available)} are free there: lower --pool-size or use --numa off",
                lasting=part > node.total,
            )


def _need(nbytes: int, beside: int, room: int) -> str:
    if nbytes > room:
        return _apart(nbytes, room)
    extra = f"{format_size(beside)} for the kernel's bookkeeping and the daemon itself"
    return f"{format_size(nbytes)} and {extra}" if nbytes else extra


def _apart(need: int, limit: int) -> str:
    """``need`` as text, in bytes if rounding would make it equal to the limit that it exceeds."""
    return format_size(need) if format_size(need) != format_size(limit) else f"{need} bytes"


def _cgroup_levels(controller: str, root: Path) -> Iterator[tuple[str, Path]]:
    """(path as this process sees it, directory) of this process's cgroup, its parent and so on; v2 and v1."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        number, controllers, own = line.split(":", 2)
        if number != "0" and controller not in controllers.split(","):
            continue
        for fields, fstype, options in mounts(root):
            if fstype != ("cgroup2" if number == "0" else "cgroup"):
                continue
            if number != "0" and controller not in options.split(","):
                continue
            mount_root, mount_point = fields[3].rstrip("/"), fields[4]
            # If only the own subtree is mounted (Docker with host cgroup namespace), the path still starts at the top.
            # Any other path that does not match, such as "/..", is represented by the topmost visible directory.
            below = own.removeprefix(mount_root).strip("/") if f"{own}/".startswith(f"{mount_root}/") else ""
            parts = [] if ".." in below.split("/") else [part for part in below.split("/") if part]
            for depth in range(len(parts), -1, -1):
                here = "/".join(parts[:depth])
                yield f"{mount_root}/{here}".rstrip("/") or "/", root / mount_point.lstrip("/") / here
            break


def mounts(root: Path) -> Iterator[tuple[list[str], str, str]]:
    """(fields, file system type, file system options) of each line of mountinfo (proc_pid_mountinfo(5))."""
    for line in _read(root / "proc/self/mountinfo").splitlines():
        left, _, right = line.partition(" - ")
        fields, filesystem = left.split(), right.split()
        if len(fields) >= 6 and len(filesystem) >= 3:
            yield fields, filesystem[0], filesystem[2]


def _has_cap_ipc_lock(root: Path) -> bool:
    # mlock needs the capability in the initial user namespace: in a rootless container a full CapEff does not help.
    uid_map = _read(root / "proc/self/uid_map").split()
    initial_namespace = not uid_map or uid_map == ["0", "0", "4294967295"]
    return initial_namespace and has_capability(_CAP_IPC_LOCK, root)


def has_capability(number: int, root: Path = ROOT) -> bool:
    """Whether this process has one of Linux's capabilities, in its user namespace."""
    found = re.search(r"^CapEff:\s*([0-9a-f]+)", _read(root / "proc/self/status"), re.MULTILINE)
    return found is not None and bool(int(found[1], 16) >> number & 1)


def _meminfo(text: str) -> dict[str, int]:
    found = re.findall(r"^([^:\n]+):\s+(\d+)( kB)?$", text, re.MULTILINE)
    return {name: int(number) * (1024 if kb else 1) for name, number, kb in found}


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _read_int(path: Path) -> int | None:
    """The number in a file; None for "max", a missing file, or anything else."""
    text = _read(path).strip()
    return int(text) if text.isdecimal() else None
