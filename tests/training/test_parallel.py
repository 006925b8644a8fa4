"""Sequences split over ranks: processes of gloo against one process, for every method."""

import pytest
import torch

import offcorr
from tests.fresh import python
from tests.training.context_worker import LAYOUTS, WIDTH, correction, example, result, share, slice_of, trained


def run(task, ranks, folder):
    """What every rank wrote."""
    done = python(f"from tests.training import context_worker\ncontext_worker.run({task!r}, {ranks}, {str(folder)!r})")
    assert done.returncode == 0, done.stderr[-4000:]
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(ranks)]


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    return run("methods", 2, tmp_path_factory.mktemp("two"))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", offcorr.available())
def test_split_sequences_give_the_loss_gradient_and_metrics_of_whole_ones(name, layout, two_ranks):
    batch = offcorr.testing.example(width=WIDTH) if layout == "uneven" else example()
    whole = slice_of(batch, [*range(WIDTH)])
    loss, gradient, metrics = result(correction(name), whole, whole.logp)
    for places, rank in zip(LAYOUTS[layout], two_ranks, strict=True):
        own_loss, own_gradient, own_metrics = rank["found"][layout, name]
        assert torch.equal(own_loss, loss) and own_metrics == metrics
        assert torch.equal(own_gradient, gradient[:, places])


def test_one_collective_and_one_more_for_widths_that_are_not_known(two_ranks):
    for rank in two_ranks:
        assert rank["collectives"] == {"uneven": 2, "zig-zag": 1, "one rank has nothing": 2}


def test_what_does_not_fit_is_named(two_ranks):
    first, second = (rank["refused"] for rank in two_ranks)
    assert first["sequences"] == ("logp has 5 sequences here and 6 on rank 1 of the group, expected the same ones")
    assert first["fields"].endswith("on rank 1 of the group 4 fields of 25 bytes: expected the same fields and dtypes")
    assert second["widths"] == "widths is [6, 6], expected one per rank, with 5 for this one (rank 1)"
    assert second["positions"] == (
        "positions of all ranks are [0, 1, 2, 3, 4, 5, 6, 0, 1, 2, 3, 4], expected each of 0 to 11"
    )
    assert "expected integers of shape (5,) to go with logp (7, 5)" in second["dtype"]
    assert second["packed"] == "cu_seqlens is given, expected a padded batch: pass batch.padded()"


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory):
    return run("step", 4, tmp_path_factory.mktemp("four"))


@pytest.mark.parametrize("name", offcorr.available())
def test_a_sequence_is_counted_once_however_many_ranks_share_it(name, four_ranks):
    """Statistics, denominator, ESS and metrics of two data-parallel ranks, each of two context-parallel ones."""
    parts = [share(0, rank, 2) for rank in range(2)]
    order = [0, 1], [2, 3]  # micro-batches of the ranks, in the one process
    losses, gradients, metrics = trained(name, parts[0] + parts[1], [*range(WIDTH)], None, None, ranks=1)
    for rank, results in enumerate(four_ranks):
        own_losses, own_gradients, own_metrics = results[name]
        mine = order[rank // 2]
        # Gradients are averaged over four ranks, so that each of them has four times its share.
        assert own_losses == pytest.approx([4 * losses[i] for i in mine], rel=1e-9, abs=1e-15)
        for i, gradient in zip(mine, own_gradients, strict=True):
            wanted = 4 * gradients[i][:, LAYOUTS["zig-zag"][rank % 2]]
            torch.testing.assert_close(gradient, wanted, rtol=1e-9, atol=1e-15)
        assert own_metrics == pytest.approx(metrics, rel=1e-9, abs=1e-12)
