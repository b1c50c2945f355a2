"""Cost of the open launch gate in each call of the CUDA driver: ``python scripts/bench/launch_gate.py``.

Needs a C compiler and no GPU: the driver is one whose functions do nothing.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from limits import MISSED

from jupyter_gpu_ckpt.cuda import fastpath

SOURCE = Path(__file__).with_suffix(".c")
LIMIT_NS = 1.0


def main() -> int:
    library = fastpath.preload()
    if library.path is None:
        print(f"the library cannot be preloaded: {library.why}", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as directory:
        compile_ = ["cc", "-O2", "-fPIC", str(SOURCE), "-ldl", "-o"]
        subprocess.run([*compile_, f"{directory}/libcuda.so.1", "-shared", "-DDRIVER"], check=True)
        subprocess.run([*compile_, f"{directory}/calls"], check=True)
        variables = {**os.environ, "LD_LIBRARY_PATH": directory, "LD_PRELOAD": str(library.path)}
        done = subprocess.run([f"{directory}/calls"], env=variables, stdout=subprocess.PIPE, text=True, check=True)
    is_gated, direct, gated = done.stdout.split()
    if is_gated != "1":
        print("there is no gate on this machine")
        return 0
    added = float(gated) - float(direct)
    print(f"a call of the driver {direct} ns, through the gate {gated} ns: {added:.2f} ns more, limit {LIMIT_NS:g} ns")
    return MISSED if added > LIMIT_NS else 0


if __name__ == "__main__":
    sys.exit(main())
