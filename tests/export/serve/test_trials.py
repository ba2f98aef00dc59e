"""The trials of the service see answers, and give their figures as JSON."""

import json

import pytest

from tests.bench import trials
from tests.export.colours import png

SECONDS = 0.2


@pytest.mark.slow
def test_what_clients_see(service):
    image = png("red")
    health, predictions = trials.idle_sockets(service.port, image, SECONDS, 8)
    assert health.statuses.keys() == predictions.statuses.keys() == {200}
    assert health.note.startswith("0 of them closed")
    _, sets = trials.whole_sets(service.port, image, SECONDS)
    assert sets.statuses[200] == sets.statuses.total() == len(sets.times) >= trials.CLIENTS
    (refused,) = trials.large_image_refused(service.port, trials.flat_png(2200), 2200)
    assert refused.statuses == {413: 1}
    *_, small, large = trials.large_images(service.port, image, trials.flat_png(2100), SECONDS)
    assert small.statuses.keys() == large.statuses.keys() == {200}
    assert large.statuses[200] == len(large.times) >= trials.CLIENTS


@pytest.mark.filterwarnings("ignore:.*is busy")
def test_the_command_writes_all_figures(model_file, tmp_path, monkeypatch, capsys):
    rows = list(trials.decoding(model_file, trials.photo(60, 50), SECONDS))
    monkeypatch.setattr(trials, "_model", lambda folder: model_file)
    monkeypatch.setattr(trials, "trials", lambda *args: iter(rows))
    assert trials.main(["--json", str(tmp_path / "trials.json"), "--seconds", "1"]) == 0
    results = json.loads((tmp_path / "trials.json").read_text())["results"]
    assert [row["client"] for row in results] == ["1 threads", "2 threads", "4 threads"]
    assert all(row["per_second"] > 0 for row in results)
    assert capsys.readouterr().out.count("decoding, one process") == 3
