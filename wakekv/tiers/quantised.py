"""Pages kept as codes on the fast tier, read as codes, and replaced by their exact bytes where that matters.

Three tiers: codes of every chunk of tokens; the exact pages that were promoted, and the tokens after the last chunk;
the reservoir. Bytes are counted; nothing is said of speed, which hardware that multiplies codes could have.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from wakekv.cache.layer import PagedLayer
from wakekv.cache.reading import How
from wakekv.errors import InputError, lookup
from wakekv.tiers.cache import TierBooks
from wakekv.tiers.codes import BITS, Codes, coded, mixture, pack, product, unpack
from wakekv.tiers.tokens import NONE, Tokens

LAYOUTS = {  # the axis along which a scale is shared, of keys and of values: -1 along d, -2 along the tokens
    "sums": (-1, -2),  # along what attention sums over (HACK)
    "channels": (-2, -1),  # keys along the tokens, values along d (KIVI, arXiv 2402.02750)
}


@dataclass(frozen=True)
class Quantised:
    """A tier of codes.

    bits           2, 4 or 8 a number;  layout: a key of LAYOUTS;  group: tokens of a chunk, and the numbers of a group
                   along the tokens; along d a group is `group` numbers or all d, if that is less
    operand_bits   of the queries and weights that are multiplied with codes (HACK: 8); None: as they are
    promote        a page of which a token weighs this much or more is attended to exactly: its bytes come from the
                   reservoir and stay until it has not for `window` steps. None: no page does
    """

    bits: int = 4
    layout: Literal["sums", "channels"] = "sums"
    group: int = 64
    operand_bits: int | None = 8
    promote: float | None = None
    window: int = 32
    returns = True

    def __post_init__(self):
        lookup(self.layout, LAYOUTS, "layout")
        if self.bits not in BITS or self.operand_bits not in (*BITS, None):
            raise InputError(f"bits and operand_bits are one of {', '.join(map(str, BITS))}, not {self.bits!r}")

    def shelf(self, layer: PagedLayer, ids: list[int], books: TierBooks) -> QuantisedShelf:
        return QuantisedShelf(self, layer, books)


class QuantisedShelf:
    """One layer: chunks of tokens as codes, and exact tokens.

    codes     of keys and of values: packed uint8 [row, token, bytes], and scale and low as in Codes
    exact     tokens of promoted pages, and those after the last chunk
    promoted  bool [row, page] of the coded pages;  last int64 [row, page]: the last step that weighed it so much
    """

    def __init__(self, tier: Quantised, layer: PagedLayer, books: TierBooks):
        page, d = layer.sizes.page, layer.digests.shape[2] // 2
        if tier.group % page or d % min(tier.group, d):
            raise InputError(f"a group of {tier.group} must be whole pages of {page} tokens, and divide a width of {d}")
        self.tier, self.layer, self.books = tier, layer, books
        self.exact, self.n_coded, self.n_tokens, self.step = Tokens(layer), 0, 0, 0
        self.codes: list[tuple[torch.Tensor, ...]] = []
        self.last = self.exact.position
        self.promoted = self.last.bool()
        self._read = self.promoted  # bool [row, page]: this step weighs it so much
        self._catch_up()

    def _catch_up(self) -> None:
        """Take in the pages that were closed since: as they are, and as codes once they make a chunk."""
        page, group = self.layer.sizes.page, self.tier.group
        n, first = self.layer.n_closed * page, self.n_coded
        if n == self.n_tokens:
            return
        new = self.promoted.new_zeros(self.layer.n_rows, n)
        new[:, self.n_tokens :] = True
        self.exact.fetch(new)
        self.n_tokens, self.n_coded = n, n // group * group
        if self.n_coded == first:
            return
        made = []
        for x, axis in zip((self.layer.reservoir.keys, self.layer.reservoir.values), LAYOUTS[self.tier.layout]):
            some = x.flatten(1, 2)[:, first : self.n_coded].float().to(self.last.device)
            one = coded(some, self.tier.bits, group if axis == -2 else min(group, x.shape[-1]), axis)
            made.append((pack(one.code, self.tier.bits), one.scale, one.low))
        self.codes = [tuple(torch.cat(x, 1) for x in zip(old, more)) for old, more in zip(self.codes, made)] or made
        pad = (0, (self.n_coded - first) // page)
        self.promoted, self._read, self.last = (
            torch.nn.functional.pad(x, pad) for x in (self.promoted, self._read, self.last)
        )
        self._keep()

    def _keep(self) -> None:
        """Give up the exact tokens of pages that are codes and not promoted."""
        coded_page = torch.nn.functional.pad(~self.promoted, (0, 1))  # False beyond the last chunk
        page = (self.exact.position.clamp(min=0) // self.layer.sizes.page).clamp(max=coded_page.shape[1] - 1)
        self.exact.keep(~coded_page.gather(1, page))

    def read(self) -> list[Codes]:
        """The codes of keys and of values, unpacked."""
        return [
            Codes(unpack(packed, self.tier.bits, torch.float32), scale, low, axis)
            for (packed, scale, low), axis in zip(self.codes, LAYOUTS[self.tier.layout])
        ]

    def attend(self, query: torch.Tensor, how: How) -> torch.Tensor:
        self._catch_up()
        if not self.n_coded:
            return self.exact.attend(query, how)[0]
        keys, values = self.read()
        coarse = how.capped(product(query.float(), keys, self.tier.operand_bits).mul_(how.scaling))
        weight, place = self._weights(query, coarse, how)
        if self.tier.promote is not None:
            self._read = (
                weight[..., : self.n_coded].unflatten(-1, (-1, self.layer.sizes.page)).amax((1, 3)) >= self.tier.promote
            )
            new = self._read & ~self.promoted
            if bool(new.any()):
                self._promote(new)
                weight, place = self._weights(query, coarse, how)
        away = ~self.promoted.repeat_interleave(self.layer.sizes.page, 1)
        out = mixture(weight[..., : self.n_coded] * away[:, None], values, self.tier.operand_bits)
        return out.to(query.dtype) + self.exact.mixture(weight.gather(2, place))

    def _weights(self, query: torch.Tensor, coarse: torch.Tensor, how: How) -> tuple[torch.Tensor, torch.Tensor]:
        """(weight float32 [row, query, position + 1], place int64 [row, query, token]): softmax of `coarse`, the logits
        on codes, with the exact ones in their place where there are some; `place` is where those are. The last position
        is nobody's."""
        exact, n = self.exact.scores(query, how), self.n_tokens + self.layer.n_open + 1
        own = torch.arange(self.n_tokens, n, device=exact.device).expand(len(exact), -1)
        place = torch.cat([torch.where(self.exact.position == NONE, n, self.exact.position), own], 1)
        place = place[:, None].expand(-1, query.shape[1], -1)
        logits = torch.nn.functional.pad(coarse, (0, n + 1 - self.n_coded), value=-torch.inf)
        logits = logits.scatter(2, place, exact)
        logits[..., n] = -torch.inf
        return torch.softmax(logits, -1), place

    def _promote(self, new: torch.Tensor) -> None:
        """Bring the exact bytes of pages, bool [row, page]."""
        self.promoted |= new
        with self.books.timing("stall_s"):
            self.books.fetched_bytes += self.exact.fetch(new.repeat_interleave(self.layer.sizes.page, 1))
        self.books.fetched += int(new.sum())

    def settle(self) -> None:
        self.last[self._read] = self.step
        leave = self.promoted & (self.step - self.last >= self.tier.window)
        self.step += 1
        if bool(leave.any()):
            self.promoted &= ~leave
            self._keep()

    def tiers(self) -> dict[str, int]:
        codes = sum(x.numel() * x.element_size() for parts in self.codes for x in parts)
        tables = sum(x.numel() * x.element_size() for x in (self.promoted, self.last, self.exact.position))
        return {"fast": codes + self.exact.n_bytes, "codes": codes, "tables": tables}
