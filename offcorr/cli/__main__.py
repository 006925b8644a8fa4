"""The command ``offcorr`` as ``python -m offcorr.cli``."""

import sys

from offcorr.cli import main

if __name__ == "__main__":
    sys.exit(main())
