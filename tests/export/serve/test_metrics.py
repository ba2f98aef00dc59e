"""The counters of several processes are added up from their files."""

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.values import MultiProcessValue

from topk_export.serve.metrics import Written


def test_a_file_that_a_process_has_just_made_adds_nothing(tmp_path, monkeypatch):
    """Between its creation and its first number a process's file is empty."""
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    for pid in (1, 2):
        value = MultiProcessValue(process_identifier=lambda pid=pid: pid)
        value("counter", "seen", "seen_total", (), (), "Seen").inc(pid)
    assert {path.name for path in tmp_path.iterdir()} == {"counter_1.db", "counter_2.db"}
    (tmp_path / "counter_3.db").touch()
    (tmp_path / "gauge_livesum_3.db").touch()
    shared = CollectorRegistry()
    Written(shared)
    assert "seen_total 3.0" in generate_latest(shared).decode()
