"""True on-policy training: a sampler and a trainer whose log-probs are equal to the last bit, and what that costs.

    python recipes/true_on_policy.py                  # the toy model; a minute of CPU time, or on a GPU
    python recipes/true_on_policy.py --updates 2 --stages fp32 fp32_invariant

GRPO runs several times from the same weights, prompts and seed.  Each time sampler and trainer share more: the
precision, a float32 head, and at last operators that do not depend on the batch (``offcorr.exact``).  The sampler
decodes token by token with a KV cache, a batch that shrinks, and padding on the left; the trainer scores whole
sequences padded on the right.  ``train_rollout_logprob_abs_diff`` is the mean |difference| of their log-probs (nats)
over the sampled tokens, under the same weights.  Read from top to bottom.
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

import offcorr
from offcorr import exact, toy
from offcorr.flags import Parser
from offcorr.rollout import Sampling, decode

# -- the stages ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stage:
    """What sampler and trainer have in common; ``than`` is the stage that its cost is compared with."""

    title: str
    sampler: torch.dtype
    trainer: torch.dtype
    fp32_heads: tuple[str, ...] = ()
    invariant: bool = False
    than: str = ""


BF16, FP32 = torch.bfloat16, torch.float32
BOTH = ("sampler", "trainer")
STAGES = {
    "mixed": Stage("bf16 sampler, fp32 trainer", BF16, FP32),
    "bf16": Stage("bf16 on both sides", BF16, BF16),
    "one_head": Stage("bf16, and an fp32 head in the trainer only", BF16, BF16, ("trainer",), than="bf16"),
    "heads": Stage("bf16, and an fp32 head on both sides", BF16, BF16, BOTH, than="bf16"),
    "invariant": Stage("the same, batch-invariant", BF16, BF16, BOTH, invariant=True, than="heads"),
    "fp32": Stage("fp32 on both sides", FP32, FP32),
    "fp32_invariant": Stage("the same, batch-invariant", FP32, FP32, invariant=True, than="fp32"),
}


# -- one run -------------------------------------------------------------------------------------------------


def train(stage: Stage, args: argparse.Namespace) -> dict[str, Any]:
    """Runs GRPO for ``args.updates`` updates; returns what was measured at each."""
    path = toy.model_path(seed=args.seed)
    tokenizer = AutoTokenizer.from_pretrained(path)
    master = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).to(args.device)
    optimizer = torch.optim.AdamW(master.parameters(), lr=args.learning_rate, weight_decay=0.0)
    models = {"sampler": copied(master, stage.sampler), "trainer": copied(master, stage.trainer)}
    loss_fn = offcorr.get("ppo")
    examples = list(toy.dataset(args.updates * args.prompts, seed=args.seed))
    generator = torch.Generator(args.device).manual_seed(args.seed)

    updates, first_difference = [], None
    with ExitStack() as shared:
        if stage.invariant:
            shared.enter_context(exact.batch_invariant())
        for side in stage.fp32_heads:
            shared.enter_context(exact.fp32_head(models[side]))

        for step in range(args.updates):
            rows = examples[step * args.prompts : (step + 1) * args.prompts]
            rows = [row for row in rows for _ in range(args.samples)]
            prompts = [tokenizer(row["prompt"])["input_ids"] for row in rows]

            started = now(args.device)
            sampled = decode(
                models["sampler"],
                prompts,
                max_new_tokens=toy.MAX_COMPLETION,
                eos_token_ids=[tokenizer.eos_token_id],
                sampling=Sampling(temperature=args.temperature),
                generator=generator,
            )
            sampled_at = now(args.device)
            rewards = rewarded(tokenizer, sampled.completion_ids, rows)
            logp, mask = exact.score(models["trainer"], prompts, sampled.completion_ids, temperature=args.temperature)
            rollout_logp = pad_sequence([torch.tensor(row) for row in sampled.logp], batch_first=True).to(logp)
            batch = offcorr.Batch(
                logp=logp,
                old_logp=rollout_logp,  # the anchor is the sampler: the ratio is 1 where the two agree
                rollout_logp=rollout_logp,
                advantages=less_group_mean(rewards, args.samples).to(logp),
                mask=mask,
            )
            loss_fn(batch).loss.backward()
            agreement = exact.Agreement.of(logp, rollout_logp, mask)
            trained_at = now(args.device)

            if step == 0 and not agreement.exact:
                found = exact.check(
                    models["trainer"],
                    prompts,
                    sampled.completion_ids,
                    sampled.logp,
                    sampler=models["sampler"],
                    temperature=args.temperature,
                )
                first_difference = found.first_difference
            apply_gradients(master, models, optimizer)
            updates.append(
                {
                    **agreement.metrics(),
                    "tokens": agreement.tokens,
                    "reward": float(rewards.mean()),
                    "sampling_ms": 1e3 * (sampled_at - started),
                    "training_ms": 1e3 * (trained_at - sampled_at),
                }
            )
    return {**summary(updates), "first_difference": first_difference, "updates": updates}


def copied(master: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The model in another precision; the optimizer keeps its weights in float32, in ``master``."""
    return copy.deepcopy(master).to(dtype).eval()


def apply_gradients(master: nn.Module, models: dict[str, nn.Module], optimizer: torch.optim.Optimizer) -> None:
    """One optimizer update from the trainer's gradients; both sides then get the new weights."""
    for weight, trained in zip(master.parameters(), models["trainer"].parameters(), strict=True):
        weight.grad = trained.grad.float()
        trained.grad = None
    torch.nn.utils.clip_grad_norm_(master.parameters(), 1.0)
    optimizer.step()
    with torch.no_grad():
        for model in models.values():
            for weight, own in zip(master.parameters(), model.parameters(), strict=True):
                own.copy_(weight)


def rewarded(tokenizer: PreTrainedTokenizerBase, completions: list[list[int]], rows: list[dict[str, str]]) -> Tensor:
    """[B] rewards."""
    texts = tokenizer.batch_decode(completions, skip_special_tokens=True)
    return torch.tensor(toy.reward(texts, [row["answer"] for row in rows]))


def less_group_mean(rewards: Tensor, samples: int) -> Tensor:
    """[B] advantages of GRPO: each reward relative to those of the same prompt."""
    groups = rewards.view(-1, samples)
    return ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)).flatten()


def now(device: str) -> float:
    """Seconds of CPU time, which other processes do not add to; on a GPU seconds, after what it still had to do."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
        return time.perf_counter()
    return time.process_time()


# -- what comes out ------------------------------------------------------------------------------------------


def summary(updates: list[dict[str, float]]) -> dict[str, Any]:
    """Over all updates: mean and largest difference; times of the fastest update after the first, which warms up."""
    timed = updates[1:] or updates
    tokens = sum(update["tokens"] for update in updates)
    name = "train_rollout_logprob_abs_diff"
    largest = max(update[f"{name}_max"] for update in updates)
    return {
        name: sum(update[name] * update["tokens"] for update in updates) / tokens,
        f"{name}_max": largest,
        "exact": largest == 0,
        "tokens": tokens,
        "sampling_ms": min(update["sampling_ms"] for update in timed),
        "training_ms": min(update["training_ms"] for update in timed),
    }


def table(results: dict[str, dict[str, Any]]) -> str:
    """Markdown: a line per stage."""
    lines = [
        "| stage | | mean difference | largest | ms per update: sampling + training | cost | differs first |",
        "|---|---|---|---|---|---|---|",
    ]
    total = {name: result["sampling_ms"] + result["training_ms"] for name, result in results.items()}
    for name, result in results.items():
        mean, largest = result["train_rollout_logprob_abs_diff"], result["train_rollout_logprob_abs_diff_max"]
        than, first = STAGES[name].than, result["first_difference"]
        cells = (
            f"`{name}`",
            STAGES[name].title,
            "exactly 0" if result["exact"] else f"{mean:.2g}",
            "exactly 0" if result["exact"] else f"{largest:.2g}",
            f"{result['sampling_ms']:.0f} + {result['training_ms']:.0f}",
            f"{total[name] / total[than]:.2f} of `{than}`" if than in total else "",
            f"{first.replace(' of ', ' of `')}`" if first else "",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = Parser(description=__doc__.partition("\n")[0])
    parser.add_argument("--stages", nargs="+", choices=list(STAGES), default=list(STAGES))
    parser.add_argument("--updates", type=int, default=6)
    parser.add_argument("--prompts", type=int, default=8, help="per update")
    parser.add_argument("--samples", type=int, default=8, help="for each prompt")
    parser.add_argument("--learning_rate", type=float, default=3e-4)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path, default=Path("runs/true_on_policy.json"))
    args = parser.parse_args()
    results = {}
    for name in args.stages:
        results[name] = train(STAGES[name], args)
        found = results[name]
        print(f"{name}: train_rollout_logprob_abs_diff {found['train_rollout_logprob_abs_diff']}", flush=True)
    print(f"\n{table(results)}\n")
    args.output.parent.mkdir(parents=True, exist_ok=True)
    about = {"device": args.device, "threads": torch.get_num_threads(), "machine": platform.machine()}
    settings = {name: value for name, value in vars(args).items() if name not in ("output", "stages")}
    versions = {"torch": torch.__version__}
    args.output.write_text(json.dumps({**settings, **about, **versions, "stages": results}, indent=1) + "\n")
    print(f"written: {args.output}")


if __name__ == "__main__":
    main()
