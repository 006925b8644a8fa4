"""The contract of a correction, as checks that can be run on any method.

    offcorr.testing.check("minpro")        # a name, a spec ("minpro?eps_high=0.3"), or "my_file.py:my_method"
    offcorr.testing.check(my_method)       # a registered function, or any callable that gives a Correction
    offcorr.testing.check(my_correction)   # a finished Correction

The test suite runs every check on every discovered method; a new method file is covered by being there.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
import warnings
from collections.abc import Callable
from typing import Any, get_args, get_type_hints

import torch
from torch import Tensor

from offcorr.batch import Batch, Tokens
from offcorr.check_batches import example, layouts, moved, one_sided
from offcorr.closeness import check_close, check_equal_numbers
from offcorr.correction import Correction, Output
from offcorr.kernels.dispatch import backend, use
from offcorr.methods.registry import Method, find, from_config, get, illustration, registered, split_spec
from offcorr.stage_checks import (
    check_controllers,
    check_fields,
    check_finite,
    check_gradient_passes,
    check_slope,
    failure,
    others,
    subject,
)
from offcorr.stages.aggregate import AGGREGATIONS
from offcorr.stages.checks import quietly
from offcorr.stages.reference import gated

__all__ = ["CHECKS", "OnReference", "check", "check_kernel", "example"]

Build = Callable[..., Correction]


class OnReference(AssertionError):
    """A correction that runs on the torch reference alone, so that there is no kernel to compare it with.

    Args:
        reason: why the kernel cannot run it; ``offcorr.backend`` gives the same.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(f"runs on the reference: {reason}")


def check(method: Any, *, on_policy: bool | None = None) -> list[str]:
    """Run every check on a method; returns the names of the checks that it passed.

    The batches have rows of 1 to 256 tokens, log-probs down to about -15, some of tokens of a probability above .99,
    entropies of up to about 10 nats, advantages from -9 to 9, rewards from -3 to 3, 0 and halves among them, and
    log-ratios of up to about 16 nats (where finite numbers are enough, 1e4): what a stage does beyond these is not
    compared.

    Args:
        method: what ``offcorr.resolve`` takes (a name, a spec, FILE.py:NAME), a registered function or class, any
            callable from options to a Correction, or a Correction.
        on_policy: whether its on-policy gradient is REINFORCE's; None: as the method was registered, else True.

    Raises:
        AssertionError: names the method (for a custom correction the class of the stage without which the check
            passes, where a single one is), the check, the numbers that differ and what was expected; or an option
            of the method's function that its correction does not depend on; or a number among the fields of a
            ratio, weight, rejection or gate that its functions do not read.
        TypeError: a stage's function cannot run; the message begins with its class and attribute, and ends with the
            check.
        ValueError: the method is unknown, or a field that it needs is none of ``example``'s.

    >>> len(check("ppo")) == len(check("ppo?strict=True")) == len(CHECKS)
    True
    """
    loss_fn, declared = _resolve(method)
    loss_fn = dataclasses.replace(loss_fn, strict=False)  # which would refuse the NaN that some checks put in
    as_reinforce = declared if on_policy is None else on_policy
    passed = []
    with quietly():
        _options_matter(method)
        check_fields(loss_fn)
        for name, run in CHECKS.items():
            if run is on_policy_gradient and not as_reinforce:
                continue
            try:
                run(loss_fn)
            except AssertionError as error:
                raise AssertionError(failure(run, loss_fn, error)) from error
            except TypeError as error:
                raise TypeError(f"{error}; this is in the check {run.__name__}: {run.__doc__}") from error
            passed.append(name)
    return passed


def check_kernel(method: Any, device: torch.device | str = "cpu") -> float:
    """Run a correction in the fused kernel and on the reference; returns the largest difference of a coefficient.

    Batches are float32, padded and packed, with masked and unscored tokens, in rows of several blocks, with ratios
    near 1 and far from it.  It finds a Triton twin that computes another span than its torch function.

    Args:
        method: as in ``check``.
        device: of the batches; on a CPU the kernel needs ``TRITON_INTERPRET=1`` in the environment, set before triton
            is imported.

    Raises:
        AssertionError: the two differ by more than rounding, or a controller keeps state; ``OnReference``, which is
            one, where the correction runs on the reference alone, with the reason.
        RuntimeError: ``device`` is a CPU, and ``TRITON_INTERPRET=1`` is not set.
    """
    loss_fn, _ = _resolve(method)
    largest = 0.0
    with quietly():
        equal_answers(loss_fn)
        for seed, spread in enumerate((0.01, 0.3, 3.0)):
            wide = example(seed, sequences=3, width=600, spread=spread)
            packed = layouts(wide, lengths=(600, 0, 333)).packed
            for layout, batch in (("padded", wide), ("packed", packed)):
                of_batch = f"on a {layout} batch at a spread of {spread} nats"
                largest = max(largest, _kernel_error(loss_fn, moved(batch, torch.float32, device), of_batch))
    return largest


# -- the checks ----------------------------------------------------------------------------------------------


def equal_answers(loss_fn: Correction) -> None:
    """A batch gives the same twice, and controllers give the same stage for the same statistics: none keeps a state."""
    check_controllers(loss_fn, example())
    once, twice = loss_fn(example()), loss_fn(example())
    _same(twice, once, "a batch that was seen before")


def finite_on_ordinary_batches(loss_fn: Correction) -> None:
    """Finite log-probs give finite numbers at every stage, none out of its range, on-policy and of one token, too."""
    batch = example()
    fewest = (torch.arange(batch.sequences) % 3 + 1)[:, None]
    short = dataclasses.replace(batch, mask=batch.mask & (batch.mask.cumsum(1) <= fewest))
    for one in (batch, short):
        check_finite(loss_fn, one)
        check_finite(loss_fn, dataclasses.replace(one, old_logp=one.logp, rollout_logp=one.logp))


def on_policy_gradient(loss_fn: Correction) -> None:
    """Where the policies agree, the gradient is REINFORCE's under the same aggregation, or on_policy=False says no."""
    batch = example()
    batch = dataclasses.replace(batch, old_logp=batch.logp, rollout_logp=batch.logp)
    reinforce = get("reinforce", aggregate=loss_fn.aggregate, max_length=loss_fn.max_length)
    check_close(loss_fn(batch).coefficient, reinforce(batch).coefficient, "on-policy coefficient")


def blind_under_the_mask(loss_fn: Correction) -> None:
    """Garbage under the mask, NaN included, changes nothing."""
    batch = example()
    clean = loss_fn(_per_token_advantages(batch))
    for junk in (math.nan, math.inf, -1e30, 7.0):
        dirty: dict[str, Any] = {
            name: torch.where(batch.mask, getattr(batch, name), junk)
            for name in ("logp", "old_logp", "rollout_logp", "entropy")
        }
        advantages = torch.where(batch.mask, batch.advantages[:, None], junk)
        _same(loss_fn(dataclasses.replace(batch, **dirty, advantages=advantages)), clean, f"{junk} under the mask")


def splitting(loss_fn: Correction) -> None:
    """Micro-batches with the global denominator (and a controller's statistics) add up to the whole batch."""
    if not loss_fn.count_rejected:
        return
    near, far = example(), example(spread=8.0)
    one = torch.arange(near.sequences)[:, None] == 2  # a rule may couple the batch only where a ratio is far
    mixed: Any = {
        name: torch.where(one, getattr(far, name), getattr(near, name)) for name in ("logp", "old_logp", "rollout_logp")
    }
    for batch in (near, dataclasses.replace(near, **mixed)):
        _adds_up(loss_fn, batch)


def _adds_up(loss_fn: Correction, batch: Batch) -> None:
    denominator = _denominator(loss_fn, batch)
    whole = loss_fn(batch, denominator=denominator)
    for cuts in ((3,), (1, 2, 6)):
        parts = [batch.rows(slice(a, b)) for a, b in zip((0, *cuts), (*cuts, batch.sequences), strict=True)]
        statistics = loss_fn.statistics(parts[0])
        for part in parts[1:]:
            statistics = None if statistics is None else statistics.merge(loss_fn.statistics(part))  # type: ignore[arg-type]
        outs = [loss_fn(part, denominator=denominator, statistics=statistics) for part in parts]
        check_close(torch.stack([out.loss for out in outs]).sum(), whole.loss, "sum of micro-batch losses")
        check_close(torch.cat([out.coefficient for out in outs]), whole.coefficient, "micro-batch coefficients")
        merged = outs[0].metrics
        for out in outs[1:]:
            merged = merged.merge(out.metrics)
        check_equal_numbers(merged.compute(), whole.metrics.compute(), "merged metrics")


def groups_apart(loss_fn: Correction) -> None:
    """Where controllers couple the samples of one prompt alone, another prompt's samples change nothing."""
    if loss_fn.couples != {"group"} or not loss_fn.count_rejected:
        return
    batch = example(sequences=32)
    own: Any = batch.group_ids == 0
    denominator = _denominator(loss_fn, batch)
    wanted = loss_fn(batch, denominator=denominator).coefficient[own]
    for seed, gap in enumerate((1.0, 0.0, 0.1, 0.5, 2.0, 8.0), start=1):  # a bound may move without passing a token
        others = example(seed=seed, sequences=32)
        columns: dict[str, Any] = {"old_logp": others.old_logp, "entropy": others.entropy}
        columns |= {"advantages": others.advantages, "rewards": others.rewards}
        for name in ("logp", "rollout_logp"):
            away = gap * (getattr(others, name) - others.old_logp)
            columns[name] = (others.old_logp + away).clamp(max=0.0)
        for name, other in columns.items():
            value = getattr(batch, name)
            columns[name] = torch.where(own[:, None] if value.ndim == 2 else own, value, other)
        changed = loss_fn(dataclasses.replace(batch, **columns), denominator=denominator).coefficient[own]
        check_close(changed, wanted, "coefficient of one group, with others beside it")


def row_order(loss_fn: Correction) -> None:
    """The order of the sequences does not matter."""
    batch = example()
    order = torch.randperm(batch.sequences, generator=torch.Generator().manual_seed(1))
    out, shuffled = loss_fn(batch), loss_fn(batch.rows(order))
    check_close(shuffled.loss, out.loss, "loss of permuted rows")
    check_close(shuffled.coefficient, out.coefficient[order], "coefficient of permuted rows")


def masked_tokens_have_no_effect(loss_fn: Correction) -> None:
    """A row without its masked tokens gives the others the same: no span lets a masked token in."""
    batch = _per_token_advantages(example(seed=4, sequences=40))
    batch.mask[::2, 0] = False  # what comes first may be masked, too
    turns = Tokens(batch).rows.turn
    kept = batch.mask.argsort(dim=1, descending=True, stable=True)  # the valid tokens of each row first
    columns = ("logp", "old_logp", "rollout_logp", "entropy", "advantages", "mask")
    moved: dict[str, Any] = {name: getattr(batch, name).gather(1, kept) for name in columns}
    compact = dataclasses.replace(batch, **moved, turn_ids=turns.gather(1, kept))
    out, wanted = loss_fn(compact), loss_fn(dataclasses.replace(batch, turn_ids=turns))
    check_close(out.loss, wanted.loss, "loss without masked tokens")
    check_close(out.coefficient, wanted.coefficient.gather(1, kept), "coefficient without masked tokens")


def padding_has_no_effect(loss_fn: Correction) -> None:
    """A wider padded batch gives the same: no span counts masked positions."""
    # Where a mean over the padded width is compared with a bound, a row has to be near the bound: hence several spreads
    # of the log-ratios, and a padding that makes such a mean six times smaller.
    columns = ("logp", "old_logp", "rollout_logp", "entropy", "advantages", "mask")
    for spread, sequences in ((0.3, 7), (0.3, 30), (1.0, 30), (4.0, 30)):
        batch = one_sided(_per_token_advantages(example(seed=4, sequences=sequences, spread=spread)))
        out, width = loss_fn(batch), batch.mask.shape[1]
        for left, right in ((0, 5), (3, 0), (0, 60)):
            pad = torch.nn.functional.pad
            wider: dict[str, Any] = {name: pad(getattr(batch, name), (left, right)) for name in columns}
            wide = loss_fn(dataclasses.replace(batch, **wider))
            what = f"{left} masked positions before and {right} after each row"
            check_close(wide.loss, out.loss, f"loss with {what}")
            check_close(wide.coefficient[:, left : left + width], out.coefficient, f"coefficient with {what}")


def packed_equals_padded(loss_fn: Correction) -> None:
    """End to end or padded: the same numbers.  Lengths differ, tool spans interleave, one sequence is empty."""
    padded_batch, packed_batch, inside = layouts(example(), lengths=(12, 5, 9, 0, 12, 1, 7))
    packed, padded = loss_fn(packed_batch), loss_fn(padded_batch)
    check_close(packed.loss, padded.loss, "packed loss")
    check_close(packed.coefficient, padded.coefficient[inside], "packed coefficient")
    check_equal_numbers(packed.metrics.compute(), padded.metrics.compute(), "packed metrics")


def config_round_trip(loss_fn: Correction) -> None:
    """The configuration is plain data and makes an equal correction, which gives equal numbers."""
    import json

    config = loss_fn.to_config()
    again = from_config(json.loads(json.dumps(config)))
    assert again == loss_fn, f"{config} makes {again}, expected {loss_fn}"
    _same(again(example()), loss_fn(example()), "round-tripped")


def coefficient_is_the_gradient(loss_fn: Correction) -> None:
    """Gate and ratio state the derivatives of their values, and the coefficient is the gradient of the loss."""
    # The wide ones have ratios from e^-16 to e^16, where the second bound of a clip or a soft gate's tail is reached.
    above = _per_token_advantages(example(seed=3, spread=8.0))
    exchanged: dict[str, Any] = {"logp": above.old_logp, "old_logp": above.logp}
    below = dataclasses.replace(above, **exchanged)
    short = (example(), _per_token_advantages(example(seed=1)), example(seed=2, spread=2.0), above, below)
    for batch in (*short, _long_rows()):
        logp = batch.logp.clone().requires_grad_()
        batch = dataclasses.replace(batch, logp=logp)
        out = loss_fn(batch)
        (attached,) = torch.autograd.grad(3 * out.loss, logp)
        check_close(attached, 3 * out.coefficient, "gradient of 3 * loss")
        resolved = loss_fn.resolve(loss_fn.statistics(batch))
        logp = _off_corners(logp)
        batch = resolved.prepared(dataclasses.replace(batch, logp=logp))
        plan, tokens = resolved.plan(batch), Tokens(batch)
        check_slope(plan, batch)
        terms = gated(plan.ratio, plan.gate, tokens)
        check_gradient_passes(plan, terms)
        (derived,) = torch.autograd.grad(torch.where(tokens.mask, terms.surrogate, 0).sum(), logp)
        stated = torch.where(tokens.mask, terms.derivative, 0)
        check_close(stated, derived, f"stated derivative against autograd of {plan.gate.owner}.surrogate")


def finite_under_extremes(loss_fn: Correction) -> None:
    """Log-ratios of +-1e4, NaN, infinity, one sign of advantage, and float32 give finite loss, gradient and metrics."""
    for spread in (2.0, 8.0):  # in float32, whose numbers end at e^88, each token has a finite number
        batch = example(seed=3, spread=spread, dtype=torch.float32)
        assert batch.old_logp is not None
        largest = (batch.logp - batch.old_logp).abs().nan_to_num().max().item()
        try:
            check_finite(loss_fn, batch)
        except AssertionError as error:
            raise AssertionError(f"in float32, at log-ratios of up to {largest:.0f}, {error}") from error
    for size, dtype in ((12.0, torch.float64), (50.0, torch.float64), (1e4, torch.float64), (1e4, torch.float32)):
        batch = example(dtype=dtype)
        old_logp = batch.logp - 2 * size  # so that every log-prob below is one, and not above 0
        sign = torch.where(torch.arange(12) % 2 == 0, 1.0, -1.0)
        cases = ((f"log-ratios of {size:g}", sign), (f"ratios of e^{size:g}", 1.0), (f"ratios of e^-{size:g}", -1.0))
        for what, by in cases:
            rollout_logp = old_logp - 2 * size * sign
            wild = dataclasses.replace(batch, logp=old_logp + size * by, old_logp=old_logp, rollout_logp=rollout_logp)
            try:
                check_finite(loss_fn, wild)
                _finite(loss_fn(wild), what)
            except AssertionError as error:
                raise AssertionError(f"in float32, {error}" if dtype == torch.float32 else str(error)) from error
    batch = example()
    for one, which in ((1.0, "above 0"), (-1.0, "below 0"), (0.0, "0")):  # a statistic may count those of one sign
        one_sided = dataclasses.replace(batch, advantages=one * batch.advantages.abs())
        _finite(loss_fn(one_sided), f"advantages that are all {which}")
    for junk in (math.nan, math.inf, -math.inf):
        for name in ("logp", "old_logp", "rollout_logp"):
            value = getattr(batch, name).clone()
            value[0, :3] = junk
            _finite(loss_fn(dataclasses.replace(batch, **{name: value})), f"{name} = {junk}")


def no_advantage_no_gradient(loss_fn: Correction) -> None:
    """Advantage 0 gives coefficient 0, unless a stage says scales_with_advantage = False."""
    batch = example()
    without = torch.arange(batch.sequences) % 2 == 0
    out = loss_fn(dataclasses.replace(batch, advantages=torch.where(without, 0, batch.advantages)))
    largest = float(out.coefficient[without].abs().max())
    if loss_fn.scales_with_advantage:
        assert not largest, f"a coefficient is {largest:.6g} where the advantage is 0, expected 0"
    assert largest or loss_fn.scales_with_advantage, (
        "scales_with_advantage is False, and the coefficient is 0 wherever the advantage is 0, expected True"
    )


def nothing_left(loss_fn: Correction) -> None:
    """A batch with no valid token gives loss 0 with a graph, and gradient 0."""
    batch = example()
    logp = batch.logp.clone().requires_grad_()
    out = loss_fn(dataclasses.replace(batch, logp=logp, mask=torch.zeros_like(batch.mask)))
    out.loss.backward()
    assert out.loss.item() == 0, f"the loss of an all-masked batch is {out.loss.item():.6g}, expected 0"
    assert logp.grad is not None and not logp.grad.any(), (
        "the gradient of an all-masked batch is not 0 everywhere, expected 0"
    )


def low_precision(loss_fn: Correction) -> None:
    """bf16 and fp16 log-probs: float32 coefficient, gradient in the input's dtype and finite."""
    for dtype in (torch.bfloat16, torch.float16):
        batch = example()
        logp = batch.logp.to(dtype).requires_grad_()
        cast = {name: getattr(batch, name).to(dtype) for name in ("old_logp", "rollout_logp", "advantages")}
        out = loss_fn(dataclasses.replace(batch, logp=logp, **cast))
        (1e30 * out.loss).backward()
        assert out.coefficient.dtype == torch.float32, (
            f"the coefficient of {dtype} log-probs is {out.coefficient.dtype}, expected torch.float32"
        )
        assert logp.grad is not None and logp.grad.dtype == dtype, f"the gradient of {dtype} log-probs is not {dtype}"
        assert logp.grad.isfinite().all(), f"the gradient of {dtype} log-probs is not finite, expected finite numbers"


CHECKS: dict[str, Callable[[Correction], None]] = {
    run.__name__: run
    for run in (
        equal_answers,
        finite_on_ordinary_batches,
        blind_under_the_mask,
        splitting,
        groups_apart,
        row_order,
        masked_tokens_have_no_effect,
        padding_has_no_effect,
        packed_equals_padded,
        finite_under_extremes,
        coefficient_is_the_gradient,  # after the ones above: what couples tokens, or gives NaN, fails here, too
        on_policy_gradient,
        config_round_trip,
        no_advantage_no_gradient,
        nothing_left,
        low_precision,
    )
}
"""Every check by name; each takes a correction and raises AssertionError."""


# -- helpers -------------------------------------------------------------------------------------------------


def _resolve(method: Any) -> tuple[Correction, bool]:
    """The correction, with a constant length where it needs one, and whether it is REINFORCE's on-policy."""
    if isinstance(method, Correction):
        return method.with_max_length(32), _declared(method.method)
    if isinstance(method, str):
        return illustration(method).with_max_length(32), _declared(method)
    if not callable(method):
        wanted = "a name, FILE.py:NAME, an offcorr.Correction, or a function that returns one"
        raise TypeError(f"method is {method!r}, expected {wanted}")
    known, plain = registered(method), _method_of(method)
    if known is None and plain is not None and plain.required:
        raise TypeError(
            f"{plain.name} requires {' and '.join(plain.required)}, without a default: give one, check the Correction "
            "that it returns, or register it with example="
        )
    built = known(**known.example) if known else method()
    if not isinstance(built, Correction):
        raise TypeError(f"{method!r} built a {type(built).__name__}, expected an offcorr.Correction")
    return built.with_max_length(32), known.on_policy if known else True


def _declared(name: str) -> bool:
    """Whether the method of this name was registered as REINFORCE on-policy; True where none was registered."""
    try:
        found = find(name)
    except ValueError:
        return True
    return found.on_policy if isinstance(found, Method) else True


def _method_of(method: Any) -> Method | None:
    """The method that a name or a function is, registered or not; None for a finished Correction."""
    if isinstance(method, Correction):
        return None
    if not isinstance(method, str):
        return registered(method) or Method(getattr(method, "__name__", repr(method)), method)
    found = find(method)
    return found if isinstance(found, Method) else None


def _options_matter(method: Any) -> None:
    """Each number or choice among a method's options reaches its correction: none is accepted and then ignored.

    An option may act in one mode alone: it is tried under the options of a spec, and beside every choice of another.
    """
    known = _method_of(method)
    if known is None:
        return
    given = dict(known.example) | (split_spec(method)[1] if isinstance(method, str) else {})
    values, annotations = _values(known) | given, _annotations(known)
    modes = [
        given | {name: other}
        for name, value in values.items()
        for other in (*_choices(value, annotations.get(name)), *([not value] if isinstance(value, bool) else []))
    ]
    for name in values:
        ignored = [_ignored(known, mode, name, annotations.get(name)) for mode in (given, *modes)]
        said = [one for one in ignored if one is not None]
        untried = [other for other in untested_options(method) if isinstance(values[other], str)]
        beside = "".join(
            f" beside {other}={values[other]!r} (other values of {other}, which is no Literal, were not tried)"
            for other in untried
        )
        assert not said or not all(said), f"{known.name}: the option {name} changes nothing{beside}: {said[0]}"
        for one, other in itertools.combinations((values[name], *_choices(values[name], annotations.get(name))), 2):
            alike = [_alike(known, mode, name, one, other) for mode in (given, *modes)]
            tried = [found for found in alike if found is not None]
            assert not tried or not all(tried), (
                f"{known.name}: {name}={other!r} makes the same correction as {name}={one!r}{beside}, expected another "
                "one: each choice reaches a stage, or is left out"
            )


def _alike(known: Method, mode: dict[str, Any], name: str, one: Any, other: Any) -> bool | None:
    """Whether two values of an option make the same correction beside others; None: one is out of its range."""
    try:
        return known(**mode | {name: one}) == known(**mode | {name: other})
    except (TypeError, ValueError):
        return None


def _ignored(known: Method, mode: dict[str, Any], name: str, annotation: Any) -> str | None:
    """The sentence that shows an option to be ignored beside others; "": it is not; None: none can be tried."""
    value = mode.get(name, _values(known).get(name))
    for other in _other_values(value, annotation):
        alike = _alike(known, mode, name, value, other)
        if alike is None:
            continue
        if not alike:
            return ""
        return (
            f"{name}={other!r} makes the same correction as {name}={value!r}, expected another one; pass {name} to a "
            "stage, or leave it out"
        )
    return None


def untested_options(method: Any) -> list[str]:
    """The options that ``check`` cannot try other values of, as they are no numbers and no choices of a ``Literal``."""
    known = _method_of(method)
    if known is None:
        return []
    return [name for name, value in _values(known).items() if not _other_values(value, _annotations(known).get(name))]


def _values(known: Method) -> dict[str, Any]:
    """The options with their defaults, or the values of the method's example."""
    return {name: option.default for name, option in known.options.items()} | dict(known.example)


def _annotations(known: Method) -> dict[str, Any]:
    """Those of its options; as they are written, where a name in them is known to a type checker alone."""
    try:
        return get_type_hints(known.build)
    except Exception:  # of any kind: the names are the user's
        return {name: option.annotation for name, option in known.options.items()}


def _other_values(value: Any, annotation: Any) -> tuple[Any, ...]:
    """Other values for an option, one of which is hopefully in its range; none where its kind is not known."""
    if isinstance(value, int | float):
        return others(value)
    if value is None and re.search(r"\b(float|int|Number)\b", str(annotation)):
        return (3.0, 1.5, 0.5, 2)
    return _choices(value, annotation)


def _choices(value: Any, annotation: Any) -> tuple[str, ...]:
    """The other choices that a ``Literal`` names, alone or in a union."""
    choices = [choice for part in get_args(annotation) for choice in (part, *get_args(part))]  # of a union's parts, too
    return tuple(choice for choice in choices if isinstance(choice, str) and choice != value)


def _denominator(loss_fn: Correction, batch: Batch) -> float | None:
    """Z of the whole batch, which its micro-batches divide by; None where the aggregation divides by nothing."""
    counts = {"tokens": float(batch.mask.sum()), "sequences": float(batch.sequences), "none": None}
    return counts[AGGREGATIONS[loss_fn.aggregate].unit]


def _kernel_error(loss_fn: Correction, batch: Batch, of_batch: str) -> float:
    """The largest error of a coefficient in the kernel, which the reference's own error bounds."""
    with use("triton"):
        where = backend(loss_fn, batch)
        if where != "triton":
            raise OnReference(where.removeprefix("reference: "))
        fused = loss_fn(batch)
    with use("reference"):
        plain = loss_fn(batch)
        exact = loss_fn(moved(batch, torch.float64, batch.logp.device))
    allowed = 8 * (plain.coefficient - exact.coefficient).abs().max() + 1e-5 * exact.coefficient.abs().max()
    error = float((fused.coefficient - exact.coefficient).abs().max())
    assert error <= float(allowed) + 1e-7, (
        f"{subject(loss_fn)}: kernel and reference differ by {error:.3g} {of_batch}, expected at most "
        f"{float(allowed):.3g}"
    )
    return error


def _off_corners(logp: Tensor) -> Tensor:
    """Log-probs a thousandth of a nat away: a bound, once resolved, may be some token's own ratio.

    There the two one-sided derivatives differ, and autograd takes their mean.
    """
    moves = torch.empty_like(logp).uniform_(1e-3, 2e-3, generator=torch.Generator().manual_seed(0))
    signs = torch.where(torch.arange(logp.shape[-1]) % 2 == 0, 1, -1)
    return (logp.detach() + signs * moves).requires_grad_()


def _long_rows() -> Batch:
    """Rows of up to 256 tokens and one of one token, where a stage may treat tokens otherwise: with large advantages
    and rewards and a 0 of each, likely and unlikely tokens, and high entropies.
    """
    batch = example(seed=5, sequences=6, width=256, spread=0.1)
    assert batch.old_logp is not None and batch.rollout_logp is not None and batch.entropy is not None
    logp = torch.tensor([1.0, 0.01, 5.0], dtype=torch.float64)[torch.arange(256) % 3] * batch.logp - 0.003
    whole, single = (torch.arange(6)[:, None] == torch.tensor(rows) for rows in ((0, 2), (4,)))
    return dataclasses.replace(
        batch,
        logp=logp,
        old_logp=(logp + batch.old_logp - batch.logp).clamp(max=-0.003),
        rollout_logp=(logp + batch.rollout_logp - batch.logp).clamp(max=-0.003),
        entropy=3 * batch.entropy,
        mask=(batch.mask | whole.any(1, keepdim=True)) & ~(single & (torch.arange(256) > 0)),
        advantages=torch.tensor([9.0, 1.0, -9.0, 0.0, -1.0, 1.0], dtype=torch.float64),
        rewards=torch.tensor([3.0, 1.0, -3.0, 1.0, 0.0, 0.0], dtype=torch.float64),
    )


def _per_token_advantages(batch: Batch) -> Batch:
    return dataclasses.replace(batch, advantages=batch.advantages[:, None].expand_as(batch.logp).clone())


def _same(out: Output, expected: Output, what: str) -> None:
    check_close(out.loss, expected.loss, f"loss, {what}")
    check_close(out.coefficient, expected.coefficient, f"coefficient, {what}")


def _finite(out: Output, what: str) -> None:
    assert out.loss.isfinite(), f"{what}: the loss is {out.loss.item()}, expected a finite number"
    assert out.coefficient.isfinite().all(), f"{what}: the coefficient is not finite, expected finite numbers"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # the warning about non-finite tokens is wanted elsewhere
        try:
            bad = {name: value for name, value in out.metrics.compute().items() if not math.isfinite(value)}
        except ValueError as error:  # no token is finite
            raise AssertionError(f"{what}: {error}") from None
    assert not bad, f"{what}: metrics are {bad}, expected finite numbers"
