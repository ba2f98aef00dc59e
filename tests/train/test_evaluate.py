"""Evaluation against definitions written out by hand."""

import numpy as np
import pytest
import torch
from PIL import Image

from topk_registry.functional import topk_marginals
from topk_registry.train.config.metric_names import metric_sizes, parse_metric
from topk_registry.train.engine.evaluate import Crops, Evaluator, temperature_of
from topk_registry.train.errors import TrainError
from topk_registry.train.setup.compute import Compute

N = 7


class Table(torch.nn.Module):
    """A model whose scores are its input."""

    def forward(self, x):
        return x


def evaluator(batches, **settings):
    return Evaluator(batches, Compute(torch.device("cpu")), num_classes=N, **settings)


def scores(rows, seed=0):
    return torch.randn(rows, N, generator=torch.Generator().manual_seed(seed))


def test_accuracy_and_likelihood_are_their_definitions():
    logits, target = scores(50), torch.arange(50) % 3
    result = evaluator([(logits[:32], target[:32]), (logits[32:], target[32:])], sizes=[1, 3])(Table())
    hit = (logits.topk(3).indices == target[:, None]).any(1).double()
    assert result["top3"] == pytest.approx(100 * hit.mean().item())
    macro = torch.stack([hit[target == c].mean() for c in range(3)]).mean()
    assert result["macro_top3"] == pytest.approx(100 * macro.item())
    assert result["nll"] == pytest.approx(torch.nn.functional.cross_entropy(logits, target).item(), rel=1e-6)


def test_groups_by_training_frequency_and_none_for_an_empty_group():
    logits, target = scores(60), torch.arange(60) % N
    counts = [500, 500, 500, 5, 5, 5, 5]
    result = evaluator([(logits, target)], counts=counts, sizes=[1])(Table())
    hit = (logits.argmax(1) == target).double()
    many = torch.stack([hit[target == c].mean() for c in range(3)]).mean()
    assert result["many_top1"] == pytest.approx(100 * many.item())
    assert "medium_top1" not in result


@pytest.mark.parametrize("crops", [5, 10])
def test_crops_average_the_marginals_of_each_k(crops):
    views = torch.randn(crops, 20, N, generator=torch.Generator().manual_seed(1))
    target = torch.arange(20) % N
    batch = (views.flatten(0, 1), target.repeat(crops))  # crop by crop, as timm's collation lays splits out
    result = evaluator([batch], crops=crops, sizes=[1, 3], temperature=0.7)(Table())
    for k in (1, 3):
        averaged = topk_marginals(views, k, temperature=0.7).mean(0)
        hit = (averaged.topk(k).indices == target[:, None]).any(1).double().mean().item()
        assert result[f"top{k}"] == pytest.approx(100 * hit)


def test_consecutive_samples_are_averaged_by_tta():
    logits, target = scores(30), torch.arange(10).repeat_interleave(3) % N
    result = evaluator([(logits, target)], tta=3, sizes=[1])(Table())
    expected = (logits.view(10, 3, N).mean(1).argmax(1) == target[::3]).double().mean().item()
    assert result["top1"] == pytest.approx(100 * expected)


def test_the_padding_of_a_sampler_does_not_count():
    class Padded(list):
        class sampler:  # noqa: N801
            num_valid_samples = 5

    logits, target = scores(8), torch.arange(8) % N
    result = evaluator(Padded([(logits[:4], target[:4]), (logits[4:], target[4:])]), sizes=[1])(Table())
    assert result["top1"] == pytest.approx(100 * (logits[:5].argmax(1) == target[:5]).double().mean().item())
    assert result["nll"] == pytest.approx(torch.nn.functional.cross_entropy(logits[:5], target[:5]).item(), rel=1e-6)


def test_a_stopped_evaluation_has_no_result():
    assert evaluator([(scores(4), torch.arange(4))], stop=lambda: True)(Table()) is None


def test_crops_are_the_corners_the_centre_and_their_mirror_images():
    config = {"input_size": (3, 28, 28), "crop_pct": 1.0, "interpolation": "bilinear"}
    pixels = np.random.default_rng(0).integers(0, 256, (32, 32, 3)).astype(np.uint8)  # 28 / 0.875 = 32: no resizing
    crops = Crops(config, 10)(Image.fromarray(pixels))
    assert [crop.shape for crop in crops] == [(3, 28, 28)] * 10
    chw = pixels.transpose(2, 0, 1)
    assert np.array_equal(crops[0], chw[:, :28, :28])
    assert np.array_equal(crops[3], chw[:, 4:, 4:])
    assert np.array_equal(crops[4], chw[:, 2:30, 2:30])
    assert np.array_equal(crops[9], crops[4][:, :, ::-1])


def test_names_of_metrics():
    assert parse_metric("macro-top5") == "macro_top5"
    assert parse_metric("loss") == parse_metric("nll") == "nll"
    assert metric_sizes("few_top20") == [1, 5, 20]
    assert metric_sizes("nll") == [1, 5]
    for wrong in ("top", "best", "macro-loss", "top5x"):
        with pytest.raises(TrainError, match="--eval-metric must be"):
            parse_metric(wrong)


def test_the_temperature_is_the_flags_then_the_losss_then_one():
    from argparse import Namespace

    import topk_registry as tr

    loss = tr.create_loss("smooth_topk_svm", k=5, tau=0.1)
    assert temperature_of(Namespace(marginal_temperature=None), loss) == pytest.approx(0.5)
    assert temperature_of(Namespace(marginal_temperature=2.0), loss) == 2.0
    assert temperature_of(Namespace(marginal_temperature=None), torch.nn.CrossEntropyLoss()) == 1.0
