"""Will the next step of a request bring back much? A logistic regression on what its past steps brought back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from wakekv import stats
from wakekv.errors import InputError
from wakekv.learning.learn import logistic
from wakekv.scheduling.profile import START, Profile


@dataclass(frozen=True)
class MissModel:
    """P(the next step is heavy), see Profile. coefficients [sign + 1], the intercept last; rate: the share of heavy
    steps among the training prompts', which knows nothing."""

    coefficients: np.ndarray
    rate: float

    def probability(self, of: Profile) -> np.ndarray:
        """float [step], each from what is known before the step."""
        return 1 / (1 + np.exp(-(of.signs @ self.coefficients[:-1] + self.coefficients[-1])))


def fit(training: Sequence[Profile]) -> MissModel:
    """The model of some profiles, each prompt weighing the same. InputError for none."""
    if not training:
        raise InputError("no profile of a training prompt to fit the miss model on: artifact/split.yaml names them")
    values = np.concatenate([of.signs[START:] for of in training]).T
    y = np.concatenate([of.heavy[START:] for of in training])
    weight = np.concatenate([np.full(of.n_steps - START, 1 / (of.n_steps - START)) for of in training])
    return MissModel(logistic(values, y, weight)[0], float(np.average(y, weights=weight)))


def brier(model: MissModel, held_out: Sequence[Profile], resamples: int = stats.RESAMPLES) -> pd.DataFrame:
    """Brier scores (G. W. Brier, 1950: mean squared error of a probability, 0 is best) over some prompts' steps, each
    prompt weighing the same, with intervals over prompts. Rows: the model, the training prompts' rate alone, and the
    step before taken for the next. Columns: predictor, n, estimate, lo, hi, ...; heavy: share of heavy steps."""
    scores: dict[str, list[float]] = {"miss model": [], "rate of the training prompts": [], "as the step before": []}
    for of in held_out:
        y = of.heavy.astype(float)
        guesses = model.probability(of)[START:], np.full(of.n_steps - START, model.rate), y[START - 1 : -1]
        for name, guess in zip(scores, guesses):
            scores[name].append(float(np.mean((guess - y[START:]) ** 2)))
    share = float(np.mean([np.mean(of.heavy[START:]) for of in held_out]))
    return pd.DataFrame(
        {"predictor": name, "heavy": share, **stats.mean(of, resamples=resamples).row()} for name, of in scores.items()
    )


def reliability(model: MissModel, held_out: Sequence[Profile], bins: int = 10) -> pd.DataFrame:
    """Said against came: steps by predicted probability, in `bins` equal intervals. said, came (means), steps."""
    said = np.concatenate([model.probability(of)[START:] for of in held_out])
    came = np.concatenate([of.heavy[START:] for of in held_out])
    where = np.minimum((said * bins).astype(int), bins - 1)
    rows = [(said[where == b].mean(), came[where == b].mean(), int((where == b).sum())) for b in np.unique(where)]
    return pd.DataFrame(rows, columns=["said", "came", "steps"])
