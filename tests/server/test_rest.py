"""REST against its own description, against intruders, and with a real kernel."""

from __future__ import annotations

import re
import socket
import uuid
from pathlib import Path

import jsonschema_rs
import pytest
import requests
import schemathesis
import yaml
from harness import DAEMON, END_DAEMON
from hypothesis import settings
from live import TOKEN, server, until

from jupyter_gpu_ckpt.server.handlers import HANDLERS, OPENAPI, VERBS

SPEC = yaml.safe_load(OPENAPI.read_text())
#: Every operation of the description, with something in place of its parameters.
OPERATIONS = [
    (method.upper(), "gpu-ckpt" + re.sub(r"\{kernel_id\}|\{\w+\}", lambda m: str(uuid.UUID(int=7)), path))
    for path, item in SPEC["paths"].items()
    for method in item
    if method in ("get", "post", "delete")
]
WRITING = [(method, path) for method, path in OPERATIONS if method != "GET"]

schema = schemathesis.openapi.from_dict(SPEC)


# -- the description and the handlers are one


def test_every_route_is_described_and_every_description_has_a_route():
    for pattern, handler in HANDLERS:
        matching = [(method, path) for method, path in OPERATIONS if re.fullmatch(pattern, path)]
        has = {name.upper() for name in ("get", "post", "put", "patch", "delete") if name in vars(handler)}
        assert {method for method, _ in matching} == has, pattern
    for _, path in OPERATIONS:
        assert any(re.fullmatch(pattern, path) for pattern, _ in HANDLERS), path


def test_the_description_is_served(live):
    reply = live.ask("GET", "gpu-ckpt/openapi.yaml")
    assert reply.headers["Content-Type"] == "application/yaml"
    assert yaml.safe_load(reply.text) == SPEC


def check(case, live, *excluded: str) -> None:
    """Send it; the reply must be one that the description has, and say what it says."""
    case.call_and_validate(
        base_url=live.url + "gpu-ckpt",
        headers={"Authorization": f"token {TOKEN}"},
        timeout=60,
        # jupyter_server replies 403 to whom it does not know, not 401; the tests below look at that.
        excluded_checks=schemathesis.checks.CHECKS.get_by_names(["missing_required_header", *excluded]),
    )


@schema.parametrize()
@settings(max_examples=50, deadline=None, derandomize=True)
def test_nothing_is_replied_that_is_not_described(case, live):
    check(case, live)


@pytest.fixture(scope="module")
def battered_kernel(live):
    """A kernel that has to take whatever is thought up."""
    return live.start_kernel()


# But a branch: each would start a kernel (test_branched_notebooks.py).
@schema.include(path_regex=r"^/kernels/\{kernel_id\}").exclude(operation_id="branch").parametrize()
@settings(max_examples=25, deadline=None, derandomize=True)
def test_nothing_is_replied_that_is_not_described_about_a_real_kernel(case, live, battered_kernel):
    case.path_parameters["kernel_id"] = battered_kernel
    # What was thought up to be wrong may have been the id; and files to choose are those of a save point that is there.
    check(case, live, "negative_data_rejection", "positive_data_acceptance")


# -- who may


@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_without_a_token_nothing_is_answered(live, method, path):
    reply = requests.request(method, live.url + path, timeout=60, allow_redirects=False)
    assert reply.status_code == 403
    assert "gpu" not in reply.text.lower()


@pytest.mark.parametrize(("method", "path"), WRITING)
def test_a_cookie_alone_changes_nothing_without_the_xsrf_token(live, method, path):
    browser = logged_in(live)
    reply = browser.request(method, live.url + path, timeout=60)
    assert reply.status_code == 403
    assert "_xsrf" in reply.text
    with_token = {"X-XSRFToken": browser.cookies["_xsrf"]}
    expected = 202 if path.endswith("/drain") else 404  # a drain names nothing that could be missing
    assert browser.request(method, live.url + path, headers=with_token, timeout=60).status_code == expected


def logged_in(live) -> requests.Session:
    """A browser's session: cookies, no token."""
    browser = requests.Session()
    form = browser.get(live.url + "login", timeout=60)
    fields = {"password": TOKEN, "_xsrf": browser.cookies["_xsrf"]}
    assert form.ok and browser.post(live.url + "login", data=fields, timeout=60).ok
    assert browser.get(live.url + "gpu-ckpt/kernels", timeout=60).ok
    return browser


DENYING = """
from jupyter_server.auth import Authorizer

class Denying(Authorizer):
    def is_authorized(self, handler, user, action, resource):
        return resource != "gpu_ckpt"

c.ServerApp.authorizer_class = Denying
"""


@pytest.fixture(scope="module")
def denying(tmp_path_factory, module_runtime_base, criu_binary):
    with server(tmp_path_factory.mktemp("denying"), module_runtime_base, config=DENYING) as running:
        yield running


@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_a_denying_authorizer_denies_everything_of_ours(denying, method, path):
    reply = denying.ask(method, path)
    assert reply.status_code == 403
    assert "gpu_ckpt" in reply.json()["message"]
    assert denying.ask("GET", "api/kernels").ok


# -- activity


def test_polling_is_no_activity_and_a_verb_is(live, kernel_id):
    def last() -> str:
        return live.get("api/status")["last_activity"]

    live.do(kernel_id, "checkpoint")
    before = last()
    for path in ("status", "kernels", f"kernels/{kernel_id}", "images", "openapi.yaml"):
        assert live.ask("GET", f"gpu-ckpt/{path}").ok
    assert last() == before
    live.do(kernel_id, "checkpoint")
    assert last() > before


# -- what it does


def test_a_kernel_goes_through_all_verbs(live, kernel_id):
    live.run(kernel_id, "x = 1")
    for verb, state in (
        ("suspend", "suspended"),
        ("resume", "running"),
        ("suspend", "suspended"),
        ("checkpoint", "checkpointed"),
        ("restore", "running"),
    ):
        job = live.do(kernel_id, verb)
        assert (job["status"], job["error"]) == ("done", None), job
        document = live.get(f"gpu-ckpt/kernels/{kernel_id}")
        assert document["state"] == state
        assert document["job"]["id"] == job["id"]
        validate("/kernels/{kernel_id}", document)
    assert live.run(kernel_id, "print(x)") == "1"


def validate(path: str, document: object) -> None:
    """The document is what the description says a GET of ``path`` replies."""
    answer = SPEC["paths"][path]["get"]["responses"]["200"]["content"]["application/json"]["schema"]
    whole = {**nullable(answer), "components": nullable(SPEC["components"])}
    jsonschema_rs.validator_for(whole).validate(document)


def nullable(schema):
    """OpenAPI 3.0's ``nullable`` in JSON Schema's words."""
    if isinstance(schema, list):
        return [nullable(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: nullable(value) for key, value in schema.items() if key != "nullable"}
    return {"anyOf": [{"type": "null"}, made]} if schema.get("nullable") is True else made


def test_documents_with_something_in_them_are_as_described(live, kernel_id):
    live.do(kernel_id, "checkpoint")
    (image,) = (image for image in live.get("gpu-ckpt/images") if image["kernel_id"] == kernel_id)
    assert image["only_copy"] and image["bytes"] > 1 << 20
    validate("/images", [image])
    validate("/images/{image_id}", live.get(f"gpu-ckpt/images/{image['id']}"))
    validate("/kernels", live.get("gpu-ckpt/kernels"))
    status = live.get("gpu-ckpt/status")
    validate("/status", status)
    assert status["kernels"]["checkpointed"] >= 1
    assert status["policy"]["suspend_after"] == 300


def test_the_same_request_joins_the_running_job_and_a_later_one_does_not(live, kernel_id):
    path = f"gpu-ckpt/kernels/{kernel_id}/checkpoint"
    with live.busy(kernel_id):
        ids = {live.ask("POST", path, json={"when": "idle"}).json()["id"] for _ in range(3)}
        assert len(ids) == 1
        (job,) = ids
        assert live.get(f"gpu-ckpt/jobs/{job}")["status"] == "waiting"
    until(lambda: live.get(f"gpu-ckpt/jobs/{job}")["status"] == "done")
    reply = live.ask("POST", path, json={"when": "idle"})
    assert reply.json()["id"] != job
    assert reply.headers["Location"].endswith(f"/gpu-ckpt/jobs/{reply.json()['id']}")


@pytest.mark.parametrize("verb", ["suspend", "checkpoint"])
def test_while_a_cell_runs_preflight_says_so_and_the_verb_is_refused_at_once(live, kernel_id, verb):
    with live.busy(kernel_id), live.client(kernel_id) as client:
        client.execute("behind = 1")
        until(lambda: live.get(f"gpu-ckpt/kernels/{kernel_id}/preflight")["findings"][0]["text"].endswith("behind it."))
        findings = live.get(f"gpu-ckpt/kernels/{kernel_id}/preflight")
        validate("/kernels/{kernel_id}/preflight", findings)
        assert not findings["ok"]
        assert (findings["findings"][0]["code"], findings["findings"][0]["blocks"]) == ("KERNEL_BUSY", True)
        assert findings["findings"][0]["text"] == "A cell is running, and 1 more wait behind it."
        reply = live.ask("POST", f"gpu-ckpt/kernels/{kernel_id}/{verb}")
        assert reply.status_code == 409
        error = reply.json()["error"]
        assert (error["code"], error["left"], error["details"]) == ("KERNEL_BUSY", "the kernel runs on", {"cells": 2})
        document = live.get(f"gpu-ckpt/kernels/{kernel_id}")
        assert (document["state"], document["failure"], document["job"]) == ("running", None, None)
    assert live.run(kernel_id, "print(behind)") == "1"


def test_the_magic_counts_connections_but_not_what_listens_for_them(live, kernel_id):
    live.run(kernel_id, "import socket; listener = socket.create_server(('127.0.0.1', 0))")
    assert "connection" not in live.run(kernel_id, "%gpu_checkpoint --status")
    with socket.create_server(("127.0.0.1", 0)) as outside:
        live.run(kernel_id, f"client = socket.create_connection({outside.getsockname()!r})")
        assert "1 open connection to the outside" in live.run(kernel_id, "%gpu_checkpoint --status")


def test_preflight_says_that_a_cell_waits_for_input(live, kernel_id):
    with live.client(kernel_id) as client:
        client.wait_for_ready(timeout=60)  # else the question may come before its channel is connected, and is lost
        cell = client.execute("said = input('? ')", allow_stdin=True)
        client.get_stdin_msg(timeout=60)
        findings = live.get(f"gpu-ckpt/kernels/{kernel_id}/preflight")["findings"]
        assert (findings[0]["code"], findings[0]["text"]) == ("KERNEL_BUSY", "A cell waits for input.")
        error = live.ask("POST", f"gpu-ckpt/kernels/{kernel_id}/checkpoint").json()["error"]
        assert error["message"] == "A cell waits for input."
        assert "Answer its prompt" in error["hint"]
        client.input("yes")
        until(lambda: client.get_shell_msg(timeout=60)["parent_header"]["msg_id"] == cell)
    assert live.run(kernel_id, "print(said)") == "yes"


def test_a_verb_can_wait_for_the_cells_and_comes_before_the_next_one(live, kernel_id):
    with live.client(kernel_id) as client:
        client.wait_for_ready(timeout=60)
        with live.busy(kernel_id):
            queued = client.execute("import os; behind = os.getpid()")
            reply = live.ask("POST", f"gpu-ckpt/kernels/{kernel_id}/checkpoint", json={"when": "idle"})
            job = reply.json()
            assert (reply.status_code, job["status"]) == (202, "waiting")
            assert live.get(f"gpu-ckpt/kernels/{kernel_id}")["job"]["status"] == "waiting"
            assert live.get(f"gpu-ckpt/kernels/{kernel_id}")["state"] == "running"
        while client.get_shell_msg(timeout=60)["parent_header"]["msg_id"] != queued:
            pass
        overtaking = client.execute("after = behind")  # kept: the kernel leaves first, and comes back for it
        ended = live.ended(job["id"])
        assert (ended["status"], ended["error"]) == ("done", None), ended
        assert client.get_shell_msg(timeout=60)["parent_header"]["msg_id"] == overtaking
    assert live.run(kernel_id, "print(after == behind)") == "True"
    assert len([line for line in live.log.splitlines() if kernel_id in line and "to=checkpointed" in line]) == 1


def test_cells_that_come_behind_a_verb_that_waits_run_behind_it(live, kernel_id):
    live.run(kernel_id, "n = 0")
    assert live.do(kernel_id, "save", {"name": "point"})["status"] == "done"
    live.run(kernel_id, "n = 100")
    with live.client(kernel_id) as client:
        client.wait_for_ready(timeout=60)
        with live.busy(kernel_id):
            body = {"name": "point", "when": "idle"}
            job = live.ask("POST", f"gpu-ckpt/kernels/{kernel_id}/back", json=body).json()
            cells = [client.execute("n += 1") for _ in range(3)]
            client.complete("n", 1)
        assert live.ended(job["id"])["status"] == "done"
        while (reply := client.get_shell_msg(timeout=60))["parent_header"]["msg_id"] != cells[-1]:
            pass
        assert reply["content"]["status"] == "ok"
    assert live.run(kernel_id, "print(n)") == "3"


def test_cells_behind_a_verb_that_waits_are_aborted_by_the_error_of_a_cell_before(live, kernel_id):
    with live.client(kernel_id) as client:
        client.wait_for_ready(timeout=60)
        client.execute("import time; time.sleep(1); 1 / 0")
        until(lambda: not live.get(f"gpu-ckpt/kernels/{kernel_id}/preflight")["ok"])
        job = live.ask("POST", f"gpu-ckpt/kernels/{kernel_id}/checkpoint", json={"when": "idle"}).json()
        behind = client.execute("behind = 1")
        while (reply := client.get_shell_msg(timeout=60))["parent_header"]["msg_id"] != behind:
            pass
        assert reply["content"]["status"] == "aborted"
        assert live.ended(job["id"])["status"] == "done"
    assert live.run(kernel_id, "print('behind' in dir())") == "False"


def test_a_verb_that_waits_can_be_called_off(live, kernel_id):
    with live.client(kernel_id) as client:
        client.wait_for_ready(timeout=60)
        with live.busy(kernel_id):
            job = live.ask("POST", f"gpu-ckpt/kernels/{kernel_id}/suspend", json={"when": "idle"}).json()
            client.execute("behind = 1")
            called_off = live.ask("DELETE", f"gpu-ckpt/jobs/{job['id']}")
            assert (called_off.status_code, called_off.json()["status"]) == (200, "cancelled")
            again = live.ask("DELETE", f"gpu-ckpt/jobs/{job['id']}")
            assert (again.status_code, again.json()["error"]["code"]) == (409, "WRONG_STATE")
    assert live.run(kernel_id, "print(behind)") == "1"
    assert live.get(f"gpu-ckpt/kernels/{kernel_id}")["state"] == "running"


def test_a_verb_that_waits_is_not_done_to_the_kernel_that_comes_after_a_restart(live, kernel_id):
    with live.client(kernel_id) as client:
        client.wait_for_ready(timeout=60)
        client.execute("while True: pass")
        until(lambda: not live.get(f"gpu-ckpt/kernels/{kernel_id}/preflight")["ok"])
        job = live.ask("POST", f"gpu-ckpt/kernels/{kernel_id}/checkpoint", json={"when": "idle"}).json()
        assert live.ask("POST", f"api/kernels/{kernel_id}/restart").ok
        assert live.ended(job["id"])["error"]["code"] == "WRONG_STATE"
    assert live.run(kernel_id, "print(2)") == "2"
    assert live.get(f"gpu-ckpt/kernels/{kernel_id}")["state"] == "running"


@pytest.mark.parametrize("verb", ["suspend", "checkpoint"])
def test_a_restart_during_a_verb_works_and_is_not_called_a_failure(live, kernel_id, verb):
    live.run(kernel_id, "gone = bytes(1 << 29)")
    job = live.ask("POST", f"gpu-ckpt/kernels/{kernel_id}/{verb}").json()
    assert live.ask("POST", f"api/kernels/{kernel_id}/restart").ok
    ended = live.ended(job["id"])
    if ended["status"] != "done":  # it was through before
        error = ended["error"]
        assert (error["code"], error["left"]) == ("KERNEL_LOST", "the kernel is gone")
        assert error["message"] == "The kernel was ended by its owner (a restart or a shutdown) meanwhile."
        assert error["hint"].startswith("That was requested")
    assert live.run(kernel_id, "print('gone' in globals())") == "False"
    document = live.get(f"gpu-ckpt/kernels/{kernel_id}")
    assert (document["state"], document["failure"]) == ("running", None)


def test_a_refused_checkpoint_says_why_and_what_is_left(live, kernel_id):
    live.run(kernel_id, DAEMON)
    findings = live.get(f"gpu-ckpt/kernels/{kernel_id}/preflight")
    validate("/kernels/{kernel_id}/preflight", findings)
    assert (findings["ok"], findings["may_suspend"]) == (False, True)
    assert [finding["code"] for finding in findings["findings"] if finding["blocks"]] == ["CHILD_PROCESSES"]
    job = live.do(kernel_id, "checkpoint")
    assert job["status"] == "failed"
    assert job["error"]["code"] == "CHILD_PROCESSES"
    assert job["error"]["left"] == "the kernel runs on"
    failure = live.get(f"gpu-ckpt/kernels/{kernel_id}")["failure"]
    assert (failure["code"], failure["step"], failure["verb"]) == ("CHILD_PROCESSES", "preflight", "checkpoint")
    assert {name: failure[name] for name in ("message", "hint", "details")} == {
        name: job["error"][name] for name in ("message", "hint", "details")
    }
    live.do(kernel_id, "checkpoint")
    live.run(kernel_id, END_DAEMON)
    assert live.do(kernel_id, "checkpoint")["status"] == "done"
    document = live.get(f"gpu-ckpt/kernels/{kernel_id}")
    validate("/kernels/{kernel_id}", document)
    assert document["failure"] is None
    (remembered,) = document["failures"]  # it failed twice in a row
    assert {**remembered, "at": 0} == {**failure, "at": 0} and remembered["at"] > failure["at"]


def test_why_a_cell_could_not_wake_its_kernel_names_the_file(live, kernel_id, tmp_path):
    path = tmp_path / "data"
    path.write_text("before")
    live.run(kernel_id, f"held = open({str(path)!r})")
    live.do(kernel_id, "checkpoint")
    path.write_text("another length")
    with live.client(kernel_id) as client:
        client.execute("1", allow_stdin=False)  # else its user is asked
        until(lambda: live.get(f"gpu-ckpt/kernels/{kernel_id}")["failure"])
    failure = live.get(f"gpu-ckpt/kernels/{kernel_id}")["failure"]
    assert (failure["code"], failure["verb"], failure["details"]["culprit"]) == ("FILE_CHANGED", "restore", str(path))
    assert str(path) in failure["message"]
    assert "Put it back." in failure["hint"]


def test_a_verb_that_makes_no_sense_fails_with_the_state(live, kernel_id):
    live.do(kernel_id, "checkpoint")
    job = live.do(kernel_id, "suspend")
    assert job["error"]["code"] == "WRONG_STATE"
    assert live.ask("GET", f"gpu-ckpt/kernels/{kernel_id}/preflight").status_code == 409


@pytest.mark.parametrize(
    ("verb", "body"),
    [
        ("restore", {"gpu_map": ["a"]}),
        ("branch", {"gpu_map": {"a": 1}}),
        ("back", {"name": "one", "gpu_map": ["a"]}),
        ("restore", {"accept_changed_files": "yes"}),
        ("restore", {"other": 1}),
        ("restore", {"when": "idle"}),
        ("suspend", {"when": "later"}),
        ("checkpoint", {"when": True}),
        ("checkpoint", {"gpu_map": {}}),
        ("suspend", "text"),
    ],
)
def test_a_malformed_body_is_refused(live, untouched_kernel, verb, body):
    reply = live.ask("POST", f"gpu-ckpt/kernels/{untouched_kernel}/{verb}", json=body)
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "BAD_REQUEST")


def test_the_only_copy_of_a_sleeping_kernel_is_not_deleted_by_mistake(live, kernel_id):
    live.do(kernel_id, "checkpoint")
    image = live.get(f"gpu-ckpt/kernels/{kernel_id}")["image"]
    refused = live.ask("DELETE", f"gpu-ckpt/images/{image}")
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "IMAGE_BUSY")
    assert live.ask("GET", f"gpu-ckpt/images/{image}").ok
    deleted = live.ask("DELETE", f"gpu-ckpt/images/{image}?force=true")
    assert deleted.ok and deleted.json()["bytes"] > 0
    assert live.ask("GET", f"gpu-ckpt/images/{image}").status_code == 404


def test_an_image_that_waits_for_its_server_is_not_deleted_by_mistake_either(tmp_path, runtime_base, criu_binary):
    attach = "c.KernelPersistence.attach_on_start = {}"
    with server(tmp_path / "home", runtime_base) as first:
        first.run(first.start_kernel(), "x = 41")
    with server(tmp_path / "home", runtime_base, config=attach.format(False)) as another:
        (image,) = another.get("gpu-ckpt/images")
        assert image["only_copy"]
        refused = another.ask("DELETE", f"gpu-ckpt/images/{image['id']}")
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "IMAGE_BUSY")
        assert another.ask("DELETE", f"gpu-ckpt/images/{image['id']}?force=true").ok


def test_a_kernel_of_another_provisioner_is_listed_and_left_alone(tmp_path, runtime_base):
    plain = 'c.KernelProvisionerFactory.default_provisioner_name = "local-provisioner"'
    with server(tmp_path, runtime_base, config=plain) as running:
        kernel_id = running.start_kernel()
        document = running.get(f"gpu-ckpt/kernels/{kernel_id}")
        validate("/kernels/{kernel_id}", document)
        assert not document["checkpointable"] and document["reason"]
        assert "gpu_ckpt" not in running.get(f"api/kernels/{kernel_id}")
        for verb in VERBS:
            assert running.ask("POST", f"gpu-ckpt/kernels/{kernel_id}/{verb}").status_code == 409


def test_a_protection_is_in_the_outlook_and_can_be_ended(live, kernel_id):
    def protect(seconds):
        return live.ask("POST", f"gpu-ckpt/kernels/{kernel_id}/protect", json={"seconds": seconds})

    def left() -> float:
        return (live.get(f"gpu-ckpt/kernels/{kernel_id}")["policy"] or {"protected_s": -1})["protected_s"]

    assert protect(7200).json()["protected_until"] > 0
    until(lambda: 7000 < left() <= 7200)
    assert protect(0).json() == {"protected_until": None}
    until(lambda: left() == 0)


@pytest.mark.parametrize("body", [{}, {"seconds": "1"}, {"seconds": -1}, {"seconds": True}, {"other": 1}, [1]])
def test_a_protection_needs_a_number_of_seconds(live, untouched_kernel, body):
    reply = live.ask("POST", f"gpu-ckpt/kernels/{untouched_kernel}/protect", json=body)
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "BAD_REQUEST")


def test_a_kernel_that_is_kept_is_not_idle_any_more_and_one_that_sleeps_cannot_be(live, kernel_id):
    def keep():
        return live.ask("POST", f"gpu-ckpt/kernels/{kernel_id}/keep")

    def idle() -> float:
        return (live.get(f"gpu-ckpt/kernels/{kernel_id}")["policy"] or {"idle_s": 0})["idle_s"]

    until(lambda: idle() > 1)
    kept = keep().json()["policy"]
    assert kept["idle_s"] < 1 and not kept["imminent"]
    live.do(kernel_id, "checkpoint")
    reply = keep()
    assert (reply.status_code, reply.json()["error"]["code"]) == (409, "WRONG_STATE")


def test_a_kernel_s_host_memory_and_children_are_in_its_document(live, kernel_id):
    live.run(kernel_id, "import subprocess\nblock = bytearray(64 << 20)\nchild = subprocess.Popen(['sleep', '900'])")
    (listed,) = (kernel for kernel in live.get("gpu-ckpt/kernels") if kernel["id"] == kernel_id)
    kernel = live.get(f"gpu-ckpt/kernels/{kernel_id}")
    validate("/kernels/{kernel_id}", kernel)
    for each in (listed, kernel):
        (child,) = each["children"]
        assert child["command"] == "sleep 900" and 0 < child["bytes"] < 64 << 20 < each["host_bytes"]
    live.run(kernel_id, "child.kill(); child.wait()")
    live.do(kernel_id, "checkpoint")
    asleep = live.get(f"gpu-ckpt/kernels/{kernel_id}")
    assert (asleep["host_bytes"], asleep["children"]) == (0, [])


def test_a_kernel_without_a_server_is_attached_asleep_and_with_its_notebook(tmp_path, runtime_base, criu_binary):
    model = {"path": "a b.ipynb", "name": "a b.ipynb", "type": "notebook", "kernel": {"name": "python3"}}
    with server(tmp_path / "home", runtime_base) as first:
        (tmp_path / "home" / "work" / "a b.ipynb").write_text("{}")
        kernel_id = first.ask("POST", "api/sessions", json=model).json()["kernel"]["id"]
        first.run(kernel_id, "x = 41")
    with server(tmp_path / "home", runtime_base, config="c.KernelPersistence.attach_on_start = False") as second:
        (image,) = second.get("gpu-ckpt/images")
        assert image["notebook"] == "a b.ipynb"
        assert second.get("api/kernels") == []
        reply = second.ask("POST", f"gpu-ckpt/images/{image['id']}/attach")
        assert (reply.status_code, reply.json()["state"]) == (200, "checkpointed"), reply.text
        (session,) = second.get("api/sessions")
        assert (session["path"], session["kernel"]["id"]) == ("a b.ipynb", kernel_id)
        assert second.ask("POST", f"gpu-ckpt/images/{image['id']}/attach").ok  # it is here already
        assert second.run(kernel_id, "print(x + 1)") == "42"


@pytest.mark.parametrize("what", ["kernels", "sessions"])
def test_a_sleeping_kernel_that_is_shut_down_goes_with_its_image(tmp_path, runtime_base, criu_binary, what):
    model = {"path": "a.ipynb", "name": "a.ipynb", "type": "notebook", "kernel": {"name": "python3"}}
    with server(tmp_path / "home", runtime_base) as running:
        (tmp_path / "home" / "work" / "a.ipynb").write_text("{}")
        session = running.ask("POST", "api/sessions", json=model).json()
        kernel_id = session["kernel"]["id"]
        running.do(kernel_id, "checkpoint")
        assert running.get("gpu-ckpt/images")
        ended = running.ask(
            "DELETE", f"api/kernels/{kernel_id}" if what == "kernels" else f"api/sessions/{session['id']}"
        )
        assert ended.status_code == 204
        assert running.get("gpu-ckpt/images") == []
        assert "was ended; its image" in running.log


def test_a_kept_image_of_a_kernel_that_was_shut_down_can_be_opened(tmp_path, runtime_base, criu_binary):
    keep = "c.GpuCkptProvisioner.keep_image_on_shutdown = True"
    with server(tmp_path / "home", runtime_base, config=keep) as running:
        kernel_id = running.start_kernel()
        running.run(kernel_id, "x = 41")
        running.do(kernel_id, "checkpoint")
        (image,) = running.get("gpu-ckpt/images")
        assert running.ask("DELETE", f"api/kernels/{kernel_id}").status_code == 204
        assert running.get("api/kernels") == []
        reply = running.ask("POST", f"gpu-ckpt/images/{image['id']}/attach")
        assert (reply.status_code, reply.json()["state"]) == (200, "checkpointed"), reply.text
        assert running.run(kernel_id, "print(x + 1)") == "42"


def test_an_image_whose_kernel_another_server_has_is_not_opened_and_the_reason_is_true(
    tmp_path, runtime_base, criu_binary
):
    with server(tmp_path / "home", runtime_base) as first:
        kernel_id = first.start_kernel()
        first.do(kernel_id, "checkpoint")
        (image,) = first.get("gpu-ckpt/images")
        with server(tmp_path / "home", runtime_base, config="c.KernelPersistence.attach_on_start = False") as second:
            refused = second.ask("POST", f"gpu-ckpt/images/{image['id']}/attach")
            assert (refused.status_code, refused.json()["error"]["code"]) == (409, "WRONG_STATE")
            assert "Another server has the kernel" in refused.json()["error"]["message"]


def test_the_list_of_gpus_follows_its_schema(live):
    validate("/gpus", live.get("gpu-ckpt/gpus"))


def test_the_reference_names_every_route():
    reference = (Path(__file__).resolve().parents[2] / "docs" / "reference" / "rest.md").read_text()
    for path, item in SPEC["paths"].items():
        for method in item:
            if method in ("get", "post", "delete"):
                assert f"`{method.upper()} {path}`" in reference, f"{method} {path}"
