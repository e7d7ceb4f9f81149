"""`kvsidecar pin`, `pins` and `unpin`, on a daemon whose pool is flooded; `clear` by share, by hash and by time."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from tests.cli.command import hold_blocks, run, seconds_left
from tests.e2e.restarts import CHUNKS
from tests.harness import NAMESPACE, SECONDS, DaemonProcess, Rank, done, eventually, hashes, layout
from tests.marks import promise


@promise("a named set of blocks that an operator keeps in the pool")
def test_an_operator_holds_a_prompt(daemon: DaemonProcess, tmp_path: Path) -> None:
    rank = Rank(daemon)
    done(rank.store("a", "b", "c"))
    file = tmp_path / "hashes"
    file.write_text("\n".join(each.hex() for each in hashes("a", "b", "missing")) + "\n")
    at = ("--socket", daemon.socket)
    held = run("pin", "prompt", "--namespace", NAMESPACE.model, "--hashes", str(file), "--seconds", "600", *at)
    assert (held.returncode, held.stdout) == (0, "2 blocks of 3 pinned, 24 KiB.\n")
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
        assert "24 KiB more would be pinned; other pins have 0 B of the 16 KiB" in refused.stderr
        rank.close()


def test_holds_outlive_kills_and_stops_with_the_cache(short_dir: Path, pool_dir: Path, tmp_path: Path) -> None:
    flags = ("--pool-dir", str(pool_dir))
    with DaemonProcess(short_dir, *flags) as daemon:
        rank = Rank(daemon.wait_ready())
        done(rank.store("a", "b", "c"))
        hold_blocks(daemon, tmp_path / "hashes", "prompt", "a", "b")
        hold_blocks(daemon, tmp_path / "hashes", "other", "c")
        assert run("unpin", "other", "--socket", daemon.socket).returncode == 0
        first = seconds_left(daemon)["prompt"]
        rank.close()
        daemon.process.kill()
        daemon.process.wait(SECONDS)
    for stop in (True, False):
        with DaemonProcess(short_dir, *flags) as daemon:
            rank = Rank(daemon.wait_ready())
            shown = run("pins", "--socket", daemon.socket).stdout
            assert "prompt" in shown
            assert "other" not in shown
            assert "24 KiB" in shown
            left = seconds_left(daemon)["prompt"]
            assert 0 < left < first, "a restart has lengthened it"
            first = left
            (line,) = [line for line in daemon.log if line["event"] == "pins of an earlier daemon"]
            assert (line["kept"], line["lost"]) == (["prompt"], {})
            for number in range(100):
                done(rank.store(number, at=[0]))
            assert (rank.hits("a", "b"), rank.hits("c")) == (2, 0)
            done(rank.load("a", "b", at=[1, 2]))
            assert rank.holds(1, "a")
            assert rank.holds(2, "b")
            rank.close()
            if stop:
                assert daemon.terminate() == 0
            else:
                daemon.process.kill()
                daemon.process.wait(SECONDS)
    with DaemonProcess(short_dir, *flags, "--cold-start", "on") as daemon:
        daemon.wait_ready()
        assert seconds_left(daemon) == {}


def test_holds_of_the_whole_pool_do_not_keep_a_daemon_from_starting(
    short_dir: Path, pool_dir: Path, tmp_path: Path
) -> None:
    """The self-test needs a place, in which no kept block lies."""
    flags = ("--pool-dir", str(pool_dir), "--pin-max", "100%")
    names = [f"{number}" for number in range(85)]
    with DaemonProcess(short_dir, *flags) as daemon:
        rank = Rank(daemon.wait_ready(), groups=layout(num_blocks=100))
        done(rank.store(*names))
        hold_blocks(daemon, tmp_path / "hashes", "large", *names[:80])
        hold_blocks(daemon, tmp_path / "hashes", "small", *names[80:])
        rank.close()
        daemon.process.kill()
        daemon.process.wait(SECONDS)
    with DaemonProcess(short_dir, *flags) as daemon:
        line = daemon.wait_log("a pin was ended: pins held the whole pool, and the self-test needs a slot")
        assert line["pin"] == "small"
        rank = Rank(daemon.wait_ready(), groups=layout(num_blocks=100))
        assert set(seconds_left(daemon)) == {"large"}
        assert rank.hits(*names[:80]) == 80
        done(rank.load(*names[:80], at=list(range(80))))
        assert all(rank.holds(block_id, name) for block_id, name in enumerate(names[:80]))
        rank.close()


def test_a_chunk_full_of_held_blocks_is_served_behind_the_next_one(
    short_dir: Path, pool_dir: Path, tmp_path: Path
) -> None:
    flags = (*CHUNKS, "--pool-dir", str(pool_dir), "--pin-max", "100%")
    names = [f"{number}" for number in range(15)]
    with DaemonProcess(short_dir, *flags) as daemon:
        rank = Rank(daemon.wait_ready(), groups=layout(num_blocks=100))
        done(rank.store(*names))
        hold_blocks(daemon, tmp_path / "hashes", "prompt", *names)
        rank.close()
        daemon.process.kill()
        daemon.process.wait(SECONDS)
    with DaemonProcess(short_dir, *flags) as daemon:
        rank = Rank(daemon.wait_ready(), groups=layout(num_blocks=100))
        assert set(seconds_left(daemon)) == {"prompt"}
        done(rank.load(*names, at=list(range(15))))
        assert all(rank.holds(block_id, name) for block_id, name in enumerate(names))
        rank.close()


@promise("For KV that must not be reused")
def test_an_operator_clears_a_share_some_blocks_or_what_is_not_used(short_dir: Path, tmp_path: Path) -> None:
    shares = f"[{{name='mine', namespaces=['{NAMESPACE.model}']}}]"
    with DaemonProcess(short_dir, "--share", shares) as daemon:
        daemon.wait_ready()
        rank, other = Rank(daemon), Rank(daemon, namespace=dataclasses.replace(NAMESPACE, model="other/model"))
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
        for wrong in (
            ("--all", "--share", "mine"),
            ("--all", "--hashes", str(file)),
            ("--all", "--namespace", "m"),
            (),
        ):
            assert run("clear", *wrong, *at).returncode == 2
        rank.close()
        other.close()
