"""A notice for the user of a kernel without an agent is in the output of the next cell."""

from __future__ import annotations

from typing import Any

from gate_world import DEADLINE, World, outputs, reply
from waiting import until


def printed(messages: list[dict[str, Any]]) -> list[str]:
    return [message["content"]["text"] for message in messages if message["msg_type"] == "stream"]


def test_the_next_cell_shows_it_once(up: World) -> None:
    client = up.client()
    up.gate.notify("it came back")
    up.gate.notify("without a thing")
    for silent, shown in ((True, []), (False, ["it came back\nwithout a thing\n"]), (False, [])):
        cell = client.execute("pass", silent=silent)
        reply(client, cell)
        assert printed(outputs(client, cell)) == shown


def test_it_outlives_the_gate(up: World) -> None:
    up.gate.notify("it came back")
    identity = up.gate.identity
    up.gate.stop()
    up.gate = up.new_gate(identity=identity)
    up.up()
    client = up.client()
    cell = client.execute("pass")
    reply(client, cell)
    assert printed(outputs(client, cell)) == ["it came back\n"]
    assert up.gate.identity["notices"] == []


def test_a_text_for_the_cell_that_waits_is_shown_at_once(up: World) -> None:
    client = up.client()
    up.gate.print_notice("nobody waits: nobody hears of it")
    up.to_sleep()
    client.execute("1", silent=True)
    cell = client.execute("print('ran')")
    until(lambda: up.woken, "the cell woke the kernel")
    until(lambda: up.gate.queued == 2, "both wait")
    up.gate.print_notice("it waits for a port")
    shown = client.get_iopub_msg(timeout=DEADLINE)
    while shown["msg_type"] != "stream":
        shown = client.get_iopub_msg(timeout=DEADLINE)
    assert (shown["content"]["text"], shown["parent_header"]["msg_id"]) == ("it waits for a port\n", cell)
    up.wake()
    assert printed(outputs(client, cell)) == ["ran\n"]
