"""Built-in datasets. Each is a function that returns a map-style dataset."""

from dpexp.datasets.digits import digits
from dpexp.datasets.files import tensors
from dpexp.datasets.hub import hf
from dpexp.datasets.random import random_rows
from dpexp.datasets.rows import Rows
from dpexp.datasets.synthetic import images, tokens
from dpexp.datasets.vision import cifar10, image_folder

__all__ = [
    "Rows",
    "cifar10",
    "digits",
    "hf",
    "image_folder",
    "images",
    "random_rows",
    "tensors",
    "tokens",
]
