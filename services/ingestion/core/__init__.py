"""What ingestion decides: keys, splits, fingerprints, what is broken, and whether it is too much. Pure."""
