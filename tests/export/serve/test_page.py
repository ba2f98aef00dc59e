"""The page of the service, in a headless browser: drop an image, and see marginals beside softmax."""

import base64
import io
import os

import pytest
from PIL import Image

from tests.browser import chromium, complaints, window
from tests.export.colours import COLOURS, K, png
from tests.export.serve.service import PATIENCE, predict, request, served, wait_until
from topk_export.serve.limits import Access

DROP = """
const [encoded, name, type] = arguments;
const bytes = Uint8Array.from(atob(encoded), c => c.charCodeAt(0));
const data = new DataTransfer();
data.items.add(new File([bytes], name, { type }));
const target = document.getElementById("drop");
for (const kind of ["dragover", "drop"])
  target.dispatchEvent(new DragEvent(kind, { dataTransfer: data, bubbles: true, cancelable: true }));
"""


@pytest.fixture(scope="module")
def browser():
    with chromium() as running:
        yield running


@pytest.fixture
def page(browser, service):
    browser.get(service.url)
    wait(browser, "return document.getElementById('about').textContent.includes('classes')")
    yield browser
    # nothing was blocked by the page's own policy, and no script failed
    assert [message for message in complaints(browser) if "status of 4" not in message] == []


def wait(browser, script: str):
    from selenium.webdriver.support.ui import WebDriverWait

    return WebDriverWait(browser, 2 * PATIENCE, poll_frequency=0.05).until(lambda b: b.execute_script(script))


def drop(browser, content: bytes, name: str = "image.png", kind: str = "image/png") -> None:
    browser.execute_script(DROP, base64.b64encode(content).decode(), name, kind)


def text(browser, name: str) -> str:
    return browser.execute_script(f"return document.getElementById('{name}').textContent")


def rows(browser) -> list[list[str]]:
    return browser.execute_script(
        "return [...document.querySelectorAll('#rows tr')].map(tr => [...tr.children].map(cell => cell.textContent))"
    )


def test_it_says_what_it_is(page):
    assert page.title == "Top-k probabilities"
    assert text(page, "about") == f"ColourClassifier, {len(COLOURS)} classes, on cpu."
    assert page.execute_script("return document.querySelector('h1').innerText") == f"Top-{K} probabilities"
    assert rows(page) == []


def test_a_dropped_image_shows_marginals_beside_softmax(page, service):
    drop(page, png("turquoise"), "sea.png")
    wait(page, "return document.getElementById('status').textContent.startsWith('Done')")
    _, answer = predict(service.port, png("turquoise"), query="?softmax_mass=0.9")
    shown = rows(page)
    assert [name for name, *_ in shown] == [ranked["name"] for ranked in answer["top"]]
    for (_, marginal, softmax), ranked in zip(shown, answer["top"], strict=True):
        assert number(marginal) == pytest.approx(ranked["marginal"], abs=5.1e-5)
        assert number(softmax) == pytest.approx(ranked["softmax"], abs=5.1e-5)
    bars = page.execute_script("return [...document.querySelectorAll('.marginal i')].map(bar => bar.offsetWidth)")
    assert bars == sorted(bars, reverse=True)
    assert bars[0] > 0
    assert page.execute_script("return document.getElementById('preview').naturalWidth") == 60
    assert text(page, "invite") == "sea.png"
    names = ", ".join(ranked["name"] for ranked in answer["softmax_set"])
    assert text(page, "share").endswith(f"with 90 % of the softmax: {names}")


def number(cell: str) -> float:
    return float(cell.removesuffix(" %")) / 100 if cell.endswith(" %") else float(cell)


def test_an_image_can_be_chosen_instead(page, picture):
    page.find_element("id", "file").send_keys(str(picture("brown")))
    wait(page, "return document.getElementById('status').textContent.startsWith('Done')")
    assert rows(page)[0][0] == "brown"


def test_the_wanted_share_changes_the_set(page):
    drop(page, png("grey"))
    wait(page, "return document.getElementById('status').textContent.startsWith('Done')")
    page.execute_script(
        "const c = document.getElementById('mass'); c.value = 99;"
        "for (const kind of ['input', 'change']) c.dispatchEvent(new Event(kind, { bubbles: true }))"
    )
    wait(page, "return document.getElementById('share').textContent.includes('with 99 %')")
    assert text(page, "wanted") == "99 %"


def test_a_file_that_is_no_image_is_told(page):
    drop(page, png("red"))
    wait(page, "return document.querySelectorAll('#rows tr').length > 0")
    drop(page, b"hello", "notes.txt", "text/plain")
    wait(page, "return document.getElementById('status').classList.contains('wrong')")
    assert text(page, "status").startswith("image is not an image of a known format")
    assert rows(page) == []
    assert text(page, "caption") == "No result yet"


def test_names_are_text_and_never_markup(page):
    page.execute_script(
        "show({k: 1, top: [{name: '<b id=bad>x</b>', marginal: 1, softmax: 1}], softmax_set_size: 1, "
        "softmax_set: [{name: '<i id=bad>'}], set: [{name: '<u id=bad>'}], set_size: 1})"
    )
    assert rows(page)[0][0] == "<b id=bad>x</b>"
    assert page.execute_script("return document.getElementById('bad')") is None


@pytest.mark.slow
@pytest.mark.parametrize("width", [360, 1100])
def test_nothing_is_wider_than_the_window(page, width):
    with window(page, width):
        drop(page, png("orange"))
        wait(page, "return document.getElementById('status').textContent.startsWith('Done')")
        assert page.execute_script("return document.documentElement.scrollWidth") <= width
        if folder := os.environ.get("SCREENSHOTS"):
            page.save_screenshot(f"{folder}/page-{width}.png")


def test_no_image_is_no_broken_image(page):
    shown = "return getComputedStyle(document.getElementById('preview')).display"
    assert page.execute_script(shown) == "none"
    drop(page, b"hello", "notes.txt", "text/plain")
    wait(page, "return document.getElementById('status').classList.contains('wrong')")
    wait(page, "return document.getElementById('preview').hidden")
    assert page.execute_script(shown) == "none"


def test_a_photo_is_shown_as_the_model_sees_it(page):
    exif = Image.Exif()
    exif[0x0112] = 6  # browsers turn it by 90 degrees, timm does not
    buffer = io.BytesIO()
    Image.new("RGB", (60, 30), (230, 30, 40)).save(buffer, "JPEG", exif=exif)
    drop(page, buffer.getvalue(), "photo.jpg", "image/jpeg")
    wait(page, "return document.getElementById('status').textContent.startsWith('Done')")
    width, height = page.execute_script("const p = document.getElementById('preview'); return [p.width, p.height]")
    assert width > height


def test_the_page_asks_for_the_key(browser, predictor):
    with served(predictor, Access(keys=("secret",))) as port:
        wait_until(lambda: request(port, "GET", "/readyz")[0] == 200)
        browser.get(f"http://127.0.0.1:{port}/")
        wait(browser, "return !document.getElementById('locked').hidden")
        browser.execute_script(
            "const key = document.getElementById('key'); key.value = 'secret'; key.dispatchEvent(new Event('change'))"
        )
        wait(browser, "return document.getElementById('about').textContent.includes('classes')")
        assert browser.execute_script("return document.getElementById('locked').hidden")
        drop(browser, png("blue"))
        wait(browser, "return document.getElementById('status').textContent.startsWith('Done')")
        assert rows(browser)[0][0] == "blue"
    complaints(browser)  # of the first 401
