"""The code of the sections on traces and prefixes of docs/mixed_data.md, run as it stands there."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset

import offcorr
from offcorr.data.demonstrations import WITHOUT_LOGP
from offcorr.diagnose import DumpWriter, Record
from offcorr.extras import CHORD
from offcorr.trl import GRPOTrainer
from tests.data.runs import ANSWERS, PROMPTS, SETTINGS, traces_of, variety, weights_of
from tests.data.test_demonstrations import TAKE_TRACES_WITHOUT_LOGP
from tests.rollout.rollout_models import fresh_model, tokenizer

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "mixed_data.md").read_text()


def section(title):
    """The text below a heading of any level, to the next of its level or above."""
    marks, below = re.findall(rf"^(#+) {re.escape(title)}\n(.*)", PAGE, flags=re.M | re.S)[0]
    return re.split(rf"^#{{1,{len(marks)}}} ", below, flags=re.M)[0]


def code(title):
    return re.findall(r"^```python\n(.*?)^```$", section(title), flags=re.M | re.S)


@pytest.fixture
def names(tmp_path, monkeypatch):
    """What a reader's script has before the code of the page."""
    monkeypatch.chdir(tmp_path)
    words, rows = tokenizer(), []
    for prompt, answer in zip(PROMPTS, ANSWERS, strict=True):
        rows.append({"prompt": prompt, "completion": answer, "logp": [-1.0] * (len(answer) + 1), "reward": 1.0})
    Path("teacher.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with DumpWriter("yesterday/rollouts/step_1.parquet") as writer:
        prompt, answer = (np.array(words(text)["input_ids"]) for text in ("c2=", "22"))
        writer.write([Record(prompt, answer, np.full(2, -1.0), np.full(2, -1.0), reward=1.0)])
    settings = {name: value for name, value in SETTINGS.items() if name not in ("loss_type", "max_steps")}
    return {
        "model": fresh_model(),
        "teacher": fresh_model(seed=5),
        "tokenizer": words,
        "reward": variety,
        "dataset": Dataset.from_list([{"prompt": prompt} for prompt in PROMPTS]),
        "settings": settings | {"output_dir": "run", "max_steps": 2, "gradient_accumulation_steps": 2},
    }


@pytest.fixture(autouse=True)
def tokenizer_of_the_model(monkeypatch):
    """The tiny model has no folder that the trainer could load its tokenizer from."""
    init = GRPOTrainer.__init__
    monkeypatch.setattr(
        GRPOTrainer, "__init__", lambda self, *args, **kw: init(self, *args, processing_class=tokenizer(), **kw)
    )


@pytest.mark.filterwarnings("ignore")
def test_the_code_runs_from_top_to_bottom(names, monkeypatch):
    before = weights_of_model(names["model"])
    seen = []
    supervised, train = CHORD.supervised, GRPOTrainer.train

    def recorded(chord, logp, mask, *rest):
        seen.append((chord.mu, mask.sum().item()))
        return supervised(chord, logp, mask, *rest)

    def counted(trainer):
        train(trainer)
        seen.append(type(trainer).__name__)

    monkeypatch.setattr(CHORD, "supervised", recorded)
    monkeypatch.setattr(GRPOTrainer, "train", counted)
    for title in ("Traces", "Prefixes"):
        for block in code(title):
            exec(block, names)
            assert not torch.equal(weights_of_model(names["model"]), before)
    trainers = [name for name in seen if isinstance(name, str)]
    assert trainers == ["GRPOTrainer", "ChordTrainer", "DistillationTrainer", "GRPOTrainer"]
    # two micro-batches of each of two steps; mu rises from 0
    assert [part[0] for part in seen if not isinstance(part, str)] == pytest.approx([0.0, 0.0, 0.045, 0.045])


def weights_of_model(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.filterwarnings("ignore")
def test_chord_of_the_page_has_the_gradient_of_its_formula(names):
    """One step of plain gradient descent: (1 - mu) of the policy's step and mu of the supervised one."""
    for block in code("Traces")[:1]:
        exec(block.replace("trainer.train()", ""), names)
    (block,) = code("A supervised term: CHORD")
    names["settings"] |= {"max_steps": 1, "optim": "sgd", "learning_rate": 0.1, "max_grad_norm": 0.0}
    start = weights_of_model(names["model"])

    def step(mu, cls="ChordTrainer"):
        names["model"] = fresh_model()
        made = block.replace("scheduled_mu(step, warmup=20, decay=200, peak=0.9, valley=0.05)", str(mu))
        exec(made.replace("trainer = ChordTrainer", f"trainer = {cls}"), names)
        return weights_of_model(names["model"]) - start

    names["traces"] = traces_of(PROMPTS, logp=-1.0)
    policy, supervised, mixed = step(0.0), step(1.0), step(0.25)
    assert torch.equal(policy, step(0.0, "GRPOTrainer"))
    assert supervised.abs().max() > 1e-3
    torch.testing.assert_close(mixed, 0.75 * policy + 0.25 * supervised, rtol=1e-3, atol=1e-6)


@pytest.mark.filterwarnings("ignore")
def test_distillation_of_the_page_moves_the_student_to_the_teacher(names):
    for block in code("Traces")[:1]:
        exec(block.replace("trainer.train()", ""), names)
    (block,) = code("On-policy distillation")
    names["settings"] |= {"max_steps": 12, "gradient_accumulation_steps": 1}
    prompts = tokenizer()(PROMPTS[:1] * 64, return_tensors="pt")["input_ids"]

    def distance():
        """KL (nats) of the next token's distribution from the teacher's."""
        with torch.no_grad():
            own, its = (
                model(prompts[:1]).logits[0, -1].log_softmax(-1) for model in (names["model"], names["teacher"])
            )
        return float((own.exp() * (own - its)).sum())

    before = distance()
    exec(block, names)
    assert distance() < 0.8 * before
    trainer = names["trainer"]
    inputs = trainer._buffered_inputs[0]
    batch = trainer._batch(inputs, trainer._forward(trainer.model, inputs))
    assert batch.advantages.shape == batch.logp.shape and not batch.advantages[~batch.mask].any()
    assert len(weights_of(trainer))


def test_the_page_names_what_the_library_has():
    text = section("Traces")
    assert all(f'`"{name}"`' in text for name in WITHOUT_LOGP)
    named = re.search(r"^(`.*`) compare nothing and take traces without log-probs", text, flags=re.M)
    assert {*re.findall(r"`(\w+)`", named[1])} == TAKE_TRACES_WITHOUT_LOGP <= {*offcorr.available()}
