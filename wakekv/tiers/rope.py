"""Keys as they were before the rotation that tells their position."""

from __future__ import annotations

import torch

from wakekv.errors import InputError

FIXED = ("default", "linear", "llama3", "yarn")  # whose angles do not depend on the length of the text


class Rope:
    """The rotation of a model whose pairs are (i, i + d/2), as in Llama, Qwen, Mistral and SmolLM.

    InputError for a model without one, or one whose angles change as the text grows.
    """

    def __init__(self, model: torch.nn.Module):
        rotary = getattr(model.get_decoder(), "rotary_emb", None)
        if rotary is None or getattr(rotary, "rope_type", None) not in FIXED:
            raise InputError(
                f"the keys of a {type(model).__name__} cannot be turned back: take one with plain rotary positions "
                f"({', '.join(FIXED)})"
            )
        self.rotary = rotary

    def turned(self, x: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        """x [row, token, d] rotated to its positions, int64 [token] or [row, token]."""
        cos, sin = self._at(x, position)
        return x * cos + _half(x) * sin

    def back(self, x: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        """The inverse of `turned`, to rounding: each pair is divided by its cos^2 + sin^2, which is the square of a
        scale where the rotation has one."""
        cos, sin = self._at(x, position)
        return (x * cos - _half(x) * sin) / (cos**2 + sin**2)

    def _at(self, x: torch.Tensor, position: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = self.rotary(x, position[None] if position.ndim == 1 else position)
        if cos.shape[-1] != x.shape[-1]:
            raise InputError(f"this model rotates {cos.shape[-1]} of {x.shape[-1]} numbers of a key only")
        return cos, sin


def _half(x: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat([-b, a], -1)
