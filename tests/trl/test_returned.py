"""What a ``rollout_func`` may return, and what is refused of it: by key and place, before a loss is computed."""

from __future__ import annotations

import math
import warnings
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from offcorr.rollout import OffPolicy
from offcorr.stages.checks import warn_again
from offcorr.trl import returned
from offcorr.trl.prompts import check_prompts
from tests.trl.recording import Recording


@pytest.fixture
def train(make_trainer, replay):
    """``train(change, **settings)``: one step on the recorded completions, with ``change(output)`` made to them."""

    def run(change, *keys, **settings):
        inner = replay(*(keys or ("old_logp", "env_mask", "rollout_version")))

        def rollout_func(prompts, trainer):
            output = {name: [*rows] for name, rows in inner(prompts, trainer).items()}
            return change(output) or output

        settings = {"loss_type": "minpro", "max_steps": 1} | settings
        trainer = make_trainer(Recording, rollout_func=rollout_func, **settings)
        trainer.train()
        return trainer

    return run


def put(name, value, *place):
    """A change: ``value`` for what lies at ``place`` of a key: [i], [i][t], or all of it."""

    def change(output):
        if not place:
            output[name] = value
        elif len(place) == 1:
            output[name][place[0]] = value
        else:
            output[name][place[0]] = [*output[name][place[0]]]
            output[name][place[0]][place[1]] = value

    return change


def everywhere(name, value):
    """A change: ``value`` for every token of a key."""

    def change(output):
        output[name] = [[value] * len(ids) for ids in output["completion_ids"]]

    return change


def one_row_less(name):
    def change(output):
        output[name].pop()

    return change


def padded(log_prob):
    """A change: each row goes on with its end and three tokens of padding, as of an engine whose rows are not cut."""

    def change(output):
        added = {"completion_ids": [1, 0, 0, 0], "logprobs": [-0.5, *[log_prob] * 3], "old_logp": [-0.5, *[-9.0] * 3]}
        for name, values in {**added, "env_mask": [1] * 4}.items():
            output[name] = [[*row, *values] for row in output[name]]

    return change


LOG_PROB = "expected a log-prob, which is at most 0"
FINITE = "expected a finite log-prob"

REFUSED = {
    "mask of 2": (put("env_mask", 2, 0, 0), r"env_mask\[0\]\[0\] is 2, expected 0 or 1"),
    "mask of .5": (everywhere("env_mask", 0.5), r"env_mask\[0\]\[0\] is 0.5, expected 0 or 1"),
    "mask of -1": (put("env_mask", -1, 3, 1), r"env_mask\[3\]\[1\] is -1, expected 0 or 1"),
    "mask of NaN": (put("env_mask", math.nan, 1, 0), r"env_mask\[1\]\[0\] is nan, expected 0 or 1"),
    "mask of None": (put("env_mask", None, 1, 0), r"env_mask\[1\]\[0\] is None, expected 0 or 1"),
    "infinite": (put("logprobs", math.inf, 2, 0), rf"logprobs\[2\]\[0\] is inf, {FINITE}, or None or NaN"),
    "minus infinity": (put("logprobs", -math.inf, 2, 0), rf"logprobs\[2\]\[0\] is -inf, {FINITE}"),
    "above 0": (put("logprobs", 0.02, 1, 0), rf"logprobs\[1\]\[0\] is 0.02, {LOG_PROB}"),
    "old above 0": (put("old_logp", 0.5, 1, 0), rf"old_logp\[1\]\[0\] is 0.5, {LOG_PROB}"),
    "old of NaN": (everywhere("old_logp", math.nan), rf"old_logp\[0\]\[0\] is nan, {FINITE}, .* env_mask 0"),
    "old of None": (put("old_logp", None, 5, 0), rf"old_logp\[5\]\[0\] is None, {FINITE}"),
    "old infinite": (put("old_logp", -math.inf, 5, 0), rf"old_logp\[5\]\[0\] is -inf, {FINITE}"),
    "version ahead": (put("rollout_version", 99, 4), r"rollout_version\[4\] is 99, .* from 0 to 0, the trainer's step"),
    "version below 0": (put("rollout_version", -5, 4), r"rollout_version\[4\] is -5, expected a whole number"),
    "half a version": (put("rollout_version", 0.5, 4), r"rollout_version\[4\] is 0.5, expected a whole number"),
    "version in text": (put("rollout_version", "new", 0), r"rollout_version\[0\] is 'new', expected a whole number"),
    "no version": (put("rollout_version", None, 0), r"rollout_version\[0\] is None, expected a whole number"),
    "one version": (put("rollout_version", 0), "rollout_version is 0, expected a list .* each of the 8 completions"),
    "version of a token": (
        lambda output: {**output, "rollout_version": [[0] * (len(ids) - 1) + [3] for ids in output["completion_ids"]]},
        r"rollout_version\[0\]\[\d\] is 3, expected a whole number",
    ),
    "origin of 7": (put("origin", [7] * 8), r"origin\[0\] is 7, expected an index .*ORIGINS: 0 for 'fresh', 1 for 'r"),
    "origin of -1": (put("origin", [0] * 7 + [-1]), r"origin\[7\] is -1, expected an index"),
    "origin in text": (put("origin", ["fresh"] * 8), r"origin\[0\] is 'fresh', expected an index"),
    "one origin": (put("origin", 1), "origin is 1, expected a list with one entry for each of the 8 completions"),
    "one reward": (put("recorded_rewards", 1.0), "recorded_rewards is 1.0, expected a list with one entry"),
    "plain rewards": (put("recorded_rewards", [1.0] * 8), r"recorded_rewards\[0\] is 1.0, expected None or a list"),
    "reward in text": (put("recorded_rewards", [["a"]] * 8), r"recorded_rewards\[0\]\[0\] is 'a', expected a number"),
    "padding": (padded(0.0), r"completion_ids\[0\] ends with padding, 3 of \d+ tokens \(id 0\) behind its end"),
    "unscored padding": (padded(None), r"completion_ids\[0\] ends with padding, 3 of \d+ tokens \(id 0\)"),
    "one log-prob": (put("logprobs", -1.0), "logprobs is -1.0, expected a list with one entry"),
    "foreign token": (put("completion_ids", 99, 3, 1), r"completion_ids\[3\]\[1\] is 99, .* token id from 0 to 22, .*"),
    "negative token": (put("completion_ids", -1, 3, 1), r"completion_ids\[3\]\[1\] is -1, expected a token id"),
    "token in text": (put("completion_ids", "a", 3, 1), r"completion_ids\[3\]\[1\] is 'a', expected a token id"),
    "foreign prompt": (put("prompt_ids", 99, 3, 1), r"prompt_ids\[3\]\[1\] is 99, expected a token id"),
    "text": (put("completion_ids", "1+2=3", 6), r"\[6\] is '1\+2=3', expected a list of token ids, not text"),
    "nothing said": (put("completion_ids", [], 6), r"completion_ids\[6\] is empty, expected at least one token id"),
    "no completions": (put("completion_ids", None), "completion_ids is None, expected a list of token ids for each"),
    "prompts": (one_row_less("prompt_ids"), "returned prompt_ids for 7 completions, expected 8, one for each of the p"),
    "completions": (one_row_less("completion_ids"), "returned completion_ids for 7 completions, expected 8, one for"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(train, name):
    change, message = REFUSED[name]
    with pytest.raises(ValueError, match=message) as caught:
        train(change)
    assert str(caught.value).startswith("rollout_func") and caught.traceback[-1].path.name == "returned.py"


@pytest.mark.parametrize(
    ("ids", "logprobs", "mask", "refused"),
    [
        ([5, 1, 0, 0], None, [1, 1, 1, 1], 2),  # padding with an id of its own
        ([5, 1, 0, 0], None, [1, 1, 0, 0], 0),  # which the loss leaves out
        ([5, 0, 0, 0], None, [1, 1, 1, 1], 0),  # no end before it
        ([5, 1, 0, 0], [-1.0, -0.1, -2.0, -3.0], [1, 1, 1, 1], 0),  # sampled tokens of that id
        ([5, 1, 1, 1], [-1.0, -0.1, 0.0, 0.0], [1, 1, 1, 1], 2),  # the id of the end
        ([5, 1, 1, 1], None, [1, 1, 1, 1], 0),  # which may have been sampled
        ([5, 4, 1], [-1.0, -0.1, 0.0], [1, 1, 1], 0),
    ],
)
def test_padding_is_told_from_sampled_tokens(ids, logprobs, mask, refused):
    """``1`` ends a sequence; a row whose padding is ``1``, too, has a tokenizer that pads with it."""
    padding = 0 if 0 in ids else 1
    trainer = SimpleNamespace(_tokenizer=SimpleNamespace(pad_token_id=padding, eos_token_id=1))
    output = {"completion_ids": [torch.tensor(ids)], "logprobs": None if logprobs is None else [logprobs]}
    context = pytest.raises(ValueError, match=f"ends with padding, {refused} of") if refused else nullcontext()
    with context:
        returned._check_padding(output, [torch.tensor(mask).bool()], trainer)


@pytest.mark.parametrize("unknown", [math.nan, None])
def test_no_log_prob_of_the_engine_at_all(train, unknown):
    """A loss that compares with the engine would not correct anything."""
    with pytest.raises(
        ValueError, match=r"logprobs that are NaN or None for all \d+ tokens .*loss 'tis' compares with"
    ):
        train(everywhere("logprobs", unknown), loss_type="tis")


@pytest.mark.parametrize("settings", [{}, {"anchor": "rollout"}, {"loss_type": "near_overlap"}])
@pytest.mark.parametrize("unknown", [math.nan, None])
def test_no_log_prob_of_an_engine_that_the_ratios_are_taken_from(train, settings, unknown):
    """Every ratio would be 1."""
    with pytest.raises(ValueError, match=r"NaN or None for all \d+ tokens .* ratios of loss .* are taken from them"):
        train(everywhere("logprobs", unknown), "env_mask", **settings)
    train(everywhere("logprobs", unknown), "env_mask", loss_type="reinforce")


def test_completions_longer_than_the_configuration_says_are_named(train):
    warn_again()
    with pytest.warns(RuntimeWarning, match="completions of up to 8 tokens, and max_completion_length is 3: they are"):
        train(lambda output: None, "old_logp", max_completion_length=3)
    warn_again()
    with warnings.catch_warnings():  # a tool wrote the rest
        warnings.filterwarnings("error", message=".*completions of up to")
        train(lambda output: None, max_completion_length=6)


def test_what_is_not_read_is_not_refused(train):
    """A single token without the engine's log-prob; old_logp that nobody reads, or that is masked."""
    train(put("logprobs", None, 0, 0), loss_type="tis")
    train(everywhere("old_logp", math.nan), loss_type="minpro", anchor="rollout")
    masked = train(put("old_logp", math.nan, 0, 1))  # env_mask is 0 there
    assert all(batch.old_logp[batch.mask].isfinite().all() for _, batch in masked.batches)
    demonstrations = train(lambda output: {**everywhere_nan(output), "origin": [2] * 8}, loss_type="tis", monitor="off")
    assert all(batch.old_logp.isfinite().all() for _, batch in demonstrations.batches)


def everywhere_nan(output):
    unknown = [[math.nan] * len(ids) for ids in output["completion_ids"]]
    return {**output, "old_logp": unknown, "logprobs": unknown}


def test_a_batch_without_a_token_to_train_on(train, caplog):
    """It has loss 0, and the run's first line does not put that on the engine."""
    warn_again()
    with pytest.warns(
        RuntimeWarning, match="env_mask is 0 for every token of 8 completions: none is trained on, and their"
    ):
        train(everywhere("env_mask", 0))
    (said,) = [record.getMessage() for record in caplog.records if record.name == "offcorr"]
    assert said.endswith("no token is trained on: the mask is 0 everywhere") and "reported no log-probs" not in said


def test_a_rollout_func_is_callable(make_trainer):
    with pytest.raises(TypeError, match="rollout_func is 'offpolicy', expected a function of prompts and trainer, or"):
        make_trainer(loss_type="minpro", rollout_func="offpolicy")


class Method:
    def sample(self, prompts, trainer):
        return {}

    def __call__(self, prompts):
        return {}


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda prompts: {}, r"<lambda>\(prompts\)"),
        (lambda prompts, trainer, model: {}, r"<lambda>\(prompts, trainer, model\)"),
        (Method(), r"Method\(prompts\)"),
    ],
)
def test_a_rollout_func_takes_prompts_and_trainer(make_trainer, tmp_path, function, said):
    with pytest.raises(
        TypeError, match=f"rollout_func is {said}, expected a function of two arguments, prompts and tr"
    ):
        make_trainer(model=str(tmp_path / "no model here"), rollout_func=function)
    for fine in (lambda prompts, trainer, seed=0: {}, lambda *both: {}, Method().sample):
        make_trainer(rollout_func=fine)


@pytest.mark.parametrize(
    "rows",
    [
        lambda ids: [1] * len(ids),
        lambda ids: [True] * len(ids),
        lambda ids: torch.ones(len(ids)),
        lambda ids: torch.ones(len(ids)).bool(),
    ],
)
def test_masks_of_any_kind(train, rows):
    train(lambda output: {**output, "env_mask": [rows(ids) for ids in output["completion_ids"]]})


@pytest.mark.parametrize("name", ["prompt_ids", "completion_ids", "logprobs"])
def test_a_key_that_is_missing_is_named(train, name):
    hint = (
        r"\. A sampler that reports no log-probs returns logprobs=None$" if name == "logprobs" else "rollout_version$"
    )
    with pytest.raises(ValueError, match=rf"without {name}, expected prompt_ids, completion_ids and logprobs.*{hint}"):
        train(lambda output: {key: rows for key, rows in output.items() if key != name})


def test_a_sampler_that_returns_no_logprobs(make_trainer, replay):
    def rollout_func(prompts, trainer):
        return {**replay()(prompts, trainer), "logprobs": None}

    make_trainer(loss_type="minpro", rollout_func=rollout_func, max_steps=1).train()
    with pytest.raises(ValueError, match="returned logprobs=None, but loss 'tis' compares with the engine's"):
        make_trainer(loss_type="tis", rollout_func=rollout_func).train()


ROWS = r"for each token of completion_ids\[1\]"


@pytest.mark.parametrize("loss_type", ["minpro", "dapo"])
@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("logprobs", lambda row: row[1:], r"returned logprobs\[1\] of . numbers, expected .: one number " + ROWS),
        ("old_logp", lambda row: row[1:], r"returned old_logp\[1\] of . numbers, expected .: one number " + ROWS),
        ("old_logp", lambda row: [*row, -1.0], r"returned old_logp\[1\] of . numbers, expected .: one number " + ROWS),
        ("old_logp", lambda row: -1.0, r"returned old_logp\[1\] of -1.0, expected .: one number " + ROWS),
        ("env_mask", lambda row: row[1:], r"returned env_mask\[1\] of . numbers, expected .: one number " + ROWS),
        ("logprobs", lambda row: [[x] for x in row], r"logprobs\[1\]\[0\] = \[-.*\], expected a number; of several"),
        ("logprobs", lambda row: ["a" for x in row], r"logprobs\[1\]\[0\] = 'a', expected a number"),
        ("logprobs", torch.tensor, None),
        ("old_logp", torch.tensor, None),
    ],
)
def test_every_token_has_its_number(make_trainer, replay, name, change, message, loss_type):
    """A row that is too short would be padded with zeros, which are log-probs of certainty."""
    inner = replay("old_logp", "env_mask")

    def rollout_func(prompts, trainer):
        output = inner(prompts, trainer)
        output[name][1:] = map(change, output[name][1:])
        return output

    trainer = make_trainer(Recording, loss_type=loss_type, rollout_func=rollout_func, max_steps=1)
    if message is None:
        trainer.train()
        column = {"logprobs": "rollout_logp"}.get(name, name)
        assert all(getattr(batch, column)[batch.mask].max() < 0 for _, batch in trainer.batches)
        return
    with pytest.raises(ValueError, match=message):
        trainer.train()


@pytest.mark.parametrize(("returned", "said"), [(None, "None"), ([1], "a list")])
@pytest.mark.parametrize("loss_type", ["minpro", "dapo"])
def test_a_rollout_func_returns_a_dict(make_trainer, returned, said, loss_type):
    trainer = make_trainer(loss_type=loss_type, rollout_func=lambda prompts, trainer: returned, max_steps=1)
    with pytest.raises(TypeError, match=f"rollout_func returned {said}, expected a dict with prompt_ids, completion"):
        trainer.train()


def test_a_rollout_func_is_no_class(make_trainer):
    with pytest.raises(TypeError, match=r"rollout_func is the class OffPolicy, expected an instance: OffPolicy\(...\)"):
        make_trainer(loss_type="minpro", rollout_func=OffPolicy)


@pytest.mark.parametrize(
    ("key", "known"),
    [
        ("old_logps", "did you mean 'old_logp'"),
        ("mask", "did you mean 'env_mask'"),
        ("completion_mask", "did you mean 'env_mask'"),
        ("rollout_logp", "did you mean 'logprobs'"),
        ("image", None),
        ("answer", None),
    ],
)
def test_a_misspelt_key_of_a_rollout_func_is_named(make_trainer, replay, key, known):
    def rollout_func(prompts, trainer):
        output = replay()(prompts, trainer)
        return {**output, key: [[1] * len(ids) for ids in output["completion_ids"]]}

    warn_again()
    trainer = make_trainer(loss_type="minpro", anchor="rollout", rollout_func=rollout_func, max_steps=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.train()
    said = [str(w.message) for w in caught if "rollout_func returned the key" in str(w.message)]
    assert len(said) == (known is not None) and all(f"{key!r}" in message and known in message for message in said)


def test_every_completion_has_its_row(make_trainer, replay):
    def rollout_func(prompts, trainer):
        output = replay("rollout_version")(prompts, trainer)
        return {**output, "rollout_version": output["rollout_version"][1:]}

    with pytest.raises(ValueError, match="returned rollout_version for 7 completions, expected 8, those of completion"):
        make_trainer(loss_type="minpro", rollout_func=rollout_func).train()


def test_a_recorded_reward_of_nan_is_refused_and_none_is_not(train):
    train(lambda output: {**output, "recorded_rewards": [[float(i)] for i in range(8)]})
    with pytest.raises(ValueError, match=r"recorded_rewards\[3\]\[0\] is nan, expected a number, or None for a func"):
        train(lambda output: {**output, "recorded_rewards": [[math.nan if i == 3 else 1.0] for i in range(8)]})


# The prompts


def other_prompts(change):
    """A change of the prompts' ids, ``change(rows)``."""

    def of_output(output):
        output["prompt_ids"] = change([[*row] for row in output["prompt_ids"]])

    return of_output


PROMPTS = {
    "truncated": (lambda rows: [row[:-1] for row in rows], r"\(3 tokens\), expected .* these are the first 3\."),
    "cut on the left": (lambda rows: [row[2:] for row in rows], r"\(2 tokens\), expected .* these are the last 2\."),
    "another": (lambda rows: [*rows[:-1], [5, 6, 7]], r" is '3 4 5' \(3 tokens\), expected '"),
}


@pytest.mark.parametrize("name", PROMPTS)
def test_prompt_ids_that_are_not_the_prompts_are_a_warning_once(train, name):
    change, message = PROMPTS[name]
    with pytest.warns(UserWarning, match=rf"rollout_func: prompt.*{message}") as caught:
        train(other_prompts(change), max_steps=2)
    assert len([1 for w in caught if "rollout_func: prompt_ids" in str(w.message)]) == 1


def test_the_ids_of_another_prompt_are_refused(train):
    with pytest.raises(
        ValueError, match=r"prompt_ids\[0\] is .* which is the prompt of row 4, expected .* in the order"
    ):
        train(other_prompts(lambda rows: rows[4:] + rows[:4]))


@pytest.mark.parametrize(
    "change",
    [
        lambda rows: rows,
        lambda rows: [[2, 3, *row] for row in rows],  # a system prompt
        lambda rows: [[*row, 12, 5, 5] for row in rows],  # a second turn
        lambda rows: [torch.tensor(row) for row in rows],
    ],
)
def test_ids_that_hold_the_prompt_are_in_order(train, change):
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="rollout_func: prompt_ids")
        train(other_prompts(change))


def test_messages_in_a_template_of_ones_own_are_in_order(tokenizer):
    """The text of the last message is among the tokens; a prompt cut to max_prompt_length is, too."""
    trainer = SimpleNamespace(
        processing_class=tokenizer,
        args=SimpleNamespace(max_prompt_length=2),
        chat_template="{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}={% endif %}",
    )
    prompts = [[{"role": "user", "content": "1"}], [{"role": "user", "content": "2"}]]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_prompts({"prompt_ids": [[13, 3], [14, 4, 13]]}, prompts, trainer)
        check_prompts({"prompt_ids": [tokenizer("+3=")["input_ids"][-2:]] * 2}, ["12+3=", "11+3="], trainer)
        check_prompts({"prompt_ids": [[5], [6]]}, [None, None], trainer)  # of which the tokenizer makes nothing
    with pytest.warns(UserWarning, match=r"prompt_ids\[0\] is '1' \(1 tokens\), expected '1 =' \(2 tokens\)"):
        check_prompts({"prompt_ids": [[3], [4, 14]]}, prompts, trainer)
