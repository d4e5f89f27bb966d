"""Turns staged files into checkpoints that can be restored, and removes what nobody needs."""
