"""Puts the repository's root, where train.py and eval.py are, and this folder on the import path, and makes this
process's environment that in which the tests start programs."""

import os
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parent
sys.path[:0] = [str(TESTS), str(TESTS.parent)]

from helpers import environment

expected = environment()  # before torch is imported, which reads some of it
os.environ.clear()
os.environ.update(expected)
