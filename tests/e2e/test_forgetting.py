"""`kvsidecar clear` by share, by hash and by time."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from tests.cli.command import run
from tests.harness import NAMESPACE, DaemonProcess, Rank, done, eventually, hashes

OTHER = dataclasses.replace(NAMESPACE, model="other/model")


def test_an_operator_clears_a_share_some_blocks_or_what_is_not_used(short_dir: Path, tmp_path: Path) -> None:
    shares = f"[{{name='mine', namespaces=['{NAMESPACE.model}']}}]"
    with DaemonProcess(short_dir, "--share", shares) as daemon:
        daemon.wait_ready()
        rank, other = Rank(daemon), Rank(daemon, namespace=OTHER)
        at = ("--socket", daemon.socket)
        done(rank.store("a", "b", "c"))
        done(other.store("a"))
        file = tmp_path / "hashes"
        file.write_text(hashes("b")[0].hex())
        cleared = run("clear", "--namespace", NAMESPACE.model, "--hashes", str(file), *at)
        assert (cleared.returncode, cleared.stdout) == (0, "1 block cleared.\n")
        assert (rank.hits("a"), rank.hits("b"), rank.hits("c")) == (1, 0, 1)
        assert run("clear", "--share", "mine", *at).stdout == "2 blocks cleared.\n"
        assert (rank.hits("a"), other.hits("a")) == (0, 1)
        assert "there is no share 'yours'" in run("clear", "--share", "yours", *at).stderr
        eventually(lambda: run("clear", "--all", "--yes", "--unused", "1", *at).stdout == "1 block cleared.\n")
        assert other.hits("a") == 0
        for wrong in (("--all", "--share", "mine"), ("--all", "--hashes", str(file)), ()):
            assert run("clear", *wrong, *at).returncode == 2
        rank.close()
        other.close()
