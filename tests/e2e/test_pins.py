"""`kvsidecar pin`, `pins` and `unpin`, on a daemon whose pool is flooded."""

from __future__ import annotations

from pathlib import Path

from tests.cli.test_main import run
from tests.harness import NAMESPACE, DaemonProcess, Rank, done, hashes


def test_an_operator_pins_a_prompt(daemon: DaemonProcess, tmp_path: Path) -> None:
    rank = Rank(daemon)
    done(rank.store("a", "b", "c"))
    file = tmp_path / "hashes"
    file.write_text("\n".join(each.hex() for each in hashes("a", "b", "missing")) + "\n")
    at = ("--socket", daemon.socket)
    pinned = run("pin", "prompt", "--namespace", NAMESPACE.model, "--hashes", str(file), "--seconds", "600", *at)
    assert (pinned.returncode, pinned.stdout) == (0, "2 blocks of 3 pinned, 24 KiB.\n")
    for number in range(100):
        done(rank.store(number, at=[0]))
    assert (rank.hits("a", "b"), rank.hits("c")) == (2, 0)
    shown = run("pins", *at).stdout
    assert "prompt" in shown
    assert "uid " in shown
    assert "24 KiB" in shown
    assert run("unpin", "prompt", *at).returncode == 0
    assert "there is no pin 'prompt'" in run("unpin", "prompt", *at).stderr
    assert run("pins", *at).stdout == "There are no pins.\n"
    for number in range(200, 300):
        done(rank.store(number, at=[0]))
    assert rank.hits("a") == 0
    file.write_text("xyz\n")
    refused = run("pin", "prompt", "--namespace", NAMESPACE.model, "--hashes", str(file), *at)
    assert (refused.returncode, refused.stderr) == (1, "kvsidecar: line 1 is not a hash in hexadecimal\n")
    rank.close()


def test_more_than_pin_max_is_refused(short_dir: Path, tmp_path: Path) -> None:
    with DaemonProcess(short_dir, "--pin-max", "16KiB") as daemon:
        rank = Rank(daemon.wait_ready())
        done(rank.store("a", "b"))
        file = tmp_path / "hashes"
        file.write_text("\n".join(each.hex() for each in hashes("a", "b")))
        where = ("--namespace", NAMESPACE.model, "--hashes", str(file), "--socket", daemon.socket)
        refused = run("pin", "prompt", *where)
        assert refused.returncode == 69
        assert "24 KiB more would be pinned; others have 0 B of the 16 KiB" in refused.stderr
        rank.close()
