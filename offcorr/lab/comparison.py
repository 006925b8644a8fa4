"""The output of ``offcorr compare``: rows, columns with their formulas, the table and the picture."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from offcorr.correction import Correction
from offcorr.lab.contract import marked, notes_of
from offcorr.lab.exact import SIZES, Measured, World
from offcorr.lab.text import entries, folded, listed
from offcorr.methods.registry import catalogue, file_of, split_spec

__all__ = ["Column", "Row", "checked", "illustrated", "picture", "same_updates", "table"]

SMALL, LARGE = SIZES
SHORT, LONG = 14, 26
"""Characters of a name before it is folded: at least; and if it fits once columns are left out."""
TIMED = (64, 256)
"""Sequences and tokens of the batch that is timed."""
ROUNDS = 20
"""The number of rounds in which each method is timed once."""


class Row(NamedTuple):
    """A method in the table."""

    name: str
    aliases: tuple[str, ...]
    loss_fn: Correction
    measured: Measured
    seconds: float  # per token
    fails: str = ""  # what it fails of offcorr.testing.check


class Column(NamedTuple):
    """A column: its key in JSON, its head, its formula in the caption, its value and how that is printed."""

    key: str
    head: str
    formula: str
    value: Callable[[Row], float]
    text: Callable[[float], str]
    leaves: int = 0  # in which order columns are left out where the terminal is narrow; 0: never


def _plain(value: float) -> str:
    if value < 1e-9:
        return "0"
    return f"{value:.0e}" if value < 0.0005 else f"{value:.3f}" if value < 10 else f"{value:.3g}"


def _two(value: float) -> str:
    return "0" if abs(value) < 1e-9 else f"{value:.2f}"


def _accuracy(size: int, field: str) -> Callable[[Row], float]:
    return lambda row: float(getattr(row.measured.accuracy[size], field))


COLUMNS = (
    Column("bias", "bias", f"|E G - g| / |g|; of a method marked *, at N = {LARGE}", _accuracy(LARGE, "bias"), _plain),
    Column(
        f"variance_{SMALL}",
        f"var {SMALL}",
        f"E|G - E G|^2 / |g|^2 at N = {SMALL}",
        _accuracy(SMALL, "variance"),
        _plain,
    ),
    Column(f"variance_{LARGE}", f"var {LARGE}", f"the same at N = {LARGE}", _accuracy(LARGE, "variance"), _plain, 2),
    Column(
        f"rmse_{SMALL}",
        f"rmse {SMALL}",
        "sqrt(bias^2 + var); G = 0 has 1, so a method that only shrinks its gradient looks good here",
        _accuracy(SMALL, "rmse"),
        _plain,
        3,
    ),
    Column(f"rmse_{LARGE}", f"rmse {LARGE}", f"the same at N = {LARGE}", _accuracy(LARGE, "rmse"), _plain, 1),
    Column(
        f"direction_{SMALL}",
        f"dir {SMALL}",
        f"E<G, g> / (sqrt(E|G|^2) |g|) at N = {SMALL}: 1 is the true gradient, 0 is useless, below 0 leads away; "
        "the learning rate cannot change it",
        _accuracy(SMALL, "direction"),
        _two,
    ),
    Column(f"direction_{LARGE}", f"dir {LARGE}", f"the same at N = {LARGE}", _accuracy(LARGE, "direction"), _two),
    Column(
        "direction_limit",
        "dir inf",
        "the same for N to infinity: the cosine between E G and g",
        lambda row: row.measured.limit,
        _two,
    ),
    Column(
        "kept",
        "kept",
        "share of the sampled tokens with an advantage that get a gradient",
        lambda row: row.measured.kept,
        _two,
    ),
    Column(
        "multiplier",
        "mean c",
        "mean |c A| / mean |A| over the sampled tokens: 1 without a correction; the length of the gradient is "
        "another number where tokens are dropped",
        lambda row: row.measured.multiplier,
        _two,
    ),
    Column(
        "nanoseconds_per_token",
        "ns/tok",
        f"CPU time of loss and gradient per token, one thread, {TIMED[0]} sequences of {TIMED[1]} tokens in float32, "
        f"metrics included: the shortest of {ROUNDS} rounds, in which the methods take turns. Other work on the "
        "machine makes it longer; a difference of a third or so says nothing",
        lambda row: 1e9 * row.seconds,
        lambda value: f"{value:.0f}",
    ),
)
NOT_A_RANKING = (
    "One setting is not a ranking: the order changes with the regime, the gap, the length and the seed, and how "
    "accurate one gradient is does not predict how training goes (docs/which.md)."
)
SCOPE = (
    "The numbers say how close a single gradient comes to the true one in this world; they do not say how stable "
    "training with a method is."
)
TIE = 0.005
"""Directions that differ by less are printed as one."""
ENGINE = "The engine has a mismatch here, which biases a method that compares staleness alone."
ENGINE_OF = {
    ("sequence_is",): "sequence_is, unbiased without one, is not.",
    (
        "geo_mis",
        "vcpo",
    ): "geo_mis and vcpo weight each sequence by the engine's ratio as well; what they mask or cap is "
    "the bias that is left.",
}
"""Effects of the mismatch on methods, said where one of them is in the table."""
COLLAPSES = "in the arena, training with old samples, it is among the first to collapse (docs/which.md)."
REACHED = (
    "A clip is a trust region, not an estimator: a small kept or a direction of 0 or below says that the trainer has "
    "moved as far as the clip allows, so that it lets little through, or a part that points away from the true "
    "gradient; it does not say that training with it fails."
)
OFF = 0.1
"""Share of the gap that was asked for by which the one reached may differ before the table says so."""
FEW = 0.2
"""Share of the tokens that get a gradient, below which ``REACHED`` is said."""


def illustrated(names: Iterable[str]) -> list[str]:
    """A note for each method with options that have no default and are not given: it runs at ``Method.example``.

    Args:
        names: the methods as they were asked for, options included; other names have no note.

    >>> illustrated(["ppo", "estr", "pnpo?low=0.9", "estr?tau=0.2"])
    ['estr ran with tau=0.1, an illustration: this option has no default.',
    'pnpo?low=0.9 ran with high=1.25, an illustration: this option has no default.']
    """
    known = {name: method for method in catalogue() for name in (method.name, *method.aliases)}
    notes = []
    for name in names:
        method = known.get(name.partition("?")[0].rpartition(":")[2])
        if method is None or not method.example or (file_of(name) and method.build.__module__.startswith("offcorr.")):
            continue
        given = split_spec(name)[1]
        missing = {option: value for option, value in method.example.items() if option not in given}
        if missing:
            values = ", ".join(f"{option}={value!r}" for option, value in missing.items())
            have = "this option has" if len(missing) == 1 else "these options have"
            notes.append(f"{name} ran with {values}, an illustration: {have} no default.")
    return notes


def same_updates(rows: Sequence[Row]) -> list[list[Row]]:
    """The rows whose c is the same on every token of every sequence, where there are at least two."""
    groups: list[list[Row]] = []
    for row in rows:
        own = row.measured.coefficient
        for group in groups:
            other = group[0].measured.coefficient
            if own is not None and other is not None and torch.allclose(own, other, rtol=1e-9, atol=1e-12):
                group.append(row)
                break
        else:
            groups.append([row])
    return [group for group in groups if len(group) > 1]


# -- the table -----------------------------------------------------------------------------------------------


def table(world: World, rows: Sequence[Row], width: int) -> str:
    """The setting, what the numbers can say, the table, what must not be concluded, and the caption.

    Args:
        width: characters of a line, at most.
    """
    width = max(width, 40)
    cells = {column: [column.text(column.value(row)) for row in rows] for column in COLUMNS}
    wide = {column: 2 + max(len(column.head), *map(len, texts)) for column, texts in cells.items()}
    longest, shown = max(len(_label(row)) for row in rows), list(COLUMNS)
    always = sum(wide[column] for column in COLUMNS if not column.leaves)
    label = min(longest, max(SHORT, min(LONG, width - always)))
    for column in sorted(COLUMNS, key=lambda column: column.leaves):
        if column.leaves and label + sum(wide[c] for c in shown) > width:
            shown.remove(column)
    label = min(longest, max(label, width - sum(wide[c] for c in shown)))
    blocks: list[list[Column]] = [[]]
    for column in shown:
        if blocks[-1] and label + sum(wide[c] for c in [*blocks[-1], column]) > width:
            blocks.append([])
        blocks[-1].append(column)

    lines = [*entries(_about(world), width), "", *entries([("", _scope(rows))], width)]
    for block in blocks:
        lines += ["", " " * label + "".join(column.head.rjust(wide[column]) for column in block)]
        for number, row in enumerate(rows):
            *above, last = folded(_label(row), label)
            numbers = "".join(cells[column][number].rjust(wide[column]) for column in block)
            lines += [*above, last.ljust(label) + numbers]
    return "\n".join([*lines, "", *entries([("", NOT_A_RANKING)], width), "", *_caption(world, rows, shown, width)])


def _about(world: World) -> list[tuple[str, str]]:
    setting, found, other = world.setting, world.distances(), other_gaps(world)

    def gap(pair: str) -> str:
        share, size = found[pair]["ess"], found[pair]["abs_mean"]
        said = f"effective sample size (ESS) {share:.2f} of the sequences, mean |log-ratio| {size:.2f} nats per token"
        return "; ".join(filter(None, [said, other.get(pair, "")]))

    drawn, new = world.success(world.engine), world.success(world.trainer)
    return [
        (
            "world",
            f"{world.tree.sequences:,} sequences of {setting.length} token{'s' * (setting.length != 1)} over "
            f"{setting.vocabulary} symbols, {setting.policy} policy, {setting.advantages} advantages, seed "
            f"{setting.seed}",
        ),
        (
            "reward",
            f"0 or 1: 1 for {drawn:.0%} of the sequences that the sampler draws, and for {new:.0%} of those that the "
            "trainer would draw",
        ),
        ("staleness", f"{setting.regime}: {gap('staleness')}" if setting.gap else "none (--gap)"),
        ("engine", f"{setting.engine_regime}: {gap('engine')}" if setting.engine_gap else "none (--engine-gap)"),
    ]


def other_gaps(world: World) -> dict[str, str]:
    """The gap that was asked for and the one reached, of each pair of policies where they differ by more than ``OFF``.

    The log-probs of a quantised engine change in steps, and so does its gap.
    """
    wanted = {"staleness": ("--gap", world.setting.gap), "engine": ("--engine-gap", world.setting.engine_gap)}
    reached = {pair: 1 - found["ess"] for pair, found in world.distances().items()}
    return {
        pair: f"{option} asks for 1 - ESS = {gap:g}, reached is {reached[pair]:.2g}"
        for pair, (option, gap) in wanted.items()
        if gap and abs(reached[pair] - gap) > OFF * gap
    }


def _scope(rows: Sequence[Row]) -> str:
    """The scope of the numbers; what a small or backward update means; and what reinforce's rank does not say."""
    reached = any(row.measured.limit <= 0 or row.measured.kept < FEW for row in rows)
    return " ".join(filter(None, [SCOPE, REACHED if reached else "", _uncorrected(rows)]))


def _uncorrected(rows: Sequence[Row]) -> str:
    """Where reinforce is among the rows: the methods that it beats, and how it trains."""
    plain = next((row for row in rows if row.name == "reinforce"), None)
    if plain is None:
        return ""
    own = plain.measured.accuracy[LARGE].direction
    worse = [row.name for row in rows if row.measured.accuracy[LARGE].direction < own - TIE]
    if not worse:
        return f"reinforce corrects nothing, and {COLLAPSES}"
    some = listed(worse) if len(worse) <= 3 else f"{len(worse)} of the {len(rows) - 1} other methods"
    return (
        f"reinforce corrects nothing, and its direction (dir {LARGE}) is nearer to the true one here than that "
        f"of {some}; yet {COLLAPSES}"
    )


def _caption(world: World, rows: Sequence[Row], shown: Sequence[Column], width: int) -> list[str]:
    first = (
        "G is the gradient of a batch of N sequences drawn from the engine, g the true policy gradient, c a token's "
        "multiplier: dL/dlogp = -c A / Z."
    )
    notes = []
    if absent := [column.head for column in COLUMNS if column not in shown]:
        notes.append(f"Left out for the width of this terminal: {', '.join(absent)}; --json has every column.")
    if draws := max(row.measured.drawn for row in rows):
        notes.append(
            f"* couples the sequences of a batch: {draws} batches of each size were drawn (--draws); all else is exact."
        )
    notes += [*notes_of(map(checked, rows)), *illustrated(row.name for row in rows)]
    if renamed := [" = ".join((row.name, *row.aliases)) for row in rows if row.aliases]:
        notes.append(f"Two names of one method: {'; '.join(renamed)}.")
    for group in same_updates(rows):
        notes.append(f"The same update in this setting: {', '.join(row.name for row in group)}.")
    if not world.setting.engine_gap and any("engine" in row.loss_fn.compares for row in rows):
        notes.append("The engine has no mismatch here; --engine-gap 0.05 shows what a correction of it does.")
    if world.setting.engine_gap and not all(row.loss_fn.compares & {"engine", "total"} for row in rows):
        names = {row.name.partition("?")[0] for row in rows}
        notes.append(" ".join([ENGINE, *(said for of, said in ENGINE_OF.items() if not names.isdisjoint(of))]))
    return [
        *entries([("", first)], width),
        *entries([(column.head, column.formula) for column in shown], width),
        *entries([("", note) for note in notes], width),
    ]


def _label(row: Row) -> str:
    return marked(checked(row)) + (" *" if row.measured.drawn else "")


def checked(row: Row) -> dict[str, str | None]:
    """A method's name, and what it fails of ``offcorr.testing.check``."""
    return {"method": row.name, "fails_check": row.fails or None}


# -- the picture ---------------------------------------------------------------------------------------------


LEAST_ROWS = 6
"""Rows for which a picture has room, at least: below that titles and legend would not fit."""


def picture(world: World, rows: Sequence[Row], path: Path) -> None:
    """Draws direction quality, bias beside noise, and the effect on the tokens; needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    places = list(range(len(rows)))
    figure, axes = plt.subplots(
        1, 3, figsize=(11, 1.7 + 0.2 * max(len(rows), LEAST_ROWS)), sharey=True, constrained_layout=True, squeeze=False
    )
    direction, error, effect = axes[0]

    def dots(axis: Any, values: list[float], mark: str, label: str, size: int = 5) -> None:
        axis.plot(values, places, mark, label=label, markersize=size)

    for size, mark, width in ((SMALL, "C0o", 8), (LARGE, "C1s", 5)):  # the first is seen behind the second
        dots(direction, [row.measured.accuracy[size].direction for row in rows], mark, f"N = {size}", width)
    dots(direction, [row.measured.limit for row in rows], "k|", "N to infinity")
    direction.axvline(0, color="black", linewidth=0.8)
    direction.set_title("direction quality\n1: the true gradient; below 0: leads away", fontsize=10)
    direction.set_xlim(-1.05, 1.05)

    dots(error, [row.measured.accuracy[LARGE].bias for row in rows], "C3D", "bias")
    noise = [row.measured.accuracy[SMALL].variance ** 0.5 for row in rows]
    dots(error, noise, "C0o", f"noise at N = {SMALL}")
    error.axvline(1, color="black", linewidth=0.8, linestyle=":")
    error.set_title("relative bias and noise (sqrt of var)\ndotted: the bias of no gradient at all", fontsize=10)
    if max(noise) > 10:
        error.set_xscale("symlog", linthresh=1)
    error.set_xlim(left=-0.05)

    dots(effect, [row.measured.kept for row in rows], "C2o", "kept", 8)
    dots(effect, [row.measured.multiplier for row in rows], "C4D", "mean c")
    effect.axvline(1, color="black", linewidth=0.8)
    effect.set_title("effect on the tokens\n1: as without a correction", fontsize=10)
    effect.set_xlim(-0.05, 1.05 * max(1, *(row.measured.multiplier for row in rows)))

    direction.set_yticks(places, [_label(row) for row in rows], fontsize=8)
    direction.set_ylim(max(len(rows), LEAST_ROWS) - 0.4, -0.6)
    for axis in axes[0]:
        axis.grid(axis="y", linewidth=0.3)
        axis.legend(
            fontsize=8,
            loc="upper center",
            bbox_to_anchor=(0.5, -1.5 / (max(len(rows), LEAST_ROWS) + 1)),
            ncols=3,
            frameon=False,
        )
    setting, share = world.setting, world.distances()
    staleness, engine = (share[pair]["ess"] for pair in ("staleness", "engine"))
    figure.suptitle(
        f"One setting, not a ranking: {setting.vocabulary} symbols, {setting.length} tokens, {setting.policy}, "
        f"{setting.regime}, ESS {staleness:.2f} (engine {engine:.2f}), "
        f"{setting.advantages} advantages, seed {setting.seed}",
        fontsize=9,
    )
    figure.savefig(path, dpi=110)
    plt.close(figure)
