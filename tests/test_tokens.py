"""Token identity in conversations with tools: a trained byte-level BPE and the chat templates of TRL."""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Callable

import numpy as np
import pytest
import torch

import offcorr
from offcorr import tokens
from offcorr.diagnose import Record
from offcorr.tokens import REASONS, REPAIRABLE, Trajectory, collate, metrics, rollout_output, turn_ends
from tests.chat import TEMPLATES as FOLDER
from tests.chat import TOOLS, Conversation, check_rows, tokenizer

TEMPLATES = ("qwen3", "qwen2_5", "llama3_1")
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
THOUGHT = "<think>\nThe user asks about Paris.\n</think>\n\n"


def conversation(template: str = "qwen2_5", system: str | None = "Be brief.", tools=None, **settings) -> Conversation:
    made = Conversation(template, Trajectory(tokenizer(template), **settings), [], tools)
    if system is not None:
        made.says("system", system)
    made.says("user", "What is 12345 + 67890?")
    return made


def in_pieces(size: int) -> Callable[[str], list[str]]:
    """Divides a text into pieces of so many characters."""
    return lambda text: [text[at : at + size] for at in range(0, len(text), size)]


letters = in_pieces(1)


def last(made: Conversation) -> tuple[str, str | None]:
    check = made.trajectory.checks[-1]
    return check.action, check.reason


def closing(made: Conversation) -> str:
    """The text of the prompt behind the recorded turns."""
    sent, before = made.sent[-1].prompt, made.sent[-2]
    assert sent[: len(before.prompt + before.ids)] == before.prompt + before.ids
    return made.tokenizer.decode(sent[len(before.prompt + before.ids) :])


# ------------------------------------------------------------------------------------------- continued, repaired


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_prompt_that_continues_is_returned_as_it_came(template):
    made = conversation(template)
    made.answer("The answer is 80235.")
    made.says("user", "And tomorrow?")
    expected = made.rendered()
    assert made.answer("It will rain.") == expected
    assert last(made) == ("continued", None)
    check_rows(made)


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_other_tokens_of_the_same_text(template, size):
    """Words and numbers sampled in pieces that the tokenizer would not choose."""
    made = conversation(template)
    made.answer("The sum of 12345 and 67890 is 80235.", in_pieces(size))
    made.says("user", "And tomorrow?")
    rendered = made.rendered()
    prompt = made.answer("It will rain.")
    assert last(made) == ("repaired", "retokenised")
    assert prompt != rendered and made.tokenizer.decode(prompt) == made.tokenizer.decode(rendered)
    assert closing(made).startswith("<|start_header_id|>user" if template == "llama3_1" else "\n<|im_start|>user")
    check_rows(made)


def test_a_number_that_bpe_merges_otherwise():
    made = conversation()
    one = made.tokenizer.encode("12345", add_special_tokens=False)
    two = [made.tokenizer.encode(part, add_special_tokens=False) for part in ("123", "45")]
    assert one != two[0] + two[1]
    prompt = made.trajectory.prompt(made.rendered())
    made.sample(prompt, [*two[0], *two[1], made.tokenizer.eos_token_id])
    made.says("user", "Sure?")
    assert made.answer("Yes.")[len(prompt) :][: len(two[0] + two[1])] == two[0] + two[1]
    (check,) = made.trajectory.checks
    assert str(check).endswith("assistant\\n12345' in other tokens") and check.differences[0].message == 2


@pytest.mark.parametrize(
    "ids, text",
    [
        ("東".encode()[:2], "\ufffd"),  # a character cut off in its middle
        (b"\xff\xfe", "\ufffd\ufffd"),
        ("🙂".encode()[:3] + b" ok", "\ufffd ok"),
    ],
)
def test_bytes_that_are_no_text(ids, text):
    """They decode to U+FFFD, which is encoded to other bytes: the recorded ones stay."""
    made = conversation()
    table = byte_table()
    sampled = [made.tokenizer.convert_tokens_to_ids(table[byte]) for byte in ids]
    assert made.tokenizer.decode(sampled) == text
    prompt = made.trajectory.prompt(made.rendered())
    made.sample(prompt, [*sampled, made.tokenizer.eos_token_id])
    made.says("user", "Pardon?")
    assert made.answer("Rain.")[len(prompt) :][: len(sampled)] == sampled
    assert last(made) == ("repaired", "retokenised")
    check_rows(made)


def byte_table() -> dict[int, str]:
    """GPT-2's characters of bytes, by which a byte-level vocabulary names its tokens."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + at) for at, byte in enumerate(others)}


@pytest.mark.parametrize(
    "call",
    [
        CALL + " \n",  # whitespace behind the call
        CALL.replace(": ", ":"),
        CALL.replace(">\n{", ">{").replace("}\n<", "}<"),
        "Let me look." + CALL,
    ],
)
def test_whitespace_around_a_tool_call(call):
    made = conversation(tools=TOOLS)
    made.answer(call)
    made.says("tool", '{"degrees": 21}')
    made.answer("It is 21 degrees.")
    assert last(made) == ("repaired", "whitespace")
    assert closing(made).startswith("\n<|im_start|>user\n<tool_response>\n")
    (row,) = made.trajectory.rows()
    context = [token for token, own in zip(row.completion_ids, row.mask, strict=True) if not own]
    assert made.tokenizer.decode(context) == closing(made)
    check_rows(made)


@pytest.mark.parametrize(
    "template, call",
    [
        ("qwen2_5", '<tool_call>\n{"arguments": {"city": "Paris"}, "name": "get_weather"}\n</tool_call>'),
        ("qwen3", '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Z\\u00fcrich"}}\n</tool_call>'),
        ("llama3_1", '{"parameters": {"city": "Paris"}, "name": "get_weather"}'),
    ],
)
def test_a_tool_call_that_was_parsed_and_written_again(template, call):
    made = conversation(template, tools=TOOLS)
    made.answer(call)
    made.says("tool", "21 degrees")
    made.answer("It is 21 degrees.")
    assert last(made) == ("repaired", "tool_call")
    check_rows(made)


def test_other_arguments_are_rewritten_history():
    made = conversation(tools=TOOLS)
    made.answer(CALL)
    made.messages[-1]["tool_calls"][0]["function"]["arguments"] = {"city": "Zürich"}
    made.says("tool", "8 degrees")
    made.answer("It is 8 degrees.")
    assert last(made) == ("forked", "rewritten")
    check_rows(made)


def test_reasoning_that_the_template_strips():
    """Qwen3's template leaves the reasoning of turns before the last user message out, but not within tool calls."""
    made = conversation("qwen3", tools=TOOLS)
    made.answer(THOUGHT + CALL)
    made.says("tool", "21 degrees")
    made.answer(THOUGHT + "It is 21 degrees.")
    assert last(made) == ("continued", None)
    made.says("user", "And tomorrow?")
    assert "<think>" not in made.tokenizer.decode(made.rendered())
    prompt = made.answer("Rain.")
    assert last(made) == ("repaired", "reasoning")
    assert made.tokenizer.decode(prompt).count("<think>") == 2
    assert [one.message for one in made.trajectory.checks[-1].differences] == [2, 4]
    assert len(made.trajectory.rows()) == 1
    check_rows(made)


def test_stripped_reasoning_forks_where_it_is_not_to_be_repaired():
    made = conversation("qwen3", repair=("retokenised", "whitespace"))
    made.answer(THOUGHT + "The answer is 80235.", letters)
    made.says("user", "And tomorrow?")
    rendered = made.rendered()
    assert made.answer("Rain.") == rendered
    assert last(made) == ("forked", "reasoning")
    first, second = made.trajectory.rows()
    assert (first.turn_ids[0], second.turn_ids[0]) == (0, 1) and second.prompt_ids == rendered
    check_rows(made)


def test_other_reasoning_is_rewritten_history():
    made = conversation("qwen3", tools=TOOLS)
    made.answer(THOUGHT + CALL)
    made.messages[-1]["content"] = "<think>\nAbout Zürich.\n</think>\n\n"
    made.says("tool", "21 degrees")
    made.answer("It is 21 degrees.")
    assert last(made) == ("forked", "rewritten")


def test_an_empty_thought_in_the_generation_prompt():
    """With enable_thinking=False Qwen3's prompt ends in an empty thought that earlier turns are rendered without."""
    made = conversation("qwen3")
    made.kwargs = {"enable_thinking": False}
    made.answer("The answer is 80235.")
    made.says("user", "And tomorrow?")
    made.answer("Rain.")
    assert last(made) == ("repaired", "reasoning")
    assert (
        closing(made) == "\n<|im_start|>user\nAnd tomorrow?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )
    check_rows(made)


# ------------------------------------------------------------------------------------------------- ends of turns


@pytest.mark.parametrize("template", TEMPLATES)
def test_an_answer_cut_off_before_its_end(template):
    """The template ends the turn that the engine did not: its end is context."""
    made = conversation(template)
    made.answer("The answer is 802", letters, end="")
    made.says("user", "Go on.")
    made.answer("80235.")
    assert last(made) == ("repaired", "retokenised")
    assert closing(made).startswith(made.tokenizer.eos_token)
    check_rows(made)


def test_an_engine_that_does_not_report_the_end():
    made = conversation()
    made.answer("The answer is 80235.", end="")
    made.says("user", "And tomorrow?")
    made.answer("Rain.")
    assert last(made) == ("continued", None) and closing(made).startswith("<|im_end|>\n<|im_start|>user")
    check_rows(made)


@pytest.mark.parametrize("template, end", [("llama3_1", "<|eom_id|>"), ("qwen2_5", "<|endoftext|>")])
def test_a_turn_that_ends_with_another_token_than_the_template_writes(template, end):
    ends = [tokenizer(template).convert_tokens_to_ids(one) for one in (end, tokenizer(template).eos_token)]
    made = conversation(template, turn_ends=ends)
    made.answer("The answer is 80235.", end=end)
    made.says("user", "And tomorrow?")
    made.answer("Rain.")
    assert last(made) == ("repaired", "special_tokens")
    assert closing(made).startswith("\n<|im_start|>user" if template == "qwen2_5" else "<|start_header_id|>user")
    check_rows(made)


def test_the_end_of_a_turn_in_plain_tokens():
    """Text that only looks like the end of a turn becomes one when it is encoded again."""
    made = conversation()
    prompt = made.trajectory.prompt(made.rendered())
    plain = [one for letter in "<|im_end|>" for one in made.tokenizer.encode(letter, add_special_tokens=False)]
    ids = [*made.tokenizer.encode("Ends with ", add_special_tokens=False), *plain, made.tokenizer.eos_token_id]
    made.sample(prompt, ids)
    made.messages[-1]["content"] = "Ends with <|im_end|>"
    made.says("user", "And?")
    made.answer("Yes.")
    assert last(made) == ("repaired", "retokenised")
    assert closing(made).startswith("\n<|im_start|>user")
    check_rows(made)


@pytest.mark.parametrize(
    "template, ends",
    [
        ("qwen3", {"<|im_end|>"}),
        ("llama3_1", {"<|eot_id|>"}),
        ("glm4moe", {"<|endoftext|>", "<|user|>", "<|assistant|>"}),  # the next role ends a message
        ("gemma", {"<|endoftext|>", "<end_of_turn>"}),  # refuses a system prompt
        ("gptoss", {"<|endoftext|>", "<|end|>", "<|return|>"}),
    ],
)
def test_turn_ends_are_read_from_the_template(template, ends):
    made = tokenizer(template)
    assert {*made.convert_ids_to_tokens(sorted(turn_ends(made)))} == ends


def test_a_user_message_about_systems_is_no_system_prompt():
    made = tokenizer("cohere")
    trajectory, messages = Trajectory(made, repair=REPAIRABLE), [{"role": "user", "content": "System crashed. Why?"}]
    trajectory.prompt(made.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))
    trajectory.sampled(made.encode("The answer is 80235.<|END_OF_TURN_TOKEN|>"))
    messages[0]["content"] = "System crashed. When?"
    messages += [{"role": "assistant", "content": "The answer is 80235."}, {"role": "user", "content": "And?"}]
    trajectory.prompt(made.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))
    assert trajectory.checks[0].reason == "rewritten"


EVERY = sorted(
    file.stem for file in FOLDER.glob("*.jinja") if not re.search("vl|llava|idefics|smol|training", file.stem)
)
"""TRL's templates for text, but for those made for training, which differ from others in where they strip reasoning."""

BEGINNINGS = {"gptoss": "<|channel|>final<|message|>", "muse_glimmer": " to=user<|message|>"}
"""What a model of these templates samples before its answer."""


@pytest.mark.parametrize("template", EVERY)
@pytest.mark.parametrize("case", ["answer", "reasoning", "edited"])
def test_templates_of_other_models(template, case):
    """Answers are kept, whatever the template makes of them; an edited message is found."""
    made = tokenizer(template)
    trajectory, messages = Trajectory(made), [{"role": "user", "content": "The weather in Paris?"}]

    def rendered() -> list[int]:
        return made.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)

    prompt = trajectory.prompt(rendered())
    # Where reasoning stands in a message of its own, a template that drops it leaves a message out.
    thought = "<think>\nWell.\n</think>\n\n" if case == "reasoning" and template not in BEGINNINGS else ""
    answer = "It is 21 degrees."
    pieces = [BEGINNINGS.get(template, ""), thought, *answer]
    end = min(turn_ends(made) - {made.eos_token_id}, default=made.eos_token_id)
    ids = [*(one for piece in pieces for one in made.encode(piece, add_special_tokens=False)), end]
    trajectory.sampled(ids, [-0.5] * len(ids), prompt_ids=prompt)
    messages += [{"role": "assistant", "content": thought + answer}, {"role": "user", "content": "And tomorrow?"}]
    if case == "edited":
        messages[0]["content"] = "The weather in Rome?"
    following = trajectory.prompt(rendered())
    (check,) = trajectory.checks
    if case == "edited":
        assert (check.action, check.reason) == ("forked", "rewritten") and following == rendered()
        return
    assert check.action == "repaired" and check.reason in ("retokenised", "special_tokens", "reasoning"), check
    assert following[: len(prompt + ids)] == prompt + ids
    behind = made.decode(following[len(prompt + ids) :])
    assert behind.count("And tomorrow?") == 1 and "degrees" not in behind and "Paris" not in behind


def test_an_answer_cut_off_while_it_reasons():
    """The prompt of Qwen3.5 opens the reasoning; its unfinished rest is rendered as the answer."""
    made = conversation("qwen3_5_think")
    made.answer("The sum is 802", end="")
    made.says("user", "Go on.")
    made.answer("</think>80235.")
    assert last(made) == ("repaired", "reasoning")
    assert closing(made) == "<|im_end|>\n<|im_start|>user\nGo on.<|im_end|>\n<|im_start|>assistant\n<think>\n"
    check_rows(made)


# ---------------------------------------------------------------------------------- what is not repaired by default


def edited_system(made: Conversation) -> None:
    made.messages[0]["content"] = "Be brief. Today is Monday."


def new_date(made: Conversation) -> None:
    made.kwargs = {"date_string": "27 Jul 2024"}


def dropped_system(made: Conversation) -> None:
    del made.messages[0]


def edited_user(made: Conversation) -> None:
    made.messages[1]["content"] = "What is 1 + 1?"


def edited_answer(made: Conversation) -> None:
    made.messages[2]["content"] = "The answer is 2."


def summary(made: Conversation) -> None:
    made.messages[1:3] = [{"role": "user", "content": "A sum was asked for and answered."}]


def oldest_dropped(made: Conversation) -> None:
    del made.messages[1:3]


CHANGES = {
    edited_system: "system",
    dropped_system: "system",
    edited_user: "rewritten",
    edited_answer: "rewritten",
    summary: "rewritten",
    oldest_dropped: "truncated",
}


def two_turns(template: str, **settings) -> Conversation:
    made = conversation(template, **settings)
    made.answer("The answer is 80235.")
    made.says("user", "And tomorrow?")
    made.answer("Rain.")
    made.says("user", "Where?")
    return made


@pytest.mark.parametrize(
    "template, change",
    [
        (template, change)
        for template in ("qwen3", "llama3_1")
        for change in CHANGES
        if (template, change) != ("llama3_1", dropped_system)  # this template always writes a system prompt
    ],
)
@pytest.mark.parametrize("otherwise", ["fork", "mask", "raise"])
def test_a_changed_conversation_is_not_repaired(template, change, otherwise):
    reason = CHANGES[change]
    made = two_turns(template, otherwise=otherwise)
    change(made)
    rendered = made.rendered()
    if otherwise == "raise":
        with pytest.raises(ValueError, match=f"does not continue what was recorded, {REASONS[reason]}; turn 2: "):
            made.trajectory.prompt(rendered)
        return
    assert made.answer("In Zürich.") == rendered
    assert last(made) == ("forked" if otherwise == "fork" else "masked", reason)
    check_rows(made)
    rows = made.trajectory.rows()
    assert len(rows) == (2 if otherwise == "fork" else 1)
    assert rows[-1].prompt_ids + rows[-1].completion_ids == rendered + made.sent[-1].ids


@pytest.mark.parametrize(
    "template, change", [("qwen3", edited_system), ("qwen3", dropped_system), ("llama3_1", new_date)]
)
def test_a_system_prompt_is_repaired_on_demand(template, change):
    made = two_turns(template, repair=REPAIRABLE)
    change(made)
    prompt = made.answer("In Zürich.")
    assert last(made) == ("repaired", "system")
    assert prompt[: len(made.sent[1].prompt)] == made.sent[1].prompt
    assert closing(made).count("user") == 1
    check_rows(made)


def test_a_system_prompt_that_appears():
    made = conversation("qwen3", system=None, repair=REPAIRABLE)
    made.answer("The answer is 80235.")
    made.messages.insert(0, {"role": "system", "content": "Be brief."})
    made.says("user", "And tomorrow?")
    assert "Be brief" not in made.tokenizer.decode(made.answer("Rain."))
    assert last(made) == ("repaired", "system") and closing(made).startswith("\n<|im_start|>user\nAnd tomorrow?")


def test_a_prompt_cut_off_on_the_left():
    made = two_turns("qwen3")
    short = made.rendered()[25:]
    assert made.trajectory.prompt(short) == short
    assert last(made) == ("forked", "truncated")


def test_an_answer_that_is_discarded():
    """The same prompt once more: the answer that was thrown away is a row of its own, and trained on."""
    made = conversation("qwen3")
    made.answer("The answer is 80235.")
    del made.messages[-1]
    assert made.answer("80235.") == made.sent[0].prompt
    assert last(made) == ("forked", "truncated") and len(made.trajectory.rows()) == 2
    check_rows(made)


def test_an_answer_that_is_to_be_continued():
    made = conversation("qwen2_5")
    prompt = made.answer("The answer is 80", letters, end="")
    rendered = made.tokenizer.apply_chat_template(made.messages, continue_final_message=True, return_dict=False)
    assert rendered != prompt + made.sent[0].ids
    assert made.trajectory.prompt(rendered) == prompt + made.sent[0].ids
    assert last(made) == ("repaired", "retokenised")


def test_masked_keeps_what_stands_before_the_change():
    made = two_turns("qwen2_5", otherwise="mask")
    made.messages[3]["content"] = "And the day after tomorrow?"
    made.answer("In Zürich.")
    assert last(made) == ("masked", "rewritten")
    (row,) = made.trajectory.rows()
    assert {turn for turn, own in zip(row.turn_ids, row.mask, strict=True) if own} == {0, 2}
    assert made.trajectory.masked_tokens == len(made.sent[1].ids)
    check_rows(made)


def test_the_gravest_reason_that_is_not_repaired_counts():
    made = conversation("qwen3", repair=("reasoning",))
    made.answer(THOUGHT + "The answer is 80235.")
    made.says("user", "And tomorrow?")
    made.answer("It will rain.", letters)
    made.says("user", "Where?")
    made.answer("In Zürich.")
    edited_user(made)
    made.says("user", "Why?")
    made.answer("No idea.")
    assert [(check.action, check.reason) for check in made.trajectory.checks] == [
        ("repaired", "reasoning"),
        ("forked", "retokenised"),
        ("forked", "rewritten"),
    ]
    check_rows(made)


# --------------------------------------------------------------------------------------- random conversations


@pytest.mark.parametrize("seed", range(60))
def test_what_is_in_the_loss_is_what_the_engine_saw_and_sampled(seed):
    """Whatever a loop does to its messages: check_rows looks at every token of every row."""
    draw = random.Random(seed)
    template = draw.choice(TEMPLATES)
    repair = draw.sample(REPAIRABLE, draw.randint(0, len(REPAIRABLE)))
    made = conversation(
        template, repair=repair, otherwise=draw.choice(["fork", "mask"]), tools=draw.choice([None, TOOLS])
    )
    words = ["The answer is ", "12345", " 東京", " degrees", "\n\n", "🙂", " tomorrow", '{"a": 1}']
    changes = [edited_system, edited_user, summary, oldest_dropped]
    for _ in range(5):
        text = "".join(draw.choices(words, k=draw.randint(1, 5)))
        text = THOUGHT + text if template == "qwen3" and draw.random() < 0.5 else text
        call = CALL if template != "llama3_1" else '{"name":"get_weather", "parameters": {"city": "Paris"}}'
        asks = draw.random() < 0.4
        text = (text if template != "llama3_1" else "") + call if asks else text
        pieces = in_pieces(draw.choice([1, 3, 1000]))
        made.answer(text, pieces, end=draw.choice([None, None, None, ""]) if not asks else None)
        check_rows(made)
        made.says("tool" if asks else "user", draw.choice(words))
        if len(made.messages) > 5 and draw.random() < 0.3:
            draw.choice(changes)(made)
    for check in made.trajectory.checks:
        assert (check.action == "repaired") == (check.reason in repair)
    counts = metrics([made.trajectory])
    assert counts["offcorr/tokens/checked"] == 4


# -------------------------------------------------------------------------------------------- rows and counters


def test_rows_are_records_and_batches():
    made = conversation("qwen3", tools=TOOLS)
    made.answer(THOUGHT + CALL, letters)
    made.says("tool", "21 degrees")
    made.answer("It is 21 degrees.")
    other = conversation("llama3_1")
    other.answer("80235.")
    rows = made.trajectory.rows() + other.trajectory.rows()
    row = json.loads(json.dumps(rows[0].record()))
    record = Record.of(row | {"logp": [-0.5] * len(row["completion_ids"])}, "row 1")
    np.testing.assert_array_equal(record.mask, rows[0].mask)
    np.testing.assert_array_equal(np.isnan(record.rollout_logp), ~np.array(rows[0].mask))
    tensors = collate(rows, pad_id=1)
    shape = tensors["completion_ids"].shape
    assert shape == (2, max(len(row.completion_ids) for row in rows))
    batch = offcorr.Batch(
        logp=torch.full(shape, -0.1, requires_grad=True),
        advantages=torch.tensor([1.0, -1.0]),
        old_logp=torch.full(shape, -0.1),
        **{name: tensors[name] for name in ("mask", "rollout_logp", "turn_ids")},
    )
    out = offcorr.get("tis")(batch)
    out.loss.backward()
    grad = batch.logp.grad
    assert torch.isfinite(grad).all() and (grad[~tensors["mask"]] == 0).all() and (grad[tensors["mask"]] != 0).all()
    for at, row in enumerate(rows):
        inside = tensors["completion_mask"][at]
        assert tensors["completion_ids"][at][inside].tolist() == row.completion_ids
        assert tensors["prompt_ids"][at][tensors["prompt_mask"][at]].tolist() == row.prompt_ids
        assert tensors["prompt_mask"][at, -1] and tensors["turn_ids"][at][inside].tolist() == row.turn_ids
    with pytest.raises(ValueError, match="rows is empty"):
        collate([])


def test_turns_of_rows():
    made = two_turns("qwen2_5")
    (row,) = made.trajectory.rows()
    second = row.turn_ids.index(1)
    assert row.turn_ids == sorted(row.turn_ids) and set(row.turn_ids) == {0, 1}
    assert row.mask[second - 1] and not row.mask[second], "what stands before an answer counts to its turn"


def test_counts():
    forked, masked = (two_turns("qwen3", otherwise=otherwise) for otherwise in ("fork", "mask"))
    edited_user(forked), edited_system(masked)
    forked.answer("In Zürich."), masked.answer("In Zürich.")
    counts = metrics([forked.trajectory, masked.trajectory])
    assert counts == {
        **metrics([]),
        "offcorr/tokens/checked": 4,
        "offcorr/tokens/continued": 2,
        "offcorr/tokens/forked": 1,
        "offcorr/tokens/masked": 1,
        "offcorr/tokens/masked_tokens": sum(len(sent.ids) for sent in masked.sent[:2]),
        "offcorr/tokens/reason/rewritten": 1,
        "offcorr/tokens/reason/system": 1,
    }


def test_the_output_for_trl():
    kept, forked = two_turns("qwen3"), two_turns("qwen3")
    output = rollout_output([kept.trajectory])
    assert output["env_mask"][0].count(1) == len(kept.sent[0].ids + kept.sent[1].ids)
    assert [logp for logp, own in zip(output["logprobs"][0], output["env_mask"][0], strict=True) if own] == (
        kept.sent[0].logprobs + kept.sent[1].logprobs
    )
    assert not any(logp for logp, own in zip(output["logprobs"][0], output["env_mask"][0], strict=True) if not own)
    edited_user(forked)
    forked.answer("In Zürich.")
    with pytest.raises(ValueError, match=r'trajectory 1 has 2 rows, .* turn 2, rewritten; .*otherwise="mask"'):
        rollout_output([kept.trajectory, forked.trajectory])
    with pytest.raises(ValueError, match="trajectory 0 has 0 rows"):
        rollout_output([Trajectory(tokenizer("qwen3"))])


# ----------------------------------------------------------------------------------------------- other loops


def test_a_loop_that_encodes_only_what_is_new():
    made = conversation()
    first = made.answer("The answer is 80235.", letters)
    new = made.tokenizer.encode("\n<|im_start|>user\nSure?<|im_end|>\n", add_special_tokens=False)
    turn = made.tokenizer.encode("<|im_start|>assistant\n", add_special_tokens=False)
    made.trajectory.append(np.array(new))
    prompt = made.trajectory.append(torch.tensor(turn))
    assert prompt == first + made.sent[0].ids + new + turn
    made.sample(prompt, made.tokenizer.encode("Yes.<|im_end|>", add_special_tokens=False))
    check_rows(made)
    assert made.trajectory.checks == [] and set(made.trajectory.rows()[0].turn_ids) == {0, 1}


def test_an_answer_in_parts():
    """An engine that stops and goes on, with other weights for instance, stays in the same turn."""
    made = conversation()
    prompt = made.trajectory.prompt(made.rendered())
    made.trajectory.sampled([40, 41], [-1.0, -2.0])
    made.trajectory.sampled([42], [-3.0], prompt_ids=[*prompt, 40, 41])
    (row,) = made.trajectory.rows()
    assert (row.completion_ids, row.rollout_logp, row.turn_ids) == ([40, 41, 42], [-1.0, -2.0, -3.0], [0, 0, 0])


def test_a_prompt_without_an_answer():
    """The last prompt may be replaced until something was sampled from it, and is no part of the rows."""
    made = two_turns("qwen2_5")
    before = made.trajectory.rows()[0].completion_ids
    made.trajectory.prompt(made.rendered())
    made.trajectory.sampled([], [])
    made.messages[-1]["content"] = "In which city?"
    prompt = made.rendered()
    assert made.trajectory.rows()[0].completion_ids == before
    assert made.answer("In Zürich.") == prompt and last(made) == ("continued", None)
    assert made.trajectory.rows()[0].turn_ids[-1] == 2


def test_log_probs_that_were_not_reported():
    made = conversation()
    made.trajectory.prompt(made.rendered())
    made.trajectory.sampled([40, 41])
    made.trajectory.sampled([42, 43], [None, -1.0])
    (row,) = made.trajectory.rows()
    assert row.mask == [True] * 4 and [math.isnan(logp) for logp in row.rollout_logp] == [True, True, True, False]


# ---------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"repair": ("rewritten",)}, "repair has 'rewritten'"),
        ({"repair": "whitespaces"}, "repair has 'whitespaces', did you mean 'whitespace'"),
        ({"otherwise": "forks"}, "otherwise is 'forks', did you mean 'fork'"),
        ({"turn_ends": []}, "turn_ends is empty"),
    ],
)
def test_settings_that_do_not_exist(settings, message):
    with pytest.raises(ValueError, match=message):
        Trajectory(tokenizer("qwen3"), **settings)


def test_a_tokenizer_without_an_end_of_turn():
    class Bare:
        eos_token_id = None

    with pytest.raises(ValueError, match="expected turn_ends="):
        Trajectory(Bare())


def test_what_is_no_list_of_token_ids():
    made = conversation()
    encoded = made.tokenizer.apply_chat_template(made.messages, return_dict=True)
    for given, message in [
        (encoded, "ids is a BatchEncoding, .*return_dict=False"),
        ("text", "ids is a str, expected a list of token ids"),
        ([[1, 2]], r"ids\[0\] is \[1, 2\], expected a token id"),
        ([1, 2.0], r"ids\[1\] is 2.0"),
    ]:
        with pytest.raises(TypeError, match=message):
            made.trajectory.prompt(given)


def test_what_cannot_have_been_sampled():
    made = conversation()
    with pytest.raises(ValueError, match=r"sampled\(\) came before any prompt\(\)"):
        made.trajectory.sampled([1], [-1.0])
    prompt = made.trajectory.prompt(made.rendered())
    with pytest.raises(ValueError, match="logprobs has 1 values, expected 2, one per token of ids"):
        made.trajectory.sampled([1, 2], [-1.0])
    with pytest.raises(TypeError, match=r"logprobs\[1\] is {7: -2.0}, expected a number"):
        made.trajectory.sampled([1, 2], [-1.0, {7: -2.0}])
    with pytest.raises(ValueError, match="turn 0: the engine saw a prompt of .* expected it to be sent as it is"):
        made.trajectory.sampled([1], [-1.0], prompt_ids=[*prompt, 5])
    assert made.trajectory.rows() == [] and repr(made.trajectory) == "Trajectory(1 turns, 0 rows)"


def test_the_reasons_are_ordered_and_explained():
    assert [reason for reason in REASONS if reason in REPAIRABLE] == list(REPAIRABLE)
    assert set(tokens.__all__) <= set(dir(tokens))
