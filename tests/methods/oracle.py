"""Every correction as its paper writes it, to check the library against.

`evaluate` gives the loss and dL/dlogp of a named method, `evaluate_stages` of any combination of
stages, in float64 Python loops (`oracle_stages.py`). A case is a dict of nested lists: `logp`,
`old_logp`, `rollout_logp` (None: not given; None or NaN inside: unscored), `advantages` ([B] or
[B][T]), `mask`, `rewards`, `group_ids`, `turn_ids`, `entropy`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

from tests.methods import oracle_stages as stages
from tests.methods.oracle_stages import (
    SMTM,
    SMTS,
    SMTS_NORM,
    TOKEN_MEAN,
    Composition,
    Sequence,
    Stage,
    read,
    run,
)

Builder = Callable[[SimpleNamespace, list[Sequence]], Composition]


class Method(NamedTuple):
    build: Builder
    aggregate: str
    defaults: dict[str, Any]


METHODS: dict[str, Method] = {}


def method(*names: str, aggregate: str = TOKEN_MEAN, **defaults: Any) -> Callable[[Builder], Builder]:
    def add(builder: Builder) -> Builder:
        for name in names:
            METHODS[name] = Method(builder, aggregate, defaults)
        return builder

    return add


def evaluate(
    name: str,
    options: dict[str, Any],
    case: dict[str, Any],
    aggregate: str | None = None,
    max_length: int | None = None,
    denominator: float | None = None,
    count_rejected: bool = True,
) -> tuple[float, list[list[float]]]:
    """Loss and dL/dlogp of a named method; `aggregate=None` is the method's own.

    `options` may hold `weight` and `reject`, lists of stages that replace the method's own.
    """
    stages.trace.closest = math.inf
    builder, own_aggregate, defaults = METHODS[name]
    own = {key: value for key, value in options.items() if key not in ("weight", "reject")}
    unknown = set(own) - set(defaults)
    if unknown:
        raise ValueError(f"{name} has no option {sorted(unknown)}")
    batch = read(case)
    composed = builder(SimpleNamespace(**{**defaults, **own}), batch)
    composed.weights = options.get("weight", composed.weights)
    composed.rejects = options.get("reject", composed.rejects)
    composed.aggregate = aggregate or own_aggregate
    return run(composed, batch, len(case["mask"][0]), max_length, denominator, count_rejected)


def evaluate_stages(
    case: dict[str, Any],
    *,
    gate: Stage,
    ratio: Stage | None = None,
    weights: list[Stage] | None = None,
    rejects: list[Stage] | None = None,
    aggregate: str = TOKEN_MEAN,
    **options: Any,
) -> tuple[float, list[list[float]]]:
    """Loss and dL/dlogp of a free combination of stages."""
    stages.trace.closest = math.inf
    method = Composition(gate, ratio, weights or [], rejects or [], aggregate)
    return run(method, read(case), len(case["mask"][0]), **options)


def clip_gate(o: SimpleNamespace) -> Stage:
    return ("Clip", {"eps_low": o.eps_low, "eps_high": o.eps_high, "dual_clip": o.dual_clip})


PPO = {"eps_low": 0.2, "eps_high": 0.2, "dual_clip": None}
TOKEN: Stage = ("Token", {})
TOTAL: Stage = ("Token", {"mismatch": "total"})


@method("reinforce")
def _reinforce(o, batch):
    return Composition(("ScoreFunction", {}))


@method("token_is", cap=None)
def _token_is(o, batch):
    return Composition(("DetachedClip", {"cap": o.cap}), ("Token", {}))


@method("prefix_is", "cumulative_is", cap=None)
def _prefix_is(o, batch):
    return Composition(("DetachedClip", {"cap": o.cap}), ("Prefix", {}))


@method("near_overlap", lam=0.8, mismatch=None)
def _near_overlap(o, batch):
    return Composition(("Overlap", {}), ("Nearby", {"lam": o.lam, "mismatch": o.mismatch}))


@method("sequence_is", cap=None)
def _sequence_is(o, batch):
    return Composition(("DetachedClip", {"cap": o.cap}), ("Sequence", {}))


@method("ppo", "grpo", aggregate=SMTM, **PPO)
@method("dapo", **{**PPO, "eps_high": 0.28})
def _ppo(o, batch):
    return Composition(clip_gate(o), TOKEN)


@method("tis", cap=2.0, **PPO)
@method("decoupled_ppo", cap=5.0, **PPO)
def _tis(o, batch):
    return Composition(clip_gate(o), TOKEN, [("Truncate", {"cap": o.cap})])


@method("seq_tis", cap=2.0, **PPO)
def _seq_tis(o, batch):
    return Composition(clip_gate(o), TOKEN, [("Truncate", {"cap": o.cap, "level": "sequence"})])


@method("icepop", low=0.5, high=5.0, **PPO)
def _icepop(o, batch):
    return Composition(clip_gate(o), TOKEN, [("Mask", {"low": o.low, "high": o.high})])


@method("seq_mis", cap=3.0, **PPO)
def _seq_mis(o, batch):
    band = ("Bound", {"high": o.cap, "outside": "mask", "level": "sequence"})
    return Composition(clip_gate(o), TOKEN, [band])


@method("geo_rs", low=0.999, high=1.001, **PPO)
def _geo_rs(o, batch):
    return Composition(clip_gate(o), TOKEN, [], [("Geometric", {"low": o.low, "high": o.high})])


@method("veto", threshold=1e-4, **PPO)
def _veto(o, batch):
    return Composition(clip_gate(o), TOKEN, [], [("Veto", {"threshold": o.threshold})])


@method("opsm", delta=0.5, level="token", **PPO)
def _opsm(o, batch):
    return Composition(clip_gate(o), TOKEN, [], [("OPSM", {"delta": o.delta, "level": o.level})])


@method("binary_kl", bound=0.05, **PPO)
def _binary_kl(o, batch):
    return Composition(clip_gate(o), TOKEN, [], [("BinaryKL", {"bound": o.bound})])


@method("vaco", bound=0.2, divergence="ratio", increase_only=True)
def _vaco(o, batch):
    options = {"bound": o.bound, "divergence": o.divergence, "increase_only": o.increase_only}
    return Composition(("Unclipped", {}), TOKEN, [], [("VACO", options)])


@method("gspo", aggregate=SMTM, eps_low=3e-4, eps_high=4e-4, dual_clip=None)
@method("luspo", aggregate=SMTS, eps_low=2e-3, eps_high=2.5e-3, dual_clip=None)
def _gspo(o, batch):
    return Composition(clip_gate(o), ("Geometric", {}))


@method("gmpo", aggregate=SMTM, eps_low=0.4, eps_high=0.4)
def _gmpo(o, batch):
    return Composition(("Unclipped", {}), ("ClippedGeometric", vars(o)))


@method("cispo", cap=5.0, low=0.0)
def _cispo(o, batch):
    return Composition(("DetachedClip", {"cap": o.cap, "low": o.low}), TOKEN)


@method("aipo", cap=4.0)
def _aipo(o, batch):
    return Composition(("DetachedClip", {"cap": o.cap}), ("Token", {"mismatch": "total"}))


@method("dispo", pos_low=0.8, pos_high=11.0, neg_low=0.0, neg_high=101.0)
def _dispo(o, batch):
    return Composition(("SignClip", vars(o)), TOKEN)


@method("sapo", aggregate=SMTM, tau_pos=1.0, tau_neg=1.05)
def _sapo(o, batch):
    return Composition(("SoftClip", vars(o)), TOKEN)


@method("minpro", eps_low=1.0, eps_high=0.28, bounded=False)
def _minpro(o, batch):
    limits = {"low": 1.0 - o.eps_low, "cap": 1.0 + o.eps_high}
    return Composition(("DetachedClip", limits), ("MinPrefix", {"bounded": o.bounded}))


@method("ctpo", log_low=0.025, log_high=0.05, power=0.5, log_dual=None, level="prefix")
def _ctpo(o, batch):
    return Composition(("PositionClip", vars(o)), ("Prefix" if o.level == "prefix" else "PrefixGeometric", {}))


@method("turn_ppo", **PPO)
def _turn_ppo(o, batch):
    return Composition(clip_gate(o), ("Turn", {}))


@method("holderpo", aggregate=SMTM, power=2.0, **PPO)
def _holderpo(o, batch):
    return Composition(clip_gate(o), ("PowerMean", {"power": o.power}))


@method("dppo", "dppo_tv", aggregate=SMTS_NORM, divergence="tv", low=0.2, high=0.2, delta=0.05, cap=20.0)
def _dppo(o, batch):
    keep = {"divergence": o.divergence, "low": o.low, "high": o.high, "delta": o.delta}
    return Composition(("DetachedClip", {"cap": o.cap}), ("Token", {"mismatch": "total"}), [], [("DPPO", keep)])


@method("dppo_kl", aggregate=SMTS_NORM, delta=0.05, cap=20.0)
def _dppo_kl(o, batch):
    keep = {"divergence": "kl", "delta": o.delta}
    return Composition(("DetachedClip", {"cap": o.cap}), ("Token", {"mismatch": "total"}), [], [("DPPO", keep)])


@method("ipo", threshold=0.3, kl_tau=0.0)
def _ipo(o, batch):
    return Composition(("ProbabilityRegion", vars(o)), TOTAL)


@method("glm5", eps_low=0.2, eps_high=0.2)
def _glm5(o, batch):
    return Composition(("DetachedMask", vars(o)), TOTAL)


@method("drpo", delta=12.5, divergence="tv")
def _drpo(o, batch):
    return Composition(("RatioPenalty", vars(o)), TOTAL)


@method("pspo", aggregate=SMTM, alpha=0.1)
def _pspo(o, batch):
    return Composition(("SmoothedRatio", vars(o)), TOKEN)


@method("pnpo", aggregate=SMTM, low=None, high=None, length_power=0.5)
def _pnpo(o, batch):
    return Composition(("DetachedRatio", {}), ("PrefixGeometric", {}), [], [("NarrowingInterval", vars(o))])


@method("geo_mis", low=None, high=None)
def _geo_mis(o, batch):
    weight = ("Truncate", {"cap": None, "level": "sequence", "mismatch": "total"})
    keep = ("Geometric", {"low": o.low, "high": o.high, "mismatch": "total"})
    return Composition(("ScoreFunction", {}), None, [weight], [keep])


@method("vespo", k_pos=2.0, lam_pos=3.0, k_neg=3.0, lam_neg=2.0)
def _vespo(o, batch):
    return Composition(("GammaKernel", vars(o)), ("Sequence", {}))


@method("dgpo", eps_low=0.2, eps_high=0.2, n=1.0, m=2.0)
def _dgpo(o, batch):
    return Composition(("DecayingClip", vars(o)), TOKEN)


@method("topr", aggregate=SMTS, level="sequence")
def _topr(o, batch):
    return Composition(("Tapered", {}), ("Sequence" if o.level == "sequence" else "Token", {}))


@method("asymre", delta_v=-0.1)
def _asymre(o, batch):
    return Composition(("Asymmetric", {"delta_v": o.delta_v}))


@method("opmd", tau=1.0)
def _opmd(o, batch):
    return Composition(("ScaledScore", vars(o)))


@method("kimi", "dro", tau=0.1)
def _kimi(o, batch):
    return Composition(("Quadratic", vars(o)), TOKEN)


@method("vcpo", aggregate=SMTM, cap=8.0)
def _vcpo(o, batch):
    weight = ("Truncate", {"cap": o.cap, "level": "sequence", "mismatch": "total"})
    return Composition(("ScoreFunction", {}), None, [weight])


@method(
    "rec",
    mode="one-side",
    weighted=True,
    eps_low=0.2,
    eps_high=0.2,
    eps_low_prime=0.6,
    eps_high_prime=2.0,
)
def _rec(o, batch):
    gate = ("DetachedRatio" if o.weighted else "ScoreFunction", {})
    return Composition(gate, TOKEN, [], [("REC", vars(o))])


@method("m2po", tau=0.04, tokens="outward", mode="mask", mismatch="staleness", floor_low=None, floor_high=None)
def _m2po(o, batch):
    ratio = ("Token", {"mismatch": o.mismatch})
    if o.mode == "clip":
        floors = {"floor_low": o.floor_low, "floor_high": o.floor_high}
        return Composition(("MomentClip", {"tau": o.tau, "mismatch": o.mismatch, **floors}), ratio)
    budget = ("MomentBudget", {"tau": o.tau, "tokens": o.tokens, "mismatch": o.mismatch})
    return Composition(("Unclipped", {}), ratio, [], [budget])


TOTAL: Stage = ("Token", {"mismatch": "total"})


@method("cppo", delta=0.2, w_min=0.8, budget_low=0.02, budget_high=0.04, quantile=0.9, cap=20.0)
def _cppo(o, batch):
    keep = {name: value for name, value in vars(o).items() if name != "cap"}
    return Composition(("DetachedClip", {"cap": o.cap}), TOTAL, [], [("CPPO", keep)])


@method("p3o")
def _p3o(o, batch):
    return Composition(("EssCap", {"mismatch": "total"}), TOTAL)


@method("mu_grpo", aggregate=SMTM, threshold=1e-4, eps_low=1.0, eps_high=4.0)
def _mu_grpo(o, batch):
    clip = ("Clip", {"eps_low": o.eps_low, "eps_high": o.eps_high})
    return Composition(clip, TOTAL, [], [("SuffixVeto", {"threshold": o.threshold})])


@method("sat", aggregate=SMTM, eps_low=0.2, eps_high=0.2, quantile=0.9, power=2.0, level="token")
def _sat(o, batch):
    ratio = TOTAL if o.level == "token" else ("Geometric", {"mismatch": "total"})
    return Composition(("TailClip", {**vars(o), "mismatch": "total"}), ratio)


@method("estr", tau=0.1, floor=0.01, eps_low=0.2, eps_high=0.2)  # tau as in the library's example
def _estr(o, batch):
    clip = ("Clip", {"eps_low": o.eps_low, "eps_high": o.eps_high})
    return Composition(clip, TOTAL, [], [("ESTR", {"tau": o.tau, "floor": o.floor})])


@method(
    "bapo",
    target=1.0,
    low_start=0.6,
    low_max=0.8,
    low_step=0.05,
    high_start=1.2,
    high_max=2.0,
    high_step=0.05,
    dual_clip=3.0,
)
def _bapo(o, batch):
    return Composition(("BalancedClip", vars(o)), TOKEN)
