"""Triton's Python model that turns encoded images into a model's input; copied into repositories as ``model.py``.

It needs topk-predict (or topk-registry) in the environment of Triton's Python backend.
"""

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from topk_export.errors import ImageError
from topk_export.runtime.preprocess import Preprocess, read_image


class TritonPythonModel:
    """The interface of Triton's Python backend."""

    def initialize(self, args: dict[str, str]) -> None:
        folder = Path(args["model_repository"], args["model_version"])
        recipe = json.loads((folder / "recipe.json").read_text(encoding="utf-8"))
        self.output, self.in_graph = recipe.pop("output"), recipe.pop("in_graph")
        self.recipe = Preprocess(**recipe)

    def execute(self, requests: list[Any]) -> list[Any]:
        """Answer each request: an input batch, or an error that names the image."""
        return [self._answer(request) for request in requests]

    def _answer(self, request: Any) -> Any:
        triton = import_module("triton_python_backend_utils")  # the server brings it
        images = triton.get_input_tensor_by_name(request, "image").as_numpy().reshape(-1)
        try:
            pixels = np.stack([self.recipe.pixels(read_image(bytes(image))) for image in images])
        except ImageError as error:
            return triton.InferenceResponse(output_tensors=[], error=triton.TritonError(str(error)))
        values = pixels if self.in_graph else self.recipe.normalise(pixels)
        return triton.InferenceResponse(output_tensors=[triton.Tensor(self.output, values)])
