"""The parts of the build that setup.cfg cannot describe: the programs in C, data files of an editable install.

Without the front end it says so, and on a machine that is not supported it builds nothing.
"""

import os
import platform
import sys
from pathlib import Path

from setuptools import Distribution, Extension, setup
from setuptools.command.build_ext import build_ext

if not (Path(__file__).parent / "labextension" / "dist" / "package.json").is_file():
    print("jupyter_gpu_ckpt: without the JupyterLab front end; `make labextension` builds it.", file=sys.stderr)

NATIVE = "jupyter_gpu_ckpt/cuda/native"


class WithData(Distribution):
    """Installs data files for editing, too: they enable the server extension."""

    def has_data(self) -> bool:
        """Called from setuptools' editable_wheel, which leaves them out where there is no such method."""
        return bool(self.has_data_files())


class OnSupportedMachines(build_ext):
    """Builds the programs in C where they were tried: Linux on x86_64 with glibc."""

    def run(self) -> None:
        """Called for wheels and editable installs, not for an sdist.  Exits where kernels cannot be checkpointed."""
        found = f"{sys.platform} on {platform.machine()} with {_c_library()}"
        if found != "linux on x86_64 with glibc":
            sys.exit(
                f"jupyter_gpu_ckpt runs on Linux on x86_64 with glibc; this is {found}. It is not built: "
                "checkpoints depend on the instruction set and on the C library, and no others were tried."
            )
        super().run()


def _c_library() -> str:
    try:
        return (os.confstr("CS_GNU_LIBC_VERSION") or "").partition(" ")[0] or "another C library"
    except (ValueError, OSError):  # musl does not know the name
        return "another C library"


setup(
    distclass=WithData,
    cmdclass={"build_ext": OnSupportedMachines},
    ext_modules=[
        # Not linked to Python: kernels of any environment preload it.  Optional: all else works without a compiler.
        Extension(
            "jupyter_gpu_ckpt.cuda.native._fastpath",
            sources=sorted(map(str, Path(NATIVE).glob("*.c"))),
            depends=sorted(map(str, Path(NATIVE).glob("*.h"))),
            extra_compile_args=["-std=c11", "-O2", "-fvisibility=hidden", "-Wall", "-Wextra"],
            libraries=["pthread", "dl"],
            py_limited_api=True,
            optional=True,
        ),
        # A program, although it is built as a library: it needs no other, and begins at `_start`.
        Extension(
            "jupyter_gpu_ckpt.capsule.native._root",
            sources=["jupyter_gpu_ckpt/capsule/native/root.c"],
            extra_compile_args=["-std=c11", "-O2", "-fno-stack-protector", "-Wall", "-Wextra"],
            extra_link_args=["-nostdlib", "-Wl,-e,_start", "-Wl,-z,noexecstack"],
            py_limited_api=True,
            optional=True,
        ),
    ],
)
