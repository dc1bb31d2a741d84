"""Built-in models. Each is a function that returns a torch module."""

from dpexp.models.cnn import cnn
from dpexp.models.gpt import gpt
from dpexp.models.linear import linear
from dpexp.models.mlp import mlp

__all__ = ["cnn", "gpt", "linear", "mlp"]
