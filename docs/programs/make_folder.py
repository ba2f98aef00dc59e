"""Write a small data set to try the commands: ``FOLDER/SPLIT/CLASS/*.png`` for training, validation and calibration."""

import sys
from pathlib import Path

import numpy as np
from PIL import Image

SIZE, NOISE = 32, 40  # pixels; standard deviation of the noise, in gray levels


def main(folder: str, classes: str = "10", images: str = "100") -> None:
    """Draw one random color pattern per class. Each image is a randomly shifted copy of the pattern, with noise.

    ``images`` is the number of training images per class. The other two splits have half as many images.
    """
    rng = np.random.default_rng(0)
    train, others = int(images), int(images) // 2
    for c in range(int(classes)):
        pixels = rng.integers(0, 256, (4, 4, 3), dtype=np.uint8)
        pattern = np.asarray(Image.fromarray(pixels).resize((SIZE, SIZE), Image.Resampling.BICUBIC), dtype=float)
        for split, count in (("train", train), ("validation", others), ("calibration", others)):
            place = Path(folder, split, f"class_{c}")
            place.mkdir(parents=True, exist_ok=True)
            for i in range(count):
                shifted = np.roll(pattern, rng.integers(-4, 5, 2), (0, 1))
                noisy = shifted + rng.normal(0, NOISE, shifted.shape)
                Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(place / f"{i}.png")
    print(f"{folder}: {classes} classes; images per class: train {train}, validation {others}, calibration {others}")


if __name__ == "__main__":
    main(*sys.argv[1:])
