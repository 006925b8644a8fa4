"""``offcorr:...`` with its options mapped is TRL's own loss and gradient, on every call of a run."""

from __future__ import annotations

import pytest
import torch
import trl
from packaging.version import Version
from peft import LoraConfig
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM, set_seed

from offcorr.trl import GRPOTrainer

# TRL's name, ours, our options, TRL's options
LOSSES = {
    "grpo": ("grpo", "grpo", {}, {}),
    "grpo-asymmetric": (
        "grpo",
        "ppo",
        {"eps_low": 0.05, "eps_high": 0.1},
        {"epsilon": 0.05, "epsilon_high": 0.1},
    ),
    "dapo": ("dapo", "dapo", {"eps_low": 0.1, "eps_high": 0.2}, {"epsilon": 0.1, "epsilon_high": 0.2}),
    "dapo-dual-clip": ("dapo", "dapo", {"eps_high": 0.2, "dual_clip": 1.3}, {"delta": 1.3}),
    "dr_grpo": ("dr_grpo", "ppo", {"aggregate": "seq-mean-token-sum-norm"}, {}),
    "cispo": ("cispo", "cispo", {"cap": 1.1}, {"epsilon_high": 1.1}),
    "sapo": (
        "sapo",
        "sapo",
        {"tau_pos": 1.5, "tau_neg": 2.0},
        {"sapo_temperature_pos": 1.5, "sapo_temperature_neg": 2.0},
    ),
    "gspo": (
        "grpo",
        "gspo",
        {"eps_low": 0.03, "eps_high": 0.04},
        {"epsilon": 0.03, "epsilon_high": 0.04, "importance_sampling_level": "sequence"},
    ),
    "luspo": (
        "luspo",
        "luspo",
        {"eps_low": 0.03, "eps_high": 0.04},
        {"epsilon": 0.03, "epsilon_high": 0.04, "importance_sampling_level": "sequence"},
    ),
    "vespo": (
        "vespo",
        "vespo",
        {"k_pos": 1.5, "lam_pos": 2.5},
        {"vespo_k_pos": 1.5, "vespo_lambda_pos": 2.5},
    ),
    "opsm": (
        "grpo",
        "grpo",
        {"reject": {"name": "opsm", "delta": 0.01}},
        {"off_policy_mask_threshold": 0.01},
    ),
}
OTHER_TERMS = {
    "": {},
    "kl": {"beta": 0.1, "use_bias_correction_kl": False},
    "weighted-kl": {"beta": 0.1, "use_bias_correction_kl": True},
    "entropy": {"entropy_coef": 0.03},
    "all": {"beta": 0.1, "use_bias_correction_kl": True, "entropy_coef": 0.03},
}


class Differential(GRPOTrainer):
    """Computes the loss both ways on every call and keeps the largest differences."""

    trl_loss = "dapo"

    def __init__(self, *args, **kwargs):
        self.calls = []
        super().__init__(*args, **kwargs)

    def _compute_loss(self, model, inputs):
        before = {key: value.clone() for key, value in inputs.items() if torch.is_tensor(value)}
        ours = super()._compute_loss(model, inputs)
        for key, value in before.items():
            torch.testing.assert_close(inputs[key], value, rtol=0, atol=0, equal_nan=True)
        loss_type, self.loss_type = self.loss_type, self.trl_loss
        theirs = trl.GRPOTrainer._compute_loss(self, model, inputs)
        self.loss_type = loss_type
        torch.testing.assert_close(ours.detach(), theirs.detach(), rtol=2e-5, atol=1e-6)
        if self._entropy_bonus_enabled:
            assert len(self._metrics[self._mode]["policy_loss"]) >= 2
            logged = self._metrics[self._mode]["policy_loss"][-2:]
            assert logged[0] == pytest.approx(logged[1], rel=2e-5, abs=1e-6) and logged[0] != 0
        gradient = 0.0
        if torch.is_grad_enabled():
            parameters = [p for p in model.parameters() if p.requires_grad]
            gradients = [
                torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters, retain_graph=keep)])
                for loss, keep in ((ours, True), (theirs, False))
            ]
            gradient = float(gradients[1].norm())
            torch.testing.assert_close(*gradients, rtol=2e-4, atol=2e-6 * max(gradient, 1.0))
        self.calls.append((self._mode, float(ours.detach()), gradient))
        return ours


@pytest.fixture
def differential(make_trainer):
    """Runs a differential training under the given settings; every call has been compared when it returns."""

    def run(name, **settings):
        theirs, ours, options, trl_options = LOSSES[name]
        cls = type("Run", (Differential,), {"trl_loss": theirs})
        trainer = make_trainer(
            cls,
            loss_type=f"offcorr:{ours}",
            loss_kwargs=options,
            **{"num_iterations": 2, **trl_options, **settings},
        )
        trainer.train()
        steps = trainer.state.global_step
        train_calls = [call for call in trainer.calls if call[0] == "train"]
        assert len(train_calls) == steps * trainer.args.gradient_accumulation_steps
        assert sum(gradient > 0 for *_, gradient in train_calls) > len(train_calls) // 2
        return trainer

    return run


def clipped_share(trainer, series):
    return max(series(trainer, "offcorr/loss/clipped"))


@pytest.mark.parametrize("name", LOSSES)
def test_loss_and_gradient(differential, series, name):
    trainer = differential(name)
    if name not in ("sapo", "vespo", "opsm"):
        assert clipped_share(trainer, series) > 0.02, "the ratios never reached a bound: nothing was tried"


@pytest.mark.parametrize("terms", [name for name in OTHER_TERMS if name])
@pytest.mark.parametrize("name", ["dapo", "grpo", "dr_grpo", "gspo", "luspo"])
def test_other_terms(differential, series, name, terms):
    if name == "luspo" and Version(trl.__version__) < Version("1.16"):
        terms = "entropy"  # TRL's luspo spread its KL over padding until then
    trainer = differential(name, **OTHER_TERMS[terms], max_steps=2)
    if "beta" in OTHER_TERMS[terms]:
        assert max(series(trainer, "kl")) > 0


SETTINGS = {
    "one step a generation": dict(num_iterations=1),
    "three iterations": dict(num_iterations=3, max_steps=6),
    "two windows a generation": dict(gradient_accumulation_steps=2, steps_per_generation=4, num_iterations=1),
    "two generations a window": dict(gradient_accumulation_steps=4, steps_per_generation=2, num_iterations=1),
    "misaligned": dict(gradient_accumulation_steps=2, steps_per_generation=3, max_steps=6, num_iterations=1),
    "truncated masked": dict(mask_truncated_completions=True, max_completion_length=24),
    "uncertain tokens only": dict(top_entropy_quantile=0.4),
    "normalise then sum": dict(multi_objective_aggregation="normalize_then_sum"),
}


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("name", ["dapo", "grpo"])
def test_settings(differential, name, settings):
    differential(name, **SETTINGS[settings])


@pytest.mark.parametrize("name", ["dapo", "gspo"])
def test_tool_mask(differential, replay, name):
    trainer = differential(name, rollout_func=replay("env_mask"), anchor="recomputed", learning_rate=2e-3)
    assert "tool_mask" in trainer._buffered_inputs[0]


def test_evaluation(differential, dataset, series):
    trainer = differential("dapo", eval_dataset=dataset.select(range(8)), eval_strategy="steps", eval_steps=2)
    assert [mode for mode, *_ in trainer.calls].count("eval") >= 4
    assert len(series(trainer, "eval_entropy")) == 2


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_peft(differential, beta):
    trainer = differential(
        "dapo",
        beta=beta,
        peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
        learning_rate=0.1,
    )
    trained = [name for name, p in trainer.model.named_parameters() if p.requires_grad]
    assert trained and all("lora" in name for name in trained)


def test_moe_auxiliary_loss(differential, series, tokenizer):
    set_seed(0)
    model = Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=len(tokenizer),
            hidden_size=32,
            intermediate_size=32,
            moe_intermediate_size=16,
            num_experts=4,
            num_experts_per_tok=2,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=16,
            max_position_embeddings=64,
            pad_token_id=0,
            eos_token_id=1,
            bos_token_id=None,
        )
    )
    trainer = differential("dapo", model=model, router_aux_loss_coef=0.1, max_steps=2)
    assert min(series(trainer, "aux_loss")) > 0
