"""Entry point of the group ``verl.plugins``: ``import verl`` imports this module, in the driver and in every worker."""

import logging

from offcorr.integrations import verl

try:
    verl.register()
except Exception:  # verl would log it at the level "debug", where nobody sees why the loss mode is unknown
    logging.getLogger(__name__).exception("offcorr: loss_mode='offcorr:...' is not known to verl")
