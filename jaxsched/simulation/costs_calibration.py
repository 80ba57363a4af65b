"""Calibration: few named coefficients by least squares, and the error on other points.

Errors are taken between logarithms, so that a point of one millisecond counts as much
as one of a second, and half as much is as wrong as twice as much.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np

_STEP = 1e-4  # of a logarithm, for numerical slopes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Coefficient:
    """A number to be fitted: where to start, and what it may be."""

    name: str
    start: float
    low: float
    high: float

    def __post_init__(self):
        if not 0 < self.low <= self.start <= self.high:
            raise ValueError(
                f"{self.name}: 0 < low <= start <= high is needed, got low={self.low}, "
                f"start={self.start}, high={self.high}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fit:
    """Fitted coefficients, and how far off they are on points they have not seen.

    Errors are absolute relative errors |predicted / measured - 1|; those of
    `fit_errors` belong to the points that were fitted.
    """

    values: Mapping[str, float]
    fit_errors: np.ndarray  # f64[fitted points]
    test_errors: np.ndarray  # f64[other points]

    @property
    def median_error(self) -> float:
        """Median absolute relative error on points that were not fitted."""
        return float(np.median(self.test_errors))


def relative_errors(predicted: np.ndarray, measured: np.ndarray) -> np.ndarray:
    """|predicted / measured - 1|, f64[points]."""
    return np.abs(np.asarray(predicted) / np.asarray(measured) - 1.0)


def halves(keys: Sequence[object], seed: int = 0) -> np.ndarray:
    """A random half of some points, bool[points]; points of one key stay together.

    Tables of measurements repeat points. A point whose copy was fitted is no test, so
    copies, points with equal keys, go into the same half.
    """
    names = sorted(set(keys), key=repr)
    chosen = np.random.default_rng(seed).permutation(len(names))[: len(names) // 2]
    picked = {names[index] for index in chosen}
    return np.array([key in picked for key in keys], bool)


def fit(
    predict: Callable[[Mapping[str, float], np.ndarray], np.ndarray],
    coefficients: Sequence[Coefficient],
    measured: np.ndarray,
    fitted: np.ndarray,
    rounds: int = 60,
) -> Fit:
    """Fits coefficients on some of the points and reports the error on the others.

    Levenberg and Marquardt's method on logarithms of coefficients and of times, held
    inside of the coefficients' limits.

    Args:
      predict: times at some points (bool or index mask) for coefficients by name.
      coefficients: what may change.
      measured: times, f64[points], above 0.
      fitted: bool[points], the points to fit.
      rounds: steps at most.

    Raises:
      ValueError: if there are fewer points than coefficients.
    """
    if np.sum(fitted) < len(coefficients):
        raise ValueError(
            f"{len(coefficients)} coefficients need as many points, got "
            f"{int(np.sum(fitted))}"
        )
    low = np.log([one.low for one in coefficients])
    high = np.log([one.high for one in coefficients])
    names = [one.name for one in coefficients]

    def residuals(at: np.ndarray) -> np.ndarray:
        values = dict(zip(names, np.exp(at).tolist(), strict=True))
        return np.log(predict(values, fitted) / measured[fitted])

    at = np.log([one.start for one in coefficients])
    found, damping = residuals(at), 1e-2
    for _ in range(rounds):
        slopes = _slopes(residuals, at, found)
        normal = slopes.T @ slopes
        # A coefficient without influence must not make the system singular.
        held = damping * (np.diag(normal) + 1e-9)
        step = np.linalg.solve(normal + np.diag(held), -slopes.T @ found)
        tried = np.clip(at + step, low, high)
        other = residuals(tried)
        if other @ other < found @ found:
            at, found, damping = tried, other, max(damping / 4, 1e-9)
        else:
            damping *= 6
            if damping > 1e8:
                break
    values = dict(zip(names, np.exp(at).tolist(), strict=True))
    return Fit(
        values=values,
        fit_errors=relative_errors(predict(values, fitted), measured[fitted]),
        test_errors=relative_errors(predict(values, ~fitted), measured[~fitted]),
    )


def _slopes(
    residuals: Callable[[np.ndarray], np.ndarray], at: np.ndarray, found: np.ndarray
) -> np.ndarray:
    columns = []
    for index in range(len(at)):
        moved = at.copy()
        moved[index] += _STEP
        columns.append((residuals(moved) - found) / _STEP)
    return np.stack(columns, axis=1)
