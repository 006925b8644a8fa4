"""Bytes, collectives and time of what ranks exchange in an optimizer step, with 1, 2, 4 and 8 processes of gloo.

    python benchmarks/scale.py [--output benchmarks/results/scale.json] [--page docs/scale.md] [--rounds 25]

Collectives and bytes are counted by wrapping the functions of torch.distributed, compared with the formulas of
``PARTS``, and differ from run to run in nothing; the script ends with an error where a count is not its formula's.
Times are medians over rounds that take every part in turn.  More processes than cores share them, so only the
times of up to as many ranks as cores are those of ranks that wait for the network alone.  What many ranks cost the host
is timed in one process, on as many copies of one rank's vector.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as processes

import offcorr
from offcorr import Batch
from offcorr.kernels.logprob import linear_logprob
from offcorr.metrics import Gather
from offcorr.training import EWMA, ESSLearningRate, Step, gather_over, gather_sequences

sys.path.insert(0, str(Path(__file__).resolve().parent))
import flags  # noqa: E402
from cpu import machine  # noqa: E402

SEQUENCES, MICRO_BATCHES = 16, 2
"""Sequences of a micro-batch, and micro-batches of an optimizer step, on each rank."""

HIDDEN, VOCABULARY = 64, 256
"""Of the head that is split over ranks."""

EXTRAPOLATED = (64, 512, 4096)
"""Ranks that were not run."""

OWN = {"all_gather": 1, "all_gather_into_tensor": 1, "all_reduce": 0}
"""The argument of a collective that is this rank's own tensor."""

OTHERS = ("broadcast", "reduce", "reduce_scatter", "reduce_scatter_tensor", "all_to_all", "all_to_all_single", "gather")
"""Collectives of which no part has any."""


class Size(NamedTuple):
    """Tokens per rank: those of the micro-batches of an optimizer step, [SEQUENCES, width] each."""

    ranks: int
    width: int

    @property
    def tokens(self) -> int:
        return MICRO_BATCHES * SEQUENCES * self.width


class Part(NamedTuple):
    """Something that is exchanged.

    collectives: per optimizer step (per micro-batch: of the context-parallel gather).
    own_bytes: of a rank, by size; the metrics' depend on how many there are.
    formula: the same in words.
    """

    collectives: int
    own_bytes: Callable[[Size], int]
    formula: str


METRICS = 208
"""Numbers of the metrics: two series of the mismatch, the loss, and what other frameworks log."""

PARTS = {
    "denominator (`Step.total`)": Part(1, lambda size: 16, "16"),
    "metrics (`Step.metrics`), once per log": Part(1, lambda size: 8 * METRICS, f"8 x {METRICS}"),
    "ESS learning rate": Part(1, lambda size: 32, "32"),
    'ESS learning rate, `base="auto"`': Part(2, lambda size: 36, "36"),
    'share trained on, `anchor="ewma"`': Part(1, lambda size: 16, "16"),
    "`count_rejected=False`": Part(1, lambda size: 16, "16"),
    "statistics of bapo": Part(4, lambda size: 192, "8 x 22 + 16"),
    "statistics of asymre": Part(
        6, lambda size: 16 * SEQUENCES * MICRO_BATCHES + 24, "16 x sequences of the rank + 24"
    ),
    "statistics of m2po": Part(2, lambda size: 4 * size.tokens + 8, "4 x positions of the rank + 8"),
    "context parallelism, per micro-batch": Part(
        2, lambda size: 13 * SEQUENCES * (size.width // size.ranks) + 32, "13 x positions of the slice + 32"
    ),
    "the same with `widths=`": Part(
        1, lambda size: 13 * SEQUENCES * (size.width // size.ranks), "13 x positions of the slice"
    ),
    "vocabulary-parallel head, per micro-batch": Part(
        2, lambda size: (24 + 4 * HIDDEN) * SEQUENCES * size.width, "(24 + 4 x hidden size) x tokens"
    ),
}
"""In the order of the tables."""

SHARED = tuple(PARTS)[-3:]
"""Parts whose ranks share sequences or a head, and are as many as these need, not as many as there are."""

CORRECTION = "loss and backward of one micro-batch, for comparison"


def micro_batch(width: int, seed: int) -> Batch:
    draw = torch.Generator().manual_seed(seed)
    old_logp = -3 * torch.rand(SEQUENCES, width, generator=draw) - 0.5
    return Batch(
        logp=(old_logp + 0.1 * torch.randn(SEQUENCES, width, generator=draw)).requires_grad_(),
        old_logp=old_logp,
        rollout_logp=old_logp + 0.01 * torch.randn(SEQUENCES, width, generator=draw),
        advantages=torch.randn(SEQUENCES, generator=draw),
        rewards=torch.rand(SEQUENCES, generator=draw).round(),
        group_ids=torch.arange(SEQUENCES) // 8,
        mask=torch.rand(SEQUENCES, width, generator=draw) < 0.9,
    )


Case = tuple[Callable[[], Any], Callable[[Any], Any]]
"""What comes before, and is not measured; and what is, of its result."""


def cases(size: Size, rank: int, gather: Gather) -> dict[str, Case]:
    """Every part and the correction, as the library does them."""
    batches = [micro_batch(size.width, MICRO_BATCHES * rank + i) for i in range(MICRO_BATCHES)]

    def of_step(step: Step) -> Step:
        step.begin(tokens=size.tokens, sequences=SEQUENCES * MICRO_BATCHES)
        for batch in batches:
            step.loss(step.place(batch, lambda module: batch.old_logp), last=False)  # noqa: B023
        return step

    def optimizer() -> torch.optim.Optimizer:
        return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)

    def ess(**options: Any) -> ESSLearningRate:
        ess_lr = ESSLearningRate(optimizer(), **options)
        for batch in batches:
            ess_lr.add(batch)
        return ess_lr

    def merged(name: str) -> offcorr.Statistics:
        loss_fn = offcorr.get(name)
        parts = [part for batch in batches if (part := loss_fn.statistics(batch))]
        return reduce(offcorr.Statistics.merge, parts)

    def kept() -> torch.Tensor:
        loss_fn = offcorr.get("icepop", count_rejected=False)
        return torch.stack([loss_fn.kept_units(batch) for batch in batches]).sum(0)

    def local() -> Batch:
        """This rank's slice of the sequences of the first rank."""
        share = size.width // size.ranks
        whole, places = micro_batch(size.width, 0), slice(rank * share, (rank + 1) * share)
        fields = {name: getattr(whole, name)[:, places] for name in ("logp", "old_logp", "rollout_logp", "mask")}
        return replace(whole, **fields)

    def backward(batch: Batch) -> None:
        offcorr.get("tis")(batch).loss.backward()

    def part_of_head() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        draw = torch.Generator().manual_seed(0)  # hidden states and targets are the same on every rank
        hidden = torch.randn(SEQUENCES * size.width, HIDDEN, generator=draw).requires_grad_()
        target = torch.randint(VOCABULARY, (len(hidden),), generator=draw)
        return hidden, torch.randn(VOCABULARY // size.ranks, HIDDEN, generator=draw).requires_grad_(), target

    def through_head(given: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> None:
        start = rank * len(given[1])
        linear_logprob(*given, group=dist.group.WORLD, vocabulary_start=start).logp.sum().backward()

    def counts() -> torch.Tensor:
        return torch.tensor([size.tokens, SEQUENCES * MICRO_BATCHES])

    step = Step(offcorr.get("tis"), gather=gather)
    widths = [size.width // size.ranks] * size.ranks
    ewma = Step(offcorr.get("ppo"), anchor=EWMA(torch.nn.Linear(1, 1), window=2), gather=gather)
    calls: list[Case] = [
        (counts, step.total),
        (lambda: of_step(step), lambda step: step.metrics()),
        (ess, lambda ess_lr: ess_lr.begin(gather)),
        (lambda: ess(base="auto"), lambda ess_lr: ess_lr.begin(gather)),
        (lambda: of_step(ewma), lambda step: step.end(1)),
        (kept, step.total),
        *((lambda name=name: merged(name), lambda stats: stats.all_reduce(gather)) for name in ("bapo", "asymre")),
        (lambda: merged("m2po"), lambda stats: stats.all_reduce(gather)),
        (local, gather_sequences),
        (local, lambda batch: gather_sequences(batch, widths=widths)),
        (part_of_head, through_head),
        (lambda: micro_batch(size.width, 0), backward),
    ]
    return dict(zip([*PARTS, CORRECTION], calls, strict=True))


@contextmanager
def counted(calls: list[tuple[str, int]]) -> Iterator[None]:
    """Adds (name, bytes of this rank's tensor) for every collective."""
    known = {name: getattr(dist, name) for name in (*OWN, *OTHERS)}

    def wrapped(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            own = args[OWN[name]]
            calls.append((name, own.numel() * own.element_size()))
            return known[name](*args, **kwargs)

        return call

    def unexpected(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a collective that no part has")

    for name in known:
        setattr(dist, name, wrapped(name) if name in OWN else unexpected)
    try:
        yield
    finally:
        for name, function in known.items():
            setattr(dist, name, function)


def work(rank: int, ranks: int, width_list: Sequence[int], rounds: int, folder: str) -> None:
    """One process: counts and times every part; the first one writes them."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", ranks), rank=rank, world_size=ranks)
    rows = []
    for width in width_list:
        size = Size(ranks, width)
        taken = cases(size, rank, gather_over())
        counts: dict[str, list[tuple[str, int]]] = {name: [] for name in taken}
        wall: dict[str, list[float]] = {name: [] for name in taken}
        cpu: dict[str, list[float]] = {name: [] for name in taken}
        for number in range(rounds + 1):
            if rank == 0:
                print(f"{ranks} ranks, {size.tokens} tokens each: round {number} of {rounds}", file=sys.stderr)
            for name, (prepare, call) in taken.items():
                prepared = prepare()
                dist.barrier()
                began, began_cpu = time.perf_counter(), time.process_time()
                if number:
                    call(prepared)
                    wall[name].append(time.perf_counter() - began)
                    cpu[name].append(time.process_time() - began_cpu)
                else:  # counted, and not timed
                    with counted(counts[name]):
                        call(prepared)
        rows += [
            {
                "part": name,
                "ranks": ranks,
                "tokens": size.tokens,
                "width": width,
                "collectives": len(counts[name]),
                "bytes": sum(own for _, own in counts[name]),
                "wall_ms": 1e3 * statistics.median(wall[name]),
                "cpu_ms": 1e3 * statistics.median(cpu[name]),
            }
            for name in taken
        ]
    if rank == 0:
        Path(folder, "rows.json").write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


def run(ranks: int, widths: Sequence[int], rounds: int) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        processes.spawn(work, args=(ranks, widths, rounds, folder), nprocs=ranks)
        rows: list[dict[str, Any]] = json.loads(Path(folder, "rows.json").read_text())
    return rows


def wrong(rows: list[dict[str, Any]]) -> list[str]:
    """Counts that are not those of the formulas."""
    found = []
    for row in rows:
        part = PARTS.get(row["part"])
        size = Size(row["ranks"], row["width"])
        wanted = (part.collectives, part.own_bytes(size)) if part else (0, 0)
        got = (row["collectives"], row["bytes"])
        if got != wanted:
            found.append(f"{row['part']}, {size}: {got[0]} collectives of {got[1]} bytes, expected {wanted}")
    return found


MERGED = {
    "metrics (`Step.metrics`), once per log": (8, *EXTRAPOLATED),
    "ESS learning rate": (8, *EXTRAPOLATED),
    "statistics of bapo": (8, *EXTRAPOLATED),
    "statistics of m2po": (8, 64, 512),  # 4096 ranks of 32,768 positions would be 2 GB with the copies
}
"""The parts whose merging is timed for many ranks, and how many."""


def merging(width: int, rounds: int) -> list[dict[str, Any]]:
    """Time of the host to merge the vectors of many ranks, which are copies of one."""
    rows = []
    for ranks in (8, *EXTRAPOLATED):
        print(f"merging the vectors of {ranks} ranks", file=sys.stderr)
        taken = cases(Size(1, width), 0, lambda vector: vector.expand(ranks, *vector.shape))  # noqa: B023
        for name in (name for name, of in MERGED.items() if ranks in of):
            prepare, call = taken[name]
            seconds = []
            for _ in range(rounds):
                prepared = prepare()
                began = time.perf_counter()
                call(prepared)
                seconds.append(time.perf_counter() - began)
            rows.append({"part": name, "ranks": ranks, "ms": 1e3 * statistics.median(seconds)})
    return rows


def readable(size: float) -> str:
    """Bytes in a unit of a thousand each."""
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} GB"


def table(report: dict[str, Any]) -> str:
    """The page's tables: what is exchanged, what it takes, what it would be for more ranks."""
    rows = {(row["part"], row["tokens"], row["ranks"]): row for row in report["rows"]}
    tokens, ranks = (sorted({row[key] for row in report["rows"]}) for key in ("tokens", "ranks"))
    lines = [
        f"| what | collectives | bytes of a rank | measured, {tokens[0]:,} tokens | {tokens[-1]:,} tokens |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, part in PARTS.items():
        measured = [rows[name, number, ranks[-1]] for number in (tokens[0], tokens[-1])]
        cells = (name, measured[0]["collectives"], part.formula, *(f"{row['bytes']:,}" for row in measured))
        lines.append(f"| {' | '.join(map(str, cells))} |")
    about = report["machine"]
    lines += ["", f"Bytes with {ranks[-1]} ranks; tokens of a rank, {MICRO_BATCHES} micro-batches of {SEQUENCES}.", ""]
    heads = (f"{number} rank{'s' * (number > 1)}" for number in ranks)
    lines += [
        f"| milliseconds (of a processor), {tokens[-1]:,} tokens | {' | '.join(heads)} |",
        "| --- |" + " --- |" * len(ranks),
    ]
    for name in (*PARTS, CORRECTION):
        taken = [rows[name, tokens[-1], number] for number in ranks]
        lines.append(f"| {name} | " + " | ".join(f"{row['wall_ms']:.2f} ({row['cpu_ms']:.2f})" for row in taken) + " |")
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    shared = f"{about['cores']} cores ({about['processor']}) that other programs used too (load {about['load']})"
    lines += ["", f"Medians of {report['settings']['rounds']} rounds; {shared}, gloo, {versions}."]
    lines += ["", "| host, milliseconds | " + " | ".join(f"{number} ranks" for number in (8, *EXTRAPOLATED)) + " |"]
    lines.append("| --- |" + " --- |" * (1 + len(EXTRAPOLATED)))
    times = {(row["part"], row["ranks"]): row["ms"] for row in report["merging"]}
    for name in MERGED:
        cells = (f"{times[name, n]:.1f}" if (name, n) in times else "not run" for n in (8, *EXTRAPOLATED))
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    lines += ["", "| received by a rank, computed | 8 ranks | " + " | ".join(f"{n} ranks" for n in EXTRAPOLATED) + " |"]
    lines.append("| --- |" + " --- |" * (1 + len(EXTRAPOLATED)))
    for name, part in PARTS.items():
        if name in SHARED:
            continue
        received = (
            (n - 1) * part.own_bytes(Size(n, tokens[-1] // (SEQUENCES * MICRO_BATCHES))) for n in (8, *EXTRAPOLATED)
        )
        lines.append(f"| {name} | " + " | ".join(map(readable, received)) + " |")
    return "\n".join(lines) + "\n"


MARKS = ("<!-- scale -->\n", "<!-- end -->")
"""The lines of the page that the tables stand between."""


def on_page(page: str, tables: str) -> str:
    """The page with these tables."""
    before, _, rest = page.partition(MARKS[0])
    _, _, after = rest.partition(MARKS[1])
    return f"{before}{MARKS[0]}{tables}{MARKS[1]}{after}"


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=flags.output, help="write the result as JSON")
    parser.add_argument("--page", type=Path, help="write the tables into this page, between its marks")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--widths", type=int, nargs="+", default=[256, 1024], help="tokens of a sequence")
    parser.add_argument("--rounds", type=int, default=25)
    options = parser.parse_args()
    if uneven := [width for width in options.widths if width % max(options.ranks)]:
        parser.error(f"--widths has {uneven[0]}, expected a multiple of {max(options.ranks)}, the most ranks")
    torch.set_num_threads(1)
    report: dict[str, Any] = {
        "command": "python benchmarks/scale.py",
        "settings": {name: getattr(options, name) for name in ("ranks", "widths", "rounds")},
        "machine": machine(),
        "versions": {"torch": torch.__version__, "Python": platform.python_version(), "offcorr": offcorr.__version__},
    }
    report["rows"] = [row for ranks in options.ranks for row in run(ranks, options.widths, options.rounds)]
    report["merging"] = merging(options.widths[-1], max(3, options.rounds // 5))
    print(table(report))
    if options.output:
        options.output.write_text(json.dumps(report, indent=1) + "\n")
    if options.page:
        options.page.write_text(on_page(options.page.read_text(), table(report)))
    if found := wrong(report["rows"]):
        raise SystemExit("\n".join(found))


if __name__ == "__main__":
    main()
