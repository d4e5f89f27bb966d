"""Processes of ranks: code package, executor, warm server, process group."""
