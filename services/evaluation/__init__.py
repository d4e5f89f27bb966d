"""Measures what a training made, compares it with the champion, and promotes it or not."""
