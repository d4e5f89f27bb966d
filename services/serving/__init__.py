"""Serves promoted models over the Open Inference Protocol, and swaps versions without a failed request."""
