"""``Prefixes``: completions that begin with the first tokens of a stored trace."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from typing import Any, cast

from accelerate.utils import gather_object

from offcorr.data.around import Rollout
from offcorr.data.curriculum import Curriculum
from offcorr.data.matched import Matched
from offcorr.data.stateful import Prompt, Stateful, Turns, check_lengths, check_whole_groups
from offcorr.data.trace import Trace
from offcorr.data.traces import Traces
from offcorr.rollout.sampler import Sampler, draw_seeds, tokenize
from offcorr.training.origins import origin_ids
from offcorr.training.schedules import Linear, share_done

(FRESH, PREFIX) = origin_ids(["fresh", "prefix"])


class Prefixes(Stateful):
    """A ``rollout_func`` whose completions begin with the first tokens of a trace, and are sampled from there.

    ``GRPOTrainer(..., rollout_func=Prefixes(OffPolicy(), traces, length=Curriculum()))``

    On a prompt that is never solved no sample is rewarded; after the beginning of a trace that was, some are (PrefixRL,
    2601.18795; POPE, 2601.18779).  The prefix stands at the beginning of the completion, so that reward functions see
    the whole answer, with ``env_mask`` 0: its tokens are left out of loss, ratios, metrics, counts and denominators,
    and act through the model's context alone.  What follows is sampled by ``sampler``, with the log-probs of any other
    sample.

    All completions of a prompt in one generation have the same prefix, so group-relative advantages compare
    continuations of the same text.  Traces of a prompt take turns.  Evaluation starts from scratch, always.

    Args:
        sampler: ``OffPolicy``, ``VLLMServer`` or another ``offcorr.rollout`` sampler; other classes of this package go
            around this one.
        traces: successful ones: ``Traces(..., keep=lambda trace: trace.reward == 1)``.
        share: probability with which the group of a prompt that has traces gets a prefix; a ``Linear`` follows the
            training.
        length: share of the trace's tokens that is given, rounded to whole tokens; the last one is never given, so
            that even of a share of 1 one token at least is sampled.  A number, a ``Linear``, or a ``Curriculum``, which
            needs ``offcorr.trl.GRPOTrainer``, since TRL's own keeps no rewards.

    Raises:
        TypeError: a sampler that takes no prefixes, or an argument of another type.
        ValueError: a share outside [0, 1]; when it is attached, a trace longer than ``max_completion_length``, groups
            that are split over ranks, or a dataset of which no prompt has a trace.
    """

    STATE_FILE = "offcorr_prefixes.pt"

    def __init__(
        self,
        sampler: Sampler,
        traces: Traces,
        *,
        share: float | Linear = 1.0,
        length: float | Linear | Curriculum = 0.5,
    ) -> None:
        super().__init__(sampler)
        if not isinstance(sampler, Sampler):
            raise TypeError(
                f"sampler is {sampler!r}, expected offcorr.rollout.OffPolicy() or VLLMServer(...), which continue a "
                "prefix; put what else there is around it: Demonstrations(Prefixes(OffPolicy(), traces), traces)"
            )
        if not isinstance(traces, Traces):
            raise TypeError(f"traces is a {type(traces).__name__}, expected Traces(rows, tokenizer)")
        _check_share("share", share)
        if not isinstance(length, Curriculum):
            _check_share("length", length)
        self.traces, self.share, self.length = traces, share, length
        self._turns = Turns()
        self._matched = Matched(traces)
        self._lengths: dict[Prompt, float] = {}
        self._drawn: set[Prompt] = set()  # prompts of the last generation that were to have a prefix
        self._calls = 0

    def __call__(self, prompts: list[Any], trainer: Any) -> Rollout:
        """One completion for each prompt; see the class."""
        self.attach(trainer)
        if not trainer.model.training:
            return self.sampler(prompts, trainer)
        self.record(trainer)  # a generation before this one in the same optimizer step
        prompt_ids = tokenize(prompts, trainer)
        prefixes = self._prefixes(prompt_ids, trainer)
        output = cast(Sampler, self.sampler).sample(prompt_ids, trainer, prefixes)
        return output | {"origin": [PREFIX if prefix else FRESH for prefix in prefixes]}

    # ---- which prefixes

    def _prefixes(self, prompt_ids: list[list[int]], trainer: Any) -> list[list[int]]:
        """For each row the tokens given; neighbours with one prompt have the same."""
        done = share_done(trainer.state.global_step, trainer.state.max_steps)
        groups = [(prompt, len([*rows])) for prompt, rows in groupby(map(tuple, prompt_ids))]
        found = [self.traces.of(prompt) for prompt, _ in groups]
        self._matched.note(len(found), sum(map(bool, found)))
        drawn = [bool(traces) and self._draws(i, done, trainer) for i, traces in enumerate(found)]
        self._calls += 1
        self._drawn = {prompt for (prompt, _), own in zip(groups, drawn, strict=True) if own}
        wanted = [(prompt, 1) for (prompt, _), own in zip(groups, drawn, strict=True) if own]
        turns = iter(self._turns.take(wanted, trainer.accelerator.process_index))
        prefixes: list[list[int]] = []
        for (_, rows), traces, own in zip(groups, found, drawn, strict=True):
            given = self._given(traces[next(turns) % len(traces)], done) if own else []
            prefixes += [given] * rows
        return prefixes

    def _draws(self, group: int, done: float, trainer: Any) -> bool:
        """Whether a group gets a prefix, by a draw of its own."""
        key = [trainer.args.seed, trainer.accelerator.process_index, self._calls, group]
        return draw_seeds(key, 1)[0] < _at(self.share, done) * 2**63

    def _given(self, trace: Trace, done: float) -> list[int]:
        if isinstance(self.length, Curriculum):
            share = self._lengths.get(trace.prompt_ids, self.length.start)
        else:
            share = _at(self.length, done)
        return [*trace.completion_ids[: min(round(share * len(trace)), len(trace) - 1)]]

    # ---- the curriculum

    def record(self, trainer: Any) -> None:
        """Let the curriculum follow the rewards of the last generation; every rank must call it."""
        if not isinstance(self.length, Curriculum):
            return
        rewards, self._drawn = self._rewards(trainer, self._drawn), set()
        for prompt, reward in gather_object([*rewards.items()]):
            share = self._lengths.get(prompt, self.length.start)
            self._lengths[prompt] = self.length.after(share, reward)

    @staticmethod
    def _rewards(trainer: Any, prompts: set[Prompt]) -> dict[Prompt, float]:
        """The mean reward of the sampled completions of these prompts, in the last generation."""
        if not prompts:
            return {}
        found: dict[Prompt, list[float]] = {}
        for part in trainer._buffered_inputs or []:
            columns = (
                part["prompt_ids"],
                part["prompt_mask"].bool(),
                part["origin"].tolist(),
                part["rewards"].tolist(),
            )
            for ids, real, origin, reward in zip(*columns, strict=True):
                prompt = tuple(ids[real].tolist())
                if prompt in prompts and origin in (FRESH, PREFIX):
                    found.setdefault(prompt, []).append(reward)
        return {prompt: sum(rewards) / len(rewards) for prompt, rewards in found.items()}

    def check(self, trainer: Any) -> None:
        """Raise ``ValueError`` for a setting of the trainer that does not go with prefixes."""
        check_whole_groups(trainer)
        check_lengths(self.traces, trainer)
        self._matched.count(trainer)
        if isinstance(self.length, Curriculum) and not hasattr(trainer, "correction_step"):
            raise ValueError(
                f"length={self.length!r} follows the rewards, which {type(trainer).__name__} does not keep: take "
                "offcorr.trl.GRPOTrainer, or a number or a Linear for the length"
            )

    def remark(self) -> str:
        """The number of prompts that have a trace; see ``Around``."""
        return ", ".join(filter(None, [self._matched.said("trace to begin with"), super().remark()]))

    # ---- state

    def forget(self) -> None:
        self._turns, self._lengths, self._drawn, self._calls = Turns(), {}, set(), 0

    def state_dict(self) -> dict[str, Any]:
        return {"taken": dict(self._turns.taken), "lengths": dict(self._lengths), "calls": self._calls}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._turns.taken, self._lengths = dict(state["taken"]), dict(state["lengths"])
        self._calls = state["calls"]

    def __repr__(self) -> str:
        return f"Prefixes({self.sampler!r}, {self.traces!r}, share={self.share}, length={self.length})"


def _at(number: float | Linear, done: float) -> float:
    return number.at(done) if isinstance(number, Linear) else number


def _check_share(name: str, value: Any) -> None:
    ends = (value.start, value.end) if isinstance(value, Linear) else (value,)
    for end in ends:
        if not isinstance(end, int | float) or isinstance(end, bool) or not 0 <= end <= 1:
            raise ValueError(
                f"{name} is {value!r}, expected a number between 0 and 1, or a Linear between such numbers"
            )
