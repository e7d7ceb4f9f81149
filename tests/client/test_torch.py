"""CPU tensors as KV caches; needs torch, not a GPU."""

from __future__ import annotations

import pytest

from kvsidecar.client import Blocks, GroupLayout, NotExportable
from tests.harness import NAMESPACE, SECONDS, DaemonProcess, done, hashes

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch


def test_shared_cpu_tensors_are_stored_and_loaded(daemon: DaemonProcess) -> None:
    from kvsidecar.client.torch import TorchExporter, shared_empty

    layers = [shared_empty((8, 2, 64), torch.float32) for _ in range(3)]
    exporter = TorchExporter()
    regions = exporter.regions(layers)
    client = daemon.client()
    client.attach(
        instance="torch",
        namespace=NAMESPACE,
        buffers=exporter.kv_buffers(),
        groups=[GroupLayout(0, 8, 0, 1, regions)],
    )
    for tensor in layers:
        tensor.normal_()
    job = client.store([Blocks(0, hashes("a"), [2])])
    done(client.wait([job], SECONDS)[job])
    wanted = [tensor[2].clone() for tensor in layers]
    job = client.load([Blocks(0, hashes("a"), [7])])
    done(client.wait([job], SECONDS)[job])
    for tensor, was in zip(layers, wanted, strict=True):
        assert torch.equal(tensor[7], was)
    client.close()


def test_ordinary_cpu_memory_is_refused_with_what_to_use() -> None:
    from kvsidecar.client.torch import TorchExporter

    with pytest.raises(NotExportable, match="shared_empty"):
        TorchExporter().regions([torch.zeros(4, 4)])


def test_a_tensor_without_the_block_dimension_is_refused() -> None:
    from kvsidecar.client.torch import TorchExporter

    with pytest.raises(NotExportable, match="block_dim 3"):
        TorchExporter().regions([torch.zeros(4, 4)], block_dim=3)


def test_nothing_exported_is_refused() -> None:
    from kvsidecar.client.torch import TorchExporter

    with pytest.raises(NotExportable, match="no tensor"):
        TorchExporter().kv_buffers()
