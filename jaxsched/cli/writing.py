"""Files that commands write: refused before the work, never seen half written."""

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

from jaxsched.cli.reading import InputError


def check_target(name: str | None) -> None:
    """Refuses an output that cannot be written before the work is done."""
    if name is None:
        return
    path = Path(name)
    if path.is_dir():
        raise InputError(f"{name}: is a folder, a file is to be written")
    if not path.parent.is_dir():
        raise InputError(f"{name}: the folder {path.parent} does not exist")


def write_whole(name: str, write: Callable[[Path], None]) -> None:
    """Writes beside the target and renames: nobody ever sees half a file."""
    path = Path(name)
    partial = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        write(partial)
        os.replace(partial, path)
    except OSError as wrong:
        raise InputError(f"{name}: cannot be written: {wrong.strerror}") from wrong
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
