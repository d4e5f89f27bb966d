"""How the time before a machine is taken away is shared out."""

from __future__ import annotations

#: Seconds that ranks are given for a small checkpoint, however late a notice comes.
LEAST_GRACE_S = 1.0
#: Seconds before the end in which no rank may run any more: what they saved is uploaded, and the agent ends. A policy's
#: ``faults.notice_margin_s`` may keep more free.
NOTICE_MARGIN_S = 2.0
