"""Scans and row reductions: the only parts of the pipeline that need a twin for the GPU."""
