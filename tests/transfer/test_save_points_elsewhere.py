"""A save point of a real kernel that is pushed from one server and pulled by another one, with a store of its own."""

from __future__ import annotations

import pytest
from live import server

from jupyter_gpu_ckpt.image.store import Store
from jupyter_gpu_ckpt.transfer.remote import Remote

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("moved", [False, True])
def test_a_save_point_is_attached_gone_back_to_and_branched_from_elsewhere(tmp_path, directory, criu_binary, moved):
    homes = {name: tmp_path / name for name in ("near", "far")}
    bases = {name: directory / name for name in homes}
    for path in (*homes.values(), *bases.values()):
        path.mkdir(mode=0o700)
    near, far = (Store(home / "images") for home in homes.values())
    remote = Remote(f"file://{tmp_path}/remote")
    with server(homes["near"], bases["near"]) as here:
        kernel_id = here.start_kernel()
        here.run(kernel_id, "x, log = 1, open('log', 'w'); _ = log.write('then'); log.flush()")
        assert here.do(kernel_id, "save", {"name": "first"})["error"] is None
        here.run(kernel_id, "x = 2")
        point = here.do(kernel_id, "save", {"name": "one"})["result"]
        here.ask("DELETE", f"api/kernels/{kernel_id}")
        remote.push(near.get(point["image"]), remove_from=near if moved else None)
    with server(homes["far"], bases["far"]) as there:
        far.check(remote.pull(point["image"], far))
        assert there.get("api/kernels") == [], "no server attaches it by itself"
        assert there.ask("POST", f"gpu-ckpt/images/{point['image']}/attach").ok
        saves = f"gpu-ckpt/kernels/{kernel_id}/saves"
        (found,) = there.get(saves)
        assert (found["name"], found["parent"], found["asleep"]) == ("one", point["parent"], True)
        assert there.run(kernel_id, "print(x)") == "2"
        there.run(kernel_id, "x = 3; _ = log.write(' and now'); log.flush()")
        refused = there.ask("POST", f"gpu-ckpt/kernels/{kernel_id}/back", json={"name": "one"})
        assert refused.json()["error"]["code"] == "FILES_DIFFER"
        before = there.do(kernel_id, "back", {"name": "one", "files": "then"})
        assert before["error"] is None
        assert before["result"]["parent"] == point["image"], "what it was attached from"
        assert there.run(kernel_id, "print(x, open('log').read())") == "2 then"
        made = there.do(kernel_id, "branch", {"save_point": "one"})
        assert made["error"] is None
        branch = made["result"]["kernel_id"]
        assert there.run(branch, "x += 10; print(x)") == "12"
        assert there.do(branch, "save", {"name": "own"})["result"]["parent"] == point["image"]
        assert there.run(kernel_id, "print(x)") == "2"
