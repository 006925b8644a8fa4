"""One file a method: its composition, multiplier, source and an example.  A file dropped in here is found."""
