"""Runs the demo: starts a daemon, runs engine A, kills it, runs engine B, and prints the results."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

from kvsidecar.cli.demo.shape import TP_SIZE, DemoShape, choose, pool_bytes
from kvsidecar.client import Client, DaemonUnreachable, State
from kvsidecar.device.host import HostPlatform
from kvsidecar.device.platforms import open_platform
from kvsidecar.errors import KVSidecarError
from kvsidecar.protocol.wire import STATE_FROM_WIRE
from kvsidecar.support import child_process
from kvsidecar.support.units import count, format_size

START_SECONDS = 60.0
ENGINE_SECONDS = 300.0


class DemoFailed(Exception):
    """A step of the demo failed; the text says which."""


def run(*, blocks: int, device: str, disk: bool = False) -> int:
    """Run the demo. Returns the exit code: 0 only if every byte is equal.

    Args:
        disk: engine B loads from disk, through another daemon.
    """
    console = Console()
    try:
        kind, shape = _choose(blocks, device)
        with tempfile.TemporaryDirectory(prefix="kvsidecar-demo-") as directory:
            return _run(console, kind, shape, Path(directory), disk)
    except (DemoFailed, KVSidecarError) as error:
        console.print("[bold red]The demo failed:[/]", end=" ")
        console.print(str(error), highlight=False, markup=False)
        return 1


def _choose(blocks: int, device: str) -> tuple[str, DemoShape]:
    if not 1 <= blocks <= 100_000:
        raise DemoFailed(f"--blocks {blocks} is not between 1 and 100000")
    platform, _ = open_platform(device)
    kind = platform.name
    platform.close()
    return kind, choose(blocks=blocks, cuda=kind == "cuda", lockable_bytes=HostPlatform().pin_limit())


def _run(console: Console, kind: str, shape: DemoShape, directory: Path, disk: bool) -> int:
    socket = str(directory / "kvsidecar.sock")
    where = "the GPU" if kind == "cuda" else "the host device (no GPU is used)"
    blocks, row = count(shape.num_blocks, "block"), format_size(shape.row_bytes)
    console.print(
        f"KV of {blocks}, {TP_SIZE} ranks x {shape.layers} layers x {row}, on {where}",
        highlight=False,
    )
    options = ["--pool-size", str(pool_bytes(shape))]
    if disk:
        options += ["--disk-dir", str(directory / "disk"), "--disk-size", str(pool_bytes(shape))]
        options += ["--disk-admission", "all"]
    with _daemon(console, kind, socket, options, directory / "daemon.log", disk) as (daemon, client):
        stored = _engine_a(console, kind, shape, socket)
        _wait_until_detached(client)
        console.print("[bold]engine A[/] killed with SIGKILL; the daemon has unmapped its memory and keeps its blocks")
        if disk:
            _wait_until_written(client, shape)
            console.print("[bold]the daemon[/] has written them to disk, and is killed with SIGKILL: its pool is gone")
        else:
            loaded, code = _engine_b(kind, shape, socket), _end(client, daemon)
    if disk:
        with _daemon(console, kind, socket, options, directory / "daemon-2.log", disk) as (daemon, client):
            loaded, code = _engine_b(kind, shape, socket), _end(client, daemon)
    wrong = sum(line["wrong_bytes"] for line in loaded)
    hits = min(line["hits"] for line in loaded)
    _print_table(console, kind, stored, loaded)
    if wrong or hits != shape.num_blocks or sum(line["bytes"] for line in loaded) != shape.all_bytes:
        raise DemoFailed(f"{hits} of {shape.num_blocks} blocks hit and {wrong} bytes differ")
    if code != 0:
        raise DemoFailed(f"the daemon ended with exit code {code}")
    total = format_size(shape.all_bytes)
    way = " from disk, through another daemon" if disk else ""
    console.print(f"[bold green]verified:[/] engine B loaded what engine A had stored{way}, {total}, byte for byte")
    return 0


def _end(client: Client, daemon: subprocess.Popen[bytes]) -> int:
    """Stop the daemon. Returns its exit code."""
    client.close()
    daemon.terminate()
    return daemon.wait(START_SECONDS)


@contextmanager
def _daemon(
    console: Console, kind: str, socket: str, options: list[str], log: Path, disk: bool
) -> Iterator[tuple[subprocess.Popen[bytes], Client]]:
    """A ready daemon and a client of it, until the end of the block, when the daemon is killed."""
    command = [sys.executable, "-m", "kvsidecar", "serve", "--device", kind, "--socket", socket, "--http-port", "0"]
    command += [*options, "--log-format", "json"]
    with log.open("wb") as stream:
        daemon = child_process.start(command, stderr=stream)
    try:
        with Client(socket, name="demo") as client:
            _show_pinning(console, client, daemon)
            if disk:  # what is stored before goes to no disk
                off = "the disk is not used: "
                _wait_until(lambda: (why := client.status().tiers[0].off) and off + why, START_SECONDS)
            yield daemon, client
    except (DemoFailed, KVSidecarError) as error:
        raise DemoFailed(f"{error}\nThe daemon's log:\n{log.read_text()}") from error
    finally:
        daemon.kill()
        daemon.wait()


def _show_pinning(console: Console, client: Client, daemon: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_SECONDS
    columns = (TextColumn("[bold]pinning[/] the pool"), BarColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("")
        while True:
            if daemon.poll() is not None:
                raise DemoFailed(f"the daemon ended with exit code {daemon.returncode}")
            if time.monotonic() > deadline:
                raise DemoFailed(f"the daemon was not ready after {START_SECONDS:g} s")
            try:
                readiness = client.status().readiness
            except DaemonUnreachable:
                time.sleep(0.05)  # it has not bound its socket yet
                continue
            state = STATE_FROM_WIRE[readiness.state]
            text = f"{format_size(readiness.pinned_bytes)} of {format_size(readiness.pool_bytes)}, {state}"
            progress.update(task, total=readiness.pool_bytes, completed=readiness.pinned_bytes, description=text)
            if state is State.READY:
                return
            if state is State.FAILED:
                raise DemoFailed(readiness.reason)
            time.sleep(0.02)


def engine_command(action: str, name: str, kind: str, shape: DemoShape, socket: str) -> list[str]:
    seed = random.randrange(2**32)
    config = {"name": name, "shape": asdict(shape), "socket": socket, "cuda": kind == "cuda", "seed": seed}
    return [sys.executable, "-m", "kvsidecar.cli.demo.engine", action, json.dumps(config)]


def _engine_a(console: Console, kind: str, shape: DemoShape, socket: str) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = []
    command = engine_command("store", "engine-a", kind, shape, socket)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True, close_fds=False) as engine:
        assert engine.stdout is not None
        try:
            for text in engine.stdout:
                line = json.loads(text)
                if line.get("finished"):
                    break
                if "rank" in line:
                    lines.append(line)
                    console.print(
                        f"[bold]engine A[/] rank {line['rank']} stored {count(line['blocks'], 'block')}; "
                        f"readable now: {line['hits']}",
                        highlight=False,
                    )
        finally:
            engine.send_signal(signal.SIGKILL)
    if len(lines) != TP_SIZE:
        raise DemoFailed("engine A did not finish its stores")
    return lines


def _engine_b(kind: str, shape: DemoShape, socket: str) -> list[dict[str, Any]]:
    command = engine_command("load", "engine-b", kind, shape, socket)
    try:
        engine = subprocess.run(
            command, stdout=subprocess.PIPE, text=True, timeout=ENGINE_SECONDS, check=True, close_fds=False
        )
    except subprocess.SubprocessError as error:
        raise DemoFailed(f"engine B failed: {error}") from error
    lines = [json.loads(line) for line in engine.stdout.splitlines()]
    return [line for line in lines if "rank" in line]


def _wait_until(problem: Callable[[], str], seconds: float) -> None:
    """Wait until ``problem`` returns an empty text."""
    deadline = time.monotonic() + seconds
    while found := problem():
        if time.monotonic() > deadline:
            raise DemoFailed(found)
        time.sleep(0.01)


def _wait_until_detached(client: Client) -> None:
    still = "the daemon still holds the dead engine's memory after 10 s"
    _wait_until(lambda: still if client.status().ranks else "", 10)


def _wait_until_written(client: Client, shape: DemoShape) -> None:
    def problem() -> str:
        written = client.status().tiers[0].written_bytes
        if written >= shape.all_bytes:
            return ""
        return f"the daemon has written {format_size(written)} of {format_size(shape.all_bytes)} to disk"

    _wait_until(problem, ENGINE_SECONDS)


def _print_table(console: Console, kind: str, stored: list[dict[str, Any]], loaded: list[dict[str, Any]]) -> None:
    # How fast a processor copies between its own memory says nothing of a GPU.
    rates = {"copy GB/s": "copy_seconds", "RPC GB/s": "seconds"} if kind == "cuda" else {}
    caption = "copy GB/s: DMA only. RPC GB/s: from the client's first call to its last result." if rates else None
    table = Table(title="kvsidecar demo", caption=caption)
    for column in ("engine", "rank", "job"):
        table.add_column(column)
    for column in ("blocks", "bytes", *rates, "hits", "wrong bytes"):
        table.add_column(column, justify="right")
    for engine, job, lines in (("A", "store", stored), ("B", "load", loaded)):
        for line in lines:
            wrong = line.get("wrong_bytes")
            table.add_row(
                engine,
                str(line["rank"]),
                job,
                str(line["blocks"]),
                format_size(line["bytes"]),
                *(f"{line['bytes'] / line[seconds] / 1e9:.1f}" for seconds in rates.values()),
                str(line["hits"]) if job == "load" else "-",
                "-" if wrong is None else str(wrong),
            )
    console.print(table)
