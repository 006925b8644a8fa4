"""``ServedWeights``: the weights that an engine has, replaced through a folder and checked by what it answers."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from offcorr.quiet import no_progress_bar
from offcorr.rollout.decode import Decoded, Sampling, limits_of, score
from offcorr.rollout.engine import Engine, EngineError
from offcorr.stages.checks import warn_once
from offcorr.training.replica import Replica, base_of, is_peft

SEQUENCES, TOKENS = 16, 256
"""Known sequences that a replacement of the weights is checked with, and the tokens of each, at most."""


class ServedWeights:
    """Keeps an engine's weights at a version that was asked for.

    Args:
        replica: of the trainer's model.
        folder: where weights are written for the engine to read; it is emptied once they are read.
        tolerance: nats; see ``VLLMServer``.
        sampling: how the engine will sample.
    """

    def __init__(self, engine: Engine, replica: Replica, folder: Path, tolerance: float, sampling: Sampling) -> None:
        self.engine, self.replica, self.folder, self.tolerance = engine, replica, folder, tolerance
        self.sampling = sampling
        self._version: int | None = None
        self._weights: dict[str, Tensor] = {}
        self._heads: dict[int, Tensor] = {}  # by version: the first and the last that the engine was given
        self._known: list[tuple[list[int], int]] = []  # a sequence, and its tokens that are not compared

    def remember(self, prompt_ids: Sequence[Sequence[int]], completion_ids: Sequence[Sequence[int]]) -> None:
        """Take some of these sequences as those that the next replacement is checked with."""
        every = max(1, len(prompt_ids) // SEQUENCES)
        pairs = list(zip(prompt_ids, completion_ids, strict=True))[::every][:SEQUENCES]
        longest = min(TOKENS, self.engine.longest() - 1)
        # The completion is compared, or everything where a long prompt leaves little room for it.
        starts = [len(p) if c and len(p) <= longest // 2 else 1 for p, c in pairs]
        cut = (([*p, *c][:longest], start) for (p, c), start in zip(pairs, starts, strict=True))
        self._known = [(sequence, start) for sequence, start in cut if len(sequence) > start]

    def ensure(self, version: int, weights: Mapping[str, Tensor], prompt_ids: Sequence[Sequence[int]]) -> None:
        """Let every server have ``weights`` (named as by ``changing_weights``), which are those of ``version``.

        Args:
            weights: kept until the next replacement is checked, and not to be changed.
            prompt_ids: the known sequences before any is remembered.

        Raises:
            EngineError: it could not be done, or was said to be done and is not.
        """
        if self._version is None:
            self.engine.check(self.sampling)
        elif self.engine.check_version(self._version):
            if self._version == version:
                return
        else:
            warn_once(f"a vLLM server ({', '.join(self.engine.urls)}) was restarted; it gets its weights again")
        if not self._known:
            self.remember(prompt_ids, [[]] * len(prompt_ids))
        try:
            save_for_engine(self.replica.load(weights), self.folder)
            self.engine.replace_weights(str(self.folder), version)
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)
        self._check(version, weights)
        self._version, self._weights = version, dict(weights)
        head = base_of(self.replica.load(weights)).get_output_embeddings().weight.detach().cpu()
        # The first one, since a head may have stayed as it was at the start, and the last one.
        self._heads = dict([*self._heads.items()][:1]) | {version: head}

    def sample(
        self,
        version: int,
        prompt_ids: Sequence[Sequence[int]],
        *,
        max_new_tokens: int | Sequence[int],
        eos_token_ids: Sequence[int],
        seeds: Sequence[int],
    ) -> Decoded:
        """One completion for each prompt, by the weights of ``version``, which the engine must have; see ``Engine``.

        Raises:
            EngineError: the engine's weights changed on the way, or a prompt is too long for it.
        """
        limits, longest = limits_of(max_new_tokens, len(prompt_ids)), self.engine.longest()
        needed, limit = max((len(ids) + limit, limit) for ids, limit in zip(prompt_ids, limits, strict=True))
        if needed > longest:
            raise EngineError(
                f"a prompt and max_completion_length={limit} are {needed} tokens, and the server takes "
                f"{longest}: start it with a larger --max-model-len"
            )
        decoded = self.engine.sample(
            prompt_ids, max_new_tokens=max_new_tokens, eos_token_ids=eos_token_ids, sampling=self.sampling, seeds=seeds
        )
        if not self.engine.check_version(version):
            raise EngineError("the vLLM server was restarted while it sampled: which weights sampled is not known")
        return decoded

    def _check(self, version: int, weights: Mapping[str, Tensor]) -> None:
        """Compare the engine's log-probs of known sequences with those of the weights that it should have."""
        known = self._known
        if not known:  # prompts of one token, before anything was sampled
            return
        sequences = [sequence for sequence, _ in known]
        wanted = self._score(weights, known)
        for url, rows in zip(self.engine.urls, self.engine.score(sequences), strict=True):
            scored = [x for row, (_, start) in zip(rows, known, strict=True) for x in row[start - 1 :]]
            self._compare(url, version, torch.tensor(scored, dtype=torch.float64), wanted, weights, known)

    def _compare(
        self, url: str, version: int, found: Tensor, wanted: Tensor, weights: Mapping[str, Tensor], known: Any
    ) -> None:
        gap = (found - wanted).abs().mean().item()
        for part, since, stale in self._stale(weights, known):
            left = (found - stale).abs().mean().item()
            # A change that the engine rounds away leaves it as near to the one as to the other.
            if left < gap / 2:
                raise EngineError(
                    f"the vLLM server at {url} said that it loaded the weights of version {version}, but its log-probs "
                    f"are those with {part} of version {since}: mean |difference| {gap:.2g} from the new weights, "
                    f"{left:.2g} from those. {CURE[part]}"
                )
        if not gap <= self.tolerance:
            raise EngineError(
                f"the vLLM server at {url} loaded the weights of version {version}, and its log-probs differ from the "
                f"trainer's by {gap:.2g} nats on average, more than tolerance={self.tolerance:g}: it serves another "
                "model or architecture, or rounds more than that (a quantised engine: raise tolerance)"
            )

    def _stale(self, weights: Mapping[str, Tensor], known: Any) -> Iterator[tuple[str, int | None, Tensor]]:
        """Log-probs that the engine would have if a part of it had kept older weights: part, version, log-probs."""
        if not self._heads:
            return
        yield "all weights", self._version, self._score(self._weights, known)
        module = self.replica.load(weights)
        for version, head in self._heads.items():
            base_of(module).get_output_embeddings().weight = nn.Parameter(head.to(self.replica.device), False)
            yield "the output head", version, self._scored(module, known)

    def _score(self, weights: Mapping[str, Tensor], known: Any) -> Tensor:
        return self._scored(self.replica.load(weights), known)

    def _scored(self, module: nn.Module, known: Any) -> Tensor:
        # One at a time, since a model's logits over a large vocabulary take most of the memory.
        rows = [score(module, [sequence[:start]], [sequence[start:]])[0] for sequence, start in known]
        return torch.tensor([x for row in rows for x in row], dtype=torch.float64)


CURE = {
    "all weights": "The reload did nothing: look at the server's own output.",
    "the output head": (
        "vLLM on a CPU keeps the head of a model with tied embeddings as it was at the start: serve a checkpoint whose "
        "head is not tied, as offcorr.rollout.save_for_engine(model, folder) writes it."
    ),
}


def save_for_engine(model: Any, folder: str | Path) -> None:
    """Write a checkpoint (safetensors and configuration) that an engine can be started with, and can reload.

    The output head is written by itself, also where the model ties it to the embeddings, since vLLM on a CPU does not
    reload a tied head.  LoRA adapters are merged into the weights written; ``model`` is not changed.

    Raises:
        ValueError: adapters that are not plain LoRA.
    """
    base = base_of(model)
    weights = _merged(base) if is_peft(model) else dict(base.state_dict())
    head = base.get_output_embeddings()
    name = next((n for n, module in base.named_modules() if module is head), None)
    if name is not None:
        weights[f"{name}.weight"] = weights[f"{name}.weight"].detach().clone()
    saved = copy.copy(base)
    saved.config = copy.deepcopy(base.config)
    saved.config.tie_word_embeddings = False
    with no_progress_bar():
        saved.save_pretrained(folder, state_dict=weights)


def _merged(base: nn.Module) -> dict[str, Tensor]:
    """The weights of a model with LoRA layers, under the names that it has without."""
    weights = {}
    for name, weight in base.state_dict().items():
        if "lora_magnitude" in name or "modules_to_save" in name or (".base_layer" not in name and "prompt" in name):
            raise ValueError(f"the adapter has {name!r}: only plain LoRA adapters can be merged for an engine")
        if "lora_" not in name:
            weights[name.replace(".base_layer", "")] = weight
    for name, layer in base.named_modules():
        if hasattr(layer, "get_delta_weight"):
            key = f"{name}.weight"
            weights[key] = weights[key] + sum(layer.get_delta_weight(a) for a in layer.active_adapters)
    return weights
