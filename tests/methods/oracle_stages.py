"""Every stage as its paper writes it: float64 Python, one sequence and one token at a time.

Nothing here knows torch, a batch dimension or the library. A sequence is the list of its valid
tokens, so a masked token cannot enter a product, a minimum or a count. A stage is written
`(name, options)`, for example `("Truncate", {"cap": 2.0})`; no ratio is `None`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

LIMIT = 20.0  # nats; a token's log-ratio, and every exponent
TOKEN_MEAN, SMTM = "token-mean", "seq-mean-token-mean"
SMTS, SMTS_NORM, SUM = "seq-mean-token-sum", "seq-mean-token-sum-norm", "sum"

Stage = tuple[str, dict[str, Any]]


@dataclass
class Token:
    """One valid token. `column` is its place in the padded row."""

    column: int
    logp: float
    old: float
    rollout: float  # equals `old` where the engine gave no score: rho = 1, R = r
    scored: bool
    finite: bool
    advantage: float
    turn: int
    weight: float  # given with the batch; it multiplies the token's term
    entropy: float


@dataclass
class Sequence:
    row: int
    tokens: list[Token]
    reward: float
    group: int


@dataclass
class Composition:
    """A method: one choice at each stage."""

    gate: Stage
    ratio: Stage | None = None
    weights: list[Stage] = field(default_factory=list)
    rejects: list[Stage] = field(default_factory=list)
    aggregate: str = TOKEN_MEAN


# --- decisions -----------------------------------------------------------------------------------


@dataclass
class Trace:
    """What a comparison in lower precision has to know about the last evaluation."""

    closest: float = math.inf  # smallest distance to a bound at which the coefficient jumps
    magnitude: float = 0.0  # sum of |terms| of the loss
    unit: float = 0.0  # largest |w A / Z|: the coefficient where the multiplier is 1


trace = Trace()


def near(value: float, bound: float) -> None:
    """Note the distance to a bound; on it exactly (a token with no mismatch) nothing can tip."""
    if value != bound and math.isfinite(bound):
        trace.closest = min(trace.closest, abs(value - bound) / max(abs(bound), 1.0))


def inside(value: float, low: float | None, high: float | None) -> bool:
    for bound in (low, high):
        if bound is not None:
            near(value, bound)
    return (low is None or value >= low) and (high is None or value <= high)


def clamp(value: float, low: float | None, high: float | None) -> float:
    if low is not None and value < low:
        return low
    if high is not None and value > high:
        return high
    return value


def power(log_ratio: float, upper: float = LIMIT) -> float:
    return math.exp(clamp(log_ratio, -LIMIT, upper))


# --- reading a case ------------------------------------------------------------------------------


def number(value: float | None) -> float:
    return math.nan if value is None else float(value)


def read(case: dict[str, Any]) -> list[Sequence]:
    """The sequences of a case, valid tokens only."""
    sequences = []
    for row, mask in enumerate(case["mask"]):
        tokens: list[Token] = []
        turn, previous = -1, None
        for column, valid in enumerate(mask):
            if not valid:
                continue
            if previous is None or column != previous + 1:
                turn += 1  # a turn is a contiguous run of the mask ...
            previous = column
            logp = number(case["logp"][row][column])
            old = logp if case.get("old_logp") is None else number(case["old_logp"][row][column])
            rollout = math.nan
            if case.get("rollout_logp") is not None:
                rollout = number(case["rollout_logp"][row][column])
            scored = math.isfinite(rollout)
            advantage = case["advantages"][row]
            if isinstance(advantage, (list, tuple)):
                advantage = advantage[column]
            given = 1.0 if case.get("weight") is None else case["weight"][row]
            if isinstance(given, (list, tuple)):
                given = given[column]
            if case.get("turn_ids") is not None:
                turn = case["turn_ids"][row][column]  # ... unless the case says otherwise
            tokens.append(
                Token(
                    column=column,
                    logp=logp,
                    old=old,
                    rollout=rollout if scored else old,
                    scored=scored,
                    finite=math.isfinite(logp) and math.isfinite(old),
                    advantage=float(advantage),
                    turn=turn,
                    weight=float(given),
                    entropy=math.nan if case.get("entropy") is None else case["entropy"][row][column],
                )
            )
        reward = case["rewards"][row] if case.get("rewards") is not None else math.nan
        group = case["group_ids"][row] if case.get("group_ids") is not None else 0
        sequences.append(Sequence(row, tokens, reward, group))
    return sequences


def difference(token: Token, of: str, limit: float = LIMIT) -> float:
    """The log-ratio of one token: 0 where it is no number, clamped to +-20."""
    if not token.finite:
        return 0.0
    if of == "staleness":
        d = token.logp - token.old
    elif of == "engine":
        d = token.old - token.rollout
    elif of == "total":
        d = token.logp - token.rollout
    else:
        raise ValueError(of)
    return clamp(d, -limit, limit)


def differences(sequence: Sequence, of: str) -> list[float]:
    return [difference(token, of) for token in sequence.tokens]


def mean(values: list[float]) -> float:
    return math.fsum(values) / len(values)


# --- ratios: (log-ratio, slope) of each token ----------------------------------------------------


def by_turn(sequence: Sequence, values: list[float]) -> list[float]:
    turns = defaultdict(list)
    for token, value in zip(sequence.tokens, values, strict=True):
        turns[token.turn].append(value)
    return [mean(turns[token.turn]) for token in sequence.tokens]


def spread(values: list[float], level: str, sequence: Sequence) -> list[float]:
    """The log-ratio at each token when the ratio spans a token, turn, prefix or sequence."""
    if level == "token":
        return list(values)
    if level == "sequence":
        return [math.fsum(values)] * len(values)
    if level == "geometric":
        return [mean(values)] * len(values) if values else []
    if level == "turn":
        return by_turn(sequence, values)
    if level == "prefix":
        return [math.fsum(values[: t + 1]) for t in range(len(values))]
    if level == "prefix_geometric":
        return [math.fsum(values[: t + 1]) / (t + 1) for t in range(len(values))]
    raise ValueError(level)


def ratio(stage: Stage | None, sequence: Sequence) -> list[tuple[float, float]]:
    if stage is None:
        return [(0.0, 1.0)] * len(sequence.tokens)
    name, o = stage
    d = differences(sequence, o.get("mismatch") or ("total" if name == "Nearby" else "staleness"))
    if name == "Nearby":
        lam = o["lam"]
        result = [(math.fsum(lam ** abs(t - u) * d[u] for u in range(len(d))), 1.0) for t in range(len(d))]
    elif name == "MinPrefix":
        result = []
        for t, own in enumerate(d):
            smallest = min(d[:t]) if t else 0.0
            if o.get("bounded", False):
                smallest = min(smallest, 0.0)
            result.append((smallest + own, 1.0))
    elif name == "PowerMean":
        p = o["power"]
        if p == 0.0:
            log_mean = mean(d) if d else 0.0
        elif d:
            top = max(p * own for own in d)
            log_mean = (top + math.log(mean([math.exp(p * own - top) for own in d]))) / p
        result = [(log_mean, math.exp(p * (own - log_mean))) for own in d]
    elif name == "ClippedGeometric":  # GMPO: a one-sided clip of each log-ratio, then the mean
        kept, slopes = [], []
        for own, token in zip(d, sequence.tokens, strict=True):
            low, high = (None, o["eps_high"]) if token.advantage > 0 else (-o["eps_low"], None)
            slopes.append(1.0 if inside(own, low, high) else 0.0)
            kept.append(clamp(own, low, high))
        result = [(mean(kept), slope) for slope in slopes]
    else:
        level = {
            "Token": "token",
            "Sequence": "sequence",
            "Geometric": "geometric",
            "Turn": "turn",
            "Prefix": "prefix",
            "PrefixGeometric": "prefix_geometric",
        }[name]
        result = [(value, 1.0) for value in spread(d, level, sequence)]
    return [(clamp(value, -LIMIT, LIMIT), slope) for value, slope in result]


# --- gates: (surrogate, d surrogate / d log-ratio, detached) -------------------------------------


def clip(r: float, a: float, low: float, high: float, dual: float | None) -> tuple[float, float]:
    """min(r A, clip(r) A), and for A < 0 no less than c A: the surrogate and its derivative."""
    if a >= 0:
        return a * min(r, high), (a * r if inside(r, None, high) else 0.0)
    capped = max(r, low) if dual is None else min(max(r, low), dual)
    return a * capped, (a * r if inside(r, low, dual) else 0.0)


def gate(
    stage: Stage, log_ratio: float, position: int, token: Token, sequence: Sequence, of: str = "staleness"
) -> tuple[float, float, bool]:
    """`detached` says that the derivative is with respect to the token's own log-prob, no slope.

    `of` is the pair of policies that the ratio compares.
    """
    name, o = stage
    a, l = token.advantage, token.logp
    r = power(log_ratio)
    if name == "ScoreFunction":
        return a * l, a, True
    if name == "Unclipped":
        return a * r, a * r, False
    if name == "DetachedRatio":
        return a * r * l, a * r, True
    if name == "Overlap":  # the ratio to the even mixture
        c = r / (0.5 * 1.0 + 0.5 * r)
        return a * c * l, a * c, True
    if name == "DetachedClip":
        c = clamp(r, o.get("low", 0.0), o["cap"])
        return a * c * l, a * c, True
    if name == "Clip":
        low, high = 1.0 - o["eps_low"], 1.0 + o["eps_high"]
        return *clip(r, a, low, high, o.get("dual_clip")), False
    if name == "PositionClip":
        r = power(log_ratio, upper=10.0)
        scale = position ** o["power"]
        dual = o["log_high"] if o.get("log_dual") is None else o["log_dual"]
        return (
            *clip(
                r,
                a,
                math.exp(-o["log_low"] * scale),
                math.exp(o["log_high"] * scale),
                math.exp(dual * scale),
            ),
            False,
        )
    if name == "SoftClip":
        tau = o["tau_pos"] if a > 0 else o["tau_neg"]
        x = tau * (r - 1.0)
        p = 1.0 / (1.0 + math.exp(-x)) if x > -700 else 0.0
        q = 1.0 / (1.0 + math.exp(x)) if x < 700 else 0.0  # 1 - p without cancellation
        return a * 4.0 / tau * p, a * 4.0 * p * q * r, False
    if name == "SignClip":  # DISPO
        low, high = (o["pos_low"], o["pos_high"]) if a > 0 else (o["neg_low"], o["neg_high"])
        c = clamp(r, low, high)
        return a * c * l, a * c, True
    if name == "DecayingClip":  # DGPO: the loss reports c A itself, as the authors' code does
        low, high, n, m = 1.0 - o["eps_low"], 1.0 + o["eps_high"], o["n"], o["m"]
        c = r
        if a < 0 and not inside(r, low, None):
            c = r ** (n + 1.0) / low**n
        elif a > 0 and not inside(r, None, high):
            c = r ** (1.0 - 1.0 / m) * high ** (1.0 / m)
        return a * c, a * c, False
    if name == "GammaKernel":  # VESPO
        k, lam = (o["k_pos"], o["lam_pos"]) if a >= 0 else (o["k_neg"], o["lam_neg"])
        phi = math.exp(lam + k * log_ratio - lam * r)  # at most 1.25; far out it goes to 0
        return a * phi * l, a * phi, True
    if name == "Tapered":  # TOPR
        c = 1.0 if sequence.reward > 0 else clamp(r, 0.0, 1.0)
        return a * c * l, a * c, True
    if name == "ScaledScore":  # OPMD
        return a * l / (1.0 + o["tau"]), a / (1.0 + o["tau"]), True
    if name == "Quadratic":  # Kimi, DRO; the anchor's distance is the clamped log-ratio
        return a * l - o["tau"] / 2.0 * log_ratio**2, a - o["tau"] * log_ratio, True
    if name == "EssCapped":  # P3O; R is clamped to +-20 in its logarithm, 1 / R to +-10
        inverse = math.exp(clamp(-log_ratio, -10.0, 10.0))
        penalty = log_ratio + inverse - 1.0
        c = min(r, o["share"])
        return a * c * l - (1.0 - o["share"]) * penalty, a * c - (1.0 - o["share"]) * (1.0 - inverse), True
    if name == "NarrowingClip":  # SAT
        of_means = o.get("level") == "geometric"
        far, narrow = abs(log_ratio if of_means else difference(token, of, limit=math.inf)), 1.0
        near(far, o["tail"])
        if far > o["tail"] * (1.0 + 1e-6 * of_means) > 0.0:
            narrow = 1.0 / (1.0 + (far / o["tail"]) ** o["power"])
        up, down = (narrow, 1.0) if log_ratio > 0.0 else (1.0, narrow)
        return *clip(r, a, 1.0 - o["eps_low"] * down, 1.0 + o["eps_high"] * up, None), False
    if name == "ProbabilityRegion":  # IPO of prime-rl
        moved = abs(math.exp(token.logp) - math.exp(token.old if of == "staleness" else token.rollout))
        keep = 1.0 if inside(moved, None, o["threshold"]) else 0.0
        pull = o["kl_tau"] * log_ratio**2
        return keep * a * r - pull, keep * a * r - 2.0 * o["kl_tau"] * log_ratio, False
    if name == "DetachedMask":  # GLM-5: both ends are open
        low, high = 1.0 - o["eps_low"], 1.0 + o["eps_high"]
        near(r, low)
        near(r, high)
        c = r if low < r < high else 0.0
        return a * c * l, a * c, True
    if name == "RatioPenalty":  # DRPO; SPO
        scale = 1.0
        if o["divergence"] == "tv":
            scale = math.exp(token.old if of == "staleness" else token.rollout)
        sign = (a > 0) - (a < 0)
        penalty = abs(a) * scale * (r - 1.0) ** 2 / (2.0 * o["delta"])
        return a * r - penalty, a * r * (1.0 - sign * scale * (r - 1.0) / o["delta"]), False
    if name == "SmoothedRatio":  # PSPO
        alpha = o["alpha"]
        return ((1.0 - alpha) * r + alpha) * a, (1.0 - alpha) * r * a, False
    if name == "Asymmetric":  # AsymRE
        shifted = sequence.reward - o["baseline"][sequence.group] - o["delta_v"]
        return shifted * l, shifted, True
    raise ValueError(name)


# --- weights -------------------------------------------------------------------------------------


def bound(stage: Stage) -> tuple[float | None, float | None, str, str, str]:
    name, o = stage
    level, of = o.get("level", "token"), o.get("mismatch", "engine")
    if name == "Truncate":
        return None, o["cap"], "clamp", level, of
    if name == "Mask":
        return o["low"], o["high"], "mask", level, of
    if name == "Bound":
        return o.get("low"), o.get("high"), o.get("outside", "clamp"), level, of
    raise ValueError(name)


def weights(stage: Stage, batch: list[Sequence]) -> list[list[float]]:
    """The behaviour weight of every token."""
    name, o = stage
    if name == "SelfNormalise":
        return self_normalised(o["inner"], o.get("over", "batch"), batch)
    low, high, outside, level, of = bound(stage)
    result = []
    for sequence in batch:
        ratios = [power(x) for x in spread(differences(sequence, of), level, sequence)]
        if outside == "clamp":
            result.append([clamp(x, low, high) for x in ratios])
        else:
            result.append([x if inside(x, low, high) else 0.0 for x in ratios])
    return result


def self_normalised(inner: Stage, over: str, batch: list[Sequence]) -> list[list[float]]:
    """w / mean(w): over tokens for token, turn, prefix weights, over sequences for the others."""
    level = bound(inner)[3]
    plain = weights(inner, batch)
    members = defaultdict(list)
    for sequence, row in zip(batch, plain, strict=True):
        key = sequence.group if over == "group" else 0
        if level in ("sequence", "geometric"):
            members[key].extend(row[:1])
        else:
            members[key].extend(row)
    result = []
    for sequence, row in zip(batch, plain, strict=True):
        values = members[sequence.group if over == "group" else 0]
        average = mean(values) if values else 0.0
        if values:
            near(average / 1e-8, 1.0)
        result.append([w / average if average > 1e-8 else w for w in row])
    return result


# --- rejections ----------------------------------------------------------------------------------


def k1(d: float) -> float:
    return d


def k2(d: float) -> float:
    return d * d / 2.0


def k3(d: float) -> float:
    return math.expm1(d) - d


def by_level(values: list[float], level: str, low: float | None, high: float | None) -> list[bool]:
    if level == "token":
        return [inside(value, low, high) for value in values]
    if not values:
        return []
    if level == "seq-sum":
        keep = inside(math.fsum(values), low, high)
    elif level == "seq-mean":
        keep = inside(mean(values), low, high)
    elif level == "seq-max":
        keep = all([inside(value, low, high) for value in values])
    else:
        raise ValueError(level)
    return [keep] * len(values)


def bernoulli_kl(log_p: float, log_q: float) -> float:
    """KL between "this token" and "any other token" under p and under q, from log-probs."""
    result = math.exp(log_p) * (log_p - log_q)
    other_p, other_q = -math.expm1(log_p), -math.expm1(log_q)
    if other_p > 0.0:
        result += other_p * math.log(other_p / other_q) if other_q > 0.0 else math.inf
    return result


PAIRS = dict.fromkeys(("OPSM", "DPPO", "VACO", "CPPO", "ESTR", "SuffixVeto"), "total") | {"SquareBound": "staleness"}
"""The policies that a rejection compares unless it is told otherwise; the others: "engine"."""


def rejections(stage: Stage, sequence: Sequence) -> list[bool]:
    """Which tokens of the sequence are kept."""
    name, o = stage
    tokens = sequence.tokens
    if not tokens:
        return []
    of = o.get("mismatch", PAIRS.get(name, "engine"))
    d = differences(sequence, of)
    if name == "Geometric":
        return [inside(power(mean(d)), o["low"], o["high"])] * len(tokens)
    if name == "K1":
        low = None if o.get("low") is None else math.log(o["low"])
        high = None if o.get("high") is None else math.log(o["high"])
        return by_level([k1(x) for x in d], o.get("level", "seq-mean"), low, high)
    if name == "K2":
        return by_level([k2(x) for x in d], o.get("level", "seq-mean"), None, o["bound"])
    if name == "K3":
        return by_level([k3(x) for x in d], o.get("level", "seq-mean"), None, o["bound"])
    if name == "Veto":
        raw = [difference(token, of, limit=math.inf) for token in tokens]
        return [all([inside(x, math.log(o["threshold"]), None) for x in raw])] * len(tokens)
    if name == "OPSM":
        close = inside(-mean(d), None, o["delta"])
        if o.get("level", "token") == "sequence":
            average = mean([token.advantage if token.finite else 0.0 for token in tokens])
            if not close:
                near(average, 0.0)
            return [close or not average < 0] * len(tokens)
        return [token.advantage >= 0 or close for token in tokens]
    if name == "NarrowingInterval":  # PNPO: [low^h, high^h] with h = (T/t)^length_power
        d, kept = differences(sequence, o.get("mismatch", "staleness")), []
        for t in range(1, len(d) + 1):
            h = (len(d) / t) ** o["length_power"]
            kept.append(inside(mean(d[:t]), math.log(o["low"]) * h, math.log(o["high"]) * h))
        return kept
    if name == "VACO":
        divergences = [divergence(o.get("divergence", "ratio"), token, of) for token in tokens]
        out = not inside(mean(divergences), None, o["bound"])
        if not o.get("increase_only", True):
            return [not out] * len(tokens)
        for x, token in zip(d, tokens, strict=True):
            if out and token.advantage != 0:
                near(x, 0.0)
        return [not (out and token.advantage * x > 0) for x, token in zip(d, tokens, strict=True)]
    if name == "SuffixVeto":
        gone, result = False, []
        for token in tokens:
            result.append(not (gone and token.advantage < 0))
            gone = not inside(difference(token, of, limit=math.inf), math.log(o["threshold"]), None) or gone
        return result
    if name == "CPPO":
        return cppo_kept(o, tokens, of)
    if name == "ESTR":
        squares = [difference(token, of, limit=math.inf) ** 2 for token in tokens]
        bounds = [o["tau"] * (token.entropy + o["floor"]) if token.finite else math.inf for token in tokens]
        return [inside(x, None, bound) for x, bound in zip(squares, bounds, strict=True)]
    if name == "SquareBound":
        result = []
        for token in tokens:
            x = difference(token, of, limit=math.inf)
            result.append(inside(x * x, None, o["bound"]) or (o["tokens"] == "outward" and not outward(token, x)))
        return result
    if name == "REC":
        return [
            rec_kept(o, power(x), token.advantage)
            for x, token in zip(differences(sequence, "staleness"), tokens, strict=True)
        ]
    if name in ("DPPO", "BinaryKL"):
        return [not token.finite or probability_kept(stage, token, of) for token in tokens]
    raise ValueError(name)


def outward(token: Token, log_ratio: float) -> bool:
    """Whether the token has moved in the direction that its advantage pushes."""
    if token.advantage != 0.0:
        near(log_ratio, 0.0)
    return (token.advantage > 0.0 and log_ratio > 0.0) or (token.advantage < 0.0 and log_ratio < 0.0)


def quantile(values: list[float], q: float) -> float:
    """Linear between the order statistics at q (n - 1)."""
    ordered = sorted(values)
    place = q * (len(ordered) - 1)
    low = min(int(place), len(ordered) - 2) if len(ordered) > 1 else 0
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def cppo_kept(o: dict[str, Any], tokens: list[Token], of: str) -> list[bool]:
    shifts = [divergence("tv", token, of) for token in tokens]
    budget = clamp(quantile(shifts, o["quantile"]), o["budget_low"], o["budget_high"])
    spent = allowed = 0.0
    result = []
    for t, (token, shift) in enumerate(zip(tokens, shifts, strict=True)):
        w = 1.0 - (1.0 - o["w_min"]) * t / max(len(tokens) - 1, 1)
        moved_out = outward(token, difference(token, of))
        fits = True if not moved_out else inside(w * shift, None, min(o["delta"], o["delta"] + allowed - spent))
        result.append(fits)
        spent, allowed = spent + w * shift, allowed + w * budget
    return result


def rec_kept(o: dict[str, Any], r: float, a: float) -> bool:
    low, high = 1.0 - o["eps_low"], 1.0 + o["eps_high"]
    if o["mode"] == "one-side":
        return inside(r, None, high) if a >= 0 else inside(r, low, None)
    if o["mode"] == "two-side":
        return inside(r, low, high)
    if o["mode"] == "ring":  # also keep what lies far out on the side that moves back
        if a > 0:
            return inside(r, low, high) or inside(r, None, 1.0 - o["eps_low_prime"])
        return inside(r, low, high) or inside(r, 1.0 + o["eps_high_prime"], None)
    raise ValueError(o["mode"])


def divergence(kind: str, token: Token, of: str) -> float:
    """Of one token, between the two policies; 0 where it is no number."""
    if not token.finite:
        return 0.0
    log_p = token.old if of == "engine" else token.logp
    log_mu = token.old if of == "staleness" else token.rollout
    if kind == "ratio":
        return abs(math.expm1(difference(token, of)))
    return abs(math.exp(log_p) - math.exp(log_mu)) if kind == "tv" else bernoulli_kl(log_mu, log_p)


def probability_kept(stage: Stage, token: Token, of: str) -> bool:
    """Rejections that compare probabilities instead of ratios."""
    name, o = stage
    log_p = token.old if of == "engine" else token.logp
    log_mu = token.old if of == "staleness" else token.rollout
    if name == "BinaryKL":
        both = [bernoulli_kl(log_p, log_mu), bernoulli_kl(log_mu, log_p)]
        return all([inside(kl, None, o["bound"]) for kl in both])
    moved = math.exp(log_p) - math.exp(log_mu)
    if o.get("divergence", "tv") == "tv":
        if token.advantage > 0:
            return inside(moved, None, o["high"])
        return inside(moved, -o["low"], None)
    near(log_p, log_mu)
    moving_away = log_p > log_mu if token.advantage > 0 else log_p < log_mu
    return inside(bernoulli_kl(log_mu, log_p), None, o["delta"]) or not moving_away


# --- controllers: the stage that the whole batch makes of them ------------------------------------


def resolved(stage: Stage, batch: list[Sequence]) -> Stage:
    """A controller as the plain stage that it becomes in this batch; any other stage as it is."""
    return CONTROLLERS[stage[0]](stage[1], batch) if stage[0] in CONTROLLERS else stage


def asymmetric(o: dict[str, Any], batch: list[Sequence]) -> Stage:
    """The baseline is the mean reward of each prompt's group."""
    groups = defaultdict(list)
    for sequence in batch:
        groups[sequence.group].append(sequence.reward)
    baseline = {group: mean(rewards) for group, rewards in groups.items()}
    return "Asymmetric", {"baseline": baseline, "delta_v": o["delta_v"]}


def squares_of(o: dict[str, Any], batch: list[Sequence], tokens: str) -> list[float]:
    """log^2 r of the outward tokens, or of all, in ascending order."""
    result = []
    for sequence in batch:
        for token in sequence.tokens:
            x = difference(token, o.get("mismatch", "staleness"), limit=math.inf)
            if token.finite and (tokens == "all" or outward(token, x)):
                result.append(x * x)
    return sorted(result)


def moment_budget(o: dict[str, Any], batch: list[Sequence]) -> Stage:
    """Drop the largest log^2 r until the mean over the tokens left is at most tau."""
    tokens = o.get("tokens", "outward")
    squares = squares_of(o, batch, tokens)
    while squares:
        average = mean(squares)
        near(average, o["tau"])
        if average <= o["tau"]:
            break
        squares.pop()
    bound = squares[-1] if squares else -1.0
    return "SquareBound", {"bound": bound, "tokens": tokens, "mismatch": o.get("mismatch", "staleness")}


def moment_clip(o: dict[str, Any], batch: list[Sequence]) -> Stage:
    """PPO's clip at +-sqrt u, where the mean of min(log^2 r, u) over the outward tokens is tau; u by bisection."""
    squares, low, high = squares_of(o, batch, "outward"), 0.0, math.inf
    if squares:
        near(mean(squares), o["tau"])
    if squares and mean(squares) > o["tau"]:
        below, above = 0.0, squares[-1]
        for _ in range(200):
            middle = (below + above) / 2.0
            if mean([min(x, middle) for x in squares]) < o["tau"]:
                below = middle
            else:
                above = middle
        low, high = math.exp(-min(math.sqrt(above), 700.0)), math.exp(min(math.sqrt(above), 700.0))
    if o.get("floor_low") is not None:
        low = min(low, 1.0 - o["floor_low"])
    if o.get("floor_high") is not None:
        high = max(high, 1.0 + o["floor_high"])
    return "Clip", {"eps_low": 1.0 - low, "eps_high": high - 1.0}


def ess_cap(o: dict[str, Any], batch: list[Sequence]) -> Stage:
    """The effective share of the tokens, (sum R)^2 / (n sum R^2), with the largest R divided out."""
    d = [difference(t, o["mismatch"], limit=math.inf) for sequence in batch for t in sequence.tokens if t.finite]
    if not d:
        return "EssCapped", {"share": 1.0}
    top = max(d)
    ratios = [math.exp(max(x - top, -700.0)) for x in d]
    return "EssCapped", {"share": math.fsum(ratios) ** 2 / (len(d) * math.fsum(x * x for x in ratios))}


def tail_clip(o: dict[str, Any], batch: list[Sequence]) -> Stage:
    """The tail begins at the smallest distance that so many of the tokens do not exceed."""

    def far(token: Token, sequence: Sequence) -> float:
        if o["level"] == "geometric":
            return abs(mean(differences(sequence, o["mismatch"])))
        return abs(difference(token, o["mismatch"], limit=math.inf))

    d = sorted(far(t, s) for s in batch for t in s.tokens if t.finite)
    reached = [x for i, x in enumerate(d, 1) if i >= o["quantile"] * len(d) - 1e-9]
    clip_options = {name: o[name] for name in ("eps_low", "eps_high", "power", "level")}
    return "NarrowingClip", {**clip_options, "tail": reached[0] if reached else 0.0}


def balanced_clip(o: dict[str, Any], batch: list[Sequence]) -> Stage:
    """Widen the bounds, c_low first, until s = positive / negative terms reaches the target."""

    def share(low: float, high: float) -> float:
        positive = negative = 0.0
        for sequence in batch:
            for token in sequence.tokens:
                a, r = token.advantage, power(difference(token, "staleness"))
                if token.finite and a >= 0:
                    positive += min(r, high) * a
                elif token.finite:
                    negative -= max(r, low) * a
        result = positive / negative if negative else math.inf
        near(result, o["target"])
        return result

    low, high = o["low_start"], o["high_start"]
    low_steps = round((o["low_max"] - o["low_start"]) / o["low_step"])
    high_steps = round((o["high_max"] - o["high_start"]) / o["high_step"])
    for step in range(low_steps + high_steps):
        if share(low, high) >= o["target"]:
            break
        if step < low_steps:
            low = o["low_start"] + (step + 1) * o["low_step"]
        else:
            high = o["high_start"] + (step + 1 - low_steps) * o["high_step"]
    return "Clip", {"eps_low": 1.0 - low, "eps_high": high - 1.0, "dual_clip": o["dual_clip"]}


CONTROLLERS = {
    "Asymmetric": asymmetric,
    "MomentBudget": moment_budget,
    "MomentClip": moment_clip,
    "BalancedClip": balanced_clip,
    "EssCap": ess_cap,
    "TailClip": tail_clip,
}
"""Beside these, SelfNormalise is a weight of its own above."""


# --- the pipeline --------------------------------------------------------------------------------


def run(
    method: Composition,
    batch: list[Sequence],
    width: int,
    max_length: int | None = None,
    denominator: float | None = None,
    count_rejected: bool = True,
) -> tuple[float, list[list[float]]]:
    """Loss and dL/dlogp of a method on a batch of sequences padded to `width`."""
    weight = [[token.weight for token in sequence.tokens] for sequence in batch]
    kept = [[True] * len(sequence.tokens) for sequence in batch]
    for stage in method.weights:
        inner = stage[1]["inner"] if stage[0] == "SelfNormalise" else stage
        zeroes = bound(inner)[2] == "mask"
        for b, row in enumerate(weights(stage, batch)):
            for t, w in enumerate(row):
                weight[b][t] *= w
                if zeroes and w == 0.0:
                    kept[b][t] = False
    for stage in method.rejects:
        stage = resolved(stage, batch)
        for b, sequence in enumerate(batch):
            for t, keep in enumerate(rejections(stage, sequence)):
                kept[b][t] = kept[b][t] and keep

    # What a mean divides by: every valid token and every sequence, or without the rejected ones.
    lengths = [len(sequence.tokens) for sequence in batch]
    counted = list(range(len(batch)))
    if not count_rejected:
        counted = [b for b in counted if not lengths[b] or any(kept[b])]
        lengths = [sum(row) for row in kept]
    if denominator is not None:
        total = float(denominator)
    elif method.aggregate == SUM:
        total = 1.0
    else:
        total = float(sum(lengths) if method.aggregate == TOKEN_MEAN else len(counted))
    span = width if max_length is None else max_length

    chosen = resolved(method.gate, batch)
    of = "staleness" if method.ratio is None else method.ratio[1].get("mismatch", "staleness")
    terms = []
    trace.unit = 0.0
    coefficient = [[0.0] * width for _ in batch]
    for b, sequence in enumerate(batch):
        if not lengths[b] or not total:
            continue
        z = total * {TOKEN_MEAN: 1, SMTM: lengths[b], SMTS: 1, SMTS_NORM: span, SUM: 1}[method.aggregate]
        ratios = ratio(method.ratio, sequence)
        for t, (token, (log_ratio, slope)) in enumerate(zip(sequence.tokens, ratios, strict=True)):
            if not token.finite or not kept[b][t]:
                continue
            surrogate, derivative, detached = gate(chosen, log_ratio, t + 1, token, sequence, of)
            if not detached:
                derivative *= slope
            trace.unit = max(trace.unit, abs(weight[b][t] * token.advantage / z))
            terms.append(-weight[b][t] * surrogate / z)
            coefficient[b][token.column] = -weight[b][t] * derivative / z
    trace.magnitude = math.fsum(abs(term) for term in terms)
    return math.fsum(terms), coefficient
