"""The way of a user who has a browser and nothing else: logs in, works, is culled, logs in again."""

from __future__ import annotations

from types import SimpleNamespace

import nbformat
import pytest
import waiting
from desktop import FLAGS, NOTE_WAKING, PATIENCE, Tab, built_front_end, find_chromium
from hub_user import HubUser
from real_hub import running_hub


@pytest.fixture(scope="module")
def lab_hub(hub_reason, criu_binary):
    if hub_reason is not None:
        pytest.skip(hub_reason)
    if find_chromium() is None:
        pytest.skip("no Chromium on this host: `apt-get install chromium`")
    if (reason := built_front_end()) is not None:
        pytest.skip(reason)
    with running_hub(criu_binary, lab=True) as running:
        yield running


@pytest.fixture
def browser(lab_hub):
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (the extra `test`)")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=find_chromium(), headless=True, args=FLAGS)
        try:
            yield browser
        finally:
            browser.close()


def come(browser, user: HubUser, notebook: str) -> Tab:
    """Log in at the hub, which starts the server, and open the notebook."""
    context = browser.new_context(viewport={"width": 1280, "height": 800})
    context.set_default_timeout(PATIENCE)
    page = context.new_page()
    page.goto(f"{user.hub.url}/hub/login?next=/hub/spawn/{user.account.name}")
    page.fill("input#username_input", user.account.name)
    page.fill("input#password_input", user.hub.password)
    page.click("input#login_submit")
    try:
        page.wait_for_url(f"**/user/{user.account.name}/**", wait_until="commit")
    except Exception as error:
        raise AssertionError(f"{page.url}: {page.inner_text('body')}\n{user.hub.log('hub')[-8000:]}") from error
    tab = Tab(page, SimpleNamespace(server=SimpleNamespace(get=user.get)))
    page.add_init_script(NOTE_WAKING)
    tab.go(f"{user.hub.url}{user.path}lab/tree/{notebook}?reset")
    return tab


def test_same_notebook_same_variables_through_a_browser(lab_hub, browser):
    ann = HubUser(lab_hub, lab_hub.add_account("ann"))
    spec = {"display_name": "Python 3", "language": "python", "name": "python3"}
    cells = [nbformat.v4.new_code_cell(source) for source in ("x = 41\nprint('ready')", "print(x + 1)")]
    book = lab_hub.place / "morning.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": spec}), book)
    book.chmod(0o644)
    assert lab_hub.run_as(ann.account, ["cp", str(book), str(ann.account.home)]).returncode == 0

    tab = come(browser, ann, "morning.ipynb")
    tab.wait_for_phase("running")
    tab.run(0)
    tab.wait_for_output(0, "ready")
    (before,) = ann.get("api/sessions")
    tab.page.context.close()  # home for the weekend

    ann.culled()
    waiting.until(lambda: len(ann.images()) == 1)

    tab = come(browser, ann, "morning.ipynb")
    tab.wait_for_phase("checkpointed")
    tab.run(1)
    tab.wait_for_output(1, "42")
    (after,) = ann.get("api/sessions")
    assert (after["id"], after["kernel"]["id"]) == (before["id"], before["kernel"]["id"])
    assert ann.images() == []
    tab.page.context.close()
    ann.stop()
