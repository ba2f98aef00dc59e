"""Predict the classes of images on a Ray cluster, and write the predictions to Parquet files.

    python ray_score.py model.onnx /data/images /data/predictions --workers 8 --alpha 0.05

Each worker opens the model once. All machines must be able to read the paths, for example on a shared disk. If the
images are in an object store, use ``ray.data.read_binary_files`` in place of ``ray.data.from_items``, and pass the
bytes of the images to the predictor.
"""

import argparse
from typing import Any

import numpy as np
import ray

from topk_export import Predictor
from topk_export.predict import find_images


class Worker:
    """Ray worker that predicts the images at the paths ``batch["item"]``, and returns one list per Parquet column."""

    def __init__(self, model: str, options: dict[str, Any]) -> None:
        self.predictor, self.options = Predictor(model, threads=1), options

    def __call__(self, batch: dict[str, np.ndarray]) -> dict[str, list[Any]]:
        rows = self.predictor.predict(batch["item"].tolist(), on_error="yield", **self.options)
        failed = [isinstance(row, Exception) for row in rows]
        top = [[] if bad else list(row.top) for bad, row in zip(failed, rows, strict=True)]
        sets = [None if bad else row.set for bad, row in zip(failed, rows, strict=True)]
        return {
            "file": batch["item"].tolist(),
            "error": [str(row) if bad else "" for bad, row in zip(failed, rows, strict=True)],
            "classes": [[entry.name for entry in entries] for entries in top],
            "marginals": [[float(entry.marginal or 0) for entry in entries] for entries in top],
            "probabilities": [[entry.probability for entry in entries] for entries in top],
            "set": [[entry.name for entry in members or ()] for members in sets],
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="ONNX file that topk-registry export wrote")
    parser.add_argument("images", help="folder of images, or a text file (.txt) with one path per line")
    parser.add_argument("output", help="folder for the Parquet files")
    parser.add_argument("--workers", type=int, default=2, help="number of workers (default: 2)")
    parser.add_argument("--batch-size", type=int, default=32, help="images per run of the model (default: 32)")
    parser.add_argument("--alpha", type=float, help="probability that a prediction set misses the true class")
    args = parser.parse_args()
    options: dict[str, Any] = {} if args.alpha is None else {"alpha": args.alpha}
    predictions = ray.data.from_items(find_images([args.images])).map_batches(
        Worker,
        fn_constructor_args=(args.model, options),
        compute=ray.data.ActorPoolStrategy(size=args.workers),
        batch_size=args.batch_size,
    )
    predictions.write_parquet(args.output)


if __name__ == "__main__":
    main()
