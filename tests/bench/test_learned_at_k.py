"""The comparison of what is learned at a large k, on small sizes; and its table in the docs."""

import json
import re
from pathlib import Path

import pytest
import torch

from tests.bench import learned_at_k
from topk_registry import use_backend

DOCS = Path(__file__).parents[2] / "docs"
BLOCK = re.compile(r"(?<=<!-- learned at k -->\n).*?(?=<!-- /learned at k -->)", re.DOTALL)


def test_the_table_is_the_report_s():
    report = json.loads((DOCS / "results" / "large_k_learned.json").read_text(encoding="utf-8"))
    found = BLOCK.search((DOCS / "losses.md").read_text(encoding="utf-8"))
    assert found
    assert found[0] == learned_at_k.table(report)


def test_every_loss_has_as_many_trials():
    assert {len(learned_at_k.trials(name)) for name in learned_at_k.NAMES} == {3 * len(learned_at_k.RATES)}
    assert learned_at_k.trials("ce")[-1] == {"rate": learned_at_k.RATES[-1]}


@pytest.mark.slow
def test_every_loss_learns_more_than_chance(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(learned_at_k, "RATES", (0.1,))
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)  # other tests follow in this process
    sizes = ["--classes", "20", "--features", "16", "--images", "40", "--noise", "0.1", "--steps", "60", "--seeds", "2"]
    with use_backend("torch"):
        assert learned_at_k.main([*sizes, "--k", "5", "--json", str(tmp_path / "learned.json")]) == 0
    report = json.loads((tmp_path / "learned.json").read_text())
    assert [row["loss"] for row in report["results"]] == list(learned_at_k.NAMES)
    assert all(top > 40 for row in report["results"] for _, top in row["runs"])  # chance is a quarter
    assert learned_at_k.table(report) in capsys.readouterr().out
