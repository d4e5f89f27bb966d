"""Why a run waits, what would start it, and when it will start."""
