"""Corrections measured where the truth is known: policies so small that every sequence can be enumerated."""
