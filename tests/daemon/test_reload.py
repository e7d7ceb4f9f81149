from __future__ import annotations

from pathlib import Path

import pytest

from kvsidecar.daemon.daemon import Daemon
from kvsidecar.daemon.lifecycle import Lifecycle
from kvsidecar.daemon.reload import RELOADABLE, Reloader, change
from kvsidecar.daemon.setting_sources import load_settings
from kvsidecar.daemon.settings import Settings
from kvsidecar.daemon.systemd import Notifier, NotifySocket
from kvsidecar.device.host import HostPlatform
from kvsidecar.pool.host_pool import HostPool, PoolSpec
from kvsidecar.support.cpu_sleep import SleepGuard
from kvsidecar.support.units import MiB
from kvsidecar.types import Direction
from tests.copiers import NoProcessCopiers


def read(file: Path, text: str, **flags: str) -> Settings:
    file.write_text(text)
    return load_settings({"config": str(file), **flags}, {})


def test_what_can_be_reloaded_is_an_option() -> None:
    assert set(Settings.model_fields) >= RELOADABLE


def test_what_can_be_taken_is_taken_and_the_rest_named(tmp_path: Path) -> None:
    file = tmp_path / "kvsidecar.toml"
    before = read(file, 'pool_size = "1GiB"')
    after = read(file, 'pool_size = "2GiB"\nlog_level = "debug"\nstore_chunk = "8MiB"\nhttp_port = 0')
    result = change(before, after)
    assert set(result.taken) == {"log_level", "store_chunk"}
    assert set(result.left) == {"pool_size", "http_port"}
    assert result.settings.log_level == "debug"
    assert result.settings.store_chunk == 8 * MiB
    assert (result.settings.pool_size, result.settings.http_port) == (before.pool_size, before.http_port)


def test_a_flag_still_wins_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "kvsidecar.toml"
    before = read(file, "", log_level="warning")
    assert change(before, read(file, 'log_level = "debug"', log_level="warning")).taken == ()


async def test_what_needs_a_restart_is_named_at_every_reload_until_it_is_done(tmp_path: Path) -> None:
    file = tmp_path / "kvsidecar.toml"
    before = read(file, 'pool_size = "1GiB"')
    file.write_text('pool_size = "2GiB"\nstuck_after = 5')
    applied: list[Settings] = []
    reloader = Reloader(before, lambda: load_settings({"config": str(file)}, {}), applied.append)
    for _ in range(2):
        assert await reloader.reload() == "settings reloaded; a restart is needed for pool_size"
    assert [settings.stuck_after for settings in applied] == [5, 5]
    assert applied[-1].pool_size == before.pool_size


@pytest.mark.parametrize("mistake", ["log_level = 5", "log_levl = 'info'", "log_level =", None])
async def test_a_file_with_a_mistake_changes_nothing(tmp_path: Path, mistake: str | None) -> None:
    file = tmp_path / "kvsidecar.toml"
    before = read(file, "")
    applied: list[Settings] = []
    reloader = Reloader(before, lambda: load_settings({"config": str(file)}, {}), applied.append)
    if mistake is None:
        file.unlink()
    else:
        file.write_text(mistake)
    assert (await reloader.reload()).startswith("settings not reloaded: ")
    assert applied == []
    file.write_text('log_level = "debug"')
    assert await reloader.reload() == "settings reloaded"
    assert applied[0].log_level == "debug"


async def test_the_daemon_hands_the_store_chunk_to_the_copiers(
    short_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    levels: list[str] = []
    monkeypatch.setattr("kvsidecar.support.log.configure", lambda *, log_format, level: levels.append(level))
    flags = {"socket": str(short_dir / "kvs.sock"), "pool_size": "1MiB", "device": "host"}
    settings = load_settings(flags, {}, default_file=Path("/nowhere"))
    pool = HostPool(PoolSpec(nbytes=MiB, slab_bytes=MiB, chunk_bytes=MiB), HostPlatform())
    life = Lifecycle(settings, MiB, notifier=Notifier(NotifySocket(None), None))
    copiers = NoProcessCopiers(store_chunk=settings.store_chunk)
    daemon = Daemon(settings, copiers, pool, MiB, life=life, guard=SleepGuard(0.0))
    copiers.pacing.set_busy(frozenset({"host"}))
    assert copiers.pacing.of("host", Direction.STORE) == 4 * MiB
    daemon._apply(settings.model_copy(update={"store_chunk": 8 * MiB, "log_level": "error"}))
    assert copiers.pacing.of("host", Direction.STORE) == 8 * MiB
    assert levels == ["error"]
    pool.close()
    daemon._guard.close()
