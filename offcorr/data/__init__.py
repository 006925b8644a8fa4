"""Data of any origin in a run: earlier rollouts, traces of other models or of people, the beginnings of traces.

Each class is a ``rollout_func`` around another one, so that they combine.
"""

from offcorr.optional import require

require("offcorr.data", ["transformers", "accelerate"], extra="trl")

from offcorr.data.around import Around  # noqa: E402
from offcorr.data.curriculum import Curriculum  # noqa: E402
from offcorr.data.demonstrations import Demonstrations  # noqa: E402
from offcorr.data.prefixes import Prefixes  # noqa: E402
from offcorr.data.replay import Replay  # noqa: E402
from offcorr.data.trace import Trace  # noqa: E402
from offcorr.data.traces import Traces  # noqa: E402
from offcorr.data.worker_replay import WorkerReplay  # noqa: E402

__all__ = ["Around", "Curriculum", "Demonstrations", "Prefixes", "Replay", "Trace", "Traces", "WorkerReplay"]
