"""Sentences by token ids: where one ends, as the text grows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedTokenizerBase

from wakekv.errors import InputError

MARKS, CLOSERS = (".", "!", "?"), "\"'`)]}”’»"


def ends_of(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """The token ids that end a sentence: those whose text, closing quotes and brackets left off, ends in a full stop,
    an exclamation or a question mark, or holds a line break; and the special ones (SentenceKV, arXiv 2504.00970,
    section 3: punctuation ids)."""
    texts = tokenizer.batch_decode([[i] for i in range(len(tokenizer))])
    marked = (i for i, text in enumerate(texts) if "\n" in text or text.rstrip().rstrip(CLOSERS).endswith(MARKS))
    return frozenset(marked) | frozenset(tokenizer.all_special_ids)


@dataclass(frozen=True)
class Splitter:
    """When a sentence is over: at a token of `ends` once it has `least` tokens, and in any case at `longest`.

    ends: token ids, as `ends_of` gives them;  n_vocab: how many ids there are.  Pieces of n tokens are
    Splitter(n_vocab, least=n, longest=n), and single tokens n = 1.
    """

    n_vocab: int
    ends: frozenset[int] = frozenset()
    least: int = 4
    longest: int = 64

    def __post_init__(self):
        if not 1 <= self.least <= self.longest:
            raise InputError(f"least must be from 1 to longest ({self.longest}) tokens, not {self.least!r}")
        self.check(self.ends)

    def check(self, ids: Sequence[int] | frozenset[int]) -> None:
        """InputError for an id that the vocabulary has not."""
        unknown = sorted(i for i in ids if not 0 <= i < self.n_vocab)
        if unknown:
            raise InputError(
                f"token id {unknown[0]} is unknown: the vocabulary has ids from 0 to {self.n_vocab - 1}; "
                "split with the tokenizer that made the ids"
            )

    def cut(self, ids: Sequence[int], first: int = 0) -> list[int]:
        """Where the sentences of ids[first:] end, as positions after the last token; what is not over is left out."""
        self.check(ids[first:])
        found = []
        for at in range(first, len(ids)):
            n = at + 1 - first
            if n >= self.longest or (n >= self.least and ids[at] in self.ends):
                found.append(at + 1)
                first = at + 1
        return found


class Cuts:
    """The sentences of a text that grows; ends int64 [sentence]: the position after each one's last token.

    ids: the token ids so far, a list that its owner appends to.
    """

    def __init__(self, splitter: Splitter, ids: list[int]):
        self.splitter, self.ids, self.n_seen = splitter, ids, 0
        self.ends = np.zeros(0, np.int64)

    def upto(self, n: int) -> np.ndarray:
        """The ends of the sentences that are over within the first n tokens."""
        if len(self.ids) > self.n_seen:
            last = int(self.ends[-1]) if len(self.ends) else 0
            self.ends = np.concatenate([self.ends, np.array(self.splitter.cut(self.ids, last), np.int64)])
            self.n_seen = len(self.ids)
        return self.ends[: np.searchsorted(self.ends, n, "right")]
