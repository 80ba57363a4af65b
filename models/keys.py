"""Typed reading of a configuration file, so that every complaint names file and key."""

import math
from collections.abc import Mapping, Sequence

_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}
_REQUIRED = object()


class Keys:
    """The keys of one JSON object; a missing or null key falls back to the default."""

    def __init__(self, values: Mapping[str, object], where: str):
        self._values = values
        self._where = where

    def error(self, name: str, value: object, right: str) -> ValueError:
        """The complaint about one key."""
        return ValueError(f"{self._where}: {name} must be {right}, got {value!r}")

    def has(self, *names: str) -> bool:
        """Whether one of the keys is there and not null."""
        return any(self._values.get(name) is not None for name in names)

    def _get(self, name: str, default: object, right: str) -> object:
        value = self._values.get(name)
        if value is None:
            if default is _REQUIRED:
                raise ValueError(
                    f"{self._where}: {name} is missing, it must be {right}"
                )
            return default
        return value

    def whole(
        self,
        name: str,
        default: object = _REQUIRED,
        *,
        least: int = 1,
        automatic: bool = False,
    ) -> int:
        """A whole number; where `automatic`, the word "auto" means the default."""
        right = f"a whole number >= {least}"
        value = self._get(name, default, right)
        if automatic and value == "auto":
            value = default
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.error(name, value, right)
        return value

    def number(self, name: str, default: object = _REQUIRED) -> float:
        """A number; infinity also in the form `{"__float__": "Infinity"}`."""
        value = self._get(name, default, "a number")
        return self._number(name, value)

    def _number(self, name: str, value: object) -> float:
        if isinstance(value, Mapping) and set(value) == {"__float__"}:
            value = _text_number(value["__float__"])
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.error(name, value, "a number")
        if math.isnan(value):
            raise self.error(name, value, "a number, not NaN")
        return float(value)

    def numbers(self, name: str, default: Sequence[float]) -> tuple[float, ...]:
        """A list of as many numbers as the default has."""
        value = self._get(name, default, "a list")
        if not isinstance(value, (list, tuple)) or len(value) != len(default):
            raise self.error(name, value, f"a list of {len(default)} numbers")
        return tuple(self._number(name, item) for item in value)

    def pair(self, name: str, default: tuple[float, float]) -> tuple[float, float]:
        """A list of two numbers."""
        low, high = self.numbers(name, default)
        return low, high

    def flag(self, name: str, default: bool) -> bool:
        """True or false."""
        value = self._get(name, default, "true or false")
        if not isinstance(value, bool):
            raise self.error(name, value, "true or false")
        return value

    def text(self, name: str, default: object = _REQUIRED) -> str:
        """A string."""
        value = self._get(name, default, "a string")
        if not isinstance(value, str):
            raise self.error(name, value, "a string")
        return value

    def list(self, name: str, default: object = _REQUIRED) -> list:
        """A list of anything."""
        value = self._get(name, default, "a list")
        if not isinstance(value, (list, tuple)):
            raise self.error(name, value, "a list")
        return list(value)

    def choice(self, name: str, default: object, allowed: Sequence) -> object:
        """One of a few values."""
        value = self._get(name, default, f"one of {allowed}")
        if value not in allowed:
            raise self.error(name, value, f"one of {allowed}")
        return value

    def activation(self, name: str, default: str) -> str:
        """An activation by its published name, as this package calls it."""
        value = self.text(name, default)
        if value not in _ACTIVATIONS:
            raise self.error(name, value, f"one of {', '.join(_ACTIVATIONS)}")
        return _ACTIVATIONS[value]

    def sub(self, *names: str) -> "Keys":
        """The object under the first of the keys that is there, or an empty one."""
        for name in names:
            value = self._get(name, None, "an object")
            if value is None:
                continue
            if not isinstance(value, Mapping):
                raise self.error(name, value, "an object")
            return Keys(value, f"{self._where}: {name}")
        return Keys({}, f"{self._where}: {names[0]}")


def _text_number(text: object) -> object:
    try:
        return float(text)
    except (TypeError, ValueError):
        return text
