"""Draw one icon with its answers, marginals and prediction set, and the page of ``topk-registry serve`` with this icon.

    python docs/draw_icons.py package        # the unpacked npm package @iconify/json

The program trains a linear classifier on features of EfficientNet-Lite0 for 100 names of icons. It exports the model,
calibrates it on icons of other designers, and predicts an icon of a third group of designers. It writes
``docs/pictures/answer.svg`` and ``docs/pictures/serve.png``. ``plugins/topk_studies`` and Chromium with its driver must
be installed.
"""

import json
import subprocess
import sys
import tempfile
import time
from html import escape
from pathlib import Path
from typing import Any

import torch
from PIL import Image

import topk_registry as tr
from topk_export import Predictor, export_onnx, load_source
from topk_export.commands.calibrate import main as calibrate
from topk_studies.data.icons import Icons, render
from topk_studies.features import SIZE, extract
from topk_studies.features import network as pretrained

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
from tests.browser import chromium  # noqa: E402
from tests.ports import free_port  # noqa: E402

PICTURES = ROOT / "docs" / "pictures"
MIN_SETS = 60  # a class is drawn in at least this many icon sets
K = 5
ALPHA = 0.1
EPOCHS = 20
LOSS = tr.create_loss("smooth_topk_svm", k=K, tau=1 / K)  # the temperature of its marginals is 1
PATIENCE = 300  # seconds until the server listens
SET = "formkit"  # icon set of test designers, with the MIT license
NAME = "share"  # name of the icon, and its true class
INK = "#7d8590"
FIRST = "#2f81f7"
SECOND = "#e5732a"


def trained(package: Path) -> tuple[torch.nn.Module, list[str]]:
    """Return EfficientNet-Lite0 with a linear classifier for icons, and the names of the classes."""
    data = Icons("train", root=package, size=SIZE, min_sets=MIN_SETS)
    model = pretrained()
    x, y = extract(model, data.images), torch.tensor(data.targets)
    mean, std = x.mean(0), x.std(0).clamp_min(1e-6)
    x = (x - mean) / std
    torch.manual_seed(0)
    linear = torch.nn.Linear(x.shape[1], len(data.classes))
    optimizer = torch.optim.AdamW(linear.parameters(), lr=3e-4, weight_decay=0.1)
    for _ in range(EPOCHS):
        for batch in torch.randperm(len(x)).split(100):
            optimizer.zero_grad()
            LOSS(linear(x[batch]), y[batch]).backward()
            optimizer.step()
    model.reset_classifier(len(data.classes))
    with torch.no_grad():
        model.classifier.weight.copy_(linear.weight / std)
        model.classifier.bias.copy_(linear.bias - linear.weight @ (mean / std))
    return model.eval(), data.classes


def calibrated(model: torch.nn.Module, classes: list[str], package: Path, folder: Path) -> Path:
    """Export the model, calibrate it on the icons of the validation split, and return the file with sets."""
    recipe = {"input_size": (3, SIZE, SIZE), "mean": (0.5,) * 3, "std": (0.5,) * 3}
    source = load_source(model, data_config={**recipe, "interpolation": "bicubic", "crop_pct": 1.0})
    file = export_onnx(source, folder / "icons.onnx", k=K, temperature=LOSS.marginal_temperature, class_names=classes)
    data = Icons("validation", root=package, size=SIZE, min_sets=MIN_SETS)
    for i, (image, label) in enumerate(data):
        place = folder / "calibration" / classes[label]
        place.mkdir(parents=True, exist_ok=True)
        image.save(place / f"{i}.png")
    if calibrate([str(file), "--data-dir", str(folder / "calibration"), "--alpha", str(ALPHA)]):
        raise SystemExit("the calibration failed")
    return folder / "icons-sets.onnx"


def drawn(icon: dict[str, Any], prediction: Any, n: int, credit: str) -> str:
    """Return an SVG file of an icon: five answers with softmax probabilities and marginals, and the prediction set."""
    width, height = icon.get("width", 16), icon.get("height", 16)
    box = (
        f'x="26" y="26" width="138" height="138" viewBox="{icon.get("left", 0)} {icon.get("top", 0)} {width} {height}"'
    )
    found = [
        f'<rect x="10" y="10" width="170" height="170" rx="12" fill="#fff" stroke="{INK}"/>',
        f'<svg {box} color="#1c1d20">{icon["body"]}</svg>',
        '<text x="355" y="22" class="head">softmax probability</text>',
        f'<text x="585" y="22" class="head">top-{K} marginal</text>',
    ]
    for i, answer in enumerate(prediction.top):
        y = 50 + 30 * i
        weight = ' class="right"' if answer.name == NAME else ""
        found.append(f'<text x="340" y="{y}" text-anchor="end"{weight}>{escape(answer.name)}</text>')
        for x, value, color in ((355, answer.probability, SECOND), (585, answer.marginal, FIRST)):
            found.append(f'<rect x="{x}" y="{y - 13}" width="{max(170 * value, 1):.1f}" height="16" fill="{color}"/>')
            found.append(f'<text x="{x + 170 * value + 6:.1f}" y="{y}">{value:.2f}</text>')
    names = ", ".join(each.name for each in prediction.set)
    lines = (
        f"Prediction set for alpha = {ALPHA}: {names}",
        f"The true class is {NAME}. The marginals of all {n} classes sum to {K}.",
        credit,
    )
    found += [f'<text x="10" y="{214 + 22 * i}">{escape(line)}</text>' for i, line in enumerate(lines)]
    style = f"<style>text{{font:14px sans-serif;fill:{INK}}}.head,.right{{font-weight:bold}}</style>"
    return f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 820 270">{style}\n' + "\n".join(found) + "\n</svg>\n"


def screenshot(model: Path, image: Path, output: Path) -> None:
    """Serve a model, upload an image on its page, and save a screenshot."""
    with chromium() as browser:
        port = free_port()  # after the browser, which also takes a free port
        server = subprocess.Popen([sys.executable, "-m", "topk_registry", "serve", str(model), "--port", str(port)])
        try:
            wait_for_page(browser, port)
            browser.set_window_size(1000, 1080)
            browser.find_element("id", "file").send_keys(str(image))
            wait(browser, "return document.getElementById('status').textContent.startsWith('Done')")
            browser.save_screenshot(str(output))
        finally:
            server.terminate()
            server.wait()
    Image.open(output).convert("RGB").quantize(64).save(output, optimize=True)


def wait_for_page(browser: Any, port: int) -> None:
    """Open the page of the server as soon as the server answers."""
    from selenium.common.exceptions import WebDriverException

    end = time.monotonic() + PATIENCE
    while True:
        try:
            browser.get(f"http://127.0.0.1:{port}/")
            if "classes" in browser.find_element("id", "about").text:
                return
        except WebDriverException:  # the server does not listen yet
            if time.monotonic() > end:
                raise
        time.sleep(1)


def wait(browser: Any, script: str) -> None:
    from selenium.webdriver.support.ui import WebDriverWait

    WebDriverWait(browser, PATIENCE).until(lambda running: running.execute_script(script))


def main(package: Path) -> None:
    """Train, calibrate and predict, and write both pictures."""
    about = json.loads((package / "collections.json").read_text())[SET]
    document = json.loads((package / "json" / f"{SET}.json").read_text())
    icon = {**{key: document[key] for key in ("width", "height") if key in document}, **document["icons"][NAME]}
    credit = f"Icon: {NAME}, {about['name']} by {about['author']['name']} ({about['license']['spdx']} license)"
    with tempfile.TemporaryDirectory() as folder:
        image = Path(folder) / f"{NAME}.png"
        Image.fromarray(render(icon, 256)).convert("RGB").save(image)
        network, classes = trained(package)
        model = calibrated(network, classes, package, Path(folder))
        (prediction,) = Predictor(model, device="cpu").predict([image])
        (PICTURES / "answer.svg").write_text(drawn(icon, prediction, len(classes), credit), encoding="utf-8")
        screenshot(model, image, PICTURES / "serve.png")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
