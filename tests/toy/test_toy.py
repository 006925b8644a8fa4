"""Tests of the toy task, the warm start of the toy model, and the cache folder that holds it."""

import dataclasses
import multiprocessing
import os
import re
import time
from pathlib import Path
from random import Random
from threading import Thread

import pytest
import torch

from offcorr import toy
from offcorr.toy import cache, task, warm_start

TINY = toy.Recipe(hidden_size=16, intermediate_size=24, heads=2, steps=3, batch_size=4, pool_size=16)


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("OFFCORR_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


# ---- task


def test_dataset_has_the_size_and_columns_and_follows_the_seed():
    first, again, other = (toy.dataset(50, seed) for seed in (3, 3, 4))
    assert first.column_names == ["prompt", "answer"] and len(first) == 50
    assert first.to_list() == again.to_list()
    assert toy.dataset(20, 3)["prompt"] == first["prompt"][:20]
    # with reasoning-gym's own seeds, nearby seeds share items
    assert not set(first["prompt"]) & set(other["prompt"])


def test_answers_are_the_sums_in_the_prompts():
    for row in toy.dataset(300, seed=1):
        assert re.fullmatch(r"([a-h][+-]\d){4,8}=", row["prompt"])
        signed = re.findall(r"[+-]\d", row["prompt"])
        assert int(row["answer"]) == sum(map(int, signed))
        assert len(row["answer"]) == 2 and len(row["prompt"]) <= toy.MAX_PROMPT


def test_train_and_test_never_share_a_prompt():
    train = {p for seed in range(2) for p in toy.dataset(800, seed, "train")["prompt"]}
    test = {p for seed in range(2) for p in toy.dataset(800, seed, "test")["prompt"]}
    assert len(train) > 1500 and len(test) > 1500
    assert not train & test
    assert all(task.split_of(prompt) == "test" for prompt in test)


def test_unknown_split_is_refused():
    with pytest.raises(ValueError, match="'validation'.*'train' or 'test'"):
        toy.dataset(1, split="validation")


def test_faultless_working_scores_one_and_the_filler_changes_nothing():
    rng = Random(0)
    for terms in task.items(200, seed=0, split="train"):
        answer = f"{sum(sign * digit for sign, digit in terms):02d}"
        plain = task.render_working(terms, rng)
        filled = task.render_working(terms, rng, filler_rate=0.5)
        assert filled.replace(".", "") == plain
        assert toy.reward([plain, filled], [answer, answer]) == [1.0, 1.0]


def test_working_of_the_documented_example():
    terms = [(1, 3), (1, 9), (-1, 4)]
    assert task.render_prompt(terms) == "a+3b+9c-4="
    assert task.render_working(terms, Random(0)) == "a+330b+921c-480"


def test_a_mistake_affects_later_sums_and_the_reward():
    rng, right = Random(0), 0
    drawn = list(task.items(2000, seed=0, split="train"))
    for terms in drawn:
        text = task.render_working(terms, rng, error_rate=0.12)
        sums = [int(high + low) for low, high in re.findall(r"[a-h][+-]\d(\d)(\d)", text)]
        before, slips = 0, 0
        for (sign, digit), after in zip(terms, sums, strict=True):
            wanted = (before + sign * digit) % 100
            assert after // 10 == wanted // 10
            slips += after != wanted
            before = after
        answer = f"{sum(sign * digit for sign, digit in terms):02d}"
        got = toy.reward([text], [answer])[0]
        assert got == (sums[-1] == int(answer))
        assert slips > 0 or got == 1.0
        right += got
    share = sum(0.88 ** len(terms) for terms in drawn) / len(drawn)
    assert share - 0.03 < right / len(drawn) < share + 0.06  # two mistakes sometimes cancel


@pytest.mark.parametrize(
    ("completion", "score"),
    [
        ("a+321", 1.0),
        ("a+321..", 1.0),
        ("21", 1.0),
        ("12", 0.0),
        ("a+3", 0.0),
        ("a+32.1", 0.0),
        ("a+321b", 0.0),
        ("", 0.0),
        ("...", 0.0),
    ],
)
def test_reward_reads_the_last_two_digits_low_digit_first(completion, score):
    assert toy.reward([completion], ["12"]) == [score]


def test_reward_gives_no_partial_credit():
    from reasoning_gym.arithmetic.chain_sum import ChainSumConfig, ChainSumDataset

    # reasoning-gym gives .5 for "17" where "7" is right
    scorer = ChainSumDataset(ChainSumConfig()).score_answer
    assert scorer("17", {"answer": "7"}) == 0.5
    answers = [f"{number:02d}" for number in range(100)]
    written = [answer[::-1] for answer in answers]
    for text in written:
        scores = toy.reward([text] * 100, answers)
        assert sorted(scores) == [0.0] * 99 + [1.0]


def test_reward_takes_trl_columns_and_refuses_unequal_lengths():
    assert toy.reward(["21"], ["12"], prompts=["a+9b+3="], trainer_state=None) == [1.0]
    with pytest.raises(ValueError):
        toy.reward(["21", "21"], ["12"])


def test_demonstrations_have_the_promised_length():
    rng = Random(1)
    lengths = [
        len(task.render_working(terms, rng, 0.12, 0.25)) + 1 for terms in task.items(1000, seed=1, split="train")
    ]
    assert 20 <= min(lengths) and max(lengths) <= toy.MAX_COMPLETION <= 60
    longest = task.render_working([(1, 1)] * 8, rng, 0.0, filler_rate=1.0)
    assert len(longest) + 1 == toy.MAX_COMPLETION


# ---- model


def test_tokenizer_has_one_token_per_character_and_can_be_saved(tmp_path):
    from transformers import AutoTokenizer

    warm_start.save_tokenizer(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    text = "a+3b+9c-4=a+330b+921.c-480"
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(text) and len(set(ids)) == len(set(text))
    assert tokenizer.decode(ids + [tokenizer.eos_token_id], skip_special_tokens=True) == text
    assert tokenizer.padding_side == "left"
    assert tokenizer("a?")["input_ids"][1] == tokenizer.unk_token_id
    assert len({tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id}) == 3


def test_labels_cover_the_working_and_the_end_token_only():
    ids = warm_start.build_tokenizer().get_vocab()
    input_ids, labels = warm_start.collate([("a+3=", "a+330"), ("a+3b+9=", "a+330b+921")], ids)
    names = {number: text for text, number in ids.items()}
    supervised = [[names[int(t)] for t in row if t != -100] for row in labels]
    assert supervised == [[*"a+330", "<eos>"], [*"a+330b+921", "<eos>"]]
    kept = labels != -100
    assert torch.equal(labels[kept], input_ids[kept])


def test_training_is_reproducible_by_seed_and_does_not_change_global_state():
    torch.manual_seed(5)
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    first = warm_start.train(TINY, seed=0).state_dict()
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == threads
    torch.manual_seed(6)
    again = warm_start.train(TINY, seed=0).state_dict()
    other = warm_start.train(TINY, seed=1).state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)


def test_every_setting_changes_the_cache_key():
    default = toy.Recipe()
    keys = {default.fingerprint()}
    for field in dataclasses.fields(default):
        changed = dataclasses.replace(default, **{field.name: getattr(default, field.name) + 1})
        keys.add(changed.fingerprint())
    assert len(keys) == 1 + len(dataclasses.fields(default))


def test_model_path_is_a_folder_that_transformers_reads(own_cache):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = Path(toy.model_path(0, progress=False, recipe=TINY))
    assert path.parent == own_cache
    model, tokenizer = (kind.from_pretrained(path) for kind in (AutoModelForCausalLM, AutoTokenizer))
    assert type(model).__name__ == "Qwen3ForCausalLM" and model.dtype == torch.float32
    assert model.config.vocab_size == len(tokenizer)
    assert model.config.pad_token_id == tokenizer.pad_token_id
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    trained = warm_start.train(TINY, seed=0).state_dict()
    assert all(torch.equal(trained[name], value) for name, value in model.state_dict().items())


def test_warm_started_model_knows_the_task_and_samples_mistakes():
    """The default model, in the user's own cache, which the demo and the recipes use too."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = toy.model_path(0, progress=False)
    model, tokenizer = (kind.from_pretrained(path) for kind in (AutoModelForCausalLM, AutoTokenizer))
    assert 80_000 < model.num_parameters() < 150_000
    held_out = toy.dataset(512, seed=0, split="test")
    state = torch.get_rng_state()
    model.train()
    sampled = toy.accuracy(model, tokenizer, held_out)
    assert torch.equal(torch.get_rng_state(), state) and model.training
    assert 0.35 < sampled < 0.6
    assert toy.accuracy(model, tokenizer, held_out) == sampled
    others = {toy.accuracy(model, tokenizer, held_out, seed=seed) for seed in (1, 2, 3)}
    assert others != {sampled}  # two seeds may solve as many
    assert toy.accuracy(model, tokenizer, held_out, temperature=0) > 0.9


def test_accuracy_without_examples_is_refused():
    tokenizer = warm_start.build_tokenizer()
    model = warm_start.build_model(TINY, tokenizer, seed=0)
    with pytest.raises(ValueError, match="examples is empty"):
        toy.accuracy(model, tokenizer, [])


@pytest.mark.parametrize("progress", [True, False])
def test_training_says_on_stderr_what_it_does_and_how_long_it_takes(own_cache, progress, capsys):
    toy.model_path(3, progress=progress, recipe=TINY)
    said = capsys.readouterr()
    assert said.out == ""
    line = "training the toy model of seed 3 once, about half a minute on two free cores\n"
    assert said.err == line * progress
    toy.model_path(3, progress=progress, recipe=TINY)
    assert capsys.readouterr().err == ""  # it is there


# ---- cache


def visible(folder: Path) -> list[str]:
    """The names in a cache folder, but for the locks, which stay."""
    return [path.name for path in folder.iterdir() if not path.name.endswith(".lock")]


def write_and_count(folder: Path, calls: list[Path]) -> None:
    calls.append(folder)
    (folder / "weights").write_text("right")
    (folder / "config").write_text("right")


def build(calls):
    return cache.cached_folder("thing", lambda folder: write_and_count(folder, calls))


def test_a_folder_is_built_once(own_cache):
    calls = []
    assert build(calls) == build(calls) == own_cache / "thing"
    assert len(calls) == 1
    assert visible(own_cache) == ["thing"]


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / "weights").write_text("wrong"),
        lambda folder: (folder / "weights").unlink(),
        lambda folder: (folder / cache.MANIFEST).unlink(),
        lambda folder: (folder / cache.MANIFEST).write_text("[]"),
        lambda folder: (folder / cache.MANIFEST).write_text("{"),
    ],
    ids=["altered", "missing", "no manifest", "list manifest", "half a manifest"],
)
def test_a_damaged_folder_is_built_again(own_cache, damage):
    calls = []
    folder = build(calls)
    damage(folder)
    assert build(calls) == folder
    assert len(calls) == 2 and (folder / "weights").read_text() == "right"
    assert visible(own_cache) == ["thing"]


def test_a_file_in_the_folders_place_is_replaced(own_cache):
    own_cache.mkdir()
    (own_cache / "thing").write_text("no folder")
    assert (build([]) / "weights").read_text() == "right"


def test_a_build_that_fails_leaves_nothing_behind(own_cache):
    def fail(folder: Path) -> None:
        (folder / "weights").write_text("half")
        raise RuntimeError("interrupted")

    with pytest.raises(RuntimeError, match="interrupted"):
        cache.cached_folder("thing", fail)
    assert visible(own_cache) == []


def test_a_builder_that_takes_too_long_is_not_waited_for_and_the_first_result_stays(own_cache, monkeypatch, capsys):
    monkeypatch.setattr(cache, "WAIT", 0.1)
    inner = []

    def slow(folder: Path) -> None:
        waiting = Thread(target=build, args=(inner,))  # as another process, which finishes first
        waiting.start()
        waiting.join()
        (folder / "weights").write_text("late")

    folder = cache.cached_folder("thing", slow)
    assert len(inner) == 1 and (folder / "weights").read_text() == "right"
    assert visible(own_cache) == ["thing"]
    said = capsys.readouterr().err.splitlines()
    assert said == [
        f"another process is making {folder}: waiting for it",
        f"{folder} is not there after 0.1 s: making it here",
    ]


def _build_together(root, barrier, queue):
    os.environ["OFFCORR_CACHE"] = root

    def write(folder: Path) -> None:
        time.sleep(1)
        (folder / "builder").write_text(str(os.getpid()))
        queue.put("built")

    barrier.wait(timeout=120)  # both processes begin with an empty cache
    folder = cache.cached_folder("thing", write)
    queue.put((str(folder), (folder / "builder").read_text()))


def test_of_two_processes_started_at_once_one_builds(tmp_path):
    context = multiprocessing.get_context("spawn")
    queue, barrier = context.Queue(), context.Barrier(2)
    workers = [context.Process(target=_build_together, args=(str(tmp_path), barrier, queue)) for _ in range(2)]
    for worker in workers:
        worker.start()
    results = [queue.get(timeout=180) for _ in range(3)]
    for worker in workers:
        worker.join(timeout=60)
    assert results.count("built") == 1
    first, second = (result for result in results if result != "built")
    assert first == second and first[0] == str(tmp_path / "thing")
    assert first[1] in {str(worker.pid) for worker in workers}
    assert visible(tmp_path) == ["thing"]


def test_cache_root_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.delenv("OFFCORR_CACHE", raising=False)
    assert cache.cache_root() == tmp_path / "xdg" / "offcorr"
    monkeypatch.setenv("OFFCORR_CACHE", str(tmp_path / "mine"))
    assert cache.cache_root() == tmp_path / "mine"
    for name in ("OFFCORR_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name)
    assert cache.cache_root().name == "offcorr" and Path.home() in cache.cache_root().parents
