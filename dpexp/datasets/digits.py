"""Real images of handwritten digits, small enough for every laptop."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import torch

from dpexp.datasets.rows import Rows
from dpexp.extras import missing


def digits(flatten: bool) -> Rows:
    """1,797 images of 8x8 pixels with their digit, from scikit-learn's own copy.

    The source is the test set of the UCI ML hand-written digits data. Only the data file is read:
    importing scikit-learn would cost every rank a second.

    Args:
        flatten: inputs of shape [batch, 64] instead of [batch, 1, 8, 8].

    Returns:
        Rows of (image in 0..1 as float32, digit as int64).
    """
    spec = importlib.util.find_spec("sklearn")
    folders = (spec.submodule_search_locations or []) if spec is not None else []
    files = [Path(folder) / "datasets" / "data" / "digits.csv.gz" for folder in folders]
    found = next((file for file in files if file.exists()), None)
    if found is None:
        raise missing("dataset._target_", "dpexp.datasets.digits", "sklearn")
    table = np.loadtxt(found, delimiter=",", dtype=np.float32)
    images = torch.from_numpy(table[:, :-1] / 16.0)  # pixels are 0..16
    if not flatten:
        images = images.reshape(-1, 1, 8, 8)
    return Rows(images.contiguous(), torch.from_numpy(table[:, -1].astype(np.int64)))
