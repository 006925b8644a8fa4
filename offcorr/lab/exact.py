"""Exact accuracy of a correction's gradient, by enumeration of every sequence of a small autoregressive policy.

A ``Setting`` says how large the world is and how far its policies are apart; ``World.of`` builds the three policies
(trainer, sampler in the trainer's precision, engine), the reward and the true policy gradient g; ``measure`` runs one
correction through its own code path, ``loss_fn(batch)``, and returns its ``Accuracy``.

All sequences are one batch.  Unless a correction couples sequences, the gradient of a batch of N is a mean of N
independent contributions, so one call gives its expectation and its variance at every N.  A correction that couples
them (a controller, or a denominator that counts what is kept) is run on batches drawn from the engine instead.

>>> import offcorr
>>> world = World.of(Setting(vocabulary=2, length=4, gap=0.5))
>>> measure(world, offcorr.get("sequence_is")).accuracy[64].bias < 1e-12
True
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple, Protocol, get_args

import torch
from torch import Tensor

from offcorr.batch import Batch
from offcorr.correction import Correction
from offcorr.stages.aggregate import AGGREGATIONS
from offcorr.stages.checks import one_of

__all__ = ["Accuracy", "Measured", "Setting", "World", "couples", "measure"]

Policy = Literal["tabular", "tied"]
Regime = Literal["stale", "noise", "drift", "early"]
EngineRegime = Literal["noise", "quantised", "sharper", "flatter"]
Advantages = Literal["grpo", "per-token"]

MOST_SEQUENCES = 2**16
FEATURES = 32
"""Parameters of a tied policy."""
SUCCESS = 0.1
"""Share of the sequences, as the start policy samples them, that are rewarded: at most."""
STEPS = 8
"""Natural-gradient steps between the sampler and the trainer in the regimes "stale" and "drift"."""
SIZES = (64, 1024)
"""The batch sizes N at which a correction is measured, in sequences."""


@dataclass(frozen=True)
class Setting:
    """The size of the world and the distance of its policies: one cell of the exact lab.

    Args:
        vocabulary: number of symbols.
        length: number of tokens of every sequence.
        policy: "tabular", free logits for every prefix; "tied", logits linear in 32 parameters by random features.
        regime: how the trainer came to differ from the sampler. "stale": 8 natural-gradient steps; "noise": normal
            noise on every logit; "drift": both; "early": noise on the logits of the first two tokens alone.
        gap: staleness, as the share of the samples that it costs: 1 - ESS / n of the sequences' staleness ratios.
        engine_regime: how the engine differs from the sampler in the trainer's precision. "noise" on every logit,
            logits "quantised" to a grid, or a distribution "sharper" or "flatter" than the trainer's.
        engine_gap: the engine's mismatch, as the share of the samples that it costs, in the same unit.
        advantages: "grpo": (R - mean) / sd, constant over a sequence; "per-token": the true advantage of each token.
        seed: of the policy, the reward, the noise and the batches that are drawn.

    Raises:
        ValueError: a value is out of range; the message begins with the field's name.
    """

    vocabulary: int = 4
    length: int = 6
    policy: Policy = "tabular"
    regime: Regime = "drift"
    gap: float = 0.5
    engine_regime: EngineRegime = "noise"
    engine_gap: float = 0.0
    advantages: Advantages = "grpo"
    seed: int = 0

    def __post_init__(self) -> None:
        choices = {"policy": Policy, "regime": Regime, "engine_regime": EngineRegime, "advantages": Advantages}
        for name, allowed in choices.items():
            value, known = getattr(self, name), get_args(allowed)
            if value not in known:
                raise ValueError(f"{name} is {value!r}{one_of(value, known)}")
        for name, low in (("vocabulary", 2), ("length", 1), ("seed", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < low:
                raise ValueError(f"{name} is {value!r}, expected a whole number >= {low}")
        if self.vocabulary > MOST_SEQUENCES:
            raise ValueError(f"vocabulary is {self.vocabulary}, expected at most {MOST_SEQUENCES:,}")
        if self.length * math.log2(self.vocabulary) > math.log2(MOST_SEQUENCES) + 1e-9:
            longest = int(math.log2(MOST_SEQUENCES) / math.log2(self.vocabulary) + 1e-9)
            raise ValueError(
                f"length is {self.length} with a vocabulary of {self.vocabulary}, more than {MOST_SEQUENCES:,} "
                f"sequences to enumerate; expected at most {longest}"
            )
        for name in ("gap", "engine_gap"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < 1:
                raise ValueError(f"{name} is {value!r}, expected a share of the samples, 0 <= {name} < 1")


@dataclass(frozen=True, eq=False)
class Tree:
    """Every sequence of ``length`` symbols, in the order of base-``vocabulary`` numbers, and the prefixes in them."""

    vocabulary: int
    length: int

    @property
    def sequences(self) -> int:
        """Their number."""
        return self.vocabulary**self.length

    @cached_property
    def levels(self) -> list[slice]:
        """The prefixes of 0, 1, 2 ... symbols among all of them."""
        sizes = [self.vocabulary**depth for depth in range(self.length)]
        return [slice(sum(sizes[:depth]), sum(sizes[: depth + 1])) for depth in range(self.length)]

    @property
    def prefixes(self) -> int:
        """The number of prefixes at which a symbol is drawn."""
        return self.levels[-1].stop

    @cached_property
    def symbols(self) -> Tensor:
        """[Y, T], the symbol at each position."""
        places = self.vocabulary ** torch.arange(self.length - 1, -1, -1)
        return torch.arange(self.sequences)[:, None] // places % self.vocabulary

    @cached_property
    def prefix(self) -> Tensor:
        """[Y, T], the prefix before each position."""
        spans = self.vocabulary ** torch.arange(self.length, 0, -1)
        starts = torch.tensor([level.start for level in self.levels])
        return torch.arange(self.sequences)[:, None] // spans + starts

    def of_tokens(self, table: Tensor) -> Tensor:
        """[Y, T], the entries of a table [prefixes, V] at the tokens of every sequence."""
        return table[self.prefix, self.symbols]

    def totals(self, per_token: Tensor, rows: Tensor | None = None) -> Tensor:
        """[prefixes, V], the sum of a quantity [Y, T] over the sequences (or over ``rows`` of them)."""
        prefix, symbols = (self.prefix, self.symbols) if rows is None else (self.prefix[rows], self.symbols[rows])
        empty = per_token.new_zeros(self.prefixes * self.vocabulary)
        index = (prefix * self.vocabulary + symbols).flatten()
        return empty.index_add(0, index, per_token.flatten()).view(-1, self.vocabulary)

    def visits(self, logp: Tensor) -> Tensor:
        """[prefixes], the probability that a policy reaches each prefix."""
        visits = [logp.new_ones(1)]
        for level in self.levels[:-1]:
            visits.append((visits[-1][:, None] * logp[level].exp()).flatten())
        return torch.cat(visits)

    def advantages(self, logp: Tensor, rewards: Tensor) -> Tensor:
        """[prefixes, V], the true advantage of each symbol after each prefix under a policy."""
        value, found = rewards, []
        for level in reversed(self.levels):
            gains = value.view(-1, self.vocabulary)
            value = (logp[level].exp() * gains).sum(1)
            found.append(gains - value[:, None])
        return torch.cat(found[::-1])


class Scores(Protocol):
    """The score d log pi / d parameters of every token, under the policy that is trained."""

    def sum(self, per_token: Tensor, rows: Tensor | None = None) -> Tensor:
        """[parameters], the sum of factor times score over sequences and tokens."""
        ...

    def squares(self, per_token: Tensor) -> Tensor:
        """[Y], each sequence's squared norm of the same sum over its tokens."""
        ...


@dataclass(frozen=True, eq=False)
class Tabular:
    """Scores where every prefix has logits of its own."""

    tree: Tree
    logp: Tensor  # [prefixes, V]

    def sum(self, per_token: Tensor, rows: Tensor | None = None) -> Tensor:
        totals = self.tree.totals(per_token, rows)
        return (totals - self.logp.exp() * totals.sum(1, keepdim=True)).flatten()

    def squares(self, per_token: Tensor) -> Tensor:
        chances = self.logp.exp()
        norms = 1 - 2 * chances + chances.square().sum(1, keepdim=True)
        return (per_token.square() * self.tree.of_tokens(norms)).sum(1)  # no two tokens share a prefix


@dataclass(frozen=True, eq=False)
class Tied:
    """Scores where the logits are linear in a few parameters."""

    tree: Tree
    logp: Tensor  # [prefixes, V]
    features: Tensor  # [prefixes, V, K]

    @cached_property
    def centred(self) -> Tensor:
        """[prefixes, V, K], the score of each symbol."""
        return self.features - (self.logp.exp()[..., None] * self.features).sum(1, keepdim=True)

    def sum(self, per_token: Tensor, rows: Tensor | None = None) -> Tensor:
        return self.tree.totals(per_token, rows).flatten() @ self.centred.flatten(0, 1)

    def squares(self, per_token: Tensor) -> Tensor:
        total = per_token.new_zeros(len(per_token), self.features.shape[2])
        for at in range(self.tree.length):
            scores = self.centred[self.tree.prefix[:, at], self.tree.symbols[:, at]]
            total += per_token[:, at, None] * scores
        return total.square().sum(1)


# -- the world -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class World:
    """Three policies over the same sequences, their rewards, and the true policy gradient of the trainer's.

    Args:
        setting: what it was made from.
        tree: the sequences.
        trainer, old, engine: [prefixes, V] log-probs; the engine's is the policy that the samples come from.
        features: [prefixes, V, K] of a tied policy; None: tabular.
        rewards: [Y], 0 or 1.
    """

    setting: Setting
    tree: Tree
    trainer: Tensor
    old: Tensor
    engine: Tensor
    features: Tensor | None
    rewards: Tensor

    @classmethod
    def of(cls, setting: Setting) -> World:
        """The world of a setting.

        Raises:
            ValueError: no distance between the policies has the gap that was asked for.
        """
        draw = torch.Generator().manual_seed(setting.seed)
        tree = Tree(setting.vocabulary, setting.length)
        shape = (tree.prefixes, tree.vocabulary)

        def normal(*size: int) -> Tensor:
            return torch.randn(size, generator=draw, dtype=torch.float64)

        features = normal(*shape, FEATURES) / math.sqrt(FEATURES) if setting.policy == "tied" else None
        start = normal(*shape) if features is None else features @ normal(FEATURES)
        merit, noise, engine_noise = normal(*shape), normal(*shape), normal(*shape)
        base = start.log_softmax(1)
        rewards = _rewards(tree, base, merit)

        def policies(size: float) -> tuple[Tensor, Tensor]:
            """The trainer and the sampler, further apart the larger the size."""
            trainer, old = start, start
            if setting.regime in ("stale", "drift"):
                trainer = _ascended(tree, start, features, rewards, size)
            if setting.regime in ("noise", "drift"):
                old = start + size * noise
            if setting.regime == "early":
                old = start.clone()
                first = slice(0, tree.levels[min(1, tree.length - 1)].stop)
                old[first] += size * noise[first]
            return trainer.log_softmax(1), old.log_softmax(1)

        trainer, old = _apart(tree, policies, setting.gap, "gap", setting.regime)

        def engines(size: float) -> tuple[Tensor, Tensor]:
            if not size:
                return old, old
            moved = {
                "noise": old + size * engine_noise,
                "quantised": (old / size).round() * size,
                "sharper": old * (1 + size),
                "flatter": old / (1 + size),
            }[setting.engine_regime]
            return old, moved.log_softmax(1)

        _, engine = _apart(tree, engines, setting.engine_gap, "engine_gap", setting.engine_regime)
        return cls(setting, tree, trainer, old, engine, features, rewards)

    @cached_property
    def chances(self) -> Tensor:
        """[Y], the probability that the engine samples each sequence."""
        return _chances(self.tree, self.engine)

    @cached_property
    def scores(self) -> Scores:
        """The scores of the policy that is trained."""
        return (
            Tabular(self.tree, self.trainer) if self.features is None else Tied(self.tree, self.trainer, self.features)
        )

    @cached_property
    def advantages(self) -> Tensor:
        """[Y, T], the advantage of every token."""
        mean = (self.chances * self.rewards).sum()
        sd = (self.chances * (self.rewards - mean).square()).sum().sqrt()
        if self.setting.advantages == "per-token":
            return self.tree.of_tokens(self.tree.advantages(self.trainer, self.rewards)) / sd
        return ((self.rewards - mean) / sd)[:, None].expand(-1, self.tree.length)

    @cached_property
    def gradient(self) -> Tensor:
        """[parameters], the true policy gradient of the expected reward, in units of the reward's sd."""
        return self.scores.sum(_chances(self.tree, self.trainer)[:, None] * self.advantages)

    @cached_property
    def batch(self) -> Batch:
        """Every sequence once, as one batch with every field that has a meaning here."""
        tree, per_token = self.tree, self.setting.advantages == "per-token"
        chances = self.trainer.exp()
        return Batch(
            logp=tree.of_tokens(self.trainer),
            old_logp=tree.of_tokens(self.old),
            rollout_logp=tree.of_tokens(self.engine),
            advantages=self.advantages.contiguous() if per_token else self.advantages[:, 0].clone(),
            mask=torch.ones_like(tree.symbols, dtype=torch.bool),
            rewards=self.rewards,
            group_ids=torch.zeros(tree.sequences, dtype=torch.long),
            entropy=-(chances * self.trainer).sum(1)[tree.prefix],
            sum_sq_probs=chances.square().sum(1)[tree.prefix],
        )

    def success(self, policy: Tensor) -> float:
        """The expected reward of a policy [prefixes, V]."""
        return float((_chances(self.tree, policy) * self.rewards).sum())

    def distances(self) -> dict[str, dict[str, float]]:
        """ESS as a share of the sequences, and mean |log-ratio| of a token, for staleness, engine and total."""
        pairs = {
            "staleness": (self.trainer, self.old),
            "engine": (self.old, self.engine),
            "total": (self.trainer, self.engine),
        }
        found = {}
        for name, (first, second) in pairs.items():
            size = (self.tree.of_tokens(first) - self.tree.of_tokens(second)).abs().mean(1)
            mean = float((_chances(self.tree, self.engine) * size).sum())
            found[name] = {"ess": _ess(self.tree, first, second), "abs_mean": mean}
        return found


def _chances(tree: Tree, logp: Tensor) -> Tensor:
    return tree.of_tokens(logp).sum(1).exp()


def _ess(tree: Tree, first: Tensor, second: Tensor) -> float:
    """1 / E[W^2] under the second policy, W the sequence's ratio: ESS / n of infinitely many samples."""
    first_logp, second_logp = (tree.of_tokens(logp).sum(1) for logp in (first, second))
    return float(1 / (2 * first_logp - second_logp).exp().sum())


def _rewards(tree: Tree, base: Tensor, merit: Tensor) -> Tensor:
    """1 for the sequences of the largest total merit of their prefixes, a share ``SUCCESS`` of what is sampled."""
    order = tree.of_tokens(merit).sum(1).sort(descending=True).indices
    sampled = _chances(tree, base)[order].cumsum(0)
    rewards = torch.zeros(tree.sequences, dtype=torch.float64)
    count = int((sampled <= SUCCESS).sum())
    rewards[order[: max(1, min(count, tree.sequences - 1))]] = 1
    return rewards


def _ascended(tree: Tree, logits: Tensor, features: Tensor | None, rewards: Tensor, size: float) -> Tensor:
    """The logits after ``STEPS`` natural-gradient steps on the expected reward."""
    for _ in range(STEPS):
        logp = logits.log_softmax(1)
        advantages = tree.advantages(logp, rewards)
        if features is None:
            logits = logits + size * advantages
            continue
        scores = Tied(tree, logp, features).centred.flatten(0, 1)
        reached = (tree.visits(logp)[:, None] * logp.exp()).flatten()
        fisher = scores.T @ (reached[:, None] * scores)
        gradient = scores.T @ (reached * advantages.flatten())
        size_of_ridge = (1e-6 * fisher.diagonal().mean()).clamp(min=1e-30)  # it is 0 once the policy is certain
        ridge = size_of_ridge * torch.eye(len(fisher), dtype=fisher.dtype)
        logits = logits + features @ (size * torch.linalg.solve(fisher + ridge, gradient))
    return logits


def _apart(
    tree: Tree, policies: Callable[[float], tuple[Tensor, Tensor]], gap: float, field: str, regime: str
) -> tuple[Tensor, Tensor]:
    """The two policies at the first size at which the gap is as wide as asked: doubling, then regula falsi."""

    def beyond(size: float) -> float:
        width = 1 - _ess(tree, *policies(size))
        return (width if math.isfinite(width) else 1.0) - gap

    if gap == 0:
        return policies(0.0)
    low, high, below, widest = 0.0, 0.01, -gap, -gap
    while (above := beyond(high)) < 0:
        low, high, below, widest = high, 2 * high, above, max(widest, above)
        if high > 1e4:
            raise ValueError(
                f"{field} is {gap:g}, but regime {regime!r} reaches at most {widest + gap:.3f} with this length, "
                "vocabulary and seed; choose a smaller one or another regime"
            )
    for _ in range(60):  # an end that stays twice counts half (Illinois), so a step function is bracketed, too
        middle = (low * above - high * below) / (above - below)
        found = beyond(middle)
        if abs(found) < 1e-9:
            return policies(middle)
        if found < 0:
            low, below, above = middle, found, above / 2
        else:
            high, above, below = middle, found, below / 2
    return policies(high)


# -- the accuracy of a correction ----------------------------------------------------------------------------


class Accuracy(NamedTuple):
    """Accuracy of the gradient of a batch of N sequences as an estimate of the true gradient g.

    bias: |E g^ - g| / |g|.
    variance: E|g^ - E g^|^2 / |g|^2.
    direction: E<g^, g> / (sqrt(E|g^|^2) |g|); 1 is perfect, 0 useless; no factor on the gradient changes it.
    """

    bias: float
    variance: float
    direction: float

    @property
    def rmse(self) -> float:
        """sqrt(bias^2 + variance); 1 for a gradient of 0, so it rewards shrinking."""
        return math.sqrt(self.bias**2 + self.variance)

    @classmethod
    def of(cls, along: float, mean_square: float, total_square: float, truth: float) -> Accuracy:
        """From <E g^, g>, |E g^|^2, E|g^|^2 and |g|^2."""
        bias = math.sqrt(max(mean_square - 2 * along + truth, 0.0) / truth)
        variance = max(total_square - mean_square, 0.0) / truth
        norm = math.sqrt(max(total_square, 0.0) * truth)
        return cls(bias, variance, along / norm if norm else 0.0)


class Measured(NamedTuple):
    """A correction in one world.

    accuracy: by the number of sequences in a batch.
    limit: the direction quality of infinitely large batches: the cosine between the mean gradient and the true one.
    kept: share of the sampled tokens with an advantage that get a gradient.
    multiplier: mean |c A| / mean |A| over the sampled tokens.
    drawn: number of batches that were drawn; 0: exact.
    coefficient: [Y, T], c A of every token of every sequence; None where it depends on the batch.
    """

    accuracy: dict[int, Accuracy]
    limit: float
    kept: float
    multiplier: float
    drawn: int
    coefficient: Tensor | None


def couples(loss_fn: Correction) -> bool:
    """Whether a sequence's gradient depends on the other sequences of its batch."""
    return bool(loss_fn.couples) or not loss_fn.count_rejected


def measure(world: World, loss_fn: Correction, sizes: Sequence[int] = SIZES, draws: int = 200) -> Measured:
    """Runs a correction in a world and compares its gradient with the true one.

    Aggregation is set aside: all sequences have one length, so it is a constant factor, which is divided out.

    Args:
        sizes: numbers of sequences in a batch.
        draws: batches drawn of each size, for a correction that couples sequences.

    Raises:
        ValueError: the correction needs a field of the batch that does not exist here.
    """
    loss_fn = loss_fn.with_max_length(world.tree.length)
    return drawn(world, loss_fn, sizes, draws) if couples(loss_fn) else exact(world, loss_fn, sizes)


def exact(world: World, loss_fn: Correction, sizes: Sequence[int]) -> Measured:
    """By one call with every sequence, each as a batch of its own: the moments of its contribution."""
    denominator = {"tokens": float(world.tree.length), "sequences": 1.0, "none": None}
    alone = loss_fn.coefficient(world.batch, denominator=denominator[AGGREGATIONS[loss_fn.aggregate].unit])
    applied = -alone * _constant(world, loss_fn)
    weight = world.chances
    mean = world.scores.sum(weight[:, None] * applied)
    total_square = float((weight * world.scores.squares(applied)).sum())
    mean_square, along = float(mean.square().sum()), float(mean @ world.gradient)
    truth = float(world.gradient.square().sum())

    def of(size: float) -> Accuracy:
        spread = max(total_square - mean_square, 0.0) / size
        found = Accuracy.of(along, mean_square, mean_square + spread, truth)
        # The difference of the vectors keeps the digits of a bias near 0, which the difference of their squares loses.
        return found._replace(bias=float((mean - world.gradient).norm()) / math.sqrt(truth))

    kept, multiplier = _effect(applied, world.advantages, weight[:, None].expand_as(applied))
    return Measured({size: of(size) for size in sizes}, of(math.inf).direction, kept, multiplier, 0, applied)


def drawn(world: World, loss_fn: Correction, sizes: Sequence[int], draws: int) -> Measured:
    """On batches drawn from the engine; |E g^|^2 is estimated without bias, from pairs of different batches."""
    draw = torch.Generator().manual_seed(world.setting.seed)
    truth = float(world.gradient.square().sum())
    accuracy, kept, multiplier, limit = {}, 0.0, 0.0, 0.0
    for size in sizes:
        total, squares, effects = torch.zeros_like(world.gradient), 0.0, torch.zeros(2)
        for _ in range(draws):
            rows = torch.multinomial(world.chances, size, replacement=True, generator=draw)
            applied = applied_to(world, loss_fn, rows)
            gradient = world.scores.sum(applied, rows) / size
            total, squares = total + gradient, squares + float(gradient.square().sum())
            here = world.advantages[rows]
            effects += torch.tensor(_effect(applied, here, torch.ones_like(here)))
        mean_square = (float(total.square().sum()) - squares) / (draws * (draws - 1))
        along = float(total @ world.gradient) / draws
        accuracy[size] = Accuracy.of(along, mean_square, squares / draws, truth)
        norm = math.sqrt(max(mean_square, 0.0) * truth)
        limit = max(-1.0, min(along / norm, 1.0)) if norm else 0.0
        kept, multiplier = (effects / draws).tolist()
    return Measured(accuracy, limit, kept, multiplier, draws, None)


def applied_to(world: World, loss_fn: Correction, rows: Tensor) -> Tensor:
    """[N, T], c A of every token of a batch of these sequences, the aggregation's constant divided out."""
    loss_fn = loss_fn.with_max_length(world.tree.length)
    shared = 1 if AGGREGATIONS[loss_fn.aggregate].unit == "none" else len(rows)
    return -loss_fn.coefficient(world.batch.rows(rows)) * _constant(world, loss_fn) * shared


def _constant(world: World, loss_fn: Correction) -> float:
    """The factor from an aggregation's coefficient to c A, for sequences of one length."""
    aggregation = AGGREGATIONS[loss_fn.aggregate]
    if aggregation.constant_length:
        return float(loss_fn.max_length or world.tree.length)
    return float(world.tree.length if aggregation.unit == "tokens" or aggregation.divides_by_count else 1)


def _effect(applied: Tensor, advantages: Tensor, weight: Tensor) -> tuple[float, float]:
    """The share of the tokens with an advantage that are kept, and mean |c A| over mean |A|."""
    able = weight * (advantages != 0)
    kept = float((able * (applied != 0)).sum() / able.sum())
    return kept, float((weight * applied.abs()).sum() / (weight * advantages.abs()).sum())
