"""verl 0.9.1 itself: its losses against ours in value and gradient, its registry, its plugin, its loss function."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import tomllib
import torch

from offcorr.integrations import verl as adapter
from tests.integrations.cases import assert_same, case, skip

try:
    import verl
    from tensordict import TensorDict
    from verl.trainer.ppo import core_algos
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights
    from verl.utils import tensordict_utils
    from verl.workers.config import FSDPActorConfig
    from verl.workers.utils.losses import ppo_loss
except ImportError as error:
    skip(f"verl is not installed ({error})")

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.filterwarnings("ignore:.*aggregates by:RuntimeWarning")

NUMBERS = [
    {},
    {"dp_size": 1, "batch_num_tokens": 97, "global_batch_size": 12, "loss_scale_factor": None},
    {"dp_size": 4, "batch_num_tokens": 211, "global_batch_size": 24, "loss_scale_factor": 50},
]
MODES = {
    "token-mean": "token-mean",
    "token-sum": "sum",
    "seq-mean-token-mean": "seq-mean-token-mean",
    "seq-mean-token-sum": "seq-mean-token-sum",
    "seq-mean-token-sum-norm": "seq-mean-token-sum-norm",
}


@pytest.fixture(scope="module", autouse=True)
def registered():
    adapter.register()


def config(info, **options):
    options = {"clip_ratio_low": 0.1, "clip_ratio_high": 0.28, "clip_ratio_c": 1.4} | options
    policy_loss = core_algos.ActorConfig.__dataclass_fields__["policy_loss"].default_factory()
    policy_loss = type(policy_loss)(dro_beta=0.3, loss_mode=options.pop("loss_mode", "vanilla"))
    return FSDPActorConfig(
        strategy="fsdp",
        rollout_n=2,
        ppo_micro_batch_size_per_gpu=2,
        policy_loss=policy_loss,
        global_batch_info=dict(info),
        **options,
    )


def both(theirs, ours, batch, info, mode, weights=None):
    """The losses that verl computes for two loss modes."""
    for name in (theirs, ours):
        loss, _ = core_algos.get_policy_loss_fn(name)(
            old_log_prob=batch.old_logp,
            log_prob=batch.logp,
            advantages=batch.advantages,
            response_mask=batch.mask.double(),
            loss_agg_mode=mode,
            config=config(info),
            rollout_is_weights=weights,
        )
        yield loss


SHARED = {
    "vanilla": "offcorr:ppo?eps_low=0.1&eps_high=0.28&dual_clip=1.4",
    "gspo": "offcorr:gspo?eps_low=0.1&eps_high=0.28",
    "sapo": "offcorr:sapo?tau_pos=1.0&tau_neg=1.05",
    "gpg": "offcorr:reinforce",
    "dro": "offcorr:dro?tau=0.3",
    "cispo": "offcorr:cispo?low=0.9&cap=1.28",
    "dppo_tv": "offcorr:dppo?low=0.1&high=0.28&cap=1.4",
}
"""Every loss that both have, with the options of ``config`` (geo_mean and dppo_kl apart, below)."""


@pytest.mark.parametrize("info", NUMBERS, ids=["local", "one rank", "four ranks"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("theirs", SHARED)
def test_shared_losses_agree(theirs, mode, info):
    aggregate = "seq-mean-token-mean" if theirs == "sapo" else MODES[mode]  # verl's SAPO has this one only
    for seed in range(4):
        batch = case(seed)
        # verl's DPPO compares with old_log_prob: ours is told that the engine agrees with it.
        weights = batch.mask.double() if theirs == "dppo_tv" else None
        their_loss, our_loss = both(
            theirs,
            f"{SHARED[theirs]}&aggregate={aggregate}".replace("reinforce&", "reinforce?"),
            batch,
            info,
            mode,
            weights,
        )
        assert_same(our_loss, their_loss, batch, 1e-7)  # verl adds 1e-8 to the length of a sequence


@pytest.mark.parametrize("theirs", ["vanilla", "gspo", "cispo", "dro"])
def test_verls_own_weights_multiply_both(theirs):
    batch = case(5)
    weights, _ = compute_rollout_correction_weights(batch.old_logp - batch.rollout_logp, batch.mask, "sequence", 2.0)
    spec = f"{SHARED[theirs]}&aggregate=token-mean"
    their_loss, our_loss = both(theirs, spec, batch, {}, "token-mean", weights)
    assert_same(our_loss, their_loss, batch)


@pytest.mark.parametrize(
    "spec, threshold, level",
    [
        ("tis?cap=1.3", 1.3, "token"),
        ("seq_tis?cap=1.3", 1.3, "sequence"),
        ("icepop?low=0.7&high=1.3", "0.7_1.3", "token"),
    ],
)
def test_engine_weights_agree(spec, threshold, level):
    """verl's PPO with its own engine weight, and ours with the same weight made from unbounded token ratios."""
    for seed in range(4):
        batch = case(seed)
        log_ratio = batch.old_logp - batch.rollout_logp
        theirs, _ = compute_rollout_correction_weights(log_ratio, batch.mask, level, threshold)
        unbounded, _ = compute_rollout_correction_weights(log_ratio, batch.mask, "token", 1e9)
        their_loss, _ = both("vanilla", "vanilla", batch, {}, "token-mean", theirs)
        options = "&eps_low=0.1&eps_high=0.28&dual_clip=1.4&aggregate=token-mean"
        _, our_loss = both("vanilla", f"offcorr:{spec}{options}", batch, {}, "token-mean", unbounded)
        assert_same(our_loss, their_loss, batch)


def test_geo_mean_agrees_on_a_whole_batch_and_depends_on_the_split_in_verl():
    """verl's geo_mean averages the micro-batch and ignores ``global_batch_info``."""
    batch = case(0)
    batch = batch.rows(batch.mask.any(1).nonzero()[:, 0])  # verl counts an empty sequence
    whole = {"dp_size": 1, "batch_num_tokens": int(batch.mask.sum()), "global_batch_size": batch.sequences}
    spec = "offcorr:gmpo?eps_low=0.1&eps_high=0.28"
    their_loss, our_loss = both("geo_mean", spec, batch, whole, "seq-mean-token-mean")
    assert_same(our_loss, their_loss, batch, 1e-7)
    parts = [batch.rows(slice(0, 1)), batch.rows(slice(1, None))]
    pairs = [list(both("geo_mean", spec, part, whole, "seq-mean-token-mean")) for part in parts]
    theirs, ours = (sum(losses) for losses in zip(*pairs, strict=True))
    torch.testing.assert_close(ours, our_loss)
    assert (theirs - their_loss).abs().detach() > 0.1


def test_dppo_kl_agrees_where_verls_rounding_guard_does_not_matter():
    """verl adds 1e-8 inside the logarithm of 1 - p."""
    for seed in range(4):
        batch = case(seed)
        spec = "offcorr:dppo?divergence=kl&delta=0.05&cap=1.4&aggregate=token-mean"
        ours, theirs = (
            core_algos.get_policy_loss_fn(name)(
                batch.old_logp,
                batch.logp,
                batch.advantages,
                batch.mask.double(),
                "token-mean",
                config({}, clip_ratio_low=0.05, clip_ratio_high=0.05),
                batch.mask.double(),
            )[0]
            for name in (spec, "dppo_kl")
        )
        assert_same(ours, theirs, batch)


def test_verls_whole_loss_with_entropy_and_kl():
    """``ppo_loss``, which the actor calls, with loss_mode="offcorr:..." in its configuration."""
    batch = case(0, sequences=3, width=4)
    batch = batch.replaced(mask=torch.ones(3, 4, dtype=torch.bool))
    flat = torch.cat([torch.nn.functional.pad(row, (0, 1)) for row in batch.logp])  # a prompt of one token each
    data = TensorDict(
        {
            "prompts": torch.ones(3, 1, dtype=torch.long),
            "responses": torch.ones(3, 4, dtype=torch.long),
            "attention_mask": torch.ones(3, 5, dtype=torch.long),
            "response_mask": batch.mask.long(),
            "old_log_probs": batch.old_logp,
            "advantages": batch.advantages,
            "ref_log_prob": batch.old_logp,
        },
        batch_size=[3],
    )
    tensordict_utils.assign_non_tensor(data, dp_size=2, batch_num_tokens=31, global_batch_size=8)
    of_mode = {}
    for mode in ("vanilla", "offcorr:ppo?eps_low=0.1&eps_high=0.28&dual_clip=1.4&aggregate=token-mean"):
        actor = config({}, loss_mode=mode, use_kl_loss=True, kl_loss_coef=0.1, entropy_coeff=0.01)
        loss, metrics = ppo_loss(actor, {"log_probs": flat, "entropy": -flat}, data)
        of_mode[mode] = loss
    theirs, ours = of_mode.values()
    assert_same(ours, theirs, batch)
    assert "offcorr/staleness/k1" in metrics and "kl_loss" in metrics


def test_every_aggregation_of_verl_is_tried():
    assert set(MODES) == {
        "token-mean",
        "token-sum",
        "seq-mean-token-sum",
        "seq-mean-token-mean",
        "seq-mean-token-sum-norm",
    }
    with pytest.raises(ValueError, match="Invalid loss_agg_mode"):
        config({}, loss_agg_mode="another")


@pytest.mark.parametrize("way", ["auto", "none"])
def test_importing_verl_is_enough(tmp_path, way):
    """The entry point of pyproject.toml, as an installed package has it; without plugins, an environment variable."""
    entries = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["verl.plugins"]
    info = tmp_path / "offcorr_plugin-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: offcorr-plugin\nVersion: 0\n")
    lines = [f"{name} = {target}" for name, target in entries.items()]
    (info / "entry_points.txt").write_text("\n".join(["[verl.plugins]", *lines]))
    code = (
        "import verl; from verl.trainer.ppo.core_algos import get_policy_loss_fn as get; "
        "print(get('offcorr:minpro?eps_high=0.28').__module__, get('vanilla').__module__)"
    )
    paths = os.pathsep.join([str(tmp_path), str(ROOT), os.environ.get("PYTHONPATH", "")])
    variables = {"PYTHONPATH": paths, "VERL_USE_EXTERNAL_PLUGINS": way}
    if way == "none":
        variables["VERL_USE_EXTERNAL_MODULES"] = "offcorr.integrations.verl_plugin"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | variables)
    assert done.stdout.split() == ["offcorr.integrations.verl", "verl.trainer.ppo.core_algos"], done.stderr


def test_the_line_to_write_passes_hydra():
    from hydra.core.override_parser.overrides_parser import OverridesParser

    line = 'actor_rollout_ref.actor.policy_loss.loss_mode="offcorr:minpro?eps_high=0.28&aggregate=token-mean"'
    value = OverridesParser.create().parse_override(line).value()
    assert str(value).strip("\"'") == "offcorr:minpro?eps_high=0.28&aggregate=token-mean"
    assert verl.__version__ == "0.9.1", "docs/trainers.md and the Makefile name 0.9.1"
