"""The fast tier in torch operations, for a device whose memory the compiled loops cannot reach.

Tables and the rule stay on the host and are those of the CPU; keys, digests, pools and copies are where the engine's
layers are. A ranking scores there and brings the scores over, and then waits for the pages that come: so on a GPU
score_s and stall_s are what they say, and attend_s is only the time to launch.
"""

from __future__ import annotations

import numpy as np
import torch

from wakekv.vllm.kernels import OPEN, RESERVOIR
from wakekv.vllm.tier import FastTier


class TorchTier(FastTier):
    """FastTier on whatever device its layers are."""

    dtypes = (torch.bfloat16, torch.float16, torch.float32)

    @property
    def page_shape(self) -> tuple[int, ...]:
        return 1, self.settings.page, 2 * self.d

    def words(self, x: torch.Tensor, n: int) -> torch.Tensor:
        return x.view(torch.int64).view(n, -1)

    def note_keys(self, layer: int, keys: torch.Tensor, slots: torch.Tensor) -> None:
        page, digests = self.settings.page, self.digests[layer]
        keys = keys[: len(slots)]
        real = slots >= 0
        keys, slots = keys[real], slots[real]
        block, first = slots // page, slots % page == 0
        started = block[first]
        digests[started, :, 0], digests[started, :, 1] = -torch.inf, torch.inf
        where = block[:, None, None].expand(keys.shape)
        digests[:, :, 0].scatter_reduce_(0, where, keys, "amax")
        digests[:, :, 1].scatter_reduce_(0, where, keys, "amin")

    def scored(self, layer: int, query: torch.Tensor, blocks: np.ndarray, closed: np.ndarray) -> tuple:
        nothing = np.zeros(query.shape, np.float32), np.zeros((1, self.n_kv, 2, self.d), np.float32)
        longest = int(closed.max(initial=0))
        if longest == 0:
            return *nothing, np.zeros((len(closed), self.n_kv, 0), np.float32)
        some = torch.from_numpy(blocks[:, :longest].astype(np.int64)).to(self.device)
        bounds = self.digests[layer][some].float()  # [i, page, KV head, 2, d]
        q = query.float().view(len(closed), self.n_kv, self.group, 1, self.d)
        high, low = (bounds[:, :, :, side].permute(0, 2, 3, 1) for side in range(2))  # [i, KV head, d, page]
        score = q.clamp(min=0)[:, :, :, 0] @ high + q.clamp(max=0)[:, :, :, 0] @ low
        return *nothing, score.amax(2).contiguous().cpu().numpy()

    def move(self, layer: int, n: int) -> None:
        if not n:
            return
        row, slot, _, source, place = self.moves[:n].T
        pool, first = self.pool_words[layer], self.first[layer]
        into = first[row] + slot
        for kind in (OPEN, None, RESERVOIR):  # within the pool before anything of it is overwritten
            some = source == kind if kind is not None else (source != OPEN) & (source != RESERVOIR)
            if not some.any():
                continue
            at = place[some] if kind == RESERVOIR else self.open_at[layer][row[some]]
            if kind is None:
                at = first[row[some]] + place[some]
            origin = self.reservoirs[layer] if kind == RESERVOIR else pool
            to, at = (torch.from_numpy(np.ascontiguousarray(x)).to(self.device) for x in (into[some], at))
            pool.index_copy_(0, to, origin.index_select(0, at))
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # so that the time spent waiting for pages is the copies' own

    def copy_open(self, layer: int, seqs: np.ndarray, blocks: np.ndarray) -> None:
        heads = np.arange(self.n_kv)
        into = self.open_at[layer][(seqs[:, None] * self.n_kv + heads).ravel()]
        at = (blocks[:, None] * self.n_kv + heads).ravel()
        to, at = (torch.from_numpy(x).to(self.device) for x in (into, at))
        self.pool_words[layer].index_copy_(0, to, self.reservoirs[layer].index_select(0, at))
