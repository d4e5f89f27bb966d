"""The steps of a scheduling cycle, one module each."""
