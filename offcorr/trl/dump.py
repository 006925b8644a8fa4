"""``dump_rollouts``: the micro-batches that a trainer trains on, as records in the file of their optimizer step.

``old_logp`` of a record is of the weights that sampled, whatever the anchor of the correction is.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

import offcorr
from offcorr.diagnose.batch_records import records_of
from offcorr.diagnose.writer import StepDumps
from offcorr.folders import check_writable
from offcorr.optional import require
from offcorr.stages.checks import warn_once
from offcorr.training.last_batches import Ids


def check_dump(args: Any) -> None:
    """Raise before the model is loaded where the dump that ``dump_rollouts`` asks for cannot be written.

    Raises:
        ModuleNotFoundError: pyarrow is missing.
        ValueError: no such folder can be made.
    """
    folder = getattr(args, "dump_rollouts", None)
    if folder is not None:
        require("dump_rollouts", ["pyarrow"], install="pip install pyarrow")
        check_writable("dump_rollouts", folder)


def make_dumps(trainer: Any) -> StepDumps | None:
    """The files that ``dump_rollouts`` asks for; None: none."""
    folder = getattr(trainer.args, "dump_rollouts", None)
    if folder is None:
        return None
    return StepDumps(folder, rank=trainer.accelerator.process_index, every=trainer.args.dump_every)


def warn_of_unscored_dump(trainer: Any, batch: offcorr.Batch) -> None:
    """Warns, once per message, of a dump without the sampler's log-probs, with which the trainer's are compared."""
    if batch.rollout_logp is None:
        warn_once(
            f"dump_rollouts={str(trainer.args.dump_rollouts)!r}: the sampler reports no log-probs, so rollout_logp of "
            "the dump is NaN, and no mismatch with the sampler can be told from it: sample by vLLM (use_vllm=True), or "
            "by a rollout_func that returns logprobs"
        )


def dump_padded(trainer: Any, inputs: dict[str, Any], batch: offcorr.Batch) -> None:
    """Keep a micro-batch of ``GRPOTrainer``, where ``dump_rollouts`` asks for its step; without it, nothing is done."""
    version = trainer.state.global_step
    if trainer.dumps is None or not trainer.model.training or not trainer.dumps.wants(version + 1):
        return
    warn_of_unscored_dump(trainer, batch)
    batch = batch.replaced(old_logp=inputs.get("old_logp", inputs.get("old_per_token_logps")))
    if batch.rollout_version is None and trainer.rollout_func is None:  # TRL generates with the weights of that step
        of_rows = inputs["generated_at"][:, None].expand_as(batch.logp)
        batch = batch.replaced(rollout_version=of_rows, trainer_version=version)
    trainer.dumps.add(version + 1, records_of(batch, **padded_ids(inputs)(batch), step=version + 1))


def dump_row(trainer: Any, inputs: dict[str, Any], batch: offcorr.Batch) -> None:
    """Keep a packed row of ``AsyncGRPOTrainer``, where ``dump_rollouts`` asks for its step.

    Versions count weight syncs, so entropy is of the weights that sampled only where the last step ended with one.
    """
    step = trainer.state.global_step + 1
    if trainer.dumps is None or not trainer.dumps.wants(step):
        return
    warn_of_unscored_dump(trainer, batch)
    own: Tensor = inputs["old_logp"][inputs["token_index"] >= 0]
    batch = batch.replaced(old_logp=own if own.isfinite().all() else None)
    if (step - 1) % trainer.args.weight_sync_steps:
        batch = batch.replaced(entropy=None)
    trainer.dumps.add(step, records_of(batch, **row_ids(inputs, batch), step=step))


def padded_ids(inputs: dict[str, Any]) -> Ids:
    """The token ids of a micro-batch of ``GRPOTrainer``, as ``records_of`` takes them."""
    names = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")
    found = {name: inputs[name] for name in names}  # the other inputs need not be kept
    return lambda batch: found


def row_ids(inputs: dict[str, Any], batch: offcorr.Batch) -> dict[str, Any]:
    """The token ids of a packed row's sequences, on the host, as ``records_of`` takes them."""
    prompts, completions, places = row_sequences(inputs, batch.sequences)
    return {"prompt_ids": prompts, "completion_ids": completions, "places": places}


def row_sequences(inputs: dict[str, Any], sequences: int) -> tuple[list[list[int]], list[list[int]], list[list[int]]]:
    """The samples of a packed row, on the host: prompts, completions, and the places of their loss terms in these.

    A sample's tokens lie on the path of its last loss term from the root; the path's end predicts the last token.
    The prompt ends before the first trained token; what follows the last one is not in the row's terms, and left out.

    Args:
        inputs: as for ``packed_batch``.
        sequences: number of samples in the row.
    """
    names = ("input_ids", "position_ids", "shift_labels", "token_index", "segment_id")
    ids, depth, labels, index, sample = (inputs[name][0].cpu().numpy() for name in names)
    kv = inputs["tree_kv_index"][0].cpu().numpy()
    starts, paths = (inputs[f"tree_cu_seqlens_{end}"][0].cpu().numpy() for end in "qk")
    terms, starts = index >= 0, starts[starts >= 0]
    index, sample = index[terms], sample[terms]
    found: tuple[list, list, list] = ([], [], [])
    for i in range(sequences):
        own = index[sample == i]
        if not len(own):
            for part in found:
                part.append([])
            continue
        segment = int(np.searchsorted(starts, own[-1], side="right")) - 1
        path = kv[paths[segment] : paths[segment + 1]][: depth[own[-1]] + 1]
        tokens, first = [*ids[path].tolist(), int(labels[own[-1]])], int(depth[own[0]]) + 1
        for part, values in zip(
            found, (tokens[:first], tokens[first:], (depth[own] + 1 - first).tolist()), strict=True
        ):
            part.append(values)
    return found
