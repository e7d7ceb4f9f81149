"""Two tenants and one pool: what is guaranteed stays, what is borrowed comes back, across a reload and a restart."""

from __future__ import annotations

import dataclasses
import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.command import run
from tests.harness import NAMESPACE, DaemonProcess, Rank, done, eventually, hashes, layout
from tests.marks import promise

CHAT = dataclasses.replace(NAMESPACE, model="chat/llama")
BATCH = dataclasses.replace(NAMESPACE, model="batch/llama")
SHARES = """
[[share]]
name = "chat"
namespaces = ["chat/*"]
guaranteed = "50%"

[[share]]
name = "batch"
namespaces = ["batch/*"]
guaranteed = "10%"
max = "{max}"
"""
WIDE = layout(num_blocks=100)
POOL = 1 << 20
"""85 slots."""


@pytest.fixture
def file(short_dir: Path) -> Path:
    path = short_dir / "kvsidecar.toml"
    path.write_text(SHARES.format(max="90%"))
    return path


@pytest.fixture
def shared(short_dir: Path, file: Path, pool_dir: Path) -> Iterator[DaemonProcess]:
    with DaemonProcess(short_dir, "--config", str(file), "--pool-dir", str(pool_dir)) as daemon:
        yield daemon.wait_ready()


def used(daemon: DaemonProcess, share: str) -> float:
    return daemon.metric(f'kvsidecar_share_used_bytes{{share="{share}"}}')


def fill(rank: Rank, name: str, count: int = 85) -> None:
    for number in range(count):
        rank.store(f"{name}{number}", at=[0])


@promise("guaranteed and maximum shares of the pool")
def test_two_tenants_of_one_pool(shared: DaemonProcess, file: Path) -> None:
    batch = Rank(shared, namespace=BATCH, groups=WIDE)
    chat = Rank(shared, namespace=CHAT, groups=WIDE)
    fill(batch, "b")
    assert POOL * 0.8 < used(shared, "batch") <= POOL * 0.9
    fill(chat, "c", 40)
    assert chat.hits(*(f"c{number}" for number in range(40))) == 40
    fill(batch, "d")
    assert chat.hits(*(f"c{number}" for number in range(40))) == 40, "what is guaranteed to chat was evicted"
    refused = batch.store(*map(str, range(80)), at=list(range(80)))
    assert refused.reason == "quota"
    assert shared.refused("quota") >= 1
    done(chat.load(*(f"c{number}" for number in range(40)), at=list(range(40))))
    table = run("status", "--socket", shared.socket).stdout
    assert "Shares" in table
    rows = {
        each["name"]: each for each in json.loads(run("status", "--socket", shared.socket, "--json").stdout)["shares"]
    }
    assert rows.keys() == {"chat", "batch", "unassigned"}
    assert rows["chat"]["guaranteed_bytes"] == POOL // 2
    assert rows["batch"]["max_bytes"] == int(POOL * 0.9)

    file.write_text(SHARES.format(max="20%"))
    shared.process.send_signal(signal.SIGHUP)
    shared.wait_log("settings reloaded")
    eventually(lambda: used(shared, "batch") <= POOL * 0.2)
    done(batch.store("e", at=[0]))
    assert used(shared, "batch") <= POOL * 0.2
    file.write_text(SHARES.format(max="20%").replace("50%", "95%"))
    shared.process.send_signal(signal.SIGHUP)
    assert "guaranteed 1.05 MiB together" in shared.wait_log("settings not reloaded")["reason"]
    done(batch.store("f", at=[0]))
    chat.close()
    batch.close()


def test_a_greedy_lease_does_not_keep_a_guarantee_from_its_owner(shared: DaemonProcess) -> None:
    batch = Rank(shared, namespace=BATCH, groups=WIDE)
    fill(batch, "b", 70)
    names = hashes(*(f"b{number}" for number in range(20, 70)))
    answer = batch.client.lookup(BATCH, {0: names}, lease_seconds=30.0)
    assert (answer.groups[0].hits, answer.lease) == (50, None)
    assert shared.refused("quota") == 1
    batch.close()


def test_after_a_restart_the_bytes_are_those_of_the_same_share(
    shared: DaemonProcess, short_dir: Path, file: Path, pool_dir: Path
) -> None:
    batch, chat = Rank(shared, namespace=BATCH, groups=WIDE), Rank(shared, namespace=CHAT, groups=WIDE)
    fill(batch, "b", 30)
    fill(chat, "c", 20)
    before = (used(shared, "batch"), used(shared, "chat"))
    shared.process.kill()
    shared.process.wait()
    with DaemonProcess(short_dir, "--config", str(file), "--pool-dir", str(pool_dir)) as again:
        again.wait_ready()
        assert (used(again, "batch"), used(again, "chat")) == before
        fill(Rank(again, namespace=BATCH, groups=WIDE), "d")
        chat = Rank(again, namespace=CHAT, groups=WIDE)
        assert chat.hits(*(f"c{number}" for number in range(20))) == 20
