"""Corrected losses in TRL: ``from offcorr.trl import GRPOConfig, GRPOTrainer`` in place of TRL's own two names."""

from offcorr.optional import require

require("offcorr.trl", ["trl>=1.9.2", "transformers>=4.57", "accelerate>=1.10", "datasets>=4.7"], extra="trl")

from offcorr.trl.config import GRPOConfig  # noqa: E402
from offcorr.trl.trainer import GRPOTrainer  # noqa: E402

__all__ = ["GRPOConfig", "GRPOTrainer"]
