"""Readers of the formats: bytes or a local file in, valid and invalid records out. No store, no bus."""
