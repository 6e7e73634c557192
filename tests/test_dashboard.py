"""The dashboard's page: alone by itself, and in a real browser where there is one (Chromium)."""

from __future__ import annotations

import base64
import hashlib
import re
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from tests.http_server import RunningServer, running_server
from tests.tenant_files import bearer, open_gate

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "chrome"))), None)
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"]
SYSTEM = {"role": "system", "content": "You are the assistant of a user in the system. " * 8}


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server(kv_memory="4MiB") as running:
        for tenant in ("acme", "globex"):
            for i in range(4):
                chat = [SYSTEM, {"role": "user", "content": f"question {i} of {tenant}, hello"}]
                running.engine.chat(chat, max_tokens=2, ignore_eos=True, tenant=tenant)
        ask = [SYSTEM, {"role": "user", "content": "what is it?"}]
        running.engine.chat(ask, max_tokens=2, ignore_eos=True)
        yield running


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("no Chromium on this machine")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield started
        started.close()


@pytest.fixture
def page(server: RunningServer, browser: Any) -> Iterator[Any]:
    """The page, loaded and filled; whatever it says on the console is a failure."""
    opened = browser.new_page(viewport={"width": 1280, "height": 1400}, color_scheme="light")
    said: list[str] = []
    opened.on("console", lambda message: said.append(f"{message.type}: {message.text}"))
    opened.on("pageerror", lambda error: said.append(str(error)))
    opened.goto(server.url + "/dashboard")
    opened.wait_for_selector(".fact")
    opened.wait_for_selector("#tree-path button")
    yield opened
    opened.close()
    assert said == []


def test_the_page_needs_nothing_from_anywhere_else(server: RunningServer) -> None:
    status, headers, text = server.ask("GET", "/dashboard")
    assert status == 200 and headers["Content-Type"].startswith("text/html")
    addresses = set(re.findall(r"https?://[^\"'\s)]+", text))
    assert addresses == {"http://www.w3.org/2000/svg"}  # a name, not a place
    assert "/*STYLE*/" not in text and "/*SCRIPT*/" not in text


def test_the_policy_allows_the_pages_own_script_and_no_other(server: RunningServer) -> None:
    _, headers, text = server.ask("GET", "/dashboard")
    policy = headers["Content-Security-Policy"]
    for tag in ("script", "style"):
        (inline,) = re.findall(f"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(inline.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy and "unsafe" not in policy


def test_the_numbers_are_those_of_the_server(server: RunningServer, page: Any) -> None:
    shown = page.inner_text("#facts")
    stats = server.ask("GET", "/v1/cache/stats?window=5m")[2]
    rows = stats["window"]["rows"]
    assert f"{sum(row['requests'] for row in rows)}\nrequests" in shown
    tenants = page.inner_text("#queue")
    assert "acme" in tenants and "globex" in tenants
    assert "acme" in page.get_attribute("#hit-chart svg", "aria-label")


def test_the_tree_is_walked_with_the_keyboard_and_says_where_one_is(page: Any) -> None:
    page.focus("#tree-box")
    page.keyboard.press("ArrowDown")
    first = page.inner_text("#tree-said")
    page.keyboard.press("ArrowRight")
    second = page.inner_text("#tree-said")
    assert first != second and "tenant" in first
    page.keyboard.press("Enter")
    assert page.locator("#tree-path button").count() == 2
    page.keyboard.press("Escape")
    assert page.locator("#tree-path button").count() == 1


def test_a_click_zooms_in_and_a_hover_tells(page: Any) -> None:
    box = page.locator("#tree").bounding_box()
    page.mouse.move(box["x"] + 20, box["y"] + 24 * 2 + 10)
    page.wait_for_selector("#tree-tip:not([hidden])")
    assert "references" in page.inner_text("#tree-tip")
    page.mouse.click(box["x"] + 20, box["y"] + 24 * 2 + 10)
    assert page.locator("#tree-path button").count() == 3
    page.locator("#tree-path button").first.click()
    assert page.locator("#tree-path button").count() == 1


def test_each_colouring_draws_another_picture(page: Any) -> None:
    pictures = set()
    for colour in ("tenant", "recency", "references"):
        page.select_option("#tree-colour", colour)
        pictures.add(page.evaluate("icicle.canvas.toDataURL()"))
    assert len(pictures) == 3


def test_ten_thousand_nodes_are_drawn_and_found(page: Any) -> None:
    drawn = page.evaluate(
        """() => {
            paused = true;
            const nodes = [{id: 0, parent: null, kind: "root", tenant: "acme", identity: "ab",
                start: 0, tokens: 0, blocks: 0, references: 0, idle_s: 1, subtree_tokens: 0,
                subtree_blocks: 0, subtree_nodes: 10000, text: null}];
            for (let id = 1; id < 10000; id++)
                nodes.push({...nodes[0], id, kind: "node", parent: (id - 1) >> 2, start: id,
                    tokens: 16 + id % 700, blocks: 1, references: id % 3, text: "node " + id});
            icicle.show({nodes});
            return [icicle.nodes.length, icicle.rows.length,
                    icicle.rows.reduce((sum, row) => sum + row.length, 0)];
        }"""
    )
    assert drawn[0] == 10001 and drawn[1] > 6 and drawn[2] > 500
    box = page.locator("#tree").bounding_box()
    page.mouse.move(box["x"] + 200, box["y"] + 24 * 3 + 10)
    assert "node" in page.inner_text("#tree-tip")


def test_a_prompt_is_explained_with_both_sides(server: RunningServer, page: Any) -> None:
    page.fill("#explain-system", SYSTEM["content"])
    page.fill("#explain-text", "what was it?")
    page.click("#explain button[type=submit]")
    page.wait_for_selector("#explained .parts")
    shown = page.inner_text("#explained")
    chat = [SYSTEM, {"role": "user", "content": "what was it?"}]
    found = server.ask("POST", "/v1/cache/explain", {"model": "tiny", "messages": chat})[2]
    assert f"{found['resident_tokens']} of {found['prompt_tokens']} tokens" in shown
    assert page.locator("#explained ins").count() == 1
    assert page.locator("#explained del").count() == 1


def test_what_is_no_json_is_told_and_html_stays_text(page: Any) -> None:
    page.select_option("#explain-kind", "json")
    page.fill("#explain-text", "{")
    page.click("#explain button[type=submit]")
    page.wait_for_selector("#explained .hint")
    assert "no JSON" in page.inner_text("#explained")
    page.evaluate("showEvent({type: '<img src=x>', tenant: '<b>t</b>', counts: {blocks: 1}})")
    assert page.locator("#events img").count() == 0
    assert "<img src=x>" in page.inner_text("#events li:first-child")


def test_dark_is_followed_and_can_be_chosen(server: RunningServer, browser: Any) -> None:
    dark = browser.new_page(color_scheme="dark")
    dark.goto(server.url + "/dashboard")
    ask = "getComputedStyle(document.body).backgroundColor"
    at_first = dark.evaluate(ask)
    dark.click("#theme")
    assert dark.evaluate("document.documentElement.dataset.theme") == "light"
    assert dark.evaluate(ask) != at_first
    dark.close()


FLAT = """(size) => {
    paused = true; // the server's own tree stays away
    const root = {id: 0, parent: null, kind: "root", tenant: "acme", identity: "ab", start: 0,
        tokens: 0, blocks: 0, references: 0, idle_s: 1, subtree_tokens: 16 * size,
        subtree_blocks: size, subtree_nodes: size + 1, text: null};
    const nodes = [root];
    for (let id = 1; id <= size; id++)
        nodes.push({...root, id, kind: "node", parent: 0, tokens: 16, blocks: 1, text: "leaf " + id,
            subtree_tokens: 16, subtree_nodes: 1});
    icicle.show({nodes});
}"""


def test_leaves_too_narrow_to_draw_are_drawn_together_and_each_is_a_few_zooms_away(
    page: Any,
) -> None:
    page.evaluate(FLAT, 10_000)
    drawn, wide, width = page.evaluate(
        "[icicle.rows[2].map((item) => item.node.subtree_nodes),"
        " icicle.rows[2].reduce((sum, item) => sum + item.width, 0), icicle.box.clientWidth]"
    )
    assert sum(drawn) == 10_000 and wide == pytest.approx(width), "none of it is left out"
    for _ in range(5):  # into the last of what is drawn below
        page.evaluate("icicle.zoom(icicle.rows[1].at(-1).node)")
        if page.evaluate("icicle.zoomed.kind") == "node":
            break
    assert "leaf" in page.inner_text("#tree-said")
    page.evaluate("icicle.zoom(icicle.top)")


def test_a_refresh_leaves_the_reader_where_it_was(page: Any) -> None:
    page.evaluate(FLAT, 50)
    page.focus("#tree-box")
    for key in ("ArrowDown", "Enter", "ArrowDown", "ArrowRight", "ArrowRight"):
        page.keyboard.press(key)
    was = page.inner_text("#tree-said")
    assert "leaf" in was
    page.evaluate(FLAT, 51)
    assert page.locator("#tree-path button").count() == 2, "still zoomed in"
    page.evaluate("icicle.say(icicle.focused)")
    assert page.inner_text("#tree-said") == was
    page.keyboard.press("Home")
    assert page.inner_text("#tree-said") != was
    page.evaluate("icicle.show({nodes: []})")
    assert page.locator("#tree-path button").count() == 1, "what is gone is left"


def test_the_path_keeps_the_keyboard(page: Any) -> None:
    page.evaluate(FLAT, 50)
    page.evaluate("icicle.zoom(icicle.rows[2][0].node)")
    page.locator("#tree-path button").nth(1).focus()
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.parentElement.id") == "tree-path"


def test_writing_on_every_colour_can_be_read(page: Any) -> None:
    worst = page.evaluate(
        """() => {
            const parts = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16) / 255);
            const light = (rgb) => rgb.map((part) => part <= 0.04045 ? part / 12.92
                : ((part + 0.055) / 1.055) ** 2.4).reduce((sum, part, i) =>
                sum + part * [0.2126, 0.7152, 0.0722][i], 0);
            let worst = 99;
            for (const card of ["#ffffff", "#1a1d23"])
                for (const fill of [...COLOURS, NEUTRAL])
                    for (const alpha of [0.12, 0.25, 0.35, 0.45, 0.6, 0.72, 0.85, 1]) {
                        const under = parts(card);
                        const mixed = light(parts(fill).map((part, i) =>
                            part * alpha + under[i] * (1 - alpha)));
                        const ink = light(parts(inkOn(fill, alpha, card)));
                        const [low, high] = [mixed, ink].sort((a, b) => a - b);
                        worst = Math.min(worst, (high + 0.05) / (low + 0.05));
                    }
            return worst;
        }"""
    )
    assert worst > 4.2


def test_a_narrow_screen_shows_it_all_without_scrolling_sideways(
    server: RunningServer, browser: Any
) -> None:
    phone = browser.new_page(viewport={"width": 400, "height": 800})
    phone.goto(server.url + "/dashboard")
    phone.wait_for_selector("#queue table")
    assert phone.evaluate("document.documentElement.scrollWidth") == 400
    assert phone.evaluate("$('queue').scrollWidth - $('queue').clientWidth") <= 0
    phone.close()


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RunningServer, Any]]:
    """A server of two tenants and an admin, and their keys."""
    tenants: dict[str, Any] = {"acme": {"weight": 3.0}, "globex": {}, "ops": {"role": "admin"}}
    gate, keys = open_gate(tmp_path_factory.mktemp("gate"), **tenants)
    with running_server(gate=gate) as running:
        for name in ("acme", "globex"):
            body = {"prompt": f"the secret of {name}, " * 4, "max_tokens": 2}
            assert (
                running.ask("POST", "/v1/completions", body, headers=bearer(keys[name]))[0] == 200
            )
        yield running, keys


def give_key(page: Any, key: str) -> None:
    page.wait_for_selector("#key-dialog[open]")
    page.fill("#key-input", key)
    page.keyboard.press("Enter")


def test_without_a_good_key_it_asks_for_one_once_and_not_the_server_again(
    keyed: tuple[RunningServer, Any], browser: Any
) -> None:
    running, keys = keyed
    page = browser.new_page()
    page.goto(running.url + "/dashboard")
    give_key(page, "rk-00000000-wrong")
    page.wait_for_selector("#trouble:not([hidden]) >> text=key")
    page.wait_for_selector("#key-dialog[open]")
    asked: list[str] = []
    page.evaluate("listening.abort()")
    page.on("request", lambda request: asked.append(request.url))
    page.evaluate("void keepAt(pollStats, 1)")
    assert page.evaluate("locked") and asked == []
    give_key(page, keys["acme"])
    page.wait_for_selector(".fact")
    page.click("#key")
    page.keyboard.press("Escape")
    assert page.evaluate("apiKey") == keys["acme"], "Escape changes nothing"
    page.close()


def test_another_key_shows_nothing_of_the_one_before(
    keyed: tuple[RunningServer, Any], browser: Any
) -> None:
    running, keys = keyed
    page = browser.new_page()
    page.goto(running.url + "/dashboard")
    give_key(page, keys["ops"])
    page.wait_for_selector("#queue .bar b")
    assert "due 75 % by weight 3" in page.inner_html("#queue")
    page.evaluate("showEvent({type: 'hit', tenant: 'globex', counts: {tokens: 1}})")
    page.click("#key")
    give_key(page, keys["acme"])
    page.wait_for_selector("#about >> text=tenant acme")
    page.wait_for_selector("#tree-path button >> text=tokens")
    shown = page.inner_text("body") + page.inner_html("#hit-chart") + page.inner_html("#queue")
    assert "globex" not in shown and ".bar" not in shown
    assert page.evaluate("icicle.nodes.some((node) => node.tenant === 'globex')") is False
    page.close()
