"""The score as nodes of an ONNX graph, for files that carry their prediction sets."""

import numpy as np

from topk_export.calibration.score_nodes import ScoreNodes


class GapNodes(ScoreNodes):
    """Nodes of :class:`gce_loss.score.Gap`."""

    def of_classes(self, values: str, classes: str | None = None) -> str:
        # values are probabilities, of all classes or of the best ones: the best is among them either way
        best = self.add("ReduceMax", values, self.add.constant("along_classes", [1], np.int64), keepdims=1)
        return self.add("Sub", best, values)
