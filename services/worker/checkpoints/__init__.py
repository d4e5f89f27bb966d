"""Checkpoints of this node: staging, upload, repair and the state that survives its ranks."""
