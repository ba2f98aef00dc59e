"""Stochastic rounding: numbers in 16 or 8 bits whose expectation is the number that was rounded.

A number between two that can be stored becomes the upper one with a probability that is its distance from the lower one
over the distance of the two. Rounding to the nearest would lose every change below half that distance: of an average
with a decay of 0.999, nearly all.
"""

import struct
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F

BLOCK = 256  # most columns of a row that share a scale
LOW = 20  # bits of a float32's mantissa that 8 bits leave out: 3 of its 23 stay
ONE = 0x3F800000  # the bits of 1.0 in float32
NEAREST = 1 << (LOW - 1)  # in the place of random bits: round to the nearest


class RandomBits:
    """32 random bits a number, the same ones for the same seed and update.

    A block of them is drawn once an update. Each use adds a number of its own to all of it: the bits of any two numbers
    are independent, at the cost of an addition.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        self.seed, self.device = seed, device
        self.generator, self.shifts = torch.Generator(device), torch.Generator()
        self.block = torch.empty(0, dtype=torch.int32, device=device)
        self.update, self.rank = 0, 0
        self.size = 0

    def begin(self, update: int, rank: int) -> None:
        """Draw from the stream of this update and rank from here on."""
        self.update, self.rank = update, rank
        stream = (self.seed * 0x9E3779B97F4A7C15 + update * 0xBF58476D1CE4E5B9 + rank * 0x94D049BB133111EB) % 2**63
        self.generator.manual_seed(stream)
        self.shifts.manual_seed(stream ^ 0x5851F42D4C957F2D)
        self.size = 0

    def like(self, x: Tensor) -> Tensor:
        """Random bits, int32, in the shape of ``x``."""
        if x.numel() > self.size:
            self.size = x.numel()
            self.block = torch.randint(
                -(2**31), 2**31, (self.size,), generator=self.generator, device=self.device, dtype=torch.int32
            )
        shift = int(torch.randint(-(2**31), 2**31, (), generator=self.shifts))
        return (self.block[: x.numel()] + shift).view(x.shape)


def to_bfloat16(x: Tensor, bits: Tensor) -> Tensor:
    """Round float32 to bfloat16 by random bits of the same shape; infinity stays, and NaN as processors make it."""
    rounded = (bits & 0xFFFF).add_(x.view(torch.int32)).bitwise_right_shift_(16)
    return rounded.to(torch.int16).view(torch.bfloat16)


def to_8_bits(x: Tensor, bits: Tensor | None, *, signed: bool) -> tuple[Tensor, Tensor]:
    """Round float32 [m, d] to 8 bits a number; returns codes [m, d] and scales [m, ceil(d / 256)].

    The scale of a block is its largest magnitude. A code c stands for a float of 3 mantissa bits, counted down from 1,
    less the smallest of them: so 0 stands for 0, and below that smallest one, 2^-15.8 with a sign and 2^-31.8 without,
    codes are evenly spaced. Without a sign only a block of zeros becomes zero: a step divides by the root of an
    average of squares, where 0 in the place of a small number would be a leap.

    Args:
        bits: int32 [m, d], at random; None rounds to the nearest.
        signed: one of the 8 bits is the sign; otherwise no number is negative.
    """
    top = 127 if signed else 255
    size = x.abs() if signed else x
    scales = _blocks(size).amax(2)
    y = size / _wide(scales.clamp(min=torch.finfo(torch.float32).tiny), x.shape[1])  # a block may be all zeros
    y.mul_(1 - least(top)).add_(least(top))
    codes = torch.full_like(y, NEAREST, dtype=torch.int32) if bits is None else bits & ((1 << LOW) - 1)
    codes.add_(y.view(torch.int32)).bitwise_right_shift_(LOW).sub_((ONE >> LOW) - top)
    if signed:
        codes |= (x.view(torch.int32) >> 24).bitwise_and_(0x80)
    else:
        codes.clamp_(min=1)
    return codes.to(torch.uint8), scales


def from_8_bits(codes: Tensor, scales: Tensor, *, signed: bool) -> Tensor:
    """The float32 numbers [m, d] that codes and scales stand for."""
    top = 127 if signed else 255
    whole = codes.to(torch.int32)
    y = (whole & top).add_((ONE >> LOW) - top).bitwise_left_shift_(LOW).view(torch.float32)
    y.sub_(least(top)).div_(1 - least(top)).mul_(_wide(scales, codes.shape[1]))
    if signed:
        y.view(torch.int32).bitwise_or_(whole.bitwise_and_(0x80).bitwise_left_shift_(24))
    return y


def scale_shape(shape: torch.Size) -> tuple[int, int]:
    """Rows and blocks of a row, of a matrix in 8 bits."""
    return shape[0], -(-shape[1] // BLOCK)


@lru_cache
def least(top: int) -> float:
    """The smallest of the floats that codes count, relative to the scale."""
    return struct.unpack("f", struct.pack("i", ONE - (top << LOW)))[0]


def _blocks(x: Tensor) -> Tensor:
    """Rows cut into blocks [m, blocks, width], the last one filled up with zeros."""
    (m, d), blocks = x.shape, -(-x.shape[1] // BLOCK)
    width = -(-d // blocks)
    return F.pad(x, (0, blocks * width - d)).view(m, blocks, width)


def _wide(scales: Tensor, d: int) -> Tensor:
    """The scale of each number [m, d]; [m, 1] where a row has one block."""
    return scales if scales.shape[1] == 1 else scales.repeat_interleave(-(-d // scales.shape[1]), 1)[:, :d]
