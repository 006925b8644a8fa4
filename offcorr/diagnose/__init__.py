"""The cause of a mismatch between trainer and sampler, named from what both logged."""

from offcorr.diagnose.batch_records import records_of
from offcorr.diagnose.causes import CAUSES, Cause, Finding, Found
from offcorr.diagnose.diagnosis import Report, diagnose
from offcorr.diagnose.evidence import Estimate, Evidence
from offcorr.diagnose.readers import DumpError, read
from offcorr.diagnose.record import Record
from offcorr.diagnose.writer import DumpWriter

__all__ = [
    "CAUSES",
    "Cause",
    "DumpError",
    "DumpWriter",
    "Estimate",
    "Evidence",
    "Finding",
    "Found",
    "Record",
    "Report",
    "diagnose",
    "read",
    "records_of",
]
