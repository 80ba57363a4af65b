"""Finds data that is kept outside the repository, or skips the test that needs it."""

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def shared_path(name: str) -> Path:
    """Path of a shared file; skips the calling test where the file is not there."""
    folder = Path(os.environ.get("JAXSCHED_SHARED", ROOT.parent / "shared"))
    path = folder / name
    if not path.exists():
        pytest.skip(f"{name} not found under {folder}; set JAXSCHED_SHARED to its home")
    return path
