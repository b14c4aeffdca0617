"""Numbers as small whole numbers, and products of them that never turn them back (HACK, arXiv 2502.03589).

A group of numbers along one axis shares a scale s and a lowest value m: b = s b' + m, b' a whole number of a few bits.
If both sides of a product are kept so, in the same groups along the axis that is summed over,

    sum_i a_i b_i = s_a s_b sum a'_i b'_i + s_a m_b sum a'_i + m_a s_b sum b'_i + n m_a m_b        (a group of n)

exactly (section 4.2). Where one scale does not serve the whole sum, because groups lie along the other axis, it goes
into the other side first: sum_i a_i (s_i b'_i + m_i) = sum_i (a_i s_i) b'_i + sum_i a_i m_i.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from wakekv.errors import InputError

BITS = (2, 4, 8)


class Codes(NamedTuple):
    """code [..., token, d], whole numbers, unpacked, in a float type that holds their sums exactly (float32 up to 2^24;
    64 products of 8 bits stay below 2^23); scale, low [..., group, d] or [..., token, group], in the type
    they are stored in; axis: -1 if groups lie along d, -2 along the tokens."""

    code: torch.Tensor
    scale: torch.Tensor
    low: torch.Tensor
    axis: int

    @property
    def size(self) -> int:
        """Numbers of a group."""
        return self.code.shape[self.axis] // self.scale.shape[self.axis]

    def spread(self, x: torch.Tensor) -> torch.Tensor:
        """scale or low for every number, [..., token, d], in the type of the codes."""
        return x.to(self.code.dtype).repeat_interleave(self.size, self.axis)

    def value(self) -> torch.Tensor:
        """What the codes stand for."""
        return self.code * self.spread(self.scale) + self.spread(self.low)


def coded(x: torch.Tensor, bits: int, size: int, axis: int, stored: torch.dtype = torch.float16) -> Codes:
    """x [..., token, d] in groups of `size` along an axis (-1 or -2), each between its own extremes.

    stored: the type of scales and lows. InputError for bits that are none of BITS, or groups that do not fill the axis.
    """
    if bits not in BITS:
        raise InputError(f"codes have {', '.join(map(str, BITS))} bits, not {bits!r}")
    if x.shape[axis] % size:
        raise InputError(f"{x.shape[axis]} numbers are no whole groups of {size}: take a size that divides them")
    groups = x.unflatten(axis, (-1, size))
    low = groups.amin(axis).to(stored)
    scale = ((groups.amax(axis) - low.to(x.dtype)) / (2**bits - 1)).to(stored)
    empty = Codes(x, scale, low, axis)
    step = empty.spread(scale)
    code = ((x - empty.spread(low)) / torch.where(step > 0, step, 1)).round().clamp(0, 2**bits - 1)
    return Codes(code, scale, low, axis)


def pack(code: torch.Tensor, bits: int) -> torch.Tensor:
    """uint8 [..., d * bits / 8] of whole numbers [..., d] of so many bits."""
    shift = torch.arange(0, 8, bits, dtype=torch.uint8, device=code.device)
    return (code.to(torch.uint8).unflatten(-1, (-1, len(shift))) << shift).sum(-1, dtype=torch.uint8)


def unpack(packed: torch.Tensor, bits: int, dtype: torch.dtype) -> torch.Tensor:
    """The whole numbers [..., d] again, as `dtype`."""
    table = _whole(bits, dtype, packed.device)
    return table.index_select(0, packed.flatten().int()).view(*packed.shape[:-1], -1)


@functools.cache
def _whole(bits: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """[256, numbers a byte]: what each byte holds."""
    shift = torch.arange(0, 8, bits, device=device)
    return ((torch.arange(256, device=device)[:, None] >> shift) & (2**bits - 1)).to(dtype)


def product(a: torch.Tensor, b: Codes, operand_bits: int | None) -> torch.Tensor:
    """[..., query, token]: a [..., query, d] times the numbers b [..., token, d], summed over d, on the codes.

    operand_bits: a is made codes too, in the groups of b (HACK: 8); None: it stays as it is.
    """
    if b.axis == -2:
        return _folded(a, b, operand_bits)
    n = b.scale.shape[-1]
    parts = _operand(a, n, operand_bits)
    code = b.code.unflatten(-1, (n, -1)).transpose(-2, -3).transpose(-1, -2)  # [..., group, d of it, token]
    scale, low = (
        x.to(b.code.dtype).transpose(-1, -2)[..., None, :] for x in (b.scale, b.low)
    )  # [..., group, 1, token]
    return _identity(parts, code, scale, low).sum(-3)


def mixture(p: torch.Tensor, b: Codes, operand_bits: int | None) -> torch.Tensor:
    """[..., query, d]: weights p [..., query, token] times the numbers b [..., token, d], summed over the tokens."""
    turned = Codes(b.code.transpose(-1, -2), b.scale.transpose(-1, -2), b.low.transpose(-1, -2), -3 - b.axis)
    return product(p, turned, operand_bits)


def _operand(a: torch.Tensor, n: int, bits: int | None) -> tuple[torch.Tensor, ...]:
    """a [..., query, d] as (code [..., group, query, d of it], scale, low [..., group, query, 1]) in n groups."""
    groups = a.unflatten(-1, (n, -1)).transpose(-2, -3)
    if bits is None:
        one = torch.ones_like(groups[..., :1])
        return groups, one, 0 * one
    made = coded(groups, bits, groups.shape[-1], -1, a.dtype)
    return made.code, made.scale, made.low


def _identity(a: tuple[torch.Tensor, ...], code: torch.Tensor, scale: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """The identity at the head of this file, a group at a time: [..., group, query, token]."""
    a_code, a_scale, a_low = a
    both, own, other = torch.matmul(a_code, code), a_code.sum(-1, keepdim=True), code.sum(-2, keepdim=True)
    return a_scale * scale * both + a_scale * low * own + a_low * scale * other + code.shape[-2] * a_low * low


def _folded(a: torch.Tensor, b: Codes, bits: int | None) -> torch.Tensor:
    """As product, where b's groups lie along the tokens: their scales go into a, once for each group."""
    n = b.scale.shape[-2]
    scale, low = (x.to(a.dtype)[..., None, :] for x in (b.scale, b.low))  # [..., group, 1, d]
    parts = _operand(a[..., None, :, :] * scale, 1, bits)
    code = b.code.unflatten(-2, (n, -1)).transpose(-1, -2)[..., None, :, :]  # [..., group, 1, d, token of it]
    one = torch.ones_like(code[..., :1, :1])
    found = _identity(parts, code, one, 0 * one)[..., 0, :, :]  # [..., group, query, token of it]
    found = found + torch.matmul(a[..., None, :, :], low.transpose(-1, -2))
    return found.transpose(-2, -3).flatten(-2)
