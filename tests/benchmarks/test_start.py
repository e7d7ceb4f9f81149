from __future__ import annotations

from pathlib import Path

from benchmarks.start import HERE, start


def test_a_start_is_measured_to_its_first_answer_and_until_it_is_ready(tmp_path: Path) -> None:
    found = start(HERE, tmp_path)
    assert 0 < found.health_cpu < found.ready_cpu
    assert 0 < found.health_wall < found.ready_wall
    assert any(tmp_path.rglob("daemon.*.pyc")), "what is measured shall not be compiling"
