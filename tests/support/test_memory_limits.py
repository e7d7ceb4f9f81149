"""Limits are read from where each system has them, and a pool above one is refused with its name and what to do."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsidecar.errors import PoolRefused
from kvsidecar.support import memory_limits
from kvsidecar.support.memory_limits import (
    HEADROOM_BYTES,
    HugePages,
    PageKind,
    Pages,
    bookkeeping_bytes,
    check_fits,
    hugetlb_cgroups,
    hugetlb_free,
    hugetlb_page_sizes,
    hugetlb_problem,
    meminfo,
    memlock_limit,
    memlock_remedy,
    memory_cgroups,
    numa_nodes,
    page_candidates,
    parse_ranges,
    resolve_size,
    thp_enabled,
)
from kvsidecar.support.units import GiB, KiB, MiB, Size, TiB
from tests.support.pods import V2_MOUNT, in_pod, machine, tree

SMALL = Pages(PageKind.SMALL, 4 * KiB)
THP = Pages(PageKind.THP, 2 * MiB)
HUGETLB = Pages(PageKind.HUGETLB, 2 * MiB)

V1_MOUNTS = (
    "31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755\n"
    "34 31 0:31 / /sys/fs/cgroup/cpuset rw,relatime - cgroup cgroup rw,cpuset\n"
    "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n"
    "41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw\n"
)
HUGE = "sys/kernel/mm/hugepages/hugepages-2048kB"


# -- cgroups -----------------------------------------------------------------------------------------------------


def test_every_visible_ancestor_counts_in_cgroup_v2(tmp_path: Path) -> None:
    root = in_pod(
        tmp_path,
        32 * GiB,
        12 * GiB,
        {
            "pod7/memory.max": f"{48 * GiB}",
            "pod7/memory.current": f"{20 * GiB}",
            "memory.max": "max",
            "memory.current": f"{99 * GiB}",
        },
    )
    own, pod = memory_cgroups(root)
    assert (own.path, own.limit, own.in_use, own.room) == ("/kubepods/pod7/c1", 32 * GiB, 12 * GiB, 20 * GiB)
    assert (pod.path, pod.limit, pod.room) == ("/kubepods/pod7", 48 * GiB, 28 * GiB)


def test_page_cache_that_can_be_dropped_is_not_in_use(tmp_path: Path) -> None:
    files = {"memory.stat": f"anon 1\ninactive_file {5 * GiB}\n", "memory.high": f"{30 * GiB}\n"}
    root = in_pod(tmp_path, 32 * GiB, 12 * GiB, {f"pod7/c1/{name}": text for name, text in files.items()})
    found = [(limit.source, limit.in_use) for limit in memory_cgroups(root)]
    assert found[:2] == [("memory.max", 7 * GiB), ("memory.high", 7 * GiB)]


def test_memory_high_counts_too_because_pinned_memory_cannot_be_reclaimed_below_it(tmp_path: Path) -> None:
    root = in_pod(tmp_path, 32 * GiB, more={"pod7/c1/memory.high": f"{8 * GiB}\n"})
    assert [(limit.source, limit.limit) for limit in memory_cgroups(root)] == [
        ("memory.max", 32 * GiB),
        ("memory.high", 8 * GiB),
    ]


def test_in_a_cgroup_namespace_the_mount_itself_is_the_container(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/\n", "proc/self/mountinfo": V2_MOUNT, "sys/fs/cgroup/memory.max": f"{GiB}\n"}
    (limit,) = memory_cgroups(machine(tmp_path, files=files))
    assert str(limit) == "the container's cgroup allows 1 GiB (0 B in use)"


def test_where_only_the_own_subtree_is_mounted_its_top_is_the_own_cgroup(tmp_path: Path) -> None:
    mount = V2_MOUNT.replace(" / /sys", " /docker/abc /sys")
    files = {"proc/self/cgroup": "0::/docker/abc\n", "proc/self/mountinfo": mount}
    (limit,) = memory_cgroups(machine(tmp_path, files={**files, "sys/fs/cgroup/memory.max": "4096"}))
    assert limit.path == "/docker/abc"


@pytest.mark.parametrize("own", ["/../other", "/elsewhere"])
def test_a_cgroup_outside_what_is_mounted_falls_back_to_the_top(tmp_path: Path, own: str) -> None:
    mount = V2_MOUNT.replace(" / /sys", " /docker /sys") if own == "/elsewhere" else V2_MOUNT
    files = {"proc/self/cgroup": f"0::{own}\n", "proc/self/mountinfo": mount, "sys/fs/cgroup/memory.max": "4096"}
    # Somebody else's, of the same name.
    files |= {"sys/fs/cgroup/elsewhere/memory.max": "1", "sys/fs/cgroup/other/memory.max": "2"}
    assert [limit.limit for limit in memory_cgroups(machine(tmp_path, files=files))] == [4096]


def test_cgroup_v1_is_read_at_its_own_mount_with_its_ancestors(tmp_path: Path) -> None:
    base = "sys/fs/cgroup/memory"
    files = {
        "proc/self/cgroup": "9:name=systemd:/\n4:cpu,memory:/docker/abc\n3:cpuset:/docker/abc\n0::/\n",
        "proc/self/mountinfo": V1_MOUNTS,
        f"{base}/docker/abc/memory.limit_in_bytes": f"{6 * GiB}\n",
        f"{base}/docker/abc/memory.usage_in_bytes": f"{3 * GiB}\n",
        f"{base}/docker/abc/memory.stat": f"inactive_file 7\ntotal_inactive_file {GiB}\n",
        f"{base}/docker/memory.limit_in_bytes": f"{5 * GiB}\n",
        f"{base}/memory.limit_in_bytes": "9223372036854771712\n",
    }
    limits = memory_cgroups(machine(tmp_path, files=files))
    assert [(limit.path, limit.limit, limit.in_use) for limit in limits] == [
        ("/docker/abc", 6 * GiB, 2 * GiB),
        ("/docker", 5 * GiB, 0),
    ]


def test_missing_files_are_no_limits(tmp_path: Path) -> None:
    assert memory_cgroups(tmp_path) == ()
    assert memlock_limit(tmp_path) is None
    assert meminfo(tmp_path) == {}
    assert numa_nodes(tmp_path) == {}
    assert (hugetlb_page_sizes(tmp_path), hugetlb_free(2 * MiB, tmp_path), thp_enabled(tmp_path)) == ((), 0, False)
    check_fits(TiB, pages=SMALL, root=tmp_path)


def test_this_machine_can_be_read() -> None:
    assert meminfo()["MemTotal"] > 0
    assert 4 * KiB <= resolve_size(Size.parse("1%")) <= meminfo()["MemTotal"] // 100
    assert all(limit.limit > 0 for limit in memory_cgroups())


# -- locked memory -----------------------------------------------------------------------------------------------

LIMITS = "Limit                     Soft Limit           Hard Limit           Units     \n"
MEMLOCK = LIMITS + "Max locked memory         8388608              16777216             bytes     \n"


def test_the_soft_limit_of_locked_memory_counts(tmp_path: Path) -> None:
    assert memlock_limit(tree(tmp_path, {"proc/self/limits": MEMLOCK})) == 8388608


def test_no_limit_of_locked_memory_where_it_is_unlimited(tmp_path: Path) -> None:
    unlimited = MEMLOCK.replace("8388608  ", "unlimited")
    assert memlock_limit(tree(tmp_path, {"proc/self/limits": unlimited})) is None


@pytest.mark.parametrize(
    ("capabilities", "uid_map", "limit"),
    [
        ("0000000000004000", "         0          0 4294967295\n", None),
        ("0000000000004000", "", None),
        ("0000000000003fff", "         0          0 4294967295\n", 8388608),
        # A rootless container: root of its own user namespace, which mlock does not ask.
        ("000001ffffffffff", "         0     100000      65536\n", 8388608),
    ],
)
def test_cap_ipc_lock_lifts_the_limit_in_the_initial_user_namespace_only(
    tmp_path: Path, capabilities: str, uid_map: str, limit: int | None
) -> None:
    files = {"proc/self/limits": MEMLOCK, "proc/self/status": f"Name:\tx\nCapEff:\t{capabilities}\n"}
    assert memlock_limit(tree(tmp_path, {**files, "proc/self/uid_map": uid_map})) == limit


# -- huge pages --------------------------------------------------------------------------------------------------


def test_explicit_pages_that_another_mapping_has_reserved_are_not_free(tmp_path: Path) -> None:
    root = tree(tmp_path, {f"{HUGE}/free_hugepages": "100\n", f"{HUGE}/resv_hugepages": "30\n"})
    tree(root, {"sys/kernel/mm/hugepages/hugepages-1048576kB/free_hugepages": "2\n"})
    assert hugetlb_page_sizes(root) == (2 * MiB, GiB)
    assert (hugetlb_free(2 * MiB, root), hugetlb_free(GiB, root)) == (70, 2)


@pytest.mark.parametrize(
    ("mode", "release", "status", "enabled"),
    [
        ("always within_size [advise] never deny force\n", "5.15.0-91-generic\n", "", True),
        ("[always] within_size advise never deny force\n", "5.15.0\n", "THP_enabled:\t1\n", True),
        ("always within_size advise [never] deny force\n", "6.1.0\n", "", True),
        ("always within_size advise [never] deny force\n", "6.18.44\n", "THP_enabled:\t0\n", False),
        ("always within_size advise [never] deny force\n", "6.0.19\n", "", False),
        ("always within_size advise [never] deny force\n", "", "", False),
        ("always within_size advise never [deny] force\n", "6.18.44\n", "", False),
        ("", "6.18.44\n", "", False),
    ],
)
def test_shared_memory_gets_transparent_huge_pages_by_faults_or_since_linux_6_1_on_demand(
    tmp_path: Path, mode: str, release: str, status: str, enabled: bool
) -> None:
    files = {
        "sys/kernel/mm/transparent_hugepage/shmem_enabled": mode,
        "proc/sys/kernel/osrelease": release,
        "proc/self/status": status,
    }
    assert thp_enabled(tree(tmp_path, files)) is enabled


def with_huge_pages(root: Path, thp: str = "[advise]") -> Path:
    return machine(
        root,
        files={
            f"{HUGE}/free_hugepages": "512\n",
            "sys/kernel/mm/hugepages/hugepages-1048576kB/free_hugepages": "1\n",
            "sys/kernel/mm/transparent_hugepage/shmem_enabled": thp,
        },
    )


def test_auto_prefers_explicit_pages_that_divide_the_pool_then_transparent_ones(tmp_path: Path) -> None:
    root = with_huge_pages(tmp_path)
    giant = Pages(PageKind.HUGETLB, GiB)
    assert page_candidates(HugePages.AUTO, 2 * GiB, root) == (HUGETLB, giant, THP)
    assert page_candidates(HugePages.AUTO, 2 * MiB, root) == (HUGETLB, THP)
    assert page_candidates(HugePages.AUTO, 3 * MiB, root) == (THP,)
    assert page_candidates(HugePages.AUTO, 3 * MiB, with_huge_pages(root, "[never]")) == (SMALL,)


def test_a_wish_is_met_or_refused(tmp_path: Path) -> None:
    root = with_huge_pages(tmp_path, "[never]")
    assert page_candidates(HugePages.NONE, GiB, root) == (SMALL,)
    assert page_candidates(HugePages.HUGETLB, 2 * MiB, root) == (HUGETLB,)
    with pytest.raises(PoolRefused, match="3145728 bytes is not a multiple of the huge page size 2 MiB"):
        page_candidates(HugePages.HUGETLB, 3 * MiB, root)
    with pytest.raises(PoolRefused, match="shared memory cannot have transparent huge pages here: write advise to"):
        page_candidates(HugePages.THP, GiB, root)
    with pytest.raises(PoolRefused, match="no explicit huge pages"):
        page_candidates(HugePages.HUGETLB, GiB, tmp_path / "nothing")


def test_a_hugetlb_pool_is_held_against_free_huge_pages_not_available_memory(tmp_path: Path) -> None:
    root = machine(tmp_path, available=0, files={f"{HUGE}/free_hugepages": "512\n"})
    check_fits(GiB, pages=HUGETLB, root=root)
    with pytest.raises(PoolRefused) as raised:
        check_fits(GiB + 2 * MiB, pages=HUGETLB, root=root)
    said = "the pool needs 513 huge pages of 2 MiB but 512 are free: raise vm.nr_hugepages, lower --pool-size"
    assert str(raised.value).startswith(said)


def test_huge_pages_must_be_free_on_each_node_of_the_pool(tmp_path: Path) -> None:
    root = tree(tmp_path, {f"{HUGE}/free_hugepages": "512\n"})
    for node, free in ((0, 400), (1, 112)):
        name = f"sys/devices/system/node/node{node}/hugepages/hugepages-2048kB/free_hugepages"
        tree(root, {name: f"{free}\n"})
    assert hugetlb_problem(GiB, 2 * MiB, {}, root) is None
    problem = hugetlb_problem(GiB, 2 * MiB, {0: GiB // 2, 1: GiB // 2}, root)
    assert problem is not None
    assert problem.startswith("the pool needs 256 huge pages of 2 MiB on NUMA node 1 but 112 are free there")


@pytest.mark.parametrize("file", ["hugetlb.2MB.max", "hugetlb.2MB.rsvd.max"])
def test_a_pod_without_huge_pages_gets_none_however_many_are_free(tmp_path: Path, file: str) -> None:
    root = in_pod(tmp_path, 32 * GiB, more={f"pod7/{file}": "0\n"})
    tree(root, {f"{HUGE}/free_hugepages": "512\n"})
    assert [limit.source for limit in hugetlb_cgroups(2 * MiB, root)] == [file]
    with pytest.raises(PoolRefused, match=r"1 GiB of 2 MiB huge pages but the cgroup /kubepods/pod7 allows 0 B"):
        check_fits(GiB, pages=HUGETLB, root=root)


def test_gigantic_pages_have_their_own_limit_in_v1(tmp_path: Path) -> None:
    mounts = V1_MOUNTS + "50 31 0:40 / /sys/fs/cgroup/hugetlb rw - cgroup cgroup rw,hugetlb\n"
    files = {
        "proc/self/cgroup": "5:hugetlb:/a\n",
        "proc/self/mountinfo": mounts,
        "sys/fs/cgroup/hugetlb/a/hugetlb.1GB.limit_in_bytes": f"{3 * GiB}",
        "sys/fs/cgroup/hugetlb/a/hugetlb.1GB.usage_in_bytes": f"{GiB}",
        "sys/fs/cgroup/hugetlb/a/hugetlb.2MB.limit_in_bytes": "9223372036854771712",
    }
    root = machine(tmp_path, files=files)
    assert [limit.room for limit in hugetlb_cgroups(GiB, root)] == [2 * GiB]
    assert hugetlb_cgroups(2 * MiB, root) == ()


@pytest.mark.parametrize(("options", "refused"), [("rw", False), ("rw,memory_hugetlb_accounting", True)])
def test_huge_pages_count_against_a_memory_limit_only_where_cgroups_are_mounted_so(
    tmp_path: Path, options: str, refused: bool
) -> None:
    root = in_pod(tmp_path, 2 * GiB)
    tree(root, {f"{HUGE}/free_hugepages": "2048\n"})
    tree(root, {"proc/self/mountinfo": V2_MOUNT.replace("rw,nsdelegate", options)})
    if refused:
        with pytest.raises(PoolRefused, match="needs 4 GiB but the cgroup"):
            check_fits(4 * GiB, pages=HUGETLB, root=root)
    else:
        check_fits(4 * GiB, pages=HUGETLB, root=root)


# -- NUMA --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "numbers"), [("0\n", (0,)), ("0-1,4\n", (0, 1, 4)), ("", ()), ("\n", ()), ("8-10", (8, 9, 10))]
)
def test_the_kernels_lists_are_read(text: str, numbers: tuple[int, ...]) -> None:
    assert parse_ranges(text) == numbers


@given(st.sets(st.integers(0, 200)))
def test_a_list_of_single_numbers_is_itself(numbers: set[int]) -> None:
    assert parse_ranges(",".join(map(str, sorted(numbers)))) == tuple(sorted(numbers))


def test_only_nodes_with_memory_that_the_cpuset_allows_are_used(tmp_path: Path) -> None:
    nodes = "sys/devices/system/node"
    memory = "Node 1 MemTotal:  64 kB\nNode 1 MemFree: 8 kB\nNode 1 Inactive(file): 4 kB\nNode 1 SReclaimable: 2 kB\n"
    files = {
        f"{nodes}/online": "0-3\n",
        f"{nodes}/has_memory": "0-2\n",
        "proc/self/status": "Mems_allowed:\tff\nMems_allowed_list:\t1-3\n",
        f"{nodes}/node1/meminfo": memory,
    }
    found = numa_nodes(tree(tmp_path, files))
    assert list(found) == [1, 2]
    assert (found[1].total, found[1].available) == (64 * KiB, 14 * KiB)


# -- does it fit -------------------------------------------------------------------------------------------------


def test_a_refusal_names_need_limit_use_and_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(PoolRefused) as raised:
        check_fits(64 * GiB, pages=SMALL, root=in_pod(tmp_path, 32 * GiB, 12 * GiB))
    assert str(raised.value) == (
        "the pool needs 64 GiB but the cgroup /kubepods/pod7/c1 allows 32 GiB (12 GiB in use): "
        "raise the container's memory limit or lower --pool-size"
    )


def test_what_the_container_uses_already_counts(tmp_path: Path) -> None:
    root = in_pod(tmp_path, 32 * GiB, 12 * GiB)
    check_fits(20 * GiB - HEADROOM_BYTES, pages=SMALL, root=root)
    with pytest.raises(PoolRefused, match="256 MiB for the kernel's bookkeeping and the daemon itself but the cgroup"):
        check_fits(20 * GiB - HEADROOM_BYTES + 4096, pages=SMALL, root=root)


def test_available_memory_is_the_limit_without_cgroups(tmp_path: Path) -> None:
    root = machine(tmp_path, total=256 * GiB, available=100 * GiB)
    check_fits(100 * GiB - HEADROOM_BYTES, pages=THP, root=root)
    with pytest.raises(PoolRefused) as raised:
        check_fits(120 * GiB, pages=THP, root=root)
    assert str(raised.value) == (
        "the pool needs 120 GiB but 100 GiB of the machine's 256 GiB are available: lower --pool-size, "
        "or use --memory-check off where memory is added as it is used"
    )


def test_bookkeeping_is_24_bytes_for_each_pinned_4_kib(tmp_path: Path) -> None:
    assert bookkeeping_bytes(TiB) == 6 * GiB
    assert bookkeeping_bytes(1) == 24
    room = TiB + HEADROOM_BYTES
    check_fits(TiB, pages=SMALL, root=machine(tmp_path, available=room))
    with pytest.raises(PoolRefused, match=r"1 TiB and 6.25 GiB for the kernel's bookkeeping"):
        check_fits(TiB, pages=SMALL, bookkeeping=bookkeeping_bytes(TiB), root=machine(tmp_path, available=room))


def test_a_platform_that_may_lock_less_refuses_and_says_how_to_raise_it(tmp_path: Path) -> None:
    check_fits(8 * MiB, pages=SMALL, pin_limit=8 * MiB, root=tmp_path)
    with pytest.raises(PoolRefused, match=r"this process may lock 8 MiB \(RLIMIT_MEMLOCK\): use --pool-size 8MiB, or"):
        check_fits(GiB, pages=SMALL, pin_limit=8 * MiB, root=tmp_path)


@pytest.mark.parametrize(
    ("hard", "words"),
    [
        ("8388608", "in a shell with sudo prlimit --memlock=unlimited --pid $$, for systemd"),
        ("1073741824", "in a shell with ulimit -l 1048576, for systemd"),
        ("unlimited", "in a shell with ulimit -l 1048576, for systemd"),
    ],
)
def test_what_a_shell_may_do_about_locked_memory_depends_on_its_hard_limit(
    tmp_path: Path, hard: str, words: str
) -> None:
    tree(tmp_path, {"proc/self/limits": f"Max locked memory         8388608              {hard}       bytes\n"})
    assert words in memlock_remedy(GiB, 8 * MiB, tmp_path)
    assert "use --pool-size 8MiB, or raise" in memlock_remedy(GiB, 8 * MiB, tmp_path)
    assert memlock_remedy(GiB, 65536, tmp_path).startswith("raise"), "no pool is that small"


def test_a_part_must_fit_the_node_that_it_is_bound_to(tmp_path: Path) -> None:
    nodes = "sys/devices/system/node"
    root = machine(tmp_path, files={f"{nodes}/online": "0-1\n"})
    for node, free in ((0, 8 * GiB), (1, 5 * GiB)):
        tree(root, {f"{nodes}/node{node}/meminfo": f"Node {node} MemFree: {free // KiB} kB\n"})
    check_fits(12 * GiB, pages=SMALL, root=root)
    check_fits(12 * GiB, pages=SMALL, node_bytes={0: 7 * GiB, 1: 5 * GiB}, root=root)
    with pytest.raises(PoolRefused) as raised:
        check_fits(12 * GiB, pages=SMALL, node_bytes={0: 6 * GiB, 1: 6 * GiB}, root=root)
    said = "the pool needs 6 GiB on NUMA node 1 but 5 GiB are free there: lower --pool-size or use --numa off"
    assert str(raised.value) == said


def test_sizes_that_would_read_the_same_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(PoolRefused, match="needs 8589938688 bytes but this process may lock 8 GiB"):
        check_fits(8 * GiB + 4096, pages=SMALL, pin_limit=8 * GiB, root=tmp_path)


# -- percentages -------------------------------------------------------------------------------------------------


def test_a_percentage_is_one_of_the_tightest_cgroup_limit_or_of_the_machine(tmp_path: Path) -> None:
    assert resolve_size(Size.parse("50%"), machine(tmp_path / "a", total=256 * GiB)) == 128 * GiB
    assert resolve_size(Size.parse("50%"), in_pod(tmp_path / "b", 32 * GiB, 12 * GiB)) == 16 * GiB


@given(st.integers(1, 1 << 42), st.floats(0.1, 100))
def test_a_percentage_is_never_exceeded_and_cuts_no_huge_page(total: int, percent: float) -> None:
    fixed = {"MemTotal": total}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory_limits, "meminfo", lambda root: fixed)
        patch.setattr(memory_limits, "memory_cgroups", lambda root: ())
        nbytes = resolve_size(Size(percent=percent))
    exact = total * percent / 100
    assert nbytes <= exact * (1 + 1e-9)
    assert nbytes % (4 * KiB) == 0
    assert nbytes < 2 * MiB or nbytes % (2 * MiB) == 0
    assert nbytes >= exact - (64 * MiB if exact >= 512 * MiB else 2 * MiB) - 1


def test_a_size_is_taken_exactly_down_to_whole_memory_pages(tmp_path: Path) -> None:
    root = machine(tmp_path, total=GiB)
    assert resolve_size(Size.parse("100MiB"), root) == 100 * MiB
    assert resolve_size(Size(nbytes=100 * MiB + 4 * KiB), root) == 100 * MiB + 4 * KiB
    assert resolve_size(Size.parse("10GB"), root) == 10**10 // 4096 * 4096


def test_what_refuses_the_pool_at_every_start_is_told_apart_from_what_is_in_use_now(tmp_path: Path) -> None:
    def lasting(name: str, nbytes: int, **limits: int) -> bool:
        cgroup = {"sys/fs/cgroup/memory.max": f"{8 * GiB}\n", "sys/fs/cgroup/memory.current": f"{6 * GiB}\n"}
        in_container = {"proc/self/cgroup": "0::/\n", "proc/self/mountinfo": V2_MOUNT, **cgroup}
        files = in_container if name == "container" else None
        root = machine(tmp_path / f"{name}-{nbytes}", total=16 * GiB, available=4 * GiB, files=files)
        with pytest.raises(PoolRefused) as raised:
            check_fits(nbytes, pages=SMALL, root=root, **limits)
        return raised.value.lasting

    assert lasting("locked", 2 * GiB, pin_limit=GiB)
    assert lasting("machine", 16 * GiB)
    assert not lasting("machine", 8 * GiB)
    assert lasting("container", 8 * GiB)
    assert not lasting("container", 3 * GiB)
    with pytest.raises(PoolRefused) as raised:
        page_candidates(HugePages.HUGETLB, GiB, tmp_path)
    assert raised.value.lasting
