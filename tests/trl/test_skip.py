"""``skip_dead_sequences``: the same update for less work."""

import pytest
import torch

from offcorr import contract, get
from offcorr.trl.skip import dead_sequences


def parameters(trainer):
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters()])


def half_the_groups_agree(completion_ids, **_):
    """Every other prompt's completions all score 1, so their advantages are 0."""
    size = 4
    return [1.0 if i // size % 2 else float(len(ids) % 3) for i, ids in enumerate(completion_ids)]


@pytest.mark.parametrize("loss_type, kwargs", [("offcorr:dapo", {}), ("offcorr:grpo", {}), ("seq_mis", {"cap": 1.0})])
def test_the_update_is_the_same(make_trainer, replay, series, loss_type, kwargs):
    ends, skipped = [], []
    for skip in (False, True):
        trainer = make_trainer(
            loss_type=loss_type,
            loss_kwargs=kwargs or None,
            skip_dead_sequences=skip,
            reward_funcs=half_the_groups_agree,
            rollout_func=replay("old_logp"),
            num_generations=4,
            num_iterations=2,
            max_steps=4,
        )
        trainer.train()
        ends.append(parameters(trainer))
        skipped.append(series(trainer, "offcorr/loss/skipped"))
    torch.testing.assert_close(ends[1], ends[0], rtol=0, atol=2e-6)  # float addition in another order, through Adam
    assert not any(skipped[0]) and max(skipped[1]) >= 0.5


def test_what_is_known_to_be_dead():
    batch = contract.example()
    batch.advantages[3] = 0
    dead = dead_sequences(get("dapo"), batch)
    assert dead.tolist() == [False, True, False, True, False, False, False]  # row 1 has no valid token
    assert dead_sequences(get("kimi"), batch).tolist() == [False, True, False, False, False, False, False]
    rejecting = get("veto", threshold=0.6)
    dead = dead_sequences(rejecting, batch)
    assert dead.sum() > 2
    assert not rejecting(batch).coefficient[dead].any()
    assert get("dapo")(batch).coefficient[dead].any()


def test_what_looks_at_every_sequence_is_refused(make_trainer):
    with pytest.raises(ValueError, match="skip_dead_sequences=True.*'bapo' looks at all of them"):
        make_trainer(loss_type="bapo", skip_dead_sequences=True)


def test_a_kl_term_wants_every_sequence(make_trainer, replay, series):
    trainer = make_trainer(
        loss_type="offcorr:dapo",
        skip_dead_sequences=True,
        beta=0.1,
        reward_funcs=half_the_groups_agree,
        rollout_func=replay("old_logp"),
        max_steps=1,
    )
    trainer.train()
    assert series(trainer, "offcorr/loss/skipped") == [0]
