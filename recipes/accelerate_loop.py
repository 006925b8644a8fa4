"""A plain Accelerate training loop with an off-policy correction, without a trainer class.

    accelerate launch recipes/accelerate_loop.py                                    # the toy model, on-policy
    accelerate launch recipes/accelerate_loop.py --loss minpro --lag 8 --precision int8 --ess_lr sqrt
    accelerate launch recipes/accelerate_loop.py --loss vcpo --baseline opob --ess_lr sqrt --lag 16 --precision int8
    accelerate launch --config_file recipes/accelerate/fsdp2.yaml recipes/accelerate_loop.py \\
        --model Qwen/Qwen3-0.6B --task openai/gsm8k --attn flash_attention_2 --learning_rate 1e-6   # GPUs

Each generation samples with weights of ``lag`` updates ago, and is then split into ``updates`` optimizer updates of
``accumulation`` micro-batches.  A micro-batch is one packed row without padding: its sequences lie end to end, and
attention and loss take their boundaries from the same ``cu_seqlens``.  Runs unchanged on one process, on several
(``recipes/accelerate/*.yaml``), under DeepSpeed ZeRO-2 and ZeRO-3 and under FSDP2.  Read from top to bottom.

An advantage is the reward minus a baseline: the group's mean, divided by its standard deviation (``group``); one per
token, from the trainer's probabilities (``token``); or the baseline of least variance, from the gradient of every
trajectory (``opob``), which with ``--loss vcpo --ess_lr sqrt`` is all of VCPO (2602.17616).

``offcorr.Monitor`` watches how far trainer and sampler are apart, and ``--dump_rollouts FOLDER`` keeps what both
logged: `offcorr diagnose FOLDER` names the cause.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, groupby
from pathlib import Path
from types import MethodType
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin, set_seed
from einops import rearrange
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, HfArgumentParser, PreTrainedTokenizerBase, TrainerState

import offcorr
from offcorr import Batch, Output, toy
from offcorr.diagnose import records_of
from offcorr.diagnose.writer import StepDumps
from offcorr.flags import unknown_flag
from offcorr.kernels.logprob import linear_logprob
from offcorr.rollout import Sampling, decode, score
from offcorr.training import (
    OPOB,
    ESSLearningRate,
    Precision,
    Replica,
    SnapshotRing,
    Step,
    changing_weights,
    token_baseline,
)
from offcorr.training.baselines import check_proportional
from offcorr.training.monitor_option import monitor_options

sys.path.insert(0, str(Path(__file__).parent))
from grpo import History, Task, load_task, model_and_tokenizer, plot, summarise  # noqa: E402


@dataclass
class Arguments:
    """Defaults that suit the toy model: 32 prompts x 8 samples per generation, four updates on each."""

    model: str = field(default="toy", metadata={"help": "toy, a local folder, or any hub name"})
    task: str = field(default="toy", metadata={"help": "as in recipes/grpo.py"})
    loss: str = field(
        default="ppo", metadata={"help": f"one of {', '.join(offcorr.available())}; or my_file.py:MyLoss"}
    )
    loss_kwargs: str = field(default="{}", metadata={"help": "its options, as JSON"})
    baseline: str = field(default="group", metadata={"help": "subtracted from the reward: group, token or opob"})
    lag: int = field(
        default=0, metadata={"help": "age of the sampler's weights, in optimizer updates, when it samples"}
    )
    precision: str = field(
        default="fp32", metadata={"help": "of the sampler: fp32, bf16, fp16, int8, int4, fp8_e4m3 ..."}
    )
    ess_lr: str = field(
        default="off",
        metadata={"help": "off, or the power of the effective sample size that scales the rate: sqrt, linear"},
    )
    attn: str = field(
        default="sdpa", metadata={"help": "sdpa, or flash_attention_2 on GPUs with mixed_precision: bf16"}
    )
    packed: bool = field(default=True, metadata={"help": "False: the same update from right-padded rows"})

    generations: int = field(default=40, metadata={"help": "rounds of sampling"})
    prompts: int = field(default=32, metadata={"help": "per generation, all processes together"})
    samples: int = field(default=8, metadata={"help": "for each prompt: the group its advantage is relative to"})
    updates: int = field(default=4, metadata={"help": "optimizer updates on each generation"})
    accumulation: int = field(default=1, metadata={"help": "micro-batches for each optimizer update"})
    learning_rate: float = 3e-4
    max_grad_norm: float = 1.0
    temperature: float = 1.0
    max_completion_length: int = toy.MAX_COMPLETION

    eval_every: int = field(default=5, metadata={"help": "generations between two evaluations on held-out examples"})
    train_size: int = 4096
    eval_size: int = 256
    monitor: str = field(
        default="warn",
        metadata={
            "help": "the action of every alarm of offcorr.Monitor: warn, log, dump, mask or stop; off: nothing is "
            "watched; or its options, as JSON"
        },
    )
    dump_rollouts: str | None = field(
        default=None,
        metadata={"help": "a new folder for what is trained on, one file per update and process, for offcorr diagnose"},
    )
    dump_every: int = field(default=1, metadata={"help": "updates from one that dump_rollouts writes to the next"})
    output_dir: str = "runs/accelerate_loop"
    seed: int = 0
    use_cpu: bool = field(default=not torch.cuda.is_available())

    def __post_init__(self) -> None:
        if self.ess_lr not in ("off", "sqrt", "linear"):
            raise ValueError(f"ess_lr is {self.ess_lr!r}, expected off, sqrt or linear")
        if self.baseline not in ("group", "token", "opob"):
            raise ValueError(f"baseline is {self.baseline!r}, expected group, token or opob")
        monitor_options(self.monitor)  # raises for what is no action and no option
        if self.dump_every < 1:
            raise ValueError(f"dump_every is {self.dump_every}, expected a number of updates, 1 or more")
        if self.baseline == "opob" and self.accumulation != 1:
            raise ValueError(
                f"opob takes an update's trajectories one by one, so accumulation {self.accumulation} has nothing to "
                "split: leave it at 1"
            )
        processes = int(os.environ.get("WORLD_SIZE", 1))
        if self.prompts % processes or self.prompts * self.samples % (processes * self.updates * self.accumulation):
            raise ValueError(
                f"{self.prompts} prompts x {self.samples} samples do not split into {self.updates} updates of "
                f"{self.accumulation} micro-batches on {processes} processes"
            )
        if self.baseline == "opob":
            self.check_groups("opob")

    @property
    def micro_batch(self) -> int:
        """Sequences of a micro-batch, on each process."""
        processes = int(os.environ.get("WORLD_SIZE", 1))
        return self.prompts * self.samples // (processes * self.updates * self.accumulation)

    def check_groups(self, name: str) -> None:
        """Raise ``ValueError`` if a prompt's samples do not lie in one update of one process, as ``name`` needs."""
        here = self.micro_batch * self.accumulation
        if here % self.samples:
            raise ValueError(
                f"{name} compares the {self.samples} samples of a prompt, which must lie in one update of one process: "
                f"it has {here} of the {self.prompts} x {self.samples}, expected a multiple of {self.samples}"
            )


# -- the loop ------------------------------------------------------------------------------------------------


def main() -> None:
    parser = HfArgumentParser(Arguments, allow_abbrev=False)
    args, unknown = parser.parse_args_into_dataclasses(return_remaining_strings=True)
    if unknown:
        known = [action.dest for action in parser._actions]
        parser.error(unknown_flag(unknown[0].partition("=")[0].removeprefix("--"), known))
    accelerator = start_accelerator(args)
    set_seed(args.seed)
    path, tokenizer = model_and_tokenizer(args.model, args.seed)
    task = load_task(args, tokenizer)
    loss_fn = offcorr.resolve(args.loss, **json.loads(args.loss_kwargs))
    if "group_ids" in loss_fn.needs:
        args.check_groups(args.loss)
    one_by_one = args.baseline == "opob"
    if one_by_one:
        check_opob(accelerator, loss_fn)

    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation=args.attn, dtype=torch.float32)
    return_log_probs(model, args.temperature)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, betas=(0.9, 0.99), weight_decay=0.0)
    model, optimizer = accelerator.prepare(model, optimizer)
    ess_lr = ESSLearningRate(optimizer, rule=args.ess_lr) if args.ess_lr != "off" else None
    step = Step(
        loss_fn,
        ess_lr=ess_lr,
        gather=lambda vector: accelerator.gather(vector[None]),
        monitor=make_monitor(args, accelerator),
    )
    dumps = make_dumps(args, accelerator)
    sampler = Sampler(accelerator, model, tokenizer, args)
    log = Log(accelerator, Path(args.output_dir))
    order = np.random.default_rng(args.seed)

    version = 0
    sampler.remember(version)
    log(version, eval_reward=sampler.accuracy(task, version))
    for generation in range(args.generations):
        picked = order.permutation(len(task.train))[: args.prompts]  # the same on every process
        mine = picked[accelerator.process_index :: accelerator.num_processes]
        samples = sampler.sample(task, [task.train[int(i)] for i in mine], version)
        if args.baseline == "group":
            samples = less_group_mean(samples)
        elif args.baseline == "token":
            samples = less_token_baseline(model, samples, args.packed, accelerator.device)
        for part in split(samples, args.updates):  # in order: whole groups, of random prompts
            micros = split(part, len(part) if one_by_one else args.accumulation)
            window = [lay_out(micro, args.packed, accelerator.device, version) for micro in micros]
            take = opob_update if one_by_one else update
            take(accelerator, model, optimizer, step, window, args.max_grad_norm, dumps)
            version += 1
            step.end(version)
            if dumps is not None:
                dumps.end()
            sampler.remember(version)
        rewards = torch.tensor([sample.reward for sample in samples], device=accelerator.device)
        log(version, reward=float(accelerator.gather(rewards).mean()), **step.metrics())
        if (generation + 1) % args.eval_every == 0 or generation + 1 == args.generations:
            log(version, eval_reward=sampler.accuracy(task, version))

    if accelerator.is_main_process:
        sampler.save(version, Path(args.output_dir) / "model")
        title = f"{args.loss} at lag {args.lag}, {args.precision} sampler"
        summarise(log.history.logs, title=title, file=log.history.summary)
        print(f"history: {log.history.file}\npicture: {plot(log.history.logs, log.history.file.with_suffix('.png'))}")
    accelerator.wait_for_everyone()
    accelerator.end_training()


def update(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: Any,
    step: Step,
    window: Sequence[MicroBatch],
    max_grad_norm: float = 1.0,
    dumps: StepDumps | None = None,
) -> None:
    """One optimizer update on this process's micro-batches."""
    # Accelerate divides the loss by the micro-batches and averages gradients over the processes.
    begin(model, step, window, averaged_over=accelerator.num_processes * len(window))
    for micro in window:
        with accelerator.accumulate(model):
            out = loss_of(step, micro, trained_batch(model, micro), dumps, last=accelerator.sync_gradients)
            accelerator.backward(out.loss)  # DeepSpeed takes its step in here
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), max_grad_norm)
            optimizer.step()
            optimizer.zero_grad()


def opob_update(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: Any,
    step: Step,
    window: Sequence[MicroBatch],
    max_grad_norm: float = 1.0,
    dumps: StepDumps | None = None,
) -> None:
    """As ``update``, with the reward minus its group's minimum-variance baseline as the advantage.

    A micro-batch is one trajectory, and those of a group are neighbours.  A trajectory's gradient is A times that at
    A = 1 (``check_opob`` refuses other corrections): its score, times the correction's weight, over its length.
    """
    begin(model, step, window)
    opob = OPOB(model.parameters(), float(step.denominator))
    remaining = len(window)
    for _, group in groupby(window, lambda micro: int(micro.fields["group_ids"])):
        batches = []
        for micro in group:
            with accelerator.no_sync(model):  # gradients are taken by torch.autograd.grad, and reduced below
                batch = trained_batch(model, micro)
                unit = dataclasses.replace(batch, advantages=torch.ones_like(batch.rewards))
                out = step.correction(unit, denominator=1.0, statistics=step.statistics)
                opob.add(-out.loss, batch.rewards)
            batches.append((micro, dataclasses.replace(batch, logp=batch.logp.detach())))
        baseline = opob.end_group()
        for micro, batch in batches:
            remaining -= 1
            batch = dataclasses.replace(batch, advantages=batch.rewards - baseline)
            loss_of(step, micro, batch, dumps, last=remaining == 0)

    for p in opob.parameters:
        p.grad = accelerator.reduce(p.grad, "sum")
    accelerator.clip_grad_norm_(model.parameters(), max_grad_norm)
    optimizer.step()
    optimizer.zero_grad()


def begin(model: nn.Module, step: Step, window: Sequence[MicroBatch], averaged_over: int = 1) -> None:
    """Begin an update, whose mean is over all of its tokens (or sequences), however they are split over micro-batches
    and processes; a method that couples the batch gets its statistics by one forward pass ahead.
    """
    counts = torch.stack([micro.counts for micro in window]).sum(0)
    tokens, sequences = step.total(counts)
    ahead = (trained_batch(model, micro) for micro in window)
    step.begin(ahead, tokens=tokens, sequences=sequences, averaged_over=averaged_over)


def loss_of(step: Step, micro: MicroBatch, batch: Batch, dumps: StepDumps | None, last: bool) -> Output:
    """The loss of a micro-batch, which the monitor sees, and which ``dumps`` keeps if it wants this update."""
    batch = step.place(batch)
    if dumps is not None and dumps.wants(update := batch.trainer_version + 1):
        dumps.add(update, records_of(batch, **micro.ids, step=update))
    return step.loss(batch, last=last, ids=lambda batch: micro.ids)


def check_opob(accelerator: Accelerator, loss_fn: offcorr.Correction) -> None:
    """Raise ``ValueError`` for a loss without a minimum-variance baseline, or sharded gradients."""
    check_proportional(loss_fn)
    if accelerator.distributed_type in (DistributedType.DEEPSPEED, DistributedType.FSDP):
        raise ValueError(
            f"opob needs the whole gradient of each trajectory on its own process, which "
            f"{accelerator.distributed_type.value} shards: use plain data parallelism, or baseline token"
        )
    if accelerator.mixed_precision == "fp16":
        raise ValueError("opob forms its gradients beside the loss scaler of mixed_precision fp16: use bf16 or no")


# -- the model and its batches -------------------------------------------------------------------------------


def return_log_probs(model: Any, temperature: float) -> None:
    """Make ``model(input_ids, targets, ...)`` return the targets' log-probs, named as a Batch names them.

    [tokens, vocabulary] is never held.  The head is applied inside the model's own forward, where FSDP2 and ZeRO-3 have
    its weight in one piece.
    """

    def forward(
        self: Any, input_ids: Tensor, targets: Tensor, wanted: Tensor, sum_sq_probs: bool = False, **context: Any
    ) -> dict[str, Tensor]:
        hidden = self.base_model(input_ids=input_ids, use_cache=False, **context).last_hidden_state
        head = self.get_output_embeddings()
        result = linear_logprob(
            hidden, head.weight, targets, bias=head.bias, mask=wanted, temperature=temperature,
            soft_cap=getattr(self.config.get_text_config(), "final_logit_softcapping", None),
            sum_sq_probs=sum_sq_probs,
        )  # fmt: skip
        return {name: value for name, value in result._asdict().items() if value is not None}

    model.forward = MethodType(forward, model)


@dataclass(frozen=True)
class Sample:
    """One completion, its prompt, its reward, and its log-probs under the sampling weights."""

    ids: list[int]
    prompt: int  # number of prompt tokens among them
    rollout_logp: list[float]  # by the sampler, of the completion's tokens
    old_logp: list[float]  # by the same weights in the trainer's precision
    advantages: list[float]  # of the completion's tokens: the reward, until a baseline is subtracted
    reward: float
    group: int
    version: int

    def with_advantages(self, advantages: list[float]) -> Sample:
        return dataclasses.replace(self, advantages=advantages)

    def padded(self, values: Sequence[float]) -> Tensor:
        """Values of the completion's tokens, with 0 for the prompt's."""
        return torch.tensor([0.0] * self.prompt + list(values))


class MicroBatch(NamedTuple):
    """The arguments of the model's forward, the fields of the Batch, and the token ids as ``records_of`` takes them."""

    inputs: dict[str, Any]
    fields: dict[str, Any]
    ids: dict[str, Tensor]

    @property
    def counts(self) -> Tensor:
        """[2]: tokens and sequences."""
        tokens = self.fields["mask"].sum()
        return torch.stack([tokens, tokens.new_tensor(len(self.fields["rewards"]))])


def lay_out(
    samples: Sequence[Sample], packed: bool, device: torch.device | str, version: int | None = None
) -> MicroBatch:
    """Sequences end to end in one row, or as rows padded on the right; ``version`` of the weights to be trained."""
    pad = partial(pad_sequence, batch_first=True)
    join = torch.cat if packed else pad
    lengths = torch.tensor([len(sample.ids) for sample in samples])
    prompts = torch.tensor([sample.prompt for sample in samples])
    rows = [torch.tensor(sample.ids) for sample in samples]
    masks = [torch.arange(len(sample.ids)) >= sample.prompt for sample in samples]
    ids, mask = join(rows), join(masks)
    fields: dict[str, Any] = {
        "mask": mask,
        "rollout_logp": join([sample.padded(sample.rollout_logp) for sample in samples]),
        "old_logp": join([sample.padded(sample.old_logp) for sample in samples]),
        "advantages": join([sample.padded(sample.advantages) for sample in samples]),
        "rewards": torch.tensor([sample.reward for sample in samples]),
        "group_ids": torch.tensor([sample.group for sample in samples]),
        "rollout_version": join([torch.full((len(sample.ids),), sample.version) for sample in samples]),
        "trainer_version": version,
    }
    # The hidden state before a token predicts it.  The last position wraps around to a prompt token, which is masked.
    inputs: dict[str, Any] = {"input_ids": ids, "targets": ids.roll(-1, -1), "wanted": mask.roll(-1, -1)}
    if packed:
        cu_seqlens = F.pad(lengths.cumsum(0), (1, 0))
        fields |= {"cu_seqlens": cu_seqlens, "max_seqlen": int(lengths.max())}
        positions = torch.arange(len(ids)) - cu_seqlens[:-1].repeat_interleave(lengths)
        inputs = {name: rearrange(value, "n -> 1 n") for name, value in inputs.items()}
        inputs["position_ids"] = rearrange(positions, "n -> 1 n")  # sdpa masks by their restarts
        # Flash attention reads these; other attentions leave them alone.
        inputs |= {"cu_seq_lens_q": cu_seqlens.int(), "cu_seq_lens_k": cu_seqlens.int()}
        inputs |= {"max_length_q": fields["max_seqlen"], "max_length_k": fields["max_seqlen"]}
    else:
        inputs["attention_mask"] = (torch.arange(ids.shape[1]) < lengths[:, None]).long()

    def placed(values: dict[str, Any]) -> dict[str, Any]:
        return {name: v.to(device) if isinstance(v, Tensor) else v for name, v in values.items()}

    before = torch.arange(int(lengths.max())) < prompts[:, None]
    token_ids = {
        "prompt_ids": pad(rows),
        "prompt_mask": before,
        "completion_ids": pad(rows),
        "completion_mask": pad(masks),
    }
    return MicroBatch(placed(inputs), placed(fields), token_ids)


def trained_batch(model: nn.Module, micro: MicroBatch, **asked: bool) -> Batch:
    """The micro-batch with log-probs under the weights being trained, and the other outputs ``asked`` for."""
    outputs = {name: values.roll(1, -1) for name, values in model(**micro.inputs, **asked).items()}
    if "cu_seqlens" in micro.fields:
        outputs = {name: values[0] for name, values in outputs.items()}
    return Batch(**outputs, **micro.fields)


# -- advantages that are known before the update ---------------------------------------------------------------


def by_group(samples: Sequence[Sample]) -> Iterator[list[Sample]]:
    """The samples of one prompt after another."""
    return (list(group) for _, group in groupby(samples, lambda sample: sample.group))


def less_group_mean(samples: Sequence[Sample]) -> list[Sample]:
    """Advantage: the reward minus the group's mean, divided by its standard deviation."""

    def relative(group: list[Sample]) -> list[Sample]:
        rewards = torch.tensor([sample.reward for sample in group])
        values = ((rewards - rewards.mean()) / (rewards.std() + 1e-4)).tolist()
        return [sample.with_advantages([v] * len(sample.advantages)) for sample, v in zip(group, values, strict=True)]

    return list(chain.from_iterable(map(relative, by_group(samples))))


@torch.no_grad()
def less_token_baseline(
    model: nn.Module, samples: Sequence[Sample], packed: bool, device: torch.device | str
) -> list[Sample]:
    """Advantage: the reward minus OTB's baseline of each token, under the current weights."""
    result = []
    for group in by_group(samples):
        batch = trained_batch(model, lay_out(group, packed, device), sum_sq_probs=True).padded()
        advantages = (batch.advantages - token_baseline(batch)).tolist()
        result += [s.with_advantages(row[s.prompt : len(s.ids)]) for s, row in zip(group, advantages, strict=True)]
    return result


# -- the sampler ---------------------------------------------------------------------------------------------


class Sampler:
    """Samples completions with weights of ``lag`` updates ago, and scores them with the task's reward."""

    def __init__(
        self, accelerator: Accelerator, model: nn.Module, tokenizer: PreTrainedTokenizerBase, args: Arguments
    ) -> None:
        self.accelerator, self.model, self.tokenizer, self.args = accelerator, model, tokenizer, args
        self.ring = SnapshotRing(args.lag)
        self.replica = Replica(accelerator.unwrap_model(model), accelerator.device)
        self.replica.module.set_attn_implementation("sdpa")  # flash attention supports half precision only
        self.precision = Precision.named(args.precision)

    def remember(self, version: int) -> None:
        """Keep the current weights; to be called on every process, since sharded weights are gathered."""
        self.ring.push(version, changing_weights(self.accelerator.unwrap_model(self.model)))

    def sample(self, task: Task, rows: Sequence[dict[str, Any]], version: int) -> list[Sample]:
        """``args.samples`` completions for each row's prompt, side by side."""
        args, sampled = self.args, max(0, version - self.args.lag)
        rows = [row for row in rows for _ in range(args.samples)]
        prompts = [self._encode(row["prompt"]) for row in rows]
        decoded = self._decode(self.replica.load(self.ring[sampled], self.precision), prompts, version)
        with self.accelerator.autocast():  # the trainer's precision
            scorer = self.replica.load(self.ring[sampled])
            old_logp = score(scorer, prompts, decoded.completion_ids, temperature=args.temperature)
        rewards = self._rewards(task, rows, decoded.completion_ids)
        first = self.accelerator.process_index * (len(rows) // args.samples)  # no two prompts share a number
        return [
            Sample(
                [*prompt, *ids], len(prompt), rollout, old, [reward] * len(ids), reward,
                first + index // args.samples, sampled,
            )
            for index, (prompt, ids, rollout, old, reward) in enumerate(
                zip(prompts, decoded.completion_ids, decoded.logp, old_logp, rewards, strict=True)
            )
        ]  # fmt: skip

    def accuracy(self, task: Task, version: int) -> float:
        """Mean reward of one sample for each held-out example, from the current weights in full precision."""
        rows = task.test.to_list()
        total = 0.0
        if self.accelerator.is_main_process:
            decoded = self._decode(self.replica.load(self.ring[version]), [self._encode(r["prompt"]) for r in rows], -1)
            total = sum(self._rewards(task, rows, decoded.completion_ids)) / len(rows)
        return total

    def save(self, version: int, folder: Path) -> None:
        """Save a snapshot for ``from_pretrained``."""
        self.replica.load(self.ring[version]).save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)

    def _decode(self, module: nn.Module, prompts: list[list[int]], stream: int) -> Any:
        """Draws depend on the seed, the version and the process alone."""
        key = np.random.SeedSequence([self.args.seed, stream + 1, self.accelerator.process_index])
        return decode(
            module,
            prompts,
            max_new_tokens=self.args.max_completion_length,
            eos_token_ids=[self.tokenizer.eos_token_id],
            sampling=Sampling(temperature=self.args.temperature),
            generator=torch.Generator(self.accelerator.device).manual_seed(int(key.generate_state(1)[0])),
        )

    def _encode(self, prompt: Any) -> list[int]:
        if isinstance(prompt, str):
            return self.tokenizer(prompt)["input_ids"]
        return self.tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=True)["input_ids"]

    def _rewards(self, task: Task, rows: Sequence[dict[str, Any]], completion_ids: list[list[int]]) -> list[float]:
        texts = self.tokenizer.batch_decode(completion_ids, skip_special_tokens=True)
        columns = {name: [row[name] for row in rows] for name in rows[0]}
        return task.reward(completions=texts, **columns)


# -- the rest ------------------------------------------------------------------------------------------------


def start_accelerator(args: Arguments) -> Accelerator:
    """The Accelerator that the options of `accelerate launch` ask for."""
    zero, fsdp = (os.environ.get(f"ACCELERATE_USE_{name}") == "true" for name in ("DEEPSPEED", "FSDP"))
    if zero:
        os.environ["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] = str(args.accumulation)
        if args.use_cpu:
            # On a CPU DeepSpeed would compile its shared-memory collectives at every first start; gloo does without.
            import deepspeed

            deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    PartialState(cpu=args.use_cpu)
    # With cpu=True here, Accelerate would silently leave DeepSpeed out.
    accelerator = Accelerator(cpu=args.use_cpu and not zero, gradient_accumulation_steps=args.accumulation)
    if zero:
        accelerator.state.deepspeed_plugin.deepspeed_config |= {
            "train_micro_batch_size_per_gpu": args.micro_batch,
            "gradient_accumulation_steps": args.accumulation,
            "gradient_clipping": args.max_grad_norm,
        }
    elif fsdp and args.use_cpu:
        # Accelerate offers FSDP on accelerators only, but FSDP2 itself runs on gloo as well.
        accelerator.state.distributed_type = DistributedType.FSDP
        accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin()
    accelerator.print(f"{accelerator.num_processes} x {accelerator.device.type}, {accelerator.distributed_type.value}")
    return accelerator


def make_monitor(args: Arguments, accelerator: Accelerator) -> offcorr.Monitor | None:
    """The monitor that ``--monitor`` asks for; None: off."""
    options = monitor_options(args.monitor)
    if options is None:
        return None
    monitor = offcorr.Monitor(**options, temperature=args.temperature)
    if "folder" not in options:
        monitor.folder = Path(args.output_dir, "mismatch")
    monitor.on_main = accelerator.is_main_process
    return monitor


def make_dumps(args: Arguments, accelerator: Accelerator) -> StepDumps | None:
    """The files of ``--dump_rollouts``, whose folder must hold no other run; None: none."""
    if args.dump_rollouts is None:
        return None
    dumps = StepDumps(args.dump_rollouts, rank=accelerator.process_index, every=args.dump_every)
    dumps.begin()
    return dumps


class Log:
    """The history of recipes/grpo.py, written without a Trainer."""

    def __init__(self, accelerator: Accelerator, folder: Path) -> None:
        self.history = History(folder)
        if accelerator.is_main_process:
            self.history.say_replaced()
        self.state = TrainerState(is_world_process_zero=accelerator.is_main_process)

    def __call__(self, step: int, **values: float) -> None:
        self.state.log_history.append({"step": step, **values})
        self.history.on_log(None, self.state, None)


def split(items: Sequence[Any], parts: int) -> Iterator[Sequence[Any]]:
    """Equal parts, in order."""
    size = len(items) // parts
    return (items[i * size : (i + 1) * size] for i in range(parts))


if __name__ == "__main__":
    main()
