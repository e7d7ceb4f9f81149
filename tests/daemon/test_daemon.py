"""The daemon's own state, in this process."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from kvsidecar.cache import left_spaces
from kvsidecar.copier import PROGRAM
from kvsidecar.daemon import daemon as module
from kvsidecar.daemon.daemon import EXIT_COPIERS_LEFT, Daemon
from kvsidecar.daemon.lifecycle import Lifecycle
from kvsidecar.daemon.pool_geometry import PoolGeometry
from kvsidecar.daemon.serve import _load
from kvsidecar.daemon.setting_sources import load_settings
from kvsidecar.daemon.systemd import Notifier, NotifySocket
from kvsidecar.errors import DeviceLost
from kvsidecar.support import failpoints
from kvsidecar.support.supervised_child import launch
from tests.cache.support import PAGE, namespace, store
from tests.harness import SECONDS, eventually_in_loop
from tests.marks import processes

pytestmark = processes

MiB = 1 << 20


def get(url: str) -> tuple[int, dict[str, object]]:
    try:
        with urllib.request.urlopen(url) as reply:
            return reply.status, json.loads(reply.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


@asynccontextmanager
async def running(directory: Path, **more: str) -> AsyncIterator[tuple[Daemon, Lifecycle]]:
    """A daemon in this process that is ready; its copier is a process."""
    flags = {"socket": str(directory / "kvs.sock"), "pool_size": "1MiB", "device": "host", "http_port": "0", **more}
    settings = load_settings(flags, {}, default_file=Path("/nowhere"))
    async with Lifecycle(settings, MiB, notifier=Notifier(NotifySocket(None), None)) as life:
        assert await life.open()
        make = _load(settings, PoolGeometry(MiB, MiB, MiB), None)
        daemon = await make(life, launch(PROGRAM))
        run = asyncio.create_task(daemon.run())
        try:
            await until(daemon, lambda: daemon.readiness.ready)
            yield daemon, life
        finally:
            life.stop.set()
            await run


async def until(daemon: Daemon, condition: Callable[[], bool]) -> None:
    """Wait for a state of its readiness."""
    changed = asyncio.Event()
    stop = daemon.readiness.listen(lambda _: changed.set())
    async with asyncio.timeout(SECONDS):
        while not condition():
            await changed.wait()
            changed.clear()
    stop()


async def test_while_its_only_copier_is_down_the_daemon_is_alive_and_not_ready(short_dir: Path) -> None:
    async with running(short_dir) as (daemon, life):
        (copier,) = daemon._copiers
        first, link = copier.pid, copier._link
        assert link is not None
        async with copier._lock:  # its next process is not set up before this is over
            os.kill(first, signal.SIGKILL)
            await until(daemon, lambda: not daemon.readiness.ready)
            assert (await asyncio.to_thread(get, f"{life.http}/health"))[0] == 200
            code, ready = await asyncio.to_thread(get, f"{life.http}/ready")
            assert (code, ready["state"], ready["reason"]) == (503, "starting", "host: the copier has ended (SIGKILL)")
        await until(daemon, lambda: daemon.readiness.ready)
        assert copier.pid not in (0, first)
        assert (await asyncio.to_thread(get, f"{life.http}/ready"))[0] == 200
        assert daemon._metrics.value("kvsidecar_copier_deaths_total", device="host") == 1


async def test_a_copier_that_takes_the_place_of_another_one_takes_no_copies_before_its_self_test(
    short_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(short_dir) as (daemon, _):
        (copier,) = daemon._copiers
        first = copier.pid
        monkeypatch.setenv(failpoints.VARIABLE, "copier.self_test=raise(other bytes)")
        os.kill(first, signal.SIGKILL)
        await until(daemon, lambda: "the copier does not start: other bytes" in daemon.readiness.now.reason)
        assert not daemon.readiness.ready
        with pytest.raises(DeviceLost, match="other bytes"):
            copier.live()
        monkeypatch.delenv(failpoints.VARIABLE)
        await until(daemon, lambda: daemon.readiness.ready)
        assert copier.live().pid == copier.pid != first


async def test_a_copier_that_does_not_end_though_it_was_killed_is_said_and_ends_the_daemon(
    short_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process is in a driver that does not return: the node must be looked at."""
    exits: list[int] = []
    monkeypatch.setattr(module, "exit_at_once", exits.append)
    monkeypatch.setattr(module, "COPIER_END_SECONDS", 0.0)
    async with running(short_dir) as (daemon, life):
        (copier,) = daemon._copiers
        assert copier._link is not None
        process = copier._link._process
        kill = process.kill
        monkeypatch.setattr(process, "kill", lambda: None)
        assert (await asyncio.to_thread(get, f"{life.http}/health"))[0] == 200
        copier._link.kill("it hangs")
        code, health = await asyncio.to_thread(get, f"{life.http}/health")
        assert (code, health["alive"]) == (503, False)
        assert f"host: the copier (pid {copier.pid}) was killed and does not end" in str(health["reason"])
        pid, ended = copier.pid, copier._link.ended
    assert exits == [EXIT_COPIERS_LEFT]
    kill()
    assert "it hangs" in await ended
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_every_part_of_a_daemon_that_has_nothing_to_do_begins_again_after_an_error(short_dir: Path) -> None:
    """Only gRPC's own tasks are not the daemon's to begin again. What is spawned for a client ends with it."""
    disk = {"disk_dir": str(short_dir / "disk"), "disk_size": "1MiB"}
    async with running(short_dir, zero_freed="on", **disk):
        own = asyncio.current_task()

        def begin_again() -> bool:
            tasks = {
                each: getattr(each.get_coro(), "__qualname__", "") for each in asyncio.all_tasks() if each is not own
            }
            mine = {each.get_name() for each, what in tasks.items() if what == "TaskSet.keep.<locals>.run"}
            assert {"tick", "sweep", "zeroing", "tier-disk", "copier-host", "grpc-seconds", "socket-watch"} <= mine
            assert "Daemon.run" in tasks.values()
            rest = {each for each, what in tasks.items() if what != "Daemon.run" and not what.startswith("AioServer.")}
            return {each.get_name() for each in rest} == mine

        await eventually_in_loop(begin_again)  # some only tell of the start


async def test_an_error_that_nobody_expects_is_in_the_log_and_counted_and_the_rest_goes_on(
    short_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise ZeroDivisionError("planned")

    async with running(short_dir) as (daemon, _):
        with capture_logs() as lines:

            def said(event: str) -> list[Any]:
                return [line for line in lines if line["event"] == event]

            def counted() -> float:
                return daemon._metrics.value("kvsidecar_unexpected_errors_total")

            assert counted() == 0
            monkeypatch.setattr(daemon._lookups, "expire", fail)
            await eventually_in_loop(lambda: said("task failed"))
            checked: list[float] = []
            monkeypatch.setattr(daemon._copiers, "check", checked.append)
            await eventually_in_loop(lambda: checked)
            monkeypatch.undo()
            before = counted()
            assert before >= 1
            asyncio.get_running_loop().call_soon(fail)
            await eventually_in_loop(lambda: said("unexpected error"))
            assert counted() == before + 1
        failed, unexpected = said("task failed")[0], said("unexpected error")[0]
        assert (failed["task"], failed["log_level"]) == ("expire", "error")
        assert (unexpected["error"], "fail" in unexpected["where"]) == ("planned", True)
        assert isinstance(failed["exc_info"], ZeroDivisionError)


async def test_a_namespace_that_is_cleared_as_its_user_has_left_too_many_is_in_the_log_and_counted(
    short_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(left_spaces, "MOST_LEFT", 1)
    async with running(short_dir) as (daemon, _):
        cache = daemon._cache
        with capture_logs() as lines:
            for name in ("a", "b"):
                space = cache.open_space(namespace(name), 0, 1, 0, PAGE, 1000)
                store(cache, space, "block")
                cache.close_space(space)
            await eventually_in_loop(lambda: len(cache.spaces) == 1)
        (line,) = [line for line in lines if line["event"].startswith("a namespace without engines was cleared")]
        assert (line["model"], line["uid"], line["share"]) == ("a", 1000, "unassigned")
        assert daemon._metrics.value("kvsidecar_spaces_cleared_total") == 1
