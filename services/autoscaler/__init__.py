"""Starts and stops nodes as the scheduler wants them."""
