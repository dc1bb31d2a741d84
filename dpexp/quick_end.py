"""Imported by the fork server alone: it ends at once, and does not first unwind torch.

When the launching process is killed nobody ends the server, and its interpreter would take a second
of CPU time for its end, several on a busy machine. Ranks leave by `os._exit` and do not come here.
"""

from __future__ import annotations

import atexit
import os

atexit.register(os._exit, 0)
