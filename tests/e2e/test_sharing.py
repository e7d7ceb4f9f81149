"""What engines see of each other's blocks: shards, namespaces, leases, eviction, byte for byte."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kvsidecar.client import AttachRefused, Blocks, HostBuffer, LookupMode, Outcome, Region
from kvsidecar.support.units import MiB
from tests.harness import (
    NAMESPACE,
    NUM_BLOCKS,
    ROW_BYTES,
    SECONDS,
    SHARD_BYTES,
    DaemonProcess,
    Rank,
    done,
    eventually,
    hashes,
    layout,
)
from tests.marks import both_protocols, lent_daemon, promise

pytestmark = [both_protocols, lent_daemon]


@promise("A block is readable when all its shards are sealed")
def test_a_block_of_two_ranks_is_readable_after_the_second_store(daemon: DaemonProcess) -> None:
    ranks = [Rank(daemon, rank=rank, world_size=2, groups=layout(rank, 2)) for rank in range(2)]
    done(ranks[0].store("a", "b"))
    assert ranks[0].hits("a", "b") == 0
    assert ranks[0].load("a", at=[5]).reason == "not_found"
    done(ranks[1].store("a"))
    assert ranks[0].hits("a", "b") == 1
    for rank in ranks:
        done(rank.load("a", at=[5]))
        assert rank.holds(5, "a")
        rank.close()


def test_a_replicated_block_is_readable_after_one_store(daemon: DaemonProcess) -> None:
    ranks = [Rank(daemon, rank=rank, world_size=2, groups=layout(0, 1)) for rank in range(2)]
    done(ranks[0].store("a"))
    assert ranks[1].hits("a") == 1
    skipped = done(ranks[1].store("a"))
    assert (skipped.copied_blocks, skipped.skipped_blocks, skipped.nbytes) == (0, 1, 0)
    done(ranks[1].load("a", at=[3]))
    assert ranks[1].holds(3, "a")
    for rank in ranks:
        rank.close()


@promise("If one field differs, neither sees the other's blocks")
def test_namespaces_never_see_each_others_blocks(daemon: DaemonProcess) -> None:
    fields = {"model": "other", "dtype": "fp8", "kv_layout": "BLNHC", "block_size": 32, "tp_size": 2, "pp_size": 2,
              "hash_algorithm": "xxhash", "extra": "lora"}  # fmt: skip
    first = Rank(daemon)
    done(first.store("a"))
    for field, value in fields.items():
        other = Rank(daemon, namespace=dataclasses.replace(NAMESPACE, **{field: value}))
        assert other.hits("a") == 0, field
        assert other.load("a", at=[0]).reason == "not_found", field
        other.close()
    assert first.hits("a") == 1
    first.close()


@promise("engines with the same model share one copy")
def test_two_instances_share_blocks_byte_for_byte(daemon: DaemonProcess) -> None:
    one, two = Rank(daemon, instance="one"), Rank(daemon, instance="two")
    done(one.store("a", "b", "c", at=[7, 0, 4]))
    before = two.kv.copy()
    done(two.load("b", "c", at=[6, 1]))
    assert two.holds(6, "b")
    assert two.holds(1, "c")
    untouched = [block for block in range(NUM_BLOCKS) if block not in (6, 1)]
    assert np.array_equal(two.kv[:, untouched], before[:, untouched])
    one.close()
    two.close()


@promise("as the longest prefix or one by one")
def test_a_lookup_by_prefix_stops_at_the_first_miss_and_a_bitmap_does_not(daemon: DaemonProcess) -> None:
    rank = Rank(daemon)
    done(rank.store("a", "c"))
    names = hashes("a", "b", "c")
    assert rank.client.lookup(NAMESPACE, {0: names}).groups[0].hits == 1
    bitmap = rank.client.lookup(NAMESPACE, {0: names}, mode=LookupMode.BITMAP).groups[0]
    assert (bitmap.hits, bitmap.found) == (2, (True, False, True))
    assert daemon.metric('kvsidecar_lookup_blocks_total{result="hit"}') == 3
    assert daemon.metric('kvsidecar_lookup_blocks_total{result="miss"}') == 3
    rank.close()


def test_each_lookup_and_each_job_that_moved_bytes_is_in_the_histogram_of_its_seconds(daemon: DaemonProcess) -> None:
    def measured(of: str) -> list[float]:
        jobs = [f'kvsidecar_job_seconds_{of}{{direction="{direction}"}}' for direction in ("store", "load")]
        return [daemon.metric(name) for name in (f"kvsidecar_lookup_seconds_{of}", *jobs)]

    rank = Rank(daemon)
    counted, passed = measured("count"), measured("sum")
    reported = daemon.metric("kvsidecar_prompt_tokens_needed_total")
    done(rank.store("a", "b"))
    done(rank.store("a"))  # moves nothing
    done(rank.load("a", at=[3]))
    for _ in range(3):
        assert rank.client.lookup(NAMESPACE, {0: hashes("a", "b")}).groups[0].hits == 2
    rank.client.report_prompts_nowait(NAMESPACE, needed_tokens=16, loaded_tokens=16)
    eventually(lambda: daemon.metric("kvsidecar_prompt_tokens_needed_total") > reported)
    assert [now - before for now, before in zip(measured("count"), counted, strict=True)] == [3, 1, 1]
    assert all(now > before for now, before in zip(measured("sum"), passed, strict=True))
    rank.close()


def capacity(daemon: DaemonProcess) -> int:
    """How many of the harness's shards fit the pool of 1 MiB."""
    return (1 << 20) // SHARD_BYTES


def fill_pool(rank: Rank, daemon: DaemonProcess, prefix: str) -> None:
    for number in range(capacity(daemon)):
        done(rank.store((prefix, number)))


@promise("Leased blocks are not evicted until the lease is released or expires")
def test_a_lease_forbids_eviction_until_it_is_released(daemon: DaemonProcess) -> None:
    rank = Rank(daemon)
    fill_pool(rank, daemon, "old")
    names = [("old", number) for number in range(capacity(daemon))]
    lease = rank.client.lookup(NAMESPACE, {0: hashes(*names)}, lease_seconds=30).lease
    assert lease is not None
    full = rank.store("new")
    assert (full.outcome, full.reason) == (Outcome.DECLINED, "pool_full")
    assert rank.hits(*names) == len(names), "a declined store evicted something"
    done(rank.load(names[0], at=[1], lease=lease))
    assert rank.holds(1, names[0]), "loads do not go on"
    assert rank.client.release(lease)
    assert not rank.client.release(lease)
    done(rank.store("new"))
    assert daemon.metric("kvsidecar_evicted_blocks_total") >= 1
    assert daemon.refused("pool_full") == 1
    rank.close()


def test_a_lease_ends_by_time_and_a_load_that_names_it_is_declined(daemon: DaemonProcess) -> None:
    rank = Rank(daemon)
    done(rank.store("a"))
    lookup = rank.client.lookup(NAMESPACE, {0: hashes("a")}, lease_seconds=0.05)
    assert lookup.lease is not None
    eventually(lambda: not daemon.metric("kvsidecar_leases"))
    stale = rank.load("a", at=[1], lease=lookup.lease)
    assert (stale.outcome, stale.reason) == (Outcome.DECLINED, "stale_lease")
    assert rank.client.renew(lookup.lease, 1.0) == 0
    assert daemon.refused("lease_expired") == 1
    rank.close()


def test_a_lease_may_be_released_right_after_the_load_that_names_it(daemon: DaemonProcess) -> None:
    """The release may even come first: it goes another way than the load."""
    rank = Rank(daemon)
    done(rank.store("a"))
    jobs = []
    for _ in range(50):
        lease = rank.client.lookup(NAMESPACE, {0: hashes("a")}, lease_seconds=30).lease
        assert lease is not None
        jobs.append(rank.client.load([Blocks(0, hashes("a"), [1])], lease=lease))
        assert rank.client.release(lease)
    results = [rank.finish(job) for job in jobs]
    assert [(each.outcome, each.reason) for each in results] == [(Outcome.DONE, "")] * len(jobs)
    assert daemon.metric("kvsidecar_pool_leased_bytes") == 0
    rank.close()


def test_a_lease_is_never_longer_than_the_daemon_allows(short_dir: Path, local: bool) -> None:
    with DaemonProcess(short_dir, "--lease-max", "100", local=local) as daemon:
        rank = Rank(daemon.wait_ready())
        done(rank.store("a"))
        lookup = rank.client.lookup(NAMESPACE, {0: hashes("a")}, lease_seconds=3600)
        assert lookup.lease is not None
        assert lookup.lease_seconds == 100.0
        assert rank.client.renew(lookup.lease, 3600) == 100.0
        rank.close()


def test_a_lease_ends_with_the_client_that_took_it(daemon: DaemonProcess) -> None:
    rank = Rank(daemon)
    done(rank.store("a"))
    scheduler = daemon.client()
    assert scheduler.lookup(NAMESPACE, {0: hashes("a")}, lease_seconds=30).lease
    assert daemon.metric("kvsidecar_leases") == 1
    scheduler.close()
    eventually(lambda: not daemon.metric("kvsidecar_leases"))
    rank.close()


@promise("removed with `kvsidecar clear`")
def test_clear_forgets_one_namespace_and_no_other(daemon: DaemonProcess) -> None:
    one = Rank(daemon)
    two = Rank(daemon, namespace=dataclasses.replace(NAMESPACE, model="other"))
    done(one.store("a", "b"))
    done(two.store("a"))
    assert one.client.clear(one.namespace) == 2
    assert (one.hits("a"), two.hits("a")) == (0, 1)
    assert two.client.clear() == 1
    assert daemon.metric("kvsidecar_pool_used_bytes") == 0
    one.close()
    two.close()


def test_a_rank_whose_geometry_contradicts_the_namespace_is_refused(daemon: DaemonProcess) -> None:
    first = Rank(daemon)
    with pytest.raises(AttachRefused, match=str(SHARD_BYTES)):
        Rank(daemon, groups=layout(row_bytes=2 * ROW_BYTES))
    with pytest.raises(AttachRefused, match="shards"):
        Rank(daemon, groups=layout(0, 2))
    first.close()


def test_a_region_outside_its_allocation_is_refused_before_anything_is_mapped(daemon: DaemonProcess) -> None:
    buffer = HostBuffer(ROW_BYTES)
    client = daemon.client()
    with pytest.raises(AttachRefused, match=f"has {ROW_BYTES} bytes"):
        client.attach(instance="x", namespace=NAMESPACE, buffers=buffer.kv_buffers(), groups=[layout()])
    client.close()
    buffer.close()
    assert daemon.metric("kvsidecar_attached_ranks") == 0
    assert "kvsidecar_imported_gpu_bytes{" not in daemon.get("/metrics")[1]
    assert daemon.refused("register_refused") == 1


def test_a_claimed_size_beyond_the_allocation_is_refused(daemon: DaemonProcess) -> None:
    buffer = HostBuffer(ROW_BYTES)
    claimed = dataclasses.replace(buffer.kv_buffers().allocations[0], size=1 << 30)
    client = daemon.client()
    with pytest.raises(AttachRefused, match=str(1 << 30)):
        client.attach(
            instance="x",
            namespace=NAMESPACE,
            buffers=dataclasses.replace(buffer.kv_buffers(), allocations=(claimed,)),
            groups=[layout()],
        )
    client.close()
    buffer.close()


def test_bad_block_ids_decline_the_job_and_nothing_else(daemon: DaemonProcess) -> None:
    rank = Rank(daemon)
    for ids in ([-1], [NUM_BLOCKS], [2**63 - 1]):
        declined = rank.finish(rank.client.store([Blocks(0, hashes("a"), ids)]))
        assert (declined.outcome, declined.reason) == (Outcome.DECLINED, "invalid_request")
        assert str(ids[0]) in declined.error
    twice = rank.finish(rank.client.store([Blocks(0, hashes("a", "b"), [1, 1])]))
    assert "twice" in twice.error
    unknown = rank.finish(rank.client.store([Blocks(9, hashes("a"), [1])]))
    assert "group 9" in unknown.error
    lengths = rank.finish(rank.client.load([Blocks(0, hashes("a"), [1, 2])]))
    assert "1 hashes but 2 block ids" in lengths.error
    done(rank.store("a"))
    rank.close()


def test_regions_of_one_group_that_overlap_are_refused(daemon: DaemonProcess) -> None:
    """A load would write one block over another."""
    regions = tuple(Region(0, offset, 0, ROW_BYTES, ROW_BYTES, 1) for offset in (0, ROW_BYTES // 2))
    groups = dataclasses.replace(layout(), regions=regions)
    buffer = HostBuffer(1 << 20)
    client = daemon.client()
    with pytest.raises(AttachRefused, match=r"region 0 .* and a row of region 1 .* overlap in some block"):
        client.attach(instance="overlaps", namespace=NAMESPACE, buffers=buffer.kv_buffers(), groups=[groups])
    client.close()
    assert daemon.metric("kvsidecar_attached_ranks") == 0
    buffer.close()


@promise("layers that share a block table")
def test_groups_that_overlay_each_other_are_accepted_and_each_moves_its_own_blocks(daemon: DaemonProcess) -> None:
    """As in hybrid engines: the blocks of all groups lie in the same memory, and each is one group's at a time."""
    large = Region(0, 0, 0, ROW_BYTES, ROW_BYTES, 1)
    small = Region(0, 1024, 0, ROW_BYTES, 2048, 1)
    groups = [
        dataclasses.replace(layout(), group=number, regions=(each,)) for number, each in enumerate((large, small))
    ]
    buffer = HostBuffer(NUM_BLOCKS * ROW_BYTES)
    kv = np.frombuffer(buffer.memory, np.uint8).reshape(NUM_BLOCKS, ROW_BYTES)
    client = daemon.client()
    client.attach(instance="hybrid", namespace=NAMESPACE, buffers=buffer.kv_buffers(), groups=groups)
    kv[:] = np.random.default_rng(1).integers(0, 256, kv.shape, np.uint8)
    before = kv.copy()
    stored = client.store([Blocks(0, hashes("a"), [0]), Blocks(1, hashes("a"), [1])])
    assert client.wait([stored], SECONDS)[stored].copied_blocks == 2
    loaded = client.load([Blocks(0, hashes("a"), [5]), Blocks(1, hashes("a"), [2])])
    done(client.wait([loaded], SECONDS)[loaded])
    before[5] = before[0]
    before[2, 1024:3072] = before[1, 1024:3072]
    assert np.array_equal(kv, before)
    client.close()


@promise("its stored blocks stay")
def test_a_killed_engine_is_unmapped_and_its_blocks_stay(daemon: DaemonProcess) -> None:
    script = (
        "import sys; from tests import harness; "
        "d = object.__new__(harness.DaemonProcess); d.socket = sys.argv[1]; "
        "r = harness.Rank(d); harness.done(r.store('a')); print('stored', flush=True); sys.stdin.read()"
    )
    engine = subprocess.Popen(
        [sys.executable, "-c", script, daemon.socket], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert engine.stdout is not None
    assert engine.stdout.readline() == "stored\n"
    assert daemon.mapped_buffers() == 1
    engine.kill()
    daemon.wait_log("rank detached")
    assert daemon.mapped_buffers() == 0
    engine.communicate()
    rank = Rank(daemon)
    done(rank.load("a", at=[2]))
    assert rank.holds(2, "a")
    rank.close()


@promise("its GPU memory is unmapped within a second of its last copy")
def test_close_returns_after_the_daemon_has_unmapped_the_memory(daemon: DaemonProcess) -> None:
    rank = Rank(daemon)
    rank.client.close()
    assert daemon.mapped_buffers() == 0
    assert daemon.metric("kvsidecar_attached_ranks") == 0


def test_a_store_whose_event_fails_ends_as_failed(daemon: DaemonProcess) -> None:
    class Broken:
        def synchronize(self) -> None:
            raise RuntimeError("device lost")

    rank = Rank(daemon)
    failed = rank.finish(rank.client.store([Blocks(0, hashes("a"), [0])], after=Broken()))
    assert (failed.outcome, failed.reason, failed.error) == (Outcome.FAILED, "event_failed", "device lost")
    rank.close()


def test_an_engine_whose_forked_child_lives_on_is_unmapped_all_the_same(daemon: DaemonProcess) -> None:
    """The child holds every connection open, so no stream ends: only the pidfd tells."""
    script = (
        "import os, signal, sys; from tests import harness; "
        "d = object.__new__(harness.DaemonProcess); d.socket = sys.argv[1]; "
        "r = harness.Rank(d); harness.done(r.store('a')); "
        "child = os.fork(); "
        "child or signal.pause(); "
        "print(child, flush=True); sys.stdin.read()"
    )
    engine = subprocess.Popen(
        [sys.executable, "-c", script, daemon.socket],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        # With its fork support gRPC closes its connections in the child.
        env={**os.environ, "GRPC_ENABLE_FORK_SUPPORT": "0"},
    )  # fmt: skip
    assert engine.stdout is not None
    child = int(engine.stdout.readline())
    engine.kill()
    engine.wait()
    daemon.wait_log("rank detached")
    assert daemon.mapped_buffers() == 0
    assert Path(f"/proc/{child}").exists(), "the child must outlive the test's claim"
    os.kill(child, signal.SIGKILL)
    engine.communicate()


def test_what_a_lookup_without_hits_gives_can_be_released_and_loaded(daemon: DaemonProcess) -> None:
    rank = Rank(daemon)
    found = rank.client.lookup(NAMESPACE, {0: hashes("nobody stored this")}, lease_seconds=5)
    assert found.lease is None
    assert rank.client.release(found.lease) is False
    assert rank.load("nobody stored this", at=[0], lease=found.lease).reason == "not_found"
    rank.close()


@pytest.mark.parametrize("flags", [(), ("--chunk-size", "64MiB")], ids=["default", "blocks span chunks"])
def test_eight_blocks_of_an_eighth_of_the_pool_fit_and_larger_ones_are_refused(
    short_dir: Path, local: bool, flags: tuple[str, ...]
) -> None:
    """Of 80 MiB, more than the longest usual slab has."""
    large = layout(layers=80, row_bytes=MiB, num_blocks=2)
    with DaemonProcess(short_dir, "--pool-size", "640MiB", *flags, local=local) as daemon:
        rank = Rank(daemon.wait_ready(), groups=large)
        for pair in (names := ("ab", "cd", "ef", "gh")):
            done(rank.store(*pair))
        assert rank.hits(*"".join(names)) == 8
        done(rank.load(*"ba", at=[0, 1]))
        assert rank.holds(0, "b")
        assert rank.holds(1, "a")
        assert daemon.metric("kvsidecar_pool_rounding_bytes") == daemon.metric("kvsidecar_pool_free_bytes") == 0
        done(rank.store("i"))
        assert rank.hits("i") == 1
        rank.close()
        larger = dataclasses.replace(NAMESPACE, model="larger")
        with pytest.raises(AttachRefused, match=r"84934656 bytes.*83886080: set --pool-size to at least 8 times the"):
            Rank(daemon, groups=layout(layers=81, row_bytes=MiB, num_blocks=1), namespace=larger)


@promise("A slab holds slots of one size")
def test_a_few_leased_blocks_of_another_size_are_named_as_what_keeps_a_store_out(short_dir: Path, local: bool) -> None:
    """Each of them keeps a slab from being recut. When they are released, or have expired, it is."""
    sizes = [
        text
        for flag, size in (("pool", "2MiB"), ("slab", "1MiB"), ("chunk", "1MiB"))
        for text in (f"--{flag}-size", size)
    ]
    small_layout, large_layout = layout(layers=1, num_blocks=512), layout(layers=16)
    with DaemonProcess(short_dir, *sizes, local=local) as daemon:
        small = Rank(daemon.wait_ready(), groups=small_layout)
        large = Rank(daemon, groups=large_layout, namespace=dataclasses.replace(NAMESPACE, model="large"))
        names = list(range(512))
        done(small.store(*names))
        leases = [small.client.lookup(NAMESPACE, {0: hashes(name)}, lease_seconds=30).lease or 0 for name in (0, 511)]
        refused = large.store("x")
        assert (refused.outcome, refused.reason) == (Outcome.DECLINED, "pool_fragmented")
        assert small.hits(*names) == len(names), "a declined store evicted something"
        assert daemon.refused("pool_fragmented") == 1
        assert small.client.release(leases[0])
        done(large.store("x"))
        done(large.load("x", at=[3]))
        assert large.holds(3, "x")
        assert small.client.lookup(NAMESPACE, {0: hashes(511)}).groups[0].hits == 1
        small.close()
        large.close()
