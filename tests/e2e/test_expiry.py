"""Blocks that expire, by their share or by the request that stored them, also across a restart."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from kvsidecar.client import Blocks
from tests.harness import NAMESPACE, DaemonProcess, Rank, done, eventually, hashes

SECRET = dataclasses.replace(NAMESPACE, model="secret/llama")
SHARES = """
[[share]]
name = "secret"
namespaces = ["secret/*"]
ttl = 2
"""


def test_blocks_expire_and_a_restart_does_not_give_them_more_time(short_dir: Path, pool_dir: Path) -> None:
    file = short_dir / "kvsidecar.toml"
    file.write_text(SHARES)
    flags = ("--config", str(file), "--pool-dir", str(pool_dir))
    with DaemonProcess(short_dir, *flags) as daemon:
        daemon.wait_ready()
        rank, secret = Rank(daemon), Rank(daemon, namespace=SECRET)
        done(secret.store("a"))
        done(rank.store("kept", at=[0]))
        job = rank.client.store([Blocks(0, hashes("short"), [0])], ttl=1.5)
        done(rank.finish(job))
        eventually(lambda: not secret.hits("a"))
        eventually(lambda: not rank.hits("short"))
        eventually(lambda: daemon.metric("kvsidecar_expired_blocks_total") == 2)
        assert rank.hits("kept") == 1
        done(secret.store("b"))
        daemon.process.kill()
        daemon.process.wait()
    with DaemonProcess(short_dir, *flags) as daemon:
        daemon.wait_ready()
        rank, secret = Rank(daemon), Rank(daemon, namespace=SECRET)
        eventually(lambda: not secret.hits("b"))
        assert rank.hits("kept") == 1
