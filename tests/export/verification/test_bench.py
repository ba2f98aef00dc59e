"""``topk-registry bench``: what is timed, and how it is told."""

import json

import pytest

from topk_export.commands import bench
from topk_export.errors import DeviceError, ModelFileError
from topk_export.runtime.session import nvidia_gpus
from topk_export.verification.bench import devices, measure


def test_the_model_and_its_head_are_timed(model_file):
    row = measure(model_file, batch=3, threads=1, seconds=10.0, repeats=30)
    assert row is not None
    assert (row.device, row.batch, row.runs) == ("cpu", 3, 30)
    assert row.p95_ms >= row.median_ms > 0
    assert row.head_ms is not None
    # this backbone is an average of 1280 pixels and a product: the head is most of the work, and not more than all
    assert 0 < row.head_ms < 2 * row.median_ms


def test_time_is_bounded_and_one_run_is_always_made(model_file):
    row = measure(model_file, seconds=0.0)
    assert row is not None
    assert row.runs == 1


def test_a_model_without_a_head_has_no_share(edited):
    row = measure(edited(outputs=("logits",)), repeats=2)
    assert row is not None
    assert row.head_ms is None


def test_a_fixed_batch_is_the_only_one(edited):
    fixed = edited(batch=4)
    assert measure(fixed, batch=1) is None
    row = measure(fixed, batch=4, repeats=2)
    assert row is not None
    assert row.batch == 4


@pytest.mark.skipif(nvidia_gpus() > 0, reason="there is a GPU")
def test_a_gpu_is_not_timed_where_there_is_none(model_file):
    assert devices() == ["cpu"]
    with pytest.raises(DeviceError, match="wanted cuda"):
        measure(model_file, device="cuda")


def test_the_table(model_file, capsys):
    assert bench.main([str(model_file), "--device", "cpu", "--batch-sizes", "1", "8", "--repeats", "3"]) == 0
    out, err = capsys.readouterr()
    heads, *rows = out.splitlines()
    assert heads.split("  ")[-1].strip() == "head share"
    assert [row.split()[:3] for row in rows] == [["cpu", "1", "3"], ["cpu", "8", "3"]]
    for row in rows:
        batch, median, per_second = (float(row.split()[i]) for i in (1, 3, 5))
        # printed to a thousandth of a millisecond and a tenth of an image
        assert per_second == pytest.approx(1e3 * batch / median, rel=0.0006 / median + 1e-3)
        assert row.endswith("%")
    assert err.splitlines() == ["measuring cpu, batch 1", "measuring cpu, batch 8"]


def test_json(model_file, edited, capsys):
    assert bench.main([str(model_file), "--device", "cpu", "--batch-sizes", "2", "--repeats", "2", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert set(row) == {"device", "batch", "runs", "median_ms", "p95_ms", "head_ms"}
    assert bench.main([str(edited(batch=4)), "--device", "cpu", "--batch-sizes", "1", "--json"]) == 1
    out, err = capsys.readouterr()
    assert json.loads(out) == []
    assert "the model's batch size is fixed and is not 1" in err


def test_a_corrupt_file_is_an_error(tmp_path, capsys):
    path = tmp_path / "corrupt.onnx"
    path.write_bytes(b"no model")
    with pytest.raises(ModelFileError):
        measure(path)
    assert bench.main([str(path), "--device", "cpu"]) == 1
    assert "is not a model that onnxruntime can load" in capsys.readouterr().err
