"""Step: one optimizer step of any loop, however it is split; and that it needs torch alone."""

from __future__ import annotations

import copy
import dataclasses
import warnings

import pytest
import torch

import offcorr
from offcorr import Batch
from offcorr.stages import checks
from offcorr.training import EWMA, Annealed, ESSLearningRate, Linear, Recomputed, Rollout, Snapshots, Step, Supplied
from offcorr.training.anchors import ANCHORS, Anchor, default_anchor
from tests.fresh import python

ROWS, WIDTH = 8, 5


def whole_batch(**fields):
    chance = torch.Generator().manual_seed(0)
    old = -2 + torch.randn(ROWS, WIDTH, generator=chance)
    lengths = torch.tensor([5, 2, 4, 1, 3, 5, 2, 4])
    values = {
        "logp": (old + 0.3 * torch.randn(ROWS, WIDTH, generator=chance)).requires_grad_(),
        "old_logp": old,
        "rollout_logp": old + 0.1 * torch.randn(ROWS, WIDTH, generator=chance),
        "advantages": torch.randn(ROWS, generator=chance),
        "rewards": torch.randn(ROWS, generator=chance),
        "group_ids": torch.arange(ROWS) // 4,
        "mask": torch.arange(WIDTH) < lengths[:, None],
    }
    return Batch(**values | fields)


def counts(batch):
    return {"tokens": batch.mask.sum(), "sequences": len(batch.mask)}


@pytest.fixture(autouse=True)
def nothing_said_before():
    checks.warn_again()


@pytest.fixture
def optimizer():
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)


# -- one update, however it is split -------------------------------------------------------------------------


@pytest.mark.parametrize("averaged_over", [1, 3])
@pytest.mark.parametrize("sizes", [(8,), (4, 4), (1, 5, 2)])
@pytest.mark.parametrize("method", ["minpro", "gspo", "m2po", "asymre", "reinforce?aggregate=sum"])
def test_the_split_into_micro_batches_changes_nothing(method, sizes, averaged_over, optimizer):
    batch = whole_batch()
    wanted = offcorr.get(method)(batch)
    (gradient,) = torch.autograd.grad(wanted.loss, batch.logp)
    step = Step(offcorr.get(method), ess_lr=ESSLearningRate(optimizer))
    parts = [batch.rows(rows) for rows in torch.arange(ROWS).split(list(sizes))]
    step.begin(map(step.place, parts), averaged_over=averaged_over, **counts(batch))
    losses = []
    for i, part in enumerate(parts):
        assert step.in_progress == True  # noqa: E712
        losses.append(step.loss(step.place(part), last=i + 1 == len(parts)).loss)
    assert not step.in_progress
    (found,) = torch.autograd.grad(sum(losses), batch.logp)
    if method.endswith("sum"):
        averaged_over = 1  # divides by nothing, so a host that averages is on its own
    torch.testing.assert_close(found / averaged_over, gradient)
    whole = Step(offcorr.get(method), ess_lr=ESSLearningRate(optimizer))
    whole.begin([batch], **counts(batch))
    whole.loss(batch)
    assert step.metrics() == pytest.approx(whole.metrics())


AGGREGATES = ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm", "sum"]
REJECTING = {  # methods that drop some tokens and whole sequences; the last by the whole step's statistics
    "icepop": {"low": 0.9, "high": 1.1},
    "geo_rs": {"low": 0.95, "high": 1.05},
    "m2po": {"tau": 0.01},
    "ppo": {},
}


@pytest.mark.parametrize("averaged_over", [1, 3])
@pytest.mark.parametrize("sizes", [(8,), (1, 5, 2)])
@pytest.mark.parametrize("aggregate", AGGREGATES)
@pytest.mark.parametrize("method", REJECTING)
def test_what_is_kept_is_counted_over_the_whole_step(method, aggregate, sizes, averaged_over):
    """count_rejected=False: the step's loss is the whole batch's, whose denominator is its own kept units."""
    length = {"max_length": WIDTH} if aggregate.endswith("norm") else {}
    loss_fn = offcorr.get(method, **REJECTING[method], aggregate=aggregate, count_rejected=False, **length)
    batch = whole_batch()
    wanted = loss_fn(batch)
    counting = dataclasses.replace(loss_fn, count_rejected=True)(batch)
    if REJECTING[method] and aggregate != "sum":
        assert counting.loss != wanted.loss, "nothing was rejected: nothing was tried"
    step = Step(loss_fn)
    parts = [batch.rows(rows) for rows in torch.arange(ROWS).split(list(sizes))]
    step.begin(map(step.place, parts), averaged_over=averaged_over, **counts(batch))
    last = [False] * (len(parts) - 1) + [True]
    coefficients = torch.cat(
        [step.loss(step.place(part), last=end).coefficient for part, end in zip(parts, last, strict=True)]
    )
    averaged_over = 1 if aggregate == "sum" else averaged_over
    torch.testing.assert_close(coefficients / averaged_over, wanted.coefficient)


def test_nothing_kept_is_no_division_by_zero():
    batch = whole_batch()
    step = Step(offcorr.get("icepop", low=10.0, high=11.0, count_rejected=False))
    step.begin([batch], averaged_over=2)
    assert float(step.denominator) == 0.5 and not step.loss(batch).coefficient.any()


def test_what_another_rank_keeps_counts_too():
    batch = whole_batch()
    loss_fn = offcorr.get("icepop", low=0.9, high=1.1, count_rejected=False)
    other = torch.tensor([7.0, 2.0], dtype=torch.float64)
    step = Step(loss_fn, gather=lambda vector: torch.stack([vector, other]))
    step.begin([batch], averaged_over=2)
    assert float(step.denominator) == (float(loss_fn.kept_units(batch)[0]) + 7) / 2


def test_counts_are_of_all_ranks():
    """The statistics and the numbers of another rank arrive by ``gather``."""
    batch = whole_batch()
    parts = [batch.rows(slice(0, 3)), batch.rows(slice(3, None))]
    sent = [[], []]
    for rank, part in enumerate(parts):  # what each of the two would send
        alone = Step(offcorr.get("m2po"), gather=lambda v, rank=rank: (sent[rank].append(v), v[None])[1])
        total = alone.total(part.mask.sum().reshape(1))
        alone.begin([part], tokens=total[0])
        alone.loss(part)
        alone.metrics()

    def gather_on(rank):
        calls = iter(range(99))

        def gather(vector):
            i = next(calls)
            both = [sent[0][i], sent[1][i]]
            width = max(map(len, both))
            pad = [torch.nn.functional.pad(v, (0, width - len(v))) for v in both]
            assert len(vector) in (width, len(sent[rank][i]))
            return torch.stack(pad)

        return gather

    whole = Step(offcorr.get("m2po"))
    whole.begin([batch], tokens=batch.mask.sum())
    wanted = whole.loss(batch)
    for rank, part in enumerate(parts):
        step = Step(offcorr.get("m2po"), gather=gather_on(rank))
        tokens = step.total(part.mask.sum().reshape(1))[0]
        assert tokens == batch.mask.sum()
        step.begin([part], tokens=tokens, averaged_over=2)
        rows = slice(0, 3) if rank == 0 else slice(3, None)
        torch.testing.assert_close(step.loss(part).coefficient, 2 * wanted.coefficient[rows])


def test_what_a_step_must_be_told():
    batch = whole_batch()
    with pytest.raises(ValueError, match="window is empty, but 'm2po' needs the batches of the whole optimizer step"):
        Step(offcorr.get("m2po")).begin(**counts(batch))
    with pytest.raises(ValueError, match="sequences is None, but aggregate='seq-mean-token-mean' divides by"):
        Step(offcorr.get("gspo")).begin(tokens=3)
    with pytest.raises(ValueError, match="window is empty, but count_rejected=False of 'icepop' needs the batches"):
        Step(offcorr.get("icepop", count_rejected=False)).begin(**counts(batch))
    with pytest.raises(ValueError, match="would count twice"):
        Step(offcorr.get("icepop"), anchor=Rollout())
    with pytest.raises(ValueError, match="loss is computed elsewhere"):
        Step().loss(batch)


@pytest.mark.parametrize("number", [4, 4.0, torch.tensor(4)])
def test_fewer_tokens_than_a_micro_batch_has_are_refused(number):
    """Four sequences, say; before anything is counted."""
    batch = whole_batch()
    step, own = Step(offcorr.get("dapo")), int(batch.mask.sum())
    step.begin(tokens=number)
    with pytest.raises(ValueError, match=f"tokens is 4, but this micro-batch alone has {own}: pass begin"):
        step.loss(step.place(batch))
    assert not step.metrics()
    step.begin(tokens=own, averaged_over=8)
    step.loss(step.place(batch))
    step.begin()
    step.count(tokens=number, estimated=True)
    step.loss(step.place(batch))


def run_step(step, parts, last=True, **told):
    step.begin(**told)
    for i, part in enumerate(parts):
        step.loss(step.place(part), last=last and i + 1 == len(parts))
    step.end(1)


@pytest.mark.parametrize("method", ["dapo", "gspo"])
@pytest.mark.parametrize("change", [-1, 0, 20])
@pytest.mark.parametrize("ranks", [1, 2])
def test_another_number_than_the_micro_batches_have_is_said(method, change, ranks):
    """Once, with both numbers; ranks that hold the same micro-batches were told the number of all of them."""
    batch, unit = whole_batch(), {"dapo": "tokens", "gspo": "sequences"}[method]
    parts = [batch.rows(slice(0, 3)), batch.rows(slice(3, None))]
    own = ranks * int(counts(batch)[unit])
    step = Step(offcorr.get(method), gather=lambda vector: vector[None].repeat(ranks, 1))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            run_step(step, parts, **{unit: torch.tensor(own + change)})
            assert not any(name.startswith("counted") for name in step.metrics())
    said = [str(one.message) for one in caught if "but the micro-batches" in str(one.message)]
    assert len(said) == (change != 0)
    if change:
        assert f"{unit} is {own + change}, but the micro-batches of an optimizer step have {own} over" in said[0]


@pytest.mark.parametrize("of_window, said", [(3, False), (2, True), (4, True)])
@pytest.mark.parametrize("spec", ["bapo", "icepop?count_rejected=False"])
def test_a_window_of_other_micro_batches_is_said(spec, of_window, said):
    batch = whole_batch()
    parts = [batch.rows(slice(a, b)) for a, b in ((0, 1), (1, 3), (3, None), (0, 1))]
    step = Step(offcorr.get(spec), anchor=Recomputed())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run_step(step, parts[:3], window=parts[:of_window], **counts(batch))
    found = [str(one.message) for one in caught if "the window of begin() had" in str(one.message)]
    assert len(found) == said
    assert not said or f"had {of_window} micro-batches, and the optimizer step has 3: the statistics of" in found[0]


def test_a_loop_that_reads_no_metrics_is_told_of_its_first_step():
    batch = whole_batch()
    step = Step(offcorr.get("dapo"))
    with pytest.warns(RuntimeWarning, match="but the micro-batches of an optimizer step have"):
        run_step(step, [batch], tokens=int(counts(batch)["tokens"]) + 4)


def test_a_step_without_old_logp_says_so_unless_that_is_meant():
    batch = whole_batch().replaced(old_logp=None, rollout_logp=None)
    with pytest.warns(RuntimeWarning, match="old_logp is None, and 'ppo' compares with it; no anchor was chosen"):
        Step(offcorr.get("ppo")).place(batch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Step(offcorr.get("ppo"), anchor=Recomputed()).place(batch)
        Step(offcorr.get("ppo")).place(batch, recomputed=batch.logp.detach())
        Step(offcorr.get("reinforce")).place(batch)


def test_a_rank_without_gather_is_told_of_gather_and_not_of_its_gradient(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    batch = whole_batch()
    step = Step(offcorr.get("dapo"))
    with pytest.warns(RuntimeWarning, match="there are 2 ranks, and without gather= a Step's metrics"):
        run_step(step, [batch], tokens=2 * int(counts(batch)["tokens"]))


def test_what_is_not_compared_is_not_said():
    """A mean over several steps; an evaluation; the kept tokens, from the window; rows of padding."""
    batch = whole_batch()
    empty = batch.replaced(mask=batch.mask & (torch.arange(ROWS) > 1)[:, None])
    dropping = Step(offcorr.get("icepop", low=0.9, high=1.1, count_rejected=False))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step = Step(offcorr.get("dapo"))
        step.begin()
        step.count(tokens=100, estimated=True)
        step.loss(batch)
        step.begin(tokens=100, train=False)
        with torch.no_grad():
            step.loss(batch)
        dropping.begin([batch], tokens=100)
        dropping.loss(batch)
        for sequences in (ROWS, ROWS - 2):
            padded = Step(offcorr.get("gspo"))
            run_step(padded, [empty], sequences=sequences)
            padded.metrics()
        step.metrics(), step.metrics(train=False), dropping.metrics()


def test_a_step_without_a_last_micro_batch_is_said(optimizer):
    batch = whole_batch()
    step = Step(offcorr.get("dapo"))
    with pytest.warns(RuntimeWarning, match=r"end\(1\) ends an optimizer step of 2 micro-batches, all .* last=False"):
        run_step(step, [batch.rows(slice(0, 3)), batch.rows(slice(3, None))], last=False, **counts(batch))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run_step(step, [batch], last=False, **counts(batch))  # once
        step.begin(tokens=3)
        step.end(3)  # a step that had none
        step.begin(tokens=100, train=False)
        with torch.no_grad():
            step.loss(batch)
        step.end(4)


def test_no_tokens_are_no_division_by_zero():
    step = Step(offcorr.get("dapo"))
    for zero in (0, torch.tensor(0)):
        step.begin(tokens=zero, averaged_over=4)
        assert float(step.denominator) == 0.25


# -- schedules, anchors, learning rate -----------------------------------------------------------------------


def test_the_correction_in_force():
    annealed = Annealed(lambda power: offcorr.get("holderpo", power=power), {"power": Linear(2.0, -1.0)})
    step = Step(annealed)
    for done, power in ((0.0, 2.0), (0.5, 0.5)):
        step.begin(done=done, sequences=1)
        assert step.correction.ratio.power == power
        assert step.metrics()["offcorr/schedule/power"] == power


def test_the_default_anchor():
    given, engine, bare = whole_batch(), whole_batch(old_logp=None), whole_batch(old_logp=None, rollout_logp=None)
    ppo, tis = offcorr.get("ppo"), offcorr.get("tis")
    for batch, loss, kind in (
        (given, ppo, Supplied),
        (given, tis, Supplied),
        (engine, ppo, Rollout),
        (engine, tis, Recomputed),
        (engine, None, Recomputed),
        (bare, ppo, Recomputed),
    ):
        given = {"old_logp": batch.old_logp is not None, "rollout_logp": batch.rollout_logp is not None}
        assert type(default_anchor(loss, **given)) is kind
        assert Step(loss).reads_recomputed(**given) == (kind is Recomputed)
    recomputed = torch.zeros(ROWS, WIDTH)
    assert Step(tis).place(engine, recomputed=recomputed).old_logp is recomputed
    with pytest.warns(RuntimeWarning, match="no anchor was chosen"):
        assert Step(tis).place(engine).old_logp is None


def test_the_anchor_is_in_the_repr():
    step = Step(offcorr.get("ppo"))
    assert repr(step) == "Step(loss='ppo', anchor=None, by default)" and step.anchor_in_force is None
    step.place(whole_batch(old_logp=None))
    assert repr(step) == "Step(loss='ppo', anchor=Rollout(), by default)"
    assert repr(Step(offcorr.get("ppo"), anchor=Supplied())) == "Step(loss='ppo', anchor=Supplied())"
    assert repr(Step()) == "Step(loss=None, anchor=None, by default)"
    later = Step(offcorr.get("ppo"), anchor=Supplied)
    assert repr(later) == "Step(loss='ppo', anchor=made when first needed)" and later.anchor_in_force is None
    assert repr(later.anchor) == "Supplied()" and repr(later) == "Step(loss='ppo', anchor=Supplied())"


def test_an_anchor_is_printed_with_the_name_that_configurations_use():
    assert str(Supplied()) == "anchor 'snapshot'"
    assert str(Snapshots(torch.nn.Linear(1, 1), limit=2)) == "Snapshots(limit=2)"  # no configuration names it
    step = Step(offcorr.get("ppo"))
    batch = step.place(whole_batch(old_logp=None))
    assert "(anchor 'rollout', by default)" in step.describe(batch)


def test_a_batch_that_was_not_placed_is_not_described():
    step, batch = Step(offcorr.get("dapo")), whole_batch()
    with pytest.raises(ValueError, match=r"step.describe\(step.place\(batch\)\)"):
        step.describe(batch)
    assert "old_logp: the weights that sampled" in step.describe(step.place(batch))
    with pytest.raises(ValueError, match=r"takes what place\(\) returned"):
        step.describe(batch.replaced(old_logp=None))


def test_every_anchor_says_which_policy_it_is():
    said = [anchor.policy for anchor in {*ANCHORS.values(), Snapshots}]
    assert len(set(said)) == len(said) and Anchor.policy not in said


def test_the_engines_gap_is_the_staleness_series_where_the_anchor_is_the_engine():
    batch = whole_batch(old_logp=None)
    step = Step(offcorr.get("ppo"))
    step.begin(**counts(batch))
    step.loss(step.place(batch))
    logged = step.metrics(choice="aliases")
    assert logged["mismatch_kl"] == logged["offcorr/staleness/k3"] > 0
    assert not any(name.startswith("offcorr/engine/") for name in logged)


def test_evaluation_is_kept_apart(optimizer):
    batch = whole_batch()
    step = Step(offcorr.get("ppo"), anchor=EWMA(torch.nn.Linear(1, 1), window=2), ess_lr=ESSLearningRate(optimizer))
    step._anchor.place = lambda batch, score, recomputed: batch
    step.begin(train=False, **counts(batch))
    with torch.no_grad():
        step.loss(step.place(batch))
    assert "offcorr/loss/kept" in step.metrics(train=False)
    assert step.metrics() == {} and not step.in_progress
    step.begin(**counts(batch))
    step.loss(step.place(batch))
    step.end(1)
    logged = step.metrics()
    assert 0 < logged["lr_scale"] < 1 and logged["offcorr/anchor/active"] <= 1 and step.metrics(train=False) == {}


def test_only_the_next_step_is_scaled(optimizer):
    (group,) = optimizer.param_groups
    read = []
    step = Step(offcorr.get("ppo"), ess_lr=ESSLearningRate(optimizer))
    optimizer.register_step_pre_hook(lambda *_: read.append(group["lr"]))
    batch = whole_batch()
    step.begin(**counts(batch))
    step.loss(batch, last=False)
    optimizer.step()
    step.loss(batch)
    optimizer.step()
    step.end(1)
    optimizer.step()
    assert read == [1.0, step.ess_lr.lr_scale, 1.0] and step.ess_lr.lr_scale < 1


def test_calibrated_on_what_is_on_policy(optimizer):
    step = Step(offcorr.get("ppo"), ess_lr=ESSLearningRate(optimizer, base="auto"))
    version = torch.full((ROWS, WIDTH), 3)
    bases = []
    for trained in (4, 3, 4):
        batch = whole_batch(rollout_version=version, trainer_version=trained)
        step.begin(**counts(batch))
        step.loss(batch)
        logged = step.metrics()
        bases.append(logged["ess_base"])
        assert (logged["lr_scale"] == 1.0) == (trained == 3 or len(bases) == 3)
    assert bases[0] == 1.0 > bases[1] == bases[2]


def test_made_anew_by_restart(optimizer):
    model = torch.nn.Linear(2, 1)
    step = Step(
        offcorr.get("ppo"),
        anchor=lambda: EWMA(model, window=4, reset_below=None),
        ess_lr=lambda: ESSLearningRate(optimizer),
    )
    step.restart()
    first, hooked = step.anchor, len(optimizer._optimizer_step_pre_hooks)
    step.restart()
    assert step.anchor is not first and len(optimizer._optimizer_step_pre_hooks) == hooked == 1


@pytest.mark.parametrize("use", [lambda step: step.place(whole_batch()), Step.restart, lambda step: step.anchor])
def test_what_a_function_makes_is_checked(use):
    counting_twice = Step(offcorr.get("tis"), anchor=Rollout)
    with pytest.raises(ValueError, match=r"loss 'tis': the anchor Rollout\(\) puts .* would count twice"):
        use(counting_twice)
    assert counting_twice.anchor_in_force is None
    use(Step(offcorr.get("ppo"), anchor=Rollout))
    with pytest.raises(TypeError, match="anchor is a function that returned 'rollout', expected an offcorr.training.A"):
        use(Step(offcorr.get("ppo"), anchor=lambda: "rollout"))


def test_what_is_no_anchor_or_learning_rate_is_refused_at_once(optimizer):
    with pytest.raises(TypeError, match=r"anchor is 'rollout', expected an .*Anchor, .* make_anchor\('rollout'\)"):
        Step(offcorr.get("ppo"), anchor="rollout")
    with pytest.raises(TypeError, match=r"ess_lr is 'sqrt', expected an .*ESSLearningRate, .*Rate\(optimizer\)"):
        Step(offcorr.get("ppo"), ess_lr="sqrt")
    step = Step(offcorr.get("ppo"), ess_lr=lambda: optimizer)
    with pytest.raises(TypeError, match="ess_lr is a function that returned SGD"):
        step.restart(version=3)


def test_an_anchor_follows_a_loss_that_is_computed_elsewhere():
    """It resets itself by the share of active tokens, which the coefficient of that loss has."""
    batch = whole_batch()
    out = offcorr.get("ppo", eps_low=0.05, eps_high=0.05)(batch)
    logged = []
    for loss in (None, offcorr.get("ppo", eps_low=0.05, eps_high=0.05)):
        step = Step(loss, anchor=EWMA(torch.nn.Linear(1, 1), window=2))
        step.begin(**({} if loss is None else counts(batch)))
        if loss is None:
            step.observe(batch, coefficient=out.coefficient)
        else:
            step.loss(batch)
        step.end(1)
        logged.append({name: value for name, value in step.metrics().items() if "anchor" in name})
    assert logged[0] == logged[1] and 0 < logged[0]["offcorr/anchor/active"] < 1


def test_what_such_an_anchor_must_be_told():
    step, batch = Step(anchor=EWMA(torch.nn.Linear(1, 1), window=2)), whole_batch()
    step.begin()
    with pytest.raises(ValueError, match=r"coefficient is None, but EWMA\(.*\) resets itself by .* observe\(coeff"):
        step.observe(batch)
    with pytest.raises(ValueError, match=r"coefficient has shape \(8,\), expected \(8, 5\), that of logp"):
        step.observe(batch, coefficient=torch.ones(ROWS))
    assert step.metrics() == {}
    without = Step(anchor=EWMA(torch.nn.Linear(1, 1), window=2, reset_below=None))
    without.begin()
    without.observe(batch)
    without.end(1)


# -- checkpoints ---------------------------------------------------------------------------------------------


def test_a_run_continues_from_its_state(optimizer, tmp_path):
    def step_of(model):
        anchor = EWMA(model, window=4, reset_below=None)
        return Step(offcorr.get("ppo"), anchor=anchor, ess_lr=ESSLearningRate(optimizer, base="auto"))

    model = torch.nn.Linear(2, 1)
    step = step_of(model)
    with torch.no_grad():
        model.weight += 1
    step.end(1)
    batch = whole_batch(rollout_version=torch.zeros(ROWS, WIDTH, dtype=torch.long), trainer_version=0)
    step.begin(**counts(batch))
    step.loss(batch)
    torch.save(step.state_dict(), tmp_path / "state.pt")
    saved = torch.load(tmp_path / "state.pt", weights_only=True)

    resumed = step_of(copy.deepcopy(model))
    assert resumed.load_state_dict({}) == ["EWMA(window=4, reset_below=None)", "the calibrated ess_base"]
    assert resumed.load_state_dict(saved) == []
    assert resumed.ess_lr.base == step.ess_lr.base < 1
    for found, wanted in zip(resumed.anchor.weights().values(), step.anchor.weights().values(), strict=True):
        assert torch.equal(found, wanted)
    assert Step(offcorr.get("ppo"), ess_lr=ESSLearningRate(optimizer)).state_dict() == {}


# -- a core install ------------------------------------------------------------------------------------------

BLOCKED = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("transformers", "trl", "accelerate", "peft", "deepspeed", "datasets"):
            raise ModuleNotFoundError(f"{name} is not part of a core install")

sys.meta_path.insert(0, Blocked())
"""


def in_a_core_install(code):
    done = python(BLOCKED + code)
    assert done.returncode == 0, done.stderr[-3000:]


def test_training_needs_torch_alone():
    """EWMA and Snapshots among it, which hold weights."""
    in_a_core_install(
        """
import torch, offcorr
from offcorr.training import EWMA, Snapshots, Step

class Bigram(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.logits = torch.nn.Embedding(5, 5)
    def forward(self, ids):
        return self.logits(ids[:, :-1]).log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]

model, ids = Bigram(), torch.randint(5, (4, 6))
score = lambda module: module(ids)
for anchor in (EWMA(model, window=4), Snapshots(model, limit=2)):
    step = Step(offcorr.get("ppo"), anchor=anchor)
    batch = offcorr.Batch(logp=score(model), advantages=torch.ones(4), mask=torch.ones(4, 5).bool(),
                          rollout_version=torch.zeros(4, 5).long(), trainer_version=0)
    step.begin(sequences=4)
    step.loss(step.place(batch, score)).loss.backward()
    step.end(1)
    assert step.metrics()["offcorr/staleness/abs_max"] < 1e-6
assert "transformers" not in sys.modules
"""
    )


def test_metrics_are_read_where_their_names_were_never_imported():
    """As from another process: the accumulators know how they merge and what they read out."""
    in_a_core_install(
        """
import torch
from offcorr.metrics import Max, Mean, Metrics
metrics = Metrics({"offcorr/staleness/lag_max": Max(torch.tensor([3.0])), "field/k2": Mean(torch.tensor([1.0, 4.0]))})
other = Metrics({"offcorr/staleness/lag_max": Max(torch.tensor([5.0])), "field/k2": Mean(torch.tensor([1.0, 4.0]))})
assert metrics.merge(other).compute() == {"offcorr/staleness/lag_max": 5.0, "field/k2": 0.25}
"""
    )


def test_a_loop_that_forgets_a_call_is_told():
    """Each of these would train on the denominator of a micro-batch, or on that of the step before."""
    step, batch = Step(offcorr.get("dapo")), offcorr.testing.example()
    with pytest.raises(RuntimeError, match="no optimizer step has begun"):
        step.loss(batch)
    step.begin()
    with pytest.raises(ValueError, match="tokens is None, but aggregate='token-mean' divides by the tokens"):
        step.loss(batch)
    step.begin(tokens=100)
    step.loss(batch, last=False)
    step.loss(batch)
    step.end(1)
    with pytest.raises(RuntimeError, match="call begin.. before the first micro-batch of every step"):
        step.loss(batch)
    step.begin(tokens=100, train=False)
    for _ in range(2):  # an evaluation has no last micro-batch
        step.loss(batch)
    with pytest.raises(TypeError, match="loss is 'dapo', expected an offcorr.Correction"):
        Step("dapo")


def test_a_micro_batch_after_the_last_is_refused():
    """The usual mistake of accumulation: begin for each optimizer step, and last=True, the default, for each loss."""
    step, batch = Step(offcorr.get("dapo")), whole_batch()
    step.begin(**counts(batch))
    step.loss(batch)
    measured = step.metrics()
    with pytest.raises(RuntimeError, match="since the last micro-batch of the one before: .* last=False with all"):
        step.loss(batch)
    assert measured and step.metrics() == {}, "what was refused was measured"
    step.begin(**counts(batch))
    step.loss(batch, last=False)
    step.loss(batch, last=False)
    step.loss(batch)


def test_a_step_on_the_denominator_of_an_evaluation_is_refused():
    step, batch = Step(offcorr.get("dapo")), whole_batch()
    step.begin(tokens=1000, train=False)
    with torch.no_grad():
        step.loss(batch)
    with pytest.raises(RuntimeError, match="train=False. began an evaluation, and logp of this batch has a graph"):
        step.loss(batch)
    step.begin(**counts(batch))
    step.loss(batch, last=False)
    step.begin(train=False, **counts(batch))  # in the middle of an optimizer step
    with pytest.raises(RuntimeError, match="call begin.. before the first micro-batch of every step"):
        step.loss(batch)


def test_a_run_that_restarts_has_begun_no_step():
    step, batch = Step(offcorr.get("dapo")), whole_batch()
    step.begin(**counts(batch))
    step.restart()
    with pytest.raises(RuntimeError, match="no optimizer step has begun"):
        step.loss(batch)


@pytest.mark.parametrize(
    ("anchor", "versions", "said"), [(Recomputed, True, True), (Supplied, True, False), (Recomputed, False, False)]
)
def test_engine_series_that_hold_the_lag_are_said_at_the_start(anchor, versions, said):
    """The engine of a sampler that may lag, against log-probs of later weights than it had."""
    given = {"rollout_version": torch.zeros(ROWS, WIDTH, dtype=torch.long), "trainer_version": 3} if versions else {}
    batch = dataclasses.replace(whole_batch(), **given)
    step = Step(offcorr.get("tis"), anchor=anchor())
    placed = step.place(batch, recomputed=torch.zeros(ROWS, WIDTH))
    held = "offcorr/engine holds the lag as well (anchor='snapshot'"
    unknown = "; if the sampler lags, offcorr/engine holds that (anchor='snapshot' keeps the two apart)"
    assert (held in step.describe(placed, lags=True)) == said
    assert (unknown in step.describe(placed)) == said
    assert "(anchor='snapshot' keeps" not in step.describe(placed, lags=False)


def test_the_line_of_a_run_has_the_options_that_differ():
    cap = {"name": "truncate", "cap": 2.0}
    custom = offcorr.Correction(ratio=offcorr.ratios.Turn(), weight=offcorr.weights.Truncate(2.0))
    power = Annealed(lambda **options: offcorr.get("holderpo", **options), {"power": Linear(2.0, -1.0)})
    for loss, said in (
        (offcorr.get("cispo"), "loss 'cispo'; "),
        (offcorr.get("cispo", weight=cap), "loss 'cispo' {'weight': {'name': 'truncate', 'cap': 2.0"),
        (custom, "loss 'custom' (turn, clip, truncate); "),
        (power, "loss 'holderpo' (power by a schedule); "),
        (offcorr.get("reinforce"), "loss 'reinforce', which takes no ratio, so that neither the age of the samples"),
    ):
        step = Step(loss)
        assert step.describe(step.place(whole_batch())).startswith(said)


def test_the_correction_of_a_step_cannot_be_set():
    step = Step(offcorr.get("ppo"))
    with pytest.raises(
        AttributeError, match=r"^Step.correction cannot be set: .*Annealed; .*, without Step \(docs/ext"
    ):
        step.correction = offcorr.get("dapo")
    assert step.correction.method == "ppo"


@pytest.mark.parametrize("placed", [True, False])
def test_a_batch_that_was_not_placed_and_has_no_old_logp_is_warned_of(placed):
    """Its loss would be REINFORCE, whatever the anchor: ``place`` gives it ``old_logp``."""
    checks.warn_again()
    batch = dataclasses.replace(offcorr.testing.example(), old_logp=None)
    step = Step(offcorr.get("dapo"), anchor=Rollout())
    step.begin(sequences=batch.sequences, tokens=int(batch.mask.sum()))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step.loss(step.place(batch) if placed else batch)
    assert any("old_logp is None, and 'dapo' compares with it" in str(one.message) for one in caught) == (not placed)
