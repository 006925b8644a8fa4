"""The rollout function of docs/tokens.md, as it stands, and the log-probs of what a trajectory keeps."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

from offcorr.rollout import decode, score
from offcorr.tokens import Trajectory
from tests.chat import tokenizer
from tests.tiny import qwen3
from tests.trl.conformance import stand_ins
from tests.trl.test_using_trl import MODEL, make_small

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "tokens.md").read_text()


def test_the_rollout_function_trains(tmp_path, monkeypatch):
    """The tiny model says bytes that are no text, and the template strips its reasoning: each prompt is repaired."""
    (script,) = (code for code in re.findall(r"```python\n(.*?)```", PAGE, flags=re.S) if ">>>" not in code)
    hub = tmp_path / "hub"
    stand_ins.Hub(hub).add(MODEL, qwen3(len(tokenizer("qwen3"))), tokenizer("qwen3"))
    monkeypatch.chdir(tmp_path)
    make_small(monkeypatch, hub, steps=2)
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(script, "tokens.md", "exec"), names)
    trainer = names["trainer"]
    assert trainer.state.global_step == 2
    logged = {name: value for entry in trainer.state.log_history for name, value in entry.items()}
    assert logged["tokens/repaired"] == 2.0
    assert abs(logged["offcorr/staleness/abs_mean"]) < 1e-4, "the trainer scores other tokens than were sampled"


def test_log_probs_of_kept_and_of_rendered_tokens():
    """Scored anew, what a trajectory keeps has the log-probs of the sampler; the rendered conversation has not."""
    made = tokenizer("qwen3")
    model, eos = qwen3(len(made)), [made.eos_token_id]
    trajectory, messages = Trajectory(made), [{"role": "user", "content": "Guess a number."}]
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        prompt = trajectory.prompt(made.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))
        out = decode(model, [prompt], max_new_tokens=12, eos_token_ids=eos, generator=generator)
        trajectory.sampled(out.completion_ids[0], out.logp[0], prompt_ids=prompt)
        messages += [
            {"role": "assistant", "content": made.decode(out.completion_ids[0], skip_special_tokens=True)},
            {"role": "user", "content": "Again."},
        ]
    (row,) = trajectory.rows()
    kept = torch.tensor(score(model, [row.prompt_ids], [row.completion_ids])[0])
    own = torch.tensor(row.mask)
    reported = torch.tensor(row.rollout_logp)[own]
    assert (kept[own] - reported).abs().max() < 1e-4

    # The same answers, encoded from their text behind the rendered prompt.
    rendered = made.apply_chat_template(messages[:-2], add_generation_prompt=True, return_dict=False)
    last = [
        token
        for token, turn, mine in zip(row.completion_ids, row.turn_ids, row.mask, strict=True)
        if turn == 2 and mine
    ]
    other = torch.tensor(score(model, [rendered], [last])[0])
    assert (other - reported[-len(last) :]).abs().max() > 0.01
