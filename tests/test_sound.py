"""A log as attention gives it passes; what it cannot give is named with the head and the place."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from wakekv.errors import TraceError
from wakekv.logs.sound import check


@pytest.mark.parametrize(
    "sizes", [{}, {"n_prompt": 5, "n_steps": 6, "k": 8}, {"n_prompt": 1, "n_steps": 3, "needle": ()}]
)
def test_a_log_that_attention_gave_is_sound(make_trace, sizes):
    check(make_trace(**sizes))


def test_the_head_and_the_place_are_named(make_trace):
    made = make_trace()
    weights = made.weights.copy()
    weights[5, 7, 3] = np.nan
    with pytest.raises(TraceError, match=r"mine: head 5 has weights that are .* first at \[7, 3\]; record it again"):
        check(replace(made, weights=weights), "mine")


def test_rounding_to_half_precision_is_no_fault(make_trace):
    made = make_trace()
    even = np.full_like(made.weights, np.float16(1 / 16))
    check(replace(made, weights=even, prompt_pages=(made.prompt_pages * np.float16(1.004)).astype(np.float16)))
