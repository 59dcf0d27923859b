"""What every artifact carries: where it was recorded, measured or trained, and when."""

from __future__ import annotations

import datetime
import functools
import importlib.metadata
import platform

import msgspec
import torch

from loka_toolkit._version import __version__

CPU_CHIP = "cpu"
FINGERPRINTED_LIBRARIES = (
    "torch",
    "triton",
    "torchao",
    "fbgemm-gpu-genai",
    "numpy",
    "pyarrow",
    "pymc",
    "nutpie",
)


class Environment(msgspec.Struct, frozen=True):
    """Hardware, driver and library versions.

    Attributes:
        chip: Name of the accelerator without its vendor, for example ``H200``; ``cpu`` without one.
        capability: Compute capability such as ``9.0``, or null.
        driver: Driver version, or null.
        cuda: CUDA version that torch was built for, or null.
        python: Python version.
        platform: Operating system and architecture.
        loka_toolkit: Version of this package.
        libraries: Versions of the numeric libraries that are installed.
    """

    chip: str
    capability: str | None
    driver: str | None
    cuda: str | None
    python: str
    platform: str
    loka_toolkit: str
    libraries: dict[str, str]


def timestamp() -> str:
    """Return the present time, UTC, in ISO 8601 to the second."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def chip_of(device: torch.device | None = None) -> str:
    """Return the chip's name: ``cpu``, or the GPU's without vendor and memory size."""
    if device is not None and device.type == "cpu":
        return CPU_CHIP
    if not torch.cuda.is_available():
        return CPU_CHIP
    name = torch.cuda.get_device_name(device)
    words = [w for w in name.split() if w not in ("NVIDIA", "AMD", "Tesla", "Instinct")]
    return words[0] if words else name


@functools.cache
def current_environment() -> Environment:
    """Return the fingerprint of this process's environment."""
    has_gpu = torch.cuda.is_available()
    capability = ".".join(map(str, torch.cuda.get_device_capability())) if has_gpu else None
    return Environment(
        chip=chip_of(),
        capability=capability,
        driver=_driver_version() if has_gpu else None,
        cuda=torch.version.cuda,
        python=platform.python_version(),
        platform=f"{platform.system()}-{platform.machine()}",
        loka_toolkit=__version__,
        libraries=_library_versions(),
    )


def _library_versions() -> dict[str, str]:
    versions = {}
    for name in FINGERPRINTED_LIBRARIES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _driver_version() -> str | None:
    from pathlib import Path

    file = Path("/sys/module/nvidia/version")
    if file.is_file():
        return file.read_text().strip()
    proc = Path("/proc/driver/nvidia/version")
    if proc.is_file():
        words = proc.read_text().split()
        return next((w for w in words if w.count(".") >= 1 and w[0].isdigit()), None)
    return None
