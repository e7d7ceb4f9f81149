"""Results as tables and as a plot."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.table import Table

from benchmarks.fleet.cases import ADMISSIONS
from benchmarks.fleet.policies import CLAIRVOYANT
from benchmarks.fleet.replay import LEVELS
from kvsidecar.support.units import TiB, format_size

Row = dict[str, Any]
COLUMNS = (
    "pool",
    "disk",
    "cluster",
    "admission",
    "hit rate",
    *LEVELS,
    "saved s",
    "wait s",
    "refused",
    "TB a day",
    "reuse",
)
EXTRAS: dict[str, tuple[str, Callable[[Row], str]]] = {
    "fleet": ("nodes", lambda row: f"{row['nodes']} {'affinity' if row['affinity'] else 'random'}"),
    "returns": ("returns", lambda row: f"{row['mix']['returns']:.0%}"),
    "speed": ("GB/s", lambda row: f"{row['hardware']['disk_read'] / 1e9:.4g}"),
    "budget": ("at most", lambda row: f"{row['hardware']['write_bytes_per_day'] / 1e12:g}"),
}
"""By section: the column that it has beside the others."""
EXPLAINED = (
    "Hit rate: share of the blocks of all prompts, and by level. saved s: seconds of prefill a request that pool and "
    "tiers save, less what it waits. wait s: of those that wait. refused: share of blocks that a tier has and that are "
    "not fetched, because to compute them is faster. TB a day: written to disk or cluster by a node. reuse: hits of a "
    "tier for each block written to it."
)


EXPLAINED_POLICIES = (
    "Hits: share of the tokens of all prompts, each up to its first miss. Saved: seconds of prefill, of those that all "
    "prompts would take; a token takes longer the later it stands in its prompt. Clairvoyant: knows what comes, and "
    "keeps what is used soonest; no policy can hit more."
)


def show(result: dict[str, Any], file: TextIO | None = None) -> None:
    console = Console(file=file)
    if not console.is_terminal:
        console = Console(file=file, width=150)
    if "policies" in result:
        pool = f"pool {result['pool_tokens'] / 1e6:g} M tokens, {format_size(result['pool_bytes'])}"
        counted = f"{result['best']['requests']} requests, {result['best']['tokens'] / 1e6:.0f} M tokens"
        console.print(f"{result['trace']}: {counted}; {pool}", highlight=False)
        console.print(_policies(result))
        console.print(EXPLAINED_POLICIES, highlight=False)
        return
    for name, found in result.get("traces", {}).items():
        facts = (
            f"{found['requests']} requests in {found['hours']:.1f} h, mean prompt {found['input_mean']:.0f} tokens",
            f"{found['cacheable']:.1%} of the blocks cacheable",
            f"{found['used_once']:.1%} of {found['blocks']} blocks used once",
        )
        console.print(f"{name}: {', '.join(facts)}", highlight=False)
    for section in dict.fromkeys(row["section"] for row in result["rows"]):
        console.print(_table(section, [row for row in result["rows"] if row["section"] == section]))
    console.print(EXPLAINED, highlight=False)


def _policies(result: dict[str, Any]) -> Table:
    table = Table()
    table.add_column("policy")
    for column in ("hits", "saved s", "of all", "stored blocks", "TiB", "evicted blocks", "TiB", "refused blocks"):
        table.add_column(column, justify="right")
    for name, row in {**result["policies"], CLAIRVOYANT: result["best"]}.items():
        blocks = [row[f"{what}_blocks"] for what in ("stored", "evicted")]
        table.add_row(
            name,
            f"{row['hits']:.3f}",
            f"{row['saved_seconds']:.0f}",
            f"{row['saved_seconds'] / (row['prefill_seconds'] or 1):.1%}",
            *[text for each in blocks for text in (f"{each:,}", f"{each * result['block_bytes'] / TiB:.1f}")],
            f"{row['refused_blocks']:,}",
        )
    return table


def _table(section: str, rows: list[Row]) -> Table:
    extra, value = EXTRAS.get(section, ("", None))
    table = Table(title=section[0].upper() + section[1:], title_justify="left")
    for column in (*([extra] if value else []), *COLUMNS):
        table.add_column(column, justify="left" if column in ("admission", "nodes") else "right")
    for row in rows:
        hardware, hits = row["hardware"], row["hits"]
        sizes = [_size(hardware[f"{level}_bytes"]) for level in ("pool", "disk", "cluster")]
        written = sum(row["written_a_day"].values())
        behind = hardware["disk_bytes"] or hardware["cluster_bytes"]
        table.add_row(
            *([value(row)] if value else []),
            *sizes,
            hardware["admission"] if behind else "-",
            f"{row['hit_rate']:.1%}",
            *[f"{hits[level]:.1%}" if hits[level] else "-" for level in LEVELS],
            f"{row['saved_seconds']:.3f}",
            f"{row['waited_seconds']:.2f}" if behind else "-",
            f"{row['not_worth']:.1%}" if behind else "-",
            f"{written / 1e12:.2f}" if behind else "-",
            f"{row['hits_a_write']:.2f}" if behind else "-",
        )
    return table


def _size(nbytes: int) -> str:
    return format_size(nbytes) if nbytes else "-"


def plot(result: dict[str, Any], file: Path) -> None:
    """Hits by the size of the pool, by the size of the disk and admission, and by what several nodes share."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    from benchmarks.daemon.plots import DPI, STYLE

    drawings = {"pool": _draw_pools, "disk": _draw_disks, "fleet": _draw_fleet}
    sections = [name for name in drawings if any(row["section"] == name for row in result["rows"])]
    style: dict[str, Any] = {**STYLE, "svg.hashsalt": "fleet"}
    with mpl.rc_context(style):
        figure, axes = plt.subplots(1, len(sections), figsize=(4.4 * len(sections), 4.2), layout="constrained")
        for name, axis in zip(sections, [axes] if len(sections) == 1 else axes, strict=True):
            drawings[name](axis, [row for row in result["rows"] if row["section"] == name])
            axis.set_ylabel("% of the blocks of all prompts")
        figure.savefig(file, dpi=DPI, metadata={"Date": None} if file.suffix == ".svg" else None)


SHADES = {"gpu": "#c6dbef", "pool": "#2171b5", "disk": "#E69F00", "cluster": "#009E73"}


def _stack(axis: Any, rows: list[Row], labels: list[str]) -> None:
    """A bar for each row, cut into levels."""
    below = [0.0] * len(rows)
    for level in LEVELS:
        shares = [100 * row["hits"][level] for row in rows]
        if not any(shares):
            continue
        axis.bar(range(len(rows)), shares, bottom=below, color=SHADES[level], label=level, width=0.7)
        below = [low + share for low, share in zip(below, shares, strict=True)]
    for number, total in enumerate(below):
        axis.text(number, total, f"{total:.0f}", ha="center", va="bottom", fontsize=9)
    axis.set_xticks(range(len(rows)), labels)
    axis.legend(loc="upper left", ncols=4, fontsize=8, columnspacing=1.0, handlelength=1.2)
    axis.set_ylim(0, 1.3 * max(below))


def _draw_pools(axis: Any, rows: list[Row]) -> None:
    _stack(axis, rows, [f"{row['hardware']['pool_bytes'] / TiB:g}" for row in rows])
    axis.set_xlabel("pool, TiB (no tier)")
    axis.set_title("Hits of one node")


def _draw_disks(axis: Any, rows: list[Row]) -> None:
    at: list[float] = []
    for admission, color in zip(ADMISSIONS, ("#0072B2", "#D55E00", "#222222"), strict=True):
        line = [row for row in rows if row["hardware"]["admission"] == admission]
        at = [row["hardware"]["disk_bytes"] / TiB for row in line] or at
        written = line[-1]["written_a_day"]["disk"] / 1e12 if line else 0.0
        style: dict[str, Any] = {"linestyle": (0, (4, 3))} if admission == "on_evict" else {}
        label = f"{admission}: {written:.0f} TB a day written"
        axis.plot(
            at[: len(line)], [100 * row["hits"]["disk"] for row in line], color=color, marker="o", label=label, **style
        )
    axis.set_xscale("log", base=2)
    axis.set_xticks(at, [f"{each:g}" for each in at])
    axis.minorticks_off()
    axis.set_ylim(0, 1.5 * max(100 * row["hits"]["disk"] for row in rows) or 1)
    axis.set_xlabel(f"disk, TiB (pool {format_size(rows[0]['hardware']['pool_bytes'])})")
    axis.set_title("Hits that a disk adds, by admission")
    axis.legend(loc="upper left", fontsize=9)


def _draw_fleet(axis: Any, rows: list[Row]) -> None:
    nodes = rows[0]["nodes"]
    rows = [row for row in rows if row["nodes"] == nodes]
    labels = []
    for row in rows:
        hardware = row["hardware"]
        tier = "disk" if hardware["disk_bytes"] else "cluster" if hardware["cluster_bytes"] else "none"
        labels.append(f"{tier}, {hardware['admission']}" if tier != "none" else tier)
    _stack(axis, rows, labels)
    axis.tick_params("x", labelrotation=90, labelsize=9)
    half = len(rows) // 2
    for start, routing in (0, "affinity"), (half, "random"):
        axis.text(start + (half - 1) / 2, 0.86 * axis.get_ylim()[1], routing, ha="center", color="#555555")
    axis.set_title(f"{nodes} nodes, by tier and routing")
