"""Write the built-in data as a folder of images, ``FOLDER/train/CLASS/*.png`` and ``FOLDER/val/CLASS/*.png``."""

import sys
from pathlib import Path

from topk_registry.data.hierarchy import Hierarchy


def main(folder: str, classes: str = "10", images: str = "20") -> None:
    for split, name in (("train", "train"), ("validation", "val")):
        data = Hierarchy(split, size=int(classes) * int(images), superclasses=2, fine=int(classes) // 2)
        for i, (image, label) in enumerate(data):
            path = Path(folder, name, data.classes[label].replace(" ", "-"), f"{i:05d}.png")
            path.parent.mkdir(parents=True, exist_ok=True)
            image.save(path)
    print(f"{folder}: {classes} classes, {images} images of each in train and in val")


if __name__ == "__main__":
    main(*sys.argv[1:])
