"""Configuration of a server whose GPUs are fakes (`fake_host`)."""

from __future__ import annotations

from pathlib import Path

GIB = 1 << 30
GPU = "GPU-fake-a"
SUPPORT = str(Path(__file__).resolve().parent)
CONFIG = f"""
import sys
from pathlib import Path
sys.path.append({SUPPORT!r})
from jupyter_gpu_ckpt.testing.fake_host import install
install({{{GPU!r}: 16 << 30}}, Path(c.GpuCkptProvisioner.image_dir))
"""
