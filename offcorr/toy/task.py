"""The toy task: reasoning-gym's `chain_sum` in characters, scored by reasoning-gym's scorer."""

from __future__ import annotations

import functools
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from random import Random
from typing import TYPE_CHECKING, Any, Literal

import torch

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

MIN_TERMS, MAX_TERMS = 4, 8
LABELS = "abcdefgh"
FILLER = "."
ALPHABET = "0123456789+-=" + FILLER + LABELS

MAX_PROMPT = 3 * MAX_TERMS + 1
"""Length of the longest prompt in tokens: label, sign and digit of each term, and the equals sign."""

MAX_COMPLETION = 6 * MAX_TERMS + 1
"""Length of the longest demonstration in tokens: five per step, a filler after each, and the end token."""

HELD_OUT_SHARE = 8  # one prompt in eight is a test prompt

Term = tuple[int, int]  # (sign, digit)
Split = Literal["train", "test"]


def dataset(size: int, seed: int = 0, split: Split = "train") -> Dataset:
    """Returns `size` examples with the string columns `prompt` and `answer` (two digits, such as `07`).

    Train and test are disjoint for every size and seed, because a hash of the prompt decides which
    of the two it belongs to.

    Raises:
        ValueError: the split is neither "train" nor "test".
    """
    from datasets import Dataset

    if split not in ("train", "test"):
        raise ValueError(f"split is {split!r}, expected 'train' or 'test'")
    rows = []
    for terms in items(size, seed, split):
        total = sum(sign * digit for sign, digit in terms)
        rows.append({"prompt": render_prompt(terms), "answer": f"{total:02d}"})
    return Dataset.from_list(rows)


def reward(completions: Sequence[str], answer: Sequence[str], **kwargs: Any) -> list[float]:
    """TRL reward function: 1.0 where the last running sum of a completion is the answer, else 0.0.

    The score is reasoning-gym's `score_answer`. Answers keep their two digits, because that scorer
    gives part of the point to an answer that merely contains the right one (`7` in `17`).
    """
    score = _scorer()
    return [
        float(score(parse_answer(text), {"answer": wanted})) for text, wanted in zip(completions, answer, strict=True)
    ]


def parse_answer(completion: str) -> str | None:
    """Returns the last running sum as two digits, high digit first; None if the completion does not end in one."""
    match = re.search(r"([0-9])([0-9])\.*$", completion)
    return match[2] + match[1] if match else None


def accuracy(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    examples: Iterable[Mapping[str, str]],
    temperature: float = 1.0,
    seed: int = 0,
    batch_size: int = 512,
) -> float:
    """Returns the share of `examples` (rows with `prompt` and `answer`) whose sampled answer is right.

    One answer is sampled per example; `temperature=0` decodes greedily. The samples depend only on
    `seed`, and the global random state is not changed.

    Raises:
        ValueError: there are no examples.
    """
    rows = list(examples)
    if not rows:
        raise ValueError("examples is empty, expected at least one row with prompt and answer")
    device = model.device
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    was_training = model.training
    model.eval()
    scores: list[float] = []
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), torch.no_grad():
        torch.manual_seed(seed)
        for start in range(0, len(rows), batch_size):
            chunk = rows[start : start + batch_size]
            inputs = tokenizer(
                [row["prompt"] for row in chunk],
                return_tensors="pt",
                padding=True,
                padding_side="left",
            ).to(device)
            output = model.generate(
                input_ids=inputs["input_ids"],
                attention_mask=inputs["attention_mask"],
                max_new_tokens=MAX_COMPLETION,
                pad_token_id=tokenizer.pad_token_id,
                eos_token_id=tokenizer.eos_token_id,
                **(sampling if temperature > 0 else {"do_sample": False}),
            )
            texts = tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
            scores += reward(texts, [row["answer"] for row in chunk])
    model.train(was_training)
    return sum(scores) / len(scores)


def items(size: int, seed: int, split: Split) -> Iterator[list[Term]]:
    """Yields the first `size` chain sums of a split whose running sums all lie in 0 to 99."""
    from reasoning_gym.arithmetic.chain_sum import ChainSumConfig, ChainSumDataset

    # reasoning-gym draws item i from Random(seed + i), so nearby seeds would share items: hash the seed first. The text
    # is part of the seed; another text gives other prompts than those of the published results.
    spread = Random(f"offcorr.embedded {seed}").getrandbits(60)
    source = ChainSumDataset(
        ChainSumConfig(min_terms=MIN_TERMS, max_terms=MAX_TERMS, min_digits=1, max_digits=1, seed=spread)
    )
    count = index = 0
    while count < size:
        terms = _parse_expression(source[index]["metadata"]["expression"])
        index += 1
        if _stays_in_range(terms) and split_of(render_prompt(terms)) == split:
            count += 1
            yield terms


def split_of(prompt: str) -> Split:
    """Returns the split of a prompt, decided by a hash of its characters."""
    return "test" if zlib.crc32(prompt.encode()) % HELD_OUT_SHARE == 0 else "train"


def render_prompt(terms: Sequence[Term]) -> str:
    """Renders a prompt: `[(1, 3), (-1, 2)]` as `a+3b-2=`."""
    return "".join(map(_render_term, LABELS, terms)) + "="


def render_working(terms: Sequence[Term], rng: Random, error_rate: float = 0.0, filler_rate: float = 0.0) -> str:
    """Renders a demonstration: each term, then the running sum, low digit first.

    With probability `error_rate` a step's low digit is wrong, and the later steps continue from the
    wrong sum. With probability `filler_rate` a step is followed by a filler.
    """
    text, total = [], 0
    for label, (sign, digit) in zip(LABELS, terms, strict=False):
        total = (total + sign * digit) % 100
        high, low = divmod(total, 10)
        if rng.random() < error_rate:
            low = (low + rng.randint(1, 9)) % 10
        total = 10 * high + low
        text.append(f"{_render_term(label, (sign, digit))}{low}{high}")
        if rng.random() < filler_rate:
            text.append(FILLER)
    return "".join(text)


def demonstration(prompt: str) -> str:
    """Returns the right working of a prompt, without fillers.

    Raises:
        ValueError: what is no prompt of this task.

    >>> demonstration("a+3b+9c-4=")
    'a+330b+921c-480'
    """
    terms = [(1 if sign == "+" else -1, int(digit)) for sign, digit in re.findall(r"[a-h]([+-])([0-9])", prompt)]
    if not terms or render_prompt(terms) != prompt:
        raise ValueError(f"prompt is {prompt!r}, expected one of the toy task such as 'a+3b+9c-4='")
    return render_working(terms, Random())


def _render_term(label: str, term: Term) -> str:
    sign, digit = term
    return f"{label}{'+' if sign > 0 else '-'}{digit}"


def _parse_expression(expression: str) -> list[Term]:
    """Parses `3 + 9 - 4` into signed digits."""
    signed = ["+", *expression.split()]
    return [(1 if sign == "+" else -1, int(digit)) for sign, digit in zip(signed[::2], signed[1::2], strict=True)]


def _stays_in_range(terms: Sequence[Term]) -> bool:
    """Returns whether every running sum can be written with two digits and no sign."""
    total = 0
    for sign, digit in terms:
        total += sign * digit
        if not 0 <= total <= 99:
            return False
    return True


@functools.cache
def _scorer() -> Any:
    import reasoning_gym

    return reasoning_gym.get_score_answer_fn("chain_sum")
