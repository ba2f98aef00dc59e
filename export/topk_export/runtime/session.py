"""onnxruntime sessions that run a model on the requested device.

If onnxruntime cannot use a GPU, onnxruntime runs the model on the CPU without an error. Therefore :func:`open_session`
checks which device the new session uses. If the device that was requested by name is missing, the function raises an
exception. If the device was not named and there is an NVIDIA GPU that does not work, the function warns.

An execution provider is the part of onnxruntime that runs a model on one kind of device. A provider is built into
onnxruntime, as CUDA is in the package onnxruntime-gpu, or the provider is a separate library (a plug-in). WebGPU is a
plug-in: it runs models on GPUs of Apple, AMD, Intel and NVIDIA. This module uses a plug-in for a device in three cases:
onnxruntime has already registered the plug-in, a package with a name like ``onnxruntime_ep_cuda*`` is installed, or an
environment variable such as ``TOPK_EXPORT_CUDA_LIBRARY`` contains the path of the library.
"""

import contextlib
import ctypes
import importlib
import os
import pkgutil
import sys
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from topk_export.errors import DeviceError, ModelFileError

DEVICES = ("auto", "cpu", "cuda", "tensorrt", "webgpu")
TYPES: dict[str, Any] = {
    "tensor(bool)": np.bool_,
    "tensor(double)": np.float64,
    "tensor(float)": np.float32,
    "tensor(float16)": np.float16,
    "tensor(int16)": np.int16,
    "tensor(int32)": np.int32,
    "tensor(int64)": np.int64,
    "tensor(int8)": np.int8,
    "tensor(uint8)": np.uint8,
}
PROVIDERS = {
    "cpu": "CPUExecutionProvider",
    "cuda": "CUDAExecutionProvider",
    "tensorrt": "TensorrtExecutionProvider",
    "webgpu": "WebGpuExecutionProvider",
}
PLUGINS = {"cuda": "onnxruntime_ep_cuda", "webgpu": "onnxruntime_ep_webgpu"}  # how the names of packages begin
OPTIONS = {"webgpu": {"enableInt64": "1"}}  # else, operations on indices and on class numbers run on the CPU
NVIDIA = "install onnxruntime-gpu[cuda,cudnn] and not onnxruntime beside it: the two wheels overwrite each other"
REMEDIES = {
    "cuda": NVIDIA,
    "tensorrt": NVIDIA,
    "webgpu": "install onnxruntime-ep-webgpu with Python 3.11 or newer and onnxruntime 1.24.4 or newer. The GPU needs "
    "a driver for Vulkan, Metal or Direct3D 12",
}


def import_onnxruntime() -> Any:
    """Import and return onnxruntime, with telemetry disabled.

    If the environment variable ``ORT_DISABLE_TELEMETRY`` is already set, do not change the variable.
    """
    # the variable must be set before the import, which writes a device ID to HOME and starts to send data
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    try:
        import onnxruntime
    except ImportError as error:
        raise ImportError(
            "onnxruntime is not installed: in the checkout, pip install -e '.[onnx]' (with CUDA) or '.[onnx-cpu]'"
        ) from error
    return onnxruntime


def open_session(
    model: str | Path | bytes,
    *,
    device: str = "auto",
    require_gpu: bool = False,
    threads: int | None = None,
    tf32: bool = True,
) -> Any:
    """Open a model, and return the ``onnxruntime.InferenceSession``.

    Args:
        model: path of an ONNX file, or the content of an ONNX file as bytes.
        device: ``"cpu"``, ``"cuda"``, ``"tensorrt"``, ``"webgpu"`` or ``"auto"``. ``"auto"`` selects CUDA if there is
            an NVIDIA GPU, else the CPU. If the session cannot use the GPU that ``"auto"`` selected, the session uses
            the CPU, and this function warns.
        require_gpu: raise :class:`DeviceError` if the session does not run on a GPU.
        threads: number of CPU threads for one operator (``intra_op_num_threads``). None: the default of onnxruntime.
        tf32: whether CUDA may round the inputs of convolutions and matrix products to TF32. True is the default of
            onnxruntime.

    Raises:
        ModelFileError: onnxruntime cannot load the model, or its external weights are missing.
        DeviceError: the session cannot use the named device, or ``require_gpu`` is True and the session does not run on
            a GPU. The message lists the devices of this machine.
    """
    if device not in DEVICES:
        raise ValueError(f"device must be one of {', '.join(DEVICES)}, got {device!r}")
    ort = import_onnxruntime()
    name = "the model" if isinstance(model, bytes) else str(model)
    if not isinstance(model, bytes) and not Path(model).is_file():
        raise ModelFileError(f"{model} does not exist or is not a file")
    gpu = device if device not in ("auto", "cpu") else "cuda" if device == "auto" and nvidia_gpus() > 0 else ""
    cause, session = "", None
    if gpu:
        try:
            session = _open_on_gpu(ort, model, gpu, _session_options(ort, threads), tf32)
        except Exception as error:  # errors of driver, GPU libraries and model have no common base class
            cause = str(error)
    if session is None:
        try:
            session = _open(ort, model, _session_options(ort, threads), [PROVIDERS["cpu"]])
        except Exception as error:
            raise ModelFileError(f"{name} is not a model that onnxruntime can load: {cause or error}") from error
    if device_of(session) == "cpu" and (gpu or require_gpu):
        message = _missing(ort, device, gpu or "cuda", cause)
        if require_gpu or device != "auto":
            raise DeviceError(message)
        warnings.warn(message, RuntimeWarning, stacklevel=3)
    return session


def device_of(session: Any) -> str:
    """Return the device on which a session runs its model: ``"cpu"``, ``"cuda"``, ``"tensorrt"`` or ``"webgpu"``."""
    first = session.get_providers()[0]
    known = {provider: name for name, provider in PROVIDERS.items()}
    return known.get(first) or next((name for name in PLUGINS if name in first.lower()), first)


def placement(session: Any) -> dict[str, int] | None:
    """Return a dictionary from each execution provider to the number of graph nodes that the provider runs.

    If the installed version of onnxruntime does not report these numbers, return None.
    """
    try:
        counts: Counter[str] = Counter()
        for part in session.get_provider_graph_assignment_info():
            counts[part.ep_name] += len(part.get_nodes())
        return dict(counts)
    except Exception:  # older versions of onnxruntime lack this call
        return None


def nvidia_gpus() -> int:
    """Return the number of GPUs that the NVIDIA driver reports, or 0 if there is no driver.

    onnxruntime cannot tell whether there is a GPU: the list of its providers contains CUDA even without a GPU.
    """
    try:
        driver = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int()
    works = driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0
    return count.value if works else 0


def plugin_devices(ort: Any, device: str) -> list[Any]:
    """Return the devices of a kind, ``"cuda"`` or ``"webgpu"``, that plug-ins of onnxruntime offer.

    A plug-in is a library that adds a kind of device. ``ort`` is the module onnxruntime. If no plug-in for ``device``
    is registered, this function registers an installed plug-in. If there is none, the function returns an empty list.
    """
    if not hasattr(ort, "get_ep_devices"):  # onnxruntime below 1.22
        return []
    devices = _registered(ort, device)
    library = None if devices else _plugin_library(device)
    if library is not None:
        ort.register_execution_provider_library(PROVIDERS[device], library)
        devices = _registered(ort, device)
    return devices


def _registered(ort: Any, device: str) -> list[Any]:
    return [entry for entry in ort.get_ep_devices() if device in entry.ep_name.lower()]


def library_variable(device: str) -> str:
    """Return the name of the environment variable with the path of the plug-in for ``device``."""
    return f"TOPK_EXPORT_{device.upper()}_LIBRARY"


def _plugin_library(device: str) -> str | None:
    if path := os.environ.get(library_variable(device)):
        if not os.path.isfile(path):
            raise DeviceError(f"{library_variable(device)} names {path}, which does not exist")
        return path
    for module in pkgutil.iter_modules():
        if module.name.startswith(PLUGINS[device]):
            return str(importlib.import_module(module.name).get_library_path())
    return None


def _open_on_gpu(ort: Any, model: Any, device: str, options: Any, tf32: bool) -> Any:
    own = {"use_tf32": str(int(tf32))} if device == "cuda" else OPTIONS.get(device, {})
    chain = [(PROVIDERS[device], own), (PROVIDERS["cpu"], {})]
    if device != "webgpu":
        with contextlib.redirect_stdout(sys.stderr):
            if hasattr(ort, "preload_dlls"):
                ort.preload_dlls()  # load CUDA and cuDNN from their wheels
        if device == "tensorrt":
            chain.insert(1, (PROVIDERS["cuda"], {"use_tf32": str(int(tf32))}))
        available = set(ort.get_available_providers())
        if chain[0][0] in available:
            return _open(ort, model, options, [entry for entry in chain if entry[0] in available])
    if device in PLUGINS and (devices := plugin_devices(ort, device)):
        options.add_provider_for_devices(devices[:1], own)
        return _open(ort, model, options, None)
    return None


def _open(ort: Any, model: Any, options: Any, providers: list[Any] | None) -> Any:
    source = model if isinstance(model, bytes) else str(model)
    with contextlib.redirect_stdout(sys.stderr):  # onnxruntime prints provider errors to stdout
        # without enable_fallback=0, onnxruntime hides why a plug-in failed
        return ort.InferenceSession(source, options, providers=providers, enable_fallback=0)


def _session_options(ort: Any, threads: int | None) -> Any:
    options = ort.SessionOptions()
    options.log_severity_level = 3
    # denormal numbers make CPUs slow and do not affect results
    options.add_session_config_entry("session.set_denormal_as_zero", "1")
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    if threads is not None:
        options.intra_op_num_threads = threads
    return options


def _missing(ort: Any, device: str, gpu: str, cause: str) -> str:
    offered = {*ort.get_available_providers()}
    if hasattr(ort, "get_ep_devices"):
        offered |= {entry.ep_name for entry in ort.get_ep_devices()}
    wanted = "a GPU" if device in ("auto", "cpu") else device
    message = (
        f"requested {wanted}, but onnxruntime runs the model on the CPU. This machine has {nvidia_gpus()} NVIDIA GPUs, "
        f"and this installation has {', '.join(sorted(offered))}. For {gpu}, {REMEDIES[gpu]}"
    )
    return message + (f". onnxruntime reported: {cause}" if cause else "")
