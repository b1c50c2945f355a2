"""nbclient runs a notebook on a kernel that sleeps between every two cells, and sees no difference."""

from __future__ import annotations

import base64
import struct
import zlib
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient
from stock import OURS, PLAIN, environment

QUICKSTART = Path(__file__).resolve().parents[2] / "notebooks" / "quickstart.ipynb"


def png() -> str:
    """One red pixel, base64."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", 1, 1, 8, 2, 0, 0, 0)
    pixel = zlib.compress(b"\0\xff\0\0")
    image = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixel) + chunk(b"IEND", b"")
    return base64.b64encode(image).decode()


#: Every kind of output, and state of kinds that later cells continue with.
CELLS: list[tuple[str, list[str]]] = [
    (
        "import sys\n"
        "print('to stdout', flush=True)\n"
        "print('to stderr', file=sys.stderr, flush=True)\n"
        "print('and back')",
        [],
    ),
    ("n = 6\nn * 7", []),
    (
        "from IPython.display import HTML, Image, display\n"
        "display(HTML('<b>bold</b>'), metadata={'text/html': {'isolated': True}})",
        [],
    ),
    (f"import base64\ndisplay(Image(base64.b64decode('{png()}')))", []),
    ("handle = display({'text/plain': 'first'}, raw=True, display_id='shown')", []),
    ("series = (k * k for k in range(10))\n[next(series) for _ in range(3)]", []),
    ("def fail():\n    raise ValueError('as asked')\nfail()", ["raises-exception"]),
    ("handle.update({'text/plain': 'second'}, raw=True)", []),
    (
        "from comm import create_comm\n"
        "FIRST = {'_model_module': 'ours', '_model_name': 'Talk', '_model_module_version': '1', 'value': 1}\n"
        "talk = create_comm(target_name='ours', comm_id='talk', data={'state': FIRST})\n"
        "talk.send(data={'state': {'value': 2}}, buffers=[b'bytes'])",
        [],
    ),
    ("%%bash\necho from bash", []),
    ("words = !printf 'a\\nb\\n'\nwords", []),
    ("import asyncio\nawait asyncio.gather(*(asyncio.sleep(0.01, result=k) for k in range(3)))", []),
    ("task = asyncio.ensure_future(asyncio.sleep(0.01, result='later'))", []),
    ("await task", []),
    ("[next(series) for _ in range(3)], n, Out[2], In[2]", []),
    ("talk.send(data={'state': {'value': 3}})\ntalk.close()", []),
    ("from IPython.display import clear_output\nprint('gone')\nclear_output()\nprint('stays')", []),
]


def notebook() -> nbformat.NotebookNode:
    cells = []
    for number, (source, tags) in enumerate(CELLS):
        cell = nbformat.v4.new_code_cell(source, id=f"cell-{number}")
        cell.metadata.tags = tags
        cells.append(cell)
    return nbformat.v4.new_notebook(cells=cells)


class Run:
    """One run of a notebook by nbclient: nothing but its own hooks knows that there is something to see."""

    def __init__(self, notebook: nbformat.NotebookNode, kernel_name: str, directory: Path) -> None:
        self.images: list[str] = []
        self.client = NotebookClient(
            notebook, kernel_name=kernel_name, timeout=120, resources={"metadata": {"path": str(directory)}}
        )
        if kernel_name == OURS:
            self.client.on_cell_executed = self.checkpoint
        self.environment = environment(directory)

    async def checkpoint(self, **_: Any) -> None:
        provisioner = self.client.km.provisioner
        self.images.append((await provisioner.checkpoint()).id)
        assert provisioner.state.value == "checkpointed"

    async def execute(self) -> nbformat.NotebookNode:
        return await self.client.async_execute(env=self.environment)


def outputs_of(notebook: nbformat.NotebookNode) -> list[dict[str, Any]]:
    """Return the outputs of each cell.  Times are left out: they differ between any two runs."""
    return [
        {
            "source": cell.source,
            "outputs": cell.outputs,
            "count": cell.execution_count,
            "metadata": {name: value for name, value in cell.metadata.items() if name != "execution"},
        }
        for cell in notebook.cells
    ]


@pytest.mark.timeout(300)
async def test_outputs_are_those_of_an_uninterrupted_run(kernelspecs: Path):
    plain, ours = Run(notebook(), PLAIN, kernelspecs), Run(notebook(), OURS, kernelspecs)
    expected, seen = await plain.execute(), await ours.execute()

    assert len(set(ours.images)) == len(CELLS), "each cell woke it, and each checkpoint was a new one"
    assert outputs_of(seen) == outputs_of(expected)
    assert seen.metadata.widgets == expected.metadata.widgets
    assert seen.metadata.language_info == expected.metadata.language_info

    # That the notebook is the test it is meant to be:
    outputs = [output for cell in seen.cells for output in cell.outputs]
    assert {output.output_type for output in outputs} == {"stream", "display_data", "execute_result", "error"}
    data = [output.data for output in outputs if "data" in output]
    assert {"text/plain": "second"} in data, "update_display reached a cell of three checkpoints ago"
    assert any("image/png" in mimes for mimes in data)
    (widget,) = seen.metadata.widgets["application/vnd.jupyter.widget-state+json"]["state"].values()
    assert widget["state"]["value"] == 3, "all comm messages came through"


@pytest.mark.timeout(300)
async def test_the_quickstart_with_a_checkpoint_after_every_cell(kernelspecs: Path):
    """Its asserts compare generator, file, database, thread and tensors across the checkpoints."""
    run = Run(nbformat.read(QUICKSTART, as_version=4), OURS, kernelspecs)
    seen = await run.execute()
    before, after = [
        "".join(output.text for output in cell.outputs if output.output_type == "stream")
        for cell in seen.cells
        if "fingerprint" in cell.metadata.get("tags", [])
    ]
    assert before == after != ""
    assert len(set(run.images)) == sum(cell.cell_type == "code" for cell in seen.cells)
