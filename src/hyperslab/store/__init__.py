"""The memory of the ranks, and the loader that feeds a model from it."""

from hyperslab.store.loader import Loader as Loader
from hyperslab.store.normalize import Normalize as Normalize
