"""Built-in datasets. Each is a function that returns a map-style dataset."""

from dpexp.datasets.digits import digits
from dpexp.datasets.files import tensors
from dpexp.datasets.random import random_rows
from dpexp.datasets.rows import Rows

__all__ = ["Rows", "digits", "random_rows", "tensors"]
