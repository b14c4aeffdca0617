"""Vectors of what is away, on the fast tier, and which of them are most like a question.

Two that must agree: torch, the default, and FAISS (pip install "wakekv[faiss]").
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from wakekv.errors import InputError


class TorchIndex:
    """vectors float32 [row, unit, d], of which those of `there` bool [row, unit] can be found.

    bits: 32, or 8: each vector as whole numbers and one scale, so that it takes a quarter of the memory.
    """

    def __init__(self, rows: int, d: int, bits: int = 32, device: torch.device | str = "cpu"):
        if bits not in (8, 32):
            raise InputError(f"vectors are kept in 32 or 8 bits, not {bits!r}")
        self.bits = bits
        self.vectors = torch.zeros(rows, 0, d, device=device)
        self.there = torch.zeros(rows, 0, dtype=torch.bool, device=device)

    def grow(self, n: int) -> None:
        """Room for n units."""
        more = n - self.vectors.shape[1]
        self.vectors = torch.nn.functional.pad(self.vectors, (0, 0, 0, more))
        self.there = torch.nn.functional.pad(self.there, (0, more))

    def add(self, rows: torch.Tensor, units: torch.Tensor, vectors: torch.Tensor) -> None:
        """n units that can be found from now on: int64 [n], int64 [n], [n, d]."""
        self.vectors[rows, units] = vectors if self.bits == 32 else rounded(vectors)
        self.there[rows, units] = True

    def remove(self, rows: torch.Tensor, units: torch.Tensor) -> None:
        self.there[rows, units] = False

    def search(self, asked: torch.Tensor, n: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(products float32, units int64), both [row, question, n], best first, of asked [row, question, d] and the
        vectors; -inf and -1 where there are fewer. Ties are in no order."""
        score = torch.bmm(asked.float(), self.vectors.transpose(1, 2)).masked_fill(~self.there[:, None], -torch.inf)
        short = max(0, n - score.shape[2])
        found = torch.nn.functional.pad(score, (0, short), value=-torch.inf).topk(n)
        return found.values, torch.where(found.values > -torch.inf, found.indices, -1)

    @property
    def n_bytes(self) -> int:
        """Of the vectors that can be found, a scale (float32) each where they are whole numbers."""
        d = self.vectors.shape[2]
        return int(self.there.sum()) * (4 * d if self.bits == 32 else d + 4)


class FaissIndex:
    """The same in FAISS: a flat index of inner products for each row, with ids, so that a vector can be removed without
    the others changing their place (a plain flat index renumbers them, HNSW cannot remove)."""

    def __init__(self, rows: int, d: int, bits: int = 32, device: torch.device | str = "cpu"):
        try:
            import faiss
        except ImportError:
            raise InputError('FAISS is not installed: pip install "wakekv[faiss]", or take index="torch"') from None
        if bits != 32:
            raise InputError('the FAISS index keeps vectors in 32 bits: take index="torch" for 8')
        self.d, self.device = d, device
        self.rows = [faiss.IndexIDMap2(faiss.IndexFlatIP(d)) for _ in range(rows)]

    def grow(self, n: int) -> None:
        """Nothing to do: ids are free."""

    def add(self, rows: torch.Tensor, units: torch.Tensor, vectors: torch.Tensor) -> None:
        for row in rows.unique().tolist():
            own = rows == row
            self.rows[row].add_with_ids(vectors[own].float().cpu().numpy(), units[own].cpu().numpy())

    def remove(self, rows: torch.Tensor, units: torch.Tensor) -> None:
        for row in rows.unique().tolist():
            self.rows[row].remove_ids(units[rows == row].cpu().numpy())

    def search(self, asked: torch.Tensor, n: int) -> tuple[torch.Tensor, torch.Tensor]:
        questions = asked.float().cpu().contiguous().numpy()
        found = [own.search(some, n) for own, some in zip(self.rows, questions)]
        score, unit = (torch.stack([torch.from_numpy(x) for x in xs]).to(self.device) for xs in zip(*found))
        return score.masked_fill(unit < 0, -torch.inf), unit

    @property
    def n_bytes(self) -> int:
        return sum(own.ntotal for own in self.rows) * 4 * self.d


def rounded(vectors: torch.Tensor) -> torch.Tensor:
    """float32 vectors [..., d] as 8 bits give them back: whole numbers from -127 to 127 times a scale a vector."""
    scale = vectors.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 127
    return (vectors / scale).round() * scale


def overlap(asked: torch.Tensor, vectors: torch.Tensor, n: int) -> float:
    """The share of the n best units (or all, if there are fewer) of each question, asked [row, question, d], that are
    still among them once vectors [row, unit, d] are kept in 8 bits."""
    n = min(n, vectors.shape[1])
    exact, coarse = (torch.bmm(asked, x.transpose(1, 2)).topk(n).indices for x in (vectors, rounded(vectors)))
    same = exact[..., None] == coarse[..., None, :]
    return float(same.any(-1).float().mean())


INDEXES: dict[str, Callable[..., TorchIndex | FaissIndex]] = {"torch": TorchIndex, "faiss": FaissIndex}
