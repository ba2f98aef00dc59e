"""Mixed targets as labels with shares: timm's own, and what reaches a loss."""

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from timm.data import FastCollateMixup, Mixup

from topk_registry import ClassificationLoss, LabelMixture
from topk_registry.train.setup.batches import seeded
from topk_registry.train.setup.loss import Context, LossSpec
from topk_registry.train.setup.mixing import LabelMixup, LabelMixupCollate
from topk_registry.train.setup.rehearsal import Rehearsal

N, B = 7, 8
KINDS = (
    {"mixup_alpha": 0.4},
    {"mixup_alpha": 0.0, "cutmix_alpha": 1.0},
    {"cutmix_minmax": (0.2, 0.8), "switch_prob": 0.7, "prob": 0.6},
)


def batch() -> tuple[np.ndarray, torch.Tensor]:
    g = np.random.default_rng(0)
    return g.integers(0, 256, (B, 3, 16, 16), dtype=np.uint8), torch.from_numpy(g.integers(0, N, B))


CASES = list(product(("batch", "pair", "elem", "half"), KINDS, (True, False)))


@pytest.mark.parametrize(("mode", "kind", "enabled"), CASES)
def test_images_and_targets_are_timm_s(mode, kind, enabled):
    images, label = batch()
    options = {**kind, "mode": mode}
    pairs: list[tuple[Any, Any]] = [(FastCollateMixup, LabelMixupCollate)]
    if mode != "half":  # which collation alone knows
        pairs.append((Mixup, LabelMixup))
    for theirs, ours in pairs:
        found = []
        for mixer in (theirs(**options, num_classes=N, label_smoothing=0.1), ours(**options, smoothing=0.1)):
            mixer.mixup_enabled = enabled
            own = images.copy()  # timm writes into it
            given = (torch.from_numpy(own).float(), label)
            with seeded(3):
                if theirs is Mixup:
                    found.append(mixer(*given))
                else:
                    found.append(mixer(list(zip(own, label.tolist(), strict=True))))
        (x, dense), (own, mixture) = found
        assert torch.equal(own, x)
        assert isinstance(mixture, LabelMixture)
        torch.testing.assert_close(mixture.dense(N), dense)


class Written(ClassificationLoss):
    """A third party's loss that knows distributions alone."""

    def forward(self, logits: torch.Tensor, target: Any) -> torch.Tensor:
        return -(target * logits.log_softmax(-1)).sum(-1).mean()


def test_losses_that_take_mixtures(register):
    register("written", Written)

    def rehearsal(name, options=None, *, soft=True):
        return Rehearsal(LossSpec.resolve(name, options or {}), Context(N, 0.0, soft, 1))

    taken = rehearsal("generalised_cross_entropy")
    assert taken.takes_mixtures()
    assert not rehearsal("generalised_cross_entropy", soft=False).takes_mixtures()
    assert not taken.takes_mixtures(linear=True)
    assert not rehearsal("ce").takes_mixtures()
    assert not rehearsal("written").takes_mixtures()
    assert rehearsal("smooth_topk_svm", {"k": 3}).takes_mixtures(linear=True)


@pytest.mark.parametrize("flags", [[], ["--no-prefetcher"]])
def test_the_loss_is_given_labels_with_shares(train, monkeypatch, flags):
    from topk_plugins.robust import GeneralisedCrossEntropy

    forward, seen = GeneralisedCrossEntropy.forward, []

    def spied(loss, logits, target):
        seen.append(target)
        return forward(loss, logits, target)

    monkeypatch.setattr(GeneralisedCrossEntropy, "forward", spied)
    run = train("--loss", "generalised_cross_entropy", "--mixup", "0.4", "--smoothing", "0.1", "--epochs", "1", *flags)
    assert run.status == 0
    given = [target for target in seen if isinstance(target, torch.Tensor) and len(target) > 2]
    assert not given
    mixtures = [target for target in seen if isinstance(target, LabelMixture) and len(target.labels) > 2]
    assert mixtures
    assert all(target.uniform is not None for target in mixtures)
