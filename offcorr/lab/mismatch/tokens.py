"""Causes in token ids: prompts and completions that the trainer does not read as the sampler did."""

from __future__ import annotations

from typing import Any

from offcorr.lab.mismatch.language import FIRST
from offcorr.lab.mismatch.setup import Log, Prompts, Setup, cause


@cause(changes=["completion"], but=["toy", "random"])
def retokenised(setup: Setup) -> None:
    """The trainer encodes the completion's text again, so that some ids differ; log-probs are cut or filled up with 0
    to the new length."""
    tokenizer: Any = setup.subject.task.tokenizer
    setup.placeholder = 0.0

    def edit(log: Log) -> None:
        last = [log.completion_ids[-1]] if log.ended else []
        text = log.completion_ids[: len(log.completion_ids) - len(last)]
        again = tokenizer.encode(tokenizer.decode(text), add_special_tokens=False).ids
        ids = [*again, *last]
        missing = len(ids) - len(log.rollout_logp)
        log.rollout_logp = [*log.rollout_logp, *[0.0] * missing][: len(ids)]
        log.sampled = [*log.sampled, *[True] * missing][: len(ids)]
        log.mask = [*log.mask, *[True] * missing][: len(ids)]
        log.completion_ids = ids

    setup.edits.append(edit)


@cause(changes=["prompt"])
def chat_template(setup: Setup) -> None:
    """The trainer renders the prompt by another template, with more tokens before it, behind it or both."""
    place = setup.one_of("place", ["before", "behind", "both"])
    extra = setup.pick("extra", weak=[1, 2], usual=[2, 4, 6], strong=[8, 12])
    ids = setup.rng.integers(FIRST, setup.subject.task.vocabulary, 2 * extra).tolist()
    before = ids[:extra] if place != "behind" else []
    behind = ids[extra : extra + max(1, extra // 2)] if place != "before" else []

    def rendered(prompts: Prompts) -> Prompts:
        return [[*before, *prompt, *behind] for prompt in prompts]

    setup.trainer_prompts = rendered


@cause(changes=["prompt"])
def truncated_prompt(setup: Setup) -> None:
    """The trainer drops the left part of the prompt."""
    share = setup.pick("dropped", weak=[0.25], usual=[0.5], strong=[0.75])

    def cut(prompts: Prompts) -> Prompts:
        return [prompt[min(len(prompt) - 1, round(share * len(prompt))) :] for prompt in prompts]

    setup.trainer_prompts = cut
