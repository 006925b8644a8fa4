"""The tables of docs/mismatch.md: how often `offcorr diagnose` names the right cause.

    python benchmarks/diagnose_page.py [--check]

It reads diagnose.json and diagnose_served.json of benchmarks/results, which benchmarks/diagnose.py makes, and
diagnose_large.json of benchmarks/diagnose_large.py.  A table stands between ``<!-- diagnose NAME -->`` and
``<!-- end -->``; ``--check`` changes nothing and fails where one is out of date.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from offcorr.cli.tables import markdown
from offcorr.diagnose.causes import CAUSES, STAGES

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "mismatch.md"
RESULT = ROOT / "benchmarks" / "results" / "diagnose.json"
SERVED = RESULT.with_name("diagnose_served.json")
LARGE = RESULT.with_name("diagnose_large.json")
BLOCK = re.compile(r"(<!-- diagnose (\w+) -->\n).*?(<!-- end -->)", flags=re.DOTALL)
FAMILIES = ({"stale_weights", "adapter_not_synced"},)
"""Causes that logged data cannot separate."""
TARGETS = (
    ("single causes", "single", 32, 0.98),
    ("single causes", "single", 16, None),
    ("single causes", "single", 8, 0.90),
    ("pairs, both named", "pair", 32, 0.85),
    ("pairs, both named", "pair", 16, None),
    ("pairs, both named", "pair", 8, None),
    ("clean data", "clean", 32, 0.99),
)
"""What is counted, of which dumps, at which number of sequences, and the target that was set before."""

WAYS = {"informed": "with `--model`", "with_checkpoint": "with `--checkpoint`, too"}
"""Beside the logs alone: what else was at hand, by its name in the results."""

Row = Mapping[str, Any]


@functools.cache
def result() -> dict[str, Any]:
    """The committed result."""
    return dict(json.loads(RESULT.read_text()))


def dumps(part: str, kind: str) -> list[Row]:
    """The dumps of a part ("held-out", "development") and a kind ("single", "pair", "clean")."""
    chosen = [row for row in result()["dumps"] if row["part"] == part]
    if kind == "clean":
        return [row for row in chosen if row["causes"] == ["clean"]]
    return [row for row in chosen if (len(row["causes"]) > 1) == (kind == "pair")]


def family(cause: str) -> str:
    """The same name for all causes of a family."""
    return next((min(members) for members in FAMILIES if cause in members), cause)


def right(row: Row, size: int, name: Callable[[str], str] = lambda cause: cause, by: str = "named") -> bool:
    """Whether the verdict is the one cause, or both causes of a pair are among those named.

    >>> row = {"causes": ["stale_weights"], "named": {"8": {"verdict": "adapter_not_synced", "causes": []}}}
    >>> right(row, 8), right(row, 8, family)
    (False, True)
    """
    named = row[by][str(size)]
    if len(row["causes"]) == 1:
        return name(named["verdict"]) == name(row["causes"][0])
    return {name(cause) for cause in row["causes"]} <= {name(cause) for cause in named["causes"]}


def count(rows: Sequence[Row], size: int, name: Callable[[str], str] = lambda cause: cause, by: str = "named") -> int:
    """The number of rows that are right, "named" from the logs or by one of ``WAYS``."""
    return sum(right(row, size, name, by) for row in rows)


def interval(hits: int, of: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share.

    >>> [round(bound, 2) for bound in interval(9, 9)]
    [0.7, 1.0]
    """
    z = 1.96
    middle, half = hits / of + z * z / (2 * of), z * math.sqrt(hits / of * (1 - hits / of) / of + (z / (2 * of)) ** 2)
    return (middle - half) / (1 + z * z / of), (middle + half) / (1 + z * z / of)


def listed(words: Sequence[str]) -> str:
    """Words with commas, and "and" before the last.

    >>> listed(["a", "b", "c"])
    'a, b and c'
    """
    return " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))


# -- tables ------------------------------------------------------------------------------------------------------


def targets() -> str:
    """Shares that are right, beside the targets."""
    lines = []
    for words, kind, size, target in TARGETS:
        rows = dumps("held-out", kind)
        if not rows:
            continue
        hits = count(rows, size)
        low, high = interval(hits, len(rows))
        line = {
            "": f"{words}, {size} sequences",
            "from the logs (95 % interval)": f"{hits / len(rows):.1%}, {hits} of {len(rows)} ({low:.0%} to {high:.0%})",
            "as families": f"{count(rows, size, family) / len(rows):.1%}",
            **{words: _informed(rows, size, way) for way, words in WAYS.items()},
            "target: met": "" if target is None else f"{target:.0%}: {_met(rows, size, target)}",
        }
        lines.append(line)
    return markdown(lines)


def _informed(rows: Sequence[Row], size: int, way: str) -> str:
    hits = count(rows, size, by=way)
    low, high = interval(hits, len(rows))
    return f"{hits / len(rows):.1%}, {hits} ({low:.0%} to {high:.0%})"


def _met(rows: Sequence[Row], size: int, target: float) -> str:
    if count(rows, size) >= target * len(rows):
        return "yes"
    ways = {"as families": count(rows, size, family)}
    ways |= {words: count(rows, size, by=way) for way, words in WAYS.items()}
    return listed([way for way, hits in ways.items() if hits >= target * len(rows)]) or "no"


def verdict() -> str:
    """The sentence about the targets."""
    found: dict[str, list[str]] = {}
    few = []
    for words, kind, size, target in TARGETS:
        rows = dumps("held-out", kind)
        if target is None or not rows:
            continue
        found.setdefault(_met(rows, size, target), []).append(f"{words} at {size} sequences ({target:.0%})")
        if count(rows, size) == len(rows) and interval(len(rows), len(rows))[0] < target:
            few.append(f"{words} ({len(rows)} of {len(rows)})")
    said = {"yes": "met from the logs", "no": "not met"}
    parts = [f"{said.get(how, f'met {how}')}: {listed(which)}" for how, which in sorted(found.items(), reverse=True)]
    sentence = f"Four targets were set beforehand. By the held-out dumps, {'; '.join(parts)}."
    if few:
        sentence += f" There are too few dumps of {listed(few)} to show that share."
    seen = [
        f"{count(rows, size) / len(rows):.1%} of the {words} at {size}"
        for words, kind, size, target in TARGETS
        if target is not None and (rows := dumps("development", kind))
    ]
    return sentence + (f" Of the development dumps, it was right about {listed(seen)} sequences." if seen else "")


def setup() -> str:
    """The sentence about what was held out, and the command."""
    about = result()["about"]
    said = []
    for part in ("held-out", "development"):
        rows = [*dumps(part, "single"), *dumps(part, "pair")]
        if rows:
            singles = len(dumps(part, "single"))
            said.append(
                f"{part.capitalize()}: {singles} dumps with one cause or none and {len(rows) - singles} with two, of "
                f"{_architectures(rows)} and the seeds {listed(sorted({str(row['seed']) for row in rows}))}."
            )
    looked = about["setting"]["looked at"]
    known = set(looked["architectures"])
    new = sorted({row["architecture"] for row in result()["dumps"] if row["part"] == "held-out"} - known)
    said.append(
        f"The rules were written while looking at dumps of {_names(looked['architectures'])} with the seeds "
        f"{listed(list(map(str, looked['seeds'])))}. The held-out seeds were not among them; the models were, since an "
        "architecture has three models, of which the seed chooses one"
        + (f", but for {_names(new)}." if new else ". Other models can be harder.")
    )
    versions = [f"{name} {about['versions'][name]}" for name in ("torch", "transformers", "offcorr")]
    return " ".join(said) + f" Made by `{about['command']}` with {listed(versions)}."


def missed() -> str:
    """The sentence about what is still wrong at 32 sequences."""
    rows = dumps("held-out", "single")
    parts = [f"{words}: {_missed(rows, way)}" for way, words in {"named": "from the logs", **WAYS}.items()]
    return f"Single causes that are wrong at 32 sequences, {'; '.join(parts)}."


def served() -> str:
    """Dumps with a real engine."""
    found = json.loads(SERVED.read_text())
    rows: list[Row] = found["dumps"]
    ways = {way: words for way, words in WAYS.items() if way in rows[0]}
    table = [
        {
            "sequences": str(size),
            "from the logs": f"{count(rows, size)} of {len(rows)}",
            "as families": str(count(rows, size, family)),
            **{words: str(count(rows, size, by=way)) for way, words in ways.items()},
        }
        for size in found["sizes"]
    ]
    seeds = sorted({str(row["seed"]) for row in rows})
    of = f"the {'seed' if len(seeds) == 1 else 'seeds'} {listed(seeds)}"
    return (
        "A vLLM server on a CPU as the sampler (`python benchmarks/mismatch_served.py`, then "
        f"`{found['about']['command']}`); {len(rows)} dumps with one cause or none, of {_architectures(rows)} and "
        f"{of}, which no rule was written on:\n\n{markdown(table)}\n\n"
        f"Wrong at 32 from the logs: {_missed(rows, 'named')}; "
        + "; ".join(f"{words}: {_missed(rows, way)}" for way, words in ways.items())
        + "."
    )


def _missed(rows: Sequence[Row], by: str) -> str:
    """What was made and not named, and how often."""
    wrong = Counter(row["causes"][0] for row in rows if not right(row, 32, by=by))
    return listed([f"`{name}` {times}" for name, times in sorted(wrong.items())]) or "none"


def _architectures(rows: Sequence[Row]) -> str:
    return "the architectures " + _names(sorted({row["architecture"] for row in rows}))


def _names(names: Sequence[str]) -> str:
    return listed([f"`{name}`" for name in names])


def confusion() -> str:
    """What was made, and what it was named; held-out single causes."""
    rows = dumps("held-out", "single")
    sizes = ", ".join(map(str, result()["sizes"]))
    order = ["clean", *sorted(CAUSES, key=lambda cause: STAGES.index(CAUSES[cause].stage))]
    lines = []
    for cause in sorted({row["causes"][0] for row in rows}, key=order.index):
        made = [row for row in rows if row["causes"] == [cause]]
        verdicts = Counter(row["named"]["32"]["verdict"] for row in made)
        lines.append(
            {
                "made": f"`{cause}`",
                "named with 32 sequences": ", ".join(f"`{name}` {times}" for name, times in verdicts.most_common()),
                f"right with {sizes}": _counts(made),
                **{words: _counts(made, way) for way, words in WAYS.items()},
            }
        )
    return markdown(lines)


def pairs() -> str:
    """Pairs: how often both are named, and which is missed; held-out."""
    rows = dumps("held-out", "pair")
    if not rows:
        return "No pairs were made."
    sizes = ", ".join(map(str, result()["sizes"]))
    lines = []
    for pair in dict.fromkeys(tuple(row["causes"]) for row in rows):
        made = [row for row in rows if tuple(row["causes"]) == pair]
        missed = Counter(cause for row in made for cause in pair if cause not in row["named"]["32"]["causes"])
        lines.append(
            {
                "made": " and ".join(f"`{cause}`" for cause in pair),
                "missed with 32 sequences": ", ".join(f"`{name}` {times}" for name, times in missed.most_common()),
                f"both with {sizes}": _counts(made),
                **{words: _counts(made, way) for way, words in WAYS.items()},
                "as families": f"{count(made, 32, family)} of {len(made)}",
            }
        )
    return markdown(lines)


def _counts(rows: Sequence[Row], by: str = "named") -> str:
    return ", ".join(str(count(rows, size, by=by)) for size in result()["sizes"]) + f" of {len(rows)}"


def large() -> str:
    """Large dumps: peak memory and time."""
    found = json.loads(LARGE.read_text())
    about, lines = found["about"], []
    for row in found["dumps"]:
        lines.append(
            {
                "tokens of the dump": f"{row['tokens']:,}",
                "that the tests read": f"{row['tokens_tested']:,}",
                "peak memory": f"{row['peak_mb']} MB",
                "CPU time": f"{row['cpu_seconds']:.0f} s",
                "tokens per second of CPU time": f"{row['tokens_per_cpu_second']:,}",
            }
        )
    setting, versions = about["setting"], about["versions"]
    made = (
        f"One thread of an {about['machine']['processor']}, other work beside it; parquet with "
        f"{setting['completion']:,} tokens per completion and {setting['bytes per token']:.0f} bytes per token; "
        f"offcorr {versions['offcorr']}. `{about['command']}`, "
        "[diagnose_large.json](../benchmarks/results/diagnose_large.json)."
    )
    return f"{markdown(lines)}\n\n{made}"


TABLES: dict[str, Callable[[], str]] = {
    table.__name__: table for table in (setup, served, verdict, targets, missed, confusion, pairs, large)
}


def filled(page: str) -> str:
    """The page with every table made anew."""
    return BLOCK.sub(lambda match: f"{match[1]}{TABLES[match[2]]()}\n{match[3]}", page)


def main() -> int:
    """Writes the tables, or checks them."""
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing; fail if a table is out of date")
    options = parser.parse_args()
    page = PAGE.read_text()
    fresh = filled(page)
    if fresh == page:
        return 0
    if not options.check:
        PAGE.write_text(fresh)
    print(f"{'out of date' if options.check else 'written'}: {PAGE.relative_to(ROOT)}")
    return int(options.check)


if __name__ == "__main__":
    sys.exit(main())
