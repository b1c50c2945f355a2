"""What setup.cfg cannot say: the library for device memory, and whether what is being built lacks the front end."""

import sys
from pathlib import Path

from setuptools import Extension, setup

if not (Path(__file__).parent / "labextension" / "dist" / "package.json").is_file():
    print("jupyter_gpu_ckpt: without the JupyterLab front end; `make labextension` builds it.", file=sys.stderr)

NATIVE = "jupyter_gpu_ckpt/cuda/native"
PARTS = ("arena", "blocks", "child", "control", "copies", "door", "driver", "transfer")

setup(
    ext_modules=[
        # No Python in it: kernels of any environment preload it.  Where there is no compiler, all else works without.
        Extension(
            "jupyter_gpu_ckpt.cuda.native._fastpath",
            sources=[f"{NATIVE}/{name}.c" for name in (*PARTS, "intercept", "populate")],
            depends=[f"{NATIVE}/{name}.h" for name in PARTS],
            extra_compile_args=["-std=c11", "-O2", "-fvisibility=hidden", "-Wall", "-Wextra"],
            libraries=["pthread", "dl"],
            py_limited_api=True,
            optional=True,
        )
    ],
)
