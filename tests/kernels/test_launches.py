"""How many kernels a correction launches, what else it asks of the device, and that it waits for nothing."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

import offcorr
from offcorr import rejections
from offcorr.kernels import dispatch, launch
from offcorr.methods.registry import illustration
from tests.kernels.cases import INTERPRETED, METHODS, packed, padded, prepared, run, within_budget
from tests.waits import Waits

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in.*:RuntimeWarning")

NO_WORK = {"empty", "empty_like", "promote_types", "detach", "alias", "view", "select", "slice", "split_with_sizes"}
"""Operations that start nothing on the device."""


class Seen(Waits):
    """What happens on the device: Triton's launches, and torch's operations."""

    launches = 0

    @property
    def asked(self) -> list[str]:
        return [name for name in self.seen if name not in NO_WORK]


@pytest.fixture
def watch(monkeypatch):
    """A context in which everything is ``Seen``; what the interpreter does inside a launch is not."""
    from triton.runtime import interpreter, jit

    kind = interpreter.InterpretedFunction if INTERPRETED else jit.JITFunction
    launch, now = kind.run, []

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        for seen in now:
            seen.launches += 1
        with torch.utils._python_dispatch._disable_current_modes():
            return launch(self, *args, **kwargs)

    monkeypatch.setattr(kind, "run", counted)

    @contextlib.contextmanager
    def watching() -> Iterator[Seen]:
        with dispatch.use("triton"), Seen() as seen:
            now.append(seen)
            yield seen
            now.remove(seen)

    return watching


def known(name: str, batch: offcorr.Batch) -> offcorr.Correction:
    """A method that needs nothing more of the batch."""
    loss_fn = illustration(name).with_max_length(32)
    loss_fn = loss_fn.resolve(loss_fn.statistics(batch))
    fill_caches(loss_fn, batch)
    return loss_fn


def fill_caches(loss_fn: offcorr.Correction, batch: offcorr.Batch) -> None:
    """What a first call makes on the device and keeps."""
    call = prepared(loss_fn, batch, 7.0 if loss_fn.count_rejected else None)
    call.arguments(call.buffers())


@pytest.mark.parametrize("name", METHODS)
def test_one_launch_and_nothing_else(name, watch):
    whole = padded(rows=2, width=5)
    for batch in (whole, packed(whole, [1, 4])):
        loss_fn = known(name, batch)
        given = dataclasses.replace(batch, logp=batch.logp.clone().requires_grad_())
        with watch() as forward:
            out = loss_fn(given, denominator=7.0)
        assert forward.launches == 1
        # asymre's baseline of each group and CPPO's quantile of each sequence are torch's, the latter of the padded
        # batch; everything else is in the kernel
        assert not forward.waits or (name == "cppo" and batch.cu_seqlens is not None)
        assert not forward.asked or name in ("asymre", "cppo")
        with watch() as backward:
            out.loss.backward()
        assert backward.launches == 0 and backward.asked == ["ones_like", "mul"]  # the 1 that backward begins with


@pytest.mark.parametrize("name", ["dapo", "gspo"])
def test_a_batchs_own_tokens_are_counted_by_one_operation_more(name, watch):
    batch = padded(rows=2, width=5)
    loss_fn = known(name, batch)
    with watch() as seen:
        loss_fn(batch)
    assert seen.launches == 1 and seen.asked == (["sum"] if loss_fn.aggregate == "token-mean" else [])


@pytest.mark.parametrize("name", ["bapo", "m2po", "asymre"])
def test_controllers_wait_for_nothing(name, watch):
    loss_fn, batch = offcorr.get(name), padded(rows=4, width=5)
    known(name, batch)
    loss_fn(batch)  # by torch, whose caches are filled then
    with watch() as seen:
        loss_fn(batch)
    assert seen.launches == 1 and not seen.waits


@pytest.mark.parametrize("name", ["dapo", "minpro", "gspo", "turn_ppo"])
def test_two_launches_where_rows_are_split(name, watch, monkeypatch):
    for constant, value in {"BLOCK": 16, "PART": 16, "FILL": 12}.items():
        monkeypatch.setattr(launch, constant, value)
    batch = padded(width=70, spread=0.1)
    loss_fn = known(name, batch)
    with watch() as seen:
        loss_fn(batch, denominator=7.0)
    assert seen.launches == 2 and not seen.asked


def test_dividing_by_what_was_kept_is_one_launch_more(watch):
    loss_fn = offcorr.get("ppo", reject=rejections.K1(0.7, 1.4, level="token"), count_rejected=False)
    batch = padded(rows=2, width=5)
    fill_caches(loss_fn, batch)
    with watch() as seen:
        loss_fn(batch)
    assert seen.launches == 2 and not seen.asked


# -- the last program merges ---------------------------------------------------------------------------------


@triton.jit
def number(out_ptr, ticket_ptr):
    tl.store(out_ptr + tl.program_id(0), tl.atomic_add(ticket_ptr, 1))


@pytest.fixture
def backwards(monkeypatch):
    """The interpreter's programs run from the last to the first; on a GPU, in whatever order it takes."""
    if INTERPRETED:
        from triton.runtime.interpreter import interpreter_builder as builder

        place = builder.set_grid_idx
        monkeypatch.setattr(builder, "set_grid_idx", lambda x, y, z: place(builder.grid_dim[0] - 1 - x, y, z))
        out, ticket = torch.zeros(4, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
        number[4,](out, ticket)
        assert out.tolist() == [3, 2, 1, 0]


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("count_rejected", [False, True])
def test_whichever_comes_last(split, count_rejected, request, monkeypatch):
    constants = {"ALONE": 5} | ({"BLOCK": 16, "PART": 16, "FILL": 30} if split else {})
    for constant, value in constants.items():
        monkeypatch.setattr(launch, constant, value)
    reject = rejections.K3(0.05, level="token")
    loss_fn = offcorr.get("minpro", reject=reject, aggregate="seq-mean-token-mean", count_rejected=count_rejected)
    batch = padded(rows=11, width=50 if split else 9, spread=0.2)
    within_budget(loss_fn, batch)
    first, _ = run(loss_fn, batch, "triton")
    request.getfixturevalue("backwards")
    again, _ = run(loss_fn, batch, "triton")
    assert torch.equal(first.loss, again.loss) and torch.equal(first.coefficient, again.coefficient)
    assert torch.equal(first.metrics.pack(), again.metrics.pack())


@pytest.mark.parametrize("entries, group", [(1, 1), (256, 1), (257, 17), (1024, 32), (8192, 91)])
def test_groups_are_about_as_many_as_their_members(entries, group):
    call = prepared(offcorr.get("ppo"), padded(rows=1, width=3))
    call.entries = entries
    assert entries <= call.group * call.groups < entries + call.group
    assert max(call.group, call.groups) <= (launch.ALONE if call.group == 1 else 2 * entries**0.5)


def test_the_kernel_leaves_its_tickets_as_it_found_them():
    launch._tickets.cache_clear()
    for rows in (3, 20, 7):
        run(offcorr.get("ppo"), padded(rows=rows, width=5), "triton")
    count = 1 + 20
    with dispatch.use("triton"):
        assert not launch._tickets_on(padded().logp.device, count).any()


@pytest.mark.parametrize("split", [False, True])
def test_a_packed_batch_may_say_how_long_its_longest_row_is(split, monkeypatch):
    if split:
        for constant, value in {"BLOCK": 16, "PART": 16, "FILL": 12}.items():
            monkeypatch.setattr(launch, constant, value)
    batch = packed(padded(width=70, spread=0.1), [70, 0, 63])
    loss_fn = offcorr.get("minpro")
    for longest, block, part in ((None, 256, 48), (70, 128, 32), (100, 128, 32)):
        given = dataclasses.replace(batch, max_seqlen=longest)
        call = prepared(loss_fn, given)
        assert (call.parts > 1) == split
        assert call.part_length == part if split else call.block == block
        within_budget(loss_fn, given)


def test_a_penalty_may_be_added_to_the_loss_in_place():
    batch = padded(rows=2, width=5)
    logp = torch.where(batch.mask, batch.logp, 0.0).requires_grad_()
    for backend in ("reference", "triton"):
        with dispatch.use(backend):
            out = offcorr.get("ppo")(dataclasses.replace(batch, logp=logp))
        loss = out.loss
        loss += logp.sum()
        loss *= 2
        (gradient,) = torch.autograd.grad(loss, logp)
        torch.testing.assert_close(gradient, 2 * (out.coefficient + 1))
