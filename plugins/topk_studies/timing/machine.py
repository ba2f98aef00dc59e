"""Facts on the machine that a time belongs to."""

import os
import platform
from pathlib import Path

import torch


def busy() -> str:
    """Says so when others already keep half the processors at work; empty when they do not."""
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    return f"load average {load:.1f} on {cores} cores" if load > cores / 2 else ""


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def usable(device: str) -> str:
    """The device, or the CPU where it is CUDA and there is none."""
    return "cpu" if device.startswith("cuda") and not torch.cuda.is_available() else device
