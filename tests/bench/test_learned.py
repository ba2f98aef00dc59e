"""The comparison of what output layers learn runs, and its figures are those of layers that learn."""

import json

import pytest

from tests.bench import learned


@pytest.mark.slow
def test_what_layers_learn_in_the_same_time(tmp_path, monkeypatch, capsys):
    """Layers with probabilities learn twenty classes of clear images; chance is a quarter."""
    monkeypatch.setattr(learned, "RATES", (1.0,))
    arguments = [
        "--classes",
        "20",
        "--features",
        "16",
        "--images",
        "40",
        "--noise",
        "0.1",
        "--seconds",
        "0.2",
        "--seeds",
        "2",
    ]
    assert learned.main([*arguments, "--json", str(tmp_path / "learned.json")]) == 0
    rows = {row["contestant"]: row for row in json.loads((tmp_path / "learned.json").read_text())["results"]}
    assert rows.keys() == learned.CONTESTANTS.keys()
    assert all(row["seeds"] == 2 for row in rows.values())
    for name in ("dense, ce", "SphericalLinear, log_taylor_softmax", "SphericalLinear, spherical_bound"):
        assert rows[name]["topk"] > 0.6
    assert rows["SphericalLinear, mse"]["nll"] is None
    assert "dense, ce" in capsys.readouterr().out
