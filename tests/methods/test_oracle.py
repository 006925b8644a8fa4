"""The library against the oracle: golden data, every method, random combinations of stages."""

from __future__ import annotations

import json
import math
import random
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import offcorr
from offcorr import Batch
from offcorr.methods.registry import find
from offcorr.stages import base
from offcorr.stages import spans as library_spans
from offcorr.stages.aggregate import AGGREGATIONS
from tests.methods import oracle
from tests.methods.oracle_stages import SMTM, SMTS, SMTS_NORM, SUM, TOKEN_MEAN, Stage, trace

Case = dict[str, Any]
Options = dict[str, Any]

AGGREGATES = [TOKEN_MEAN, SMTM, SMTS, SMTS_NORM, SUM]
offcorr.available()  # some stages stand in the file of the one method that uses them
FORMS, SPANS = dict(base._FORMS), set(library_spans.SPANS)  # as they are before any test adds to them


def golden_cases(name: str) -> list[Case]:
    return json.loads((Path(__file__).parents[1] / "data" / name).read_text())["cases"]


SECOND = golden_cases("golden_cases_2.json")
FIRST = golden_cases("golden_cases.json")
for _case in FIRST:
    if _case["method"] == "m2po":
        _case["options"]["tokens"] = "all"  # the default when this table was made
GOLDEN = FIRST + SECOND


def ours(build: Any) -> bool:
    return build.__module__.startswith("offcorr.")


# Methods whose own stages compare with the engine: they need rollout_logp.
ENGINE_METHODS = {
    *("tis", "seq_tis", "icepop", "seq_mis", "geo_rs", "veto", "decoupled_ppo"),
    *("binary_kl", "dppo", "dppo_tv", "dppo_kl", "vcpo", "aipo"),
    *("cppo", "p3o", "mu_grpo", "sat", "estr", "m2po"),
    *("ipo", "glm5", "drpo", "geo_mis"),
}


# --- cases ----------------------------------------------------------------------------------------


def random_case(rng: random.Random, *, engine: bool = True, broken: bool = True) -> Case:
    """Odd sizes, tool spans, empty rows, unscored tokens, absurd ratios, garbage under the mask."""
    rows, width = rng.randint(1, 5), rng.choice([1, 2, 3, 7, 9, 13, 17])
    spread = rng.choice([0.0, 1e-3, 0.05, 0.3, 0.3, 1.0, 4.0, 1e4])
    gap = rng.choice([0.0, 1e-3, 0.05, 0.3, 1.0, 4.0, 1e4])
    style = rng.choice(["full", "ragged", "spans", "scattered"])
    mask, logp, old, rollout = [], [], [], []
    for _ in range(rows):
        length = width if style == "full" else rng.randint(0, width)
        row = [int(t < length) for t in range(width)]
        if style == "spans" and length > 2:
            start = rng.randrange(length)
            for t in range(start, min(length, start + rng.randint(1, 4))):
                row[t] = 0
        if style == "scattered":
            row = [int(rng.random() < 0.6) for _ in range(width)]
        mask.append(row)
        logp.append([-rng.expovariate(1.0) for _ in range(width)])
        old.append([min(x + rng.gauss(0, spread), -1e-6) if spread else x for x in logp[-1]])
        rollout.append([min(x + rng.gauss(0, gap), -1e-6) if gap else x for x in old[-1]])
    unscored = rng.choice([0.0, 0.0, 0.2])
    junk = [math.nan, math.inf, -math.inf, 1e30, 0.0, 5.0]
    bad_tokens = 0.05 if broken and rng.random() < 0.15 else 0.0
    per_token = rng.random() < 0.4
    advantages = [[rng.gauss(0, 1) for _ in range(width)] for _ in range(rows)]
    for b in range(rows):
        if rng.random() < 0.1:
            advantages[b] = [0.0] * width
        for t in range(width):
            if not mask[b][t]:
                for table in (logp, old, rollout, advantages):
                    table[b][t] = rng.choice(junk)
                continue
            if rng.random() < unscored:
                rollout[b][t] = rng.choice([math.nan, math.inf, -math.inf])
            if rng.random() < bad_tokens:
                rng.choice([logp, old])[b][t] = rng.choice([math.nan, math.inf, -math.inf])
    valid = [(b, t) for b in range(rows) for t in range(width) if mask[b][t]]
    for table in (logp, old):
        if valid and not any(math.isfinite(table[b][t]) for b, t in valid):  # that would be an error
            table[valid[0][0]][valid[0][1]] = -1.0
    if not per_token:
        advantages = [rng.gauss(0, 1) if rng.random() < 0.9 else 0.0 for _ in range(rows)]
    return {
        "mask": mask,
        "logp": logp,
        "old_logp": None if rng.random() < 0.05 else old,
        "rollout_logp": rollout if engine or rng.random() < 0.5 else None,
        "advantages": advantages,
        "rewards": [rng.choice([-1.0, 0.0, 1.0]) for _ in range(rows)],
        "group_ids": [rng.randrange(2) for _ in range(rows)],
        "turn_ids": random_turns(rng, mask) if rng.random() < 0.2 else None,
        "weight": random_factors(rng, mask) if rng.random() < 0.2 else None,
        "entropy": [[rng.expovariate(1.0) if valid else rng.choice(junk) for valid in row] for row in mask],
    }


def random_factors(rng: random.Random, mask: list[list[int]]) -> Any:
    """A weight of the caller's own, per sequence or per token, with anything under the mask."""
    if rng.random() < 0.5:
        return [rng.uniform(0.0, 2.0) for _ in mask]
    return [[rng.uniform(0.0, 2.0) if valid else rng.choice([math.nan, math.inf]) for valid in row] for row in mask]


def random_turns(rng: random.Random, mask: list[list[int]]) -> list[list[int]]:
    """Turns that need not be the runs of the mask; what stands under the mask belongs to none."""
    turns = []
    for row in mask:
        turn, ids = 0, []
        for valid in row:
            turn += int(rng.random() < 0.3)
            ids.append(turn if valid else rng.randrange(9))
        turns.append(ids)
    return turns


FLOATS = ("logp", "old_logp", "rollout_logp", "advantages", "rewards", "weight", "entropy")


def tensor(values: Any, dtype: torch.dtype) -> torch.Tensor | None:
    if values is None:
        return None
    nested = isinstance(values[0], list)
    numbers = [[math.nan if x is None else x for x in row] for row in values] if nested else list(values)
    return torch.tensor(numbers, dtype=dtype)


def rounded(case: Case, dtype: torch.dtype) -> Case:
    """The case as the dtype holds it, so that both sides see the same numbers."""
    result = dict(case)
    for name in FLOATS:
        if case.get(name) is not None:
            result[name] = tensor(case[name], dtype).double().tolist()
    return result


def as_batch(case: Case, dtype: torch.dtype) -> Batch:
    fields = {name: tensor(case.get(name), dtype) for name in FLOATS}
    fields["logp"].requires_grad_(True)
    integers = {name: torch.tensor(case[name]) for name in ("group_ids", "turn_ids") if case.get(name) is not None}
    return Batch(**fields, **integers, mask=torch.tensor(case["mask"], dtype=torch.bool))


# --- comparison -----------------------------------------------------------------------------------


def tolerance(case: Case, dtype: torch.dtype) -> float:
    """Relative error allowed: float64 1e-9; float32 by the nats that a product adds up."""
    if dtype == torch.float64:
        return 1e-9
    nats = 0.0
    for b, row in enumerate(case["mask"]):
        total = 0.0
        for t, valid in enumerate(row):
            values = [case[k][b][t] for k in FLOATS[:3] if valid and case[k] is not None]
            finite = [value for value in values if value is not None and math.isfinite(value)]
            total += min(20.0, max(finite) - min(finite)) if finite else 0.0
        nats = max(nats, total)
    return 2e-6 * (5.0 + nats)


def assert_same(loss_fn: Any, case: Case, expected: tuple[float, Any], dtype: torch.dtype, **call: Any) -> None:
    """Loss, coefficient and autograd's gradient equal the oracle's."""
    magnitude, unit = trace.magnitude, trace.unit
    loss, coefficient = expected
    batch = as_batch(case, dtype)
    out = loss_fn(batch, **call, kept="denominator" in call and not loss_fn.count_rejected)
    relative = tolerance(case, dtype)
    assert out.loss.dtype == dtype
    # Far out, where a term is small against |w A / Z|, float32 rounds what stands in its exponent.
    smallest = 1e-30 if dtype == torch.float64 else relative * unit
    assert float(out.loss.detach()) == pytest.approx(loss, rel=0.0, abs=relative * magnitude + smallest)
    wanted = torch.tensor(coefficient, dtype=torch.float64)
    floor = relative * unit
    assert out.coefficient.dtype == dtype
    torch.testing.assert_close(out.coefficient.double(), wanted, rtol=relative, atol=floor)
    (gradient,) = torch.autograd.grad(out.loss, batch.logp)
    torch.testing.assert_close(gradient.double(), wanted, rtol=relative, atol=floor)


@contextmanager
def describing(*what: Any) -> Iterator[None]:
    """Say which random draw a failed comparison came from."""
    try:
        yield
    except AssertionError as error:
        raise AssertionError(f"{' '.join(map(str, what))}\n{error}") from error


def decided(case: Case, dtype: torch.dtype) -> bool:
    """Whether rounding to the dtype leaves every threshold of the last evaluation on its side."""
    return trace.closest > 10 * tolerance(case, dtype)


# --- golden data ----------------------------------------------------------------------------------


def test_the_second_golden_table_is_complete() -> None:
    assert len(SECOND) == 51


@pytest.mark.parametrize("index", range(len(GOLDEN)))
def test_the_oracle_reproduces_the_golden_table(index: int) -> None:
    case = GOLDEN[index]
    loss, coefficient = oracle.evaluate(case["method"], case["options"], case, case["aggregate"])
    assert loss == pytest.approx(case["loss"], rel=1e-12, abs=0.0)
    for row, wanted in zip(coefficient, case["coefficient"], strict=True):
        assert row == pytest.approx(wanted, rel=1e-12, abs=0.0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("case", GOLDEN, ids=lambda c: c["method"])
def test_golden_table(case: Case, dtype: torch.dtype) -> None:
    options = dict(case["options"])
    if case["aggregate"]:
        options["aggregate"] = case["aggregate"]
    loss_fn = offcorr.get(case["method"], **options)
    batch = as_batch(case, dtype)
    out = loss_fn(batch)
    relative, floor = (1e-10, 1e-14) if dtype == torch.float64 else (2e-5, 1e-7)
    assert float(out.loss.detach()) == pytest.approx(case["loss"], rel=relative, abs=floor)
    wanted = torch.tensor(case["coefficient"], dtype=torch.float64)
    (gradient,) = torch.autograd.grad(out.loss, batch.logp)
    torch.testing.assert_close(out.coefficient.double(), wanted, rtol=relative, atol=floor)
    torch.testing.assert_close(gradient.double(), wanted, rtol=relative, atol=floor)


# --- every method, random cases -------------------------------------------------------------------


def ppo_options(rng: random.Random) -> Options:
    return {
        "eps_low": rng.uniform(0.05, 0.9),
        "eps_high": rng.uniform(0.05, 2.0),
        "dual_clip": rng.choice([None, rng.uniform(1.1, 4.0)]),
    }


def small_clip(rng: random.Random) -> Options:
    return {"eps_low": rng.uniform(1e-3, 0.2), "eps_high": rng.uniform(1e-3, 0.2)}


def bounds(rng: random.Random) -> Options:
    return {"eps_low": rng.uniform(0.05, 0.9), "eps_high": rng.uniform(0.05, 2.0)}


def cppo_options(rng: random.Random) -> Options:
    low = rng.uniform(0.0, 0.1)
    return {
        "delta": rng.uniform(0.01, 0.3),
        "w_min": rng.choice([0.0, 1.0, rng.random()]),
        "budget_low": low,
        "budget_high": low + rng.uniform(0.0, 0.2),
        "quantile": rng.choice([0.0, 1.0, rng.random()]),
    }


def floors(rng: random.Random) -> Options:
    return {name: rng.choice([None, rng.uniform(0.1, 0.5)]) for name in ("floor_low", "floor_high")}


def m2po_options(rng: random.Random) -> Options:
    options: Options = {"tau": rng.uniform(0.001, 0.5), "mismatch": rng.choice(["staleness", "total"])}
    if rng.random() < 0.5:
        return {**options, "mode": "clip", **floors(rng)}
    return {**options, "tokens": rng.choice(["outward", "all"])}


def cap(rng: random.Random) -> Options:
    return {"cap": rng.uniform(0.5, 9.0)}


def optional_cap(rng: random.Random) -> Options:
    return {"cap": rng.choice([None, rng.uniform(0.5, 9.0)])}


def band(rng: random.Random) -> Options:
    return {"low": rng.uniform(0.1, 0.95), "high": rng.uniform(1.05, 5.0)}


def with_ppo(own: Callable[[random.Random], Options]) -> Callable[[random.Random], Options]:
    return lambda rng: {**ppo_options(rng), **own(rng)}


def dppo_options(rng: random.Random) -> Options:
    return {
        "divergence": rng.choice(["tv", "kl"]),
        "low": rng.uniform(0.01, 0.3),
        "high": rng.uniform(0.01, 0.3),
        "delta": rng.uniform(0.001, 0.2),
        "cap": rng.uniform(1.0, 20.0),
    }


def opsm_options(rng: random.Random) -> Options:
    return {"delta": rng.uniform(0.0, 1.0), "level": rng.choice(["token", "sequence"])}


def position_options(rng: random.Random) -> Options:
    return {
        "log_low": rng.uniform(0.01, 0.5),
        "log_high": rng.uniform(0.01, 0.5),
        "power": rng.uniform(-1.0, 1.0),
        "log_dual": rng.choice([None, rng.uniform(0.01, 0.5), *2 * [rng.uniform(8.0, 20.0)]]),
    }


OPTIONS: dict[str, Callable[[random.Random], Options]] = {
    "reinforce": lambda rng: {},
    "token_is": optional_cap,
    "prefix_is": optional_cap,
    "cumulative_is": optional_cap,
    "sequence_is": optional_cap,
    "near_overlap": lambda rng: {
        "lam": rng.choice([0.0, 1.0, rng.random(), rng.random()]),
        "mismatch": rng.choice([None, "staleness"]),
    },
    "ppo": ppo_options,
    "grpo": ppo_options,
    "dapo": ppo_options,
    "decoupled_ppo": with_ppo(cap),
    "tis": with_ppo(cap),
    "seq_tis": with_ppo(cap),
    "icepop": with_ppo(band),
    "seq_mis": with_ppo(cap),
    "geo_rs": with_ppo(band),
    "veto": with_ppo(lambda rng: {"threshold": 10 ** rng.uniform(-2, -0.05)}),
    "opsm": with_ppo(opsm_options),
    "binary_kl": with_ppo(lambda rng: {"bound": 10 ** rng.uniform(-3, 0)}),
    "vaco": lambda rng: {
        "bound": rng.uniform(0.01, 1.0),
        "divergence": rng.choice(["ratio", "tv", "kl"]),
        "increase_only": rng.random() < 0.7,
    },
    "gspo": small_clip,
    "luspo": small_clip,
    "gmpo": lambda rng: {"eps_low": rng.uniform(0.05, 1.0), "eps_high": rng.uniform(0.05, 1.0)},
    "cispo": lambda rng: {"cap": rng.uniform(1.0, 9.0), "low": rng.uniform(0.0, 0.9)},
    "aipo": cap,
    "dispo": lambda rng: {
        "pos_low": rng.uniform(0.0, 1.0),
        "pos_high": rng.uniform(1.0, 20.0),
        "neg_low": rng.uniform(0.0, 1.0),
        "neg_high": rng.uniform(1.0, 200.0),
    },
    "sapo": lambda rng: {"tau_pos": rng.uniform(0.3, 3.0), "tau_neg": rng.uniform(0.3, 3.0)},
    "minpro": lambda rng: {
        "eps_low": rng.uniform(0.1, 1.0),
        "eps_high": rng.uniform(0.1, 2.0),
        "bounded": rng.random() < 0.5,
    },
    "ctpo": lambda rng: {**position_options(rng), "level": rng.choice(["prefix", "prefix_geometric"])},
    "turn_ppo": ppo_options,
    "holderpo": with_ppo(lambda rng: {"power": rng.choice([-1.0, 0.0, 0.5, 1.0, 2.0])}),
    "dppo": dppo_options,
    "dppo_tv": dppo_options,
    "dppo_kl": lambda rng: {"delta": rng.uniform(0.001, 0.2), "cap": rng.uniform(1.0, 20.0)},
    "vespo": lambda rng: {key: rng.uniform(0.5, 4.0) for key in ("k_pos", "lam_pos", "k_neg", "lam_neg")},
    "dgpo": lambda rng: {
        "eps_low": rng.uniform(0.05, 0.9),
        "eps_high": rng.uniform(0.05, 1.0),
        "n": rng.choice([0.5, 1.0, 2.0]),
        "m": rng.choice([1.0, 2.0, 3.0]),
    },
    "topr": lambda rng: {"level": rng.choice(["sequence", "token"])},
    "asymre": lambda rng: {"delta_v": rng.uniform(-0.5, 0.0)},
    "opmd": lambda rng: {"tau": rng.uniform(0.1, 3.0)},
    "kimi": lambda rng: {"tau": rng.uniform(0.01, 1.0)},
    "dro": lambda rng: {"tau": rng.uniform(0.01, 1.0)},
    "rec": lambda rng: {
        "mode": rng.choice(["one-side", "two-side", "ring"]),
        "weighted": rng.random() < 0.5,
        "eps_low": rng.uniform(0.05, 0.4),
        "eps_high": rng.uniform(0.05, 0.9),
        "eps_low_prime": rng.uniform(0.5, 0.9),
        "eps_high_prime": rng.uniform(1.0, 3.0),
    },
    "m2po": m2po_options,
    "cppo": lambda rng: {**cppo_options(rng), "cap": rng.choice([None, rng.uniform(1.0, 20.0)])},
    "p3o": lambda rng: {},
    "mu_grpo": lambda rng: {"threshold": 10 ** rng.uniform(-6, -0.1), **bounds(rng)},
    "sat": lambda rng: {
        **bounds(rng),
        "quantile": rng.choice([0.5, 0.9, 1.0]),
        "power": rng.uniform(0.5, 4.0),
        "level": rng.choice(["token", "geometric"]),
    },
    "estr": lambda rng: {"tau": 10 ** rng.uniform(-3, 0), "floor": rng.choice([0.0, 0.01]), **bounds(rng)},
    "bapo": lambda rng: {"target": rng.uniform(0.3, 2.0)},
    "vcpo": cap,
    "ipo": lambda rng: {"threshold": rng.uniform(0.01, 0.4), "kl_tau": rng.choice([0.0, rng.uniform(0.001, 0.5)])},
    "glm5": lambda rng: {"eps_low": rng.uniform(0.05, 0.9), "eps_high": rng.uniform(0.05, 2.0)},
    "drpo": lambda rng: {"delta": 10 ** rng.uniform(-1, 1.3), "divergence": rng.choice(["tv", "chi2"])},
    "pspo": lambda rng: {"alpha": rng.uniform(0.0, 0.9)},
    "pnpo": lambda rng: {**band(rng), "length_power": rng.choice([0.0, 0.5, rng.uniform(0.0, 2.0)])},
    "geo_mis": band,
}


# Names that only the library's own files define: other packages and other tests may register methods too.
OWN = sorted(method for method in offcorr.available() if ours(find(method).build))

WITHOUT_ORACLE: dict[str, str] = {}
"""Methods that no oracle checks, each with the reason.  Nothing is left out in silence."""


def test_every_method_has_an_oracle() -> None:
    without = sorted(set(OWN) - set(oracle.METHODS) - set(WITHOUT_ORACLE))
    assert not without, (
        f"no oracle checks {without}: write the formula of the paper as a @method in tests/methods/oracle.py, and its "
        "random options in OPTIONS in tests/methods/test_oracle.py"
    )
    unknown = sorted((set(oracle.METHODS) | set(WITHOUT_ORACLE)) - set(OWN))
    assert not unknown, f"the oracle has {unknown}, which the library does not: take them out of tests/methods/"
    assert not set(WITHOUT_ORACLE) & set(oracle.METHODS), "an oracle for a method that is said to have none"


def test_every_oracle_has_random_options() -> None:
    assert sorted(OPTIONS) == sorted(oracle.METHODS), "OPTIONS in tests/methods/test_oracle.py and the oracle differ"


def random_call(rng: random.Random) -> tuple[Options, Options]:
    """How a loss is normalised: (options of the loss, options of the call)."""
    loss: Options = {"aggregate": rng.choice(AGGREGATES)}
    call: Options = {}
    if loss["aggregate"] == SMTS_NORM:
        loss["max_length"] = rng.choice([5, 17, 64])
    if loss["aggregate"] != SUM and rng.random() < 0.3:
        call["denominator"] = rng.randint(1, 50)
    if rng.random() < 0.3:
        loss["count_rejected"] = False
    return loss, call


@pytest.mark.parametrize("name", sorted(OPTIONS))
def test_methods_on_random_cases(name: str, draws: int) -> None:
    rng = random.Random(name)
    undecided = 0
    for _ in range(draws):
        case = random_case(rng, engine=name in ENGINE_METHODS)
        options = OPTIONS[name](rng)
        if rng.random() < 0.2:
            options = dict(find(name).example)
        loss, call = random_call(rng)
        loss_fn = offcorr.get(name, **options, **loss)
        for dtype in (torch.float64, torch.float32):
            seen = rounded(case, dtype)
            expected = oracle.evaluate(name, options, seen, **loss, **call)
            if decided(seen, dtype):
                with describing(options, loss, call, dtype):
                    assert_same(loss_fn, seen, expected, dtype, **call)
            else:
                undecided += 1
    assert undecided < max(10, draws // 4)


# --- free combinations ----------------------------------------------------------------------------


Draw = Callable[[random.Random], Options]
LEVELS = ["token", "turn", "prefix", "geometric", "sequence"]
REDUCTIONS = ["token", "seq-sum", "seq-mean", "seq-max"]


def nothing(rng: random.Random) -> Options:
    return {}


def log_bound(low: float, high: float) -> Draw:
    return lambda rng: {"bound": 10 ** rng.uniform(low, high)}


def moment(rng: random.Random) -> Options:
    return {**log_bound(-3, 0.5)(rng), "level": rng.choice(REDUCTIONS)}


RATIOS: dict[str, Draw] = {
    "Token": nothing,
    "Sequence": nothing,
    "Geometric": nothing,
    "Turn": nothing,
    "Prefix": nothing,
    "PrefixGeometric": nothing,
    "Nearby": lambda rng: {"lam": rng.random()},
    "MinPrefix": lambda rng: {"bounded": rng.random() < 0.5},
    "PowerMean": lambda rng: {"power": rng.choice([-2.0, -1.0, -0.3, 0.0, 0.5, 1.0, 2.0])},
    "ClippedGeometric": OPTIONS["gmpo"],
}
GATES: dict[str, Draw] = {
    "ScoreFunction": nothing,
    "DetachedRatio": nothing,
    "Overlap": nothing,
    "Unclipped": nothing,
    "Clip": ppo_options,
    "DetachedClip": lambda rng: {"cap": rng.uniform(1.0, 9.0), "low": rng.uniform(0.0, 0.9)},
    "SoftClip": OPTIONS["sapo"],
    "PositionClip": position_options,
    "SignClip": OPTIONS["dispo"],
    "DecayingClip": OPTIONS["dgpo"],
    "GammaKernel": OPTIONS["vespo"],
    "Tapered": nothing,
    "ScaledScore": OPTIONS["opmd"],
    "Quadratic": OPTIONS["kimi"],
    "Asymmetric": OPTIONS["asymre"],
    "ProbabilityRegion": OPTIONS["ipo"],
    "DetachedMask": OPTIONS["glm5"],
    "RatioPenalty": OPTIONS["drpo"],
    "SmoothedRatio": OPTIONS["pspo"],
    "BalancedClip": lambda rng: {**oracle.METHODS["bapo"].defaults, **OPTIONS["bapo"](rng)},
    "MomentClip": lambda rng: {"tau": rng.uniform(0.001, 0.5), **floors(rng)},
    "EssCap": nothing,
    "EssCapped": lambda rng: {"share": rng.random()},
    "NarrowingClip": lambda rng: {
        **bounds(rng),
        "tail": rng.choice([0.0, rng.random()]),
        "power": rng.uniform(0.5, 4.0),
        "level": rng.choice(["token", "geometric"]),
    },
    "TailClip": OPTIONS["sat"],
}
OWN_MISMATCH = {"MomentClip", "EssCap", "TailClip"}
"""Gates that compare policies themselves: the ratio's."""
TOKEN_FORM = {"Quadratic", "EssCap", "EssCapped"}
"""Gates that are defined on ratios in token form only."""
NO_RATIO = {"ScoreFunction", "ScaledScore", "Asymmetric"}
"""Gates that look at no ratio: only then a weight may count the staleness."""
DETACHED = NO_RATIO | {
    *("DetachedRatio", "DetachedClip", "DetachedMask", "Overlap", "SignClip", "GammaKernel", "Tapered")
}
"""Gates that an engine ratio, which does not depend on logp, can multiply."""
MEANS = {"PowerMean", "ClippedGeometric"}
"""Ratios whose slope is not 1."""
WEIGHTS: dict[str, Draw] = {
    "Truncate": cap,
    "Mask": band,
    "Bound": lambda rng: {
        **{key: rng.choice([None, value]) for key, value in band(rng).items()},
        "outside": rng.choice(["clamp", "mask"]),
    },
    "SelfNormalise": lambda rng: {"over": rng.choice(["batch", "group"])},
}
REJECTIONS: dict[str, Draw] = {
    "Geometric": band,
    "K1": lambda rng: {**band(rng), "level": rng.choice(REDUCTIONS)},
    "K2": moment,
    "K3": moment,
    "Veto": lambda rng: {"threshold": 10 ** rng.uniform(-2, -0.05)},
    "OPSM": opsm_options,
    "NarrowingInterval": OPTIONS["pnpo"],
    "BinaryKL": log_bound(-3, 0),
    "DPPO": lambda rng: {
        **{key: rng.uniform(0.01, 0.3) for key in ("low", "high", "delta")},
        "divergence": rng.choice(["tv", "kl"]),
    },
    "VACO": lambda rng: {
        **log_bound(-3, 0)(rng),
        "divergence": rng.choice(["ratio", "tv", "kl"]),
        "increase_only": rng.random() < 0.7,
    },
    "REC": lambda rng: {key: value for key, value in OPTIONS["rec"](rng).items() if key != "weighted"},
    "MomentBudget": lambda rng: {"tau": rng.uniform(0.001, 0.5), "tokens": rng.choice(["outward", "all"])},
    "SquareBound": lambda rng: {"bound": 10 ** rng.uniform(-4, 0), "tokens": rng.choice(["outward", "all"])},
    "SuffixVeto": lambda rng: {"threshold": 10 ** rng.uniform(-6, -0.1)},
    "CPPO": cppo_options,
    "ESTR": lambda rng: {"tau": 10 ** rng.uniform(-3, 0), "floor": rng.choice([0.0, 0.01])},
}
STALENESS_ONLY = {"REC"}
"""Rejections that their paper defines between logp and old_logp; others are drawn for every pair of policies."""
DRAWN = {"ratio": RATIOS, "gate": GATES, "weight": WEIGHTS, "rejection": REJECTIONS}


def in_config(name: str) -> str:
    """The name of a class as configurations have it."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()


@pytest.mark.parametrize("kind", DRAWN)
def test_every_stage_has_an_oracle_and_is_drawn(kind: str) -> None:
    """That the oracle knows what is drawn, ``test_free_corrections_on_random_cases`` shows."""
    registered = {name for known, name in FORMS if known == kind and ours(FORMS[known, name])}
    drawn = {in_config(name) for name in DRAWN[kind]}
    without = sorted(registered - drawn)
    assert not without, (
        f"no oracle checks these stages ({kind}): {without}; write them down in tests/methods/oracle_stages.py and "
        f"draw their options in {kind.upper()}S in tests/methods/test_oracle.py"
    )
    assert not drawn - registered, f"drawn as {kind}, but not in the library: {sorted(drawn - registered)}"


def configured(kind: str, stage: Stage | None) -> Any:
    """The library's stage of that name and those options."""
    if stage is None:
        return None
    name, options = stage
    inner = {"inner": configured(kind, options["inner"])} if "inner" in options else {}
    return base.stage_from_config(kind, {"name": in_config(name), **options, **inner})


def all_configured(kind: str, stages: list[Stage]) -> Any:
    return tuple(configured(kind, stage) for stage in stages) or None


def random_weight(rng: random.Random, mismatches: list[str], name: str | None = None) -> Stage:
    name = name or rng.choice([*WEIGHTS, "SelfNormalise"])
    options = WEIGHTS[name](rng)
    if name == "SelfNormalise":
        return name, {"inner": random_weight(rng, mismatches, "Bound"), **options}
    return name, {**options, "level": rng.choice(LEVELS), "mismatch": rng.choice(mismatches)}


def random_rejection(rng: random.Random) -> Stage:
    name = rng.choice(list(REJECTIONS))
    options = REJECTIONS[name](rng)
    if name not in STALENESS_ONLY and rng.random() < 0.5:
        options["mismatch"] = rng.choice(["engine", "staleness", "total"])
    return name, options


def random_stages(rng: random.Random) -> Options:
    """A ratio, a gate, weights and rejections that count no ratio twice."""
    gate = rng.choice(list(GATES))
    ratios = [name for name in RATIOS if gate not in TOKEN_FORM or name not in MEANS]
    mismatch = rng.choice(["staleness", "staleness", "total", *(["engine"] if gate in DETACHED else [])])
    name = rng.choice(ratios)
    ratio = (name, {**RATIOS[name](rng), "mismatch": mismatch}) if gate not in NO_RATIO or rng.random() < 0.5 else None
    counted = mismatch if ratio and gate not in NO_RATIO else None
    free = {"staleness": ["engine"], None: ["staleness", "engine", "total"]}.get(counted, [])
    weights = [random_weight(rng, free)] if free and rng.random() < 0.6 else []
    rejects = [random_rejection(rng) for _ in range(rng.choice([0, 0, 1, 1, 2]))]
    options = GATES[gate](rng) | ({"mismatch": mismatch} if gate in OWN_MISMATCH else {})
    return {"ratio": ratio, "gate": (gate, options), "weights": weights, "rejects": rejects}


def built(stages: Options) -> Options:
    return {
        "ratio": configured("ratio", stages["ratio"]),
        "gate": configured("gate", stages["gate"]),
        "weight": all_configured("weight", stages["weights"]),
        "reject": all_configured("rejection", stages["rejects"]),
    }


SEEDS = range(20)


def free_draws(seed: int, draws: int) -> Iterator[tuple[Case, Options, Options, Options]]:
    """(case, stages, options of the loss, options of the call), so many times."""
    rng = random.Random(seed)
    for _ in range(draws):
        yield random_case(rng), random_stages(rng), *random_call(rng)


@pytest.mark.parametrize("seed", SEEDS)
def test_free_corrections_on_random_cases(seed: int, draws: int) -> None:
    undecided = 0
    for case, stages, loss, call in free_draws(seed, draws):
        loss_fn = offcorr.Correction(**built(stages), **loss)
        for dtype in (torch.float64, torch.float32):
            seen = rounded(case, dtype)
            expected = oracle.evaluate_stages(seen, **stages, **loss, **call)
            if decided(seen, dtype):
                with describing(stages, loss, call, dtype):
                    assert_same(loss_fn, seen, expected, dtype, **call)
            else:
                undecided += 1
    assert undecided < draws // 2


def test_the_draws_leave_nothing_out(draws: int) -> None:
    """Every stage, span and aggregation of the library is in some draw of the test above."""
    drawn, spans, aggregates = defaultdict(set), set(), set()
    for seed in SEEDS:
        for _, stages, loss, _ in free_draws(seed, draws):
            aggregates.add(loss["aggregate"])
            places = {"ratio": [stages["ratio"]], "gate": [stages["gate"]]}
            places |= {"weight": stages["weights"], "rejection": stages["rejects"]}
            for kind, chosen in places.items():
                for stage in filter(None, chosen):
                    drawn[kind].add(stage[0])
                    spans.add(getattr(configured(kind, stage), "span", None))
    for kind, table in DRAWN.items():
        assert drawn[kind] == set(table), f"never drawn ({kind}): {sorted(set(table) - drawn[kind])}"
    assert spans - {None} == SPANS, f"no draw has the span {sorted(SPANS - spans)}: draw a stage that uses it"
    assert aggregates == set(AGGREGATIONS), "AGGREGATES in tests/methods/test_oracle.py, and the library's"


@pytest.mark.parametrize("log_ratio", [-3.0, -18.0, -19.0])
def test_a_weight_is_not_divided_by_a_vanishing_mean(log_ratio: float) -> None:
    """A mean of exp(-18) is divided by, exp(-19) < 1e-8 is not."""
    case = {
        "mask": [[1, 1]],
        "logp": [[-20.0, -20.0]],
        "old_logp": [[-20.0, -20.0]],
        "rollout_logp": [[-20.0 - log_ratio, -20.0 - log_ratio]],
        "advantages": [1.0],
        "rewards": None,
    }
    stages: Options = {
        "ratio": None,
        "gate": ("ScoreFunction", {}),
        "weights": [("SelfNormalise", {"inner": ("Truncate", {"cap": 2.0})})],
        "rejects": [],
    }
    loss_fn = offcorr.Correction(**built(stages))
    for dtype in (torch.float64, torch.float32):
        assert_same(loss_fn, case, oracle.evaluate_stages(case, **stages), dtype)


@pytest.mark.parametrize("name", ["tis", "geo_rs"])
def test_given_stages_replace_a_methods_own(name: str) -> None:
    rng = random.Random(name)
    for _ in range(40):
        case = rounded(random_case(rng), torch.float64)
        if name == "tis":
            stages = [random_weight(rng, ["engine"]) for _ in range(rng.randint(0, 1))]
            given = {"weight": all_configured("weight", stages)}
        else:
            stages = [random_rejection(rng) for _ in range(rng.randint(0, 2))]
            given = {"reject": all_configured("rejection", stages)}
        loss_fn = offcorr.get(name, **given)
        expected = oracle.evaluate(name, dict.fromkeys(given, stages), case)
        if decided(case, torch.float64):
            assert_same(loss_fn, case, expected, torch.float64)


# --- the oracle's gradient is its loss's ----------------------------------------------------------

# Losses that are differentiable as they stand (nothing detached, each token's own ratio) and those
# whose token form equals the full gradient under SMTM and one advantage a sequence.
DIFFERENTIABLE = {
    **{name: {"aggregate": TOKEN_MEAN} for name in ("reinforce", "ppo", "dapo", "sapo", "kimi")},
    **{name: {"aggregate": SMTM} for name in ("gspo", "gmpo", "holderpo", "opmd")},
}


@pytest.mark.parametrize("name", sorted(DIFFERENTIABLE))
def test_the_oracles_coefficient_is_the_slope_of_its_loss(name: str) -> None:
    rng = random.Random(name)
    for _ in range(10):
        case = random_case(rng, broken=False)
        case["advantages"] = [rng.gauss(0, 1) for _ in case["mask"]]
        case["weight"] = None
        if case["old_logp"] is None:
            continue
        seen = {k: v for k, v in case.items() if k != "rollout_logp"}
        options = OPTIONS[name](rng)
        _, coefficient = oracle.evaluate(name, options, seen, **DIFFERENTIABLE[name])
        if trace.closest < 1e-4:
            continue
        for b, row in enumerate(case["mask"]):
            for t, valid in enumerate(row):
                if not valid or abs(case["logp"][b][t] - case["old_logp"][b][t]) > 5:
                    continue
                ends = []
                for step in (1e-6, -1e-6):
                    moved = [list(values) for values in case["logp"]]
                    moved[b][t] += step
                    ends.append(oracle.evaluate(name, options, {**seen, "logp": moved}, **DIFFERENTIABLE[name])[0])
                slope = (ends[0] - ends[1]) / 2e-6
                scale = max(1e-6, abs(ends[0]))
                assert slope == pytest.approx(coefficient[b][t], rel=1e-5, abs=1e-8 * scale + 1e-8)
