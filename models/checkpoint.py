"""Reading safetensors files: one file, several, or shards with an index.

Nothing here knows about models. Values stay in the file until they are asked for.
"""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_DTYPES = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}


class Checkpoint:
    """The tensors of a checkpoint folder, by published name."""

    def __init__(self, folder: str | Path):
        """Opens every file and reads its header.

        Raises:
          ValueError: if there is no weight file, a shard of the index is missing, a
            file is cut short, or two files hold the same tensor.
        """
        self.folder = Path(folder)
        self._files = {}
        self._owner: dict[str, Path] = {}
        for path in _weight_files(self.folder):
            handle = _open(path)
            self._files[path] = handle
            for name in handle.keys():
                if name in self._owner:
                    first = self._owner[name].name
                    raise ValueError(f"{path}: {name} is also in {first}")
                self._owner[name] = path
        _check_index(self.folder, self._owner)

    @property
    def names(self) -> frozenset[str]:
        """Every tensor's name."""
        return frozenset(self._owner)

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape, without reading it."""
        return tuple(self._handle(name).get_slice(name).get_shape())

    def where(self, name: str) -> str:
        """`file: tensor`, to open a complaint with."""
        return f"{self._owner[name]}: {name}"

    def read(self, name: str) -> np.ndarray:
        """A tensor's values.

        Raises:
          ValueError: if it is not a float type, or holds NaN or infinity.
        """
        kind = self._handle(name).get_slice(name).get_dtype()
        if kind not in _DTYPES:
            right = ", ".join(_DTYPES)
            raise ValueError(f"{self.where(name)} must be one of {right}, got {kind}")
        try:
            values = self._handle(name).get_tensor(name)
        except (SafetensorError, OSError) as wrong:
            raise ValueError(f"{self.where(name)} cannot be read: {wrong}") from wrong
        bad = ~np.isfinite(values)
        if bad.any():
            at = [int(index) for index in np.argwhere(bad)[0]]
            raise ValueError(
                f"{self.where(name)} holds {int(bad.sum())} values that are not "
                f"finite, the first at {at}: {values[tuple(at)]}"
            )
        return values

    def _handle(self, name: str):
        return self._files[self._owner[name]]


def read_tensors(path: str | Path) -> dict[str, np.ndarray]:
    """Every tensor of one safetensors file.

    Raises:
      ValueError: if the file is missing or cut short.
    """
    handle = _open(Path(path))
    return {name: handle.get_tensor(name) for name in handle.keys()}


def _open(path: Path):
    try:
        return safe_open(str(path), framework="np")
    except FileNotFoundError as wrong:
        raise ValueError(f"{path}: no such file") from wrong
    except (SafetensorError, OSError) as wrong:
        size = path.stat().st_size
        raise ValueError(
            f"{path}: not a whole safetensors file ({size} bytes): {wrong}"
        ) from wrong


def _weight_files(folder: Path) -> list[Path]:
    single = folder / _SINGLE
    if single.is_file():
        return [single]
    index = folder / _INDEX
    if index.is_file():
        files = sorted(set(_weight_map(index).values()))
        missing = [name for name in files if not (folder / name).is_file()]
        if missing:
            raise ValueError(f"{index}: shards not in the folder: {', '.join(missing)}")
        return [folder / name for name in files]
    found = sorted(folder.glob("model*.safetensors"))
    if not found:
        raise ValueError(f"{folder}: no {_SINGLE}, {_INDEX} or model*.safetensors")
    return found


def _weight_map(index: Path) -> dict[str, str]:
    try:
        weights = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    except (OSError, ValueError, KeyError, TypeError) as wrong:
        raise ValueError(f"{index}: has no readable weight_map: {wrong}") from wrong
    if not isinstance(weights, dict):
        raise ValueError(f"{index}: weight_map must be an object, got {type(weights)}")
    for name, file in weights.items():
        if not isinstance(file, str) or Path(file).name != file:
            right = "a file name in the same folder"
            raise ValueError(f"{index}: {name} must name {right}, got {file!r}")
    return weights


def _check_index(folder: Path, owner: dict[str, Path]) -> None:
    """Each tensor of the index must lie in the shard that the index says."""
    index = folder / _INDEX
    if (folder / _SINGLE).is_file() or not index.is_file():
        return
    for name, file in _weight_map(index).items():
        if name not in owner:
            raise ValueError(f"{folder / file}: {name} is missing, the index lists it")
        if owner[name].name != file:
            right = f"in {file}, as the index says"
            raise ValueError(f"{owner[name]}: {name} must be {right}")
