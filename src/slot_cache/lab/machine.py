"""On what a measurement was made."""

from __future__ import annotations

import os
import platform
from pathlib import Path


def machine_line(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """One line: processor, cores this process may use, operating system and Python."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    system = f"{platform.system()} {platform.machine()}, Python {platform.python_version()}"
    return f"{_processor(cpuinfo)}, {cores} cores, {system}"


def _processor(cpuinfo: Path) -> str:
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or "unknown processor")
