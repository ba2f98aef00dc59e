"""A WebGPU device without a GPU: SwiftShader, a library of Chromium that runs Vulkan on a CPU."""

import json
import os
import platform
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

NAME = "libvk_swiftshader.so"


def library() -> Path | None:
    browser = shutil.which("chromium")
    folders = [Path("/usr/lib/chromium"), *([Path(browser).resolve().parent] if browser else [])]
    return next((folder / NAME for folder in folders if (folder / NAME).is_file()), None)


def missing() -> str:
    """Return what the device lacks on this machine, or an empty string."""
    if find_spec("onnxruntime_ep_webgpu") is None:
        return "needs onnxruntime-ep-webgpu (extra webgpu)"
    return "" if library() else f"needs {NAME} of Chromium"


def in_ci() -> bool:
    """Whether continuous integration has the device: onnxruntime-ep-webgpu has a wheel, and Chromium is installed."""
    suitable = sys.platform == "linux" and platform.machine() == "x86_64" and sys.version_info >= (3, 11)
    return suitable and shutil.which("chromium") is not None


def environment(folder: Path) -> dict[str, str]:
    """Return the variables that make SwiftShader the only GPU, and let onnxruntime use it."""
    driver = {"file_format_version": "1.0.0", "ICD": {"library_path": str(library()), "api_version": "1.1.0"}}
    file = folder / "swiftshader.json"
    file.write_text(json.dumps(driver))
    return {
        "VK_ICD_FILENAMES": str(file),
        "ORT_WEBGPU_EP_ALLOW_SOFTWARE_ADAPTER": "1",
        "XDG_RUNTIME_DIR": os.environ.get("XDG_RUNTIME_DIR", str(folder)),
    }
