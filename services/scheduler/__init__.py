"""Decides which run has which slots, and nothing else does."""
