"""The metrics in each way in which torchmetrics' users use a metric."""

import copy
import math
import pickle
from functools import partial

import pytest
import torch
from processes import join_group, run_ranks
from torch import nn

pytest.importorskip("torchmetrics")
from torchmetrics import MetricCollection, MetricTracker

from timm_moe.analysis import metrics

CLASSES, MEMBERS = 5, 3
ALL = {
    "nll": metrics.NegativeLogLikelihood,
    "error": metrics.ErrorRate,
    "brier": metrics.BrierScore,
    "ece": partial(metrics.CalibrationError, CLASSES),
    "ece_of_3_bins": partial(metrics.CalibrationError, CLASSES, n_bins=3),
    "kl": metrics.PairwiseKL,
    "cosine": metrics.CosineSimilarity,
    "disagreement": metrics.Disagreement,
    "normalized": metrics.NormalizedDisagreement,
}
every_metric = pytest.mark.parametrize("name", ALL)


def data(images=40):
    """Outputs of members and labels."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(CLASSES, (images,), generator=generator)
    return torch.randn(images, MEMBERS, CLASSES, generator=generator) * 2, labels


def split(sizes=(7, 1, 20, 12)):
    return list(zip(*(part.split(sizes) for part in data()), strict=True))


def updated(metric, *batches):
    for batch in batches:
        metric.update(*batch)
    return metric


def value(metric, *batches):
    return updated(metric, *batches).compute()


def close(first, second):
    torch.testing.assert_close(first, second, rtol=1e-12, atol=1e-12, equal_nan=True)


@every_metric
def test_batches_do_not_matter(name):
    whole = value(ALL[name](), data())
    assert whole > 0
    close(value(ALL[name](), *split()), whole)
    close(value(ALL[name](), *split([1] * 40)), whole)


@every_metric
def test_called_it_gives_the_value_of_the_batch_and_gathers_all(name):
    metric = ALL[name]()
    for batch in split():
        close(metric(*batch), value(ALL[name](), batch))
    close(metric.compute(), value(ALL[name](), data()))
    close(metric(*split()[0]), value(ALL[name](), split()[0]))  # after compute
    metric.reset()
    close(value(metric, split()[2]), value(ALL[name](), split()[2]))


@every_metric
def test_a_copy_goes_on_from_its_state_and_changes_nothing_of_the_first(name):
    first, *others = split()
    metric = updated(ALL[name](), first)
    metric.persistent(True)
    assert metric.state_dict()
    loaded = ALL[name]()
    loaded.load_state_dict(metric.state_dict())
    for other in (
        loaded,
        metric.clone(),
        copy.deepcopy(metric),
        pickle.loads(pickle.dumps(metric)),
    ):
        close(value(other, *others), value(ALL[name](), data()))
    close(metric.compute(), value(ALL[name](), first))


@every_metric
def test_a_batch_without_images_changes_nothing(name):
    first, *others = split()
    empty = tuple(part[:0] for part in first)
    assert ALL[name]()(*empty).isnan()
    close(value(ALL[name](), empty, first, empty, *others), value(ALL[name](), data()))


@every_metric
def test_in_a_module_of_a_narrow_type_sums_are_exact(name):
    """Cast the module, as Lightning does with precision="bf16-true"."""
    module = nn.ModuleList([ALL[name]()]).to(torch.bfloat16)
    many = [data()] * 20
    close(value(module[0], *many), value(ALL[name](), data()))
    module[0].reset()
    close(value(module[0], *split()), value(ALL[name](), data()))


@every_metric
def test_it_can_be_plotted(name):
    pytest.importorskip("matplotlib")
    metric = ALL[name]()
    metric.plot([metric(*batch) for batch in split()[2:]])


@every_metric
def test_states_merge(name):
    first, second, *others = split()
    merged = updated(ALL[name](), first)
    merged.merge_state(updated(ALL[name](), *others))
    merged.merge_state(updated(ALL[name](), second).metric_state)
    close(merged.compute(), value(ALL[name](), data()))


@every_metric
def test_before_the_first_image_the_value_is_not_a_number(name):
    with pytest.warns(UserWarning, match="before the ``update`` method"):
        assert ALL[name]().compute().isnan()


@pytest.mark.parametrize("called", [False, True])
def test_a_collection_is_its_metrics(called):
    """Its compute groups hold metrics whose states were equal after the first batch.

    Here that is a batch of a perfect ensemble.
    """
    perfect = torch.full((1, MEMBERS, CLASSES), -float("inf"))
    perfect[..., 0] = 0
    batches = [(perfect, torch.tensor([0])), *split()]
    collection = MetricCollection({name: make() for name, make in ALL.items()})
    for batch in batches:
        collection(*batch) if called else collection.update(*batch)
    for name, result in collection.compute().items():
        close(result, value(ALL[name](), *batches))
    collection.reset()
    collection.update(*batches[1])
    for name, result in collection.compute().items():
        close(result, value(ALL[name](), batches[1]))


def worker(rank, folder):
    join_group(rank, folder)
    for make in ALL.values():
        first, second, *others = split()
        own = [[first, second], others][rank]
        alone = partial(make, distributed_available_fn=lambda: False)
        close(value(make(), *own), value(alone(), data()))
        close(value(make(sync_on_compute=False), *own), value(alone(), *own))
        metric = updated(make(), *own)
        metric.compute()
        metric.update(*first)  # to the process's own state
        close(metric.compute(), value(alone(), data(), first, first))
        # One process has no images.
        close(value(make(), *(own if rank else [])), value(alone(), *others))
        close(make(dist_sync_on_step=True)(*own[0]), value(alone(), first, others[0]))
    torch.distributed.destroy_process_group()


@pytest.mark.ci
def test_two_processes(tmp_path):
    run_ranks(worker, (str(tmp_path),), 2)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@every_metric
@pytest.mark.first_case
def test_a_metric_takes_any_floating_point_type(name, dtype):
    outputs, labels = data()
    outputs = outputs.to(dtype)
    expected = value(ALL[name](), (outputs.double(), labels))
    torch.testing.assert_close(
        value(ALL[name](), (outputs, labels.int())), expected, rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("label", [-100, -1, CLASSES])
@pytest.mark.first_case
def test_labels_that_are_no_class(name, label):
    outputs, labels = data()
    metric = updated(ALL[name](), (outputs, labels))
    labels = labels.clone()
    labels[3] = label
    with pytest.raises(ValueError, match=f"^Labels .*0 to {CLASSES - 1}, .* {label}\\.$"):
        metric.update(outputs, labels)
    close(metric.compute(), value(ALL[name](), data()))
    with pytest.raises(ValueError, match=r"^Labels .*torch\.float32\.$"):
        metric.update(outputs, data()[1].float())


@every_metric
@pytest.mark.parametrize("wrong", ["nan", "inf"])
@pytest.mark.first_case
def test_outputs_that_are_not_a_number(name, wrong):
    outputs, labels = data()
    outputs.view(len(outputs), -1)[3, 0] = float(wrong)
    with pytest.raises(ValueError, match="NaN"):
        ALL[name]().update(outputs, labels)


def test_masked_classes():
    """Logits of -inf leave a class out: the values are of the other classes."""
    logits, labels = data()
    masked = torch.cat([logits, torch.full((len(logits), MEMBERS, 1), -float("inf"))], 2)
    for name, make in ALL.items():
        wider = (
            metrics.CalibrationError(CLASSES + 1, n_bins=make().n_bins) if "ece" in name else make()
        )
        close(value(wider, (masked, labels)), value(make(), (logits, labels)))
    one_alone = torch.tensor([[[0.0, 0.0, -float("inf")], [0.0, 0.0, 0.0]]])
    assert value(metrics.PairwiseKL(), (one_alone, torch.tensor([0]))) == pytest.approx(
        math.log(1.5)
    )
    assert value(metrics.PairwiseKL(), (one_alone.flip(1), torch.tensor([0]))) == float("inf")


def test_a_tracker_knows_which_value_is_best():
    for name, make in ALL.items():
        if name in ("kl", "cosine", "disagreement", "normalized"):
            assert make().higher_is_better is None
            continue
        tracker = MetricTracker(make())
        for batch in (data(), (-data()[0], data()[1])):
            tracker.increment()
            tracker.update(*batch)
        values = tracker.compute_all()
        assert tracker.best_metric() == values.min()


@pytest.mark.parametrize("labels", [torch.zeros(1), torch.zeros(40, 1)])
def test_labels_of_another_shape(labels):
    with pytest.raises(ValueError, match=r"^40 images need labels of shape \(40,\), got"):
        metrics.ErrorRate().update(data()[0], labels.long())


@pytest.mark.parametrize("name", ["kl", "cosine", "disagreement", "normalized"])
def test_members_are_needed_to_compare_them(name):
    with pytest.raises(ValueError, match="Members of an ensemble are compared"):
        ALL[name]().update(torch.zeros(2, 4), torch.tensor([0, 1]))


def test_outputs_of_another_number_of_classes():
    with pytest.raises(ValueError, match="must have 5 classes, got 4"):
        ALL["ece"]().update(torch.zeros(2, 4), torch.tensor([0, 1]))
