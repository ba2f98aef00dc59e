"""A folder that any web server can give out: an exported model that runs in the visitor's browser."""

import json
import shutil
import tempfile
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path

from topk_export.errors import ExportError
from topk_export.runtime.metadata import Metadata
from topk_export.runtime.ranking import check_outputs
from topk_export.runtime.session import open_session
from topk_export.runtime.weights import copy_model

PACKAGE = "onnxruntime-web"
# the runtime, and the WebAssembly that it loads
RUNTIME = ("ort.wasm.bundle.min.mjs", "ort-wasm-simd-threaded.mjs", "ort-wasm-simd-threaded.wasm")


def write_site(model: str | Path, folder: str | Path, runtime: str | Path) -> Path:
    """Write the page, the model, its metadata and the runtime into a folder, and return the page.

    Args:
        model: an exported file, calibrated or not.
        folder: what a web server is to give out; made where it does not exist.
        runtime: the folder of npm's package onnxruntime-web, or the ``node_modules`` that holds it.
    """
    session = open_session(model, device="cpu")
    metadata = Metadata.from_props(session.get_modelmeta().custom_metadata_map, str(model))
    check_outputs((output.name for output in session.get_outputs()), metadata)
    metadata.preprocess.check_known()
    dist = find_runtime(runtime)
    recipe = asdict(metadata.preprocess) | {"scale_size": metadata.preprocess.scale_size}
    values = {**asdict(metadata), **recipe}
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".site-") as staged:
        half = Path(staged)
        *weights, _ = copy_model(model, half / "model.onnx")
        values["weights"] = [file.name for file in weights]
        (half / "model.json").write_text(json.dumps(values, ensure_ascii=False), encoding="utf-8")
        for name in ("site.html", "site.mjs"):
            text = (files("topk_export.serve") / name).read_text(encoding="utf-8")
            (half / name.replace("site.html", "index.html")).write_text(text, encoding="utf-8")
        (folder / "ort").mkdir(exist_ok=True)
        for name in RUNTIME:
            shutil.copyfile(dist / name, folder / "ort" / name)
        for path in sorted(half.iterdir(), key=lambda path: path.name == "index.html"):  # the page comes last
            path.replace(folder / path.name)
    return folder / "index.html"


def find_runtime(folder: str | Path) -> Path:
    """Return the folder of onnxruntime-web's files; raise where they are not there."""
    root = Path(folder)
    places = (root, root / "dist", root / PACKAGE / "dist", root / "node_modules" / PACKAGE / "dist")
    for place in places:
        if all((place / name).is_file() for name in RUNTIME):
            return place
    raise ExportError(
        f"{root} has no {PACKAGE} with {', '.join(RUNTIME)}: npm install {PACKAGE}, and name its node_modules folder"
    )
