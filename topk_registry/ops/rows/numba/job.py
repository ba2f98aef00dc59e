"""The memory of a call of a loss of rows, as Python writes it and compiled bodies read it."""

from topk_registry.ops.cpu.threads import layout
from topk_registry.ops.targets.masses import Reduction

# a counter, then these, eight bytes each; then the operands, and the losses of the rows in double precision
_, SIZE, CLASSES, PITCH, ROWS_AT_ONCE, KERNEL, S, G, VALUE, LABEL, Q, SHARES, UNIFORM, EACH, WEIGHT, NUMBERS = range(16)
IGNORED, REDUCTION, STATUS, OPERANDS, SMOOTHING, FIELDS = range(16, 22)
LAYOUT = layout("q" * (SMOOTHING - 1) + "d")

NONE, MEAN = int(Reduction.NONE), int(Reduction.MEAN)
LABEL_OUT_OF_RANGE, NOT_FINITE = 1, 2  # what the status may say
