"""The trainer, model and data of ``tests/trl``."""

from __future__ import annotations

from tests.trl.conftest import dataset, make_trainer, model_folder, one_thread, series, tokenizer

__all__ = ["dataset", "make_trainer", "model_folder", "one_thread", "series", "tokenizer"]
