"""``Demonstrations``: stored traces among the completions of their prompt (mixed-policy GRPO)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

from offcorr.correction import Correction
from offcorr.data.around import Rollout, RolloutFunc
from offcorr.data.matched import Matched
from offcorr.data.replay import refuse_replay
from offcorr.data.stateful import Stateful, Turns, check_lengths, check_whole_groups
from offcorr.data.trace import Trace
from offcorr.data.traces import Traces
from offcorr.rollout.sampler import tokenize
from offcorr.stages.checks import one_of
from offcorr.training.origins import origin_ids

WithoutLogp = Literal["refuse", "ratio_one", "deterministic"]
WITHOUT_LOGP = ("refuse", "ratio_one", "deterministic")

ABSENT = {"logprobs": math.nan, "old_logp": math.nan, "env_mask": 1}
"""The values of a trace's tokens under the keys of a rollout that have one per token."""


class Demonstrations(Stateful):
    """A ``rollout_func`` in which traces take the place of some completions of their prompt, as in mixed-policy GRPO.

    ``GRPOTrainer(..., rollout_func=Demonstrations(OffPolicy(), traces))``

    Of the completions of a prompt that has traces, the last ``per_group`` are not sampled but taken from the traces, in
    turn (of a prompt with fewer traces, as many as it has).  Rewards come from the trainer's reward functions, and the
    advantage is that of the whole group, sampled and taken together, as in LUFFY (2504.14945).  The ratio of a
    trace's token is pi(y_t) / mu(y_t), with its own writer's mu where ``logp`` was recorded:

    - ``without_logp="refuse"``: traces without ``logp`` are an error where the correction compares with ``old_logp``.
    - "ratio_one": ``old_logp`` is the current ``logp``, detached, so every ratio is 1 and the gradient that of
      E_mu[A log pi].  Bias: the trace is taken for the policy's own sample; the factor pi / mu, with which it would be
      that of E_pi[A log pi], is left out.
    - "deterministic": mu(y_t) = 1, so ``old_logp`` is 0 and the ratio pi(y_t), LUFFY's choice.  Bias: the ratio is
      mu(y_t) times what it should be, so every token is weighted too little, and one that the policy finds unlikely
      hardly learns; PPO's clip takes the gradient of a token with a negative advantage once pi(y_t) < 1 - eps_low.
      LUFFY also reshapes this ratio p to p / (p + 0.1), which is no part of this class.

    ``rollout_logp`` of a trace is NaN, since no engine sampled it, and counts as if engine and trainer agreed: stages
    of the engine's mismatch leave traces alone, and those of the total mismatch see pi / mu.  ``rollout_version`` of a
    trace is the current version, for stages that read it; metrics give a trace no lag, since no weights of this run
    wrote it.

    Evaluation samples every completion.  Each rank holds whole groups, and draws its traces after those of the ranks
    before it.

    Args:
        sampler: samples the other completions; ``OffPolicy``, ``VLLMServer``, or another class of this package.
        traces: of the prompts that have some; the others are sampled as they are without this class.
        per_group: completions of a group that are traces, at most; fewer than ``num_generations``.
        without_logp: for traces without log-probs.

    Raises:
        ValueError: an option that cannot be, here or when it is attached to a trainer: traces without log-probs under
            "refuse", a trace longer than ``max_completion_length``, an anchor that does not read the sampler's
            ``old_logp``, groups that are split over ranks, a dataset of which no prompt has a trace; and in a call, a
            sampler without ``old_logp`` under a correction that reads it.
    """

    STATE_FILE = "offcorr_demonstrations.pt"

    def __init__(
        self, sampler: RolloutFunc, traces: Traces, per_group: int = 1, without_logp: WithoutLogp = "refuse"
    ) -> None:
        super().__init__(sampler)
        refuse_replay("Demonstrations", sampler)
        if not isinstance(traces, Traces):
            raise TypeError(f"traces is a {type(traces).__name__}, expected Traces(rows, tokenizer)")
        if not isinstance(per_group, int) or isinstance(per_group, bool) or per_group < 1:
            raise ValueError(f"per_group is {per_group!r}, expected a number of completions, 1 or more")
        if without_logp not in WITHOUT_LOGP:
            raise ValueError(f"without_logp is {without_logp!r}{one_of(without_logp, WITHOUT_LOGP)}")
        self.traces, self.per_group, self.without_logp = traces, per_group, without_logp
        self._turns = Turns()
        self._matched = Matched(traces)

    def __call__(self, prompts: list[Any], trainer: Any) -> Rollout:
        """One completion for each prompt; see the class."""
        self.attach(trainer)
        if not trainer.model.training:
            return self.sampler(prompts, trainer)
        size = trainer.num_generations
        _check_groups(prompts, size)
        found = [self.traces.of(ids) for ids in tokenize(prompts[::size], trainer)]
        self._matched.note(len(found), sum(map(bool, found)))
        taken = dict(self._taken(found, size, trainer.accelerator.process_index))  # row: its trace
        sampled = [row for row in range(len(prompts)) if row not in taken]
        output = self.sampler([prompts[row] for row in sampled], trainer)
        self._check_sampled(output, taken, trainer)
        return self._merged(output, taken, sampled, trainer)

    # ---- which traces

    def _taken(self, found: list[tuple[Trace, ...]], size: int, rank: int) -> list[tuple[int, Trace]]:
        """Rows and their traces: the last of each group, the traces of a prompt in turn."""
        numbers = [min(self.per_group, len(traces)) for traces in found]
        groups = [group for group, number in enumerate(numbers) if number]
        before = self._turns.take([(found[group][0].prompt_ids, numbers[group]) for group in groups], rank)
        return [
            ((group + 1) * size - numbers[group] + i, found[group][(start + i) % len(found[group])])
            for group, start in zip(groups, before, strict=True)
            for i in range(numbers[group])
        ]

    # ---- what the loss sees

    def _merged(self, output: Rollout, taken: Mapping[int, Trace], sampled: list[int], trainer: Any) -> Rollout:
        """The sampler's output with the rows of traces in their places."""
        output = {"origin": origin_ids(["fresh"]) * len(sampled), **output}
        if any(trace.mask for trace in taken.values()) and "env_mask" not in output:
            output["env_mask"] = [[1] * len(ids) for ids in output["completion_ids"]]
        place = {row: i for i, row in enumerate(sampled)}
        rows = range(len(taken) + len(sampled))
        by_token = any(isinstance(version, list) for version in output.get("rollout_version", []))
        own = {row: self._columns(trace, trainer.state.global_step, by_token) for row, trace in taken.items()}
        return {
            name: [own[row].get(name) if row in own else values[place[row]] for row in rows]
            if isinstance(values, list)
            else values
            for name, values in output.items()
        }

    def _columns(self, trace: Trace, version: int, by_token: bool) -> dict[str, Any]:
        """The values of a trace under every key that the loss reads; ``by_token``: a version for each token."""
        tokens = len(trace)
        columns: dict[str, Any] = {name: [value] * tokens for name, value in ABSENT.items()}
        if trace.logp is not None:
            columns["old_logp"] = [*trace.logp]
        elif self.without_logp == "deterministic":
            columns["old_logp"] = [0.0] * tokens
        if trace.mask is not None:
            columns["env_mask"] = [*trace.mask]
        (origin,) = origin_ids(["demonstration"])
        return columns | {
            "prompt_ids": [*trace.prompt_ids],
            "completion_ids": [*trace.completion_ids],
            "rollout_version": [version] * tokens if by_token else version,
            "origin": origin,
        }

    # ---- checks

    def check(self, trainer: Any) -> None:
        """Raise ``ValueError`` for a setting of the trainer with which the traces cannot be trained on as asked."""
        if self.per_group >= trainer.num_generations:
            raise ValueError(
                f"per_group is {self.per_group} and num_generations {trainer.num_generations}: expected fewer, so that "
                "at least one completion of every group is sampled"
            )
        check_whole_groups(trainer)
        check_lengths(self.traces, trainer)
        self._matched.count(trainer)
        correction = getattr(trainer, "correction", None)
        if correction is None:
            if self.without_logp != "ratio_one":
                raise ValueError(
                    "TRL's own loss takes the weights before the update for the policy that sampled, of traces too, "
                    "and reads no log-probs of theirs: name a correction in loss_type of offcorr.trl.GRPOConfig, for "
                    "instance 'offcorr:dapo', or say that this is meant by without_logp='ratio_one'"
                )
            return
        if not (stages := comparing(correction)):
            return
        anchor = getattr(trainer.args, "anchor", None)
        if anchor not in (None, "snapshot"):
            raise ValueError(
                f"anchor={anchor!r} does not read the old_logp of a trace, its writer's log-probs: leave anchor out, "
                "or take 'snapshot'"
            )
        lacking = [trace for trace in self.traces if trace.logp is None]
        if lacking and self.without_logp == "refuse":
            raise ValueError(
                f"{len(lacking)} of {len(self.traces)} traces have no logp (the first: {lacking[0].where}), and loss "
                f"{correction.method!r} compares with the policy that wrote them: {_listed(stages)}. Give logp in the "
                "rows; or take without_logp='ratio_one' (every ratio is 1, as if the policy had written them), "
                "without_logp='deterministic' (their writer's probabilities are 1), or a loss that compares nothing"
            )

    def _check_sampled(self, output: Rollout, taken: Mapping[int, Trace], trainer: Any) -> None:
        correction = getattr(trainer, "correction", None)
        if taken and "old_logp" not in output and correction is not None and comparing(correction):
            raise ValueError(
                f"the sampler {self.sampler!r} returned no old_logp, and loss {correction.method!r} reads it of traces "
                "and samples alike: take offcorr.rollout.OffPolicy or VLLMServer, or return old_logp"
            )

    def remark(self) -> str:
        """The number of prompts that have a trace; see ``Around``."""
        return ", ".join(filter(None, [self._matched.said("demonstration"), super().remark()]))

    # ---- state

    def forget(self) -> None:
        self._turns = Turns()

    def state_dict(self) -> dict[str, Any]:
        return {"taken": dict(self._turns.taken)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._turns.taken = dict(state["taken"])

    def __repr__(self) -> str:
        own = f"per_group={self.per_group}, without_logp={self.without_logp!r}"
        return f"Demonstrations({self.sampler!r}, {self.traces!r}, {own})"


def comparing(correction: Correction) -> dict[str, Any]:
    """The stages of a correction, by place, that read ``old_logp`` of a sequence that no engine sampled.

    Stages of the engine's mismatch do not: such a sequence has no ``rollout_logp``, which counts as agreeing.

    >>> import offcorr
    >>> [*comparing(offcorr.get("tis"))], [*comparing(offcorr.get("reinforce"))]
    (['ratio'], [])
    """
    return {
        place: stage
        for place, stage in correction.stages.items()
        if stage.mismatch in ("staleness", "total") or (stage.mismatch is None and place != "gate")
    }


def _listed(stages: Mapping[str, Any]) -> str:
    return ", ".join(f"{place} {stage!r}" for place, stage in stages.items())


def _check_groups(prompts: list[Any], size: int) -> None:
    """Raise ``ValueError`` unless every ``size`` neighbours have one prompt."""
    if len(prompts) % size:
        raise ValueError(f"there are {len(prompts)} prompts, expected a multiple of num_generations={size}")
    for row, prompt in enumerate(prompts):
        if prompt != prompts[row - row % size]:
            raise ValueError(
                f"prompts[{row}] differs from prompts[{row - row % size}], expected {size} neighbours with one prompt"
            )
