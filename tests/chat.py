"""A byte-level BPE tokenizer, trained here, with the chat templates that TRL ships; and conversations with a tool."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import trl
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from offcorr.tokens import Trajectory

TEMPLATES = Path(trl.__file__).parent / "chat_templates"
QWEN = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
LLAMA = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>", "<|python_tag|>")
SPECIAL = re.compile(r"<[|｜][^|｜<>{}'\" ]+[|｜]>|<(?:start|end)_of_turn>|<turn\|>|<\|turn>|<sop>|\[gMASK\]")
"""Special tokens in the source of a chat template."""

TEXT_TOKENS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
"""Single tokens that, as in Qwen's vocabulary, are text: ``skip_special_tokens`` keeps them."""

CORPUS = [
    "What is 12345 + 67890? The weather in Paris is 21 degrees, in Zürich it is 8 degrees.",
    '{"name": "get_weather", "arguments": {"city": "Paris", "days": 12}}',
    '{"name": "get_weather", "parameters": {"city": "Zürich"}} user assistant system tool',
    "You are a helpful assistant. Let me think about it step by step. The answer is 80235.",
    "Therefore, tomorrow and the day after tomorrow it will rain. 晴れ 東京 emoji 🙂🙃",
]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather of a city.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]


@functools.cache
def tokenizer(template: str) -> PreTrainedTokenizerFast:
    """Returns a tokenizer with TRL's template of this name and the special tokens that stand in it."""
    source = (TEMPLATES / f"{template}.jinja").read_text()
    known = LLAMA if template.startswith("llama") else QWEN if template.startswith("qwen") else ("<|endoftext|>",)
    special = tuple(dict.fromkeys([*known, *SPECIAL.findall(source)]))
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=700, initial_alphabet=alphabet, special_tokens=list(special), show_progress=False
    )
    bpe.train_from_iterator(CORPUS * 3, trainer)
    bpe.add_tokens([AddedToken(text, special=False, normalized=False) for text in TEXT_TOKENS])
    end = {LLAMA: "<|eot_id|>", QWEN: "<|im_end|>"}.get(known, "<|endoftext|>")
    made = PreTrainedTokenizerFast(
        tokenizer_object=bpe, bos_token=known[0], eos_token=end, pad_token=known[0], extra_special_tokens={}
    )
    made.chat_template = source
    return made


def parsed(text: str, template: str) -> dict[str, Any]:
    """An answer as a message, in the way of the model's own parser: tool calls become objects."""
    text = re.sub(r"<\|\w+\|>", "", text)
    if template.startswith("llama"):
        if not re.fullmatch(r"\{.*\"parameters\".*\}", text, flags=re.S):
            return {"role": "assistant", "content": text}
        call = json.loads(text)
        function = {"name": call["name"], "arguments": call["parameters"]}
        return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
    calls = [json.loads(call) for call in re.findall(r"<tool_call>(.*?)</tool_call>", text, flags=re.S)]
    content = re.sub(r"\s*<tool_call>.*?</tool_call>", "", text, flags=re.S)
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if calls:
        message["tool_calls"] = [{"type": "function", "function": call} for call in calls]
    return message


@dataclass
class Sent:
    """What the engine saw and sampled in one turn."""

    prompt: list[int]
    ids: list[int]
    logprobs: list[float]


@dataclass
class Conversation:
    """A loop of a user, tools and a scripted engine, which keeps what it saw."""

    template: str
    trajectory: Trajectory
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    kwargs: dict[str, Any] = field(default_factory=dict)
    sent: list[Sent] = field(default_factory=list)

    @property
    def tokenizer(self) -> PreTrainedTokenizerFast:
        return tokenizer(self.template)

    def rendered(self) -> list[int]:
        return self.tokenizer.apply_chat_template(
            self.messages, tools=self.tools, add_generation_prompt=True, return_dict=False, **self.kwargs
        )

    def answer(
        self, text: str, pieces: Callable[[str], list[str]] = lambda text: [text], end: str | None = None
    ) -> list[int]:
        """The engine samples ``text``, its pieces encoded one by one, and ``end``; returns the prompt that it saw."""
        end = self.tokenizer.eos_token if end is None else end
        prompt = self.trajectory.prompt(self.rendered())
        ids = [one for piece in [*pieces(text), end] for one in self.tokenizer.encode(piece, add_special_tokens=False)]
        return self.sample(prompt, ids)

    def sample(self, prompt: list[int], ids: list[int]) -> list[int]:
        """The engine samples these ids from ``prompt``; the answer that they decode to joins the messages."""
        logprobs = [-0.001 * (len(prompt) + at + 1) for at in range(len(ids))]
        self.sent.append(Sent(prompt, ids, logprobs))
        self.trajectory.sampled(ids, logprobs, prompt_ids=prompt)
        self.messages.append(parsed(self.tokenizer.decode(ids), self.template))
        return prompt

    def says(self, role: str, content: str) -> None:
        self.messages.append({"role": role, "content": content})


def check_rows(conversation: Conversation) -> None:
    """Raises unless every token in the loss stands where the engine sampled it, behind exactly what the engine saw."""
    rows = conversation.trajectory.rows()
    seen = []
    for row in rows:
        assert row.mask[0] and row.mask[-1] if row.mask else False
        ids = row.prompt_ids + row.completion_ids
        for at, (own, logp, turn) in enumerate(zip(row.mask, row.rollout_logp, row.turn_ids, strict=True)):
            place = len(row.prompt_ids) + at
            assert own == (logp == logp)
            if own:
                sent = conversation.sent[turn]
                within = place - len(sent.prompt)
                assert ids[: place + 1] == (sent.prompt + sent.ids)[: place + 1] and within >= 0
                assert logp == sent.logprobs[within]
                seen.append((turn, within))
    assert len(set(seen)) == len(seen), "a sampled token is in two rows"
    total = sum(len(sent.ids) for sent in conversation.sent)
    assert len(seen) == total - conversation.trajectory.masked_tokens
