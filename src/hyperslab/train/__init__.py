"""Training: from a configuration to weights, scores and pictures."""

from hyperslab.train.config import Config as Config
