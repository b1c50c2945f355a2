"""Save points by REST and by magics, in a server with a notebook."""

from __future__ import annotations

import contextlib
import json
import urllib.parse
from types import SimpleNamespace

import nbformat
import pytest
from images import publish
from jupyter_server.services.contents.largefilemanager import AsyncLargeFileManager
from live import server, until
from tornado.web import HTTPError

from jupyter_gpu_ckpt.errors import NotebookNotReplaced
from jupyter_gpu_ckpt.image import save_point
from jupyter_gpu_ckpt.image.save_point import SavePoint
from jupyter_gpu_ckpt.server import notebooks
from jupyter_gpu_ckpt.server.save_points import BackHandler

#: Where a file ``meddle`` is, another program changes each notebook right after it was read.
CONFIG = """
from pathlib import Path
from jupyter_server.services.contents.largefilemanager import AsyncLargeFileManager

class Meddled(AsyncLargeFileManager):
    async def get(self, path, *arguments, **options):
        model = await super().get(path, *arguments, **options)
        file = Path(self.root_dir, path)
        if Path(self.root_dir, "meddle").exists() and file.suffix == ".ipynb":
            file.write_text(file.read_text().replace("print(", "print( "))
        return model

c.ServerApp.contents_manager_class = Meddled
"""


@pytest.fixture(scope="module")
def living(tmp_path_factory, module_runtime_base, criu_binary):
    with server(tmp_path_factory.mktemp("saves"), module_runtime_base, config=CONFIG) as running:
        yield running


@pytest.fixture(scope="module")
def kernel_id(living) -> str:
    """A kernel with a notebook, which has one output."""
    document = nbformat.v4.new_notebook()
    output = nbformat.v4.new_output("stream", text="42")
    document.cells = [nbformat.v4.new_code_cell("print(42)", outputs=[output])]
    nbformat.write(document, living.home / "work" / "book.ipynb")
    body = {"path": "book.ipynb", "name": "book", "type": "notebook", "kernel": {"name": "python3"}}
    return str(living.ask("POST", "api/sessions", json=body).json()["kernel"]["id"])


def test_a_program_saves_goes_back_and_undoes_that(living, kernel_id):
    saves = f"gpu-ckpt/kernels/{kernel_id}/saves"
    living.run(kernel_id, "import os; x, log = 1, open('rest.log', 'w'); log.write('one '); log.flush()")
    saved = living.do(kernel_id, "save", {"name": "one"})
    assert (saved["status"], saved["result"]["name"], saved["result"]["cell"]) == ("done", "one", 1)
    assert {"x", "log"} <= {each["name"] for each in saved["result"]["variables"]}
    assert [each["name"] for each in living.ask("GET", saves).json()] == ["one"]
    document = living.ask("GET", f"{saves}/one").json()["notebook"]
    assert document["cells"][0]["outputs"][0]["text"] == "42"
    taken = living.ask("POST", f"gpu-ckpt/kernels/{kernel_id}/save", json={"name": "one"})
    assert (taken.status_code, taken.json()["error"]["code"]) == (409, "SAVE_POINT_EXISTS")

    living.run(kernel_id, "x = 2; log.write('two'); log.flush()")
    refused = living.ask("POST", f"gpu-ckpt/kernels/{kernel_id}/back", json={"name": "one"})
    error = refused.json()["error"]
    assert (refused.status_code, error["code"]) == (409, "FILES_DIFFER")
    (differs,) = error["details"]["files"]
    assert (differs["then"]["bytes"], differs["now"]["bytes"], differs["choices"]) == (4, 7, ["then", "now"])
    done = living.do(kernel_id, "back", {"name": "one", "files": {differs["path"]: "then"}})
    assert (done["status"], done["error"]) == ("done", None)
    assert living.run(kernel_id, "print(x, open('rest.log').read())") == "1 one"

    before = done["result"]
    assert before["automatic"] and not before["asleep"]
    assert (before["notebook"], before["notebook_error"]) == ("", None), "it stays unless that is requested"
    assert living.do(kernel_id, "back", {"name": before["name"], "files": "then"})["status"] == "done"
    assert living.run(kernel_id, "print(x, open('rest.log').read())") == "2 one two"
    for name in ("one", before["name"]):
        assert living.ask("DELETE", f"{saves}/{urllib.parse.quote(name)}").json()["bytes"] > 1_000_000
    assert [each["automatic"] for each in living.ask("GET", saves).json()] == [True]
    missing = living.ask("POST", f"gpu-ckpt/kernels/{kernel_id}/back", json={"name": "one"})
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "SAVE_POINT_NOT_FOUND")


def test_a_user_saves_goes_back_and_deletes_by_magics(living, kernel_id):
    assert living.run(kernel_id, "y = 'then'\n%gpu_checkpoint --save 'by hand'").startswith("Save point 'by hand'")
    rows = living.run(kernel_id, "%gpu_checkpoint --saves").splitlines()
    assert any("by hand" in row and "y" in row.split("MiB")[-1] for row in rows), rows
    living.run(kernel_id, "y = 'now'")
    assert "Going back to 'by hand'" in living.run(kernel_id, "%gpu_checkpoint --back 'by hand' --files then")
    assert living.run(kernel_id, "print(y)") == "then"
    listed = living.run(kernel_id, "%gpu_checkpoint --saves").splitlines()
    assert "automatic" in listed[-1]
    assert "  by hand  " in listed[-1], "which it comes from"
    assert living.run(kernel_id, "%gpu_checkpoint --delete 'by hand'").startswith("Deleted by hand, ")
    code = (
        "try: get_ipython().run_line_magic('gpu_checkpoint', '--back x')\nexcept Exception as error: print(error.code)"
    )
    assert living.run(kernel_id, code) == "SAVE_POINT_NOT_FOUND"


def test_what_differs_is_compared_by_rest_and_by_a_magic(living, kernel_id):
    cell = "import threading; a, b, c, table, lock = 1, [1], {1}, {'k': [1.5]}, threading.Lock()"
    living.run(kernel_id, cell + "\n%gpu_checkpoint --save first")
    living.run(kernel_id, "b.append(2); table['k'][0] = 2.5; del c; d = 'new'\n%gpu_checkpoint --save second")
    saves = f"gpu-ckpt/kernels/{kernel_id}/saves"
    until(lambda: any(each["name"] == "second" for each in living.ask("GET", saves).json()))
    living.run(kernel_id, "a = 2; b.pop()")

    def names(path: str) -> dict[str, set[str]]:
        found = living.ask("GET", f"{saves}/{path}").json()
        return {kind: {each["name"] for each in found[kind]} for kind in ("changed", "added", "gone", "unknown")}

    between = names("first/compare?to=second")
    assert (between["changed"], between["added"], between["gone"]) == ({"b", "table"}, {"d"}, {"c"})
    assert "lock" in between["unknown"]
    since = names("first/compare")
    assert (since["changed"], since["added"], since["gone"]) == ({"a", "table"}, {"d"}, {"c"}), "b is as it was"
    living.run(kernel_id, "a = 1; table['k'][0] = 1.5")
    assert names("first/compare")["changed"] == set()

    text = living.run(kernel_id, "%gpu_checkpoint --compare first second")
    rows = {row.split()[0]: row.split()[1] for row in text.splitlines()[2:] if len(row.split()) > 3}
    assert {name: rows[name] for name in ["b", "table", "c", "d"]} == {
        "b": "changed",
        "table": "changed",
        "c": "gone",
        "d": "added",
    }
    assert text.startswith("From 'first' to 'second':")
    assert "lock" in text.splitlines()[-1]
    assert living.run(kernel_id, "%gpu_checkpoint --compare first").startswith("From 'first' to now:")

    first = living.ask("GET", saves).json()[0]
    assert set(first["variables"][0]) == {"name", "type", "bytes"}, "digests are for comparisons alone"
    missing = living.ask("GET", f"{saves}/first/compare?to=none")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "SAVE_POINT_NOT_FOUND")
    with living.busy(kernel_id):
        busy = living.ask("GET", f"{saves}/first/compare")
    assert (busy.status_code, busy.json()["error"]["code"]) == (409, "KERNEL_BUSY")
    assert living.do(kernel_id, "checkpoint")["status"] == "done"
    asleep = living.ask("GET", f"{saves}/first/compare")
    assert (asleep.status_code, asleep.json()["error"]["code"]) == (409, "WRONG_STATE")
    assert names("first/compare?to=second") == between


def test_the_notebook_goes_back_with_its_kernel_and_so_does_its_undo(living, kernel_id):
    file = living.home / "work" / "book.ipynb"
    sources = lambda: [cell["source"] for cell in living.get("api/contents/book.ipynb")["content"]["cells"]]  # noqa: E731
    living.run(kernel_id, "z = 'then'")
    assert living.do(kernel_id, "save", {"name": "both"})["result"]["has_notebook"]
    then = nbformat.read(file, as_version=4)
    now = nbformat.v4.new_notebook(cells=[*then.cells, nbformat.v4.new_code_cell("z = 'now'")])
    assert living.ask("PUT", "api/contents/book.ipynb", json={"type": "notebook", "content": now}).ok
    living.run(kernel_id, "z = 'now'")

    request = {"files": "then", "notebook": True}
    done = living.do(kernel_id, "back", {"name": "both", **request})
    assert (done["result"]["notebook"], done["result"]["notebook_error"]) == ("book.ipynb", None)
    assert living.run(kernel_id, "print(z)") == "then"
    assert nbformat.read(file, as_version=4).cells == then.cells, "with its output"
    undone = living.do(kernel_id, "back", {"name": done["result"]["name"], **request})
    assert (undone["status"], undone["result"]["notebook"]) == ("done", "book.ipynb")
    assert (living.run(kernel_id, "print(z)"), sources()) == ("now", ["print(42)", "z = 'now'"])


def test_a_kernel_that_sleeps_goes_back_with_its_notebook_and_without_a_wake(living, kernel_id):
    living.run(kernel_id, "z = 'then'")
    assert living.do(kernel_id, "save", {"name": "awake"})["status"] == "done"
    living.run(kernel_id, "z = 'now'")
    assert living.do(kernel_id, "checkpoint")["status"] == "done"
    image = living.ask("GET", f"gpu-ckpt/kernels/{kernel_id}").json()["image"]
    request = {"files": "then", "notebook": True}
    done = living.do(kernel_id, "back", {"name": "awake", **request})
    assert (done["status"], done["result"]["image"], done["result"]["asleep"]) == ("done", image, False)
    assert (done["result"]["automatic"], done["result"]["notebook"]) == (True, "book.ipynb")
    assert living.run(kernel_id, "print(z)") == "then"
    undone = living.do(kernel_id, "back", {"name": done["result"]["name"], **request})
    assert (undone["status"], undone["result"]["notebook"]) == ("done", "book.ipynb")
    assert living.run(kernel_id, "print(z)") == "now"


@pytest.mark.parametrize(("kept", "is_replaced"), [(b"now", True), (b"of another time", False), (None, False)])
async def test_a_notebook_that_the_state_before_was_saved_without_stays(store, monkeypatch, kept, is_replaced):
    """Keep what nothing else has: the image that the kernel slept in is encrypted, or was a save point already."""
    before, point = (
        save_point.of_sleep(store, publish(store, generation=number), SavePoint(f"{number}"), document, 0)
        for number, document in enumerate((kept, b"then"), 1)
    )
    replaced = []

    async def found(*_: object) -> object:
        return ("book.ipynb", b"now")

    async def back(*_: object, **__: object) -> object:
        return before

    async def replace(_: object, *facts: object) -> None:
        replaced.append(facts)

    monkeypatch.setattr(notebooks, "replace", replace)
    handler = SimpleNamespace(app=SimpleNamespace(store=store), _require_notebooks=found, serverapp=None)
    result = await BackHandler._back_with_notebook(handler, SimpleNamespace(back=back), "point", None, point)
    assert replaced == ([("book.ipynb", b"now", b"then")] if is_replaced else [])
    assert (result["notebook_error"] or {}).get("code") == (None if is_replaced else "NOTEBOOK_NOT_REPLACED")


def test_a_notebook_that_is_missing_or_changed_meanwhile_is_not_replaced(living, kernel_id):
    work = living.home / "work"
    file, back = work / "book.ipynb", f"gpu-ckpt/kernels/{kernel_id}/back"
    request = {"name": "with", "files": "then", "notebook": True}
    living.run(kernel_id, "z = 'then'")
    assert living.do(kernel_id, "save", {"name": "with"})["result"]["has_notebook"]
    file.rename(work / "away.ipynb")
    assert not living.do(kernel_id, "save", {"name": "without"})["result"]["has_notebook"]
    gone = living.ask("POST", back, json=request)
    assert (gone.status_code, gone.json()["error"]["code"]) == (409, "NOTEBOOK_NOT_REPLACED")
    assert "book.ipynb cannot be read" in gone.json()["message"]
    (work / "away.ipynb").rename(file)
    none = living.ask("POST", back, json={**request, "name": "without"})
    assert (none.status_code, none.json()["message"]) == (409, "The save point has no notebook.")
    assert living.ask("POST", back, json={**request, "notebook": "yes"}).status_code == 400

    living.run(kernel_id, "z = 'now'")
    (work / "meddle").touch()
    done = living.do(kernel_id, "back", request)
    (work / "meddle").unlink()
    error = done["result"]["notebook_error"]
    assert (done["status"], done["result"]["notebook"], error["code"]) == ("done", "", "NOTEBOOK_NOT_REPLACED")
    assert error["message"] == "book.ipynb was changed while the kernel went back."
    assert error["left"] == "the kernel is back at the save point, book.ipynb is as it is on the disk"
    assert living.run(kernel_id, "print(z)") == "then"
    assert "print( " in file.read_text(), "as the other program has written it"


@pytest.mark.parametrize(
    ("present", "reason"),
    [("now", "No space left on device"), ("then", ""), ("other", "changed while"), (None, "No such file")],
)
async def test_a_notebook_is_written_only_where_it_is_as_it_was_kept(tmp_path, present, reason):
    """A disk that is full, a notebook that is the wanted one already, another one, and none."""

    class Full(AsyncLargeFileManager):
        async def save(self, model, path=""):
            raise HTTPError(500, "Unexpected error while saving file: %s: No space left on device", path)

    def book(source: str) -> nbformat.NotebookNode:
        return nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source, id="a")])

    contents: dict[str | None, bytes] = {}
    app = SimpleNamespace(contents_manager=Full(root_dir=str(tmp_path)))
    for source in ("now", "then"):
        nbformat.write(book(source), tmp_path / "book.ipynb")
        contents[source] = json.dumps((await app.contents_manager.get("book.ipynb"))["content"]).encode()
    (tmp_path / "book.ipynb").unlink()
    if present is not None:
        nbformat.write(book(present), tmp_path / "book.ipynb")
    with pytest.raises(NotebookNotReplaced, match=reason) if reason else contextlib.nullcontext() as caught:
        await notebooks.replace(app, "book.ipynb", contents["now"], contents["then"])
    assert not reason or caught.value.left.endswith("book.ipynb is as it is on the disk")
    if present is not None:
        assert nbformat.read(tmp_path / "book.ipynb", as_version=4).cells[0].source == present


def test_the_notebook_of_a_save_point_is_that_of_its_magic_too(living, kernel_id):
    living.run(kernel_id, "%gpu_checkpoint --save document")
    saves = f"gpu-ckpt/kernels/{kernel_id}/saves"
    until(lambda: any(each["name"] == "document" for each in living.ask("GET", saves).json()))
    document = living.ask("GET", f"{saves}/document").json()["notebook"]
    nbformat.validate(nbformat.reads(json.dumps(document), as_version=4))


def test_a_save_that_has_begun_is_waited_for_and_two_are_made_one_after_the_other(living):
    kernel_id = living.ask("POST", "api/kernels", json={}).json()["id"]
    living.run(kernel_id, "x = bytearray(range(256)) * (1 << 18)")
    jobs = [
        living.ask("POST", f"gpu-ckpt/kernels/{kernel_id}/save", json={"name": name}).json()["id"]
        for name in ("first", "second")
    ]
    reply = living.ask("POST", f"gpu-ckpt/kernels/{kernel_id}/back", json={"name": "second"})
    assert reply.status_code == 202, reply.text
    assert [living.ended(job)["status"] for job in (*jobs, reply.json()["id"])] == ["done"] * 3
    with living.client(kernel_id) as client:
        client.wait_for_ready(timeout=60)
        client.execute("%gpu_checkpoint --save third", reply=True, timeout=60)
        reply = living.ask("POST", f"gpu-ckpt/kernels/{kernel_id}/back", json={"name": "third"})
        assert reply.status_code == 202, reply.text
        assert living.ended(reply.json()["id"])["status"] == "done"
    reply = living.ask("POST", f"gpu-ckpt/kernels/{kernel_id}/back", json={"name": "fourth"})
    assert (reply.status_code, reply.json()["error"]["code"]) == (404, "SAVE_POINT_NOT_FOUND")
