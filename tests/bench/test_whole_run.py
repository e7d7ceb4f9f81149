"""`kvsidecar bench` on the host device, as a person runs it: one real run, and what it leaves."""

from __future__ import annotations

import json
import os
import re
import signal
import tempfile
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from kvsidecar.bench.layouts import ALL_LAYOUTS, BLOCK_COUNTS, IN_FLIGHT, LAYOUTS
from kvsidecar.bench.options import MEASUREMENTS
from kvsidecar.bench.setting import HOST_POOL_QUICK
from kvsidecar.support.memory_limits import memlock_limit
from kvsidecar.support.units import MiB
from tests.bench import support
from tests.harness import DaemonProcess
from tests.marks import processes
from tests.once import made_once

pytestmark = pytest.mark.timeout(300)


@dataclass
class Ran:
    text: str
    progress: str
    code: int
    json: dict[str, Any]
    left: list[str]
    """Its processes and files that are still there after its end."""

    def rows(self, name: str) -> list[dict[str, Any]]:
        return self.json["measurements"][name]["rows"]  # type: ignore[no-any-return]


def skip_where_little_may_be_locked() -> None:
    """Also an ordinary user has figures, but not all of them."""
    limit = memlock_limit()
    if limit is not None and limit < (needed := HOST_POOL_QUICK * 4 // 3):
        pytest.skip(f"this user may lock {limit // MiB} MiB (ulimit -l), and all measurements need {needed // MiB}")


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    skip_where_little_may_be_locked()
    return Ran(**json.loads((made_once(tmp_path_factory, "bench", run) / "ran.json").read_text()))


def run(directory: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="kvs-") as short:
        temporary = Path(short)
        file = directory / "result.json"
        done = support.run("--device", "host", "--quick", "--json", str(file), temporary=temporary)
        content = json.loads(file.read_text()) if file.exists() else {}
        left = [*support.processes_of(temporary), *(path.name for path in temporary.iterdir())]
    ran = Ran(done.stdout, done.stderr, done.returncode, content, left)
    (directory / "ran.json").write_text(json.dumps(asdict(ran)))


@processes
def test_every_measurement_has_run(ran: Ran) -> None:
    assert ran.code == 0, ran.progress
    statuses = [(name, each["status"]) for name, each in ran.json["measurements"].items()]
    assert statuses == [(name, "ok") for name in MEASUREMENTS]


@processes
def test_the_json_says_what_it_depends_on(ran: Ran) -> None:
    assert ran.json["schema"] == 1
    assert ran.json["device"] == "host"
    assert ran.json["machine"]["cores"] == len(os.sched_getaffinity(0))
    assert ran.json["options"]["quick"] is True
    assert ran.json["options"]["seed"] == 0


@processes
def test_every_layout_is_compared_byte_for_byte(ran: Ran) -> None:
    assert [row["layout"] for row in ran.rows("verify")] == [layout.name for layout in LAYOUTS]
    assert all(row["wrong_blocks"] == 0 and row["blocks"] == 512 for row in ran.rows("verify"))


@processes
def test_bandwidth_has_every_cell(ran: Ran) -> None:
    cells = [
        (row["layout"], row["direction"], row["blocks"], row["in_flight"])
        for row in ran.rows("bandwidth")
        if row["mode"] == "unpaced" and row["direction"] != "both"
    ]
    names = [layout.name for layout in LAYOUTS]
    assert sorted(cells) == sorted(product(names, ("store", "load"), BLOCK_COUNTS, IN_FLIGHT))
    assert [row["layout"] for row in ran.rows("bandwidth") if row["direction"] == "both"] == names
    assert all(row["gbps"] > 0 and row["jobs"] > 0 for row in ran.rows("bandwidth"))


@processes
def test_latencies_have_every_size(ran: Ran) -> None:
    lookups = {(row["hashes"], row["hits"], row["lease"], row["mode"]) for row in ran.rows("lookup")}
    hits = {(count, count, lease, "prefix") for count in (1, 8, 64, 512) for lease in (False, True)}
    assert lookups == hits | {(4096, 0, False, "prefix"), (4096, 0, False, "bitmap")}
    submits = [(row["call"], row["blocks"]) for row in ran.rows("submit")]
    assert submits == [("store", 1), ("load", 1), ("store", 512), ("load", 512), ("poll", 0)]
    assert all(0 < row["p50_us"] <= row["p99_us"] <= row["max_us"] for row in ran.rows("lookup"))


@processes
def test_ranks_do_jobs_and_traffic_flows_while_tokens_are_copied(ran: Ran) -> None:
    rates = {(row["ranks"], row["copiers"], row["direction"]): row["jobs_per_second"] for row in ran.rows("jobs")}
    ranks = [(1, 1), (2, 1), (4, 1), (8, 1), (8, 8)]
    assert set(rates) == {(*each, direction) for each in ranks for direction in ("store", "load")}
    assert all(rate > 0 for rate in rates.values())
    token = {row["traffic"]: row for row in ran.rows("token") if row["mode"] != "paced"}
    assert set(token) == {"none", "store", "load", "store+load"}
    for traffic, row in token.items():
        assert (row["store_gbps"] > 0, row["load_gbps"] > 0) == ("store" in traffic, "load" in traffic)


@processes
def test_devices_are_measured_one_after_another(ran: Ran) -> None:
    rows = list(ran.rows("scaling"))
    cells = list(product(("stacked-64k", "tp8-4k"), (256, 32), (1, 2)))
    assert [(row["layout"], row["blocks"], row["devices"]) for row in rows] == [
        ("bulk copies", 0, 1), ("bulk copies", 0, 2), *cells,
    ]  # fmt: skip
    assert all(row["gbps"] > 0 for row in rows)
    for row in rows[2:]:
        assert row["store_gbps"] >= 0
        assert row["lookup_us"] > 0
        assert row["lookup_idle_us"] > 0
        assert row["daemon_cores"] > 0
        assert row["copier_cores"] > 0


@processes
def test_pinning_is_timed_and_an_engine_steps_meanwhile(ran: Ran) -> None:
    phases = {row["phase"]: row for row in ran.rows("pin")}
    assert {"idle", "daemon starts, its context", "daemon pins", "pool"} <= set(phases)
    assert phases["pool"]["pool_bytes"] == 32 << 20
    assert phases["pool"]["pin_seconds"] > 0


@processes
def test_tables_show_every_layout(ran: Ran) -> None:
    for layout in LAYOUTS:
        assert ran.text.count(layout.name) >= 4
    for title in ("Bulk limit", "GB/s of a store", "GB/s of a load", "Both directions", "Lookups", "One-block jobs"):
        assert title in ran.text


@processes
def test_progress_is_on_standard_error(ran: Ran) -> None:
    lines = ran.progress.splitlines()
    assert lines[0].startswith(f"measuring {', '.join(MEASUREMENTS)} on the host device, about ")
    assert [line.partition(":")[0] for line in lines if ": ok, " in line] == list(ran.json["measurements"])


@processes
def test_progress_tells_each_step(ran: Ran) -> None:
    for number, (name, what) in enumerate(MEASUREMENTS.items(), 1):
        assert f"{name}: {number} of {len(MEASUREMENTS)}, {what}" in ran.progress


@processes
def test_nothing_is_left_behind(ran: Ran) -> None:
    assert ran.left == []


@processes
def test_ctrl_c_reports_what_there_is_and_leaves_nothing_behind(short_dir: Path) -> None:
    file = short_dir / "result.json"
    temporary = short_dir / "t"
    temporary.mkdir()
    bench = support.start(
        "--device", "host", "--quick", "--only", "limit,bandwidth,jobs", "--json", str(file), temporary=temporary
    )  # fmt: skip
    support.wait_line(bench, "limit: ok")
    while not support.processes_of(temporary):
        assert bench.poll() is None
    bench.send_signal(signal.SIGINT)
    done = support.finish(bench)
    assert done.returncode == 130
    assert "bandwidth: interrupted" in done.stdout
    measured = json.loads(file.read_text())["measurements"]
    assert {name: each["status"] for name, each in measured.items()} == {"limit": "ok", "bandwidth": "interrupted"}
    assert len(measured["limit"]["rows"]) == 3
    assert support.processes_of(temporary) == []
    assert list(temporary.iterdir()) == []


@processes
def test_a_killed_bench_takes_its_daemon_and_its_ranks_with_it_and_leaves_what_it_had_measured(short_dir: Path) -> None:
    file = short_dir / "result.json"
    bench = support.start("--device", "host", "--quick", "--only", "jobs", "--json", str(file), temporary=short_dir)
    support.wait_line(bench, "limit: ok")
    while len(support.processes_of(short_dir)) < 9:  # a daemon and eight ranks
        assert bench.poll() is None
    bench.kill()
    support.finish(bench)
    support.wait_gone(short_dir)
    assert json.loads(file.read_text())["measurements"]["limit"]["status"] == "ok"


@processes
def test_a_running_daemon_is_measured_and_left_as_it_was(short_dir: Path) -> None:
    with DaemonProcess(short_dir, "--pool-size", "16MiB") as daemon:
        daemon.wait_ready()
        done = support.run("--socket", daemon.socket, "--quick", "--only", "verify,lookup,pin", "--json", "-")
        assert done.returncode == 0, done.stderr
        measured = json.loads(done.stdout)["measurements"]
        assert measured["verify"]["status"] == "ok"
        assert len(measured["lookup"]["rows"]) == 10
        assert measured["pin"]["status"] == "skipped"
        assert "--socket" in measured["pin"]["reason"]
        with daemon.client() as client:
            status = client.status()
        assert not status.ranks
        assert status.pool.blocks == 0
        assert daemon.process.poll() is None


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--only", "bandwith"), "did you mean bandwidth?"),
        (("--only", ","), "--only names no measurement"),
        (("--pool-size", "lots"), "--pool-size='lots' is not a size"),
        (("--pool-size", "1MiB"), "--pool-size='1MiB' is less than 4 MiB"),
        (("--pin-size", "-1"), "--pin-size='-1' is not a size"),
        (("--repeat", "0"), "--repeat=0 is not between 1 and 1000"),
        (("--socket", "/tmp/none.sock", "--pool-size", "1GiB"), "--pool-size is for a daemon"),
        (("--socket", "/tmp/none.sock", "--", "--verify", "always"), "leave out --socket"),
        (("--json", "/no/such/directory/out.json"), "--json='/no/such/directory/out.json'"),
    ],
)
@processes
def test_a_bad_option_is_one_sentence(arguments: tuple[str, ...], sentence: str) -> None:
    refused = support.run("--device", "host", *arguments)
    assert refused.returncode == 78, refused.stderr
    assert sentence in refused.stderr
    assert refused.stderr.count("\n") == 1
    assert refused.stderr.startswith("kvsidecar: ")


@processes
def test_no_daemon_at_the_socket_is_one_sentence(short_dir: Path) -> None:
    refused = support.run("--socket", str(short_dir / "none.sock"))
    assert refused.returncode == 69
    assert refused.stderr.count("\n") == 1
    assert "no kvsidecar answers" in refused.stderr


@processes
def test_a_gpu_that_is_not_there_is_one_sentence() -> None:
    if Path("/dev/nvidiactl").exists():
        pytest.skip("this machine has a GPU")
    refused = support.run("--device", "cuda")
    assert refused.returncode == 69
    assert refused.stderr.count("\n") == 1
    assert "no CUDA driver" in refused.stderr


@processes
def test_a_daemon_that_does_not_start_fails_its_measurements_with_its_own_words(short_dir: Path) -> None:
    done = support.run(
        "--device", "host", "--quick", "--only", "lookup", "--json", "-", "--", "--huge-pages", "giant",
        temporary=short_dir,
    )  # fmt: skip
    assert done.returncode == 1
    measured = json.loads(done.stdout)["measurements"]
    assert measured["limit"]["status"] == "ok"
    assert measured["lookup"]["status"] == "failed"
    assert "--huge-pages='giant'" in measured["lookup"]["reason"]


@processes
def test_list_names_every_measurement_and_layout() -> None:
    measurements, layouts = support.run("--list").stdout.split("\n\nlayouts (* in the default run):\n")
    assert [line.split()[0] for line in measurements.splitlines()] == list(MEASUREMENTS)
    names = [line.split()[:2] for line in layouts.splitlines()]
    assert [second if first == "*" else first for first, second in names] == [each.name for each in ALL_LAYOUTS]
    assert [second for first, second in names if first == "*"] == [each.name for each in LAYOUTS]


@processes
def test_the_layouts_that_are_named_are_measured() -> None:
    skip_where_little_may_be_locked()
    ran = support.run("--device", "host", "--quick", "--only", "verify,scaling", "--layouts", "physical-4k,separate-8k")
    assert ran.returncode == 0, ran.stderr
    assert re.search("^physical-4k .* 512 ", ran.stdout, re.MULTILINE), "verified"
    assert re.search("^physical-4k +256 +2 ", ran.stdout, re.MULTILINE), "on two devices"
    assert "stacked-64k" not in ran.stdout
    refused = support.run("--layouts", "physical-3k")
    assert (refused.returncode, "did you mean physical-" in refused.stderr) == (78, True)
