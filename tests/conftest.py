"""Puts the repository's root, where train.py and eval.py are, and this folder on the import path, and makes this
process's environment that in which the tests start programs."""

import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # as launchers set it; before torch reads it

TESTS = Path(__file__).resolve().parent
for folder in (TESTS, TESTS.parent):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

from helpers import environment

kept = environment()
os.environ.clear()
os.environ.update(kept)
