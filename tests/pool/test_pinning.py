"""Pinning: each chunk once, in order, the next one faulted in meanwhile. Real memory, real mlock, /proc as witness."""

from __future__ import annotations

import errno
import threading
from itertools import pairwise

import pytest

from kvsidecar.errors import PinFailed, PinStopped
from kvsidecar.pool.host_pool import HostPool
from kvsidecar.pool.pinning import PinProgress
from kvsidecar.support import host_memory
from kvsidecar.support.memory_limits import PageKind
from kvsidecar.support.units import MiB
from tests.pool.host_pools import (
    CHUNKS,
    NBYTES,
    Mapped,
    MlockPlatform,
    NewPool,
    ignore,
    mapped,
    may_lock,
    never,
    nothing_left,
    pins,
    spec,
    unpins,
)

pytestmark = may_lock
no_pool_is_left = nothing_left


def test_prefaulting_covers_each_chunk_once_before_it_is_pinned(
    pinned: NewPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    platform = MlockPlatform()
    touched: list[tuple[int, int, int]] = []
    lock = threading.Lock()

    def record(address: int, nbytes: int, kind: PageKind) -> int:
        with lock:
            touched.append((address, nbytes, len(platform.calls)))
        return 0

    monkeypatch.setattr(host_memory, "populate", record)
    pool = pinned(spec(prefault_threads=3), platform)
    covered = sorted((address - pool.address, nbytes, chunks_before) for address, nbytes, chunks_before in touched)
    assert covered[0][0] == 0
    assert all(first[0] + first[1] == second[0] for first, second in pairwise(covered))
    assert covered[-1][0] + covered[-1][1] == NBYTES
    # At most one chunk ahead: what is faulted in and not pinned is given back page by page if pinning is stopped.
    assert all(offset // MiB - 1 <= chunks_before <= offset // MiB for offset, _, chunks_before in covered)


def test_the_next_chunk_is_faulted_in_while_one_is_pinned(new_pool: NewPool, monkeypatch: pytest.MonkeyPatch) -> None:
    platform = MlockPlatform()
    faulted: set[int] = set()
    changed = threading.Condition()

    def populate(address: int, nbytes: int, kind: PageKind) -> int:
        with changed:
            faulted.add((address - pool.address) // MiB)
            changed.notify_all()
        return 0

    def pin(address: int, nbytes: int) -> None:
        chunk = (address - pool.address) // MiB
        with changed:
            assert chunk in faulted
            assert chunk == len(CHUNKS) - 1 or changed.wait_for(lambda: chunk + 1 in faulted, 30)

    monkeypatch.setattr(host_memory, "populate", populate)
    monkeypatch.setattr(platform, "pin", pin)
    monkeypatch.setattr(platform, "unpin", lambda address, nbytes: None)
    pool = new_pool(spec(), platform)
    pool.pin(ignore, never())


def test_prefaulting_runs_in_as_many_threads_as_configured(pinned: NewPool, monkeypatch: pytest.MonkeyPatch) -> None:
    together = threading.Barrier(4, timeout=30)
    monkeypatch.setattr(host_memory, "populate", lambda *arguments: together.wait() * 0)
    pinned(spec(nbytes=MiB, prefault_threads=4))


def test_the_lock_that_an_attach_needs_is_free_between_small_pieces(
    pinned: NewPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    monkeypatch.setattr(host_memory, "populate", lambda address, nbytes, kind: sizes.append(nbytes) or 0)
    monkeypatch.setattr("kvsidecar.pool.pinning.PREFAULT_BYTES", 2 * MiB)
    pinned(spec(nbytes=5 * MiB, chunk_bytes=4 * MiB, prefault_threads=1))
    assert sizes == [2 * MiB] * 2 + [MiB]


def test_on_a_kernel_without_populate_the_pages_are_touched_instead(
    pinned: NewPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = host_memory.advise

    def old_kernel(address: int, nbytes: int, advice: int) -> None:
        if advice == 23:
            raise OSError(errno.EINVAL, "Invalid argument")
        real(address, nbytes, advice)

    monkeypatch.setattr(host_memory, "advise", old_kernel)
    platform = MlockPlatform()
    resident: list[int] = []
    monkeypatch.setattr(platform, "pin", lambda address, nbytes: resident.append(mapped().resident))
    monkeypatch.setattr(platform, "unpin", lambda address, nbytes: None)
    pinned(spec(), platform)
    at_least = [MiB, 2 * MiB, 3 * MiB, 4 * MiB, NBYTES]  # and perhaps some of the next chunk
    assert all(least <= found <= least + MiB for found, least in zip(resident, at_least, strict=True))


def test_chunks_are_pinned_in_order_and_unpinned_in_reverse(pinned: NewPool) -> None:
    platform = MlockPlatform()
    pool = pinned(spec(), platform)
    base = pool.address
    assert pins(platform, base) == list(CHUNKS)
    pool.close()
    assert unpins(platform, base) == list(reversed(CHUNKS))


def test_the_error_of_a_chunk_says_which_and_where() -> None:
    with pytest.raises(PinFailed) as raised:
        HostPool(spec(), MlockPlatform(fail_at=4)).pin(ignore, never())
    said = "chunk 5 of 5 (4 KiB at 4 MiB): out of memory: the chunks before it were released"
    assert str(raised.value) == said


def test_no_page_to_prefault_is_a_failure_and_waits_for_the_threads_that_still_touch_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    failed, finished = threading.Event(), threading.Event()
    first = threading.Lock()
    real_populate, real_munmap = host_memory.populate, host_memory.unmap
    finished_at_unmap: list[bool] = []

    def populate(address: int, nbytes: int, kind: PageKind) -> int:
        if first.acquire(blocking=False):
            failed.set()
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        assert failed.wait(30)
        small = real_populate(address, nbytes, kind)
        finished.set()
        return small

    def munmap(address: int, nbytes: int) -> None:
        finished_at_unmap.append(finished.is_set())
        real_munmap(address, nbytes)

    pool = HostPool(spec(nbytes=4 * MiB, chunk_bytes=4 * MiB, prefault_threads=2), MlockPlatform())
    monkeypatch.setattr(host_memory, "populate", populate)
    started: list[PinProgress] = []

    def watch_unmapping_from_now_on(progress: PinProgress) -> None:
        started.append(progress)
        monkeypatch.setattr(host_memory, "unmap", munmap)

    with pytest.raises(PinFailed, match=r"chunk 1 of 1 \(4 MiB at 0 B\): Cannot allocate memory$"):
        pool.pin(watch_unmapping_from_now_on, never())
    assert finished_at_unmap == [True]


@pytest.mark.parametrize("stop_after", range(len(CHUNKS)))
def test_stop_between_chunks_gives_everything_back(stop_after: int) -> None:
    platform = MlockPlatform()
    stop = threading.Event()

    def stop_then(progress: PinProgress) -> None:
        if progress.pinned_bytes == sum(nbytes for _, nbytes in CHUNKS[:stop_after]):
            stop.set()

    with pytest.raises(PinStopped, match=f"before chunk {stop_after + 1} of 5"):
        HostPool(spec(), platform).pin(stop_then, stop)
    assert [what for what, _, _ in platform.calls] == ["pin"] * stop_after + ["unpin"] * stop_after
    assert mapped() == Mapped()


def test_progress_counts_bytes_and_estimates_the_end(new_pool: NewPool) -> None:
    seen: list[PinProgress] = []
    now = 100.0
    platform = MlockPlatform()
    pin = platform.pin

    def pin_in_half_a_second(address: int, nbytes: int) -> None:
        nonlocal now
        pin(address, nbytes)
        now += 0.5

    def progress(progress: PinProgress) -> None:
        nonlocal now
        seen.append(progress)
        now += 1.5

    platform.pin = pin_in_half_a_second  # type: ignore[method-assign]
    pool = new_pool(spec(nbytes=4 * MiB), platform, clock=lambda: now)
    pool.pin(progress, never())
    assert [p.register_seconds for p in seen] == [0.0, 0.5, 1.0, 1.5, 2.0]
    assert [p.pinned_bytes for p in seen] == [0, MiB, 2 * MiB, 3 * MiB, 4 * MiB]
    assert {p.total_bytes for p in seen} == {4 * MiB}
    assert seen[0].eta_seconds is None
    assert [p.eta_seconds for p in seen[1:]] == [6.0, 4.0, 2.0, 0.0]
    assert [p.seconds for p in seen] == [0.0, 2.0, 4.0, 6.0, 8.0]
    assert [p.bytes_per_second for p in seen[1:]] == [MiB / 2] * 4
