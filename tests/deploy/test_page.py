"""The page of the service in a headless browser."""

import base64
import json

import onnx
import pytest

from tests.browser import chromium, complaints
from tests.deploy.files import COLORS, NAMES, png, write_file
from tests.deploy.service import PATIENCE, predict, served
from topk_export import Predictor

pytestmark = pytest.mark.slow
DROP = """
const [encoded, name, type] = arguments;
const bytes = Uint8Array.from(atob(encoded), c => c.charCodeAt(0));
const data = new DataTransfer();
data.items.add(new File([bytes], name, { type }));
for (const kind of ["dragover", "drop"])
  document.getElementById("drop").dispatchEvent(
    new DragEvent(kind, { dataTransfer: data, bubbles: true, cancelable: true }));
"""
SET = "return [...document.querySelectorAll('#set li')].map(li => li.textContent)"


@pytest.fixture(scope="module")
def browser():
    with chromium() as running:
        yield running


def wait(browser, script):
    from selenium.webdriver.support.ui import WebDriverWait

    return WebDriverWait(browser, 2 * PATIENCE, poll_frequency=0.05).until(lambda b: b.execute_script(script))


def text(browser, name):
    return browser.execute_script(f"return document.getElementById('{name}').textContent")


def drop(browser, content, name="image.png", kind="image/png"):
    browser.execute_script(DROP, base64.b64encode(content).decode(), name, kind)


def done(browser):
    wait(browser, "return document.getElementById('status').textContent.startsWith('Done')")


def put(browser, name, value):
    """Set a control and wait for the new prediction."""
    browser.execute_script(
        "const c = document.getElementById(arguments[0]); document.getElementById('status').textContent = '';"
        "c.value = arguments[1]; for (const kind of ['input', 'change']) c.dispatchEvent(new Event(kind))",
        name,
        value,
    )


def open_page(browser, port):
    browser.get(f"http://127.0.0.1:{port}/")
    wait(browser, "return document.getElementById('about').textContent.includes('classes')")


def test_the_page_shows_marginals_sets_levels_and_lists(browser, predictor):
    with served(predictor) as port:
        open_page(browser, port)
        assert text(browser, "title") == predictor.name
        assert "at least 90 %, averaged over all classes. This holds" in text(browser, "guarantee")
        image = png((170, 135, 150))  # grey, or pink with a probability of about 0.1
        drop(browser, image, "<b id=bad>photo\u202e.png")
        done(browser)
        answer = predict(port, image)[1]["predictions"][0]
        # names are text, isolated from the direction of the page
        assert browser.execute_script("return document.querySelectorAll('#rows bdi')[0].textContent") == NAMES[-1]
        assert not browser.execute_script("return document.querySelector('#rows b, #bad')")
        shown = browser.execute_script("return document.querySelector('#rows td').firstChild.textContent")
        assert float(shown.removesuffix(" %")) / 100 == pytest.approx(answer["top"][0]["probability"], abs=1e-4)
        assert browser.execute_script(SET) == [entry["name"] for entry in answer["set"]]

        put(browser, "alpha", 0)
        done(browser)
        assert text(browser, "level") == "0.5 %"
        assert "at least 99.5 %" in text(browser, "guarantee")
        for position, alpha in enumerate(predictor.metadata.alphas):
            put(browser, "alpha", position)
            done(browser)
            assert text(browser, "level") == f"{round(100 * alpha, 4):g} %"
            assert f"at least {round(100 - 100 * alpha, 4):g} %" in text(browser, "guarantee")
        put(browser, "alpha", 0)
        done(browser)
        large = predict(port, image, "?alpha=0.005")[1]["predictions"][0]
        assert large["set_size"] > answer["set_size"]
        assert browser.execute_script(SET) == [entry["name"] for entry in large["set"]]

        put(browser, "allow", "red\npink")
        done(browser)
        assert "With a class list, the guarantee holds" in text(browser, "guarantee")
        assert browser.execute_script(SET) == ["pink"]
        assert browser.execute_script("return document.querySelector('#rows th').textContent") == "pink"
        put(browser, "allow", "pnik")
        wait(browser, "return document.getElementById('status').classList.contains('wrong')")
        assert "pnik" in text(browser, "status")
        put(browser, "allow", "")
        done(browser)
        drop(browser, b"hello", "notes.txt", "text/plain")
        wait(browser, "return document.getElementById('status').classList.contains('wrong')")
        assert "format" in text(browser, "status")
        assert browser.execute_script("return document.querySelectorAll('#rows tr').length") == 0
        assert [message for message in complaints(browser) if "status of 4" not in message] == []


def test_a_forced_calibration_is_shown(browser, set_file, tmp_path):
    model = onnx.load(set_file)
    (entry,) = (entry for entry in model.metadata_props if entry.key == "sets")
    entry.value = json.dumps({**json.loads(entry.value), "forced": "calibrated with --force: <b>'red'</b>"})
    onnx.save(model, str(tmp_path / "forced.onnx"))
    with served(Predictor(tmp_path / "forced.onnx", device="cpu", threads=1)) as port:
        open_page(browser, port)
        drop(browser, png(COLORS["red"]))
        done(browser)
        assert text(browser, "forced") == "calibrated with --force: <b>'red'</b>"
        assert browser.execute_script("return document.getElementById('forced').offsetHeight") > 0


def test_the_page_says_of_which_distribution_a_number_is(browser, tmp_path):
    """A file with k = 3: the probability comes first, and the marginal is named as what it is."""
    k = 3
    file = write_file(tmp_path / "three.onnx", k=k)
    with served(Predictor(file, device="cpu", threads=1)) as port:
        open_page(browser, port)
        heads = browser.execute_script(
            "return [...document.querySelectorAll('#result thead th')].map(th => th.textContent)"
        )
        assert heads == ["Class", "Probability", f"Marginal, k = {k}"]
        assert f"in a random set of {k} classes" in text(browser, "meaning")
        image = png(COLORS["red"])
        drop(browser, image)
        done(browser)
        top = predict(port, image)[1]["predictions"][0]["top"]
        rows = cells(browser, "#rows tr")
        for row, entry in zip(rows, top, strict=True):
            assert row[0] == entry["name"]
            for shown, value in zip(row[1:], (entry["probability"], entry["marginal"]), strict=True):
                assert shown == shown_percent(value)


def cells(browser, rows):
    """The texts of the cells, without their bars."""
    script = "return [...document.querySelectorAll(arguments[0])].map("
    script += "tr => [...tr.cells].map(c => c.firstChild.textContent))"
    return browser.execute_script(script, rows)


def shown_percent(value):
    if 0 < value < 0.00005:
        return "< 0.01 %"
    return "> 99.99 %" if 0.99995 <= value < 1 else f"{100 * value:.2f} %"
