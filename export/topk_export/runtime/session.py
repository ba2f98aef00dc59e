"""onnxruntime sessions that run a model on the requested device.

If onnxruntime cannot use a GPU, onnxruntime runs the model on the CPU without an error. Therefore :func:`open_session`
checks which device the new session uses. If a GPU was requested but the session uses the CPU, the function warns. With
``require_gpu=True``, the function raises an exception instead.

An execution provider is the part of onnxruntime that runs a model on one kind of device. The CUDA provider is part of
the package onnxruntime-gpu, or it is a separate library (a plug-in). This module uses a plug-in in three cases:
onnxruntime has already registered the plug-in, a package with a name like ``onnxruntime_ep_cuda*`` is installed, or the
environment variable ``TOPK_EXPORT_CUDA_LIBRARY`` contains the path of the library.
"""

import contextlib
import ctypes
import importlib
import os
import pkgutil
import sys
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from topk_export.errors import DeviceError, ModelFileError
from topk_export.runtime.weights import files_of

DEVICES = ("auto", "cpu", "cuda", "tensorrt")
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
PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider", "tensorrt": "TensorrtExecutionProvider"}
LIBRARY_VARIABLE = "TOPK_EXPORT_CUDA_LIBRARY"
PLUGIN_PREFIX = "onnxruntime_ep_cuda"


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
            "onnxruntime is not installed: pip install 'topk-registry[onnx]' (GPU) or 'topk-registry[onnx-cpu]'"
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
        device: ``"cpu"``, ``"cuda"``, ``"tensorrt"`` or ``"auto"``. ``"auto"`` selects CUDA if there is an NVIDIA GPU,
            else the CPU. If the session cannot use the selected GPU, the session uses the CPU, and this function warns.
        require_gpu: raise :class:`DeviceError` if the session does not run on a GPU.
        threads: number of CPU threads for one operator (``intra_op_num_threads``). None: the default of onnxruntime.
        tf32: whether CUDA may round the inputs of convolutions and matrix products to TF32. True is the default of
            onnxruntime.

    Raises:
        ModelFileError: onnxruntime cannot load the model, or its external weights are missing.
        DeviceError: ``require_gpu`` is True, and the session does not run on a GPU.
    """
    if device not in DEVICES:
        raise ValueError(f"device must be one of {', '.join(DEVICES)}, got {device!r}")
    ort = import_onnxruntime()
    name = "the model" if isinstance(model, bytes) else str(model)
    if not isinstance(model, bytes):
        files_of(model)
    wants_gpu = device in ("cuda", "tensorrt") or (device == "auto" and nvidia_gpus() > 0)
    cause, session = "", None
    if wants_gpu:
        try:
            session = _open_on_gpu(ort, model, device, _session_options(ort, threads), tf32)
        except Exception as error:  # errors of driver, GPU libraries and model have no common base class
            cause = str(error)
    if session is None:
        try:
            session = _open(ort, model, _session_options(ort, threads), [PROVIDERS["cpu"]])
        except Exception as error:
            raise ModelFileError(f"{name} is not a model that onnxruntime can load: {cause or error}") from error
    _check_device(session, device, wants_gpu, require_gpu, cause)
    return session


def check_feed(session: Any, feed: Mapping[str, Any], *, batched: bool = True) -> dict[str, np.ndarray]:
    """Return the arrays for the inputs of a model, in the types of the model.

    If ``batched`` is False, the inputs of the model have no batch axis, but the arrays have one.

    Raises:
        ValueError: an input is missing or unknown, an array has another type or shape than the input, or the arrays
            have different numbers of rows.
    """
    inputs = {value.name: value for value in session.get_inputs()}
    if set(feed) != set(inputs):
        raise ValueError(f"the model takes the inputs {', '.join(inputs)}, got {', '.join(feed) or 'none'}")
    arrays = {}
    for name, value in inputs.items():
        array = np.asarray(feed[name])
        wanted = TYPES.get(value.type, array.dtype)
        shape = ["batch", *value.shape[batched:]]
        fits = array.ndim == len(shape) and all(
            not isinstance(length, int) or length in (size, 0, -1)
            for length, size in zip(shape, array.shape, strict=True)
        )
        if not fits or (array.dtype != wanted and not np.can_cast(array.dtype, wanted, "same_kind")):
            raise ValueError(f"the input {name} takes {value.type} {shape}, got {array.dtype} {list(array.shape)}")
        arrays[name] = array.astype(wanted, copy=False)
    if len({len(array) for array in arrays.values()}) > 1:
        counts = ", ".join(f"{name}: {len(array)}" for name, array in arrays.items())
        raise ValueError(f"the inputs must have the same number of rows, got {counts}")
    return arrays


def as_arrays(session: Any, outputs: Sequence[Any]) -> dict[str, np.ndarray]:
    """Return the outputs of a session by name, and as arrays.

    A sequence of maps, as models of scikit-learn return, becomes an array [B, n] in the order of the classes.
    """
    arrays = {}
    for value, output in zip(session.get_outputs(), outputs, strict=True):
        if value.type.startswith("tensor("):
            arrays[value.name] = np.asarray(output)
        elif value.type.startswith("seq(map("):
            arrays[value.name] = np.asarray([list(row.values()) for row in output])
    return arrays


def device_of(session: Any) -> str:
    """Return the device on which a session runs its model: ``"cpu"``, ``"cuda"`` or ``"tensorrt"``."""
    first = session.get_providers()[0]
    known = {provider: name for name, provider in PROVIDERS.items()}
    return known.get(first, "cuda" if _is_cuda(first) else first)


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


def cuda_plugin(ort: Any) -> list[Any]:
    """Return the CUDA devices that plug-ins of onnxruntime offer. A plug-in is a library that adds a kind of device.

    ``ort`` is the module onnxruntime. If no plug-in is registered, this function registers an installed plug-in. If
    there is no plug-in, the function returns an empty list.
    """
    if not hasattr(ort, "get_ep_devices"):  # onnxruntime below 1.22
        return []
    devices = _cuda_devices(ort)
    library = None if devices else _plugin_library()
    if library is not None:
        ort.register_execution_provider_library(PROVIDERS["cuda"], library)
        devices = _cuda_devices(ort)
    return devices


def _cuda_devices(ort: Any) -> list[Any]:
    return [device for device in ort.get_ep_devices() if _is_cuda(device.ep_name)]


def _is_cuda(provider: str) -> bool:
    return "cuda" in provider.lower()


def _plugin_library() -> str | None:
    if path := os.environ.get(LIBRARY_VARIABLE):
        if not os.path.isfile(path):
            raise DeviceError(f"{LIBRARY_VARIABLE} names {path}, which does not exist")
        return path
    for module in pkgutil.iter_modules():
        if module.name.startswith(PLUGIN_PREFIX):
            return str(importlib.import_module(module.name).get_library_path())
    return None


def _open_on_gpu(ort: Any, model: Any, device: str, options: Any, tf32: bool) -> Any:
    with contextlib.redirect_stdout(sys.stderr):
        if hasattr(ort, "preload_dlls"):
            ort.preload_dlls()  # load CUDA and cuDNN from their wheels
    available = set(ort.get_available_providers())
    cuda = {"use_tf32": str(int(tf32))}
    chain = [(PROVIDERS["tensorrt"], {})] if device == "tensorrt" else []
    chain += [(PROVIDERS["cuda"], cuda), (PROVIDERS["cpu"], {})]
    if chain[0][0] in available:
        return _open(ort, model, options, [entry for entry in chain if entry[0] in available])
    if device != "tensorrt" and (devices := cuda_plugin(ort)):
        options.add_provider_for_devices(devices[:1], cuda)
        return _open(ort, model, options, None)
    return None


def _open(ort: Any, model: Any, options: Any, providers: list[Any] | None) -> Any:
    source = model if isinstance(model, bytes) else str(model)
    with contextlib.redirect_stdout(sys.stderr):  # onnxruntime prints provider errors to stdout
        return ort.InferenceSession(source, options, providers=providers)


def _session_options(ort: Any, threads: int | None) -> Any:
    options = ort.SessionOptions()
    options.log_severity_level = 3
    # denormal numbers make CPUs slow and do not affect results
    options.add_session_config_entry("session.set_denormal_as_zero", "1")
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    if threads is not None:
        options.intra_op_num_threads = threads
    return options


def _check_device(session: Any, device: str, wants_gpu: bool, require_gpu: bool, cause: str) -> None:
    on_cpu = device_of(session) == "cpu"
    if not on_cpu or not (wants_gpu or require_gpu):
        return
    wanted = device if device in ("cuda", "tensorrt") else "a GPU"
    message = (
        f"requested {wanted}, but onnxruntime runs on the CPU (NVIDIA GPUs found: {nvidia_gpus()}; providers of this "
        f"installation: {', '.join(import_onnxruntime().get_available_providers())}). For a GPU, install "
        "onnxruntime-gpu[cuda,cudnn] and not onnxruntime beside it: the two wheels overwrite each other"
    ) + (f". onnxruntime reported: {cause}" if cause else "")
    if require_gpu:
        raise DeviceError(message)
    warnings.warn(message, RuntimeWarning, stacklevel=4)
