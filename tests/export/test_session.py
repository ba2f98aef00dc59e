"""The device of a session: what was asked for, or a warning or an error; CUDA built in or as a plug-in."""

import os
import subprocess
import sys
import types
import warnings
from types import SimpleNamespace

import onnxruntime
import pytest

from topk_export import DeviceError, Predictor, verify_file
from topk_export.runtime import session as runtime

CUDA_WORKS = runtime.nvidia_gpus() > 0 and "CUDAExecutionProvider" in onnxruntime.get_available_providers()


class Session:
    """A session that pretends to run where it was opened."""

    def __init__(self, source, options, providers=None, enable_fallback=1):
        self.providers = providers or [*options.added, "CPUExecutionProvider"]

    def get_providers(self):
        return self.providers


class Options:
    def __init__(self):
        self.added = []

    def add_session_config_entry(self, *_):
        pass

    def add_provider_for_devices(self, devices, options):
        self.added += [device.ep_name for device in devices]


class FakeRuntime:
    """An onnxruntime whose CUDA provider is a plug-in library."""

    SessionOptions, InferenceSession = Options, Session

    def __init__(self, devices=()):
        self.devices, self.registered = list(devices), []

    def get_available_providers(self):
        return ["CPUExecutionProvider"]

    def get_ep_devices(self):
        return [SimpleNamespace(ep_name=name) for name in ("CPUExecutionProvider", *self.devices)]

    def register_execution_provider_library(self, name, path):
        self.registered.append((name, path))
        self.devices.append("CudaPluginExecutionProvider")


@pytest.fixture
def fake(monkeypatch):
    def install(*devices):
        ort = FakeRuntime(devices)
        monkeypatch.setattr(runtime, "import_onnxruntime", lambda: ort)
        monkeypatch.setattr(runtime, "nvidia_gpus", lambda: 1)
        return ort

    return install


@pytest.mark.parametrize("device", ["cuda", "auto"])
def test_a_registered_plugin_is_used(fake, device):
    ort = fake("CUDAExecutionProvider")
    session = runtime.open_session(b"model", device=device, require_gpu=True)
    assert runtime.device_of(session) == "cuda"
    assert ort.registered == []


def test_an_installed_plugin_package_is_registered(fake, monkeypatch, tmp_path):
    ort = fake()
    package = types.ModuleType("onnxruntime_ep_cuda13")
    package.get_library_path = lambda: "/opt/libcuda_ep.so"
    monkeypatch.setitem(sys.modules, package.__name__, package)
    monkeypatch.setattr(runtime.pkgutil, "iter_modules", lambda: [SimpleNamespace(name=package.__name__)])
    session = runtime.open_session(b"model", device="cuda", require_gpu=True)
    assert runtime.device_of(session) == "cuda"
    assert ort.registered == [("CUDAExecutionProvider", "/opt/libcuda_ep.so")]


def test_a_library_of_the_environment_is_registered(fake, monkeypatch, tmp_path):
    ort, library = fake(), tmp_path / "libep.so"
    monkeypatch.setenv(runtime.library_variable("cuda"), str(library))
    with pytest.raises(DeviceError, match="does not exist"):
        runtime.open_session(b"model", device="cuda", require_gpu=True)
    library.touch()
    assert runtime.device_of(runtime.open_session(b"model", device="cuda")) == "cuda"
    assert ort.registered == [("CUDAExecutionProvider", str(library))]


def test_a_device_that_is_named_and_missing_is_an_error_that_lists_the_others(fake, monkeypatch):
    fake("VendorExecutionProvider")
    monkeypatch.setattr(runtime.pkgutil, "iter_modules", list)
    for device, remedy in (("cuda", "onnxruntime-gpu"), ("tensorrt", "onnxruntime-gpu"), ("webgpu", "ep-webgpu")):
        with pytest.raises(DeviceError, match=f"requested {device}, .*CPUEx.*, VendorEx.*For {device}, .*{remedy}"):
            runtime.open_session(b"model", device=device)


def test_without_any_plugin_auto_runs_on_the_cpu_with_a_warning(fake):
    fake()
    with pytest.warns(RuntimeWarning, match="onnxruntime runs the model on the CPU"):
        assert runtime.device_of(runtime.open_session(b"model")) == "cpu"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        runtime.open_session(b"model", device="cpu")


@pytest.mark.skipif(CUDA_WORKS, reason="this machine has a GPU")
def test_a_gpu_that_is_missing_is_an_error(model_file):
    with pytest.raises(DeviceError, match="requested cuda, but onnxruntime runs the model on the CPU"):
        Predictor(model_file, device="cuda")
    for device in ("auto", "cpu", "cuda", "tensorrt"):
        with pytest.raises(DeviceError, match="onnxruntime-gpu"):
            Predictor(model_file, device=device, require_gpu=True)


@pytest.mark.skipif(not CUDA_WORKS, reason="needs a GPU")
def test_a_gpu_runs_the_model(model_file):
    assert Predictor(model_file, device="cuda", require_gpu=True).device == "cuda"
    assert verify_file(model_file, device="cuda", require_gpu=True)["passed"]


def test_a_session_says_where_its_nodes_run(predictor):
    counts = runtime.placement(predictor.session)
    assert counts is None or counts["CPUExecutionProvider"] > 0
    assert runtime.placement(object()) is None


def test_telemetry_is_off(tmp_path):
    code = (
        "import os; from topk_export.runtime.session import import_onnxruntime as imported; imported(); "
        "print(os.environ['ORT_DISABLE_TELEMETRY'])"
    )
    environment = {**os.environ, "HOME": str(tmp_path)}
    environment.pop("ORT_DISABLE_TELEMETRY", None)
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=300)
    assert result.stdout.strip() == "1", result.stderr
    assert not list(tmp_path.rglob("*"))


@pytest.mark.parametrize(("init", "counting", "found"), [(0, 0, 2), (100, 0, 0), (0, 100, 0)])
def test_gpus_count_only_if_the_driver_works(monkeypatch, init, counting, found):
    def count(reference):
        reference._obj.value = 2
        return counting

    driver = SimpleNamespace(cuInit=lambda flags: init, cuDeviceGetCount=count)
    monkeypatch.setattr(runtime.ctypes, "CDLL", lambda name: driver)
    assert runtime.nvidia_gpus() == found
