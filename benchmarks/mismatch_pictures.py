"""The picture of docs/mismatch.md: eight causes, each made for real, and the marks that they leave on d.

    python benchmarks/mismatch_pictures.py [--output docs/mismatch.png]

The dumps are those of ``offcorr.lab.mismatch`` with architecture llama and seed 0, 32 sequences each.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from offcorr.diagnose.causes.profile import Profile
from offcorr.diagnose.evidence import Evidence
from offcorr.lab.mismatch import Dump, make

ROOT = Path(__file__).resolve().parent.parent
ARCHITECTURE, SEED = "llama", 0
DRAWN: Mapping[str, str] = {
    "precision": "the sampler computes in {precision}",
    "stale_weights": "sampler {lag} updates behind ({chain})",
    "temperature": "sampler at {temperature}, trainer at {trainer_temperature:g}",
    "top_p": "top_p = {top_p}",
    "shift": "log-probs late by {shift} token",
    "truncated_prompt": "trainer lacks {dropped:.0%} of the prompt",
    "weights_swapped": "new weights at about token {swapped_at}",
    "dropout": "dropout of {dropout} in the trainer",
}
"""The causes in the order of the rows, and the settings that are written beside each."""
BINS = 24
"""Of the positions, for the median; and half of those of the histogram."""


def main() -> int:
    """Makes the dumps and draws them."""
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "mismatch.png", metavar="FILE.png")
    options = parser.parse_args()
    dumps = []
    for cause in DRAWN:
        dumps.append(make([cause], architecture=ARCHITECTURE, seed=SEED))
        print(f"{cause}: {len(dumps)} of {len(DRAWN)} made", file=sys.stderr, flush=True)
    draw(dumps, options.output)
    print(f"picture: {options.output}, {options.output.stat().st_size / 1000:.0f} kB")
    return 0


def draw(dumps: list[Dump], file: Path) -> None:
    """One row per dump: d against the log-prob, |d| / (1 - p) over the position, and the histogram of d."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(len(dumps), 3, figsize=(10, 1.75 * len(dumps)), constrained_layout=True)
    for row, dump in zip(axes, dumps, strict=True):
        evidence = Evidence.of(dump.records)
        _against_logp(row[0], evidence)
        _over_position(row[1], Profile.of(evidence))
        _histogram(row[2], evidence.d)
        (cause,) = dump.causes
        row[0].set_title(cause, loc="left", fontsize=10, fontweight="bold")
        row[1].set_title(DRAWN[cause].format(**dump.settings), loc="left", fontsize=8)
        row[2].set_title(f"mean |d| {evidence.gap:.2g}, mean ratio {evidence.ratio_identity.value:.3f}", fontsize=8)
        for axis in row:
            axis.tick_params(labelsize=7)
    for axis, label in zip(axes[-1], ("trainer's log-prob", "position in the completion", "d"), strict=True):
        axis.set_xlabel(f"{label}, {'tokens' if 'position' in label else 'nats'}", fontsize=8)
    figure.savefig(file, dpi=76, pil_kwargs={"optimize": True})
    plt.close(figure)


def _against_logp(axis: Any, evidence: Evidence) -> None:
    axis.axhline(0, color="grey", linewidth=0.7)
    axis.plot(np.maximum(evidence.trainer, -10), evidence.d, ".", markersize=1.5, color="C0", alpha=0.5)
    most = 1.1 * float(np.quantile(evidence.size, 0.995))
    axis.set(xlim=(-10.2, 0.2), ylim=(-most, most))
    axis.set_ylabel("d, nats", fontsize=8)


def _over_position(axis: Any, profile: Profile) -> None:
    least = 1e-3 * profile.mean
    size = np.maximum(profile.size, least)
    edges = np.unique(np.linspace(0, profile.position.max() + 1, BINS + 1).astype(int))
    place = np.searchsorted(edges, profile.position, side="right") - 1
    inside = [size[place == bin] for bin in range(len(edges) - 1)]
    axis.plot(profile.position, size, ".", markersize=1.5, color="C0", alpha=0.25)
    middles, medians = zip(
        *(
            ((edges[bin] + edges[bin + 1] - 1) / 2, np.median(values))
            for bin, values in enumerate(inside)
            if len(values)
        ),
        strict=True,
    )
    axis.plot(middles, medians, color="C3", linewidth=1.3)
    axis.set(yscale="log", ylim=(least, 1.3 * float(size.max())))
    axis.set_ylabel("|d| / (1 - p)", fontsize=8)


def _histogram(axis: Any, d: np.ndarray[Any, Any]) -> None:
    most = 1.1 * float(np.quantile(np.abs(d), 0.995))
    axis.hist(np.clip(d, -most, most), bins=np.linspace(-most, most, 2 * BINS + 2), color="C0")
    axis.axvline(0, color="grey", linewidth=0.7)
    axis.set(yscale="log", xlim=(-most, most))
    axis.set_ylabel("tokens", fontsize=8)


if __name__ == "__main__":
    sys.exit(main())
