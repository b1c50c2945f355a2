"""A program that works without the library works with it, bit for bit: the same programs run with and without it."""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import no_harm
import pytest
from programs import DOUBLE, HERE, Programs, cc, why_no_sanitizer
from subject import SOCKET_VARIABLE, Control

#: Programs of `no_harm.c`; those that use the driver are served memory.
IN_C = re.findall(r"PROGRAM\((\w+)\)", (HERE / "no_harm.c").read_text().partition("#define PROGRAM(name)")[2])
NOT_SERVED = {
    "names_without_a_driver": "it uses no memory",
    "errors_of_lookups": "it uses no memory",
    "by_version": "it uses no memory",
    "threads_that_look_up": "it uses no memory",
    "programs_that_cannot_be_started": "it uses no memory",
    "in_a_namespace": "the library is in another namespace than the driver (docs/performance.md)",
    "few_descriptors": "the library gets no socket",
}
#: Run by other tests, or by programs.
WITH_WORDS = {"show", "start", "stays"}
WAYS = ("dlsym", "cuGetProcAddress of itself")

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def c_programs(tmp_path_factory, doubles) -> Path:
    """The directory of `no_harm`, once linked with the driver and once not."""
    made = tmp_path_factory.mktemp("no-harm")
    cc("-std=gnu11", "-O1", "-o", made / "no_harm", "no_harm.c", "-ldl", "-lpthread")
    linked = ["-DLINKED", "no_harm.c", f"-L{doubles}", "-l:libcuda.so.1", "-ldl", "-lpthread"]
    cc("-std=gnu11", "-O1", "-o", made / "linked", *linked)
    return made


@pytest.fixture
def run(doubles: Path, runtime_base: Path, programs) -> Run:
    def started(preload: Sequence[object], *command: object, **variables: object) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "LD_LIBRARY_PATH": str(doubles)} | {
            name: str(value) for name, value in variables.items()
        }
        if preload:
            environment["LD_PRELOAD"] = ":".join(map(str, preload))
        if programs.library in preload:
            environment[SOCKET_VARIABLE] = str(runtime_base / "fast")
        return subprocess.run(
            list(map(str, command)), env=environment, capture_output=True, text=True, timeout=120, input=""
        )

    return started


def must_be_the_same(
    plain: subprocess.CompletedProcess[str], preloaded: subprocess.CompletedProcess[str], *, code: int = 0
) -> None:
    assert (plain.returncode, plain.stderr) == (code, "")
    assert preloaded.stdout.splitlines() == plain.stdout.splitlines()
    assert (preloaded.returncode, preloaded.stderr) == (code, "")


# -- calls of the driver


@pytest.fixture(scope="module")
def results(programs, doubles, tmp_path_factory):
    """Run all programs of `no_harm.py` in one process; return each one's lines, what was on stderr, the exit code."""
    directory = tmp_path_factory.mktemp("s")

    @functools.cache
    def printed(way: str, with_library: bool) -> tuple[dict[str, list[str]], str, int]:
        variables = {**os.environ, "LD_LIBRARY_PATH": str(doubles)}
        if with_library:
            variables |= {"LD_PRELOAD": str(programs.library), SOCKET_VARIABLE: str(directory / "fast")}
        (directory / "fast").unlink(missing_ok=True)
        done = subprocess.run(
            [sys.executable, HERE / "no_harm.py", way, *no_harm.PROGRAMS],
            env=variables,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert (directory / "fast").exists() == with_library, "the library served nothing, or was there uninvited"
        parts = re.split(r"^-- (.*)\n", done.stdout, flags=re.MULTILINE)
        return dict(zip(parts[1::2], map(str.splitlines, parts[2::2]), strict=True)), done.stderr, done.returncode

    return printed


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("program", no_harm.PROGRAMS)
def test_calls_of_the_driver_are_answered_as_without_the_library(results, program, way):
    (plain, *ended), (preloaded, *ended_too) = results(way, False), results(way, True)
    assert plain[program], "it prints nothing"
    assert preloaded.get(program) == plain[program]
    assert ended_too == ended == ["", 0]


# -- processes, libraries, threads


@pytest.mark.parametrize("program", [each for each in IN_C if each not in WITH_WORDS])
def test_processes_libraries_and_threads_are_as_without_the_library(programs, c_programs, run, runtime_base, program):
    socket = runtime_base / "fast"
    plain, preloaded = (run(each, c_programs / "no_harm", program, socket) for each in ([], [programs.library]))
    must_be_the_same(plain, preloaded)
    assert socket.exists() == (program not in NOT_SERVED)


@pytest.mark.parametrize("bound", ["lazily", "now"])
def test_a_program_that_is_linked_with_the_driver_is_as_without_the_library(
    programs, c_programs, run, runtime_base, bound
):
    variables = {"LD_BIND_NOW": "1"} if bound == "now" else {}
    plain, preloaded = (run(each, c_programs / "linked", "linked", **variables) for each in ([], [programs.library]))
    must_be_the_same(plain, preloaded)
    assert (runtime_base / "fast").exists()


def test_a_program_without_a_driver_says_so_as_without_the_library(programs, c_programs, run, tmp_path):
    for program in ("fork_after", "names_without_a_driver"):
        plain, preloaded = (
            run(each, c_programs / "no_harm", program, LD_LIBRARY_PATH=tmp_path) for each in ([], [programs.library])
        )
        if "no driver" in plain.stdout or program != "fork_after":  # a machine may have a real one
            must_be_the_same(plain, preloaded, code=3 if program == "fork_after" else 0)


# -- what programs start


@pytest.fixture(scope="module")
def started_programs(tmp_path_factory) -> dict[str, Path]:
    """Programs of other kinds than most, by kind."""
    made = tmp_path_factory.mktemp("started")
    source = made / "started.c"
    source.write_text(
        "#include <stdio.h>\n#include <stdlib.h>\n#include <unistd.h>\n"
        "int main(int count, char **words)\n"
        "{\n"
        '    const char *preload = getenv("LD_PRELOAD");\n'
        '    printf("%s %d %s %d %d\\n", words[1], count, preload ? preload : "-", getuid() == geteuid(),\n'
        "           (int)sizeof(void *));\n"
        "    free(malloc(1000));\n"
        "    return 9;\n"
        "}\n"
    )
    kinds = {"static": ["-static"], "a shared one": []}
    for sanitizer, library in (("address", "libasan.so"), ("thread", "libtsan.so"), ("undefined", "libubsan.so")):
        if why_no_sanitizer(sanitizer, library, made) is None:
            kinds[f"of the {sanitizer} sanitizer"] = [f"-fsanitize={sanitizer}"]
    found = {}
    for kind, options in kinds.items():
        found[kind] = made / kind.replace(" ", "-")
        cc(*options, "-o", found[kind], source)
    if os.geteuid() == 0:
        found["of another user"] = made / "of-another-user"
        shutil.copy(found["a shared one"], found["of another user"])
        os.chown(found["of another user"], 65534, 65534)
        found["of another user"].chmod(0o4755)
    return found


@pytest.mark.parametrize(
    "kind",
    [
        "static",
        "a shared one",
        "of the address sanitizer",
        "of the thread sanitizer",
        "of the undefined sanitizer",
        "of another user",
    ],
)
def test_programs_that_are_started_run_as_without_the_library(
    programs, c_programs, started_programs, run, runtime_base, kind
):
    """Those of a sanitizer end at once if a library comes before its own; a kernel's programs have none."""
    if kind not in started_programs:
        pytest.skip("only root can make it" if "user" in kind else "this machine's C compiler or kernel has none")
    command = (c_programs / "no_harm", "start", started_programs[kind], kind)
    plain, preloaded = (run(each, *command) for each in ([], [programs.library]))
    assert "exit 9" in plain.stdout
    must_be_the_same(plain, preloaded)
    assert (runtime_base / "fast").exists()


def test_a_sanitizer_s_program_is_itself_no_place_for_the_library(programs, started_programs, run):
    """Show the limit that docs/performance.md names: with another library before its own it ends at once."""
    if "of the address sanitizer" not in started_programs:
        pytest.skip("this machine's C compiler has none")
    done = run([programs.library], started_programs["of the address sanitizer"], "it")
    assert done.returncode not in (0, 9) and "ASan runtime does not come first" in done.stderr


# -- other tools


@pytest.fixture(scope="module")
def tools(tmp_path_factory) -> Path:
    """Libraries as tools bring them."""
    made = tmp_path_factory.mktemp("tools")
    cc(*DOUBLE, "-o", made / "libsanitizer-collection.so", "neighbour.c", "-ldl")
    source = made / "audit.c"
    source.write_text(
        "#define _GNU_SOURCE\n#include <link.h>\n#include <stdint.h>\n#include <stdio.h>\n#include <string.h>\n"
        "#pragma GCC visibility push(default)\n"
        "unsigned int la_version(unsigned int version) { return version; }\n"
        "unsigned int la_objopen(struct link_map *map, Lmid_t id, uintptr_t *cookie)\n"
        "{ (void)map, (void)id, (void)cookie; return LA_FLG_BINDTO | LA_FLG_BINDFROM; }\n"
        "uintptr_t la_symbind64(Elf64_Sym *symbol, unsigned int at, uintptr_t *from, uintptr_t *to,\n"
        "                       unsigned int *flags, const char *name)\n"
        "{ (void)at, (void)from, (void)to, (void)flags, (void)name; return symbol->st_value; }\n"
    )
    cc(*DOUBLE, "-o", made / "audit.so", source)
    return made


@pytest.mark.parametrize("program", ["by_address", "linked", "fork_after", "each_way_to_start"])
def test_an_auditor_of_the_loader_sees_it_work(programs, c_programs, tools, run, runtime_base, program):
    """LD_AUDIT: each binding passes it, those of dlsym too."""
    command = (c_programs / ("linked" if program == "linked" else "no_harm"), program)
    plain, preloaded = (run(each, *command, LD_AUDIT=tools / "audit.so") for each in ([], [programs.library]))
    must_be_the_same(plain, preloaded)
    assert (runtime_base / "fast").exists()


@pytest.mark.parametrize("where", ["before the library", "after the library", "at its beginning"])
def test_what_compute_sanitizer_watches_is_left_to_the_driver(programs, tools, run, runtime_base, where):
    its = tools / "libsanitizer-collection.so"
    preload = [its, programs.library] if where.startswith("before") else [programs.library, its]
    command = [sys.executable, HERE / "no_harm.py", "dlsym", "each attribute", "wrong frees", "frees in any order"]
    if where.startswith("at"):  # as CUDA_INJECTION64_PATH has it: by cuInit
        preload = [programs.library]
        command[1:2] = [
            "-c",
            f"import ctypes, runpy, sys; it = ctypes.CDLL({str(its)!r}); sys.argv = sys.argv[1:]\n"
            f"sys.path.insert(0, {str(HERE)!r}); runpy.run_path(sys.argv[0], run_name='__main__')",
        ]
        command.insert(3, HERE / "no_harm.py")
    plain, preloaded = (run(each, *command) for each in ([], preload))
    must_be_the_same(plain, preloaded)
    assert not (runtime_base / "fast").exists()


def test_valgrind_finds_nothing(programs, c_programs, run, runtime_base):
    if shutil.which("valgrind") is None:
        pytest.skip("valgrind is not installed here")
    # Of this machine's C library it may know too little to begin at all.
    found = run([], "valgrind", "-q", "/bin/true")
    if found.returncode != 0:
        pytest.skip(f"valgrind does not run here: {found.stderr[-200:]}")
    # Its launcher starts the program, which has the library in its environment only from here.
    preload = [f"LD_PRELOAD={programs.library}", f"{SOCKET_VARIABLE}={runtime_base / 'fast'}"]
    command = ("valgrind", "-q", "--error-exitcode=99", "--trace-children=yes", "env")
    plain, preloaded = (run([], *command, *each, c_programs / "linked", "linked") for each in ([], preload))
    must_be_the_same(plain, preloaded)  # whether anything is served: threads may not wait as the library expects


def test_a_debugger_starts_it_and_comes_and_goes(programs, c_programs, run, doubles, runtime_base):
    if shutil.which("gdb") is None:
        pytest.skip("gdb is not installed here")
    gdb = ("gdb", "-nx", "-q", "-batch", "-iex", "set debuginfod enabled off", "-iex", "set auto-load safe-path /")
    preload = f"set exec-wrapper env LD_PRELOAD={programs.library} {SOCKET_VARIABLE}={runtime_base / 'fast'}"
    ends = ("-ex", "run", "-ex", "bt", "--args", c_programs / "no_harm", "loaded_twice")
    plain, preloaded = (run([], *gdb, *each, *ends) for each in ((), ("-ex", preload)))
    if "exited normally" not in plain.stdout:
        pytest.skip(f"gdb does not run programs here: {(plain.stdout + plain.stderr)[-200:]}")

    def printed(done: subprocess.CompletedProcess[str]) -> list[str]:
        return [line for line in done.stdout.splitlines() if re.match(r"(begun|loaded|again|the same|closed)\b", line)]

    assert printed(preloaded) == printed(plain) and "exited normally" in preloaded.stdout
    socket = runtime_base / "fast"
    assert socket.exists()
    socket.unlink()
    variables = {**os.environ, "LD_LIBRARY_PATH": str(doubles), "LD_PRELOAD": str(programs.library)}
    variables[SOCKET_VARIABLE] = str(socket)
    with subprocess.Popen(
        [c_programs / "no_harm", "stays"], env=variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == "begun 0\n"
        first = process.stdout.readline().partition(": ")[2]
        run([], *gdb, "-p", process.pid, "-ex", "thread apply all bt", "-ex", "detach")
        with Control(socket) as control:
            assert control.ask("status")["cuda"] == 0
        said, _ = process.communicate("go\n", timeout=60)
        assert said == f"meanwhile: {first}" and process.returncode == 0


def test_jemalloc_and_the_library_in_either_order(programs, c_programs, run, runtime_base):
    found = sorted(Path("/usr/lib").glob("*/libjemalloc.so*"))
    if not found:
        pytest.skip("jemalloc is not installed here")
    for program in ("fork_while_others_allocate", "threads_that_look_up", "each_way_to_start", "by_address"):
        plain = run([found[0]], c_programs / "no_harm", program)
        (runtime_base / "fast").unlink(missing_ok=True)
        for both in ([programs.library, found[0]], [found[0], programs.library]):
            preloaded = run(both, c_programs / "no_harm", program)
            assert (preloaded.stdout, preloaded.stderr) == (plain.stdout, plain.stderr)
            assert (runtime_base / "fast").exists() == (program not in NOT_SERVED)
            (runtime_base / "fast").unlink(missing_ok=True)


def test_each_program_of_the_list_is_run(programs: Programs):
    assert len(no_harm.PROGRAMS) + len(IN_C) >= 55
    assert set(NOT_SERVED) | WITH_WORDS <= set(IN_C)
