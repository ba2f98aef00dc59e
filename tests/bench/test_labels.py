"""The comparison of lists of wrong labels runs, and its figures are those of lists that find some."""

import json

import pytest

from tests.bench import labels


@pytest.mark.slow
def test_lists_find_labels_that_were_made_wrong(tmp_path, monkeypatch, capsys):
    pytest.importorskip("cleanlab")
    easy = {**labels.DATA["feature vectors"], "dataset_opt": {"feature_noise": 1.0, "ambiguity": 0.0}}
    monkeypatch.setattr(labels, "DATA", {"feature vectors": easy})
    file = tmp_path / "labels.json"
    assert labels.main(["--size", "1000", "--folds", "2", "--epochs", "8", "--json", str(file)]) == 0
    rows = {(row["flips"], row["list"]): row for row in json.loads(file.read_text())["results"]}
    assert len(rows) == 12
    for flips in labels.FLIPS:
        assert 50 < rows[flips, "cleanlab"]["wrong"] < 120
    for name in ("log-odds, k = 1", "log-odds, k = 5", "cleanlab", "exact posterior, k = 1"):
        assert rows["anywhere", name]["first_50"] > 0.9
    assert rows["within look-alikes", "log-odds, k = 5"]["recall"] < rows["anywhere", "log-odds, k = 5"]["recall"]
    assert "top-1 out of sample" in capsys.readouterr().out
