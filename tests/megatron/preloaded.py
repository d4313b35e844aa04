"""What the server that ranks are forked from imports, once for all of them: see :mod:`ranks`."""

from __future__ import annotations

import gc
import importlib
from pathlib import Path

import torch

from penstock.backends.learners.megatron.cpu import no_cuda

no_cuda.install()  # before megatron-core looks for CUDA
torch.set_num_threads(1)
for path in sorted(Path(__file__).parent.glob("*_cases.py")):
    importlib.import_module(path.stem)
gc.collect()
gc.freeze()  # ranks collect after each layout, and need not look at what was imported
