"""Corrected losses in TRL: ``from offcorr.trl import GRPOConfig, GRPOTrainer`` in place of TRL's own two names."""

from offcorr.trl.config import GRPOConfig
from offcorr.trl.trainer import GRPOTrainer

__all__ = ["GRPOConfig", "GRPOTrainer"]
