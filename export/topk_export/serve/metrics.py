"""Counters of the service, for Prometheus and for KServe's statistics."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, Summary, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.values import ValueClass

from topk_export.serve.releases import Release

STAGES = ("input", "queue", "output")  # decoding or parsing, waiting for a batch, ranking and encoding


class Metrics:
    """Counters of one application, or of all worker processes where prometheus_client shares them by files."""

    def __init__(self) -> None:
        self.registry = own = CollectorRegistry()
        self.requests = Counter("topk_requests", "Requests", ("route", "status"), registry=own)
        self.seconds = Histogram("topk_predict_seconds", "Time of a prediction", registry=own)
        sizes = (1, 2, 4, 8, 16, 32, 64, 128)
        self.batches = Histogram("topk_batch_size", "Inputs a batch", buckets=sizes, registry=own)
        self.waiting = Gauge("topk_queue_length", "Inputs that wait", registry=own, multiprocess_mode="livesum")
        self.workers = Gauge(
            "topk_model_workers",
            "Processes that serve this content of the model's files",
            ("sha256", "version"),
            registry=own,
            multiprocess_mode="livesum",
        )
        labels = ("version", "outcome")
        self.turns = Summary("topk_turn_seconds", "Time of a request for the model", labels, registry=own)
        self.stages = Summary("topk_stage_seconds", "Time of a stage", ("version", "stage"), registry=own)
        self.runs = Summary("topk_run_seconds", "Time of a run of the model", ("version", "size"), registry=own)
        self.last = Gauge(
            "topk_last_run_milliseconds",
            "Unix time of the last run",
            ("version",),
            registry=own,
            multiprocess_mode="max",
        )

    def serve(self, new: Release, old: Release | None = None) -> None:
        """Count this process for a release, and no longer for the one before it."""
        if old is not None:
            self.workers.labels(old.sha256, str(old.version)).set(0)
        self.workers.labels(new.sha256, str(new.version)).set(1)

    def ran(self, release: Release, waited: Sequence[float], seconds: float, at: float) -> None:
        """Count a run of the model: how long each of its inputs waited, how long it took, and the time of its end."""
        version = str(release.version)
        self.runs.labels(version, str(len(waited))).observe(seconds)
        for each in waited:
            self.stages.labels(version, "queue").observe(each)
        self.last.labels(version).set(int(1e3 * at))

    def text(self) -> bytes:
        return generate_latest(self._of_all())

    def statistics(self, name: str, release: Release) -> dict[str, Any]:
        """Return the statistics of a release in the words of KServe's protocol; times are nanoseconds."""
        version = str(release.version)
        sums: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(lambda: [0, 0]))
        last = 0
        for metric in self._of_all().collect():
            for sample in metric.samples:
                labels = dict(sample.labels)
                if labels.pop("version", None) != version:
                    continue
                kind = sample.name.removeprefix(metric.name)
                if sample.name == "topk_last_run_milliseconds":
                    last = int(sample.value)
                elif kind in ("_count", "_sum") and len(labels) == 1:
                    (label,) = labels.values()
                    sums[metric.name][label][kind == "_sum"] += sample.value
        turns, stages, runs = (sums[f"topk_{kind}_seconds"] for kind in ("turn", "stage", "run"))
        infer = [sum(int(size) * run[i] for size, run in runs.items()) for i in (0, 1)]
        return {
            "name": name,
            "version": version,
            "last_inference": last,
            "inference_count": int(infer[0]),
            "execution_count": int(sum(count for count, _ in runs.values())),
            "inference_stats": {
                "success": _duration(turns["success"]),
                "fail": _duration(turns["fail"]),
                "queue": _duration(stages["queue"]),
                "compute_input": _duration(stages["input"]),
                "compute_infer": _duration(infer),
                "compute_output": _duration(stages["output"]),
            },
            "batch_stats": [
                {"batch_size": size, "compute_infer": _duration(runs[str(size)])} for size in sorted(map(int, runs))
            ],
        }

    def _of_all(self) -> CollectorRegistry:
        if not getattr(ValueClass, "_multiprocess", False):
            return self.registry
        shared = CollectorRegistry()
        Written(shared)
        return shared


class Written(MultiProcessCollector):
    """Counters of all processes; a file that a process has just made, or just removed, has none to add."""

    def collect(self) -> Iterable[Metric]:
        paths = []
        for file in Path(self._path).glob("*.db"):
            with suppress(FileNotFoundError):
                paths += [str(file)] if file.stat().st_size else []
        return self.merge(paths, accumulate=True)


def _duration(values: Sequence[float]) -> dict[str, int]:
    count, seconds = values
    return {"count": int(count), "ns": int(1e9 * seconds)}
