"""The benchmark of whole training steps, and the comparison of what is learned, run on small sizes."""

import json

import pytest

from tests.bench import chunked_update, learned_updates


@pytest.mark.slow
def test_steps_of_processes_of_their_own(tmp_path, capsys, monkeypatch):
    names = [name for name in chunked_update.CONTESTANTS if "int8" in name or name.endswith("AdamW")][:3]
    monkeypatch.setattr(chunked_update, "CONTESTANTS", {name: chunked_update.CONTESTANTS[name] for name in names})
    sizes = ["--classes", "3000", "--features", "16", "--batch", "8", "--steps", "1", "--rounds", "1"]
    report = tmp_path / "report.json"
    assert chunked_update.main([*sizes, "--threads", "1", "--untested", "--json", str(report)]) == 0
    rows = json.loads(report.read_text())["results"]
    assert [row["contestant"] for row in rows] == names
    assert all("problem" not in row and len(row["seconds"]) == 1 for row in rows)
    assert "F.linear_cross_entropy, AdamW" in capsys.readouterr().out


def test_a_failed_process_is_a_problem_in_the_table():
    rows = [{"contestant": "F.linear_cross_entropy, AdamW", "problem": "MemoryError"}]
    assert "F.linear_cross_entropy, AdamW: MemoryError" in chunked_update.table(rows)


@pytest.mark.slow
def test_what_updates_learn(tmp_path, monkeypatch, capsys):
    """In float32 the optimizer's own step; in any precision more than chance, which is a quarter."""
    monkeypatch.setattr(learned_updates, "RATES", {"adamw": (0.1,)})
    sizes = ["--classes", "20", "--features", "16", "--images", "40", "--noise", "0.1", "--steps", "60", "--seeds", "2"]
    assert learned_updates.main([*sizes, "--json", str(tmp_path / "learned.json")]) == 0
    rows = {row["way"]: row for row in json.loads((tmp_path / "learned.json").read_text())["results"]}
    assert rows.keys() == learned_updates.WAYS.keys()
    assert all(top5 > 40 for row in rows.values() for _, top5 in row["runs"])
    assert abs(rows["float32"]["difference"]) < 1
    assert "less the own step" in capsys.readouterr().out
