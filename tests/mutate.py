"""Mutation testing: small wrong edits, each with the test that must fail.  Exits with 1 if a mutation survives.

    python tests/mutate.py [WORD ...]      # only mutations whose description contains one of the words

The edits are made in a copy; the checkout does not change.
"""

from __future__ import annotations

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
ENGINE = "tests/rollout/test_engine.py"
ANCHORS, KERNEL = "tests/trl/test_anchors.py", "tests/kernels/test_correction.py"
SOURCE = "offcorr/kernels/correction.py"
LAUNCHES, METERING = "tests/kernels/test_launches.py", "offcorr/kernels/metrics.py"
GOLDEN = f"{ORACLE}::test_golden_table"
SPANS, CORRECTION, BATCH = "offcorr/stages/spans.py", "offcorr/correction.py", "offcorr/batch.py"
REFERENCE, STRUCTURE = "offcorr/stages/reference.py", "tests/test_structure.py"
SEQUENCES, SLICES = "offcorr/training/parallel.py", "tests/training/test_parallel.py"
LAB, EXACT = "offcorr/lab/exact.py", "tests/lab/test_exact.py"
TWIN, SPLIT = "support.py twin", "parallel.py"

MUTATIONS = [
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
    Mutation("sign of the coefficient", CORRECTION, "-scale * gate.derivative", "scale * gate.derivative", GOLDEN),
    Mutation(
        "clamp cuts the gradient",
        REFERENCE,
        "derivative = derivative * slope",
        "derivative = derivative * slope * (tokens.log_ratio(gate.mismatch).raw.abs() < LOG_LIMIT)",
        f"{PITFALLS} clamped",
    ),
    Mutation(
        "kept count in the denominator",
        CORRECTION,
        "if not plan.count_rejected:\n        count",
        "if True:\n        count",
        f"{PITFALLS} denominator",
    ),
    Mutation(
        "empty sequences left out of the mean",
        CORRECTION,
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
        "        self._refuse_double_counting()\n",
        "",
        "tests/test_batch.py twice",
    ),
    Mutation(
        "backward forgets the incoming gradient",
        CORRECTION,
        "torch.mul(coefficient, incoming, out=gradient)",
        "torch.mul(coefficient, torch.ones_like(incoming), out=gradient)",
        f"{CONTRACT} gradient and ppo",
    ),
    Mutation(
        "gradient overflows the input's dtype",
        CORRECTION,
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
        "dual clip the wrong way",
        "offcorr/stages/gates.py",
        "ops.maximum(surrogate, p.dual * advantage)",
        "ops.minimum(surrogate, p.dual * advantage)",
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
        "offcorr/metrics.py",
        '"""The larger of each."""\n        return torch.maximum(a, b)',
        '"""The larger of each."""\n        return a + b',
        f"{CONTRACT} splitting and tis",
    ),
    Mutation(
        "a ratio of 1 for every masked token",
        "offcorr/metrics.py",
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
        CORRECTION,
        "did.weight if tokens.weight is None else did.weight * tokens.weight",
        "did.weight",
        f"{ORACLE} random and ppo",
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
        "max(0, now - self.lag) if training",
        "max(0, now - self.lag + 1) if training",
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
        "if self.correction.gate.scales_with_advantage:",
        "if not self.correction.gate.scales_with_advantage:",
        f"{ANCHORS} teaches_nothing",
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
        "offcorr/trl/trainer.py",
        'for name in ("logprobs", "env_mask", *SAMPLED):',
        "for name in SAMPLED:",
        f"{TRL}::test_every_token_has_its_number",
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
        "rare tokens absent from a sample taken for certainty",
        "offcorr/training/semantics.py",
        "max(value.error, least.sqrt().item())",
        "value.error",
        "tests/training/test_semantics.py::test_a_rare_token_that_is_absent_is_no_surprise",
    ),
    Mutation(
        "entropy of later weights beside old_logp",
        "offcorr/training/step.py",
        "entropy if moved < 0.01 else None",
        "entropy",
        "tests/training/test_semantics.py::test_step_compares_with_the_weights_that_sampled",
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
        "inputs = (log_ratio, seen[1], log_ratio, block.policies[0]) + seen[4:]",
        "inputs = (log_ratio, seen[1], log_ratio, seen[4]) + seen[4:]",
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
        "offcorr/lab/compare.py",
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


def survives(mutation: Mutation) -> str | None:
    """Returns the reason why the mutation was not caught, or None if it was."""
    source = (ROOT / mutation.file).read_text()
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for part in ("offcorr", "tests", "benchmarks", "pyproject.toml"):
            take = shutil.copytree if (ROOT / part).is_dir() else shutil.copy
            take(ROOT / part, copy / part)
        passed = _test(copy, mutation) if "--trust" not in sys.argv else 0
        if passed != 0:
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
    words = [word for word in sys.argv[1:] if not word.startswith("-")]
    chosen = [m for m in MUTATIONS if not words or any(word in m.what for word in words)]
    if stale := misplaced(chosen):
        print(*stale, "write these mutations anew: nothing was run", sep="\n")
        return 2
    from rich.progress import track  # tests/test_mutations.py does without

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        verdicts = list(track(pool.map(survives, chosen), total=len(chosen), description="mutations"))
    alive = [(m.what, why) for m, why in zip(chosen, verdicts, strict=True) if why]
    for what, why in alive:
        print(f"SURVIVED  {what}: {why}")
    print(f"{len(chosen) - len(alive)} of {len(chosen)} mutations caught")
    return int(bool(alive))


if __name__ == "__main__":
    sys.exit(main())
