"""The library, the doubles of CUDA's libraries and a program that uses them, built by this machine's C compiler."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import jupyter_gpu_ckpt.cuda

HERE = Path(__file__).parent
NATIVE = Path(jupyter_gpu_ckpt.cuda.__file__).parent / "native"
#: Where the library of `build` reads how much memory there is, instead of the machine's own files: in its directory.
MEMORY_FILES = "memory-files"
FLAGS = ("-g", "-fPIC", "-Wall", "-Wextra", "-Werror", f"-I{NATIVE}")
#: A stream copies what a sanitizer would take for an access of the program.
DOUBLE = ("-std=gnu11", "-O2", "-fvisibility=hidden", "-fno-tree-loop-distribute-patterns", "-shared")


def compiler() -> str | None:
    """The C compiler that extensions of this Python are built with, or what there is."""
    configured = shlex.split(sysconfig.get_config_var("CC") or "")[:1]
    return next((name for name in [*configured, "gcc", "cc", "clang"] if shutil.which(name)), None)


@dataclass(frozen=True)
class Programs:
    """The programs built into ``directory``, with the libraries to preload before ours (a sanitizer's runtime)."""

    directory: Path
    first: tuple[str, ...] = ()

    @property
    def library(self) -> Path:
        return self.directory / "_fastpath.so"

    def command(self, *, direct: bool = False) -> list[str]:
        if direct:
            return [str(self.directory / "direct")]
        return [str(self.directory / "loader"), str(self.directory / "libsubject.so")]


def build_doubles(directory: Path, *, without: str | None = None) -> Path:
    """libcuda.so.1 and libcudart.so.13; ``without``: a function that this driver lacks."""
    lacking = [f"-D{without}={without}_of_a_newer_driver"] if without else []
    names = ("faults", "memory", "driver", "lookup", "calls", "modules")
    sources = [f"{name}_double.c" for name in names]
    driver = [*sources, "-Wl,-Bsymbolic", "-lpthread"]
    cc(*DOUBLE, *lacking, "-Wl,-soname,libcuda.so.1", "-o", directory / "libcuda.so.1", *driver)
    cc(*DOUBLE, "-Wl,-soname,libcudart.so.13", "-o", directory / "libcudart.so.13", "runtime_double.c", "-ldl")
    return directory


def build_c_library(directory: Path, *definitions: str) -> Path:
    """Build a library that takes the place of the C library's own functions where it is preloaded."""
    made = directory / "c_library.so"
    cc(*DOUBLE, *definitions, "-o", made, "c_library_double.c", "-lpthread")
    return made


def build(directory: Path, doubles: Path, *sanitize: str, define: str = "") -> Programs:
    """The library as setup.py builds it, and the program; with the sanitizers of gcc that are named."""
    flags = ["-O1", "-fno-omit-frame-pointer", f"-fsanitize={','.join(sanitize)}"] if sanitize else ["-O2"]
    if "undefined" in sanitize:
        flags.append("-fno-sanitize-recover=undefined")
    sources = sorted(str(source) for source in NATIVE.glob("*.c"))
    files = f'-DMEMORY_FILES="{directory / MEMORY_FILES}"'
    shared = ["-std=c11", "-fvisibility=hidden", "-shared", files, *([f"-D{define}"] if define else [])]
    cc(*shared, *flags, "-o", directory / "_fastpath.so", *sources, "-lpthread", "-ldl")
    runtime = [f"-L{doubles}", "-l:libcudart.so.13"]
    cc("-std=gnu11", *flags, "-shared", "-o", directory / "libsubject.so", "subject.c", *runtime, "-lpthread", "-ldl")
    cc("-std=gnu11", *flags, "-o", directory / "loader", "loader.c", "-ldl")
    cc("-std=gnu11", *flags, "-DDIRECT", "-o", directory / "direct", "subject.c", *runtime, "-lpthread", "-ldl")
    runtimes = {"address": "libasan.so", "thread": "libtsan.so"}
    return Programs(directory, tuple(_runtime(runtimes[name]) for name in sanitize if name in runtimes))


def why_no_sanitizer(name: str, library: str, directory: Path) -> str | None:
    """Why a program cannot be built and run with it here, or None."""
    source = directory / "empty.c"
    source.write_text("int main(void) { return 0; }\n")
    built = subprocess.run(
        [compiler() or "cc", f"-fsanitize={name}", "-o", directory / "empty", source], capture_output=True, text=True
    )
    if built.returncode != 0 or not os.path.isabs(_runtime(library)):
        return f"the C compiler has no runtime of the {name} sanitizer"
    ran = subprocess.run([directory / "empty"], capture_output=True, text=True)
    return None if ran.returncode == 0 else f"the {name} sanitizer does not run here: {ran.stderr[:200].strip()}"


def _runtime(library: str) -> str:
    found = subprocess.run([compiler() or "cc", f"-print-file-name={library}"], capture_output=True, text=True)
    return os.path.realpath(found.stdout.strip()) if os.path.isabs(found.stdout.strip()) else found.stdout.strip()


def cc(*words: str | Path) -> None:
    """Run the C compiler."""
    done = subprocess.run([compiler() or "cc", *FLAGS, *map(str, words)], cwd=HERE, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
