"""``Traces``: stored completions by prompt, of another model, of people or of an earlier run."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from offcorr.data.trace import Encoder, Trace
from offcorr.diagnose import Record, read
from offcorr.diagnose.formats import Unreadable, jsonl, parquet
from offcorr.stages.checks import warn_once
from offcorr.tokens import Row, collate

Keep = Callable[[Trace], bool]

CONTAINERS = (parquet.PARQUET, jsonl.JSONL)
"""The kinds of file that hold rows of traces."""


class Traces:
    """Completions by prompt, in tokens, each checked when it is read.

    A row has these fields; others are left alone:

    - ``prompt`` (text, or messages) or ``prompt_ids``;
    - ``completion`` (text, or one message of the assistant) or ``completion_ids``.  Both may be given, and then must
      agree.  Text is tokenised once, and the EOS token is put behind it, unless it ends with one or the row has
      ``ended: false``.  Ids are taken as they are: without EOS at the end the trace counts as cut off;
    - ``logp``: the log-probs (nats) of the completion's tokens, EOS included, under the policy that wrote them;
    - ``reward``, for ``keep``; ``mask``, 0 for tokens that the writer did not choose (see ``Trace``).

    Args:
        rows: mappings, a ``datasets.Dataset``, or the path of a jsonl (also gzip) or parquet file.
        tokenizer: the trainer's tokenizer or processor.
        keep: which traces to keep, for instance ``lambda trace: trace.reward == 1``; None: all.
        chat_template, chat_template_kwargs: for messages, as the trainer has them.

    Raises:
        ValueError: a row without these fields; a trace whose tokens do not re-tokenise: text that its tokens do not
            decode to, ids that do not decode to the text, ids outside the vocabulary; ``logp`` of another length than
            the completion, above 0 or not finite.  The message names file, row (from 1) and field.  No row, or none
            that ``keep`` keeps.

    >>> from transformers import PreTrainedTokenizerFast
    >>> from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    >>> inner = Tokenizer(models.WordLevel({"<eos>": 0, "2": 1, "+": 2, "=": 3, "4": 4}, unk_token="<eos>"))
    >>> inner.pre_tokenizer, inner.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    >>> tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>")
    >>> traces = Traces([{"prompt": "2+2=", "completion": "4", "logp": [-0.1, -0.2]}], tokenizer)
    >>> [(trace.completion_ids, trace.logp) for trace in traces.of("2+2=")]
    [((4, 0), (-0.1, -0.2))]
    """

    def __init__(
        self,
        rows: Iterable[Mapping[str, Any]] | str | os.PathLike[str],
        tokenizer: Any,
        *,
        keep: Keep | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self._encoder = Encoder(tokenizer, chat_template, chat_template_kwargs)
        self._by_prompt = by_prompt((self._encoder.trace(row, where) for where, row in _numbered(rows)), keep)

    @classmethod
    def from_dump(
        cls, paths: Sequence[str | Path] | str | Path, tokenizer: Any, *, keep: Keep | None = None, **options: Any
    ) -> Traces:
        """The sequences of a dump, as ``dump_rollouts`` writes them and ``offcorr.diagnose.read`` reads them.

        The log-probs of a trace are the dump's ``old_logp``, those of the weights that sampled in the trainer's
        precision, or where it has none ``rollout_logp``.  A completion that was trained on several times is one trace.

        Args:
            paths: files and folders.
            tokenizer, keep, options: as for the class.

        Raises:
            DumpError: a path that holds no dump.
            ValueError: ids outside the vocabulary, or what is no log-prob; the message names file and row.
        """
        traces = cls.__new__(cls)
        traces._encoder = Encoder(tokenizer, **options)
        seen: dict[tuple[tuple[int, ...], tuple[int, ...]], Trace] = {}
        paths = [paths] if isinstance(paths, str | Path) else paths
        for record in read(paths, warn=_warn_unless_lacking):
            if record.mask is not None and not record.mask.any():
                warn_once(f"{record.where}: no token of the sequence was trained on; it is left out")
                continue
            trace = traces._of_record(record)
            seen.setdefault((trace.prompt_ids, trace.completion_ids), trace)
        traces._by_prompt = by_prompt(seen.values(), keep)
        return traces

    def of(self, prompt: Any) -> tuple[Trace, ...]:
        """The traces of a prompt (text, messages or token ids), in the order of the rows; empty where there is none."""
        return self._by_prompt.get(self._encoder.prompt(prompt), ())

    @property
    def prompts(self) -> list[tuple[int, ...]]:
        """The prompts that have traces, in tokens."""
        return [*self._by_prompt]

    def __len__(self) -> int:
        """The number of traces."""
        return sum(map(len, self._by_prompt.values()))

    def __iter__(self) -> Iterator[Trace]:
        return (trace for traces in self._by_prompt.values() for trace in traces)

    def __repr__(self) -> str:
        return f"Traces({len(self)} of {len(self._by_prompt)} prompts)"

    def batch(self, index: int, size: int, *, seed: int = 0) -> dict[str, Tensor]:
        """The ``index``-th batch of ``size`` traces, for a supervised term such as ``offcorr.extras.CHORD``.

        Every trace comes once before any comes again, in an order that ``seed`` and the pass decide, so a resumed run
        needs no state: pass the number of batches that all ranks have had.

        Returns:
            input_ids: [B, P + T] prompts, padded on the left, and completions, padded on the right.
            attention_mask: [B, P + T] int, 0 where padded.
            mask: [B, T] bool, the tokens to learn, those of the completions; T is TRL's ``logits_to_keep``.

        Raises:
            ValueError: there are no traces, or an index or size that cannot be.
        """
        if not len(self) or index < 0 or size < 1:
            raise ValueError(
                f"index={index} and size={size} of {len(self)} traces, expected index >= 0, size >= 1, and a trace"
            )
        every = [*self]
        places = [divmod(index * size + i, len(every)) for i in range(size)]
        orders = {turn: np.random.default_rng([seed, turn]).permutation(len(every)) for turn, _ in places}
        rows = collate([_row(every[orders[turn][place]]) for turn, place in places], self._pad_id)
        return {
            "input_ids": torch.cat([rows["prompt_ids"], rows["completion_ids"]], 1),
            "attention_mask": torch.cat([rows["prompt_mask"], rows["completion_mask"]], 1).long(),
            "mask": rows["mask"],
        }

    @property
    def _pad_id(self) -> int:
        pad = self._encoder.tokenizer.pad_token_id
        return self._encoder.eos if pad is None else pad

    def _of_record(self, record: Record) -> Trace:
        mask = np.ones(len(record), bool) if record.mask is None else record.mask
        known = [logp for logp in (record.old_logp, record.rollout_logp) if np.isfinite(logp[mask]).all()]
        trace = Trace(
            tuple(record.prompt_ids.tolist()),
            tuple(record.completion_ids.tolist()),
            logp=tuple(known[0].tolist()) if known else None,
            mask=None if mask.all() else tuple(mask.astype(int).tolist()),
            reward=record.reward,
            where=record.where,
        )
        for name in ("prompt_ids", "completion_ids"):
            try:
                self._encoder.check_vocabulary(name, getattr(trace, name))
            except ValueError as error:
                raise trace.error(str(error)) from None
        return trace


def by_prompt(traces: Iterable[Trace], keep: Keep | None = None) -> dict[tuple[int, ...], tuple[Trace, ...]]:
    """The traces by their prompts, in their order.

    Args:
        keep: which of them to keep; None: all.

    Raises:
        ValueError: there are none, or none is kept.
    """
    every = list(traces)
    kept = [trace for trace in every if keep is None or keep(trace)]
    if not every:
        raise ValueError("there are 0 traces to read, expected at least one")
    if not kept:
        raise ValueError(
            f"keep keeps none of {len(every)} traces, expected at least one: it is called with a Trace, whose reward "
            "is None where its row has none"
        )
    found: dict[tuple[int, ...], list[Trace]] = {}
    for trace in kept:
        found.setdefault(trace.prompt_ids, []).append(trace)
    return {prompt: tuple(group) for prompt, group in found.items()}


def _row(trace: Trace) -> Row:
    tokens = len(trace)
    mask = [bool(own) for own in trace.mask or [1] * tokens]
    return Row([*trace.prompt_ids], [*trace.completion_ids], mask, [np.nan] * tokens, [0] * tokens)


def _numbered(rows: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The rows, each with where it was found."""
    if not isinstance(rows, str | os.PathLike):
        yield from ((f"row {number}", row) for number, row in enumerate(rows, 1))
        return
    path = Path(rows)
    if not path.is_file():
        raise ValueError(f"{path} is no file, expected a jsonl or parquet file of traces")
    with open(path, "rb") as file:
        head = file.read(4096)
    container = next((its for its in CONTAINERS if its.recognises(path, head)), None)
    if container is None:
        raise ValueError(f"{path} begins with {head[:16]!r}, expected {', '.join(its.name for its in CONTAINERS)}")
    for row in container.opened([path], frozenset())(path):
        where = f"{path}, row {row.number}"
        if isinstance(row.fields, Unreadable):
            raise ValueError(f"{where}: {row.fields.message}")
        yield where, row.fields


def _warn_unless_lacking(text: str) -> None:
    """The warnings of ``read``, but for those about fields that a trace does not have."""
    if "tests that need these fields" not in text:
        warn_once(text)
