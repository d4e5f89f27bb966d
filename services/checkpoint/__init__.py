"""Turns staged files into checkpoints that can be restored, and removes what is no longer needed."""
