"""A real daemon on a real GPU: byte equality over CUDA IPC for every layout, and what a killed engine leaves behind."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue

import numpy as np
import pytest

from kvsidecar.client import (
    Allocation,
    AttachRefused,
    Blocks,
    ClientError,
    GroupLayout,
    KVBuffers,
    NotExportable,
    PhysicalRange,
    Region,
)
from kvsidecar.errors import DriverUnusable
from kvsidecar.protocol.wire import namespace_to_wire, pack_ids
from kvsidecar.support.cuda_driver import (
    FABRIC,
    POSIX_DESCRIPTOR,
    RANGE_BYTES,
    CudaContext,
    device_count,
    ipc_handle,
    physical_ranges,
)
from kvsidecar.types import PROTOCOL, TOKEN_METADATA
from kvsidecar.v1 import sidecar_pb2 as pb
from tests.e2e.gpu_engine import ENGINE
from tests.e2e.pid_namespaces import UNSHARE, needs_pid_namespaces, with_pid
from tests.e2e.wire import stub
from tests.harness import NAMESPACE, SECONDS, DaemonProcess, Rank, done, hashes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not Path("/dev/nvidiactl").exists(), reason="there is no NVIDIA GPU"),
]

LAYERS, BLOCKS, ROW = 8, 32, 16384
ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"
STACKED = (Region(0, 0, BLOCKS * ROW, ROW, ROW, LAYERS),)
CONTIGUOUS = (Region(0, 0, ROW, LAYERS * ROW, ROW, LAYERS),)
PER_LAYER = tuple(Region(layer, 0, ROW, ROW, ROW, 1) for layer in range(LAYERS))
PADDED = (Region(0, 4096, BLOCKS * (ROW + 512), ROW + 512, ROW, LAYERS),)


@pytest.fixture(scope="module")
def context() -> Iterator[CudaContext]:
    context = CudaContext(0)
    yield context
    context.close()


@pytest.fixture
def cuda_daemon(short_dir: Path) -> Iterator[DaemonProcess]:
    with DaemonProcess(short_dir, "--pool-size", "64MiB", device="cuda") as process:
        yield process.wait_ready()


PLAIN = None
"""Memory of cuMemAlloc; else of cuMemCreate, with these forms of export."""


class GpuRank:
    """An attached rank whose KV lies in allocations of its own on the GPU."""

    def __init__(
        self,
        daemon: DaemonProcess,
        context: CudaContext,
        regions: tuple[Region, ...],
        *,
        handle_types: int | None = PLAIN,
    ) -> None:
        self.context, self.regions, self._physical = context, regions, handle_types is not PLAIN
        count = max(region.allocation for region in regions) + 1
        self.sizes = [
            max(region.end(BLOCKS) for region in regions if region.allocation == index) + 8192 for index in range(count)
        ]
        if self._physical:
            self.sizes = [-(-size // RANGE_BYTES) * RANGE_BYTES for size in self.sizes]
        self.addresses = [
            context.alloc(size)
            if handle_types is PLAIN
            else context.alloc_ranges(ranges_of(size), handle_types=handle_types)
            for size in self.sizes
        ]
        self.attach(daemon)

    def attach(self, daemon: DaemonProcess) -> None:
        self.client = daemon.client()
        allocations = tuple(map(self._allocation, self.sizes, self.addresses))
        self.client.attach(
            instance="gpu",
            namespace=NAMESPACE,
            buffers=KVBuffers(self.context.uuid, allocations),
            groups=[GroupLayout(0, BLOCKS, 0, 1, self.regions)],
        )

    def _allocation(self, size: int, address: int) -> Allocation:
        if not self._physical:
            return Allocation(size, cuda_ipc_handle=ipc_handle(address))
        ranges = [PhysicalRange(nbytes, address=at) for at, nbytes in physical_ranges(address, size)]
        return Allocation(size, ranges=tuple(ranges))

    def fill(self, seed: int) -> list[np.ndarray]:  # type: ignore[type-arg]
        """Random bytes everywhere; returns what was written."""
        random = np.random.default_rng(seed)
        content = [random.integers(0, 256, size, np.uint8) for size in self.sizes]
        for address, data in zip(self.addresses, content, strict=True):
            self.context.copy_to_device(address, data)
        return content

    def read(self) -> list[np.ndarray]:  # type: ignore[type-arg]
        content = [np.empty(size, np.uint8) for size in self.sizes]
        for address, data in zip(self.addresses, content, strict=True):
            self.context.copy_from_device(data, address)
        return content

    def rows(self, block: int) -> Iterator[tuple[int, slice]]:
        for region in self.regions:
            for row in range(region.num_rows):
                start = region.offset + row * region.row_stride + block * region.block_stride
                yield region.allocation, slice(start, start + region.row_bytes)

    def close(self) -> None:
        self.client.close()
        for address, size in zip(self.addresses, self.sizes, strict=True):
            if self._physical:
                self.context.free_ranges(address, ranges_of(size))
            else:
                self.context.free(address)


def ranges_of(size: int) -> list[int]:
    return [RANGE_BYTES] * (size // RANGE_BYTES)


@pytest.mark.parametrize("regions", [STACKED, PER_LAYER], ids=["stacked", "per layer"])
def test_blocks_that_span_pinned_chunks_are_stored_and_loaded(
    short_dir: Path, context: CudaContext, regions: tuple[Region, ...]
) -> None:
    """The driver refuses a copy over two registrations: each block of 128 KiB is copied in parts."""
    chunks = ("--slab-size", "48KiB", "--chunk-size", "48KiB")
    with DaemonProcess(short_dir, "--pool-size", "8MiB", *chunks, device="cuda") as daemon:
        daemon.wait_ready()
        test_what_is_loaded_is_what_was_stored_and_nothing_else_is_touched(daemon, context, regions, PLAIN)


@pytest.mark.parametrize(
    "regions", [STACKED, CONTIGUOUS, PER_LAYER, PADDED], ids=["stacked", "contiguous", "per layer", "padded"]
)
@pytest.mark.parametrize("handle_types", [PLAIN, POSIX_DESCRIPTOR, FABRIC], ids=["plain", "physical", "fabric"])
def test_what_is_loaded_is_what_was_stored_and_nothing_else_is_touched(
    cuda_daemon: DaemonProcess, context: CudaContext, regions: tuple[Region, ...], handle_types: int | None
) -> None:
    if handle_types == FABRIC:
        try:
            context.free_ranges(context.alloc_ranges([RANGE_BYTES], handle_types=FABRIC), [RANGE_BYTES])
        except DriverUnusable as why:
            pytest.skip(f"no channel of the IMEX service: {why}")
    one, two = (GpuRank(cuda_daemon, context, regions, handle_types=handle_types) for _ in range(2))
    names = hashes(*range(20))
    source = np.random.default_rng(1).permutation(BLOCKS)[:20].tolist()
    target = np.random.default_rng(2).permutation(BLOCKS)[:20].tolist()
    stored = one.fill(3)
    expected = two.fill(4)
    job = one.client.store([Blocks(0, names, source)])
    assert done(one.client.wait([job], SECONDS)[job]).nbytes == 20 * LAYERS * ROW
    lookup = two.client.lookup(NAMESPACE, {0: names}, lease_seconds=10)
    assert lookup.groups[0].hits == 20
    job = two.client.load([Blocks(0, names, target)], lease=lookup.lease)
    done(two.client.wait([job], SECONDS)[job])
    for block_from, block_to in zip(source, target, strict=True):
        for (allocation, rows_from), (_, rows_to) in zip(one.rows(block_from), two.rows(block_to), strict=True):
            expected[allocation][rows_to] = stored[allocation][rows_from]
    for found, wanted in zip(two.read(), expected, strict=True):
        assert np.array_equal(found, wanted)
    for found, wanted in zip(one.read(), stored, strict=True):
        assert np.array_equal(found, wanted), "a store wrote to its source"
    one.close()
    two.close()


def test_a_client_with_the_stubs_alone_stores_and_loads_memory_of_a_gpu(
    cuda_daemon: DaemonProcess, context: CudaContext
) -> None:
    """Its handle is all that it has to send: there is no connection to the attach socket."""
    size = LAYERS * BLOCKS * ROW
    address = context.alloc(size)
    written, read = np.random.default_rng(7).integers(0, 256, size, np.uint8), np.empty(size, np.uint8)
    context.copy_to_device(address, written)
    region = pb.Region(row_stride=BLOCKS * ROW, block_stride=ROW, row_bytes=ROW, num_rows=LAYERS)
    first = pb.Register(
        protocol=PROTOCOL,
        instance="gpu",
        namespace=namespace_to_wire(NAMESPACE),
        world_size=1,
        device=context.uuid,
        allocations=[pb.Allocation(cuda_ipc_handle=ipc_handle(address), size=size)],
        groups=[pb.Group(num_blocks=BLOCKS, num_shards=1, regions=[region])],
    )
    requests: SimpleQueue[pb.AttachRequest | None] = SimpleQueue()
    requests.put(pb.AttachRequest(register=first))
    with stub(cuda_daemon) as sidecar:
        stream = sidecar.Attach(iter(requests.get, None), timeout=SECONDS)
        registered = next(stream).registered
        metadata = ((TOKEN_METADATA, registered.token),)
        (name,) = hashes("a")
        blocks = [pb.Blocks(hashes=name, block_ids=pack_ids([each])) for each in (0, 9)]
        store = pb.StoreRequest(session=registered.session, store=pb.Store(job=1, blocks=blocks[:1]))
        assert sidecar.Store(store, timeout=SECONDS, metadata=metadata).outcome == pb.JobDone.OUTCOME_DONE
        load = pb.LoadRequest(session=registered.session, load=pb.Load(job=2, blocks=blocks[1:]))
        assert sidecar.Load(load, timeout=SECONDS, metadata=metadata).outcome == pb.JobDone.OUTCOME_DONE
        requests.put(None)
        assert [each for each in stream if each.HasField("done")] == []
    context.copy_from_device(read, address)
    rows = written.reshape(LAYERS, BLOCKS, ROW)
    rows[:, 9] = rows[:, 0]
    assert np.array_equal(read, written)
    context.free(address)


def test_ranks_on_two_gpus_store_and_load_what_the_other_one_loads_and_stores(cuda_daemon: DaemonProcess) -> None:
    if device_count() < 2:
        pytest.skip("needs two GPUs")
    contexts = []
    try:
        contexts += [CudaContext(0), CudaContext(1)]
    except ClientError as error:
        pytest.skip(f"there are no two GPUs: {error}")
    ranks = [GpuRank(cuda_daemon, each, STACKED) for each in contexts]
    assert len({context.uuid for context in contexts}) == 2
    blocks = list(range(BLOCKS))
    for i, (one, two) in enumerate((ranks, ranks[::-1])):
        names, stored = hashes(*((i, block) for block in blocks)), one.fill(i)
        two.fill(7 + i)
        job = one.client.store([Blocks(0, names, blocks)])
        done(one.client.wait([job], SECONDS)[job])
        job = two.client.load([Blocks(0, names, blocks)])
        done(two.client.wait([job], SECONDS)[job])
        size = LAYERS * BLOCKS * ROW
        assert np.array_equal(two.read()[0][:size], stored[0][:size])
    for rank in ranks:
        rank.close()
    for context in contexts:
        context.close()


def test_host_memory_and_garbage_handles_are_refused_and_the_daemon_goes_on(
    cuda_daemon: DaemonProcess, context: CudaContext
) -> None:
    groups = [GroupLayout(0, BLOCKS, 0, 1, STACKED)]
    for handle, size in ((bytes(64), 64 << 20), (bytes(range(64)), 64 << 20), (b"short", 64 << 20)):
        client = cuda_daemon.client()
        with pytest.raises(AttachRefused):
            client.attach(
                instance="bad",
                namespace=NAMESPACE,
                buffers=KVBuffers(context.uuid, (Allocation(size, cuda_ipc_handle=handle),)),
                groups=groups,
            )
        client.close()
    with pytest.raises(AttachRefused, match="host is not"):
        Rank(cuda_daemon)
    rank = GpuRank(cuda_daemon, context, STACKED)
    rank.fill(1)
    job = rank.client.store([Blocks(0, hashes("a"), [0])])
    done(rank.client.wait([job], SECONDS)[job])
    rank.close()


@pytest.mark.alone  # others free the memory of the GPU that it counts
def test_gpu_memory_of_a_killed_engine_is_free_at_once(cuda_daemon: DaemonProcess, context: CudaContext) -> None:
    before, _ = context.memory_info()
    engine = subprocess.Popen(
        [sys.executable, "-c", ENGINE, cuda_daemon.socket], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert engine.stdout is not None
    assert engine.stdout.readline() == "stored\n"
    held, _ = context.memory_info()
    assert before - held > 2 << 30
    engine.kill()
    engine.wait()
    killed = time.monotonic()
    while before - context.memory_info()[0] > 64 << 20:
        assert time.monotonic() - killed < SECONDS, f"{before - context.memory_info()[0]} bytes are still held"
    # The promise of a second is for a machine that has one to spare; that no timer is needed, the simulation holds.
    print(f"released {time.monotonic() - killed:.3f} s after the engine's death")
    engine.communicate()
    rank = GpuRank(cuda_daemon, context, STACKED)
    assert rank.client.lookup(NAMESPACE, {0: hashes("a")}).groups[0].hits == 1
    rank.close()


NAMESAKE = """
import os, sys
import numpy as np
from kvsidecar.client import AttachRefused
from kvsidecar.support.cuda_driver import CudaContext
from tests import harness
from tests.e2e import test_gpu
daemon = object.__new__(harness.DaemonProcess)
daemon.socket = sys.argv[1]
print(os.getpid(), flush=True)
context = CudaContext(0)
try:
    rank = test_gpu.GpuRank(daemon, context, test_gpu.CONTIGUOUS)
except AttachRefused as error:
    print("refused:", error, flush=True)
    sys.exit()
(stored,) = rank.fill(7)
for submit, block in (rank.client.store, 3), (rank.client.load, 4):
    job = submit([harness.Blocks(0, harness.hashes("a"), [block])])
    harness.done(rank.client.wait([job], harness.SECONDS)[job])
size = test_gpu.LAYERS * test_gpu.ROW
stored[4 * size : 5 * size] = stored[3 * size : 4 * size]
print("works" if np.array_equal(rank.read()[0], stored) else "WRONG BYTES", flush=True)
rank.close()
"""


@needs_pid_namespaces
@pytest.mark.parametrize("same_pid", [False, True], ids=["another PID value", "the daemon's PID value"])
def test_44_an_engine_in_another_pid_namespace_works_or_is_refused_in_words(
    cuda_daemon: DaemonProcess, context: CudaContext, same_pid: bool
) -> None:
    """The driver tells exporters apart by PID value: one that has the importer's looks like the importer itself."""
    under = with_pid(cuda_daemon.process.pid) if same_pid else UNSHARE
    # Ends by itself within the time of pytest, and fails then: a hang is what must not be.
    ran = subprocess.run(
        [*under, sys.executable, "-c", NAMESAKE, cuda_daemon.socket],
        stdout=subprocess.PIPE, text=True, timeout=3 * SECONDS,
    )  # fmt: skip
    pid, outcome = ran.stdout.strip().split("\n", 1)
    print(f"an engine of PID {pid} beside a daemon of PID {cuda_daemon.process.pid}: {outcome}")
    assert (int(pid) == cuda_daemon.process.pid) is same_pid
    if outcome != "works":
        assert outcome.startswith("refused:")
        assert "PID namespace" in outcome
    rank = GpuRank(cuda_daemon, context, STACKED)  # whatever the driver said, the daemon's context is well
    rank.fill(1)
    job = rank.client.store([Blocks(0, hashes("b"), [0])])
    done(rank.client.wait([job], SECONDS)[job])
    rank.close()


@pytest.mark.torch
def test_torch_tensors_on_the_gpu_are_stored_and_loaded(cuda_daemon: DaemonProcess) -> None:
    torch = pytest.importorskip("torch")
    from kvsidecar.client.torch import TorchExporter

    pad = torch.zeros(1000, device="cuda")  # so that nothing lies at the base of an allocation by luck
    stacked = torch.zeros(3 + 4 * BLOCKS * 2 * 8, 64, dtype=torch.bfloat16, device="cuda")
    layers = [
        stacked[3 + layer * BLOCKS * 16 : 3 + (layer + 1) * BLOCKS * 16].view(BLOCKS, 2, 8, 64) for layer in range(4)
    ]
    apart = [torch.zeros(2, BLOCKS, 8, 64, dtype=torch.bfloat16, device="cuda") for _ in range(3)]
    exporter = TorchExporter()
    groups = [
        GroupLayout(0, BLOCKS, 0, 1, exporter.regions(layers)),
        GroupLayout(1, BLOCKS, 0, 1, exporter.regions(apart, block_dim=1)),
    ]
    assert len(groups[0].regions) == 1, "layers at one distance in one allocation are one region"
    client = cuda_daemon.client()
    buffers = exporter.kv_buffers()
    physical = [bool(each.ranges) for each in buffers.allocations]
    assert set(physical) == {"expandable_segments:True" in os.environ.get(ALLOCATOR, "")}
    client.attach(instance="torch", namespace=NAMESPACE, buffers=buffers, groups=groups)
    for tensor in (*layers, *apart):
        tensor.random_(0, 100)
    event = torch.cuda.Event()
    event.record()
    names = hashes("a", "b")
    job = client.store([Blocks(0, names, [3, 30]), Blocks(1, names, [0, 31])], after=event)
    done(client.wait([job], SECONDS)[job])
    wanted = [tensor.clone() for tensor in layers], [tensor.clone() for tensor in apart]
    job = client.load([Blocks(0, names, [5, 6]), Blocks(1, names, [8, 7])])
    done(client.wait([job], SECONDS)[job])
    for tensor, was in zip(layers, wanted[0], strict=True):
        was[5], was[6] = was[3], was[30]
        assert torch.equal(tensor, was)
    for tensor, was in zip(apart, wanted[1], strict=True):
        was[:, 8], was[:, 7] = was[:, 0], was[:, 31]
        assert torch.equal(tensor, was)
    client.close()
    del pad


@pytest.mark.torch
def test_tensors_of_expandable_segments_are_stored_and_loaded() -> None:
    """The test above, in a process whose torch allocates so."""
    pytest.importorskip("torch")
    test = f"{__file__}::{test_torch_tensors_on_the_gpu_are_stored_and_loaded.__name__}"
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu", test],
        capture_output=True, text=True, timeout=300, env={**os.environ, ALLOCATOR: "expandable_segments:True"},
    )  # fmt: skip
    assert "1 passed" in ran.stdout, ran.stdout + ran.stderr


def test_memory_that_cannot_be_shared_is_refused_with_what_to_change(context: CudaContext) -> None:
    address = context.alloc_ranges([RANGE_BYTES], handle_types=0)
    with pytest.raises(NotExportable, match=r"cuMemCreate that cannot be exported.*requestedHandleTypes"):
        physical_ranges(address, RANGE_BYTES)
    context.free_ranges(address, [RANGE_BYTES])


@pytest.mark.alone
def test_the_memory_of_an_engine_that_sleeps_is_free_and_its_blocks_hit_when_it_wakes(
    cuda_daemon: DaemonProcess, context: CudaContext
) -> None:
    rank = GpuRank(cuda_daemon, context, PER_LAYER, handle_types=POSIX_DESCRIPTOR)
    free = context.memory_info()[0]
    stored = rank.fill(1)
    done(rank.client.wait([job := rank.client.store([Blocks(0, hashes(*range(20)), list(range(20)))])], SECONDS)[job])
    for _ in range(20):
        rank.client.store([Blocks(0, hashes(*range(20)), list(range(20)))])
        assert rank.client.close(SECONDS)
        for address, size in zip(rank.addresses, rank.sizes, strict=True):
            context.unmap_ranges(address, ranges_of(size))
        assert context.memory_info()[0] == free + sum(rank.sizes)
        for address, size in zip(rank.addresses, rank.sizes, strict=True):
            context.map_ranges(address, ranges_of(size))
        rank.attach(cuda_daemon)
        rank.fill(2)
        done(
            rank.client.wait([job := rank.client.load([Blocks(0, hashes(*range(20)), list(range(20)))])], SECONDS)[job]
        )
        for found, wanted in zip(rank.read(), stored, strict=True):
            assert np.array_equal(found[: 20 * ROW], wanted[: 20 * ROW])
        stored = rank.fill(1)
    rank.close()
