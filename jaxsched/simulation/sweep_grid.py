"""All combinations of options that have several values."""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence

MAX_POINTS = 100_000

GIVEN = (
    *("model_shape", "hardware", "memory", "tensor_parallel"),
    *("rate_scale", "sequential", "draft_tokens", "accepted_draft_tokens"),
    *("step_ms", "token_us", "context_ns"),
)
"""Options that say what there is, not what to choose: advice is given for each."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Grid:
    """Options with one value, and those with several.

    Attributes:
      fixed: option name -> value.
      varied: option name -> its values, in the order that they were given.
    """

    fixed: Mapping[str, object]
    varied: Mapping[str, Sequence[object]]

    def __post_init__(self):
        count = 1
        for name, values in self.varied.items():
            if len(set(values)) < len(values):
                raise ValueError(f"{name}: a value is given twice in {list(values)}")
            count *= len(values)
        if count > MAX_POINTS:
            raise ValueError(
                f"{count} combinations of {', '.join(self.varied)} are more than "
                f"{MAX_POINTS}: give fewer values"
            )

    @property
    def points(self) -> list[dict[str, object]]:
        """The varied options of every combination, the last one fastest."""
        names = list(self.varied)
        return [
            dict(zip(names, values, strict=True))
            for values in itertools.product(*self.varied.values())
        ]

    @property
    def chosen(self) -> list[str]:
        """Varied options that somebody has to choose."""
        return [name for name in self.varied if name not in GIVEN]

    @property
    def given(self) -> list[str]:
        """Varied options that say what there is."""
        return [name for name in self.varied if name in GIVEN]


def split_options(options: Mapping[str, Sequence[object]]) -> Grid:
    """A grid of options that each have a list of values.

    Raises:
      ValueError: naming the option, on a value that is given twice.
    """
    return Grid(
        fixed={name: v[0] for name, v in options.items() if len(v) == 1},
        varied={name: tuple(v) for name, v in options.items() if len(v) > 1},
    )


def describe(point: Mapping[str, object]) -> str:
    """`snapshot-interval 512, kv-blocks 4096`, for people."""
    shown = (f"{name.replace('_', '-')} {value_text(v)}" for name, v in point.items())
    return ", ".join(shown)


def value_text(value: object) -> str:
    """An option's value as it is shown in tables and pictures."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        return ",".join(map(str, value)) or "none"
    if isinstance(value, int) and abs(value) >= 1000:
        return f"{value:,}"
    return f"{value:g}" if isinstance(value, float) else str(value)
