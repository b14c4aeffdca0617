"""Keys and values that are alike, kept once (SpindleKV, arXiv 2507.06517): the paper's codebook, and the merge that the
rule is retold as. Both compare keys before their rotation, where those of one word at two places are alike."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from wakekv.cache.layer import PagedLayer
from wakekv.cache.reading import How
from wakekv.tiers.cache import Shelf, Tier, TierBooks
from wakekv.tiers.rope import Rope


@dataclass(frozen=True)
class Codebook:
    """Each vector is a length times one of a head's directions: the nearest it has, if their cosine is at least `keys`
    (of values: `values`), else a new one, its own. Nothing is averaged. In every layer."""

    rope: Rope
    keys: float = 0.98
    values: float = 0.95
    returns = True

    def shelf(self, layer: PagedLayer, ids: list[int], books: TierBooks) -> Shelf:
        return CodebookShelf(self, layer)


@dataclass(frozen=True)
class Merged:
    """Tokens whose keys have a cosine of at least `alike` are one entry: the mean of their keys, turned to the place of
    the newest of them, the mean of their values, and how many they are, which counts in the softmax."""

    rope: Rope
    alike: float = 0.98
    returns = True

    def shelf(self, layer: PagedLayer, ids: list[int], books: TierBooks) -> Shelf:
        return MergedShelf(self, layer)


@dataclass(frozen=True)
class Layered:
    """One tier for the first n_shallow layers, another for the rest."""

    shallow: Tier
    deep: Tier
    n_shallow: int

    @property
    def returns(self) -> bool:
        return self.shallow.returns and self.deep.returns

    def shelf(self, layer: PagedLayer, ids: list[int], books: TierBooks) -> Shelf:
        return (self.shallow if layer.index < self.n_shallow else self.deep).shelf(layer, ids, books)


class Directions:
    """Unit vectors [row, entry, d], n of which are in use in each row, int64 [row]."""

    def __init__(self, rows: int, d: int, device: torch.device | str = "cpu"):
        self.unit = torch.zeros(rows, 16, d, device=device)
        self.n = torch.zeros(rows, dtype=torch.int64, device=device)

    def place(self, unit: torch.Tensor, least: float) -> torch.Tensor:
        """The entry of one vector a row, [row, d]: the nearest with a cosine of `least` or more, or a new one."""
        rows = torch.arange(len(unit), device=unit.device)
        cosine = torch.bmm(self.unit, unit[..., None])[..., 0]
        cosine.masked_fill_(torch.arange(cosine.shape[1], device=unit.device) >= self.n[:, None], -torch.inf)
        best, entry = cosine.max(1)
        new = best < least
        entry = torch.where(new, self.n, entry)
        if int(self.n.max()) == self.unit.shape[1]:
            self.unit = torch.nn.functional.pad(self.unit, (0, 0, 0, self.unit.shape[1]))
        self.unit[rows[new], entry[new]] = unit[new]
        self.n += new
        return entry


class MergingShelf:
    """What both have in common: closed tokens are taken in one by one, keys turned back, and what stands for them is
    attended to beside the open page."""

    def __init__(self, layer: PagedLayer, rope: Rope):
        self.layer, self.rope, self.n_tokens = layer, rope, 0
        self.d, self.device = tuple(x.shape[-1] for x in layer.pool.open), layer.digests.device

    def attend(self, query: torch.Tensor, how: How) -> torch.Tensor:
        n = self.layer.n_closed * self.layer.sizes.page
        if n > self.n_tokens:
            held = (self.layer.reservoir.keys, self.layer.reservoir.values)
            keys, values = (x.flatten(1, 2)[:, self.n_tokens : n].float().to(self.device) for x in held)
            self.take(self.rope.back(keys, torch.arange(self.n_tokens, n, device=self.device)), values)
            self.n_tokens = n
        keys, values, bias = self.stand()
        open_keys, open_values = (x[:, : self.layer.n_open + 1] for x in self.layer.pool.open)
        scores = how.scores(query, torch.cat([keys.to(query.dtype), open_keys], 1))
        scores += torch.nn.functional.pad(bias, (0, open_keys.shape[1]))[:, None]
        values = torch.cat([values.to(query.dtype), open_values], 1)
        return torch.bmm(torch.softmax(scores, -1).to(values.dtype), values)

    def take(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Closed tokens, keys before their rotation, float32 [row, token, d]."""
        raise NotImplementedError

    def stand(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Keys, rotated, and values [row, entry, d] that stand for all taken in, and what to add to their logits,
        float32 [row, entry]."""
        raise NotImplementedError

    def settle(self) -> None:
        """Nothing leaves."""


class CodebookShelf(MergingShelf):
    """books: directions of keys and of values;  entry int32, length float32 [row, token] of each."""

    def __init__(self, tier: Codebook, layer: PagedLayer):
        super().__init__(layer, tier.rope)
        self.least = tier.keys, tier.values
        self.books = [Directions(layer.n_rows, d, self.device) for d in self.d]
        self.entry = [torch.zeros(layer.n_rows, 0, dtype=torch.int32, device=self.device) for _ in self.d]
        self.length = [torch.zeros(layer.n_rows, 0, device=self.device) for _ in self.d]

    def take(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        for i, x in enumerate((keys, values)):
            length = x.norm(dim=-1)
            unit = x / length.clamp(min=1e-12)[..., None]
            entry = [self.books[i].place(unit[:, t], self.least[i]) for t in range(x.shape[1])]
            self.entry[i] = torch.cat([self.entry[i], torch.stack(entry, 1).int()], 1)
            self.length[i] = torch.cat([self.length[i], length], 1)

    def stand(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        keys, values = (
            book.unit.gather(1, entry.long()[..., None].expand(-1, -1, d)) * length[..., None]
            for book, entry, length, d in zip(self.books, self.entry, self.length, self.d)
        )
        return (
            self.rope.turned(keys, torch.arange(self.n_tokens, device=self.device)),
            values,
            torch.zeros_like(self.length[0]),
        )

    def shares(self) -> list[float]:
        """Directions a token, of keys and of values: 1 where nothing is shared."""
        return [float(book.n.sum()) / max(1, entry.numel()) for book, entry in zip(self.books, self.entry)]

    def tiers(self) -> dict[str, int]:
        own = sum(int(book.n.sum()) * 4 * d for book, d in zip(self.books, self.d))
        each = sum(x.numel() * x.element_size() for x in (*self.entry, *self.length))
        return {"fast": own + each, "codes": own + each}


class MergedShelf(MergingShelf):
    """direction: of each entry's mean key;  keys, values float32 [row, entry, d]: sums over its tokens;  count,
    newest int64 [row, entry]."""

    def __init__(self, tier: Merged, layer: PagedLayer):
        super().__init__(layer, tier.rope)
        self.alike, self.direction = tier.alike, Directions(layer.n_rows, self.d[0], self.device)
        self.keys, self.values = (self.direction.unit.new_zeros(layer.n_rows, 0, d) for d in self.d)
        self.count, self.newest = (self.direction.n.new_zeros(layer.n_rows, 0) for _ in self.d)

    def take(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        rows = torch.arange(self.layer.n_rows, device=self.device)
        for t in range(keys.shape[1]):
            entry = self.direction.place(torch.nn.functional.normalize(keys[:, t], dim=-1), self.alike)
            more = self.direction.unit.shape[1] - self.count.shape[1]
            self.keys, self.values = (torch.nn.functional.pad(x, (0, 0, 0, more)) for x in (self.keys, self.values))
            self.count, self.newest = (torch.nn.functional.pad(x, (0, more)) for x in (self.count, self.newest))
            at = rows, entry
            self.keys[at] += keys[:, t]
            self.values[at] += values[:, t]
            self.count[at] += 1
            self.newest[at] = self.n_tokens + t
            self.direction.unit[at] = torch.nn.functional.normalize(self.keys[at], dim=-1)

    def stand(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        n = self.count[..., None].clamp(min=1)
        return self.rope.turned(self.keys / n, self.newest), self.values / n, self.count.log()

    def shares(self) -> list[float]:
        """Entries a token."""
        return [float(self.direction.n.sum()) / max(1, self.layer.n_rows * self.n_tokens)] * 2

    def tiers(self) -> dict[str, int]:
        n = int(self.direction.n.sum())
        return {"fast": n * (4 * sum(self.d) + 8), "codes": n * (4 * sum(self.d) + 8)}
