"""HostPool: exactly the configured bytes, all of them pinned, or nothing. Real memory, real mlock, /proc as witness."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import re
import threading
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from kvsidecar.errors import PinFailed, PinStopped, PoolRefused
from kvsidecar.pool.host_pool import HostPool, PoolPart, split_over_nodes
from kvsidecar.pool.pinning import PinProgress
from kvsidecar.support import host_memory, memory_limits
from kvsidecar.support.memory_limits import HugePages, PageKind, Pages
from kvsidecar.support.units import GiB, KiB, MiB
from tests.failpoints import active
from tests.pool.host_pools import (
    CHUNKS,
    NBYTES,
    Mapped,
    MlockPlatform,
    NewPool,
    _libc,
    ignore,
    mapped,
    may_lock,
    never,
    nothing_left,
    pins,
    spec,
    tree,
    unpins,
)

pytestmark = may_lock
no_pool_is_left = nothing_left


def two_nodes(root: Path, *, free_kb: int = 1 << 30, allowed: str = "0-1") -> Path:
    """A machine with two NUMA nodes and transparent huge pages for shared memory."""
    return tree(
        root,
        {
            "proc/meminfo": "MemTotal: 1073741824 kB\nMemAvailable: 1073741824 kB\n",
            "proc/self/status": f"Mems_allowed_list:\t{allowed}\n",
            "sys/kernel/mm/transparent_hugepage/shmem_enabled": "always within_size [advise] never deny force\n",
            "sys/devices/system/node/online": "0-1\n",
            "sys/devices/system/node/has_memory": "0-1\n",
            "sys/devices/system/node/node0/meminfo": f"Node 0 MemTotal: 99 kB\nNode 0 MemFree: {free_kb} kB\n",
            "sys/devices/system/node/node1/meminfo": f"Node 1 MemTotal: 99 kB\nNode 1 MemFree: {free_kb} kB\n",
        },
    )


# -- exactly the bytes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("huge_pages", [HugePages.NONE, HugePages.AUTO])
@pytest.mark.parametrize("threads", [1, 3])
def test_exactly_the_configured_bytes_are_mapped_resident_and_pinned_and_all_are_given_back(
    huge_pages: HugePages, threads: int, new_pool: NewPool
) -> None:
    pool = new_pool(spec(huge_pages=huge_pages, prefault_threads=threads), MlockPlatform())
    assert mapped() == Mapped()
    pool.pin(ignore, never())
    now = mapped()
    assert (now.size, now.resident, now.locked) == (NBYTES, NBYTES, NBYTES)
    pool.close()
    assert mapped() == Mapped()


@pytest.mark.parametrize("huge_pages", [HugePages.NONE, HugePages.AUTO])
def test_of_the_address_space_taken_for_alignment_only_the_bytes_stay(
    huge_pages: HugePages, pinned: NewPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: set[int] = set()
    real_mmap, real_munmap = host_memory.mmap_at, host_memory.unmap

    def pages(address: int, nbytes: int) -> range:
        return range(address // (4 * KiB), (address + nbytes) // (4 * KiB))

    def mmap(address: int | None, nbytes: int, *arguments: int) -> int:
        result = real_mmap(address, nbytes, *arguments)
        taken.update(pages(result, nbytes))
        return result

    def munmap(address: int, nbytes: int) -> None:
        real_munmap(address, nbytes)
        taken.difference_update(pages(address, nbytes))

    monkeypatch.setattr(host_memory, "mmap_at", mmap)
    monkeypatch.setattr(host_memory, "unmap", munmap)
    pool = pinned(spec(huge_pages=huge_pages))
    assert taken == set(pages(pool.address, NBYTES))
    pool.close()
    assert taken == set()


def test_the_view_is_all_of_the_pinned_memory(pinned: NewPool) -> None:
    pool = pinned(spec())
    view = pool.view()
    assert (view.nbytes, view.ctypes.data) == (NBYTES, pool.address)
    assert not view.any()
    view[:] = np.arange(NBYTES, dtype=np.uint64).astype(np.uint8)
    assert int(pool.view()[-1]) == (NBYTES - 1) % 256


@pytest.mark.parametrize("old_kernel", [False, True])
@pytest.mark.parametrize("kind", [PageKind.SMALL, PageKind.THP])
def test_pages_that_are_faulted_in_keep_what_they_hold(
    old_kernel: bool, kind: PageKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = host_memory.advise

    def advise(address: int, nbytes: int, advice: int) -> None:
        if advice == 23 and old_kernel:
            raise OSError(errno.EINVAL, "Invalid argument")
        real(address, nbytes, advice)

    monkeypatch.setattr(host_memory, "advise", advise)
    pages = Pages(kind, memory_limits.THP_BYTES if kind is PageKind.THP else mmap.PAGESIZE)
    fd = host_memory.create_file(4 * MiB, pages)
    address = None
    try:
        os.pwrite(fd, bytes([7]) * 4 * MiB, 0)
        address = host_memory.map_file(fd, 4 * MiB, pages)
        host_memory.populate(address, 4 * MiB, kind)
        assert (host_memory.as_array(address, 4 * MiB) == 7).all()
    finally:
        if address is not None:
            host_memory.unmap(address, 4 * MiB)
        os.close(fd)


# -- failure, stop --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("failing", range(len(CHUNKS)))
def test_a_chunk_that_cannot_be_pinned_gives_back_all_before_it_in_reverse(failing: int) -> None:
    platform = MlockPlatform(fail_at=failing)
    pool = HostPool(spec(), platform)
    with pytest.raises(PinFailed, match=rf"^chunk {failing + 1} of 5 \(.*\): out of memory") as raised:
        pool.pin(ignore, never())
    assert str(raised.value).endswith(": the chunks before it were released") == (failing > 0)
    done = [call[1:] for call in platform.calls if call[0] == "pin"]
    assert [nbytes for _, nbytes in done] == [nbytes for _, nbytes in CHUNKS[:failing]]
    assert [call[1:] for call in platform.calls if call[0] == "unpin"] == done[::-1]
    assert mapped() == Mapped()
    with pytest.raises(RuntimeError, match="not reserved"):
        _ = pool.address


@pytest.mark.parametrize("end", ["a chunk fails", "stopped", "who is told of progress fails"])
def test_before_chunks_are_given_back_it_is_said_once(end: str) -> None:
    platform = MlockPlatform(fail_at=2 if end == "a chunk fails" else None)
    stop, said = threading.Event(), []

    def progressed(progress: PinProgress) -> None:
        if progress.pinned_bytes == 2 * MiB and end == "stopped":
            stop.set()
        if progress.pinned_bytes == 2 * MiB and end == "who is told of progress fails":
            raise KeyError(end)

    with pytest.raises((PinFailed, PinStopped, KeyError)):
        HostPool(spec(), platform).pin(progressed, stop, lambda: said.append(list(platform.calls)))
    (calls,) = said
    assert [call[0] for call in calls] == ["pin", "pin"]
    assert [call[0] for call in platform.calls] == ["pin", "pin", "unpin", "unpin"]
    assert mapped() == Mapped()


@pytest.mark.parametrize(
    "point", ["pool.reserve", "pool.prefault_chunk@0", "pool.prefault_chunk@3", "pool.pin_chunk@2"]
)
def test_a_fault_at_any_step_is_a_failure_that_leaves_nothing(point: str) -> None:
    platform = MlockPlatform()
    with active(f"{point}=raise(planted)"), pytest.raises(PinFailed, match="planted"):
        HostPool(spec(), platform).pin(ignore, never())
    assert mapped() == Mapped()
    before = int(point[-1]) if "@" in point else 0
    assert [what for what, _, _ in platform.calls] == ["pin"] * before + ["unpin"] * before


def test_close_during_pinning_waits_until_it_has_stopped() -> None:
    platform = MlockPlatform()
    pool = HostPool(spec(), platform)
    stop = threading.Event()
    closer = threading.Thread(target=pool.close)
    about_to_wait = threading.Event()
    real_lock = pool._lock

    class WatchedLock:
        def __enter__(self) -> None:
            if threading.current_thread() is closer:
                about_to_wait.set()
            real_lock.acquire()

        def __exit__(self, *_: object) -> None:
            real_lock.release()

    def close_meanwhile(progress: PinProgress) -> None:
        if progress.pinned_bytes == 2 * MiB:
            closer.start()
            assert about_to_wait.wait(30)
        if progress.pinned_bytes == 3 * MiB:
            assert [what for what, _, _ in platform.calls] == ["pin"] * 3
            stop.set()

    pool._lock = WatchedLock()  # type: ignore[assignment]
    with pytest.raises(PinStopped):
        pool.pin(close_meanwhile, stop)
    closer.join(30)
    assert not closer.is_alive()
    assert [what for what, _, _ in platform.calls] == ["pin"] * 3 + ["unpin"] * 3


def test_a_chunk_that_cannot_be_unpinned_stays_mapped_and_the_others_are_given_back() -> None:
    platform = MlockPlatform(refuse_unpin=lambda number: number == 0)
    pool = HostPool(spec(), platform)
    pool.pin(ignore, never())
    base = pool.address
    with (
        pytest.raises(PinFailed, match="of 5 chunks, 1 could not be released; restart the daemon"),
        capture_logs() as logs,
    ):
        pool.close()
    assert unpins(platform, base) == list(reversed(CHUNKS[:-1]))
    assert [entry["error"] for entry in logs] == ["the context is gone"]
    # The driver may still use the old pages for these addresses, so nothing else may come to lie there.
    assert mapped().size == NBYTES
    assert _libc.munmap(ctypes.c_void_p(base), ctypes.c_size_t(NBYTES)) == 0


def test_close_is_idempotent_and_a_pool_is_pinned_once() -> None:
    platform = MlockPlatform()
    pool = HostPool(spec(), platform)
    pool.pin(ignore, never())
    with pytest.raises(RuntimeError, match="pinned once"):
        pool.pin(ignore, never())
    assert mapped().locked == NBYTES
    pool.close()
    calls = len(platform.calls)
    pool.close()
    assert len(platform.calls) == calls
    with pytest.raises(RuntimeError, match="pinned once"):
        pool.pin(ignore, never())


# -- limits ------------------------------------------------------------------------------------------------------


def machine(root: Path, available: int) -> Path:
    return tree(root, {"proc/meminfo": f"MemTotal: {available // KiB * 2} kB\nMemAvailable: {available // KiB} kB\n"})


def test_a_pool_that_exceeds_a_limit_is_refused_before_anything_is_touched(tmp_path: Path) -> None:
    platform = MlockPlatform()
    seen: list[PinProgress] = []
    with pytest.raises(PoolRefused, match="lower --pool-size"):
        HostPool(spec(memory_check=True), platform, root=machine(tmp_path, MiB)).pin(seen.append, never())
    assert (platform.calls, seen) == ([], [])


def test_a_pool_above_the_platforms_own_limit_is_refused(tmp_path: Path) -> None:
    platform = MlockPlatform(limit=NBYTES - 1)
    with pytest.raises(PoolRefused, match="RLIMIT_MEMLOCK"):
        HostPool(spec(memory_check=True), platform, root=machine(tmp_path, GiB)).pin(ignore, never())
    assert platform.calls == []


def test_with_the_memory_check_off_only_the_kernel_decides(pinned: NewPool, tmp_path: Path) -> None:
    pinned(spec(memory_check=False), MlockPlatform(limit=1), root=machine(tmp_path, MiB))
    assert mapped().locked == NBYTES


def test_cuda_pinning_counts_the_kernels_bookkeeping(pinned: NewPool, tmp_path: Path) -> None:
    enough_without = NBYTES + memory_limits.HEADROOM_BYTES
    root = machine(tmp_path, enough_without)
    with pytest.raises(PoolRefused, match="bookkeeping"):
        HostPool(spec(memory_check=True), MlockPlatform("cuda"), root=root).pin(ignore, never())
    pinned(spec(memory_check=True), MlockPlatform("host"), root=root)


# -- kinds of pages ----------------------------------------------------------------------------------------------


def huge_bytes(pool: HostPool) -> int:
    """Bytes of the pool that one entry of the page tables maps 2 MiB of."""
    smaps = Path("/proc/self/smaps").read_text()
    block = smaps[smaps.index(f"\n{pool.address:x}-") + 1 :]
    return int(re.search(r"^ShmemPmdMapped: +(\d+) kB$", block, re.MULTILINE)[1]) * KiB  # type: ignore[index]


with_huge_pages = pytest.mark.skipif(
    not memory_limits.thp_enabled(), reason="this kernel gives shared memory no transparent huge pages"
)


@with_huge_pages
@pytest.mark.parametrize("threads", [1, 4])
def test_whole_ranges_of_2_mib_get_huge_pages_that_are_clear(
    threads: int, new_pool: NewPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvsidecar.pool.pinning.PREFAULT_BYTES", 2 * MiB)
    wanted = spec(nbytes=6 * MiB + 4 * KiB, chunk_bytes=4 * MiB, huge_pages=HugePages.THP, prefault_threads=threads)
    pool = new_pool(wanted, MlockPlatform())
    with capture_logs() as logs:
        pool.pin(ignore, never())
    assert pool.page_kind is PageKind.THP
    assert pool.address % (2 * MiB) == 0
    assert huge_bytes(pool) == 6 * MiB
    assert mapped().resident == 6 * MiB + 4 * KiB
    assert not pool.view().any()
    assert not logs


@with_huge_pages
def test_a_pool_for_which_no_huge_pages_are_free_has_small_ones_and_says_what_they_cost(
    new_pool: NewPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = host_memory.advise

    def fragmented(address: int, nbytes: int, advice: int) -> None:
        if advice == 25:  # MADV_COLLAPSE
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        real(address, nbytes, mmap.MADV_NOHUGEPAGE if advice == mmap.MADV_HUGEPAGE else advice)

    monkeypatch.setattr(host_memory, "advise", fragmented)
    pool = new_pool(spec(nbytes=4 * MiB, chunk_bytes=2 * MiB, huge_pages=HugePages.THP), MlockPlatform())
    with capture_logs() as logs:
        pool.pin(ignore, never())
    assert pool.page_kind is PageKind.SMALL
    assert (mapped().resident, huge_bytes(pool)) == (4 * MiB, 0)
    assert [(each["bytes"], each["page_tables"]) for each in logs] == [("4 MiB", "8 KiB in each process that maps it")]
    assert "shmem_enabled" in logs[0]["hint"]


def test_another_process_that_maps_the_file_sees_the_same_bytes_and_cannot_cut_it(pinned: NewPool) -> None:
    pool = pinned(spec())
    pool.view()[[0, -1]] = 1, 2
    with mmap.mmap(pool.fd, NBYTES) as other:
        assert (other[0], other[1], other[-1]) == (1, 0, 2)
        other[1] = 3
    assert pool.view()[1] == 3
    for nbytes in (NBYTES - 4 * KiB, NBYTES + 4 * KiB):
        with pytest.raises(PermissionError):
            os.ftruncate(pool.fd, nbytes)
    assert fcntl.fcntl(pool.fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
    pool.close()
    with pytest.raises(RuntimeError, match="not reserved"):
        _ = pool.fd


def test_small_pages_are_kept_small_on_a_machine_where_huge_ones_are_always_on(pinned: NewPool) -> None:
    pool = pinned(spec(huge_pages=HugePages.NONE))
    assert pool.page_kind is PageKind.SMALL
    assert "nh" in mapped().flags or not memory_limits.thp_enabled()
    assert huge_bytes(pool) == 0


def test_auto_takes_transparent_huge_pages_where_too_few_explicit_ones_are_free(
    pinned: NewPool, tmp_path: Path
) -> None:
    root = two_nodes(tmp_path)
    tree(root, {"sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages": "1\n"})
    pool = pinned(spec(nbytes=4 * MiB, chunk_bytes=2 * MiB, huge_pages=HugePages.AUTO), root=root)
    assert pool.page_kind is PageKind.THP


def test_explicit_huge_pages_that_are_not_free_are_a_refusal_or_a_clean_failure(tmp_path: Path) -> None:
    root = tree(tmp_path, {"sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages": "1\n"})
    wish = {"nbytes": 4 * GiB, "chunk_bytes": GiB, "huge_pages": HugePages.HUGETLB}
    with pytest.raises(PoolRefused, match="needs 2048 huge pages of 2 MiB but 1 are free"):
        HostPool(spec(memory_check=True, **wish), MlockPlatform(), root=root).pin(ignore, never())
    # Unchecked, the kernel refuses the mapping itself (unless this machine has 2048 free ones).
    if memory_limits.hugetlb_free(2 * MiB) < 2048:
        with pytest.raises(PinFailed, match="4 GiB could not be reserved: "):
            HostPool(spec(**wish), MlockPlatform(), root=root).pin(ignore, never())


@pytest.mark.skipif(memory_limits.hugetlb_free(2 * MiB) < 2, reason="no free explicit huge pages on this machine")
@pytest.mark.parametrize("wish", [HugePages.HUGETLB, HugePages.AUTO])
def test_explicit_huge_pages_hold_exactly_the_pool_and_are_given_back(wish: HugePages, pinned: NewPool) -> None:
    free = memory_limits.hugetlb_free(2 * MiB)
    pool = pinned(spec(nbytes=4 * MiB, huge_pages=wish, memory_check=True))
    assert pool.page_kind is PageKind.HUGETLB
    assert (mapped().size, mapped().resident) == (4 * MiB, 4 * MiB)
    assert memory_limits.hugetlb_free(2 * MiB) == free - 2
    pool.close()
    assert memory_limits.hugetlb_free(2 * MiB) == free


# -- NUMA --------------------------------------------------------------------------------------------------------


@given(
    nbytes=st.integers(1, 1 << 20).map(lambda n: n * 4 * KiB),
    slab=st.sampled_from([4 * KiB, MiB, 3 * MiB, 64 * MiB]),
    nodes=st.lists(st.integers(0, 9), unique=True, max_size=4).map(tuple),
)
def test_parts_cover_the_pool_evenly_and_cut_no_slab_or_huge_page(
    nbytes: int, slab: int, nodes: tuple[int, ...]
) -> None:
    parts = split_over_nodes(nbytes, slab, nodes)
    assert parts[0].offset == 0
    assert all(first.offset + first.nbytes == second.offset for first, second in pairwise(parts))
    assert parts[-1].offset + parts[-1].nbytes == nbytes
    assert all(part.nbytes > 0 and part.offset % slab == 0 and part.offset % (2 * MiB) == 0 for part in parts)
    assert tuple(part.node for part in parts) == (nodes[: len(parts)] or (None,))
    sizes = [part.nbytes for part in parts]
    assert max(sizes) - min(sizes) < 2 * max(slab, 6 * MiB)
    assert len(parts) == len(nodes) or not nodes or nbytes < (len(parts) + 1) * max(slab, 6 * MiB)


def test_each_node_gets_its_part_and_no_chunk_lies_on_two(new_pool: NewPool, tmp_path: Path) -> None:
    bound: list[tuple[int, int, int]] = []
    platform = MlockPlatform()
    where = spec(nbytes=6 * MiB, chunk_bytes=1536 * KiB, slab_bytes=512 * KiB, numa_nodes=(1, 0))
    pool = new_pool(where, platform, root=two_nodes(tmp_path))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_memory, "bind", lambda *arguments: bound.append(arguments))
        pool.pin(ignore, never())
    base = pool.address
    assert bound == [(base, 2 * MiB, 1), (base + 2 * MiB, 4 * MiB, 0)]
    assert pool.numa_nodes == (1, 0)
    starts = [offset for offset, _ in pins(platform, base)]
    assert starts == [0, 1536 * KiB, 2 * MiB, 3584 * KiB, 5 * MiB]
    assert pool.numa_of_slab() == (1,) * 4 + (0,) * 8


def test_pages_are_really_bound_and_a_refused_node_is_a_warning(new_pool: NewPool, tmp_path: Path) -> None:
    small = memory_limits.Pages(PageKind.SMALL, 4 * KiB)
    file = host_memory.create_file(4 * KiB, small)
    probe = host_memory.map_file(file, 4 * KiB, small)
    os.close(file)
    try:
        host_memory.bind(probe, 4 * KiB, 0)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOSYS):
            raise
        pytest.skip(f"mbind: {error}")
    finally:
        host_memory.unmap(probe, 4 * KiB)
    here = len(memory_limits.numa_nodes())
    pool = new_pool(spec(nbytes=4 * MiB, numa_nodes=(0, 1)), MlockPlatform(), root=two_nodes(tmp_path))
    with capture_logs() as logs:
        pool.pin(ignore, never())
    assert mapped().locked == 4 * MiB
    line = re.search(rf"^{pool.address:x} (\S+)", Path("/proc/self/numa_maps").read_text(), re.MULTILINE)
    assert line is not None
    assert line[1] == "bind:0"
    if here == 1:
        # Node 1 exists only in the made-up tree: the kernel refuses it, the pool is there all the same.
        assert pool.numa_nodes == (0,)
        assert [entry["node"] for entry in logs if entry["log_level"] == "warning"] == [1]


def test_a_kernel_that_forbids_binding_costs_a_warning_not_the_pool(
    new_pool: NewPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(address: int, nbytes: int, node: int) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(host_memory, "bind", forbidden)
    pool = new_pool(spec(nbytes=4 * MiB, numa_nodes=(0, 1)), MlockPlatform(), root=two_nodes(tmp_path))
    with capture_logs() as logs:
        pool.pin(ignore, never())
    assert pool.numa_nodes == ()
    assert [entry["error"] for entry in logs] == ["Operation not permitted"] * 2
    assert mapped().locked == 4 * MiB


def test_nothing_is_bound_on_a_machine_with_one_node(
    pinned: NewPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_memory, "bind", lambda *arguments: pytest.fail("bound"))
    root = tree(tmp_path, {"sys/devices/system/node/online": "0\n"})
    pool = pinned(spec(numa_nodes=(0,)), root=root)
    assert pool.numa_of_slab() == (None,) * 17


def test_a_node_outside_the_cpuset_is_left_out_with_a_warning(tmp_path: Path) -> None:
    root = two_nodes(tmp_path)
    tree(root, {"sys/devices/system/node/online": "0-2\n", "sys/devices/system/node/has_memory": "0-2\n"})
    with capture_logs() as logs:
        pool = HostPool(spec(nbytes=4 * MiB, numa_nodes=(2, 1)), MlockPlatform(), root=root)
    assert pool.numa_of_slab() == (1,) * 16
    assert [entry["nodes"] for entry in logs] == [[2]]


def test_a_part_larger_than_its_node_is_refused_because_binding_would_get_the_process_killed(tmp_path: Path) -> None:
    root = two_nodes(tmp_path, free_kb=1024)
    with pytest.raises(PoolRefused, match="2 MiB on NUMA node 0 but 1 MiB are free there"):
        HostPool(spec(nbytes=4 * MiB, numa_nodes=(0, 1), memory_check=True), MlockPlatform(), root=root).pin(
            ignore, never()
        )


@pytest.mark.parametrize(
    "changes",
    [
        {"nbytes": 0},
        {"nbytes": NBYTES + 1},
        {"chunk_bytes": 0},
        {"chunk_bytes": MiB + 1},
        {"chunk_bytes": MiB, "slab_bytes": 3 * MiB},
        {"slab_bytes": 0},
    ],
)
def test_sizes_that_do_not_fit_together_are_a_programming_error(changes: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"multiple"):
        HostPool(spec(**changes), MlockPlatform())


def test_a_part_knows_its_place() -> None:
    assert split_over_nodes(GiB, 64 * MiB, (3,)) == (PoolPart(0, GiB, 3),)
