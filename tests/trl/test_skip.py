"""``skip_dead_sequences``: the same update for less work."""

import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import offcorr
from offcorr import get, testing
from offcorr.trl.skip import dead_sequences, only, rows_kept


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
    batch = testing.example()
    batch.advantages[3] = 0
    dead = dead_sequences(get("dapo"), batch)
    assert dead.tolist() == [False, True, False, True, False, False, False]  # row 1 has no valid token
    assert dead_sequences(get("kimi"), batch).tolist() == [False, True, False, False, False, False, False]
    rejecting = get("veto", threshold=0.6)
    dead = dead_sequences(rejecting, batch)
    assert dead.sum() > 2
    assert not rejecting(batch).coefficient[dead].any()
    assert get("dapo")(batch).coefficient[dead].any()


def test_centred_advantages_leave_no_sequence_dead():
    batch = testing.example()
    batch.advantages.zero_()
    valid = batch.mask.any(1)
    assert dead_sequences(get("minpro"), batch).all()
    assert not dead_sequences(get("minpro", advantages="centred"), batch)[valid].any()


def test_at_least_one_sequence_is_kept():
    assert rows_kept(torch.tensor([True, False, True, False])).tolist() == [1, 3]
    assert rows_kept(torch.ones(4, dtype=torch.bool)).tolist() == [0]


def test_nothing_to_learn_costs_one_sequence_and_changes_nothing(make_trainer, replay, series):
    trainer = make_trainer(
        loss_type="offcorr:dapo",
        skip_dead_sequences=True,
        reward_funcs=lambda completion_ids, **_: [1.0] * len(completion_ids),
        rollout_func=replay("old_logp"),
        max_steps=2,
    )
    before = parameters(trainer)
    sizes = []
    trainer.model.register_forward_pre_hook(
        lambda _, args, kwargs: sizes.append(len(kwargs["input_ids"])) if trainer.model.training else None,
        with_kwargs=True,
    )
    trainer.train()
    assert torch.equal(parameters(trainer), before)
    assert series(trainer, "offcorr/loss/skipped") == [0.75, 0.75] and set(sizes) == {1}


def test_denominators_and_gradients_are_those_of_the_whole_micro_batch():
    batch = testing.example()
    batch.advantages[3:5] = 0
    for name, denominator in (("dapo", 50.0), ("grpo", 7), ("gspo", 7)):
        correction = get(name)
        rows = rows_kept(dead_sequences(correction, batch))
        part = offcorr.Batch(
            **only({key: getattr(batch, key) for key in ("logp", "old_logp", "advantages", "mask")}, rows)
        )
        whole, kept = (correction(x, denominator=denominator) for x in (batch, part))
        assert torch.equal(kept.coefficient, whole.coefficient[rows])
        torch.testing.assert_close(kept.loss, whole.loss, rtol=1e-12, atol=0)


def test_a_sequence_keeps_its_own_images():
    """Their patches lie end to end, several images or none for a sequence."""
    images, grid = [2, 0, 1, 1], torch.tensor([[1, 1, 2], [1, 2, 2], [1, 1, 1], [1, 1, 3]])
    patches = torch.arange(2 + 4 + 1 + 3)[:, None].float()
    inputs = {
        "advantages": torch.arange(4.0),
        "completion_ids": torch.arange(8).view(4, 2),
        "num_items_in_batch": torch.tensor(8),
        "num_images": images,
        "image_grid_thw": grid,
        "pixel_values": patches,
    }
    kept = only(inputs, torch.tensor([0, 3]))
    assert kept["num_images"] == [2, 1] and kept["num_items_in_batch"] == 8
    assert kept["advantages"].tolist() == [0, 3] and kept["completion_ids"].tolist() == [[0, 1], [6, 7]]
    assert torch.equal(kept["image_grid_thw"], grid[[0, 1, 3]])
    assert kept["pixel_values"].flatten().tolist() == [0, 1, 2, 3, 4, 5, 7, 8, 9]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(loss_type="bapo"), "'bapo' looks at all of them"),
        (dict(beta=0.1), "beta=0.1 looks at all of them"),
        (dict(entropy_coef=0.01), "entropy_coef=0.01 looks at all of them"),
        (dict(use_adaptive_entropy=True), "use_adaptive_entropy=True looks at all of them"),
        (dict(top_entropy_quantile=0.5), "top_entropy_quantile=0.5 looks at all of them"),
        (dict(loss_kwargs={"count_rejected": False}), "count_rejected=False looks at all of them"),
        (dict(loss_type="grpo"), "goes with a correction, and loss_type='grpo' is TRL's own loss"),
    ],
)
def test_what_looks_at_every_sequence_is_refused_before_the_model_is_loaded(make_trainer, tmp_path, settings, message):
    with pytest.raises(ValueError, match=f"skip_dead_sequences=True.*{message}"):
        make_trainer(
            model=str(tmp_path / "no model here"),
            **{"loss_type": "offcorr:dapo", "skip_dead_sequences": True, **settings},
        )


def test_an_auxiliary_loss_looks_at_every_sequence(make_trainer, tokenizer):
    model = Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=len(tokenizer),
            hidden_size=16,
            moe_intermediate_size=16,
            num_experts=2,
            num_experts_per_tok=1,
            num_hidden_layers=1,
            num_attention_heads=1,
            num_key_value_heads=1,
            head_dim=16,
            pad_token_id=0,
            eos_token_id=1,
        )
    )
    settings = dict(loss_type="offcorr:dapo", skip_dead_sequences=True, model=model)
    with pytest.raises(ValueError, match="skip_dead_sequences=True.*auxiliary loss of this MoE"):
        make_trainer(router_aux_loss_coef=0.1, **settings)
    make_trainer(router_aux_loss_coef=0.0, **settings)
