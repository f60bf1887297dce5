"""The chat page in headless Chromium: by mouse, by keyboard, in light, dark and on a phone.

Screenshots are left in build/chat-page.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import pytest

from serving import running

pytestmark = pytest.mark.clients
SHOTS = Path(__file__).parents[2] / "build" / "chat-page"
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
STORY = "Tell me the story of The Fox And The Lantern."


@pytest.fixture(scope="module")
def chromium():
    api = pytest.importorskip("playwright.sync_api")
    path = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    if not path:
        pytest.skip("no Chromium; set CHROMIUM to its path")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=ARGUMENTS)
        yield browser
        browser.close()


@pytest.fixture
def opened(chromium, server):
    """Opens the page; afterwards there were no errors and no requests to other hosts."""
    contexts, problems = [], []

    def open_page(url=server.url, **options):
        context = chromium.new_context(**options)
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on(
            "console",
            lambda line: (
                problems.append(line.text)
                if line.type == "error" and "Failed to load resource" not in line.text
                else None
            ),
        )
        page.on(
            "request",
            lambda one: None if one.url.startswith(url) else problems.append(one.url),
        )
        page.goto(f"{url}/")
        page.wait_for_function("document.querySelector('#model').textContent.includes('recycling')")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert not problems


def ask(page, text, tokens="60"):
    page.fill("#limit", tokens)
    page.fill("#temperature", "0")
    page.fill("#message", text)
    page.click("#send")
    done(page)


def done(page):
    page.wait_for_function("!document.querySelector('#send').disabled", timeout=60_000)


def answers(page):
    return page.locator("li.assistant .text").all_inner_texts()


def test_an_answer_with_its_figures(opened, recycler):
    page = opened()
    ask(page, STORY)
    wanted = recycler.generate([{"role": "user", "content": STORY}], max_new_tokens=60)
    assert page.locator("li.assistant .text").text_content() == wanted.text
    figures = page.inner_text("li.assistant .figures")
    mat = float(
        re.match(r"([\d.]+) tokens per step \(MAT\) · [\d.]+ tokens/s · 60 tokens$", figures)[1]
    )
    assert mat > 1
    rate = float(re.search(r"([\d.]+) tokens/s", figures)[1])
    assert 1 < rate < 5000  # not the time in which a browser reads what has come at once
    drafted = page.locator("li.assistant .draft").count()
    assert 0 < drafted < 60


def test_the_next_turn_has_the_whole_conversation(opened):
    page = opened()
    sent = []
    page.on("request", lambda one: sent.append(one.post_data) if one.method == "POST" else None)
    ask(page, STORY)
    ask(page, "And then?")
    said = [message["content"] for message in json.loads(sent[1])["messages"]]
    first = page.locator("li.assistant .text").first.text_content()
    assert said == [STORY, first, "And then?"]
    page.click("#clear")
    assert page.locator("li").count() == 0
    ask(page, "Hello")
    assert len(json.loads(sent[2])["messages"]) == 1


def test_stopping(opened, server):
    page = opened()
    page.fill("#limit", "1800")
    page.fill("#temperature", "1")
    page.fill("#message", STORY)
    page.keyboard.press("Enter")
    page.wait_for_selector("li.assistant span")
    page.keyboard.press("Escape")
    done(page)
    server.idle()
    assert answers(page)[0]
    ask(page, "Hello", "5")
    assert len(answers(page)) == 2


def test_the_keyboard_alone(opened):
    page = opened()
    assert page.evaluate("document.activeElement.id") == "message"
    page.keyboard.type("Hello")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("there")
    assert page.input_value("#message") == "Hello\nthere"
    reached = []
    for _ in range(6):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.id"))
    assert reached[:4] == ["send", "clear", "temperature", "limit"]
    page.focus("#message")
    page.keyboard.press("Enter")
    done(page)
    assert page.evaluate("document.activeElement.id") == "message"


def test_a_screen_reader(opened):
    """Every control has a name, and the answer is announced once, when it is complete."""
    page = opened()
    for control in page.locator("input, textarea, button").all():
        if control.is_visible():
            name = control.evaluate(
                "e => e.labels && e.labels.length ? e.labels[0].textContent : e.textContent"
            )
            assert name.strip()
    ask(page, STORY, "20")
    status = page.locator("[role=status]")
    assert status.text_content().startswith("Answer: ")
    assert page.get_by_role("textbox", name="Message").is_visible()
    assert page.locator("li.assistant[aria-busy]").count() == 0


def test_errors_are_shown(opened):
    page = opened()
    page.route("**/v1/chat/completions", lambda route: route.abort())
    page.fill("#message", "Hello")
    page.click("#send")
    done(page)
    assert page.locator("[role=alert]").is_visible()
    assert page.input_value("#message") == "Hello"  # can be sent again
    assert page.locator("li").count() == 0
    page.unroute("**/v1/chat/completions")
    page.click("#send")
    done(page)
    assert not page.locator("[role=alert]").is_visible()
    assert page.locator("li").count() == 2


def test_a_key(opened, recycler):
    with running(recycler, keys=["secret"]) as locked:
        page = opened(locked.url)
        page.fill("#message", "Hello")
        page.click("#send")
        done(page)
        assert "requires an API key" in page.inner_text("[role=alert]")
        page.fill("#key", "secret")
        ask(page, "Hello", "5")
        assert len(answers(page)) == 1


def test_text_of_the_model_is_no_markup(opened):
    page = opened()
    frame = {
        "choices": [],
        "token_recycling": {"drafts": [["<img src=x onerror=alert(1)>", False], ["&amp;", True]]},
    }
    body = f"data: {json.dumps(frame)}\n\ndata: [DONE]\n\n"
    page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(body=body, content_type="text/event-stream"),
    )
    ask(page, "Hello")
    assert answers(page) == ["<img src=x onerror=alert(1)>&amp;"]
    assert page.locator("li img").count() == 0


@pytest.mark.parametrize(
    "name, options",
    [
        ("light", {"color_scheme": "light", "viewport": {"width": 1100, "height": 800}}),
        ("dark", {"color_scheme": "dark", "viewport": {"width": 1100, "height": 800}}),
        (
            "phone",
            {"viewport": {"width": 360, "height": 740}, "has_touch": True, "is_mobile": True},
        ),
        ("phone-dark", {"color_scheme": "dark", "viewport": {"width": 320, "height": 568}}),
    ],
)
def test_how_it_looks(opened, name, options):
    page = opened(**options)
    ask(page, STORY, "120")
    ask(page, "How many wheels do 7 cars have?", "40")
    SHOTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=SHOTS / f"{name}.png")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert page.evaluate("document.documentElement.scrollHeight <= innerHeight")
    for control in page.locator("button").all():
        assert control.bounding_box()["height"] >= 40
    for selector in ("li.assistant .text", ".draft", ".figures", "label", "#send", "#model"):
        assert page.evaluate(CONTRAST, selector) >= 4.5, selector


# WCAG's contrast of an element's text with what is behind it.
CONTRAST = """selector => {
  const channel = c => (c /= 255) <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
  const parts = [0.2126, 0.7152, 0.0722];
  const light = rgb => parts.reduce((sum, part, at) => sum + part * channel(rgb[at]), 0);
  const parse = text => text.match(/[\\d.]+/g).map(Number);
  const element = document.querySelector(selector);
  let behind = element;
  const own = e => parse(getComputedStyle(e).backgroundColor);
  while (behind.parentElement && own(behind)[3] === 0) behind = behind.parentElement;
  const [one, other] = [light(parse(getComputedStyle(element).color)), light(own(behind))];
  return (Math.max(one, other) + 0.05) / (Math.min(one, other) + 0.05);
}"""
