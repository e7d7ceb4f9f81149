"""A report as PNG plots. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")  # before pyplot: no display is needed, and none is opened

import matplotlib.pyplot as plt
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from benchmarks.daemon.targets import ratio
from kvsidecar.bench.bandwidth import PACED, UNPACED
from kvsidecar.bench.layouts import BLOCK_COUNTS
from kvsidecar.bench.report import SYSTEM, BenchReport, Row
from kvsidecar.support.units import format_size

DPI = 160
# One hue from light to dark tells an order to every kind of eye; the other colours are those of Okabe and Ito (2008).
BLOCK_SHADES = ("#c6dbef", "#6baed6", "#2171b5", "#08306b")
SYSTEM_COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#000000")
INK, GRID, LIMIT = "#222222", "#dddddd", "#D55E00"
STYLE: dict[str, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "axes.edgecolor": "#888888",
    "axes.labelcolor": INK,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 11,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
}


def write_plots(report: BenchReport, peers: Sequence[Row], directory: Path) -> list[Path]:
    """Draw what the report and those of other systems have rows for. Returns the files that were written."""
    drawings: dict[str, Callable[[BenchReport, Sequence[Row]], Figure | None]] = {
        "bandwidth.png": bandwidth,
        "systems.png": systems,
        "token-latency.png": token_latency,
        "scaling.png": scaling,
    }
    written = []
    with mpl.rc_context(STYLE):
        for name, draw in drawings.items():
            figure = draw(report, peers)
            if figure is not None:
                figure.savefig(directory / name, dpi=DPI)
                plt.close(figure)
                written.append(directory / name)
    return written


def _figure(report: BenchReport, title: str, width: float, height: float, columns: int = 1) -> tuple[Figure, list[Any]]:
    """A figure with a title and, below it, the machine and the day."""
    figure, axes = plt.subplots(1, columns, figsize=(width, height), sharey=True, squeeze=False)
    margins = {"top": 1 - (1.1 if columns > 1 else 0.85) / height, "bottom": 1.05 / height}
    figure.subplots_adjust(left=0.75 / width, right=1 - 0.25 / width, wspace=0.06, **margins)
    figure.text(0.25 / width, 1 - 0.32 / height, title, fontsize=14, fontweight="bold", va="center")
    figure.text(0.25 / width, 1 - 0.60 / height, report.title, fontsize=9.5, color="#666666", va="center")
    for axis in axes[0]:
        axis.grid(axis="y", color=GRID, linewidth=0.8)
        axis.set_axisbelow(True)
    return figure, list(axes[0])


# -- bandwidth ---------------------------------------------------------------------------------------------------


def bandwidth(report: BenchReport, _: Sequence[Row] = ()) -> Figure | None:
    """Store and load side by side, as shares of the limit, by layout and blocks of a job."""
    layouts = list(dict.fromkeys(row["layout"] for row in report.rows("bandwidth", mode=UNPACED, in_flight=1)))
    if not layouts or report.limit("store") is None:
        return None
    figure, axes = _figure(report, "Store and load through RPC, as a share of one large pinned copy", 14.5, 5.8, 2)
    for axis, direction in zip(axes, ("store", "load"), strict=True):
        for index, (count, shade) in enumerate(zip(BLOCK_COUNTS, BLOCK_SHADES, strict=True)):
            offset = (index - (len(BLOCK_COUNTS) - 1) / 2) * 0.2
            for place, layout in enumerate(layouts):
                alone, several = (ratio(report, layout, count, direction, in_flight) for in_flight in (1, 4))
                if alone is not None:
                    axis.bar(place + offset, alone * 100, 0.185, color=shade)
                if several is not None:
                    x = place + offset
                    axis.plot([x - 0.085, x + 0.085], [several * 100] * 2, color=LIMIT, linewidth=2)
        _limit_line(axis, f"{direction}: limit {report.limit(direction):.1f} GB/s", len(layouts))
        axis.set_xticks(range(len(layouts)), [_layout_label(report, name) for name in layouts], fontsize=8.2)
    axes[0].set_ylabel("% of the limit")
    blocks = [
        Patch(color=shade, label=f"{count} block{'s' if count > 1 else ''}")
        for count, shade in zip(BLOCK_COUNTS, BLOCK_SHADES, strict=True)
    ]
    several_key = Line2D([], [], color=LIMIT, linewidth=2, label="4 jobs in flight (bars: 1)")
    _legend(figure, [*blocks, several_key])
    return figure


def _limit_line(axis: Any, title: str, places: int) -> None:
    axis.axhline(100, color=INK, linewidth=1.2, linestyle=(0, (5, 3)))
    axis.text(places - 0.42, 101.2, "limit", ha="right", va="bottom", fontsize=9)
    axis.set_ylim(0, 110)
    axis.set_xlim(-0.6, places - 0.4)
    axis.tick_params(axis="x", length=0)
    axis.set_title(title)


def _layout_label(report: BenchReport, name: str) -> str:
    """Name over shape, in lines short enough to stand beside each other; a size in the name is the shape's again."""
    row = report.find("bandwidth", layout=name)
    if row is None:
        return name
    ids = f"\n{row['ids']}" if name.startswith("separate") else ""
    return f"{name.partition('-')[0]}\n{row['rows']} x {format_size(row['row_bytes'])}{ids}"


def _legend(figure: Figure, handles: Sequence[Any], columns: int | None = None) -> None:
    figure.legend(
        handles=handles, loc="lower center", ncols=columns or len(handles), bbox_to_anchor=(0.5, 0.0), fontsize=9.5
    )


# -- other systems -----------------------------------------------------------------------------------------------


def systems(report: BenchReport, peers: Sequence[Row]) -> Figure | None:
    """This system beside others: the largest jobs, the best figure of each whatever the jobs in flight."""
    peers = [row for row in peers if row.get("blocks") == max(BLOCK_COUNTS)]
    own = [{**row, "system": SYSTEM} for row in report.rows("bandwidth", mode=UNPACED, blocks=max(BLOCK_COUNTS))]
    if not peers or not own:
        return None
    names = list(dict.fromkeys(row["system"] for row in (*own, *peers)))
    layouts = [name for name in dict.fromkeys(row["layout"] for row in own) if _best(peers, name)]
    if not layouts:
        return None
    title = f"Store and load beside other systems, {max(BLOCK_COUNTS)} blocks a job"
    figure, axes = _figure(report, title, 13.5, 5.6, 2)
    colors = dict(zip(names, SYSTEM_COLORS, strict=False))
    width = min(0.8 / len(names), 0.26)
    for axis, direction in zip(axes, ("store", "load"), strict=True):
        limit = report.limit(direction)
        if not limit:
            return None
        for place, layout in enumerate(layouts):
            figures = [_best([*own, *peers], layout, system=name, direction=direction) for name in colors]
            present = [row for row in figures if row is not None]
            for index, row in enumerate(present):
                x, gbps = place + (index - (len(present) - 1) / 2) * width, row["gbps"]
                share = 100 * (row.get("of_limit") or gbps / limit)
                axis.bar(x, share, width * 0.93, color=colors[row["system"]])
                text = f"{gbps:.0f}" if gbps >= 10 else f"{gbps:.1f}"
                # Upright, since bars of many systems are narrow; inside where it would lie on the line of the limit.
                inside = share > 85
                color = _readable_on(colors[row["system"]]) if inside else INK
                at, va = (share - 1.5, "top") if inside else (share + 1.5, "bottom")
                axis.text(x, at, text, ha="center", va=va, color=color, fontsize=8.5, rotation=90)
        _limit_line(axis, f"{direction}: limit {limit:.1f} GB/s (figures: GB/s)", len(layouts))
        axis.set_xticks(range(len(layouts)), [_layout_label(report, name) for name in layouts], fontsize=9)
    axes[0].set_ylabel("% of the limit")
    _legend(figure, [Patch(color=color, label=name) for name, color in colors.items()])
    return figure


def _readable_on(color: str) -> str:
    """Black or white, whichever has the more contrast (relative luminance of WCAG 2, roughly)."""
    red, green, blue = to_rgb(color)
    return "black" if 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.45 else "white"


def _best(rows: Sequence[Row], layout: str, **match: str) -> Row | None:
    found = (row for row in rows if row.get("layout") == layout and match.items() <= row.items())
    return max(found, key=lambda row: float(row["gbps"]), default=None)


# -- several GPUs ------------------------------------------------------------------------------------------------


def scaling(report: BenchReport, _: Sequence[Row] = ()) -> Figure | None:
    """Stores and loads at once by number of GPUs: a line for each layout and size of job, and plain copies."""
    rows = list(report.rows("scaling"))
    if not rows:
        return None
    figure, (axis,) = _figure(report, "Stores and loads at once, one engine on each GPU, one daemon", 9.0, 5.6)
    cells = list(dict.fromkeys((row["layout"], row["blocks"]) for row in rows))
    colors = dict(zip(cells, (INK, *SYSTEM_COLORS), strict=False))
    for cell, color in colors.items():
        line = [row for row in rows if (row["layout"], row["blocks"]) == cell]
        devices, gbps = [row["devices"] for row in line], [row["gbps"] for row in line]
        plain = {} if cell[1] else {"linestyle": (0, (5, 3))}
        axis.plot(devices, gbps, color=color, marker="o", linewidth=1.8, **plain)
        axis.annotate(
            f"{gbps[-1]:.0f}", (devices[-1], gbps[-1]), xytext=(8, 0), textcoords="offset points", va="center"
        )
    most = max(row["devices"] for row in rows)
    axis.set_xticks(range(1, most + 1))
    axis.set_xlim(0.8, most + 0.35)
    axis.set_ylim(bottom=0)
    axis.set_xlabel("GPUs")
    axis.set_ylabel("GB/s of all, both ways")
    _legend(
        figure,
        [
            Line2D(
                [], [], color=color, marker="o", label=f"{layout}, {blocks} blocks a job" if blocks else "plain copies",
                linestyle="-" if blocks else (0, (5, 3)),
            )
            for (layout, blocks), color in colors.items()
        ],
        columns=3,
    )  # fmt: skip
    return figure


# -- latency ----------------------------------------------------------------------------------------------------


def token_latency(report: BenchReport, _: Sequence[Row] = ()) -> Figure | None:
    """What stores cost an engine's own small copy: a curve over the knob, and the modes."""
    curve = [row for row in report.rows("pacing") if row["chunk"]]
    points = {mode: report.find("token", traffic="store", mode=mode) for mode in (UNPACED, PACED)}
    idle = report.find("token", traffic="none") or report.find("pacing", chunk="")
    if idle is None or not (curve or any(points.values())):
        return None
    figure, (axis,) = _figure(report, "An engine's 4 KiB device-to-host copy while the daemon stores", 9.0, 5.6)
    handles = []
    for key, color, marker in (("p50_us", SYSTEM_COLORS[0], "o"), ("p99_us", SYSTEM_COLORS[1], "s")):
        label = key[:3]
        if curve:
            by_bandwidth = sorted(curve, key=lambda row: row["store_gbps"])
            axis.plot(
                [row["store_gbps"] for row in by_bandwidth], [row[key] for row in by_bandwidth],
                color=color, marker=marker, linewidth=1.8,
            )  # fmt: skip
        handles.append(Line2D([], [], color=color, marker=marker, linewidth=1.8, label=label))
        axis.axhline(idle[key], color=color, linewidth=1.2, linestyle=(0, (2, 2)))
        for point in filter(None, points.values()) if not curve else ():
            axis.plot(point["store_gbps"], point[key], color=color, marker=marker, markersize=8)
    handles.append(Line2D([], [], color="#666666", linewidth=1.2, linestyle=(0, (2, 2)), label="no stores"))
    labels = [(row, row["chunk"]) for row in curve] or [(row, mode) for mode, row in points.items() if row]
    for row, text in labels:
        # Right below the lower line, which rises to the right.
        at = row["store_gbps"], row["p50_us"]
        axis.annotate(text, at, xytext=(7, -10), textcoords="offset points", va="center", fontsize=9, bbox=_PAPER)
    axis.set_yscale("log")
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.yaxis.set_minor_formatter(NullFormatter())
    low, high = axis.get_ylim()
    axis.set_ylim(low * 0.7, high * 1.3)
    axis.set_xlim(left=0, right=axis.get_xlim()[1] * 1.08)
    axis.set_xlabel("GB/s stored meanwhile" + (" (labels: --store-chunk)" if curve else ""))
    axis.set_ylabel("µs, issue to end")
    _legend(figure, handles)
    return figure


_PAPER: dict[str, Any] = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1}
