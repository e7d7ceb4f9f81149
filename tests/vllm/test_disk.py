"""Blocks come back from disk into a real engine: after an eviction from the pool, and into another daemon's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.e2e.disks import patient, tier_metric, written
from tests.harness import SECONDS, DaemonProcess, eventually
from tests.vllm.conftest import SOON_FULL, Truth
from tests.vllm.engine import LONG, WHOLE, Engine, blocks, hits, join, kvsidecar, prompt, rejoin, running
from tests.vllm.models import BLOCK, WINDOW


@contextmanager
def started(short_dir: Path, *flags: str) -> Iterator[DaemonProcess]:
    disk = ("--disk-dir", str(short_dir / "disk"), "--disk-size", "64MiB", "--disk-admission", "all")
    with DaemonProcess(short_dir, *SOON_FULL, *disk, patient("disk"), *flags) as daemon:
        daemon.wait_ready()
        daemon.wait_log("tier on")
        yield daemon


def loads_the_whole_prompt(engine: Engine, truth: Truth) -> None:
    assert engine.reset()
    waits = engine.counters().get("vllm:kvsidecar_fetch_waits", 0)
    hits(engine, truth)
    assert engine.counters()["vllm:kvsidecar_fetch_waits"] == waits + 1


def test_an_engine_hits_what_the_pool_has_evicted_and_what_another_daemon_has_written(
    model: str, short_dir: Path, truth: Truth
) -> None:
    with running(model, kvsidecar(str(short_dir / "kvs.sock"), fetch_patience=SECONDS)) as engine:
        with started(short_dir) as first:
            join(engine, first)
            hits(engine, truth, LONG, 0)
            engine.drain()
            eventually(lambda: written(first) >= blocks(first) > 0)
            evicted = first.metric("kvsidecar_evicted_blocks_total")
            turn = 0
            while first.metric("kvsidecar_evicted_blocks_total") - evicted < blocks(first):
                engine.generate(prompt(f"other {turn}", 700))
                engine.drain()
                turn += 1
            loads_the_whole_prompt(engine, truth)
            engine.drain()
            first.process.kill()
            first.process.wait(SECONDS)
        with started(short_dir) as second:
            assert blocks(second) == 0
            rejoin(engine, second)
            loads_the_whole_prompt(engine, truth)


def test_of_sliding_windows_the_last_blocks_come_back_from_disk(hybrid: str, short_dir: Path) -> None:
    with running(hybrid, enable_prefix_caching=False) as engine:
        right = engine.generate(LONG)[0].tokens
    with running(hybrid, kvsidecar(str(short_dir / "kvs.sock"), fetch_patience=SECONDS)) as engine:
        with started(short_dir) as first:
            join(engine, first)
            (answer,) = engine.generate(LONG)
            assert (answer.cached, answer.tokens) == (0, right)
            engine.drain()
            eventually(lambda: written(first) >= blocks(first) > 0)
            first.process.kill()
            first.process.wait(SECONDS)
        with started(short_dir) as second:
            rejoin(engine, second)
            groups = engine.scheduler.kv_cache_config.kv_cache_groups
            before = tier_metric(second, "copied_blocks_total", direction="read")
            assert engine.reset()
            (answer,) = engine.generate(LONG)
            assert (answer.cached, answer.tokens) == (WHOLE, right)
            full, window = WHOLE // BLOCK, WINDOW // BLOCK
            read = tier_metric(second, "copied_blocks_total", direction="read") - before
            assert read == full + (len(groups) - 1) * window, "one group of full attention, the others of windows"
