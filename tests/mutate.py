"""Mutation testing: small wrong edits, each with the test that must fail.  Exits with 1 if a mutation survives.

    python tests/mutate.py [WORD ...] [--trust] [--processes N]

The edits are made in a copy; the checkout does not change.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent


class Mutation(NamedTuple):
    what: str
    file: str
    right: str
    wrong: str
    test: str
    """A pytest node, or a node and ``-k`` words after a space."""


CONTRACT, ORACLE, PITFALLS = "tests/test_testing.py", "tests/methods/test_oracle.py", "tests/methods/test_pitfalls.py"
METRICS, ROLLOUT, TRL = "tests/test_metrics.py", "tests/rollout/test_rollout_trl.py", "tests/trl/test_trainer.py"
RETURNED, RETURNS = "offcorr/trl/returned.py", "tests/trl/test_returned.py"
ENGINE = "tests/rollout/test_engine.py"
FAMILY = "tests/methods/test_family.py"
ANCHORS, KERNEL = "tests/trl/test_anchors.py", "tests/kernels/test_correction.py"
SOURCE = "offcorr/kernels/correction.py"
LAUNCHES, METERING = "tests/kernels/test_launches.py", "offcorr/kernels/metrics.py"
GOLDEN = f"{ORACLE}::test_golden_table"
SPANS, CORRECTION, BATCH = "offcorr/stages/spans.py", "offcorr/correction.py", "offcorr/batch.py"
LOSS, ACCUMULATORS = "offcorr/loss.py", "offcorr/accumulators.py"
REFERENCE, STRUCTURE = "offcorr/stages/reference.py", "tests/test_structure.py"
SEQUENCES, SLICES = "offcorr/training/parallel.py", "tests/training/test_parallel.py"
LAB, EXACT = "offcorr/lab/exact.py", "tests/lab/test_exact.py"
LOOP, CLOSED, IN_LOOP = "offcorr/lab/loop.py", "offcorr/lab/closed_loop.py", "tests/lab/test_loop.py"
GRID, GRIDS = "offcorr/lab/grid.py", "tests/lab/test_grid.py"
TIMES, TIMED = "offcorr/lab/kernels.py", "tests/lab/test_kernels.py"
WATCHED = "tests/training/test_monitor.py"
CARRIED, COMPARED, TOKENS = "offcorr/tokens/trajectory.py", "offcorr/tokens/compare.py", "tests/test_tokens.py"
INVARIANT, ATTENDS = "offcorr/exact/invariant.py", "offcorr/exact/attention.py"
BITWISE = "tests/test_exact.py"
REPLAY, ORIGINS = "tests/data/test_replay.py", "tests/training/test_origins.py"
TWIN, SPLIT = "support.py twin", "parallel.py"

MUTATIONS = [
    Mutation(
        "a number of the module frozen in the kernel",
        "offcorr/kernels/rebind.py",
        "elif isinstance(value, int | float):\n            raise ValueError(",
        "elif isinstance(value, int | float):\n            scope[name] = tl.constexpr(value) or ValueError(",
        f"{KERNEL}::test_a_number_of_the_module_runs_on_the_reference",
    ),
    Mutation(
        "the check of the padding never widens",
        "offcorr/testing.py",
        "for left, right in ((0, 5), (3, 0)):",
        "for left, right in ((0, 0),):",
        f"{CONTRACT}::test_a_span_that_depends_on_the_width_of_the_padding_is_found",
    ),
    Mutation(
        "an unannotated field of a stage is ignored",
        "offcorr/stages/definition.py",
        "if name in fields and name not in annotated",
        "if name in fields and name in ()",
        "tests/stages/test_definition.py",
    ),
    Mutation(
        "a shape that a user's prepare gives is not looked at",
        "offcorr/stages/calls.py",
        "        given.check_shapes()\n",
        "",
        "tests/stages/test_calls.py broadcast",
    ),
    Mutation(
        "a denominator of kept units without a denominator",
        CORRECTION,
        "if kept and denominator is not None and",
        "if kept and",
        "tests/test_batch.py kept_units",
    ),
    Mutation(
        "statistics of another controller in the same place",
        "offcorr/statistics.py",
        "or (statistics.classes and statistics.classes != classes)",
        "or ()",
        "tests/test_correction.py statistics_of_another",
    ),
    Mutation(
        "two controllers' numbers under one name",
        CORRECTION,
        'f"{place}/{name}" if name in numbers else name: number',
        "name: number",
        "tests/test_correction.py two_controllers",
    ),
    Mutation(
        "a function that depends on the fields is not looked at",
        "offcorr/stages/composed.py",
        "    definition.check_computed(stage)\n",
        "",
        "tests/stages/test_composed.py depends_on_the_fields",
    ),
    Mutation("sequence taken as geometric", SPANS, "over_row(_total(x), rows)", "over_row(x.mean(1), rows)", GOLDEN),
    Mutation("geometric over the padded width", SPANS, "_total(x) / rows.count.clamp(min=1)", "x.mean(1)", GOLDEN),
    Mutation(
        "masked token in the running minimum",
        SPANS,
        "seen = torch.where(rows.mask, x, torch.inf).cummin(1)",
        "seen = x.cummin(1)",
        f"{GOLDEN} minpro",
    ),
    Mutation("running minimum includes the token", SPANS, "seen[:, :-1]], 1)", "seen[:, 1:]], 1)", f"{GOLDEN} minpro"),
    Mutation(
        "off-by-one position", BATCH, "self.mask.cumsum(1).to", "(self.mask.cumsum(1) + 1).to", f"{PITFALLS} ctpo"
    ),
    Mutation(
        "tool tokens counted in positions",
        BATCH,
        "self.mask.cumsum(1).to",
        "torch.ones_like(self.mask).cumsum(1).to",
        f"{PITFALLS} tool_tokens",
    ),
    Mutation(
        "turns run across tool spans",
        BATCH,
        "starts.flatten().cumsum(0)",
        "starts[:, :1].expand_as(starts).flatten().cumsum(0)",
        f"{ORACLE} free",
    ),
    Mutation("sign of the coefficient", LOSS, "-scale * gate.derivative", "scale * gate.derivative", GOLDEN),
    Mutation(
        "clamp cuts the gradient",
        REFERENCE,
        "derivative = derivative * slope",
        "derivative = derivative * slope * (tokens.log_ratio(gate.mismatch).raw.abs() < LOG_LIMIT)",
        f"{PITFALLS} clamped",
    ),
    Mutation(
        "kept count in the denominator",
        LOSS,
        "if not plan.count_rejected:\n        count",
        "if True:\n        count",
        f"{PITFALLS} denominator",
    ),
    Mutation(
        "empty sequences left out of the mean",
        LOSS,
        "sequences: Any = len(tokens.mask)",
        "sequences: Any = (count > 0).sum()",
        f"{ORACLE} random",
    ),
    Mutation(
        "CTPO's ratio not capped",
        REFERENCE,
        "clamp(-LOG_LIMIT, gate.log_limit)",
        "clamp(-LOG_LIMIT, LOG_LIMIT)",
        f"{ORACLE} random and ctpo",
    ),
    Mutation(
        "rejections combined by OR",
        REFERENCE,
        "kept = kept & keeps",
        "kept = kept | keeps",
        f"{PITFALLS} rejected",
    ),
    Mutation(
        "a ratio counted twice goes through",
        CORRECTION,
        "        refuse_double_counting(self.ratio, self.gate, as_tuple(self.weight))\n",
        "",
        "tests/test_batch.py twice",
    ),
    Mutation(
        "backward forgets the incoming gradient",
        LOSS,
        "torch.mul(coefficient, incoming, out=gradient)",
        "torch.mul(coefficient, torch.ones_like(incoming), out=gradient)",
        f"{CONTRACT} gradient and ppo",
    ),
    Mutation(
        "gradient overflows the input's dtype",
        LOSS,
        ".clamp(limits.min, limits.max).to",
        ".to",
        f"{CONTRACT} low_precision and token_is",
    ),
    Mutation(
        "engine ratio from the current weights",
        BATCH,
        'self.old_logp if mismatch == "engine" else',
        'self.logp.detach() if mismatch == "engine" else',
        f"{GOLDEN} tis",
    ),
    Mutation(
        "unscored tokens scored",
        BATCH,
        "self.scored = self.trainable & pointwise.finite(reported)",
        "self.scored = self.trainable",
        f"{GOLDEN} tis",
    ),
    Mutation(
        "packed rows shifted",
        BATCH,
        '"s -> s 1") + place, 0)',
        '"s -> s 1") + place + 1, 0)',
        f"{CONTRACT} packed and dapo",
    ),
    Mutation(
        "veto sees clamped ratios of the wrong side",
        "offcorr/stages/rejections.py",
        'span = "sequence_min"',
        'span = "sequence_max"',
        f"{ORACLE} random and veto",
    ),
    Mutation(
        "OPSM keeps the wrong sign",
        "offcorr/stages/rejections.py",
        "(advantage >= 0) | (-value",
        "(advantage <= 0) | (-value",
        f"{ORACLE} random and opsm",
    ),
    Mutation(
        "OPSM per sequence drops a mean of 0",
        "offcorr/stages/rejections.py",
        "(mean_advantage >= 0) | (-value",
        "(mean_advantage > 0) | (-value",
        f"{FAMILY}::test_opsm_decides_per_sequence_where_it_is_asked_to",
    ),
    Mutation(
        "OPSM per sequence asks each token",
        "offcorr/batch.py",
        '"mean_advantage": lambda: self._over_row(self.mean_advantage)',
        '"mean_advantage": lambda: self.advantages',
        f"{FAMILY}::test_opsm_decides_per_sequence_where_it_is_asked_to",
    ),
    Mutation(
        "a length counts tool tokens",
        "offcorr/batch.py",
        '"length": lambda: self._over_row(self.rows.count)',
        '"length": lambda: self._over_row(self.rows.count * 0 + self.mask.shape[1])',
        f"{FAMILY}::test_pnpos_interval_narrows_to_its_base_at_the_last_valid_token",
    ),
    Mutation(
        "CPPO's budget counts the token itself",
        "offcorr/stages/spans.py",
        "- _total_before(weight * x)",
        "- _running_total(weight * x)",
        f"{ORACLE}::test_methods_on_random_cases cppo",
    ),
    Mutation(
        "CPPO's quantile is an order statistic",
        "offcorr/stages/spans.py",
        "(above - below) * place.frac()",
        "(above - below) * place.frac().round()",
        f"{FAMILY}::test_cppos_budget_is_a_quantile_between_order_statistics",
    ),
    Mutation(
        "CPPO drops inward tokens",
        "offcorr/stages/rejections.py",
        "(value >= 0) | ~outward(log_ratio, advantage)",
        "value >= 0",
        f"{GOLDEN} cppo",
    ),
    Mutation(
        "the suffix veto drops the whole sequence",
        "offcorr/stages/rejections.py",
        'span = "min_before"',
        'span = "sequence_min"',
        f"{GOLDEN} mu_grpo",
    ),
    Mutation(
        "P3O's penalty pushes away",
        "offcorr/methods/p3o.py",
        "gradient + (1 - p.share) * (excess + exponent)",
        "gradient - (1 - p.share) * (excess + exponent)",
        f"{GOLDEN} p3o",
    ),
    Mutation(
        "P3O's second moments are not merged",
        "offcorr/methods/p3o.py",
        "torch.logaddexp(self.second, other.second)",
        "self.second",
        "tests/stages/test_controllers.py::test_the_split_changes_nothing p3o",
    ),
    Mutation(
        "SAT's quantile is one order statistic higher",
        "offcorr/methods/sat.py",
        "(number - 1).clamp(min=0)",
        "number.clamp(min=0)",
        f"{GOLDEN} sat",
    ),
    Mutation(
        "SAT's tail of means has no room for their rounding",
        "offcorr/methods/sat.py",
        "p.tail * (1 + 1e-6)",
        "p.tail",
        "tests/stages/test_controllers.py::test_the_last_bit_of_a_mean_does_not_gate_the_sequence_at_sats_quantile",
    ),
    Mutation(
        "ESTR has no floor",
        "offcorr/stages/rejections.py",
        "p.tau * (entropy + p.floor)",
        "p.tau * entropy",
        f"{FAMILY}::test_estr_lets_a_token_without_a_choice_move_by_the_floor",
    ),
    Mutation(
        "M2PO counts inward tokens",
        "offcorr/stages/controllers.py",
        "tokens.trainable & outward(d, tokens.advantages)",
        "tokens.trainable",
        f"{GOLDEN} m2po",
    ),
    Mutation(
        "M2PO's clip stops at another square",
        "offcorr/stages/controllers.py",
        "cap = caps.amax()",
        "cap = torch.where(reaches, squares, 0).amax()",
        f"{GOLDEN} m2po",
    ),
    Mutation(
        "PNPO's interval widens",
        "offcorr/methods/pnpo.py",
        "ops.log(ops.maximum(length, 1.0)) - ops.log(ops.maximum(position, 1.0))",
        "ops.log(ops.maximum(position, 1.0)) - ops.log(ops.maximum(length, 1.0))",
        f"{GOLDEN} pnpo",
    ),
    Mutation(
        "GLM-5's interval is closed",
        "offcorr/methods/glm5.py",
        "(ratio > p.low) & (ratio < p.high)",
        "(ratio >= p.low) & (ratio <= p.high)",
        f"{FAMILY}::test_glm5_drops_what_lies_on_a_bound_whatever_the_sign",
    ),
    Mutation(
        "IPO's region is open",
        "offcorr/methods/ipo.py",
        "<= p.threshold",
        "< p.threshold",
        f"{FAMILY}::test_ipo_keeps_what_lies_on_the_bound_on_either_side",
    ),
    Mutation(
        "IPO's pull stops at the threshold",
        "offcorr/methods/ipo.py",
        "weighted - 2 * p.kl_tau * log_ratio",
        "weighted - ops.where(kept, 2 * p.kl_tau * log_ratio, 0.0)",
        f"{GOLDEN} ipo",
    ),
    Mutation(
        "DRPO's penalty without the advantage's size",
        "offcorr/methods/drpo.py",
        "scale * ops.abs(advantage) * (ratio - 1)",
        "scale * (ratio - 1)",
        f"{GOLDEN} drpo",
    ),
    Mutation(
        "PSPO's constant has a gradient",
        "offcorr/methods/pspo.py",
        "return gradient + p.alpha * advantage, gradient",
        "return gradient + p.alpha * advantage, gradient + p.alpha * advantage",
        f"{GOLDEN} pspo",
    ),
    Mutation(
        "geo_mis caps its weight",
        "offcorr/methods/geo_mis.py",
        "weights.Truncate(None,",
        "weights.Truncate(2.0,",
        f"{FAMILY}::test_geo_mis_tests_the_root_and_weighs_by_the_product",
    ),
    Mutation(
        "CTPO's geometric prefix is the sequence's",
        "offcorr/methods/ctpo.py",
        "ratios.PrefixGeometric()",
        "ratios.Geometric()",
        f"{GOLDEN} ctpo",
    ),
    Mutation(
        "a part of a split row means its own advantages",
        SOURCE,
        "tl.load(parts_ptr + stride, mask=there, other=0.0), 0)",
        "tl.load(parts_ptr + stride, mask=earlier, other=0.0), 0)",
        f"{KERNEL}::test_other_forms_of_methods opsm-True-65",
    ),
    Mutation(
        "a length is the count of the tokens before",
        SOURCE,
        "context = (position, zeros + count,",
        "context = (position, zeros + valid_before,",
        f"{KERNEL}::test_other_forms_of_methods pnpo-True-65",
    ),
    Mutation(
        "an option without a default is not asked for",
        "offcorr/methods/registry.py",
        "if missing := [name for name in self.required if name not in options]:",
        "if missing := []:",
        "tests/test_batch.py::test_options_without_a_default_are_required_and_illustrated",
    ),
    Mutation(
        "dual clip the wrong way",
        "offcorr/stages/gates.py",
        "ops.maximum(surrogate, dual * advantage)",
        "ops.minimum(surrogate, dual * advantage)",
        f"{ORACLE} random and ppo",
    ),
    Mutation(
        "SAPO's temperatures swapped",
        "offcorr/stages/gates.py",
        "zeros_like(ratio) + p.positive, p.negative",
        "zeros_like(ratio) + p.negative, p.positive",
        f"{GOLDEN} sapo",
    ),
    Mutation(
        "weight outside the band clamped, not dropped",
        "offcorr/stages/weights.py",
        "return ratio, (ratio >= p.low) & (ratio <= p.high)",
        "return ratio, ratio == ratio",
        f"{GOLDEN} icepop",
    ),
    Mutation(
        "self-normalised by the count alone",
        "offcorr/stages/weights.py",
        "total[asked] / count[asked].clamp(min=1)",
        "total[asked]",
        f"{METRICS} mean_one",
    ),
    Mutation(
        "ESS of clamped weights",
        "offcorr/metrics.py",
        "present, total = count > 0, d.sum(2)",
        "present, total = count > 0, d.sum(2).clamp(-20, 20)",
        f"{PITFALLS} ess",
    ),
    Mutation(
        "extremes merged by adding",
        ACCUMULATORS,
        '"""The larger of each."""\n        return torch.maximum(a, b)',
        '"""The larger of each."""\n        return a + b',
        f"{CONTRACT} splitting and tis",
    ),
    Mutation(
        "a ratio of 1 for every masked token",
        ACCUMULATORS,
        "torch.where(where, x, _NONE).amax(-1)",
        "torch.where(where, x, 0).amax(-1)",
        f"{METRICS} in_no_tail",
    ),
    Mutation(
        "the kernel's smallest ratio at most 1",
        METERING,
        "return zeros, zeros + _NOTHING, zeros",
        "return zeros, zeros, zeros",
        f"{KERNEL} one_side_of_1",
    ),
    Mutation(
        "slices of sequences joined in the order of the ranks",
        SEQUENCES,
        "whole = {name: value[:, source] for",
        "whole = {name: value for",
        f"{SLICES} whole_ones and zig-zag and minpro",
    ),
    Mutation(
        "every rank's gradient is the first slice's",
        SEQUENCES,
        "own = torch.arange(start, start + width",
        "own = torch.arange(width",
        f"{SLICES} whole_ones and uneven and minpro",
    ),
    Mutation(
        "mismatch measured over padding",
        "offcorr/metrics.py",
        "torch.stack([pair.compared for pair in pairs])",
        "torch.stack([torch.ones_like(pair.compared) for pair in pairs])",
        f"{METRICS} series",
    ),
    Mutation(
        "masked and advantage-free tokens among the dropped",
        "offcorr/metrics.py",
        "advantaged & (c == 0)",
        "c == 0",
        f"{METRICS} plain_ratio",
    ),
    Mutation(
        "damped against 1 rather than the ratio",
        "offcorr/stages/pointwise.py",
        "(c < 0.99 * ratio)",
        "(c < 0.99)",
        f"{METRICS} plain_ratio",
    ),
    Mutation(
        "dropped tokens without an advantage counted in the kernel",
        METERING,
        "_pair(advantaged & (c == 0), damped)",
        "_pair(mask & (c == 0), damped)",
        f"{KERNEL}::test_tokens_without_an_advantage",
    ),
    Mutation(
        "two counts of one register mixed up",
        METERING,
        "(state[k] >> 16) & 65535)",
        "state[k] >> 15)",
        f"{KERNEL}::test_every_method_padded_and_packed cispo",
    ),
    Mutation(
        "on-policy gradient halved",
        "offcorr/stages/gates.py",
        "return advantage * logp, advantage",
        "return advantage * logp, advantage / 2",
        f"{CONTRACT} reinforce",
    ),
    Mutation(
        "a batch's own weight forgotten",
        LOSS,
        "did.weight if tokens.weight is None else did.weight * tokens.weight",
        "did.weight",
        f"{ORACLE} random and ppo",
    ),
    Mutation(
        "a reward that is NaN is one that is not above 0",
        LOSS,
        "finite = finite & pointwise.finite(tokens.reward)",
        "finite = finite & tokens.mask",
        "tests/test_none_finite.py is_counted_where_it_is_read",
    ),
    Mutation(
        "a reward that is NaN is one that is not above 0, in the kernel",
        SOURCE,
        "good = good & finite(block.reward)",
        "good = good & block.mask",
        f"{KERNEL}::test_a_reward_that_is_not_finite",
    ),
    Mutation(
        "a negative weight under the mask is warned about",
        BATCH,
        "output_size=len(mask))[mask]",
        "output_size=len(mask))",
        "tests/test_correction.py a_weight_below_0",
    ),
    Mutation(
        "a cap below 1 is not warned about",
        "offcorr/stages/checks.py",
        "(bound < 1 if is_upper else bound > 1)",
        "(bound < 0 if is_upper else bound > 1)",
        "tests/test_correction.py a_bound_on_the_ratio",
    ),
    Mutation(
        "a sum divided by its tokens",
        "offcorr/stages/aggregate.py",
        'if unit == "none":\n        return 1.0',
        'if unit == "none":\n        return count.sum().clamp(min=1)',
        f"{ORACLE} free",
    ),
    Mutation(
        "an import goes upward",
        "offcorr/shapes.py",
        "from torch import Tensor\n",
        "from torch import Tensor\n\nif not Tensor:\n    import offcorr.trl\n",
        f"{STRUCTURE} upward",
    ),
    Mutation(
        "two modules import each other",
        "offcorr/shapes.py",
        "from torch import Tensor\n",
        "from torch import Tensor\n\nif not Tensor:\n    import offcorr.batch\n",
        f"{STRUCTURE} circle",
    ),
    Mutation(
        "a gate three deep",
        "offcorr/stages/gates.py",
        "class DetachedRatio(Gate):",
        "class DetachedRatio(ScoreFunction):",
        f"{STRUCTURE} inheritance",
    ),
    Mutation(
        "shapes go unchecked",
        "tests/shape_checks.py",
        "    sys.meta_path.insert(0, Finder())\n",
        "",
        "tests/test_shapes.py",
    ),
    Mutation(
        "a stage that no test draws",
        ORACLE,
        '    "Tapered": nothing,\n',
        "",
        f"{ORACLE} drawn",
    ),
    Mutation(
        "a method without an oracle",
        "tests/methods/oracle.py",
        '@method("kimi", "dro", tau=0.1)',
        '@method("kimi", tau=0.1)',
        f"{ORACLE} has_an_oracle",
    ),
    Mutation(
        "the sampler one update too fresh",
        "offcorr/rollout/off_policy.py",
        "max(now - self.lag, self.ring.versions[0])",
        "max(now - self.lag + 1, self.ring.versions[0])",
        f"{ROLLOUT}::test_lag_k_samples_with_the_weights_of_k_updates_ago",
    ),
    Mutation(
        "weights of somebody else taken for one's own",
        "offcorr/rollout/engine.py",
        "if found not in (None, self._mark(version)):",
        "if False:",
        f"{ENGINE}::test_the_version_is_that_of_this_run_or_an_error",
    ),
    Mutation(
        "one seed for equal prompts of several requests",
        "offcorr/rollout/engine.py",
        "int(seeds[rows[0]]) % 2**63",
        "int(seeds[0]) % 2**63",
        f"{ENGINE}::test_equal_neighbours_are_one_request_and_servers_share_the_prompts",
    ),
    Mutation(
        "a head that stayed old goes unnoticed",
        "offcorr/rollout/served.py",
        "nn.Parameter(head.to(self.replica.device), False)",
        "nn.Parameter(0 * head.to(self.replica.device), False)",
        f"{ENGINE}::test_weights_that_stayed_old_are_found_and_named",
    ),
    Mutation(
        "accumulation left out of the denominator",
        "offcorr/trl/trainer.py",
        "sequences * accumulation",
        "sequences",
        "tests/trl/test_differential.py::test_settings",
    ),
    Mutation(
        "recomputed log-probs in the place of the snapshot's",
        "offcorr/training/anchors.py",
        '        _required(self, batch, "old_logp")\n        return batch\n',
        "        return dataclasses.replace(batch, old_logp=batch.logp.detach())\n",
        f"{TRL} snapshot_anchor",
    ),
    Mutation(
        "the trained forward in the place of the EWMA's",
        "offcorr/trl/trainer.py",
        "with patched(self, _kept_forwards=None):",
        "with patched(self, _sampled=self._sampled):",
        f"{ANCHORS} by_hand",
    ),
    Mutation(
        "a solved prompt's tokens counted as left behind",
        "offcorr/training/step.py",
        "if self._correction is None or self._correction.scales_with_advantage:",
        "if self._correction is None or not self._correction.scales_with_advantage:",
        f"{ANCHORS} teaches_nothing",
    ),
    Mutation(
        "a micro-batch after the last one on the same denominator",
        "offcorr/training/step.py",
        "if self._train and last:",
        "if False:",
        "tests/training/test_step.py::test_a_micro_batch_after_the_last_is_refused",
    ),
    Mutation(
        "an anchor that a function makes is not checked",
        "offcorr/training/step.py",
        "self._checked(self._make_anchor())\n        return",
        "self._make_anchor()\n        return",
        "tests/training/test_step.py::test_what_a_function_makes_is_checked",
    ),
    Mutation(
        "an EWMA that is not restored",
        "offcorr/training/step.py",
        "self.anchor.load_state_dict(found[type(self.anchor).__name__])",
        "found[type(self.anchor).__name__]",
        f"{ANCHORS} resume",
    ),
    Mutation(
        "the share of active tokens of one rank",
        "offcorr/training/step.py",
        "self._gather(self._active.vector).sum(0)",
        "self._active.vector",
        "tests/trl/test_distributed.py::test_two_processes ewma",
    ),
    Mutation(
        "a schedule one step ahead",
        "offcorr/trl/step.py",
        "share_done(trainer.state.global_step, ",
        "share_done(trainer.state.global_step + 1, ",
        "tests/trl/test_schedules.py::test_holderpo_anneals_by_itself",
    ),
    Mutation(
        "a schedule that stops short of its end",
        "offcorr/training/schedules.py",
        "step / max(steps - 1, 1)",
        "step / max(steps, 1)",
        "tests/trl/test_schedules.py::test_holderpo_anneals_by_itself",
    ),
    Mutation(
        "the kept units of this rank alone",
        "offcorr/training/step.py",
        "self.total(torch.stack([correction.kept_units(batch, self.statistics) for batch in batches]).sum(0))",
        "torch.stack([correction.kept_units(batch, self.statistics) for batch in batches]).sum(0)",
        "tests/training/test_step.py::test_what_another_rank_keeps_counts_too",
    ),
    Mutation(
        "a row of logprobs too short is padded",
        RETURNED,
        'PER_TOKEN = ("logprobs", "env_mask", "old_logp")',
        'PER_TOKEN = ("env_mask", "old_logp")',
        f"{RETURNS}::test_every_token_has_its_number",
    ),
    Mutation(
        "a mask of any numbers is taken",
        RETURNED,
        "bool(value == 0 or value == 1)",
        "True",
        f"{RETURNS}::test_refused",
    ),
    Mutation(
        "old_logp that nothing reads is refused",
        RETURNED,
        'if name == "old_logp" and reads and not',
        'if name == "old_logp" and not',
        f"{RETURNS}::test_what_is_not_read_is_not_refused",
    ),
    Mutation(
        "a token without the engine's log-prob measured as on-policy",
        "offcorr/training/step.py",
        "padded.replaced(old_logp=padded.rollout_logp, rollout_logp=None)",
        "padded.replaced(rollout_logp=None)",
        f"{TRL}::test_tokens_that_the_engine_could_not_score_are_in_no_series",
    ),
    Mutation(
        "one fresh sample makes a step on-policy",
        "offcorr/training/ess_lr.py",
        "| ~batch.mask.bool()).all()",
        "| ~batch.mask.bool()).any()",
        "tests/trl/test_ess_lr.py::test_one_stale_token_is_not_on_policy",
    ),
    Mutation(
        "a step calibrated on and scaled",
        "offcorr/training/ess_lr.py",
        "        self.end()\n        self._seen, self.lr_scale = None, 1.0",
        "        self._seen = None",
        "tests/trl/test_ess_lr.py::test_calibrated_on_policy",
    ),
    Mutation(
        "raw and processed log-probs mistaken for each other",
        "offcorr/training/semantics.py",
        "evidence = d.sum().item()",
        "evidence = -d.sum().item()",
        "tests/training/test_semantics.py::test_every_fault_is_named_in_512_tokens raw",
    ),
    Mutation(
        "the trainer's temperature left out of the engine's",
        "offcorr/training/semantics.py",
        "Estimate(temperature / power.value",
        "Estimate(1 / power.value",
        "tests/training/test_semantics.py::test_the_temperature_is_estimated",
    ),
    Mutation(
        "a temperature of twenty",
        "offcorr/training/semantics.py",
        "< HOTTEST and of_engine > 0.5",
        "",
        "tests/training/test_semantics.py::test_a_fit_that_no_temperature_gives_is_no_temperature",
    ),
    Mutation(
        "rare tokens absent from a sample taken for certainty",
        "offcorr/training/semantics.py",
        "max(value.error, least.sqrt().item())",
        "value.error",
        "tests/training/test_semantics.py::test_a_rare_token_that_is_absent_is_no_surprise",
    ),
    Mutation(
        "entropy of later weights beside old_logp",
        "offcorr/training/first_batch.py",
        "entropy if moved < 0.01 else None",
        "entropy",
        "tests/training/test_semantics.py::test_step_compares_with_the_weights_that_sampled",
    ),
    Mutation(
        "one noisy step is a verdict",
        "offcorr/training/cusum.py",
        "self.above >= self.persistence",
        "self.above >= 1",
        f"{WATCHED}::test_noisy_steps_are_no_verdict",
    ),
    Mutation(
        "a baseline of the steps in which the lag still grows",
        "offcorr/training/cusum.py",
        "(rose and self.seen <= 3 * self.warmup)",
        "False",
        f"{WATCHED}::test_the_baseline_waits_until_the_lag_is_there",
    ),
    Mutation(
        "the sequences in order masked in place of the others",
        "offcorr/training/masking.py",
        "k3.sum(1) <= series.mask_above",
        "k3.sum(1) >= series.mask_above",
        f"{WATCHED}::test_mask_the_sequences_above_the_limit",
    ),
    Mutation(
        "monitor: a mask's limit is that of the last alarm",
        "offcorr/training/series.py",
        "        if self.active is None:\n            self.mask_limit",
        "        if True:\n            self.mask_limit",
        f"{WATCHED}::test_the_limit_of_a_mask_stays_for_its_alarm",
    ),
    Mutation(
        "monitor: the steps of an alarm are the baseline",
        "offcorr/training/series.py",
        "if warming and (self.active or over):",
        "if False:",
        f"{WATCHED}::test_an_alarm_from_the_first_step_on_leaves_the_baseline_for_later",
    ),
    Mutation(
        "monitor: a fault within the warm-up is the baseline of surprise",
        "offcorr/training/series.py",
        "abs(self._warm_up_mean) > least",
        "False",
        "tests/training/test_surprise.py::test_a_fault_within_the_warm_up_is_an_alarm",
    ),
    Mutation(
        "monitor: versions that stand still are compared with no time of before",
        "offcorr/training/arrivals.py",
        "max(LATER, TIMES * self.longest)",
        "LATER",
        f"{WATCHED}::test_newer_weights_that_come_late_as_before_are_no_alarm",
    ),
    Mutation(
        "monitor: a checkpoint forgets since when no newer weights came",
        "offcorr/training/monitor.py",
        'self._arrivals.load_state_dict(state.get("arrivals", {}))',
        "self._arrivals = Arrivals()",
        f"{WATCHED}::test_the_alarm_of_late_weights_ends_when_they_come_and_is_part_of_a_checkpoint",
    ),
    Mutation(
        "monitor: versions that stand still are said to be a gap",
        "offcorr/training/alarms.py",
        "OVERDUE if self.overdue else",
        "OVERDUE if False else",
        f"{WATCHED}::test_a_sampler_whose_versions_stand_still_is_an_alarm",
    ),
    Mutation(
        "monitor: a sampler that was updated at first is called never updated",
        "offcorr/training/named_cause.py",
        "series.agreed_steps >= SEVERAL",
        "False",
        "tests/training/test_own_updates.py::test_a_sampler_that_was_updated_at_first_is_not_called_never_updated",
    ),
    Mutation(
        "surprise charted in nats, whose spread grows as a policy learns",
        "offcorr/training/series.py",
        "errors = metrics[SURPRISE] / _error(metrics)",
        "errors = metrics[SURPRISE] / SMALLEST_ERROR",
        "tests/training/test_surprise.py::test_a_policy_that_becomes_sharper_is_no_alarm",
    ),
    Mutation(
        "an alarm without a cause stops the training",
        "offcorr/training/monitor.py",
        "if series.held_back:",
        "if False:",
        "tests/training/test_monitor_causes.py::test_an_alarm_without_a_cause_does_not_contradict_itself",
    ),
    Mutation(
        "a gap that keeps growing is a precision",
        "offcorr/training/named_cause.py",
        'if named.cause == "precision" and _grows(series, report)',
        "if False",
        "tests/training/test_monitor_causes.py::test_a_gap_that_keeps_growing_is_no_precision",
    ),
    Mutation(
        "old weights blamed within a generation",
        "offcorr/training/named_cause.py",
        "if not (said := of_own_updates(series, records)):",
        "if True:",
        "tests/training/test_own_updates.py::test_updates_within_a_generation_are_the_trainers",
    ),
    Mutation(
        "a gap that begins in the run and grows called rounding",
        "offcorr/training/named_cause.py",
        "series.risen >= (RISING if series.agreed else GROWN)",
        "False",
        "tests/training/test_own_updates.py::test_a_gap_that_begins_in_the_run_and_grows_is_no_rounding",
    ),
    Mutation(
        "a lag that is reported taken for a sampler that was never updated",
        "offcorr/training/series.py",
        "self.lag == 0 and self.never_fell",
        "self.never_fell",
        "tests/training/test_own_updates.py::test_a_sampler_that_was_never_updated_is_an_alarm_of_its_own",
    ),
    Mutation(
        "a series under alarm for ever",
        "offcorr/training/series.py",
        "self.calm >= persistence and self.active",
        "False",
        f"{WATCHED}::test_one_alarm_for_one_fault_and_another_for_the_next",
    ),
    Mutation(
        "a temperature beside later weights ends the training",
        "offcorr/training/semantics.py",
        "return self.same_weights and",
        "return",
        f"{WATCHED}::test_a_temperature_beside_later_weights_is_a_warning",
    ),
    Mutation(
        "the log-probs compared at every batch",
        "offcorr/trl/trainer.py",
        "            self._reported = True\n",
        "",
        f"{TRL}::test_log_probs_are_compared_in_the_first_batch_alone",
    ),
    Mutation(
        "an engine stage sees the trainer's log-prob in the kernel",
        SOURCE,
        "    logp = block.policies[STAGE.first]\n",
        "    logp = block.policies[0]\n",
        f"{KERNEL}::test_every_pair_of_policies engine",
    ),
    Mutation(
        "a gate sees its pair's log-prob for the policy that is trained",
        SOURCE,
        "clamped, raw, value, logp = log_ratio, inputs[1], log_ratio, block.policies[0]",
        "clamped, raw, value, logp = log_ratio, inputs[1], log_ratio, inputs[4]",
        f"{KERNEL}::test_every_method_padded_and_packed cispo",
    ),
    Mutation(
        "a part of a split row forgets what came before it",
        SOURCE,
        'which = earlier if STAGE.kind == "running" else there',
        "which = there",
        f"{KERNEL}::test_every_span_on_split_rows prefix",
    ),
    Mutation(
        "every part of a split row has a first token",
        SOURCE,
        "            first_token = tl.where(count_before > 0, -1.0, first_token)\n",
        "",
        f"{KERNEL}::test_every_method_on_split_rows dapo",
    ),
    Mutation(
        "positions begin anew in every part",
        SOURCE,
        "            position = valid_before + tl.cumsum(ones, 0)",
        "            position = valid_before - count_before + tl.cumsum(ones, 0)",
        f"{KERNEL}::test_every_method_on_split_rows ctpo",
    ),
    Mutation(
        "a part of a row counts as a row",
        METERING,
        "count, SIZE, PLAN.split)",
        "count, SIZE, False)",
        f"{KERNEL}::test_every_method_on_split_rows dapo",
    ),
    Mutation(
        "the last program but one merges",
        METERING,
        "if _arrive(buffers.tickets, count):",
        "if _arrive(buffers.tickets, count - 1):",
        f"{LAUNCHES}::test_whichever_comes_last",
    ),
    Mutation(
        "tickets stay taken",
        METERING,
        "tl.store(ticket_ptr, 0)",
        "tl.store(ticket_ptr, 1)",
        f"{LAUNCHES}::test_the_kernel_leaves_its_tickets_as_it_found_them",
    ),
    Mutation(
        "the loss of a split row is not divided by what was kept of it",
        METERING,
        '_one(numbers, VALID), PLAN.divides_by == "kept")',
        "_one(numbers, VALID), False)",
        f"{LAUNCHES}::test_whichever_comes_last",
    ),
    Mutation(
        "turns are counted anew in every part of a row",
        SOURCE,
        "            turns_ptr = runs_ptr + entries",
        "            turns_ptr = None",
        f"{KERNEL}::test_every_span_on_split_rows turn",
    ),
    Mutation(
        "the kernel waits for a controller's numbers",
        "offcorr/kernels/composition.py",
        "return isinstance(number, Tensor) and number.device == device",
        "return False",
        f"{LAUNCHES}::test_controllers_wait_for_nothing",
    ),
    Mutation(
        "an external weight does not reach the kernel",
        SOURCE,
        "    weight = tl.zeros_like(logp) + row.weight",
        "    weight = tl.zeros_like(logp) + 1.0",
        f"{KERNEL}::test_an_external_weight sequence",
    ),
    Mutation(
        "a span of one's own is split without knowing how",
        "offcorr/kernels/composition.py",
        "return not isinstance(twin, spans.Running) or twin.carry is not None",
        "return True",
        f"{KERNEL}::test_a_row_is_split_only_where_the_span_says_how trace",
    ),
    Mutation(
        "two functions of one name are one to Triton",
        "offcorr/kernels/rebind.py",
        "if key is not None and not",
        "if key is None and not",
        "tests/kernels/test_correction_aot.py::test_functions_of_one_name_are_told_apart",
    ),
    Mutation(
        "the grid: a cell measured with another cell's advantages",
        GRID,
        "_in_cell(dataclasses.replace(policies, setting=cell.setting), methods, draws)",
        "_in_cell(policies, methods, draws)",
        f"{GRIDS}::test_a_cell_is_its_setting_also_where_it_shares_its_policies",
    ),
    Mutation(
        "the grid: the engine's gap of a regime that has both",
        GRID,
        '"engine_gap": ENGINE_GAP if staleness else gap',
        '"engine_gap": gap',
        f"{GRIDS}::test_a_regime_has_its_gaps",
    ),
    Mutation(
        "the grid: direction beside the worst of the cell",
        GRID,
        'relative(found.values[key], max if key.startswith("direction") else min)',
        "relative(found.values[key], min)",
        f"{GRIDS}::test_the_summary_is_that_of_numbers_by_hand",
    ),
    Mutation(
        "the grid: a best direction below 0 is divided by",
        GRID,
        "value / reference if reference > 0 else math.nan for",
        "value / reference for",
        f"{GRIDS}::test_where_no_method_has_a_direction_there_is_no_best",
    ),
    Mutation(
        "the grid: cells in the order in which they end",
        GRID,
        "    kept = [cell for cell in chosen if cell in found]\n",
        "    kept = list(found)\n",
        f"{GRIDS}::test_the_numbers_repeat_by_seed_whatever_the_processes",
    ),
    Mutation(
        "the grid: methods of one cell's same update are one row",
        GRID,
        "tuple(found.same[method] for found in self.found) or (method,)",
        "tuple(found.same[method] for found in self.found[:1])",
        f"{GRIDS}::test_the_same_update_in_every_cell_is_one_row",
    ),
    Mutation(
        "the grid: a file that exists is replaced",
        GRID,
        "results.free(path, options.overwrite, option)",
        "results.free(path, True, option)",
        f"{GRIDS}::test_a_file_that_exists_is_kept_unless_it_may_be_replaced",
    ),
    Mutation(
        "the grid: another number of draws than was asked for",
        GRID,
        "rows = compare.compare(world, methods, draws, timed=False)",
        "rows = compare.compare(world, methods, draws + 1, timed=False)",
        f"{GRIDS}::test_compares_one_setting_is_a_cell",
    ),
    Mutation(
        "the grid: a cell out of reach is an error",
        GRID,
        "        return str(error)\n    return [_in_cell",
        "        raise\n    return [_in_cell",
        f"{GRIDS}::test_a_gap_out_of_reach_leaves_the_cell_out",
    ),
    Mutation(
        "bench kernels: the round that warms up counts",
        TIMES,
        "            if number:\n",
        "            if True:\n",
        f"{TIMED}::test_works_take_turns_and_the_first_round_warms_up",
    ),
    Mutation(
        "bench kernels: the bare loss without its mask",
        TIMES,
        "(surrogate * given.mask).sum()",
        "surrogate.sum()",
        f"{TIMED}::test_the_bare_loss_is_ppos",
    ),
    Mutation(
        "bench kernels: a file that exists is replaced",
        TIMES,
        "results.free(options.output, options.overwrite)",
        "results.free(options.output, True)",
        f"{TIMED}::test_the_command_writes_times_and_ratios",
    ),
    Mutation(
        "bench kernels: a head that is not normalised",
        TIMES,
        "torch.log_softmax((hidden @ weight.T).float(), -1).gather",
        "(hidden @ weight.T).float().gather",
        f"{TIMED}::test_both_heads_compute_the_same",
    ),
    Mutation(
        "the exact lab samples from the sampler instead of the engine",
        LAB,
        "return _chances(self.tree, self.engine)",
        "return _chances(self.tree, self.old)",
        f"{EXACT}::test_the_total_ratio_is_unbiased_whatever_the_engine_does",
    ),
    Mutation(
        "the score without its mean",
        LAB,
        "return (totals - self.logp.exp() * totals.sum(1, keepdim=True)).flatten()",
        "return totals.flatten()",
        f"{EXACT}::test_scores_and_their_squares_are_those_of_autograd",
    ),
    Mutation(
        "the square of the score without its cross term",
        LAB,
        "norms = 1 - 2 * chances +",
        "norms = 1 - chances +",
        f"{EXACT}::test_moments_agree_with_brute_force",
    ),
    Mutation(
        "advantages under the sampler instead of the trainer",
        LAB,
        "self.tree.advantages(self.trainer, self.rewards)",
        "self.tree.advantages(self.old, self.rewards)",
        f"{EXACT}::test_the_true_gradient_is_the_derivative_of_the_expected_reward",
    ),
    Mutation(
        "variance that does not fall with the batch",
        LAB,
        "max(total_square - mean_square, 0.0) / size",
        "max(total_square - mean_square, 0.0)",
        f"{EXACT}::test_drawn_moments_agree_with_exact_ones",
    ),
    Mutation(
        "the squared mean of drawn batches with its bias",
        LAB,
        "(float(total.square().sum()) - squares) / (draws * (draws - 1))",
        "float(total.square().sum()) / draws**2",
        f"{EXACT}::test_few_draws_do_not_bias_the_variance",
    ),
    Mutation(
        "bias by the difference of squares",
        LAB,
        "return found._replace(bias=float((mean - world.gradient).norm()) / math.sqrt(truth))",
        "return found",
        f"{EXACT}::test_the_sequence_ratio_is_unbiased",
    ),
    Mutation(
        "aggregation left in",
        LAB,
        "return float(world.tree.length if aggregation.unit",
        "return float(1 if aggregation.unit",
        f"{EXACT}::test_the_sequence_ratio_is_unbiased",
    ),
    Mutation(
        "a denominator that counts what is kept taken for constant",
        LAB,
        "return bool(loss_fn.couples) or not loss_fn.count_rejected",
        "return bool(loss_fn.couples)",
        f"{EXACT}::test_a_correction_that_couples_sequences_is_run_on_drawn_batches",
    ),
    Mutation(
        "an error of a setting without its option",
        "offcorr/lab/compare.py",
        "raise ValueError(f\"--{name.replace('_', '-')} {rest}\") from error",
        "raise",
        "tests/lab/test_compare.py::test_errors_name_the_option",
    ),
    Mutation(
        "columns that are too wide for the terminal",
        "offcorr/lab/comparison.py",
        "if blocks[-1] and label + sum",
        "if blocks[-1] and sum",
        "tests/lab/test_compare.py::test_the_table_folds_to_the_width",
    ),
    *(
        Mutation(what, f"offcorr/kernels/logprob/{file}.py", right, wrong, f"tests/kernels/test_logprob_{test}")
        for what, file, right, wrong, test in (
            (
                "support: the kernel ignores it",
                "fold",
                "if kept_ptr is not None:\n        z =",
                "if False:\n        z =",
                TWIN,
            ),
            (
                "support: not in the backward pass",
                "tiles",
                "z.masked_fill_(~kept, -torch.inf)",
                "pass",
                "support.py gradcheck",
            ),
            (
                "support: a position without an id keeps nothing",
                "support",
                "mask[: len(kept)] = self.whole[positions][:, None]",
                "pass",
                "support.py everything",
            ),
            (
                "support: a target outside it is overlooked",
                "linear",
                "unsupported = targets.valid(~support.contains(target))",
                "unsupported = torch.zeros_like(target, dtype=torch.bool)",
                "support.py outside",
            ),
            (
                "split head: support taken as the rank's own",
                "linear",
                "self.start + first, columns)",
                "first, columns)",
                SPLIT,
            ),
            (
                "split head: hidden's gradient is not summed",
                "linear",
                "dist.all_reduce(gradient, group=plan.group)",
                "pass",
                SPLIT,
            ),
            ("split head: sums of different maxima", "tiles", "(factor * total).sum(0)", "total.sum(0)", SPLIT),
            (
                "split head: two ranks have one token",
                "linear",
                "ranks[:, 5].sum(0) == 1",
                "ranks[:, 5].sum(0) >= 1",
                SPLIT,
            ),
        )
    ),
    *(
        Mutation(what, f"offcorr/integrations/{module}.py", right, wrong, f"tests/integrations/test_{module}.py")
        for what, module, right, wrong in (
            ("verl: local instead of global denominator", "verl", "number = of_batch.get(name)", "number = None"),
            ("verl: the number of ranks is left out", "verl", "return out.loss * ranks,", "return out.loss,"),
            (
                "verl: the engine's log-probs on the wrong side",
                "verl",
                "old_logp - ratio.log()",
                "old_logp + ratio.log()",
            ),
            ("SkyRL: the engine's log-probs are dropped", "skyrl", "rollout_logp=rollout_logprobs,", ""),
            (
                "prime-rl: loss weights are dropped",
                "prime_rl",
                "weight=None if weights is None else weights[None],",
                "",
            ),
            ("slime: rejections are dropped", "slime", "reject=whole.reject,", ""),
            ("Tinker: the current log-probs as anchor", "tinker", "old_logp=sampled,", ""),
        )
    ),
    Mutation(
        "closed loop: exact return forgets the mistakes so far",
        CLOSED,
        "after[..., 1:, :] += reached[..., :-1, :]",
        "after[..., :-1, :] += reached[..., :-1, :]",
        f"{IN_LOOP}::test_the_return_is_the_mean_reward_of_every_sequence",
    ),
    Mutation(
        "closed loop: the first policy's success is not set",
        CLOSED,
        "noise - high * wrong, *",
        "noise, *",
        f"{IN_LOOP}::test_every_run_begins_with_the_same_success",
    ),
    Mutation(
        "closed loop: samples ignore the previous symbol",
        CLOSED,
        "states.append(first[at] + previous)",
        "states.append(first[at])",
        f"{IN_LOOP}::test_samples_have_the_frequencies_of_the_policy",
    ),
    Mutation(
        "closed loop: rewards of a neighbour's mistakes",
        CLOSED,
        "value[self.mistakes[places].sum(1)]",
        "value[self.mistakes[places.roll(1, 0)].sum(1)]",
        f"{IN_LOOP}::test_rewards_are_those_of_the_sampled_sequences",
    ),
    Mutation(
        "closed loop: gradient without the signs",
        CLOSED,
        "of_logits.view(len(self.worlds), self.rates, 1, -1) * self.sign",
        "of_logits.view(len(self.worlds), self.rates, 1, -1) * self.sign.abs()",
        f"{IN_LOOP}::test_the_gradient_is_that_of_autograd",
    ),
    Mutation(
        "closed loop: replicas share their parameters",
        CLOSED,
        "return own + first.view(-1, self.rates, 1, 1)",
        "return own + 0 * first.view(-1, self.rates, 1, 1)",
        f"{IN_LOOP}::test_parameters_are_shared_within_a_replica_alone",
    ),
    Mutation(
        "closed loop: sampler a step too new",
        CLOSED,
        "old, engine = past[0]",
        "old, engine = past[min(1, len(past) - 1)]",
        f"{IN_LOOP}::test_samples_come_from_the_policy_of_lag_steps_ago",
    ),
    Mutation(
        "closed loop: draws differ between the rates",
        CLOSED,
        "uniform[:, :, None].expand(-1, -1, self.rates, -1, -1)",
        "uniform[:, :, None].roll(1, 0).expand(-1, -1, self.rates, -1, -1) * torch.rand(self.rates, 1, 1)",
        f"{IN_LOOP}::test_methods_and_rates_are_paired_by_the_same_draws",
    ),
    Mutation(
        "closed loop: sampler rounded, too",
        CLOSED,
        "past.append((logp, engine))",
        "past.append((engine, engine))",
        f"{IN_LOOP}::test_a_grid_rounds_the_engines_logits_and_nothing_else",
    ),
    Mutation(
        "closed loop: advantages over the batch",
        CLOSED,
        "groups.mean(1, keepdim=True)",
        "groups.mean()",
        f"{IN_LOOP}::test_advantages_are_normalised_per_prompt",
    ),
    Mutation(
        "closed loop: one call for all replicas of a controller",
        CLOSED,
        "    if alone(loss_fn):\n",
        "    if False:\n",
        f"{IN_LOOP}::test_replicas_do_not_touch_one_another m2po",
    ),
    Mutation(
        "closed loop: aggregation left in",
        CLOSED,
        "return loss_fn.coefficient(batch, denominator) * -constant",
        "return -loss_fn(batch, denominator=denominator).coefficient",
        f"{IN_LOOP}::test_the_constants_of_the_aggregation_are_divided_out",
    ),
    Mutation(
        "closed loop: Adam without its correction of the first steps",
        CLOSED,
        "self.rates / (1 - 0.9**self.steps)",
        "self.rates",
        f"{IN_LOOP}::test_optimizers_are_those_of_torch",
    ),
    Mutation(
        "closed loop: one stream of random numbers for all seeds",
        CLOSED,
        "manual_seed(1_000_003 + seed)",
        "manual_seed(1_000_003 + seeds)",
        f"{IN_LOOP}::test_a_seed_has_the_same_run_beside_any_others",
    ),
    Mutation(
        "closed loop: AUC weighs every evaluation alike",
        CLOSED,
        "torch.trapezoid(self.returns, at, dim=2) / (at[-1] - at[0])",
        "self.returns.mean(2)",
        f"{IN_LOOP}::test_auc_is_the_trapezoidal_mean",
    ),
    Mutation(
        "closed loop: a method's last rate for its best",
        LOOP,
        "return means.index(max(means))",
        "return len(means) - 1",
        f"{IN_LOOP}::test_cells_are_summed_up_as_by_hand",
    ),
    Mutation(
        "closed loop: errors of unpaired rates",
        LOOP,
        "results.difference(seeds[cell], seeds[best[cell[1]], cell[1]])",
        "results.difference(seeds[cell], seeds[best[cell[1]], cell[1]][::-1])",
        f"{IN_LOOP}::test_cells_are_summed_up_as_by_hand",
    ),
    Mutation(
        "closed loop: the largest rate is no edge",
        LOOP,
        'high: ">"}',
        "high: ' '}",
        f"{IN_LOOP}::test_the_table_says_what_is_level_where_a_rate_is_at_the_edge_and_which_part_is_which",
    ),
    Mutation(
        "closed loop: order of the cells as they end",
        LOOP,
        "return {cell: found[cell] for cell in costs}",
        "return dict(reversed(found.items()))",
        f"{IN_LOOP}::test_after_a_kill_the_same_command_goes_on_where_it_was",
    ),
    Mutation(
        "closed loop: finished cells are trained again",
        LOOP,
        "todo = [cell for cell in cells if cell not in found]",
        "todo = cells",
        f"{IN_LOOP}::test_after_a_kill_the_same_command_goes_on_where_it_was",
    ),
    Mutation(
        "closed loop: cells of an edited file are taken",
        LOOP,
        'source.read_text() if source.suffix == ".py" else ""',
        '""',
        f"{IN_LOOP}::test_a_cell_of_other_options_or_of_an_edited_file_is_not_taken",
    ),
    Mutation(
        "closed loop: torch's own seed draws, process by process",
        CLOSED,
        "torch.rand(shape, generator=draw) for draw in draws",
        "torch.rand(shape) for draw in draws",
        f"{IN_LOOP}::test_the_result_does_not_depend_on_the_number_of_processes",
    ),
    Mutation(
        "tokens: repaired by the rendered prompt",
        CARRIED,
        "            self._pending = rendered[behind:]\n",
        "            self._begin(rendered)\n",
        f"{TOKENS} other_tokens",
    ),
    Mutation(
        "tokens: masked tokens stay in the loss",
        CARRIED,
        "del values[kept:]",
        "pass",
        f"{TOKENS} engine_saw_and_sampled",
    ),
    Mutation(
        "tokens: a fork keeps the record",
        CARRIED,
        "            self._begin(rendered)\n",
        "            self._pending = rendered\n",
        f"{TOKENS} changed_conversation",
    ),
    Mutation(
        "tokens: context in the loss",
        CARRIED,
        "[False] * context + [True] * len(new)",
        "[True] * (context + len(new))",
        f"{TOKENS} prompt_that_continues",
    ),
    Mutation(
        "tokens: an end that was not sampled is lost",
        COMPARED,
        "last.stop if old[-1].end is not None else last.stop - 1",
        "last.stop",
        f"{TOKENS} cut_off",
    ),
    Mutation(
        "tokens: edited content taken for whitespace",
        COMPARED,
        'return re.sub(r"(?<!\\w) | (?!\\w)", ""',
        'return re.sub(r".", ""',
        f"{TOKENS} changed_conversation",
    ),
    Mutation(
        "tokens: other reasoning counts as stripped",
        COMPARED,
        'thoughts[1] - {""} <= thoughts[0]',
        "True",
        f"{TOKENS} other_reasoning",
    ),
    Mutation(
        "tokens: a reason that is repaired decides",
        CARRIED,
        "(refused or reasons)[-1]",
        "reasons[-1]",
        f"{TOKENS} gravest",
    ),
    Mutation(
        "tokens: the prompt that the engine saw is not compared",
        CARRIED,
        "!= self._ids + self._pending:",
        "== []:",
        f"{TOKENS} cannot_have_been_sampled",
    ),
    Mutation(
        "exact: products of any number of rows by torch",
        INVARIANT,
        "    if not _tiled(a, b):\n        return torch.mm(",
        "    if True:\n        return torch.mm(",
        f"{BITWISE}::test_a_row_does_not_depend_on_the_batch linear",
    ),
    Mutation(
        "exact: fewer columns than a vector",
        INVARIANT,
        "if b.shape[1] >= COLUMNS else",
        "if True else",
        f"{BITWISE}::test_a_row_does_not_depend_on_the_batch vector",
    ),
    Mutation(
        "exact: the terms of a product in one piece",
        INVARIANT,
        "left = _padded(_padded(a.to(wide), ROWS, dim=1), TERMS, dim=2)",
        "left = _padded(a.to(wide), ROWS, dim=1)",
        f"{BITWISE}::test_a_token_alone_gets_what_it_gets_in_its_sequence",
    ),
    Mutation(
        "exact: the sum of a softmax by torch",
        INVARIANT,
        "sums = _padded(e, VECTOR, dim=-1).unflatten(-1, (-1, VECTOR)).sum(-1)",
        "sums = e.sum(-1, keepdim=True)",
        f"{BITWISE}::test_a_token_alone_gets_what_it_gets_in_its_sequence",
    ),
    Mutation(
        "exact: activations with an end",
        INVARIANT,
        "flat = _padded(wide, VECTOR, dim=0)",
        "flat = wide",
        f"{BITWISE}::test_a_row_does_not_depend_on_the_batch silu",
    ),
    Mutation(
        "exact: activations shared between threads",
        INVARIANT,
        "zip(flat.split(SERIAL), out.split(SERIAL), strict=True)",
        "zip([flat], [out], strict=True)",
        f"{BITWISE}::test_the_parts_of_three_threads_have_no_ends",
    ),
    Mutation(
        "exact: padding stays in front of the keys",
        ATTENDS,
        "if bool(start.any()):",
        "if False:",
        f"{BITWISE}::test_neither_batch_nor_length_nor_padding_changes_attention",
    ),
    Mutation(
        "exact: the last key again behind the others",
        ATTENDS,
        " & (moved < columns)[:, :, None]",
        "",
        f"{BITWISE}::test_neither_batch_nor_length_nor_padding_changes_attention",
    ),
    Mutation(
        "exact: the inner context restores torch",
        INVARIANT,
        "if not _open:\n                replaced",
        "if True:\n                replaced",
        f"{BITWISE}::test_the_operators_are_restored",
    ),
    Mutation(
        "exact: a copied head with the weights of the original",
        "offcorr/exact/logprob.py",
        "MethodType(_float32_forward, head)",
        "lambda hidden: _float32_forward(head, hidden)",
        f"{BITWISE}::test_a_copy_of_the_model_computes_with_its_own_weights",
    ),
    Mutation(
        "exact: the first token alone is searched",
        "offcorr/exact/agreement.py",
        "min(len(values), len(others))",
        "1",
        f"{BITWISE}::test_a_model_agrees_with_its_cached_self_only_inside",
    ),
    Mutation(
        "exact: TRL's positions count padding",
        "offcorr/trl/lm_head.py",
        'return model(**inputs, position_ids=(inputs["attention_mask"].cumsum(-1) - 1).clamp(min=0))',
        "return model(**inputs)",
        "tests/trl/test_lm_head.py::test_the_samplers_log_probs_to_the_last_bit",
    ),
    Mutation(
        "exact: numbers behind the terms in a GPU's product",
        "offcorr/kernels/invariant.py",
        "mask=(rows[:, None] < M) & (inner[None, :] < K - start), other=0.0",
        "mask=(rows[:, None] < M), other=0.0",
        "tests/kernels/test_invariant.py::test_products_are_right",
    ),
    Mutation(
        "a replay called fresh",
        "offcorr/data/rollouts.py",
        "else REPLAY for origin",
        "else FRESH for origin",
        f"{REPLAY} share_1",
    ),
    Mutation(
        "a replay is drawn whatever its uses",
        "offcorr/data/store.py",
        "key=lambda key: self.entries[key].uses)",
        "key=lambda key: 0)",
        f"{REPLAY} fewest",
    ),
    Mutation(
        "a replay a version too old", "offcorr/data/store.py", "<= self.max_age", "<= self.max_age + 1", f"{REPLAY} old"
    ),
    Mutation(
        "no fraction of a replay is carried over",
        "offcorr/data/replay.py",
        "self._carry += self.share",
        "self._carry = self.share",
        f"{REPLAY} fraction",
    ),
    Mutation(
        "replay resumed without its carry",
        "offcorr/data/replay.py",
        'state["generation"], state["carry"], state["loaded"]',
        'state["generation"], 0.0, state["loaded"]',
        f"{REPLAY} resume",
    ),
    Mutation(
        "reward functions called for a replay",
        "offcorr/trl/recorded.py",
        "if known is None]",
        "]",
        f"{REPLAY} whole",
    ),
    Mutation(
        "the monitor reads replay, too",
        "offcorr/training/step.py",
        "numbers = watched_numbers(computed)",
        "numbers = dict(computed)",
        f"{ORIGINS} alarm",
    ),
    Mutation(
        "the self-test reads replay, too",
        "offcorr/training/first_batch.py",
        "padded = padded.rows(rows)",
        "pass",
        f"{ORIGINS} self_test",
    ),
    Mutation(
        "data: a trace in the first row of its group",
        "offcorr/data/demonstrations.py",
        "((group + 1) * size - numbers[group] + i,",
        "(group * size + i,",
        "tests/data/test_demonstrations.py::test_the_last_rows_of_a_group_are_traces_with_the_groups_advantage",
    ),
    Mutation(
        "data: every group begins with the first trace",
        "offcorr/data/stateful.py",
        "self.taken[prompt] = before + number",
        "self.taken[prompt] = before",
        "tests/data/test_demonstrations.py::test_traces_of_a_prompt_take_turns_and_no_group_has_one_twice",
    ),
    Mutation(
        "data: traces in an evaluation",
        "offcorr/data/demonstrations.py",
        "if not trainer.model.training:",
        "if False:",
        "tests/data/test_demonstrations.py::test_evaluation_samples_every_completion",
    ),
    Mutation(
        "data: a stage of the total mismatch does not count as one that compares",
        "offcorr/data/demonstrations.py",
        'stage.mismatch in ("staleness", "total")',
        'stage.mismatch in ("staleness",)',
        "tests/data/test_demonstrations.py::test_which_methods_refuse_traces_without_log_probs aipo",
    ),
    Mutation(
        "data: the stand-in for a log-prob has a gradient",
        "offcorr/training/unrecorded.py",
        "logp.detach().to(old_logp)",
        "logp.to(old_logp)",
        "tests/data/test_demonstrations.py::test_the_ratio_of_a_trace_without_log_probs ratio_one",
    ),
    Mutation(
        "data: a log-prob above 0 is taken",
        "offcorr/data/trace.py",
        "math.isfinite(value) and value <= ROUNDING",
        "math.isfinite(value)",
        "tests/data/test_traces.py::test_what_is_wrong_is_refused_with_file_row_and_field",
    ),
    Mutation(
        "data: text that does not re-tokenise is taken",
        "offcorr/data/trace.py",
        "if back != text:",
        "if False:",
        "tests/data/test_traces.py::test_what_is_wrong_is_refused_with_file_row_and_field",
    ),
    Mutation(
        "data: a prefix is trained on",
        "offcorr/rollout/prefixed.py",
        "after([0], [[1] * len(row) for row in rows])",
        "after([1], [[1] * len(row) for row in rows])",
        "tests/data/test_prefixes.py::test_all_rows_of_a_group_begin_with_the_same_part_of_a_trace",
    ),
    Mutation(
        "data: a completion is longer than allowed by its prefix",
        "offcorr/rollout/prefixed.py",
        "[self.longest - len(prefix) for prefix in self.prefixes]",
        "[self.longest for prefix in self.prefixes]",
        "tests/rollout/test_prefixed.py::test_a_prefix_begins_the_completion_and_what_follows_is_scored_after_it",
    ),
    Mutation(
        "data: a whole trace is given",
        "offcorr/data/prefixes.py",
        "len(trace) - 1)]",
        "len(trace))]",
        "tests/data/test_prefixes.py::test_a_whole_trace_leaves_its_last_token_to_be_sampled",
    ),
    Mutation(
        "data: the curriculum counts traces as successes",
        "offcorr/data/prefixes.py",
        "prompt in prompts and origin in (FRESH, PREFIX)",
        "prompt in prompts",
        "tests/data/test_prefixes.py::test_a_curriculum_looks_at_sampled_completions_alone",
    ),
    Mutation(
        "data: a generation within an optimizer step is missed by the curriculum",
        "offcorr/data/prefixes.py",
        "self.record(trainer)  # a generation",
        "pass  # a generation",
        "tests/data/test_prefixes.py::test_a_curriculum_follows_each_of_several_generations_of_an_optimizer_step",
    ),
    Mutation(
        "data: the state of traces is not read from a checkpoint",
        "offcorr/data/demonstrations.py",
        'self._turns.taken = dict(state["taken"])',
        "self._turns.taken = {}",
        "tests/data/test_demonstrations.py::test_resuming_reproduces_the_uninterrupted_run",
    ),
    Mutation(
        "diagnose: contexts of two steps of the trainer are compared",
        "offcorr/diagnose/evidence.py",
        "record.trainer_version if record.step is None else record.step",
        "0",
        "tests/diagnose/test_causes.py::test_repeated_contexts_are_of_one_step_of_the_trainer",
    ),
    Mutation(
        "diagnose: a form that all texts share is taken for a fade",
        "offcorr/diagnose/causes/contexts.py",
        "_decay(profile.within_ids)",
        "_decay(profile)",
        "tests/diagnose/test_profile.py::test_rounding_that_follows_the_text_is_no_old_cache_and_no_other_prompt",
    ),
    Mutation(
        "diagnose: a penalty that raises no surprise as a whole",
        "offcorr/diagnose/causes/unlogged.py",
        "found.overall.z < RAISES",
        "found.overall.z < -2",
        "tests/diagnose/test_drawn.py::test_a_penalty_that_raises_nothing_as_a_whole_is_not_named",
    ),
    Mutation(
        "monitor: a setting is named before the reported age",
        "offcorr/training/named_cause.py",
        "if times < least or",
        "if True or",
        "tests/training/test_monitor_causes.py reported_age",
    ),
    Mutation(
        "monitor: a prefix cache is named before the run's own lag",
        "offcorr/training/named_cause.py",
        "least = 0.0 if named.cause == OF_OLDER_PROMPT else GROWN if series.start_lag else NO_PRECISION",
        "least = NO_PRECISION",
        "tests/training/test_monitor_causes.py::test_the_runs_own_lag_hides_no_cause_on_top_of_it",
    ),
    Mutation(
        "monitor: surprise watched while the engine's gap holds the lag",
        "offcorr/training/monitor.py",
        "if self.holds_lag and metrics.get(LAG)",
        "if False and metrics.get(LAG)",
        "tests/training/test_surprise.py::test_surprise_is_not_watched_while_the_engines_gap_holds_the_lag",
    ),
    Mutation(
        "a field that the dump has is asked for",
        "offcorr/diagnose/questions.py",
        "[name for name in fields if any(getattr(record, name) is None for record in evidence.records)]",
        "[*fields]",
        "tests/diagnose/test_questions.py",
    ),
    Mutation(
        "diagnose --model: a penalty forgets the prompt",
        "offcorr/diagnose/hypotheses.py",
        "torch.where(anywhere, ",
        "torch.where(seen, ",
        "tests/diagnose/test_variants.py::test_penalties_by_hand",
    ),
    Mutation(
        "diagnose --model: a token counts as seen when it is drawn",
        "offcorr/diagnose/hypotheses.py",
        "counts[1:] += torch.nn.functional.one_hot(drawn, len(words)).cumsum(0)[:-1]",
        "counts += torch.nn.functional.one_hot(drawn, len(words)).cumsum(0)",
        "tests/diagnose/test_variants.py::test_penalties_by_hand",
    ),
    Mutation(
        "diagnose --model: a transform has to beat the model alone, and not the log",
        "offcorr/diagnose/rescore.py",
        "best.drawn - max(0.0, self.drawn_as_logged)",
        "best.drawn",
        "tests/diagnose/test_variants.py logged_is_not_called_silent",
    ),
    Mutation(
        "diagnose --model: a silent cause stays although the draws contradict it",
        "offcorr/diagnose/informed.py",
        "        replaced |= set(SILENT.values())\n",
        "        pass\n",
        "tests/diagnose/test_variants.py taken_back",
    ),
    Mutation(
        "diagnose: a top-p by the smallest kept mass alone, which rounding blurs",
        "offcorr/diagnose/causes/sampling.py",
        "return self.share.fits or (self.noisy and self.coarse)",
        "return not self.certain <= 0.98 and self.crowded < CROWDED",
        "tests/diagnose/test_causes.py truncation_beside_rounding",
    ),
    Mutation(
        "Step: the tokens of the last micro-batch alone are counted",
        "offcorr/training/counted.py",
        "self._total = own if self._total is None else self._total + own",
        "self._total = own",
        "tests/training/test_step.py another_number",
    ),
    Mutation(
        "diagnose --model: noise hides the trainer's temperature",
        "offcorr/diagnose/rescore.py",
        "if found[best] > 0.9 * found[1.0] or engine[best] > 0.5 * engine[1.0]:",
        "if True:",
        "tests/diagnose/test_variants.py beside_dropout",
    ),
    Mutation(
        "diagnose --model: what the trainer does is taken for a temperature",
        "offcorr/diagnose/rescore.py",
        "if found[best] > 0.9 * found[1.0] or engine[best] > 0.5 * engine[1.0]:",
        "if found[best] > 0.9 * found[1.0]:",
        "tests/diagnose/test_rescore.py is_not_named_for_sure",
    ),
    Mutation(
        "diagnose --model: dropout is named of a trainer that repeats itself",
        "offcorr/diagnose/informed.py",
        "return len(spread) > 0 and float(spread.max()) < SAME",
        "return len(spread) > 6000 and float(spread.max()) < SAME",
        "tests/diagnose/test_rescore.py is_not_named_for_sure",
    ),
    Mutation(
        "diagnose --model: another hypothesis that does as well is not looked at",
        "offcorr/diagnose/informed.py",
        "return best.share if nearest > 2 * best.gap else min(best.share, CLOSE)",
        "return best.share if nearest > 0 * best.gap else min(best.share, CLOSE)",
        "tests/diagnose/test_rescore.py explains_nearly_as_much",
    ),
    Mutation(
        "diagnose: the error of a mean is over tokens",
        "offcorr/diagnose/evidence.py",
        "off = np.bincount(same, values[known] - average)",
        "off = values[known] - average",
        "tests/diagnose/test_causes.py over_sequences",
    ),
    Mutation(
        "Step: the first step's number of tokens is not compared",
        "offcorr/training/step.py",
        "self._compares_first = gather is None",
        "self._compares_first = False",
        "tests/training/test_step.py reads_no_metrics",
    ),
    Mutation(
        "diagnose --model: the adapter stays switched off",
        "offcorr/diagnose/adapters.py",
        "        model.enable_adapters()\n",
        "        pass\n",
        "tests/diagnose/test_variants.py adapter",
    ),
    Mutation(
        "diagnose: steps that agree are read with those that differ",
        "offcorr/diagnose/diagnosis.py",
        "_explain(differing, of_steps)",
        "_explain(evidence, of_steps)",
        "tests/diagnose/test_steps.py temperature",
    ),
    Mutation(
        "diagnose: a change at one step counts as growth",
        "offcorr/diagnose/causes/over_steps.py",
        "_trend(sizes) < STEADY or _jumps(sizes)",
        "_trend(sizes) < STEADY",
        "tests/diagnose/test_steps.py change",
    ),
    Mutation(
        "diagnose: a small d that jumps counts as growth",
        "offcorr/diagnose/causes/over_steps.py",
        "or rises.max() > AT_ONCE * rises.sum()",
        "",
        "tests/diagnose/test_steps.py jumps_or_stays",
    ),
    Mutation(
        "diagnose: silent causes are looked for in all steps",
        "offcorr/diagnose/causes/unlogged.py",
        "balance, ended = _unlogged(where, -1), _truncation(where, rest)",
        "balance, ended = _unlogged(evidence, -1), _truncation(evidence, None)",
        "tests/diagnose/test_drawn.py silent_cause_in_some",
    ),
    Mutation(
        "diagnose: distributions that end by themselves are a truncation",
        "offcorr/diagnose/causes/unlogged.py",
        "if usual <= ENDS:",
        "if True:",
        "tests/diagnose/test_drawn.py flat_distributions",
    ),
    Mutation(
        "diagnose: a shift is taken for text that was encoded again",
        "offcorr/diagnose/causes/values.py",
        "moved_by < 4 * at_place + 1:",
        "moved_by < 0:",
        "tests/diagnose/test_causes.py certain_is_no_other_text",
    ),
    Mutation(
        "diagnose: values on the grid of bfloat16 are placeholders",
        "offcorr/diagnose/causes/values.py",
        "if not evidence.as_logged or _all_bf16(sampler):",
        "if False:",
        "tests/diagnose/test_causes.py return_by_chance",
    ),
    Mutation(
        "diagnose: a mask that is shifted by one is not told from placeholders",
        "offcorr/diagnose/causes/values.py",
        "if not in_runs and not _at_edges(evidence, zeros):",
        "if not in_runs:",
        "tests/diagnose/test_causes.py shifted_by_one",
    ),
    Mutation(
        "diagnose: one step of two runs is one policy",
        "offcorr/diagnose/evidence.py",
        "of {record.where.rpartition('/')[0]}\"",
        '"',
        "tests/diagnose/test_causes.py several_runs",
    ),
    Mutation(
        "diagnose --model: rounding is the trainer's fault",
        "offcorr/diagnose/rescore.py",
        "if self.logged <= SAME:",
        "if False:",
        "tests/diagnose/test_rescore.py nobodys_fault",
    ),
    Mutation(
        "diagnose --model: the trainer's weights are told although no version says so",
        "offcorr/diagnose/informed.py",
        "if same_version(evidence) and Profile",
        "if Profile",
        "tests/diagnose/test_rescore.py trainer_does",
    ),
    Mutation(
        "diagnose --checkpoint: older weights read no prompt",
        "offcorr/diagnose/passes.py",
        "reader = other if stop <= place else model",
        "reader = model",
        "tests/diagnose/test_rescore.py older_weights",
    ),
    Mutation(
        "diagnose --checkpoint: the place where weights changed is looked for once",
        "offcorr/diagnose/earlier.py",
        "for reach in (REACH, 0):",
        "for reach in (0,):",
        "tests/diagnose/test_rescore.py change_within",
    ),
    Mutation(
        "diagnose: rows in another order are compared as policies",
        "offcorr/diagnose/diagnosis.py",
        'if stage == "policies" and left.unrelated:',
        "if False:",
        "tests/diagnose/test_causes.py another_order",
    ),
    Mutation(
        "diagnose: growth over the steps is a temperature",
        "offcorr/diagnose/causes/sampling.py",
        "if growth(evidence) is not None:",
        "if False:",
        "tests/diagnose/test_causes.py sharper_from_step",
    ),
    Mutation(
        "diagnose: a temperature is sure of a part of d",
        "offcorr/diagnose/causes/sampling.py",
        "surest=1.0 if fit.explained > NEARLY_ALL else ALSO_UPDATES",
        "surest=1.0",
        "tests/diagnose/test_causes.py part_of_d",
    ),
    Mutation(
        "diagnose --checkpoint: whole sequences changed within",
        "offcorr/diagnose/earlier.py",
        "if sum(within) < 0.25 * len(records):",
        "if False:",
        "tests/diagnose/test_rescore.py whole_sequences",
    ),
    Mutation(
        "diagnose --checkpoint: an older adapter was never synced, whatever the versions say",
        "offcorr/diagnose/earlier.py",
        "all(age(record) == 0 for record in records)",
        "True",
        "tests/diagnose/test_variants.py another_adapter",
    ),
    Mutation(
        "diagnose --checkpoint: two causes explain the whole gap each",
        "offcorr/diagnose/informed.py",
        "and one.share > room}",
        "and one.share > 9}",
        "tests/diagnose/test_rescore.py no_room",
    ),
    Mutation(
        "the monitor replaces a cause by one seen once in a weaker gap",
        "offcorr/training/series.py",
        "return again and confidence >= self.confidence",
        "return confidence >= self.confidence",
        "tests/training/test_monitor_causes.py weaker",
    ),
    Mutation(
        "prompts: another row's ids are no error",
        "offcorr/trl/prompts.py",
        "if given[i] in expected and not",
        "if given[i] in expected[:0] and not",
        "tests/trl/test_returned.py another_prompt",
    ),
    Mutation(
        "testing: the slope of a span is not divided by the span's own share",
        "offcorr/stage_checks.py",
        "moved)[0], logp) / own",
        "moved)[0], logp)",
        "tests/test_testing.py wrong_slope",
    ),
    Mutation(
        "an __init__ that no dataclass wrote is accepted",
        "offcorr/stages/methods.py",
        '    for base in cls.__mro__[:-1]:\n        if "__init__"',
        '    for base in ():\n        if "__init__"',
        "tests/stages/test_methods.py own",
    ),
    Mutation(
        "a tensor out of range that a controller resolves to is not looked at",
        "offcorr/stages/calls.py",
        "dataclasses.replace(stage, **numbers)",
        "dataclasses.replace(stage)",
        "tests/stages/test_calls.py bound",
    ),
    Mutation(
        "a span may change its input in place",
        "offcorr/stages/reference.py",
        "with unchanged(what, changeable):",
        "with unchanged(what, {}):",
        "tests/stages/test_calls.py changes",
    ),
]


def misplaced(mutations: Iterable[Mutation]) -> list[str]:
    """The mutations whose file does not hold the text to be replaced, or whose test's file is not there."""
    found = []
    for mutation in mutations:
        file, test = ROOT / mutation.file, ROOT / mutation.test.partition(" ")[0].partition("::")[0]
        if not file.is_file() or mutation.right not in file.read_text():
            found.append(f"{mutation.what}: {mutation.file} no longer holds {mutation.right!r}")
        if not test.is_file():
            found.append(f"{mutation.what}: there is no {test.relative_to(ROOT)}")
    return found


def survives(mutation: Mutation, trust: bool) -> str | None:
    """Returns the reason why the mutation was not caught, or None if it was.

    Args:
        trust: that the test passes without the mutation, so that it is not run first.
    """
    source = (ROOT / mutation.file).read_text()
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for part in ("offcorr", "tests", "benchmarks", "pyproject.toml"):
            take = shutil.copytree if (ROOT / part).is_dir() else shutil.copy
            take(ROOT / part, copy / part)
        if not trust and _test(copy, mutation) != 0:
            return f"{mutation.test} does not pass without it"
        (copy / mutation.file).write_text(source.replace(mutation.right, mutation.wrong, 1))
        code = _test(copy, mutation)
    return None if code == 1 else f"{mutation.test} ended with {code}, expected failures (1)"


def _test(copy: Path, mutation: Mutation) -> int:
    node, _, words = mutation.test.partition(" ")
    command = [sys.executable, "-B", "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", node]
    environment = os.environ | {"PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1"}
    run = subprocess.run(
        [*command, *(["-k", words] if words else [])], cwd=copy, env=environment, capture_output=True, text=True
    )
    return run.returncode


def main() -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__.splitlines()[0])
    parser.add_argument(
        "words", nargs="*", metavar="WORD", help="only mutations whose description contains one of these"
    )
    parser.add_argument("--trust", action="store_true", help="do not run each test on the right code first")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="at a time; default: one per core")
    options = parser.parse_args()
    chosen = [m for m in MUTATIONS if not options.words or any(word in m.what for word in options.words)]
    if not chosen:
        parser.error(f"no mutation's description contains one of {options.words}")
    if stale := misplaced(chosen):
        print(*stale, "write these mutations anew: nothing was run", sep="\n")
        return 2
    alive = []
    with ThreadPoolExecutor(options.processes) as pool:
        tried = pool.map(lambda mutation: survives(mutation, options.trust), chosen)
        for number, (mutation, why) in enumerate(zip(chosen, tried, strict=True), 1):
            if why:
                alive.append(f"SURVIVED  {mutation.what}: {why}")
            print(f"{number} of {len(chosen)}  {mutation.what}: {why or 'caught'}", flush=True)
    for line in alive:
        print(line)
    print(f"{len(chosen) - len(alive)} of {len(chosen)} mutations caught")
    return int(bool(alive))


if __name__ == "__main__":
    sys.exit(main())
