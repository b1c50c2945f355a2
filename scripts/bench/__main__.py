"""``make bench``: every benchmark that this machine can run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from jupyter_gpu_ckpt.testing.cuda_subject import why_no_gpu

HERE = Path(__file__).parent

for script in ("kernel.py", "gate.py", "policy.py", "server.py", "gpu.py"):
    if script == "gpu.py" and (reason := why_no_gpu()):
        print(f"\n== {script}: left out: {reason}")
        continue
    print(f"\n== {script}", flush=True)
    subprocess.run([sys.executable, str(HERE / script)], check=True)
