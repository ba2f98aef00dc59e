"""Wrong labels by flags of the trainer: of every kind, and from label files."""

import numpy as np
import pytest
import torch
import yaml

from topk_registry.data.labels import labels_of
from topk_registry.train.config.arguments import parse_args
from topk_registry.train.errors import DataError
from topk_registry.train.setup.datasets import check_data_arguments, file_digests, open_data

from .conftest import TINY

KINDS = ("uniform", "confusions", "annotators")


def opened(*flags):
    return open_data(parse_args([*TINY, *flags]))


@pytest.fixture
def file(tmp_path):
    """A file such as CIFAR-10N's, for the built-in data."""
    clean = labels_of(opened().train)
    wrong = clean.copy()
    wrong[:7] = (wrong[:7] + 1) % 12
    path = tmp_path / "human.pt"
    torch.save({"clean_label": clean, "worse_label": wrong, "aggre_label": clean}, path)
    return str(path)


@pytest.mark.parametrize("kind", KINDS)
def test_exactly_the_share_of_the_images_in_use_is_wrong(kind):
    flags = ("--val-split", "0.25", "--label-noise-kind", kind)
    clean, noisy = opened(*flags[:2]), opened(*flags, "--label-noise", "0.5")
    count = len(clean.train)
    assert (noisy.train.targets != clean.train.targets).sum() == round(count / 2)
    assert noisy.notes[-1] == f"label noise 0.5 ({kind}): {round(count / 2)} of {count} training labels differ"
    assert [label for _, label in noisy.validation] == [label for _, label in clean.validation]
    assert noisy.counts == np.bincount(noisy.train.targets, minlength=12).tolist()
    again = opened(*flags, "--label-noise", "0.5")
    assert np.array_equal(again.train.targets, noisy.train.targets)


def test_families_are_redrawn_as_before():
    plain, named = opened("--label-noise", "1"), opened("--label-noise", "1", "--label-noise-kind", "family")
    assert np.array_equal(plain.train.targets, named.train.targets)
    assert plain.notes == named.notes


def test_labels_of_a_file(file):
    clean, noisy = opened(), opened("--label-file", file, "--label-column", "worse_label")
    assert np.flatnonzero(noisy.train.targets != labels_of(clean.train)).tolist() == list(range(7))
    assert [label for _, label in noisy.train][:8] == noisy.train.targets[:8].tolist()
    assert noisy.notes == [f"labels of {file}: 7 of 96 training labels differ"]
    assert labels_of(noisy.validation).tolist() == labels_of(clean.validation).tolist()


OF_FILE = ["--label-file", "FILE", "--label-column", "worse_label"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (OF_FILE[:2], "name one with --label-column"),
        ([*OF_FILE, "--dataset-opt", "size=90"], "'worse_label' has 96 labels, the training split 90"),
        ([*OF_FILE, "--label-noise", "0.1"], "give one of them"),
        (["--label-noise-kind", "uniform"], "--label-noise-kind uniform needs --label-noise"),
        (["--label-column", "worse_label"], "--label-column worse_label needs --label-file"),
        (["--label-noise", "1.5"], r"--label-noise must be in \[0, 1\], got 1.5"),
        (["--label-file", "missing.pt"], "missing.pt cannot be read"),
        (["--label-file", "FILE", "--dataset", "hfids/some"], "is a stream: --label-noise, --label-file"),
    ],
)
def test_settings_that_cannot_be(flags, message, file):
    config = parse_args([*TINY, *(file if flag == "FILE" else flag for flag in flags)])

    def refused():
        check_data_arguments(config)
        open_data(config)

    with pytest.raises(DataError, match=message):
        refused()


@pytest.mark.slow
def test_a_run_says_and_records_its_wrong_labels(train, file):
    run = train("--label-file", file, "--label-column", "worse_label", "--epochs", "1")
    assert run.status == 0
    assert f"labels of {file}: 7 of 96 training labels differ" in run.out
    recorded = yaml.safe_load((run.folder / "args.yaml").read_text())
    assert (recorded["label_file"], recorded["label_column"]) == (file, "worse_label")
    config = parse_args([*TINY, "--label-file", file])
    assert len(file_digests(config)["label_file_digest"]) == 64
