"""How often `offcorr diagnose` names the right cause, on mismatch that was made for real with a known cause.

    python benchmarks/diagnose.py --output benchmarks/results/diagnose.json

Dumps come from ``offcorr.lab.mismatch``: every cause, with several architectures and seeds, and pairs of causes.  The
rules were written while looking at dumps of ``LOOKED_AT``; dumps of the held-out seeds were not looked at, but three
seeds share a model, so the held-out dumps are of models that were seen with other seeds.  Rules that are changed
after a look at them need other held-out seeds.  Each dump is diagnosed whole and cut to 16 and to 8 sequences.  Dumps
are kept in ``--folder``, so that a killed run goes on where it stopped, and other rules can be tried on the same
dumps.

    python benchmarks/diagnose.py --dumps FOLDER --output benchmarks/results/diagnose_served.json

diagnoses the dumps of ``benchmarks/mismatch_served.py``, whose sampler is a vLLM server.  ``--with-model`` also scores
every dump again with the trainer's model, as `offcorr diagnose --model` does (about four seconds of CPU time per dump);
what is counted as "informed" is the verdict after it.  No checkpoint is given there, so that older weights have to be
told without them; "with_checkpoint" counts the verdict where one is: of the weights that the sampler had, or, where it
had the trainer's, of another optimizer step.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from offcorr.diagnose import DumpWriter, Record, Report, diagnose, read
from offcorr.diagnose.informed import informed
from offcorr.diagnose.rescore import Rescored, rescore
from offcorr.lab import results
from offcorr.lab.mismatch import ARCHITECTURES, CAUSES, check, make, other_model, trainer_model
from offcorr.lab.text import duration

DEVELOPMENT = {"architectures": ("llama", "mixtral", "gpt2"), "seeds": (0, 1)}
LOOKED_AT = {
    "architectures": ("llama", "qwen2", "qwen3", "gpt_neox", "gpt2", "mixtral", "qwen3_moe", "toy", "random"),
    "seeds": (
        *(0, 1, 2, 3, 6, 9, 12, 20, 21, 22, 30, 31, 32, 40, 50, 51, 52, 60, 61, 62, 63),
        *(*range(70, 75), 80, 81, *range(83, 87), *range(90, 94), *range(100, 104), *range(110, 116)),
    ),
}
HELD_OUT = {"architectures": ("qwen3", "qwen3_moe", "gpt_neox"), "seeds": (116, 117, 118, 119)}
SIZES = (32, 16, 8)
PAIRS = (
    ("temperature", "stale_weights"),
    ("top_p", "stale_weights"),
    ("shift", "precision"),
    ("mask", "stale_weights"),
    ("sentinel", "temperature"),
    ("stored_bf16", "stale_weights"),
    ("appended_eos", "stale_weights"),
    ("policy_updates", "precision"),
    ("raw_logprobs", "stale_weights"),
    ("mask", "top_p"),
    ("temperature_silent", "precision"),
    ("dropout", "temperature"),
)


class Dump(NamedTuple):
    """One dump to be made and diagnosed."""

    part: str
    causes: tuple[str, ...]
    architecture: str
    seed: int

    @property
    def name(self) -> str:
        """Of its file."""
        return "_".join((self.part, "+".join(self.causes), self.architecture, str(self.seed)))


def dumps(parts: tuple[str, ...], pairs: bool) -> Iterator[Dump]:
    """Every dump that can be made."""
    for part, chosen in (("held-out", HELD_OUT), ("development", DEVELOPMENT)):
        if part not in parts:
            continue
        for architecture in chosen["architectures"]:
            for seed in chosen["seeds"]:
                for causes in [*((cause,) for cause in CAUSES), *(PAIRS if pairs else ())]:
                    try:
                        check(causes, architecture, "usual")
                    except ValueError:  # such as a mixture's routing without experts
                        continue
                    yield Dump(part, causes, architecture, seed)


def outcome(dump: Dump, folder: Path, with_model: bool) -> dict[str, Any]:
    """Makes the dump, or reads it again, and returns what is named at every size."""
    file, about = folder / f"{dump.name}.jsonl.gz", folder / f"{dump.name}.json"
    if not about.exists():
        file.unlink(missing_ok=True)  # of a run that was killed
        made = make(dump.causes, architecture=dump.architecture, seed=dump.seed)
        with DumpWriter(file) as writer:
            writer.write(made.records)
        kept = {key: value for key, value in made.settings.items() if isinstance(value, str | int | float | bool)}
        about.write_text(json.dumps(kept))
    records = list(read([file], warn=lambda message: None))
    found = dump._asdict() | {"causes": list(dump.causes), "settings": json.loads(about.read_text())}
    return found | verdicts(records, _scored(dump) if with_model else None)


def served(folder: Path, with_model: bool) -> Iterator[dict[str, Any]]:
    """What is named in every dump of a folder that holds the truth beside each."""
    for about in sorted(folder.glob("*.json")):
        truth = json.loads(about.read_text())
        records = list(read([about.with_suffix(".jsonl.gz")], warn=lambda message: None))
        dump = Dump("served", tuple(truth["causes"]), truth["architecture"], truth["seed"])
        found = dump._asdict() | {"causes": truth["causes"], "settings": truth["settings"]}
        yield found | verdicts(records, _scored(dump) if with_model else None)


def _scored(dump: Dump) -> dict[str, Callable[[Sequence[Record]], Rescored]]:
    """Ways to score records of a dump again: with its trainer's model, and with a checkpoint beside it."""
    made = {"architecture": dump.architecture.removeprefix("vllm-"), "seed": dump.seed}
    model, other = trainer_model(dump.causes, **made), other_model(dump.causes, **made)
    return {
        "informed": lambda records: rescore(records, model),
        "with_checkpoint": lambda records: rescore(records, model, checkpoints=[("the checkpoint", other)]),
    }


def verdicts(
    records: list[Record], ways: Mapping[str, Callable[[Sequence[Record]], Rescored]] | None = None
) -> dict[str, dict[str, Any]]:
    """What is named at every size: "named" from the logs, and with what scores them again in each way."""
    found: dict[str, dict[str, Any]] = {"named": {}}
    for size in SIZES:
        report = diagnose(records[:size])
        found["named"][str(size)] = _named(report)
        for way, scored in (ways or {}).items():
            found.setdefault(way, {})[str(size)] = _named(informed(report, scored(records[:size])))
    return found


def _named(report: Report) -> dict[str, Any]:
    return {
        "verdict": report.verdict,
        "confidence": round(report.confidence, 3),
        "causes": [finding.cause for finding in report.causes],
    }


def right(row: dict[str, Any], size: int, by: str = "named") -> bool:
    """Whether the one cause is the verdict, or both of a pair are named."""
    named = row[by][str(size)]
    if len(row["causes"]) == 1:
        return named["verdict"] == row["causes"][0]
    return set(row["causes"]) <= set(named["causes"])


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Shares that are right, by part, number of causes and size; and what single causes are taken for."""
    found: dict[str, Any] = {}
    for part in sorted({row["part"] for row in rows}):
        for count, kind in ((1, "single"), (2, "pair")):
            chosen = [row for row in rows if row["part"] == part and len(row["causes"]) == count]
            if not chosen:
                continue
            shares = {str(size): sum(right(row, size) for row in chosen) / len(chosen) for size in SIZES}
            found[f"{part} {kind}"] = {"dumps": len(chosen), "right": shares}
            for way, words in (("informed", "with the model"), ("with_checkpoint", "with the model and a checkpoint")):
                if all(way in row for row in chosen):
                    shares = {str(size): sum(right(row, size, way) for row in chosen) / len(chosen) for size in SIZES}
                    found[f"{part} {kind} {words}"] = {"dumps": len(chosen), "right": shares}
        singles = [row for row in rows if row["part"] == part and len(row["causes"]) == 1]
        found[f"{part} confusion"] = {
            cause: dict(Counter(row["named"]["32"]["verdict"] for row in singles if row["causes"] == [cause]))
            for cause in CAUSES
            if any(row["causes"] == [cause] for row in singles)
        }
    return found


def main() -> int:
    """Runs what is missing and writes the report."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True, metavar="FILE.json")
    parser.add_argument(
        "--folder", type=Path, default=Path("runs/diagnose"), help="of the dumps (default: %(default)s)"
    )
    parser.add_argument("--dumps", type=Path, metavar="FOLDER", help="diagnose these dumps, and make none")
    parser.add_argument("--parts", nargs="+", choices=("held-out", "development"), default=["held-out", "development"])
    parser.add_argument("--architectures", nargs="+", choices=ARCHITECTURES, help="only these")
    parser.add_argument("--seeds", nargs="+", type=int, help="only these")
    parser.add_argument("--with-model", action="store_true", help="also with the trainer's model at hand")
    parser.add_argument("--no-pairs", action="store_true")
    parser.add_argument("--overwrite", action="store_true", help="replace the file of --output")
    options = parser.parse_args()
    if options.output.exists() and not options.overwrite:
        raise SystemExit(f"--output is {options.output}, which exists; --overwrite replaces it")
    code = hashlib.sha256()
    package = Path(sys.modules["offcorr"].__file__ or "").parent
    for file in sorted((package / "lab" / "mismatch").rglob("*.py")):
        code.update(file.read_bytes())
    folder = options.folder / code.hexdigest()[:8]
    folder.mkdir(parents=True, exist_ok=True)
    chosen = [
        dump
        for dump in dumps(tuple(options.parts), not options.no_pairs)
        if (not options.architectures or dump.architecture in options.architectures)
        and (not options.seeds or dump.seed in options.seeds)
    ]
    rows = list(served(options.dumps, options.with_model)) if options.dumps else []
    began = time.monotonic()
    for done, dump in enumerate([] if options.dumps else chosen, 1):
        rows.append(outcome(dump, folder, options.with_model))
        left = (time.monotonic() - began) / done * (len(chosen) - done)
        print(f"{done}/{len(chosen)} {dump.name}; about {duration(left)} left", file=sys.stderr, flush=True)
    found = summary(rows)
    command = " ".join(["python", "benchmarks/diagnose.py", *sys.argv[1:]])
    report = {
        "about": results.about(command, {"looked at": LOOKED_AT, "held-out": HELD_OUT}),
        "sizes": SIZES,
        "summary": found,
        "dumps": rows,
    }
    options.output.write_text(json.dumps(report, indent=1) + "\n")
    for name, entry in found.items():
        if "right" in entry:
            shares = ", ".join(f"{size}: {share:.1%}" for size, share in entry["right"].items())
            print(f"{name}: {entry['dumps']} dumps; right at {shares}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
