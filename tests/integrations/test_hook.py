"""Which corrections a hook carries, and the means that a trainer may average."""

import math

import pytest
import torch

import offcorr
from offcorr.integrations.hook import Hook
from offcorr.methods.registry import find, illustration
from tests.integrations.cases import case

EVERYTHING = frozenset({"old_logp", "rollout_logp", "rewards", "group_ids", "entropy"})


@pytest.mark.parametrize(
    "hook, spec, reason",
    [
        (Hook("X", "sequence", EVERYTHING), "bapo", "couples the sequences of the batch, but X shows its loss one"),
        (Hook("X", "micro-batch", EVERYTHING), "asymre", "couples the sequences of the group"),
        (Hook("X", "batch", EVERYTHING - {"rewards"}), "topr", "needs rewards, which X does not hand to its loss"),
        (
            Hook("X", "batch", EVERYTHING, engine_alone=False),
            "tis",
            "Truncate(.*) compares the engine with the trainer",
        ),
        (Hook("X", "micro-batch", EVERYTHING), "tis?count_rejected=False", "count_rejected=False divides by"),
    ],
)
def test_the_reason_of_a_refusal(hook, spec, reason):
    with pytest.raises(ValueError, match=f"loss '.*' cannot run in X: .*{reason}"):
        hook.resolve(spec)


def test_a_hook_that_sees_everything_carries_every_method():
    hook = Hook("X", "batch", EVERYTHING)
    for name in offcorr.available():
        loss_fn = illustration(name)
        assert hook.resolve(f"offcorr:{name}", **find(name).example) == loss_fn


def test_means_over_parts_are_those_of_the_whole():
    """The means by their weights; nothing that is left out would agree (but counts, which add up)."""
    batch = case(0)
    parts = [batch.rows(slice(0, 2)), batch.rows(slice(2, 6))]
    loss_fn = offcorr.get("tis")
    whole = loss_fn(batch).metrics
    means = [loss_fn(part, denominator=7).metrics.means() for part in parts]
    computed = whole.compute()
    assert whole.means().keys() < computed.keys()
    for name, (value, weight) in whole.means().items():
        assert value == computed[name]
        seen = [part[name] for part in means if name in part]
        assert math.isclose(sum(w for _, w in seen), weight)
        assert math.isclose(sum(v * w for v, w in seen) / weight, value, rel_tol=1e-9, abs_tol=1e-12), name
    left_out = {name.rpartition("/")[2] for name in computed.keys() - whole.means().keys()}
    assert left_out == {
        *("abs_max", "abs_p99", "ratio_min", "ratio_max", "chi2_token", "chi2_seq", "ess_token", "ess_seq"),
        *("ess_before", "ess_after", "unscored", "nonfinite"),
    }


def test_means_warn_of_tokens_without_a_finite_loss():
    batch = case(0)
    logp = torch.where(torch.arange(9) == 0, math.nan, batch.logp.detach())
    with pytest.warns(RuntimeWarning, match="5 valid tokens gave no finite number"):
        offcorr.get("ppo")(batch.replaced(logp=logp)).metrics.means()
