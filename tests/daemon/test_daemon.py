"""The daemon's own state, in this process."""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from kvsidecar.daemon import daemon as module
from kvsidecar.daemon.config import load_settings
from kvsidecar.daemon.daemon import EXIT_UNSETTLED, Daemon
from kvsidecar.daemon.lifecycle import Lifecycle
from kvsidecar.daemon.systemd import Notifier, NotifySocket
from kvsidecar.device.platforms import open_platform
from kvsidecar.pool.host_pool import HostPool, PoolSpec
from kvsidecar.types import State

MiB = 1 << 20


def get(url: str) -> tuple[int, dict[str, object]]:
    try:
        with urllib.request.urlopen(url) as reply:
            return reply.status, json.loads(reply.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


async def test_a_copy_of_unknown_outcome_is_said_everywhere_and_ends_the_process_once(
    short_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exits: list[int] = []
    exited = asyncio.Event()
    said = asyncio.Event()

    def exit_process(code: int) -> None:
        exits.append(code)
        exited.set()

    monkeypatch.setattr(module.os, "_exit", exit_process)
    monkeypatch.setattr(module, "LAST_WORDS_SECONDS", 0.0)
    flags = {"socket": str(short_dir / "kvs.sock"), "pool_size": "1MiB", "device": "host", "http_port": "0"}
    settings = load_settings(flags, {}, default_file=Path("/nowhere"))
    platform, _ = open_platform("host")
    pool = HostPool(PoolSpec(nbytes=MiB, slab_bytes=MiB, chunk_bytes=MiB), platform)
    async with Lifecycle(settings, MiB, notifier=Notifier(NotifySocket(None), None)) as life:
        assert await life.open()
        daemon = Daemon(settings, platform, pool, MiB, life=life)
        daemon.readiness.listen(lambda now: said.set() if now.state is State.READY else None)
        running = asyncio.create_task(daemon.run())
        try:
            await said.wait()
            assert (await asyncio.to_thread(get, f"{life.http}/health"))[0] == 200
            daemon._end_soon("a load may still run")
            daemon._end_soon("so may another one")
            code, health = await asyncio.to_thread(get, f"{life.http}/health")
            assert (code, health["alive"]) == (503, False)
            assert "a load may still run: the daemon ends" in str(health["reason"])
            code, ready = await asyncio.to_thread(get, f"{life.http}/ready")
            assert (code, ready["state"], ready["reason"]) == (503, "failed", health["reason"])
            await exited.wait()
        finally:
            life.stop.set()
            await running
    assert exits == [EXIT_UNSETTLED] * 2, "once by itself, and once by the stop that would have unpinned"
