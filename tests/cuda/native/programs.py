"""The library, the doubles of CUDA's libraries and a program that uses them, built by this machine's C compiler."""

from __future__ import annotations

import functools
import hashlib
import os
import shlex
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

import jupyter_gpu_ckpt.cuda

HERE = Path(__file__).parent
#: What is built of the sources as they are, for all processes and runs; `make clean` removes it.
BUILT = HERE.parents[2] / "build" / "tests"
NATIVE = Path(jupyter_gpu_ckpt.cuda.__file__).parent / "native"
FLAGS = ("-g", "-fPIC", "-Wall", "-Wextra", "-Werror", f"-I{NATIVE}")
#: Has the library examine little memory before it begins to copy, and write few zeros at a time.
SLICED = ("FIRST_SLICE=1", "ZEROS_BYTES=8388608")
#: And copy all memory of 2 MiB on the device before it copies it to host memory.
STAGED = (*SLICED, "STAGED_LEAST=2097152", "STAGED_PIECE=4194304", "STAGED_SHARE=0.25")
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


@functools.cache
def _sources() -> str:
    """A digest of all that is compiled, and of the compiler."""
    digest = hashlib.sha256(subprocess.run([compiler() or "cc", "--version"], capture_output=True).stdout)
    for path in sorted([*HERE.glob("*.[ch]"), *NATIVE.glob("*.[ch]"), Path(__file__)]):
        digest.update(b"\0".join((path.name.encode(), path.read_bytes(), b"")))
    return digest.hexdigest()


def built(make: Callable[[Path], None], *what: str) -> Path:
    """The directory into which ``make`` builds ``what``: once for all who run these tests of these sources.

    For a user who may not write into the checkout, once in its directory for temporary files.
    """
    words = "-".join(what)
    name = f"{what[0]}-{hashlib.sha256(f'{_sources()} {words}'.encode()).hexdigest()[:16]}"
    if (BUILT / name).exists():
        return BUILT / name
    try:
        BUILT.mkdir(parents=True, exist_ok=True)
        base = BUILT if os.access(BUILT, os.W_OK) else None
    except OSError:
        base = None
    if base is None:
        base = Path(tempfile.gettempdir()) / f"gpu-ckpt-tests-{os.geteuid()}"
        base.mkdir(0o755, exist_ok=True)
    with FileLock(base / "lock"):
        if not (base / name).exists():
            with tempfile.TemporaryDirectory(dir=base) as around:
                draft = Path(around) / name
                draft.mkdir()
                make(draft)
                draft.rename(base / name)
    return base / name


def build_doubles(*, without: str | None = None) -> Path:
    """The directory of libcuda.so.1 and libcudart.so.13; ``without``: a function that this driver lacks."""
    return built(functools.partial(_build_doubles, without=without), "doubles", str(without))


def _build_doubles(directory: Path, *, without: str | None) -> None:
    lacking = [f"-D{without}={without}_of_a_newer_driver"] if without else []
    names = ("faults", "memory", "driver", "lookup", "calls", "modules")
    sources = [f"{name}_double.c" for name in names]
    driver = [*sources, "-Wl,-Bsymbolic", "-lpthread"]
    cc(*DOUBLE, *lacking, "-Wl,-soname,libcuda.so.1", "-o", directory / "libcuda.so.1", *driver)
    cc(*DOUBLE, "-Wl,-soname,libcudart.so.13", "-o", directory / "libcudart.so.13", "runtime_double.c", "-ldl")


def build_c_library(directory: Path, *definitions: str) -> Path:
    """Build a library that takes the place of the C library's own functions where it is preloaded."""
    made = directory / "c_library.so"
    cc(*DOUBLE, *definitions, "-o", made, "c_library_double.c", "-lpthread")
    return made


def build(doubles: Path, *sanitize: str, define: tuple[str, ...] = ()) -> Programs:
    """The library as setup.py builds it, and the program; with the sanitizers of gcc that are named."""
    make = functools.partial(_build, doubles=doubles, sanitize=sanitize, define=define)
    runtimes = {"address": "libasan.so", "thread": "libtsan.so"}
    first = tuple(_runtime(runtimes[name]) for name in sanitize if name in runtimes)
    return Programs(built(make, "programs", *sanitize, *define), first)


def build_library(directory: Path, flags: Sequence[str]) -> None:
    """The library alone, as _fastpath.so."""
    sources = sorted(str(source) for source in NATIVE.glob("*.c"))
    shared = ("-std=c11", "-fvisibility=hidden", "-shared")
    cc(*shared, *flags, "-o", directory / "_fastpath.so", *sources, "-lpthread", "-ldl")


def _build(directory: Path, *, doubles: Path, sanitize: tuple[str, ...], define: tuple[str, ...]) -> None:
    flags = ["-O1", "-fno-omit-frame-pointer", f"-fsanitize={','.join(sanitize)}"] if sanitize else ["-O2"]
    if "undefined" in sanitize:
        flags.append("-fno-sanitize-recover=undefined")
    build_library(directory, [*flags, *(f"-D{each}" for each in define)])
    runtime = [f"-L{doubles}", "-l:libcudart.so.13"]
    cc("-std=gnu11", *flags, "-shared", "-o", directory / "libsubject.so", "subject.c", *runtime, "-lpthread", "-ldl")
    cc("-std=gnu11", *flags, "-o", directory / "loader", "loader.c", "-ldl")
    cc("-std=gnu11", *flags, "-DDIRECT", "-o", directory / "direct", "subject.c", *runtime, "-lpthread", "-ldl")


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
