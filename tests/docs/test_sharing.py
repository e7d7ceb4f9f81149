"""The worked example of docs/sharing.md, hour by hour."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from tests.cli.command import run
from tests.docs.pages import fences, text
from tests.harness import NAMESPACE, DaemonProcess, Rank, layout

PAGE = "docs/sharing.md"
WIDE = layout(num_blocks=100)
ONE = 0.02
"""Of the pool: more than a block has."""


def hours() -> list[tuple[str, float, float]]:
    """Hour, part of the pool that each team has, as the page says."""
    rows = re.findall(r"^\| (night|morning|noon|evening) \|.*\| (\d+) % \| (\d+) % \|$", text(PAGE), re.MULTILINE)
    return [(hour, int(chat) / 100, int(batch) / 100) for hour, chat, batch in rows]


def test_the_two_teams_have_what_the_page_says_at_each_hour(short_dir: Path) -> None:
    (shares,) = fences(PAGE, "toml")
    file = short_dir / "kvsidecar.toml"
    file.write_text(shares)
    with DaemonProcess(short_dir, "--config", str(file), "--pool-size", "1MiB") as daemon:
        daemon.wait_ready()
        ranks = {
            name: Rank(daemon, namespace=dataclasses.replace(NAMESPACE, model=f"{name}/llama"), groups=WIDE)
            for name in ("chat", "batch")
        }
        serial = 0

        def store(team: str, blocks: int) -> None:
            nonlocal serial
            for _ in range(blocks):
                serial += 1
                ranks[team].store(serial, at=[0])

        def has(team: str) -> float:
            return daemon.metric(f'kvsidecar_share_used_bytes{{share="{team}"}}') / (1 << 20)

        assert [hour for hour, _, _ in hours()] == ["night", "morning", "noon", "evening"]
        for hour, chat, batch in hours():
            store("chat" if hour in ("morning", "noon") else "batch", 51 if hour == "morning" else 100)
            # Evictions are a little ahead of the need, and a block more or less lies on each border.
            assert abs(has("chat") - chat) <= 3 * ONE, f"{hour}: chat has {has('chat')}"
            assert abs(has("batch") - batch) <= 3 * ONE, f"{hour}: batch has {has('batch')}"
            assert has("chat") >= 0.6 - ONE or hour == "night", "less than what is guaranteed"
        shown = run("status", "--socket", daemon.socket).stdout
        (table,) = [code for code in fences(PAGE) if code.startswith("Shares\n")]
        lines = [line.rstrip() for line in shown.splitlines()]
        at = lines.index("Shares")
        assert lines[at + 1].split() == table.splitlines()[1].split()
        names = [line.split()[0] for line in table.splitlines()[2:]]
        assert sorted(line.split()[0] for line in lines[at + 2 : at + 5]) == sorted(names)
        for rank in ranks.values():
            rank.close()
