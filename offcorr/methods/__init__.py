"""The named methods, one file each: stages, multiplier, source and an example.

Every file in this folder is imported, so a new method needs no other change.
"""
