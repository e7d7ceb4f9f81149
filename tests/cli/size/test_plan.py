"""What is advised: it fits, and what is printed is accepted by what it is for."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from kvsidecar.cli.size.kv import KV, KVGroup, KVKind, kv_of
from kvsidecar.cli.size.models import KNOWN
from kvsidecar.cli.size.plan import Demand, Machine, beside, helm, plan, size_text, systemd, toml
from kvsidecar.daemon.setting_sources import load_settings
from kvsidecar.support.memory_limits import PageKind, Pages, bookkeeping_bytes, check_fits
from kvsidecar.support.units import GiB, KiB, MiB, TiB, parse_size
from tests.support.test_memory_limits import in_pod

MACHINE = Machine(gpus=8, host_bytes=512 * GiB)


@pytest.fixture
def kv() -> KV:
    return kv_of(KNOWN["Llama-3.3-70B"], tp=8)


def test_all_sessions_fit_the_pool_that_is_wanted(kv: KV) -> None:
    found = plan(kv, Demand(context=32768, sessions=20), MACHINE)
    assert found.session_bytes == 10 * GiB
    assert found.pool_bytes == found.wanted_bytes == 207 * GiB, "with 3 % for rounding"
    assert (found.sessions_in_pool, found.sessions_kept, found.disk_bytes) == (20, 20, 0)


def test_a_shared_prefix_counts_once(kv: KV) -> None:
    found = plan(kv, Demand(context=32768, sessions=20, shared=16384), MACHINE)
    assert found.wanted_bytes == 109 * GiB  # 21 halves of 10 GiB


def test_the_pool_is_what_the_memory_has_room_for(kv: KV) -> None:
    found = plan(kv, Demand(context=32768, sessions=100), MACHINE)
    assert found.memory_bytes <= MACHINE.host_bytes
    assert found.pool_bytes + GiB + beside(found.pool_bytes + GiB, 8, huge_pages=True) > MACHINE.host_bytes
    assert found.sessions_in_pool == int(found.pool_bytes * 0.97 // (10 * GiB))
    assert found.disk_bytes == 0
    small = plan(kv, Demand(context=32768, sessions=100), Machine(8, 512 * GiB, huge_pages=False))
    assert small.pool_bytes < found.pool_bytes, "page tables of small pages take their part"


def test_the_tables_of_small_blocks_take_their_part() -> None:
    """The daemon's GiB has room for those of two million blocks, with what a restart takes beside them."""
    kv = KV((KVGroup(KVKind.FULL, layers=1, page_bytes=64 * KiB, shards=1, block_tokens=16),))
    (small, large) = (
        plan(each, Demand(context=32768, sessions=100_000), Machine(1, 2 * TiB))
        for each in (kv, KV((replace(kv.groups[0], page_bytes=MiB),)))
    )
    assert large.pool_bytes // MiB >= 2_000_000
    lacking = large.pool_bytes - small.pool_bytes
    assert lacking == pytest.approx(small.pool_bytes // (64 * KiB) * 360 - 768 * MiB, abs=2 * GiB)
    assert small.memory_bytes <= 2 * TiB


def test_a_disk_takes_what_the_pool_has_no_room_for(kv: KV) -> None:
    found = plan(kv, Demand(context=32768, sessions=100), Machine(8, 512 * GiB, disk_bytes=2 * TiB))
    assert found.disk_bytes == found.disk_wanted_bytes == 1020 * GiB
    assert found.sessions_kept == 100
    less = plan(kv, Demand(context=32768, sessions=100), Machine(8, 512 * GiB, disk_bytes=600 * GiB))
    assert (less.disk_bytes, less.sessions_kept) == (600 * GiB, 60)


def test_memory_for_less_than_a_session_is_refused(kv: KV) -> None:
    with pytest.raises(ValueError, match="one session needs a pool of 11 GiB"):
        plan(kv, Demand(context=32768, sessions=1), Machine(8, 8 * GiB))


def test_the_daemon_takes_the_largest_block(kv: KV) -> None:
    """A block's shard may take an eighth of the pool."""
    kimi = kv_of(KNOWN["Kimi-Linear-48B-A3B"])
    found = plan(kimi, Demand(context=2048, sessions=1), MACHINE)
    assert found.pool_bytes >= 8 * kimi.largest_shard


def test_pinning_takes_as_long_as_measured(kv: KV) -> None:
    found = plan(kv, Demand(32768, 20), Machine(8, 512 * GiB, pin_ms_per_gib=100.0))
    assert found.pin_seconds == (pytest.approx(20.7), pytest.approx(20.7))
    used, fresh = plan(kv, Demand(32768, 20), MACHINE).pin_seconds
    assert (round(used, 1), round(fresh, 1)) == (8.9, 59.4)


@pytest.mark.parametrize("sessions", [1, 100])
def test_the_lines_are_accepted_and_mean_the_figures(kv: KV, tmp_path: Path, sessions: int) -> None:
    found = plan(kv, Demand(32768, sessions), Machine(8, 512 * GiB, disk_bytes=2 * TiB))
    file = tmp_path / "kvsidecar.toml"
    file.write_text(toml(found))
    settings = load_settings({"config": str(file)}, environ={})
    assert settings.pool_size.nbytes == found.pool_bytes
    assert settings.disk_size == (found.disk_bytes or None)
    assert tomllib.loads(toml(found)).keys() <= {"pool_size", "disk_dir", "disk_size"}
    values = yaml.safe_load(helm(found))
    assert parse_size(values["pool"]["size"]) == found.pool_bytes
    assert parse_size(values["pool"]["memory"]) == found.memory_bytes
    assert systemd(found) == f"[Service]\nMemoryMax={found.memory_bytes // GiB}G"


def test_the_pool_fits_the_memory_limit_as_the_daemon_checks_it(kv: KV, tmp_path: Path) -> None:
    found = plan(kv, Demand(32768, 100), MACHINE)
    root = in_pod(tmp_path, found.memory_bytes)
    pages = Pages(PageKind.THP, 2 * MiB)
    check_fits(found.pool_bytes, pages=pages, bookkeeping=8 * bookkeeping_bytes(found.pool_bytes), root=root)


def test_sizes_are_written_without_loss() -> None:
    assert [size_text(GiB), size_text(1088 * MiB), size_text(2 * TiB, "i"), size_text(64 * MiB, "")] == [
        "1GiB",
        "1088MiB",
        "2048Gi",
        "64M",
    ]
