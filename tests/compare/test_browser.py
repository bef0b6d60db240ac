"""The page of a comparison in a real browser: nothing is fetched, nothing complains, everything is drawn."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from keras_flow.compare import html
from tests.compare.test_report import APART, BAD, GOOD

#: names without a place for a break
LONG = "/a_folder/" + "of_a_name_that_is_long" * 8
WIDE = replace(
    BAD,
    program=f"{LONG}.py",
    command=f"keras-flow compare {LONG}.py",
    failures=[f"jax tp2: weights deviate by 7e-05 in {LONG!r}"],
    skipped={"tensorflow": LONG},
    environment={"system": LONG},
    runs=[BAD.runs[0], *(replace(run, weights_worst=LONG.replace("_", "")) for run in BAD.runs[1:])],
)

CHROMIUM, DRIVER = (shutil.which(name) for name in ("chromium", "chromedriver"))

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(
        not (CHROMIUM and DRIVER), reason="needs Debian's packages chromium and chromium-driver, which .ci/run installs"
    ),
    pytest.mark.xdist_group("browser"),
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    webdriver = pytest.importorskip("selenium.webdriver")
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    # no sandbox: in a container root has none
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(executable_path=DRIVER))
    yield driver
    driver.quit()


@pytest.fixture(params=[GOOD, BAD, APART, WIDE], ids=["good", "bad", "apart", "wide"])
def page(request: pytest.FixtureRequest, browser: Any, tmp_path: Path) -> Any:
    file = tmp_path / "report.html"
    file.write_text(html.page(request.param), encoding="utf-8")
    browser.get_log("performance"), browser.get_log("browser")
    show(browser, 1100, "light")
    browser.get(file.as_uri())
    return browser


def show(browser: Any, width: int, theme: str) -> None:
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    media = {"features": [{"name": "prefers-color-scheme", "value": theme}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)


def test_nothing_is_fetched_and_nothing_complains(page: Any) -> None:
    messages = [json.loads(entry["message"])["message"] for entry in page.get_log("performance")]
    asked = [
        message["params"]["request"]["url"] for message in messages if message["method"] == "Network.requestWillBeSent"
    ]
    assert [url for url in asked if not url.startswith("file:")] == []
    assert len(asked) == 1, "the page alone"
    assert page.get_log("browser") == []


def test_every_picture_is_drawn(page: Any) -> None:
    drawn = page.execute_script(
        "return [...document.querySelectorAll('svg')].map(svg => { const box = svg.getBoundingClientRect();"
        "return [svg.getAttribute('aria-label'), box.width, box.height,"
        "svg.querySelectorAll('rect,path,polyline').length] })"
    )
    assert len(drawn) == 2 + 2 + 2 + 1 + 1, (
        "losses, deviations, engines, times, and a variable under the layout that is not one device"
    )
    for name, width, height, shapes in drawn:
        assert width > 40 and height > 20 and shapes > 0, name
    cut = page.execute_script(
        "return [...document.querySelectorAll('svg text')].filter(text => { const inner = text.getBoundingClientRect();"
        "const outer = text.ownerSVGElement.getBoundingClientRect();"
        "return inner.right > outer.right + 1 || inner.left < outer.left - 1 || inner.bottom > outer.bottom + 1 })"
        ".map(text => text.textContent)"
    )
    assert cut == []


@pytest.mark.parametrize("width", [1100, 360], ids=["desk", "phone"])
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_themes_and_widths(page: Any, width: int, theme: str) -> None:
    show(page, width, theme)
    overflow = page.execute_script("return document.documentElement.scrollWidth - document.documentElement.clientWidth")
    assert overflow <= 0, "the page scrolls sideways"
    hidden = page.execute_script(
        "return [...document.querySelectorAll('td')].filter(cell => cell.getBoundingClientRect().right > innerWidth)"
        ".map(cell => cell.textContent)"
    )
    assert hidden == [], "numbers off the screen"
    ground, ink = page.execute_script(
        "const style = getComputedStyle(document.body); return [style.backgroundColor, style.color]"
    )
    brightness = [sum(map(int, colour[4:-1].split(","))) / 3 for colour in (ground, ink)]
    assert (brightness[0] > brightness[1]) == (theme == "light") and abs(brightness[0] - brightness[1]) > 150
    letters = page.execute_script("return getComputedStyle(document.querySelector('svg text')).fill")
    assert letters == ink, "pictures have the page's colour"
    smallest = page.execute_script(
        "return Math.min(...[...document.querySelectorAll('svg text')].map(text => {"
        "const svg = text.ownerSVGElement; const scale = svg.getBoundingClientRect().width / svg.viewBox.baseVal.width;"
        "return scale * parseFloat(text.getAttribute('font-size')) }))"
    )
    assert smallest >= 10, "letters can be read, also where a picture is shrunk to a phone's width"
    if folder := os.environ.get("KERAS_FLOW_SCREENSHOTS"):  # for looking at them
        page.save_screenshot(str(Path(folder) / f"report-{theme}-{width}.png"))
