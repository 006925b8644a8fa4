"""Runs the contract suite on every discovered method, so a new file in offcorr/methods is covered without edits."""

import math
import shutil
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import pytest
import torch

import offcorr
from offcorr import controllers, gates, ops, ratios, rejections, testing, weights
from offcorr.methods.registry import catalogue, unregister
from offcorr.stages.aggregate import AGGREGATIONS
from offcorr.stages.checks import warn_once
from tests import fresh

METHODS = {method.name: method for method in catalogue()}


@pytest.mark.parametrize("check", testing.CHECKS)
@pytest.mark.parametrize("name", METHODS)
def test_method(name, check):
    if check == "on_policy_gradient" and not METHODS[name].on_policy:
        with pytest.raises(AssertionError):  # these methods declare another gradient on-policy, and have one
            testing.CHECKS[check](testing._resolve(name)[0])
        return
    testing.CHECKS[check](testing._resolve(name)[0])


FREE = [
    offcorr.Correction(
        ratio=ratios.PowerMean(power=-0.5),
        gate=gates.Clip(0.3, 0.4, dual_clip=2.0),
        weight=weights.SelfNormalise(weights.Truncate(3.0, level="turn")),
        reject=(rejections.K3(0.5, level="seq-max"), rejections.Veto()),
        aggregate="seq-mean-token-sum",
    ),
    offcorr.Correction(
        ratio=ratios.Turn(),
        gate=gates.SoftClip(),
        weight=weights.SelfNormalise(weights.Mask(0.4, 4.0, level="prefix"), over="group"),
        reject=rejections.DPPO("kl"),
    ),
    offcorr.Correction(
        ratio=ratios.ClippedGeometric(eps_low=0.1, eps_high=0.1),
        gate=gates.Unclipped(),
        weight=weights.SelfNormalise(weights.Bound(0.5, 2.0, level="geometric")),
        reject=(rejections.VACO(0.1), rejections.OPSM(0.0), rejections.BinaryKL(0.3)),
        aggregate="seq-mean-token-mean",
    ),
    offcorr.Correction(
        ratio=ratios.PrefixGeometric(mismatch="total"), gate=gates.DetachedRatio(), aggregate="token-mean"
    ),
]


OTHER_FORMS = {
    "ipo?kl_tau=0.1": True,
    "drpo?divergence=chi2&delta=0.5": True,
    "ctpo?level=prefix_geometric&power=-0.5": True,
    "opsm?level=sequence&delta=0.0": True,
    "pnpo?length_power=0": True,
    "geo_mis?low=0.9&high=1.1": True,
    "pspo?alpha=0.5": False,
}
"""Methods with other options than their own: whether they are REINFORCE's on-policy."""


@pytest.mark.parametrize("spec", OTHER_FORMS)
def test_other_forms_of_methods(spec):
    assert len(testing.check(spec, on_policy=OTHER_FORMS[spec])) == len(testing.CHECKS) - (not OTHER_FORMS[spec])


@pytest.mark.parametrize("loss_fn", FREE, ids=range(len(FREE)))
def test_free_composition(loss_fn):
    # Some of these may reject an on-policy token, so equality with REINFORCE on-policy is not required.
    assert len(testing.check(loss_fn, on_policy=False)) == len(testing.CHECKS) - 1


@pytest.mark.parametrize("aggregate", AGGREGATIONS)
def test_the_contract_holds_for_every_aggregation(aggregate):
    assert len(testing.check(f"dapo?aggregate={aggregate}")) == len(testing.CHECKS)


def test_check_names_what_is_wrong():
    halved = offcorr.Correction(ratio=ratios.Token(), gate=gates.DetachedClip(cap=0.5))
    with pytest.raises(
        AssertionError, match=r"^DetachedClip: on_policy_gradient: on-policy .*or on_policy=False says no"
    ):
        testing.check(halved)


def test_a_dropped_in_file_is_a_method(tmp_path):
    """A new file, without any other edit, is listed, documented and collected by this suite."""
    package = tmp_path / "offcorr"
    shutil.copytree(Path(offcorr.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    source = (package / "methods" / "dapo.py").read_text()
    (package / "methods" / "dropped_in.py").write_text(
        source.replace('"dapo"', '"dropped_in"').replace("def dapo", "def dropped_in")
    )
    shutil.copy(__file__, tmp_path / "test_contract.py")
    (tmp_path / "tests").mkdir()
    shutil.copy(fresh.__file__, tmp_path / "tests")
    words = ["-q", "--rootdir", ".", "-p", "no:cacheprovider", "test_contract.py", "-k", "dropped_in and test_method"]
    run = fresh.pytest_in(tmp_path, *words)
    assert run.returncode == 0, run.stdout + run.stderr
    assert f"{len(testing.CHECKS)} passed" in run.stdout


def min_with_two(log_ratio, advantage):
    """Stated as if the bound of 2 let a gradient through."""
    surrogate = ops.minimum(ops.exp(log_ratio), 2.0) * advantage
    return surrogate, surrogate


def test_check_takes_what_resolve_takes(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "import offcorr\n"
        "def capped(cap: float = 2.0): return offcorr.Correction(gate=offcorr.gates.DetachedClip(cap=cap))\n"
        "finished = capped()\n"
        "@offcorr.register('of_this_test', on_policy=False, example={'cap': 2.0})\n"
        "def without_default(cap: float): return offcorr.Correction(gate=offcorr.gates.DetachedClip(cap=cap))\n"
    )
    try:
        for spec in (f"{file}:capped", f"{file}:capped?cap=3", f"{file}:finished", "offcorr:minpro?eps_high=0.3"):
            assert testing.check(spec) == list(testing.CHECKS), spec
        assert "on_policy_gradient" not in testing.check(f"{file}:without_default"), "as it was registered"
        assert "on_policy_gradient" not in testing.check("asymre?delta_v=-0.2")
        assert "on_policy_gradient" not in testing.check(offcorr.get("opmd")), "a finished correction, too"
    finally:
        offcorr.unregister("of_this_test")
    with pytest.raises(ValueError, match="defines no 'caped', did you mean 'capped'"):
        testing.check(f"{file}:caped")
    file.write_text("g = 4")
    with pytest.raises(ValueError, match="has 'g', which is 4, expected a correction, or a function or class that"):
        testing.check(f"{file}:g")


@pytest.mark.parametrize("unused", ["cap: float = 2.0", "bounded: bool = False"])
def test_an_option_that_changes_nothing_is_found(tmp_path, unused):
    name = unused.partition(":")[0]
    (tmp_path / "mine.py").write_text(
        "import offcorr\n@offcorr.register('forgetful', paper='')\n"
        f"def forgetful(eps_high: float = 0.2, {unused}) -> offcorr.Correction:\n"
        "    return offcorr.get('ppo', eps_high=eps_high)\n"
    )
    try:
        with pytest.raises(AssertionError, match=f"^forgetful: the option {name} changes nothing: .* expected another"):
            testing.check(f"{tmp_path / 'mine.py'}:forgetful")
    finally:
        offcorr.unregister("forgetful")


def test_a_choice_that_is_as_another_is_found(tmp_path):
    """One of three; two of them differ, so that the option reaches the correction."""
    (tmp_path / "mine.py").write_text(
        "from typing import Literal\nimport offcorr\n@offcorr.register('forgetful', paper='')\n"
        "def forgetful(by: Literal['token', 'mean', 'none'] = 'token', eps: float = 0.2) -> offcorr.Correction:\n"
        "    return offcorr.get('gspo' if by == 'mean' else 'ppo', eps_high=eps)\n"
    )
    try:
        with pytest.raises(AssertionError, match="^forgetful: by='none' makes the same correction as by='token', exp"):
            testing.check(f"{tmp_path / 'mine.py'}:forgetful")
    finally:
        offcorr.unregister("forgetful")


def test_the_example_may_be_float32():
    batch, wanted = testing.example(dtype=torch.float32), testing.example()
    assert batch.logp.dtype == batch.advantages.dtype == torch.float32 and wanted.logp.dtype == torch.float64
    torch.testing.assert_close(batch.old_logp.double(), wanted.old_logp, rtol=1e-6, atol=1e-6)
    assert "float64" not in offcorr.backend(offcorr.get("ppo"), batch)


def test_a_wrong_derivative_far_from_one_is_found():
    gate = type("MinWithTwo", (gates.Gate,), {"surrogate": staticmethod(min_with_two), "__module__": __name__})()
    with pytest.raises(AssertionError, match="coefficient_is_the_gradient: stated derivative against autograd"):
        testing.check(offcorr.Correction(gate=gate))


def squashed(value):
    return value - 0.1 * value * value * value, ops.zeros_like(value) + 1


def squared(value):
    """Slope 1 where the policies agree, and right elsewhere, too."""
    return value - value * value, 1 - 2 * value


def halved_far(value):
    """Slope 1 where the policies agree, and wrong elsewhere."""
    return value - value * value, 1 - value


@pytest.mark.parametrize("span", ["token", "geometric", "sequence", "prefix", "turn", "prefix_geometric"])
def test_a_wrong_slope_off_policy_is_found(span):
    """Of a user's ratio; on-policy every slope is 1."""

    def ratio(rule):
        return type("Bent", (ratios.Ratio,), {"rule": staticmethod(rule), "span": span, "__module__": __name__})()

    check = testing.CHECKS["coefficient_is_the_gradient"]
    check(offcorr.Correction(ratio=ratio(squared), gate=gates.Unclipped()))
    with pytest.raises(AssertionError, match=r"the slope of Bent.rule is \S+ at token \d+ of .* numeric derivative"):
        check(offcorr.Correction(ratio=ratio(halved_far), gate=gates.Unclipped()))


def test_a_slope_of_one_is_a_choice_only_over_several_tokens():
    """The token form of a span; of the token's own ratio it is a derivative."""
    for span, found in (("token", True), ("sequence", False)):
        bent = type("Bent", (ratios.Ratio,), {"rule": staticmethod(squashed), "span": span, "__module__": __name__})()
        with pytest.raises(AssertionError, match="slope of Bent.rule is 1 ") if found else nullcontext():
            testing.CHECKS["coefficient_is_the_gradient"](offcorr.Correction(ratio=bent, gate=gates.Unclipped()))


def all_or_none(log_ratio):
    """No gradient for any token of a batch in which one ratio is beyond e^2."""
    ratio = (log_ratio.abs().max() <= 2) * ops.exp(log_ratio)
    return ratio, ratio


def test_a_rule_that_couples_the_batch_at_far_ratios_alone_is_found():
    skips = type("Skips", (gates.Gate,), {"surrogate": staticmethod(all_or_none), "__module__": __name__})()
    with pytest.raises(AssertionError, match="micro-batch coefficients|sum of micro-batch losses"):
        testing.CHECKS["splitting"](offcorr.Correction(gate=skips))


def halved(log_ratio):
    return 0.5 * log_ratio


def test_the_default_slope_is_that_of_the_log_ratio_alone():
    """Beside another measure of a token it is no derivative, whether or not it is written out."""
    check = testing.CHECKS["coefficient_is_the_gradient"]
    for span, found in (("token", True), ("sequence", False)):
        parts = {"measure": staticmethod(halved), "span": span, "__module__": __name__}
        with pytest.raises(AssertionError, match=r"Half.rule \(the default\) is 1 ") if found else nullcontext():
            check(offcorr.Correction(ratio=type("Half", (ratios.Ratio,), parts)(), gate=gates.Unclipped()))


def test_an_option_that_a_function_ignores_is_found_without_registering_it():
    def plain(eps: float = 0.2, unread: float = 3.0):
        return offcorr.Correction(gate=gates.Clip(eps, eps))

    def wants(cap: float):
        return offcorr.Correction(weight=weights.Truncate(cap))

    with pytest.raises(AssertionError, match="^plain: the option unread changes nothing"):
        testing.check(plain)
    with pytest.raises(TypeError, match="^wants requires cap, without a default: give one, .* register it with exam"):
        testing.check(wants)


def late(log_ratio, position):
    """No derivative after the first 60 tokens, as of a bound that is wider there."""
    ratio = ops.exp(log_ratio)
    return ratio, ops.where(position > 60, 0.0, ratio)


def large(log_ratio, advantage):
    ratio = ops.exp(log_ratio)
    return ratio, ops.where(abs(advantage) > 5, 0.0, ratio)


def last(log_ratio, position):
    ratio = ops.exp(log_ratio)
    return ratio, ops.where(position > 250, 0.0, ratio)


def long(log_ratio, length):
    ratio = ops.exp(log_ratio)
    return ratio, ops.where(length > 250, 0.0, ratio)


def alone(log_ratio, length):
    ratio = ops.exp(log_ratio)
    return ratio, ops.where(length < 2, 0.0, ratio)


def failed(log_ratio, reward):
    """No derivative for the samples of a reward of 0."""
    ratio = ops.exp(log_ratio)
    return ratio, ops.where(reward == 0, 0.0, ratio)


def best(log_ratio, reward):
    ratio = ops.exp(log_ratio)
    return ratio, ops.where(reward > 2.5, 0.0, ratio)


def worst(log_ratio, advantage, reward):
    """Where the advantage is 0, no derivative is wrong."""
    ratio = ops.exp(log_ratio) * advantage
    return ratio, ops.where(reward < -2.5, 0.0, ratio)


def far(log_ratio):
    ratio = ops.exp(log_ratio)
    return ratio, ops.where(log_ratio > 15.5, 0.0, ratio)


def farther(log_ratio):
    ratio = ops.exp(log_ratio)
    return ratio, ops.where(log_ratio < -15.5, 1.0, ratio)


def certain(log_ratio, logp):
    ratio = ops.exp(log_ratio)
    return ratio, ops.where(logp > -0.01, 0.0, ratio)


def doubtful(log_ratio, entropy):
    ratio = ops.exp(log_ratio)
    return ratio, ops.where(entropy > 8, 0.0, ratio)


@pytest.mark.parametrize(
    "surrogate", [late, last, long, alone, large, failed, best, worst, far, farther, certain, doubtful]
)
def test_a_derivative_that_is_wrong_for_few_of_the_tokens_is_found(surrogate):
    """As in long rows, at large advantages or where a sample failed."""
    off = type("Off", (gates.Gate,), {"surrogate": staticmethod(surrogate), "__module__": __name__})()
    with pytest.raises(AssertionError, match="stated derivative against autograd of Off.surrogate"):
        testing.check(offcorr.Correction(gate=off))


@pytest.mark.usefixtures("_unregistered")
def test_a_ratio_that_is_always_1_is_found():
    """A slope of 1 over several tokens passes, and nothing else would tell that its span forgot them."""
    ratio = of_span("test_mine", lambda x, rows: x * 0)
    with pytest.raises(AssertionError, match="log-ratio of Mine is 0 at every token, .*: write ratio=None"):
        testing.check(offcorr.Correction(ratio=ratio))


def test_a_span_that_lets_masked_tokens_in_is_found():
    @offcorr.spans.register("test_unmasked_maximum")
    def unmasked(x, rows):
        return x.cummax(1).values

    try:
        ratio = type("Unmasked", (ratios.Ratio,), {"span": "test_unmasked_maximum", "__module__": __name__})()
        with pytest.raises(AssertionError, match="masked_tokens_have_no_effect"):
            testing.check(offcorr.Correction(ratio=ratio))
    finally:
        offcorr.spans.unregister("test_unmasked_maximum")


def of_span(name, function):
    offcorr.spans.register(name)(function)
    return type("Mine", (ratios.Ratio,), {"span": name, "__module__": __name__})()


@pytest.fixture
def _unregistered():
    yield
    offcorr.spans.unregister("test_mine")


@pytest.mark.usefixtures("_unregistered")
@pytest.mark.parametrize("of", [torch.amax, torch.amin])
def test_a_largest_or_smallest_that_counts_masked_tokens_is_found(of):
    """Only a row of one sign, without a masked token, shows the padding beside it."""
    ratio = of_span("test_mine", lambda x, rows: of(x, 1, keepdim=True).expand_as(x))
    with pytest.raises(AssertionError, match="^Mine: padding_has_no_effect: "):
        testing.check(offcorr.Correction(ratio=ratio))


@pytest.mark.usefixtures("_unregistered")
@pytest.mark.parametrize("of, others", [(torch.amax, -math.inf), (torch.amin, math.inf)])
def test_the_largest_or_smallest_of_the_valid_tokens_passes(of, others):
    def span(x, rows):
        found = of(torch.where(rows.mask, x, others), 1, keepdim=True)
        return torch.where(found.isfinite(), found, 0.0).expand_as(x)

    assert "padding_has_no_effect" in testing.check(offcorr.Correction(ratio=of_span("test_mine", span)))


@pytest.mark.usefixtures("_unregistered")
def test_a_span_that_depends_on_the_width_of_the_padding_is_found():
    ratio = of_span("test_mine", lambda x, rows: x.mean(1, keepdim=True).expand_as(x))
    message = (
        r"^Mine: padding_has_no_effect: loss with 0 .* and 5 after each row .* Without ratio Mine the check passes"
    )
    with pytest.raises(AssertionError, match=message):
        testing.check(offcorr.Correction(ratio=ratio, gate=gates.Unclipped()))


@pytest.mark.usefixtures("_unregistered")
def test_a_stage_that_makes_nan_is_found():
    ratio = of_span("test_mine", lambda x, rows: torch.where(x > 0, x, math.nan))
    with pytest.raises(AssertionError, match="finite_on_ordinary_batches: span 'test_mine' of Mine gave nan"):
        testing.check(offcorr.Correction(ratio=ratio, gate=gates.Unclipped()))


@pytest.mark.usefixtures("_unregistered")
def test_a_stage_that_makes_nan_of_a_single_token_is_found():
    """A mean over all tokens but one: of one token it is 0 / 0."""

    def unbiased(x, rows):
        return (x.sum(1, keepdim=True) / (rows.count[:, None] - 1)).expand_as(x)

    with pytest.raises(AssertionError, match="finite_on_ordinary_batches: span 'test_mine' of Mine gave nan"):
        testing.check(offcorr.Correction(ratio=of_span("test_mine", unbiased), gate=gates.Unclipped()))


def test_a_failed_check_says_in_words_what_was_expected():
    gate = type("MinWithTwo", (gates.Gate,), {"surrogate": staticmethod(min_with_two), "__module__": __name__})()
    with pytest.raises(AssertionError) as failed:
        testing.check(offcorr.Correction(gate=gate))
    message = str(failed.value)
    assert "numbers differ, the most at [" in message and "Expected: Gate and ratio state the derivatives" in message
    assert "Without gate MinWithTwo the check passes." in message and "Tensor-likes" not in message


def test_a_failure_begins_with_the_stage_or_the_method():
    gate = type("MinWithTwo", (gates.Gate,), {"surrogate": staticmethod(min_with_two), "__module__": __name__})()
    custom = offcorr.Correction(gate=gate)
    with pytest.raises(AssertionError, match="^MinWithTwo: coefficient_is_the.* autograd of MinWithTwo.surrogate: "):
        testing.check(custom)
    with pytest.raises(AssertionError, match="^cispo: on_policy_gradient: "):
        testing.check("cispo?cap=0.5")
    with pytest.raises(AssertionError, match="^Correction: on_policy_gradient: "):  # each of the two is at fault
        testing.check(offcorr.Correction(gate=gates.DetachedClip(cap=0.5), weight=weights.Bound(high=0.5)))


def test_what_is_expected_is_one_plain_sentence():
    for name, run in testing.CHECKS.items():
        expected = run.__doc__ or ""
        assert expected.endswith(".") and "\n" not in expected and "`" not in expected, f"{name}: {expected}"


class Undeclared(gates.Gate):
    """A gradient where the advantage is 0."""

    surrogate = staticmethod(lambda logp, advantage: (logp * (advantage + 1), advantage + 1))
    detached = True


class Declared(gates.Unclipped):
    scales_with_advantage = False


def test_a_wrong_scales_with_advantage_is_said_in_words():
    check = testing.CHECKS["no_advantage_no_gradient"]
    with pytest.raises(AssertionError, match="^a coefficient is .* where the advantage is 0, expected 0$"):
        check(offcorr.Correction(gate=Undeclared()))
    with pytest.raises(AssertionError, match="^scales_with_advantage is False, and the coefficient is 0 .* expected T"):
        check(offcorr.Correction(gate=Declared()))


SEEN = []


@dataclass(frozen=True)
class Count:
    tokens: torch.Tensor

    def merge(self, other):
        return Count(self.tokens + other.tokens)


@dataclass(frozen=True)
class Remembering(offcorr.controllers.Controller):
    becomes, couples = "gate", "batch"

    def statistics(self, tokens):
        return Count(tokens.mask.sum())

    def resolve(self, statistics):
        SEEN.append(1)
        return gates.Clip(0.01 * len(SEEN), 0.2)


@pytest.mark.parametrize("check", [testing.check, testing.check_kernel])
def test_a_controller_with_state_is_found(check):
    with pytest.raises(AssertionError, match="Remembering.resolve gave two answers for equal statistics, Clip"):
        check(offcorr.Correction(gate=Remembering()))


@dataclass(frozen=True)
class WarnsAndRemembers(Remembering):
    def resolve(self, statistics):
        warn_once("of a check that fails")
        return super().resolve(statistics)


@pytest.mark.parametrize("check", [testing.check, testing.check_kernel])
def test_a_check_that_fails_swallows_no_later_warning(check):
    with pytest.raises(AssertionError, match="resolve gave two answers"):
        check(offcorr.Correction(gate=WarnsAndRemembers()))
    with pytest.warns(RuntimeWarning, match="of a check that fails"):
        warn_once("of a check that fails")


@dataclass(frozen=True)
class Gap:
    total: torch.Tensor
    tokens: torch.Tensor

    def merge(self, other):
        return Gap(self.total + other.total, self.tokens + other.tokens)


@dataclass(frozen=True)
class ByGap(offcorr.controllers.Controller):
    """A clip that widens with the engine's gap, which is 0 where the engine reports nothing."""

    declared: bool = False

    becomes, couples = "gate", "batch"

    @property
    def needs(self):
        return frozenset({"rollout_logp"} if self.declared else ())

    def statistics(self, tokens):
        return Gap(tokens.log_ratio("engine").raw.abs().sum(), tokens.mask.sum())

    def resolve(self, statistics):
        return gates.Clip(0.2, 0.2 + statistics.total / statistics.tokens)


def test_a_controller_that_reads_an_undeclared_field_is_found():
    testing.check(offcorr.Correction(gate=ByGap(declared=True)))
    with pytest.raises(AssertionError, match=r"ByGap.statistics reads rollout_logp of the batch, and its needs are"):
        testing.check(offcorr.Correction(gate=ByGap()))


@dataclass(frozen=True)
class Following(ByGap):
    """A controller whose pair follows the batch: total where ``rollout_logp`` is given, else staleness."""

    mismatch: str | None = None


def test_a_mismatch_of_its_own_that_is_none_declares_the_engines_log_probs():
    testing.check(offcorr.Correction(gate=Following()))
    with pytest.raises(AssertionError, match="ByGap.statistics reads rollout_logp"):
        testing.check(offcorr.Correction(gate=ByGap(declared=False)))


CONTROLLERS = {
    kind
    for module in (offcorr.advantages, controllers, gates, ratios, rejections, weights)
    for kind in (getattr(module, name) for name in module.__all__)
    if isinstance(kind, type) and issubclass(kind, controllers.Controller) and kind is not controllers.Controller
}
"""The public controllers; those of a single method are checked with it."""


def test_all_public_controllers_are_known():
    known = {controllers.BalancedClip, controllers.MomentBudget, controllers.MomentClip}
    assert known | {weights.SelfNormalise, offcorr.advantages.Centred} == CONTROLLERS


@pytest.mark.parametrize("kind", sorted(CONTROLLERS, key=lambda kind: kind.__name__))
def test_every_public_controller_passes(kind):
    """Alone in its slot; on-policy it need not leave REINFORCE's gradient as it is."""
    slot = {"rejection": "reject"}.get(kind.becomes, kind.becomes)
    testing.check(offcorr.Correction(**{slot: kind()}), on_policy=False)


def test_centred_advantages_pass_where_the_pair_follows_the_batch():
    assert len(testing.check(offcorr.get("near_overlap", advantages="centred"))) == len(testing.CHECKS)


@dataclass(frozen=True)
class OfRewarded(offcorr.controllers.Controller):
    """A clip as wide as the mean |log ratio| of the tokens with A > 0, of which a batch may have none."""

    least: int = 0

    becomes, couples = "gate", "batch"

    def statistics(self, tokens):
        rewarded = tokens.mask & (tokens.advantages > 0)
        far = torch.where(rewarded, tokens.log_ratio("staleness").raw.abs(), 0.0)
        return Gap(far.sum(), rewarded.sum())

    def resolve(self, statistics):
        bound = 0.1 + statistics.total / statistics.tokens.clamp(min=self.least)
        return gates.Clip(0.2, bound)


def test_a_controller_that_divides_by_what_a_batch_may_lack_is_found():
    testing.check(offcorr.Correction(gate=OfRewarded(least=1)))
    with pytest.raises(AssertionError, match="advantages that are all below 0: "):
        testing.check(offcorr.Correction(gate=OfRewarded()))


@dataclass(frozen=True)
class OfAll(offcorr.controllers.Controller):
    """A clip at the mean reward of the batch, under the name of a group's."""

    coupled: str = "batch"

    becomes = "gate"
    needs = frozenset({"rewards"})

    @property
    def couples(self):
        return self.coupled

    def statistics(self, tokens):
        return Gap(tokens.batch.rewards.sum(), torch.tensor(len(tokens.mask)))

    def resolve(self, statistics):
        bound = 0.3 + 0.29 * statistics.total / statistics.tokens
        return gates.Clip(bound, bound)


def test_a_controller_that_couples_more_than_it_says_is_found():
    testing.check(offcorr.Correction(gate=OfAll()))
    for name in offcorr.available():
        if testing._resolve(name)[0].couples == {"group"}:
            testing.check(name)
    with pytest.raises(AssertionError, match="groups_apart.*with others beside it"):
        testing.check(offcorr.Correction(gate=OfAll("group")))


@dataclass(frozen=True)
class Deviation(OfAll):
    """A clip at a multiple of the batch's root mean square log-ratio."""

    width: float = 1.0

    def statistics(self, tokens):
        squares = tokens.log_ratio("staleness").clamped.square()
        return Gap(torch.where(tokens.mask, squares, 0).sum(), tokens.mask.sum())

    def resolve(self, statistics):
        bound = self.width * (statistics.total / statistics.tokens.clamp(min=1)).sqrt()
        return gates.Clip(1 - (-bound).exp(), bound.exp() - 1)


@pytest.mark.parametrize("width", [0.25, 0.75, 1.5, 2.5, 4.0])
def test_a_group_coupling_is_found_where_a_bound_passes_few_tokens(width):
    with pytest.raises(AssertionError, match="groups_apart.*with others beside it"):
        testing.check(offcorr.Correction(gate=Deviation("group", width=width)))


@dataclass(frozen=True)
class AtAQuantile(controllers.Controller):
    """A clip at one of the batch's own log-ratios; the others keep their gradient."""

    share: float = 0.9
    becomes = "gate"

    def statistics(self, tokens):
        return Pooled(tokens.log_ratio("staleness").clamped[tokens.mask].abs())

    def resolve(self, statistics):
        bound = statistics.values.quantile(self.share)
        return gates.Clip(1 - (-bound).exp(), bound.exp() - 1)


@dataclass(frozen=True)
class Pooled:
    values: torch.Tensor

    def merge(self, other):
        return Pooled(torch.cat([self.values, other.values]))


@pytest.mark.parametrize("share", [0.0, 0.5, 0.9, 1.0])
def test_a_bound_at_a_tokens_own_ratio_is_no_wrong_derivative(share):
    """Autograd takes the mean of the two derivatives at a corner."""
    testing.CHECKS["coefficient_is_the_gradient"](offcorr.Correction(gate=AtAQuantile(share)))


def test_an_error_of_a_later_check_names_the_check():
    with pytest.raises(TypeError, match=r"^AtAQuantile.resolve: .* in the check nothing_left: A batch with no valid"):
        testing.check(offcorr.Correction(gate=AtAQuantile()))


class Bounds(NamedTuple):
    low: float
    high: float


@dataclass(frozen=True)
class OneBoundTwice(gates.Gate):
    eps_low: float = 0.2
    eps_high: float = 0.3

    @staticmethod
    def surrogate(log_ratio, p):
        clamped = ops.clamp(log_ratio, p.low, p.high)
        return clamped, ops.where(clamped == log_ratio, ops.zeros_like(log_ratio) + 1, 0.0)

    @property
    def params(self):
        return Bounds(-self.eps_low, self.eps_low)


def test_a_field_that_reaches_no_function_is_found():
    with pytest.raises(AssertionError, match="OneBoundTwice: the field eps_high changes nothing: with eps_high=1.3"):
        testing.check(offcorr.Correction(gate=OneBoundTwice()))


class Cap(NamedTuple):
    cap: float


def without_cap(value, logp, advantage, p):
    ratio = ops.exp(value)
    return ratio * logp * advantage, ratio * advantage


@dataclass(frozen=True)
class Forgotten(gates.Gate):
    """Its number is handed over, and the function does not read it."""

    cap: float = 2.0
    detached = True
    surrogate = staticmethod(without_cap)
    params = property(lambda self: Cap(self.cap))


def test_a_number_that_a_function_is_given_and_does_not_read_is_found():
    with pytest.raises(AssertionError, match="Forgotten: the field cap changes nothing: no function .* reads p.cap"):
        testing.check(offcorr.Correction(gate=Forgotten()))


def rooted(value):
    return ops.sqrt(1 + value / 12), value == value


@pytest.mark.parametrize(
    ("default", "annotation"),
    [
        (None, float | None),
        ("hard", Literal["hard", "soft"]),
        ("hard", 'Literal["hard", "soft"]'),  # as under `from __future__ import annotations`
        ("hard", Literal["hard", "soft"] | None),
        (0.5, float),
    ],
)
def test_an_option_that_reaches_nothing_is_found_by_its_kind(default, annotation):
    def forgetful(ignored=default):
        return offcorr.Correction(gate=gates.Clip(0.2, 0.2))

    forgetful.__annotations__ = {"ignored": annotation}
    build = offcorr.register("forgetful", multiplier="c")(forgetful)
    try:
        with pytest.raises(AssertionError, match="forgetful: the option ignored changes nothing"):
            testing.check(build)
    finally:
        unregister("forgetful")


@pytest.mark.parametrize("spec", ["moded", "moded?mode=soft"])
def test_an_option_that_acts_in_one_mode_is_not_ignored(spec):
    def moded(mode: Literal["hard", "soft"] = "hard", eps: float = 0.2, k: float = 2.0):
        return offcorr.Correction(gate=gates.Clip(eps, eps) if mode == "hard" else gates.DetachedClip(cap=k))

    offcorr.register("moded", multiplier="r")(moded)
    try:
        assert len(testing.check(spec)) == len(testing.CHECKS)
    finally:
        unregister("moded")


def drawn(value):
    return 1 + 0.01 * torch.rand_like(value), value == value


@dataclass(frozen=True)
class Drawn(weights.Weight):
    """Another weight at each call."""

    rule = staticmethod(drawn)


def test_a_random_stage_is_no_fault_of_the_mask():
    with pytest.raises(AssertionError, match="Drawn: equal_answers: loss, a batch that was seen before is"):
        testing.check(offcorr.Correction(weight=Drawn()), on_policy=False)


@dataclass(frozen=True)
class Rooted(weights.Weight):
    """NaN below a log-ratio of -12, which ordinary batches do not have."""

    rule = staticmethod(rooted)


def root_of_square(log_ratio):
    root = ops.sqrt(1 - log_ratio * log_ratio / 225)
    return root * log_ratio, root * log_ratio


@dataclass(frozen=True)
class RootOfSquare(gates.Gate):
    """NaN beyond a log-ratio of 15."""

    surrogate = staticmethod(root_of_square)


def test_nan_of_a_large_log_ratio_is_found_and_named():
    with pytest.raises(AssertionError, match=r"Rooted: finite_under_extremes: Rooted\.rule gave nan, at sequence"):
        testing.check(offcorr.Correction(weight=Rooted()))
    with pytest.raises(
        AssertionError, match=r"in float32, at log-ratios of up to 21, RootOfSquare\.surrogate gave nan"
    ):
        testing.check(offcorr.Correction(gate=RootOfSquare()), on_policy=False)


def fifth_power(log_ratio):
    power = ops.exp(5 * log_ratio)
    return power / (1 + power), 5 * power / (1 + power) ** 2


@dataclass(frozen=True)
class FifthPower(gates.Gate):
    """NaN in float32 from a log-ratio of 17.7 on, whose fifth power is no float32 number."""

    surrogate = staticmethod(fifth_power)


def test_an_overflow_in_float32_at_the_largest_log_ratio_is_found():
    """Larger ones are clamped to 20."""
    with pytest.raises(AssertionError, match=r"finite_under_extremes: in float32, .*FifthPower"):
        testing.check(offcorr.Correction(gate=FifthPower()), on_policy=False)


@dataclass(frozen=True)
class OverTheMean(gates.Gate):
    """Divided by a mean over all tokens, as only a controller may."""

    @staticmethod
    def surrogate(log_ratio):
        ratio = ops.exp(log_ratio)
        return ratio / ratio.mean(), ratio / ratio.mean()


def test_tokens_that_a_gate_couples_are_not_blamed_on_its_derivative():
    """Of which autograd sees the mean's part, too."""
    with pytest.raises(AssertionError, match="OverTheMean: splitting: sum of micro-batch losses"):
        testing.check(offcorr.Correction(gate=OverTheMean()))


@dataclass(frozen=True)
class EngineWeight(AtAQuantile):
    """A controller that counts the engine, and does not say so."""

    becomes = "weight"

    def resolve(self, statistics):
        return weights.Truncate(2.0)


def test_a_controller_that_counts_one_pair_is_told_how_to_say_so():
    with pytest.raises(ValueError, match='both count the staleness ratio.* mismatch = "engine" of EngineWeight'):
        offcorr.Correction(weight=EngineWeight())
    saying = type("Saying", (EngineWeight,), {"mismatch": "engine", "__module__": __name__})
    assert offcorr.Correction(weight=saying()).weight


def test_an_option_that_may_act_in_a_mode_that_was_not_tried_is_said_to_be_so():
    """Of a plain str no other value is known."""

    @offcorr.register("mine")
    def mine(mode: str = "a", eps: float = 0.2, tau: float = 0.5):
        return offcorr.Correction(gate=gates.Clip(eps, tau if mode == "b" else eps))

    said = r"changes nothing beside mode='a' \(other values of mode, which is no Literal, were not tried\)"
    try:
        with pytest.raises(AssertionError, match=f"the option tau {said}"):
            testing.check(mine)
    finally:
        unregister("mine")


class Within(NamedTuple):
    """A bound."""

    most: float


@pytest.mark.usefixtures("_unregistered")
@pytest.mark.parametrize("most", [0.1, 0.3, 1.0, 2.0])
def test_a_bound_of_a_mean_over_the_padded_width_is_found_whatever_it_is(most):
    """A row has to be near the bound for the padding to move it across."""
    of_span("test_mine", lambda x, rows: x.mean(1, keepdim=True).expand_as(x))

    @dataclass(frozen=True)
    class MeanWithin(rejections.Rejection):
        most: float
        span = "test_mine"
        rule = staticmethod(lambda value, p: (ops.zeros_like(value) + 1, ops.abs(value) <= p.most))

        @property
        def params(self):
            return Within(self.most)

    with pytest.raises(AssertionError, match="padding_has_no_effect"):
        testing.check(offcorr.Correction(gate=gates.Unclipped(), reject=MeanWithin(most)))
