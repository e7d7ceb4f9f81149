"""What is read of this machine's processes."""

from __future__ import annotations

import subprocess
import sys

import pytest

from kvsidecar.bench.machine import children_of
from tests.marks import processes

THREADS_END = """
import subprocess, sys, threading
child = subprocess.Popen(["sleep", "infinity"])
print(child.pid, flush=True)
def end_threads():
    while True:
        threads = [threading.Thread(target=int) for _ in range(8)]
        for each in threads: each.start()
        for each in threads: each.join()
threading.Thread(target=end_threads, daemon=True).start()
sys.stdin.read()
child.kill()
"""


@processes
@pytest.mark.processes
def test_a_child_is_found_while_threads_of_its_parent_end() -> None:
    with subprocess.Popen([sys.executable, "-c", THREADS_END], stdin=-1, stdout=-1, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            child = int(process.stdout.readline())
            assert all(children_of(process.pid) == [child] for _ in range(2000))
        finally:
            process.stdin.close()
    with pytest.raises(FileNotFoundError):
        children_of(process.pid)
