from __future__ import annotations

import io

from kvsidecar.cli.size.progress import EVERY_SECONDS, Progress


def test_only_what_takes_long_is_said_and_not_too_often() -> None:
    out, now = io.StringIO(), [0.0]
    progress = Progress(out, lambda: now[0])
    progress.read("a.log", 64)
    assert out.getvalue() == ""
    now[0] = EVERY_SECONDS
    progress.read("a.log", 63)
    progress.read("a.log", 128)
    progress.read("a.log", 192)
    now[0] *= 2
    progress.replayed("lru", 1, 4)
    assert out.getvalue() == "5 s: a.log, 128 lines read\n10 s: lru, 25% of the requests replayed\n"
