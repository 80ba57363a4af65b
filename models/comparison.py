"""Differences between arrays, gathered into one verdict a check."""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class Check:
    """One comparison."""

    name: str
    bitwise: bool
    passed: bool
    num_compared: int
    num_wrong: int
    max_difference: float
    where: str  # of the largest difference


class Comparison:
    """Gathers the differences of one check over several arrays."""

    def __init__(self, name: str, tolerance: tuple[float, float] | None):
        self.name, self.tolerance = name, tolerance
        self._compared = self._wrong = 0
        self._largest, self._where = 0.0, ""

    def add(self, where: str, got: np.ndarray, right: np.ndarray) -> None:
        """Compares two arrays; a tolerance of None asks for equal bits."""
        if got.shape != right.shape:
            raise ValueError(f"{where}: shaped {got.shape}, expected {right.shape}")
        same = _bits(got) == _bits(right)
        got, right = got.astype(np.float64), right.astype(np.float64)
        gaps = np.abs(got - right)
        gaps = np.where(np.isnan(gaps), np.inf, gaps)
        if self.tolerance is None:
            wrong = ~same
        else:
            atol, rtol = self.tolerance
            wrong = ~(gaps <= atol + rtol * np.abs(right))
        self._compared += gaps.size
        self._wrong += int(wrong.sum())
        if gaps.size and (gaps.max() > self._largest or not self._where):
            self._largest = float(gaps.max())
            at = np.unravel_index(int(gaps.argmax()), gaps.shape)
            self._where = f"{where} {[int(index) for index in at]}"

    def check(self) -> Check:
        """The finished check."""
        return Check(
            name=self.name,
            bitwise=self.tolerance is None,
            passed=self._wrong == 0 and self._compared > 0,
            num_compared=self._compared,
            num_wrong=self._wrong,
            max_difference=self._largest,
            where=self._where if self._largest else "",
        )


def _bits(values: np.ndarray) -> np.ndarray:
    """The values as whole numbers, so that 0.0 and -0.0 differ."""
    return np.ascontiguousarray(values).view(f"u{values.dtype.itemsize}")
