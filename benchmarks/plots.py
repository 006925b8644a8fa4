"""Plots of the GPU benchmarks' reports; needs matplotlib and no GPU.

python benchmarks/plots.py gpu.json gpu_logprob.json        # writes gpu_times.png ... next to each report
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

Row = dict[str, Any]
Report = dict[str, Any]


def draw(path: Path) -> list[Path]:
    """Writes the plots for which a report has data, and returns their paths.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    report = json.loads(path.read_text())
    written = []
    for name, (series, paint, size) in PICTURES.items():
        if not report.get(series):
            continue
        figure, axis = plt.subplots(figsize=size, constrained_layout=True)
        paint(axis, report)
        where = f"{report['machine']['device']}, torch {report['machine']['torch']}"
        figure.suptitle(f"{'SMOKE TEST: the times mean nothing, ' if report['smoke'] else ''}{where}", fontsize=9)
        written.append(path.with_name(f"{path.stem}_{name}.png"))
        figure.savefig(written[-1], dpi=120)
        plt.close(figure)
    return written


def bars(axis: Any, labels: list[str], heights: dict[str, list[float | None]]) -> None:
    """Draws grouped horizontal bars; a value that was not measured has no bar."""
    thick = 0.8 / len(heights)
    for number, (name, values) in enumerate(heights.items()):
        places = [i + number * thick for i in range(len(labels))]
        axis.barh(places, [value or 0 for value in values], thick, label=name)
    axis.set_yticks([i + 0.4 - thick / 2 for i in range(len(labels))], labels, fontsize=8)
    axis.invert_yaxis()
    axis.legend(fontsize=8)


def of(rows: Iterable[Row], key: str, scale: float = 1.0) -> list[float | None]:
    return [scale * row[key] if row.get(key) is not None else None for row in rows]


# -- the correction kernel -----------------------------------------------------------------------------------


def method_times(axis: Any, report: Report) -> None:
    rows = sorted((row for row in report["usual"] if row["rollout_logp"]), key=lambda row: -(row["kernel_wall"] or 0))
    compiled = {row["method"]: row for row in report.get("compiled", [])}
    drawn = {
        "kernel, graph replay": ("kernel_replay", "C0o"),
        "kernel, wall": ("kernel_wall", "C0."),
        "torch.compile, graph replay": ("compile_replay", "C1o"),
        "torch.compile, wall": ("compile_wall", "C1."),
        "eager, graph replay": ("eager_replay", "C2o"),
        "eager, wall": ("eager_wall", "C2."),
    }
    for name, (key, style) in drawn.items():
        points = [(one.get(key), row["method"]) for row in rows for one in (row | compiled.get(row["method"], {}),)]
        points = [(1e6 * value, method) for value, method in points if value]
        if points:
            axis.plot(*zip(*points, strict=True), style, label=name)
    axis.axvline(15, color="black", linewidth=0.8, linestyle=":")
    axis.legend(fontsize=8)
    axis.grid(axis="y", linewidth=0.3)
    title = f"{rows[0]['rows']} sequences, {rows[0]['tokens']} tokens" if rows else ""
    axis.set(xscale="log", xlabel="microseconds, forward", title=title)


def bandwidth(axis: Any, report: Report) -> None:
    rows = report["large"]
    labels = [
        f"{row['method']}, {row['rows']} rows, {'packed' if row['packed'] else 'padded'}"
        f"{'' if row['one_pass'] else ' (two passes)'}"
        for row in rows
    ]
    bars(axis, labels, {"correction kernel": of(rows, "share_of_copy_bandwidth")})
    axis.axvline(0.7, color="black", linewidth=0.8, linestyle=":")
    axis.set(xlabel="compulsory bytes / time / copy bandwidth", title=f"{rows[0]['tokens']} tokens and about as many")


def losses(axis: Any, report: Report) -> None:
    rows = [row for row in report["others"] if "wall" in row]
    bars(axis, [f"{row['method']}: {row['who']}" for row in rows], {"forward and backward": of(rows, "wall", 1e3)})
    axis.set(xscale="log", xlabel="milliseconds, wall")


def settings(axis: Any, report: Report) -> None:
    rows = [row for row in report["sweep"] if row["kernel_replay"]]
    for place in dict.fromkeys((row["rows"], row["tokens"], row["method"]) for row in rows):
        own = [row for row in rows if (row["rows"], row["tokens"], row["method"]) == place]
        best = min(row["kernel_replay"] for row in own)
        labels = [", ".join(f"{name} {value}" for name, value in row["setting"].items()) for row in own]
        of_rows = f"{place[2]}, {place[0]} rows, {place[1]} tokens"
        axis.plot([row["kernel_replay"] / best for row in own], labels, "o", label=of_rows)
    axis.legend(fontsize=8)
    axis.set(xlabel="time / best")


# -- log-probs -----------------------------------------------------------------------------------------------


def case(row: Row) -> str:
    kept = f", {row['kept']:.0%} kept" if row["kept"] < 1 else ""
    return f"{row['name']}{', frozen' if row.get('frozen') else ''}{kept}"


def largest(rows: list[Row]) -> list[Row]:
    """Returns the finished rows that have the shape of the first finished row."""
    first = next((row for row in rows if "total_ms" in row), None)
    shape = ("N", "H", "V", "dtype")
    return [row for row in rows if first and "total_ms" in row and all(row[x] == first[x] for x in shape)]


def floors(axis: Any, report: Report) -> None:
    rows = largest(report["cases"])
    bars(axis, [case(row) for row in rows], {"total": of(rows, "total_ms"), "lower bound": of(rows, "floor_ms")})
    size = ", ".join(f"{x} = {rows[0][x]}" for x in ("N", "H", "V")) if rows else ""
    axis.set(xlabel="milliseconds, forward and backward", title=size)


def memory(axis: Any, report: Report) -> None:
    rows = [row for row in largest(report["cases"]) if row.get("peak_gib") is not None]
    bars(axis, [case(row) for row in rows], {"peak beyond the inputs": of(rows, "peak_gib")})
    axis.set(xlabel="GiB", xscale="log" if rows else "linear")


def fractions(axis: Any, report: Report) -> None:
    rows = [r for r in largest(report["cases"]) if r["name"] == "linear_logprob" and not r.get("frozen")]
    rows.sort(key=lambda row: row["kept"])
    for name in ("backward_ms", "floor_ms"):
        axis.plot(
            of(rows, "kept"),
            of(rows, name),
            "o-",
            label=name.replace("_ms", ", ms").replace("floor", "lower bound"),
        )
    axis.legend(fontsize=8)
    axis.set(xlabel="fraction of tokens with a gradient", ylim=(0, None))


def shapes(axis: Any, report: Report) -> None:
    rows = [row for row in report["cases"] if "total_to_floor" in row and row["kept"] == 1 and not row.get("frozen")]
    sizes = list(dict.fromkeys((r["N"], r["H"], r["V"], r["dtype"]) for r in rows))
    names = list(dict.fromkeys(row["name"] for row in rows))
    by_place = {(r["name"], (r["N"], r["H"], r["V"], r["dtype"])): r["total_ms"] / r["four_products_ms"] for r in rows}
    heights = {name: [by_place.get((name, size)) for size in sizes] for name in names}
    bars(axis, [f"{n}, {h}, {v}\n{dtype}" for n, h, v, dtype in sizes], heights)
    axis.set(xlabel="time / four matrix products")


Picture = tuple[str, Callable[[Any, Report], None], tuple[float, float]]
PICTURES: dict[str, Picture] = {
    "times": ("usual", method_times, (9, 9)),
    "bandwidth": ("large", bandwidth, (9, 7)),
    "losses": ("others", losses, (9, 8)),
    "settings": ("sweep", settings, (9, 7)),
    "floors": ("cases", floors, (9, 6)),
    "memory": ("cases", memory, (9, 6)),
    "kept": ("cases", fractions, (6, 4)),
    "shapes": ("cases", shapes, (9, 7)),
}
"""Name -> (the series that it needs, the function that draws it, size in inches)."""

if __name__ == "__main__":
    for given in sys.argv[1:]:
        print(*draw(Path(given)), sep="\n")
