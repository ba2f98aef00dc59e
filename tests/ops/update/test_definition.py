"""Rounding at random: without bias, to a neighbour, and from bits that repeat."""

import math

import pytest
import torch

from topk_registry.ops.update.definition import LOW, RandomBits, from_8_bits, to_8_bits, to_bfloat16


def test_rounding_to_bfloat16_is_unbiased():
    """The mean over all values of the random bits is the number; infinity, zero and stored numbers stay."""
    x = torch.tensor([1.0, -1.0039, 3.1415926, 1e-30, -7e20, 255.99, 1.2e-38, 3.3e38])
    bits = torch.arange(1 << 16, dtype=torch.int32)
    found = to_bfloat16(x.expand(1 << 16, -1).contiguous(), bits[:, None].expand(-1, len(x)).contiguous()).double()
    torch.testing.assert_close(found.mean(0), x.double(), rtol=1e-12, atol=0)
    for each, values in zip(x, found.T, strict=True):
        below, above = values.min(), values.max()
        assert below <= each <= above
        assert above - below <= 2.0**-7 * each.double().abs()  # in single precision a denormal number, which may be 0
    kept = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, -2.5])
    for low in (0, 0xFFFF, -1, 12345):
        torch.testing.assert_close(
            to_bfloat16(kept, torch.full_like(kept, low, dtype=torch.int32)).float(), kept, equal_nan=True
        )


@pytest.mark.parametrize("signed", [True, False])
def test_rounding_to_8_bits_is_unbiased(signed):
    """The mean over evenly spaced random bits is the number, down to the smallest numbers of a row."""
    x = torch.tensor([1.0, 0.77, 0.1, 3e-3, 1e-4, 2e-5, 1e-6, 0.0])
    x = x * torch.tensor([1.0, -1.0] * 4) if signed else x
    bits = torch.arange(0, 1 << LOW, 16, dtype=torch.int32) + 8
    many = x.expand(len(bits), -1).contiguous()
    codes, scales = to_8_bits(many * 3.7, bits[:, None].expand(many.shape).contiguous(), signed=signed)
    found = from_8_bits(codes, scales, signed=signed).double() / 3.7
    # bits come in steps of 2^-16 of the distance of two neighbours; a sum of float32 is off by 2^-23
    step = 2.0**-16 * 2.0**-3
    assert ((found.mean(0) - x.double()).abs() <= step * (x.abs() + 2.0**-15) + 2.0**-22).all()
    assert torch.equal(found[:, 0], torch.full_like(found[:, 0], found[0, 0].item()))
    assert all(len(values.unique()) <= 2 for values in found.T)


def test_8_bits_keep_rows_apart_and_averages_of_squares_above_zero():
    torch.manual_seed(0)
    for d in (1, 20, 256, 257, 600):
        x = torch.randn(5, d) * torch.logspace(-15, 15, 5)[:, None]
        x[3] = 0
        for signed, values in ((True, x), (False, x.double().square().clamp(max=1e35).float())):
            codes, scales = to_8_bits(values, None, signed=signed)
            assert codes.dtype == torch.uint8
            assert scales.shape == (5, -(-d // 256))
            found = from_8_bits(codes, scales, signed=signed)
            assert ((found - values).abs() <= 2.0**-4 * values.abs() + 2.0**-15 * values.abs().amax(1, True)).all()
            assert (found[3] == 0).all()
            again = to_8_bits(found, None, signed=signed)
            assert torch.equal(again[0], codes)
            assert torch.equal(again[1], scales)
    tiny = torch.tensor([[1.0, 1e-30, 1e-44, 0.0]])
    bits = torch.zeros(1, 4, dtype=torch.int32)
    assert (from_8_bits(*to_8_bits(tiny, bits, signed=False), signed=False) > 0).all()


def test_random_bits_repeat_and_are_even():
    """Chi-square of 256 cells of the bits that rounding uses: below its quantile of one in a million, and not 0."""
    bits, other = RandomBits(1, torch.device("cpu")), RandomBits(1, torch.device("cpu"))
    x = torch.empty(1 << 16)
    for each in (bits, other):
        each.begin(5, 0)
    drawn = [bits.like(x) for _ in range(3)]
    assert all(torch.equal(a, other.like(x)) for a in drawn)
    bits.begin(6, 0)
    drawn.append(bits.like(x))
    bits.begin(6, 1)
    drawn.append(bits.like(x))
    quantile = (
        255 + 5 * math.sqrt(2 * 255) + 5**2
    )  # a bound of Laurent and Massart's, at exp(-x) with x = 12.5 and more
    cells = len(x) / 256
    for one in drawn:
        for shift in (8, LOW - 8):
            counts = torch.bincount((one >> shift) & 0xFF, minlength=256)
            assert 1 < ((counts - cells).square() / cells).sum() < quantile
    for i, one in enumerate(drawn):  # no two streams are alike, nor shifted by a constant from draw to draw
        for two in drawn[:i]:
            pairs = ((one >> 8) & 15) * 16 + ((two >> 8) & 15)
            assert len((one - two).unique()) == 1 or len(pairs.unique()) == 256
