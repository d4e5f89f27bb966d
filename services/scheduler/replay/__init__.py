"""The scheduler's past: what is in the log, decided again, asked about, or played on other nodes. Pure."""
