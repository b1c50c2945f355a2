"""Start a kernel as ``python -m MODULE`` would, with the agent loaded into it.

Called from the provisioner, which rewrites a kernelspec's ``python -m ipykernel_launcher -f F`` into ``python <this
file> ipykernel_launcher -f F`` (`jupyter_gpu_ckpt.kernel.agent_injection`).  Runs in the kernel's own environment,
perhaps one with an older Python and without this package: standard library only, Python >= 3.8.

The kernel sees the same as under ``-m``: ``sys.path[0]`` is the working directory (or nothing, under ``-I``, ``-P`` and
``PYTHONSAFEPATH``), ``sys.argv`` and ``sys.orig_argv`` name the module, and `runpy` fills ``__main__``, as the
interpreter does for ``-m``.  Only ``/proc/PID/cmdline`` and the bottom of tracebacks differ.

The agent is loaded by wrapping ``InteractiveShellApp.init_extensions`` rather than by appending ``--ext=...``: an
argument on the command line replaces ``extra_extensions`` of the user's configuration files, stays visible in
``sys.argv``, and stops the kernel where the option is unknown.  This way a failure costs a line on stderr and the
kernel starts without the agent.
"""


def _attach_agent() -> None:
    """Load agent.py of this folder and have IPython load it after the user's own extensions."""
    import importlib.util
    import os
    import sys

    name = "_jupyter_gpu_ckpt_agent"
    try:
        here = os.path.dirname(os.path.abspath(__file__))
        # As a package, so that the agent's relative imports find its neighbours under this name, whatever else is
        # installed.
        spec = importlib.util.spec_from_file_location(
            name, os.path.join(here, "agent.py"), submodule_search_locations=[here]
        )
        if spec is None or spec.loader is None:
            raise ImportError("no loader for agent.py")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
        module.attach()
    except Exception as error:
        for loaded in [key for key in sys.modules if key.partition(".")[0] == name]:
            del sys.modules[loaded]
        if sys.stderr is not None:
            print(f"jupyter_gpu_ckpt: no agent in this kernel ({type(error).__name__}: {error})", file=sys.stderr)


def _run() -> None:
    """Become ``python -m MODULE``; returns when the module does."""
    import sys

    # Before any further import: for a script, sys.path[0] is the script's folder, whose file names must not shadow
    # other modules.
    bare = sys.flags.isolated or getattr(sys.flags, "safe_path", False)
    if not bare:
        del sys.path[0]
    module = sys.argv[1]
    _attach_agent()

    import contextlib
    import os
    import runpy

    if not bare:
        with contextlib.suppress(FileNotFoundError):  # a deleted working directory: then -m adds nothing either
            sys.path.insert(0, os.getcwd())
    sys.argv[:2] = ["-m"]  # runpy puts the module's file in its place
    original = getattr(sys, "orig_argv", None)  # Python >= 3.10; used by programs that start themselves again
    if original is not None:
        at = len(original) - len(sys.argv) - 1
        original[at : at + 2] = ["-m", module]
    namespace = globals()
    for leftover in ("_attach_agent", "_run"):
        del namespace[leftover]
    # As the interpreter does for -m; run_module() would replace __main__ only for a while.
    runpy._run_module_as_main(module)  # type: ignore[attr-defined]


if __name__ == "__main__":
    _run()
