"""An onnxruntime session on the device that was asked for, with a warning or an error if it runs elsewhere.

onnxruntime falls back to the CPU silently, and lists providers as available that then fail, so only an open session
tells where it runs. A GPU that is asked for and missing is an error under ``require_gpu``, and a warning otherwise.
"""

import contextlib
import ctypes
import os
import sys
import warnings
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from topk_export.errors import DeviceError, ModelFileError
from topk_export.runtime.weights import files_of

DEVICES = ("auto", "cpu", "cuda", "tensorrt")
TYPES = {"tensor(float)": np.float32, "tensor(uint8)": np.uint8, "tensor(int64)": np.int64, "tensor(bool)": np.bool_}
PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider", "tensorrt": "TensorrtExecutionProvider"}


def import_onnxruntime() -> Any:
    """Import onnxruntime without its telemetry, unless ``ORT_DISABLE_TELEMETRY`` says otherwise."""
    # the import itself would write a device's id below HOME and start to send: it must be told before
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
    cuda_graph: bool = False,
    tf32: bool | None = None,
    profile: str | None = None,
    optimise: bool = True,
    weights: str | Path | None = None,
) -> Any:
    """Open an ``onnxruntime.InferenceSession`` of a model file, or of its bytes.

    Args:
        model: path or serialized model.
        device: ``"auto"`` takes CUDA if there is a GPU, else the CPU; the others name one device.
        require_gpu: raise :class:`DeviceError` if the session does not run on a GPU.
        threads: intra-op threads; None leaves onnxruntime's choice.
        cuda_graph: capture the model as a CUDA graph (fixed shapes, bound inputs and outputs).
        tf32: allow or forbid TF32 on CUDA; None leaves the provider's default, which allows it.
        profile: prefix of a profile file.
        optimise: apply onnxruntime's graph optimisations.
        weights: folder of the weights that a serialized model keeps in other files.
    """
    if device not in DEVICES:
        raise ValueError(f"device must be one of {', '.join(DEVICES)}, got {device!r}")
    ort = import_onnxruntime()
    providers = _providers(ort, device, cuda_graph=cuda_graph, tf32=tf32)
    options = _session_options(ort, threads, profile, optimise)
    source = bytes(model) if isinstance(model, bytes) else str(model)
    name = "the model" if isinstance(model, bytes) else str(model)
    if isinstance(model, str | Path):
        files_of(model)
    if weights is not None:
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(weights))

    def opened(chosen: list[tuple[str, dict[str, Any]]]) -> Any:
        with contextlib.redirect_stdout(sys.stderr):  # onnxruntime prints the failure of a provider
            return ort.InferenceSession(source, options, providers=chosen)

    cause = ""
    try:
        session = opened(providers)
    except Exception as error:  # onnxruntime's errors share no base class below Exception
        try:
            session = opened(providers[-1:])  # it may be the GPU's driver or libraries, and not the model
        except Exception:
            raise ModelFileError(f"{name} is not a model that onnxruntime can load: {error}") from error
        cause = str(error)
    _check_device(session, device, require_gpu, cause)
    return session


def device_of(session: Any) -> str:
    """Return ``"cpu"``, ``"cuda"`` or ``"tensorrt"``, the provider that the session puts first."""
    first = session.get_providers()[0]
    return next((name for name, provider in PROVIDERS.items() if provider == first), first)


def placement(session: Any) -> dict[str, int] | None:
    """Count the nodes of the graph on each provider; None if this onnxruntime does not tell."""
    try:
        subgraphs = session.get_provider_graph_assignment_info()
        counts: Counter[str] = Counter()
        for part in subgraphs:
            counts[part.ep_name] += len(part.get_nodes())
        return dict(counts)
    except Exception:  # an older onnxruntime has no such call
        return None


def _providers(ort: Any, device: str, *, cuda_graph: bool, tf32: bool | None) -> list[tuple[str, dict[str, Any]]]:
    cpu = (PROVIDERS["cpu"], {})
    if device == "cpu" or (device == "auto" and not nvidia_gpus()):
        return [cpu]
    if hasattr(ort, "preload_dlls"):
        with contextlib.redirect_stdout(sys.stderr):
            ort.preload_dlls()  # CUDA and cuDNN from their wheels
    cuda: dict[str, Any] = {"enable_cuda_graph": "1"} if cuda_graph else {}
    if tf32 is not None:
        cuda["use_tf32"] = str(int(tf32))
    chain = [(PROVIDERS["cuda"], cuda), cpu]
    if device == "tensorrt":
        chain.insert(0, (PROVIDERS["tensorrt"], {"trt_cuda_graph_enable": "1"} if cuda_graph else {}))
    available = set(ort.get_available_providers())
    kept = [entry for entry in chain if entry[0] in available]
    return kept if kept[0][0] == chain[0][0] else [cpu]


def nvidia_gpus() -> int:
    """Count the GPUs that the NVIDIA driver sees, as onnxruntime lists its CUDA provider without a GPU too."""
    try:
        driver = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int()
    works = driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0
    return count.value if works else 0


def _session_options(ort: Any, threads: int | None, profile: str | None, optimise: bool) -> Any:
    options = ort.SessionOptions()
    options.log_severity_level = 3
    # powers of small odds are denormal numbers, which slow a CPU down tenfold and change nothing
    options.add_session_config_entry("session.set_denormal_as_zero", "1")
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    if threads is not None:
        options.intra_op_num_threads = threads
    if profile is not None:
        options.enable_profiling, options.profile_file_prefix = True, profile
    if not optimise:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    return options


def _check_device(session: Any, device: str, require_gpu: bool, cause: str) -> None:
    on_cpu = session.get_providers()[0] == PROVIDERS["cpu"]
    fell_back = on_cpu and (device in ("cuda", "tensorrt") or (device == "auto" and nvidia_gpus() > 0))
    if not fell_back and not (require_gpu and on_cpu):
        return
    available = ", ".join(import_onnxruntime().get_available_providers())
    wanted = device if device in ("cuda", "tensorrt") else "a GPU"
    message = (
        f"wanted {wanted}, but onnxruntime runs on the CPU (NVIDIA GPUs here: {nvidia_gpus()}; providers of this "
        f"installation: {available}). For a GPU install onnxruntime-gpu[cuda,cudnn], and not onnxruntime beside it: "
        "the two wheels overwrite each other"
    ) + (f". It said: {cause}" if cause else "")
    if require_gpu:
        raise DeviceError(message)
    warnings.warn(message, RuntimeWarning, stacklevel=4)


class BoundRunner:
    """Run a model at one fixed shape, in input and output buffers that stay on the device, as CUDA graphs need.

    Args:
        session: of the model.
        shape: of the one input.
        others: values of inputs that have defaults, by name; a call may give others of the same shape.
    """

    def __init__(self, session: Any, shape: tuple[int, ...], others: Mapping[str, np.ndarray] | None = None) -> None:
        ort = import_onnxruntime()
        kind = "cpu" if device_of(session) == "cpu" else "cuda"
        (source,) = session.get_inputs()
        self._session, self._binding = session, session.io_binding()
        self._source = source.name
        values = {source.name: np.zeros(shape, TYPES[source.type]), **(others or {})}
        self._inputs = {name: ort.OrtValue.ortvalue_from_numpy(value, kind, 0) for name, value in values.items()}
        for name, value in self._inputs.items():
            self._binding.bind_ortvalue_input(name, value)
        for output in session.get_outputs():
            full = (shape[0], *output.shape[1:])
            value = ort.OrtValue.ortvalue_from_shape_and_type(full, TYPES[output.type], kind, 0)
            self._binding.bind_ortvalue_output(output.name, value)

    def __call__(self, x: np.ndarray, **others: np.ndarray) -> list[np.ndarray]:
        for name, value in {self._source: x, **others}.items():
            self._inputs[name].update_inplace(np.ascontiguousarray(value))
        self._session.run_with_iobinding(self._binding)
        return self._binding.copy_outputs_to_cpu()
