"""Additions of IPython and ipykernel: history, displays, widgets, comms, subshells, hooks."""

from __future__ import annotations

import queue
import sys
import threading

from . import kind, refused
from .asking import eventually


def shell():
    from IPython import get_ipython

    return get_ipython()


def cell(code: str) -> None:
    result = shell().run_cell(code, silent=True, store_history=False)
    result.raise_error()


@kind("variables, functions, classes and imports of the notebook")
def variables():
    cell(
        "import math as zoo_math\nzoo_x = [1, {'a': (2,)}]\nclass ZooThing:\n  y = 3\nzoo_t = ZooThing()"
        "\ndef zoo_f(n): return n + zoo_x[0]"
    )
    names = shell().user_ns
    return lambda: (
        names["zoo_x"],
        names["zoo_f"](1),
        names["zoo_t"].y,
        names["zoo_math"].pi,
        type(names["zoo_t"]).__module__,
    )


@kind("the number of the next cell, In and Out, %history")
def history():
    return lambda: (
        shell().execution_count > 0,
        len(shell().user_ns["In"]) >= shell().execution_count,
        shell().history_manager.session_number,
    )


@kind("the history's database that all notebooks share")
def history_database():
    manager = shell().history_manager
    return lambda: (manager.enabled, len(list(manager.get_tail(5))) >= 0, manager.hist_file != "")


@kind("the user's own line magic and cell magic, an alias, a macro")
def magics():
    shell().register_magic_function(lambda line: line.upper(), "line", "zoo_line")
    shell().register_magic_function(lambda line, body: body, "cell", "zoo_cell")
    shell().alias_manager.soft_define_alias("zoo_alias", "echo")
    shell().define_macro("zoo_macro", "1 + 1")
    return lambda: (
        shell().run_line_magic("zoo_line", "x"),
        shell().run_cell_magic("zoo_cell", "", "b"),
        "zoo_macro" in shell().user_ns,
    )


@kind("hooks for before and after each cell")
def hooks():
    calls = []
    shell().events.register("post_run_cell", lambda result: calls.append(1))
    return lambda: len(shell().events.callbacks["post_run_cell"]) >= 1


@kind("extensions: %autoreload, %load_ext")
def extensions():
    shell().run_line_magic("load_ext", "autoreload")
    shell().run_line_magic("autoreload", "2")
    return lambda: (
        "autoreload" in shell().extension_manager.loaded,
        shell().magics_manager.magics["line"]["autoreload"].__name__,
    ), (lambda: shell().run_line_magic("autoreload", "0"))


@kind("a comm, and a comm target")
def comms():
    import comm

    manager = comm.get_comm_manager()
    manager.register_target("zoo_target", lambda one, message: None)
    one = comm.create_comm(target_name="zoo_front")
    got = []
    one.on_msg(got.append)
    return lambda: ("zoo_target" in manager.targets, manager.get_comm(one.comm_id) is one, one._closed, got)


@kind("widgets with values, links and observers (ipywidgets)", needs="ipywidgets")
def widgets():
    import ipywidgets

    slider, text = ipywidgets.IntSlider(7), ipywidgets.Text("zoo")
    seen = []
    slider.observe(lambda change: seen.append(change["new"]), "value")
    copy = ipywidgets.IntText()
    ipywidgets.jslink((slider, "value"), (copy, "value"))
    box = ipywidgets.VBox([slider, text])

    def show():
        slider.value += 1
        slider.value -= 1
        return (
            slider.value,
            text.value,
            seen[-2:],
            [child.model_id == one.model_id for child, one in zip(box.children, (slider, text), strict=True)],
        )

    return show


@kind("a widget that captures output (Output), one made by interact", needs="ipywidgets")
def output_widget():
    import ipywidgets

    out = ipywidgets.Output()
    out.append_stdout("captured\n")
    made = ipywidgets.interactive(lambda n: n * 2, n=(0, 10))
    made.update()
    return lambda: (out.outputs, made.kwargs, made.children[0].value)


@kind("a display that is updated later (display_id)")
def displays():
    from IPython.display import display

    handle = display("first", display_id="zoo-display")

    def show():
        handle.update("again")
        return handle.display_id

    return show


@kind("the user's own formatters")
def formatters():
    class Animal:
        pass

    formatter = shell().display_formatter.formatters["text/html"]
    formatter.for_type(Animal, lambda animal: "<b>animal</b>")
    return lambda: formatter(Animal())


@kind("standard output of threads, captured text (%%capture)")
def captured():
    from IPython.utils.capture import capture_output

    with capture_output() as caught:
        print("in the net")
    threading.Thread(target=lambda: print("from a thread", end="")).start()
    return lambda: caught.stdout


@kind("a second shell in the kernel (subshell)")
def subshell():
    kernel = shell().kernel
    manager = getattr(kernel, "shell_channel_thread", None)
    supported = getattr(kernel, "_supports_kernel_subshells", False)
    if not supported or manager is None:
        return lambda: "this ipykernel has none"
    subshells, made = manager.manager, queue.SimpleQueue()
    # As a request on the control channel does: on the thread of the shell channel.
    subshells._shell_channel_io_loop.add_callback(lambda: made.put(subshells._create_subshell()))
    identity = made.get(timeout=60)
    return lambda: (identity in subshells.list_subshell(), subshells._cache[identity].is_alive())


@kind("a task that is awaited in a later cell")
def awaited():
    cell(
        "import asyncio\nzoo_future = asyncio.get_event_loop().create_future()\n"
        "zoo_task = asyncio.ensure_future(zoo_future)"
    )
    names = shell().user_ns
    return lambda: (names["zoo_task"].done(), names["zoo_future"].done())


@kind("a post-mortem of the last error (sys.last_traceback)")
def post_mortem():
    shell().run_cell("1/0", silent=True)
    try:
        raise KeyError("zoo")
    except KeyError as error:
        sys.last_value = error
    return lambda: (repr(sys.last_value), sys.last_value.__traceback__.tb_frame.f_code.co_name)


@kind("the user's settings of IPython: colours, completion, display precision")
def settings():
    shell().run_line_magic("precision", "3")
    shell().ast_node_interactivity = "all"

    def undo():
        shell().ast_node_interactivity = "last_expr"
        shell().run_line_magic("precision", "")

    return lambda: (
        shell().ast_node_interactivity,
        shell().display_formatter.formatters["text/plain"].float_format,
    ), undo


@kind("the user's own message handler, an observed trait")
def handlers():
    kernel, seen = shell().kernel, []
    kernel.shell_handlers["zoo_request"] = lambda *arguments: None
    kernel.observe(seen.append, "execution_count")
    return lambda: "zoo_request" in kernel.shell_handlers


@kind("the kernel's own connection: its identity towards clients")
def connection():
    kernel = shell().kernel
    return lambda: (
        kernel.session.session,
        kernel.ident if isinstance(kernel.ident, str) else kernel.ident.decode(),
        kernel.session.signature_scheme,
    )


@kind("a half-drawn matplotlib figure", needs="matplotlib")
def figure():
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots()
    axes.plot([1, 2, 3], [3, 1, 2])

    def show():
        import hashlib

        figure.canvas.draw()
        return hashlib.sha256(bytes(figure.canvas.buffer_rgba())).hexdigest(), pyplot.get_fignums()

    return show


@kind(
    "the notebook's debugger, in use",
    refused("DEBUGGER_ATTACHED", "debugger"),
    advice="End the debugging.",
    alone="cannot be undone",
)
def debugger():
    kernel = shell().kernel
    import debugpy

    debugpy.listen(("127.0.0.1", 0))
    kernel.debugger.is_started = True
    return lambda: kernel.debugger.is_started


@kind("a cell's thread that prints now and then")
def printing_thread():
    count, stop = [0], threading.Event()

    def run() -> None:
        while not stop.wait(0.05):
            count[0] += 1
            print(end="")

    threading.Thread(target=run, daemon=True).start()
    was = [0]

    def show():
        was[0] = count[0]
        return eventually(lambda: count[0] > was[0])

    return show, stop.set
