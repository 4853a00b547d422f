"""The report in a real Chromium: renders cleanly on phone and desktop, light and dark, and answers clicks and keys."""

from __future__ import annotations

import os
import shutil

import pytest

from terrella.launch.report import build_report
from terrella.tests.launch.report.synthetic_run import make_run

pytestmark = pytest.mark.integration

WIDTHS = {"phone": 390, "desktop": 1440}


def missing(reason: str) -> None:
    if "chromium" in os.environ.get("TERRELLA_REQUIRE", "").split(","):
        pytest.fail(f"{reason}, and TERRELLA_REQUIRE names chromium")
    pytest.skip(reason)


@pytest.fixture(scope="module")
def browser():
    path = shutil.which("chromium")
    if path is None:
        missing("chromium is not installed (make system-deps)")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        missing("the Python package playwright is not installed")
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(
            executable_path=path, args=["--no-sandbox", "--disable-gpu"], timeout=300_000
        )
        try:
            yield started
        finally:
            started.close()


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    one = make_run(folder / "one", pretrain=80, grpo=40)
    half = make_run(folder / "half", pretrain=12, grpo=5, finished=False)
    return {
        "one": build_report(one),
        "half": build_report(half),
        "both": build_report([one, half], folder / "both.html"),
    }


@pytest.fixture
def open_page(browser, reports):
    contexts = []

    def open_(name: str, width: int, scheme: str = "light"):
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(120_000)
        page.faults = []
        page.on(
            "console",
            lambda message: page.faults.append(message.text) if message.type in ("error", "warning") else None,
        )
        page.on("pageerror", lambda error: page.faults.append(str(error)))
        page.on(
            "request",
            lambda request: page.faults.append(request.url) if not request.url.startswith(("file:", "data:")) else None,
        )
        page.goto(reports[name].as_uri())
        return page

    yield open_
    for context in contexts:
        context.close()


# Relative luminance of text and of the first opaque background behind it, as WCAG defines their contrast.
CONTRAST = """() => {
  const parse = (text) => text.match(/[\\d.]+/g).map(Number);
  const linear = (v) => (v <= 10 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4);
  const light = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
  const poor = [];
  for (const node of document.querySelectorAll("body *")) {
    const own = [...node.childNodes].some((child) => child.nodeType === 3 && child.textContent.trim());
    if (!own || !node.getClientRects().length || node.closest("svg, script, noscript, .wall, .skip, option")) continue;
    let back = node;
    while (back && (parse(getComputedStyle(back).backgroundColor)[3] ?? 1) === 0) back = back.parentElement;
    const ink = light(parse(getComputedStyle(node).color));
    const paper = light(parse(getComputedStyle(back || document.body).backgroundColor));
    const ratio = (Math.max(ink, paper) + 0.05) / (Math.min(ink, paper) + 0.05);
    if (ratio < 4.5) poor.push(`${node.tagName}.${node.className} ${ratio.toFixed(2)} ${node.textContent.slice(0, 30)}`);
  }
  return poor;
}"""  # noqa: E501


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS.values(), ids=WIDTHS.keys())
@pytest.mark.parametrize("name", ["one", "half", "both"])
def test_renders_without_fault(open_page, name, width, scheme):
    page = open_page(name, width, scheme)
    assert page.locator("h1").is_visible()
    assert page.locator(".panel path.line").count() > 10
    page.evaluate("document.querySelectorAll('details').forEach((fold) => { fold.open = true; })")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate(CONTRAST) == []
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)[0] < 60")
    assert dark == (scheme == "dark")
    assert page.faults == []


@pytest.mark.parametrize("width", WIDTHS.values(), ids=WIDTHS.keys())
def test_rollouts_are_browsed_by_clicking(open_page, width):
    page = open_page("one", width)
    browser = page.locator("#browser")
    total = browser.locator(".list button").count()
    browser.locator(".list button").nth(1).click()
    assert browser.locator(".list button[aria-current=true]").count() == 1
    assert "sample 1" in browser.locator(".detail .meta").inner_text()
    steps = browser.locator("select[name=step] option").all_inner_texts()
    browser.locator("select[name=step]").select_option(steps[-1])
    assert 0 < browser.locator(".list button").count() < total
    assert f"step {steps[-1]}" in browser.locator(".detail .meta").inner_text()
    browser.locator("select[name=reward]").select_option("best")
    assert browser.locator(".detail .reward").inner_text() == "reward 1"
    assert browser.locator(".detail .cell.miss").count() == 0
    browser.locator("select[name=reward]").select_option("between")
    wrong = browser.locator(".detail .cell.wrong").count()
    assert wrong == browser.locator(".detail .cell.miss").count() > 0
    browser.locator(".detail .chips button").last.click()
    assert browser.locator(".detail .chips button").last.get_attribute("aria-current") == "true"
    browser.locator("input[name=text]").fill("no rollout says this")
    assert "No rollout fits" in browser.locator(".detail").inner_text()
    assert page.faults == []


def test_differing_cells_are_the_ones_that_differ(open_page):
    page = open_page("one", 1440)
    data = page.evaluate("JSON.parse(document.getElementById('data').textContent).rollouts")
    item = next(i for i, record in enumerate(data[:100]) if not record["turns"][0]["exact"])
    page.locator(".list button").nth(item).click()
    turn = data[item]["turns"][0]
    wrong = sum(a != b for a, b in zip(turn["prediction"], turn["truth"], strict=True))
    changed_right = sum(a == b != c for a, b, c in zip(turn["prediction"], turn["truth"], turn["before"], strict=True))
    first = page.locator(".turn").first
    assert (first.locator(".cell.miss").count(), first.locator(".cell.hit").count()) == (wrong, changed_right)


def test_keyboard_reaches_curves_and_rollouts(open_page):
    page = open_page("one", 1440)
    chart = page.locator(".panel").first
    chart.locator(":scope > svg").focus()
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    chart.locator(".at", has_text="step").wait_for()
    page.locator(".list button").first.focus()
    page.keyboard.press("ArrowDown")
    assert page.locator(".list button").nth(1).get_attribute("aria-current") == "true"
    assert page.faults == []


def test_hover_reads_the_recorded_value(open_page):
    page = open_page("one", 1440)
    chart = page.locator(".panel").first
    chart.scroll_into_view_if_needed()
    box = chart.locator(":scope > svg").bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.6, box["y"] + box["height"] / 2)
    at = chart.locator(".at", has_text=" · step ")  # a move of the pointer is told with the next frame
    at.wait_for()
    stage, step = at.inner_text().split(" · step ")
    shown = float(chart.locator(".legend b").first.inner_text())
    part = page.evaluate("JSON.parse(document.getElementById('data').textContent).panels[0].series[0].parts[0]")
    assert stage == "grpo"
    assert shown == pytest.approx(part["values"][part["steps"].index(int(step))], rel=1e-3)


def test_injected_markup_stays_text(browser, tmp_path):
    run = make_run(tmp_path / "evil", pretrain=3, grpo=3)
    attack = "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'>"
    text = (run / "rollouts" / "grpo-3.jsonl").read_text().replace("room-", attack.replace("'", ""))
    (run / "rollouts" / "grpo-3.jsonl").write_text(text)
    page = browser.new_page()
    try:
        page.set_default_timeout(120_000)
        page.goto(build_report(run).as_uri())
        page.locator("#browser select[name=step]").select_option("3")
        assert attack.replace("'", "") in page.locator(".detail h3").inner_text()
        assert page.evaluate("window.hacked") is None
    finally:
        page.close()
