"""Requests that mean harm, or nothing: refused with a code, and never an error of the server's own."""

from __future__ import annotations

import re

import pytest
import yaml

from jupyter_gpu_ckpt.server.handlers import OPENAPI

SPEC = yaml.safe_load(OPENAPI.read_text())
PATHS = {path: sorted(item.keys() & {"get", "post", "delete"}) for path, item in SPEC["paths"].items()}
WITH_ID = [(method, path) for path, methods in PATHS.items() if "{" in path for method in methods]
WITH_BODY = [path for path, methods in PATHS.items() if "post" in methods]

#: In the place of an id, as a URL says it: NUL, new line, ESC, C1, mark of direction, a way up, no UTF-8, a surrogate
#: half, nothing, far too long, a format.
IDS = ["%00", "a%00b", "%0A", "%1B%5B31m", "%C2%9B31m", "%E2%80%AE", "%2E%2E", "..%2F..%2Fetc", "%FF", "%ED%A0%80"]
IDS += ["%20", "a" * 5000, "%25s%25d", "%7B%7D", "manifest.json", ".hashes.json", "%F0%9F%99%82"]
#: No body of any verb: no JSON, no object, names and values that none has.
BODIES = [b"\0", b"{", b"null", b"true", b"[]", b'"text"', b"1", b"NaN", b"\xff\xfe", b'"\\ud800"', b"[" * 100_000]
BODIES += [b'{"\\ud800": 1}', b'{"seconds": 1, "seconds\\u0000": 1}', b'{"": {}}', b"1" + b"0" * 400, b"9" * 5000]

HUGE = b"1" + b"0" * 400
SECONDS = [HUGE, b"-" + HUGE, b"9" * 5000, b"1e999", b"-1e999", b"1e300", b"NaN", b"Infinity", b"-Infinity", b"-1"]
SECONDS += [b"true", b"false", b"null", b'"1"', b'"\\ud800"', b"[]", b"[1]", b"{}", b"3153600001"]
RESTORES = [
    b'{"gpu_map": %s}' % value
    for value in (b"null", b"1", b'"a"', b"[]", b'{"a": null}', b'{"a": 1}', b'{"a": %s}' % HUGE, b'{"a": {"b": "c"}}')
] + [b'{"accept_changed_files": %s}' % value for value in (b"null", b"0", b"1", b'"true"', b"[]", b"{}", b"NaN", HUGE)]
FORCES = ["1", "TRUE", "yes", "%00", "%FF", "%ED%A0%80", "%25s"]


def refused(reply, *statuses: int) -> None:
    assert reply.status_code in statuses, (reply.status_code, reply.text[:300])
    said = reply.json()
    assert said["message"] == said["error"]["message"]
    assert said["error"].keys() == {"code", "message", "hint", "left", "details"}
    if reply.status_code == 400:
        assert said["error"]["code"] == "BAD_REQUEST"
        assert said["error"]["message"].isprintable()
    assert "Traceback" not in reply.text


@pytest.mark.parametrize(("method", "path"), WITH_ID)
def test_what_is_no_id(live, method, path):
    for id in IDS:
        url = "gpu-ckpt" + re.sub(r"\{\w+\}", lambda _, id=id: id, path)
        refused(live.ask(method.upper(), url), 400, 404)


def test_what_is_not_there_and_what_is_not_allowed(live, untouched_kernel):
    gone = "00000000-0000-0000-0000-000000000000"
    for path in (f"kernels/{gone}", f"kernels/{gone}/saves", f"jobs/{gone}", f"images/{gone}"):
        refused(live.ask("GET", f"gpu-ckpt/{path}"), 404)
    refused(live.ask("PUT", f"gpu-ckpt/kernels/{untouched_kernel}"), 405)
    refused(live.ask("GET", "gpu-ckpt/kernels", headers={"Authorization": "token another"}), 403)


@pytest.mark.parametrize("path", WITH_BODY)
def test_what_is_no_body(live, untouched_kernel, path):
    url = "gpu-ckpt" + path.replace("{kernel_id}", untouched_kernel).replace("{image_id}", "no-such-image")
    for body in BODIES:
        refused(live.ask("POST", url, data=body), 400)


def test_what_is_no_number_of_seconds(live, kernel_id):
    for value in SECONDS:
        reply = live.ask("POST", f"gpu-ckpt/kernels/{kernel_id}/protect", data=b'{"seconds": %s}' % value)
        refused(reply, 400)
    reply = live.ask("POST", f"gpu-ckpt/kernels/{kernel_id}/protect", data=b'{"seconds": 3153600000}')
    assert reply.json()["protected_until"] > 3153600000
    assert live.ask("POST", f"gpu-ckpt/kernels/{kernel_id}/protect", data=b'{"seconds": 0}').ok


def test_what_is_no_way_to_restore(live, kernel_id):
    for body in RESTORES:
        refused(live.ask("POST", f"gpu-ckpt/kernels/{kernel_id}/restore", data=body), 400)


def test_names_of_gpus_that_are_no_text(live, kernel_id):
    """A JSON string may have a lone surrogate: the verb refuses it, and its job can be read."""
    reply = live.ask(
        "POST", f"gpu-ckpt/kernels/{kernel_id}/restore", data=b'{"gpu_map": {"\\ud800\\u001b": "\\udfff"}}'
    )
    assert reply.status_code == 202
    job = live.ended(reply.json()["id"])
    assert job["error"]["code"] == "WRONG_STATE"
    assert live.ask("GET", "gpu-ckpt/kernels").ok


def test_what_is_no_answer_to_force(live):
    for force in FORCES:
        refused(live.ask("DELETE", f"gpu-ckpt/images/no-such-image?force={force}"), 400)


def test_the_server_had_nothing_to_report_of_its_own(live):
    """All that was refused above was refused, not failed."""
    assert "Uncaught exception" not in live.log
