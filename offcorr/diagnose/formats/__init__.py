"""The formats of dumps: ``CONTAINERS``, the kinds of file, and ``LAYOUTS``, the names that frameworks log under.

A new format is one object in one of the two tables.
"""

from offcorr.diagnose.formats import jsonl, nemo_rl, npz, own, parquet, prime_rl, slime
from offcorr.diagnose.formats.base import Container, DumpError, Layout, ReadWith, Row, Rows, Unreadable

__all__ = ["CONTAINERS", "LAYOUTS", "Container", "DumpError", "Layout", "ReadWith", "Row", "Rows", "Unreadable"]

CONTAINERS: tuple[Container, ...] = (parquet.PARQUET, npz.NPZ, slime.TORCH, jsonl.JSONL)
"""The kinds of file; the first that recognises a file reads it."""

LAYOUTS: tuple[Layout, ...] = (slime.SLIME, prime_rl.PRIME_RL, nemo_rl.NEMO_RL, own.OWN)
"""The layouts; the first that recognises the first row of a file reads all of them."""
