"""Dumps with a known cause, simulated with NumPy: random contexts, and logits that one side transforms.

``offcorr.lab.mismatch`` makes the same causes with real models; these take milliseconds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from offcorr.diagnose import Record

VOCABULARY = 60


def log_softmax(logits):
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


@dataclass
class World:
    """One batch in the making: B sequences of T tokens, four per prompt, which share their first context.

    ``sampler`` and ``trainer`` change logits [B, T, V] before the softmax, or log-probs after it; ``logged`` is what
    the sampler reports, from the changed logits and the plain ones; ``edits`` change the finished columns.
    """

    seed: int = 0
    sequences: int = 32
    tokens: int = 48
    sampler: Callable = lambda logits, world: logits
    trainer: Callable = lambda logits, world: logits
    logged: Callable = lambda drawn, plain: drawn
    edits: list = field(default_factory=list)
    entropy: bool = True

    def records(self):
        self.rng = np.random.default_rng(self.seed)
        groups = self.sequences // 4
        self.lengths = np.repeat(self.rng.integers(6, 30, groups), 4)
        shape = (self.sequences, self.tokens, VOCABULARY)
        logits = self.rng.standard_normal(shape) * self.rng.choice([1.0, 2.0, 4.0], (*shape[:2], 1))
        logits[:, 0] = np.repeat(logits[::4, 0], 4, axis=0)
        self.seen = np.zeros(shape, bool)
        prompts = [self.rng.integers(0, VOCABULARY, length) for length in self.lengths[::4]]
        for row in range(self.sequences):
            self.seen[row, :, prompts[row // 4][:8]] = True
        ids = np.zeros(shape[:2], int)
        if getattr(self, "penalised", False):
            for at in range(self.tokens):  # one token after the other, since what was drawn is seen from then on
                logp = log_softmax(self.sampler(logits, self))[:, at]
                ids[:, at] = draw(logp, self.rng)
                self.seen[np.arange(self.sequences), at + 1 :, ids[:, at]] = True
        self.plain = logits
        drawn = log_softmax(self.sampler(logits, self))
        if not getattr(self, "penalised", False):
            ids = draw(drawn, self.rng)
        scored = log_softmax(self.trainer(logits, self))
        entropy = -(np.exp(scored) * scored).sum(-1)
        pick = np.take_along_axis
        columns = {
            "completion_ids": ids,
            "rollout_logp": pick(self.logged(drawn, log_softmax(logits)), ids[..., None], -1)[..., 0],
            "old_logp": pick(scored, ids[..., None], -1)[..., 0],
            "entropy": entropy,
            "mask": np.ones(shape[:2], bool),
        }
        for edit in self.edits:
            edit(columns, self)
        if not self.entropy:
            del columns["entropy"]
        return [
            Record.of(
                {"prompt_ids": prompts[row // 4], "group_id": row // 4}
                | {name: column[row] for name, column in columns.items()},
                f"row {row + 1}",
            )
            for row in range(self.sequences)
        ]


def draw(logp, rng):
    """One token of each distribution."""
    gumbel = -np.log(-np.log(rng.random(logp.shape)))
    return np.where(np.isfinite(logp), logp + gumbel, -np.inf).argmax(-1)


# -- what one side does to the logits ------------------------------------------------------------------------


def noise(size, *, shared=False, where=None):
    """Normal noise on the logits: of every context, or one for each token id; of some positions."""

    def change(logits, world):
        rng = np.random.default_rng(world.seed + 1)
        shape = (1, 1, VOCABULARY) if shared else logits.shape
        added = size * rng.standard_normal(shape) * np.ones(logits.shape)
        if not shared:
            added[:, 0] = np.repeat(added[::4, 0], 4, axis=0)  # one context has one distribution
        if where is not None:
            added = added * where(world)[..., None]
        return logits + added

    return change


def each_time(size):
    """Noise that differs between forward passes of one context, as dropout's does."""

    def change(logits, world):
        return logits + size * np.random.default_rng(world.seed + 2).standard_normal(logits.shape)

    return change


def kept(rule):
    def change(logits, world):
        p = np.exp(log_softmax(logits))
        return np.where(rule(p), logits, -np.inf)

    return change


def nucleus(share):
    def rule(p):
        order = np.argsort(-p, -1)
        ordered = np.take_along_axis(p, order, -1)
        inside = ordered.cumsum(-1) - ordered < share
        kept = np.zeros(p.shape, bool)
        np.put_along_axis(kept, order, inside, -1)
        return kept

    return kept(rule)


top_k = kept(lambda p: p >= np.sort(p, -1)[..., -4, None])
min_p = kept(lambda p: p >= 0.1 * p.max(-1, keepdims=True))


def banned(logits, world):
    return np.where(np.arange(VOCABULARY) % 7 == 0, -np.inf, logits)


def biased(logits, world):
    return logits + 2.0 * (np.arange(VOCABULARY) % 20 == 7)


def penalty(logits, world):
    return np.where(world.seen, logits - 0.8, logits)


def cold(logits, world):
    return logits / 0.7


def positions(rule):
    """[B, T] from a rule on the position."""
    return lambda world: np.broadcast_to(rule(np.arange(world.tokens)), (world.sequences, world.tokens))


# -- what is done to the columns -----------------------------------------------------------------------------


def shift(columns, world):
    logp = columns["rollout_logp"]
    columns["rollout_logp"] = np.concatenate([logp[:, 1:], np.zeros((len(logp), 1))], 1)


def tools(columns, world):
    columns["rollout_logp"][:, 20:26] = 0.0
    columns["old_logp"][:, 20:26] -= 6.0


def placeholders(columns, world):
    columns["rollout_logp"][world.rng.random(columns["rollout_logp"].shape) < 0.03] = -9999.0


def as_base_10(columns, world):
    columns["rollout_logp"] /= np.log(10)


def ends(columns, world):
    columns["completion_ids"][::2, -1] = 1
    columns["rollout_logp"][::2, -1] = 0.0
    columns["old_logp"][::2, -1] = -7.0


def bf16(columns, world):
    bits = columns["rollout_logp"].astype(np.float32).view(np.uint32)
    columns["rollout_logp"] = ((bits + 0x8000) & 0xFFFF0000).view(np.float32).astype(float)


def other_tokens(columns, world):
    for row in range(0, world.sequences, 2):
        at = int(world.rng.integers(5, 30))
        columns["old_logp"][row, at] -= 12.0
        columns["old_logp"][row, at + 1 :] -= world.rng.exponential(1.5, world.tokens - at - 1)


def moved(columns, world):
    of_ids = (
        0.08 * np.random.default_rng(1).standard_normal(VOCABULARY)[columns["completion_ids"]]
    )  # as every context has it
    change = of_ids + 0.06 * world.rng.standard_normal(columns["old_logp"].shape)
    first = 0.1 * world.rng.standard_normal((world.sequences // 4, VOCABULARY))  # one context has one distribution
    change[:, 0] = first[np.arange(world.sequences) // 4, columns["completion_ids"][:, 0]]
    columns["logp"] = columns["old_logp"] + change


def longest_agree(columns, world):
    padding = world.lengths.max() - world.lengths
    size = 0.02 * padding[:, None] * world.rng.standard_normal(columns["old_logp"].shape)
    size[:, 0] = np.repeat(size[::4, 0], 4)
    columns["old_logp"] = np.minimum(columns["old_logp"] + size * (1 - np.exp(columns["old_logp"])), 0)


def versions(age, now=7):
    def edit(columns, world):
        columns["rollout_version"] = np.full((world.sequences, world.tokens), now - age)
        columns["trainer_version"] = np.full((world.sequences, world.tokens), now)

    return edit


def rare(columns, world):
    # Samples of one prompt share their first context, which one forward pass scores as another does.
    flips = world.rng.random(columns["old_logp"].shape) < 0.02
    size = np.where(flips, 0.8, 2e-4) * world.rng.standard_normal(columns["old_logp"].shape)
    size[:, 0] = 0.0
    columns["old_logp"] = columns["old_logp"] + size * (1 - np.exp(columns["old_logp"]))


def two_decimals(columns, world):
    columns["rollout_logp"] = columns["rollout_logp"].round(2)


def raw(drawn, plain):
    return plain


CAUSES = {
    "clean": {"trainer": noise(1e-6)},
    "precision": {"sampler": noise(0.01)},
    "kv_cache": {"sampler": noise(0.01, where=positions(lambda t: t > 0))},
    "moe_routing": {"edits": [rare]},
    "stale_weights": {"trainer": noise(0.3, shared=True)},
    "adapter_not_synced": {"trainer": noise(0.3, shared=True), "edits": [versions(0)]},
    "policy_updates": {"edits": [moved]},
    "dropout": {"trainer": each_time(0.2)},
    "temperature": {"sampler": cold},
    "temperature_silent": {"sampler": cold, "logged": raw},
    "raw_logprobs": {"sampler": cold, "trainer": cold, "logged": raw},
    "unnormalised": {"sampler": cold, "trainer": cold, "logged": lambda drawn, plain: plain / 0.7},
    "top_p": {"sampler": nucleus(0.9)},
    "top_p_silent": {"sampler": nucleus(0.9), "logged": raw},
    "top_k": {"sampler": top_k},
    "min_p": {"sampler": min_p},
    "repetition_penalty": {"sampler": penalty, "penalised": True},
    "logit_mask": {"sampler": banned},
    "logit_bias": {"sampler": biased},
    "shift": {"edits": [shift]},
    "mask": {"edits": [tools]},
    "sentinel": {"edits": [placeholders]},
    "other_quantity": {"edits": [as_base_10]},
    "appended_eos": {"edits": [ends]},
    "stored_bf16": {"edits": [bf16]},
    "stored_rounded": {"edits": [two_decimals]},
    "retokenised": {"edits": [other_tokens]},
    "chat_template": {"trainer": noise(1.5, where=positions(lambda t: np.where(t == 0, 1.0, 0.02)))},
    "truncated_prompt": {"trainer": noise(1.0, where=positions(lambda t: np.exp(-t / 12)))},
    "weights_swapped": {"sampler": noise(0.3, shared=True, where=positions(lambda t: t >= 22))},
    "stale_prefix_cache": {"sampler": noise(0.05, shared=True, where=positions(lambda t: np.exp(-t / 12)))},
    "position": {"edits": [longest_agree]},
}
"""Every cause but ``penalty_silent``, which these contexts, drawn without regard to what was seen, do not show."""


def world(*causes, **options):
    """A world with the causes at work."""
    made = World(**{key: value for key, value in options.items()})
    for cause in causes:
        for name, value in CAUSES[cause].items():
            if name == "edits":
                made.edits = [*made.edits, *value]
            else:
                setattr(made, name, value)
    return made
