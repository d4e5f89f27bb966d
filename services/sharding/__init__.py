"""Turns an index of records into shards, their offsets and a manifest: a dataset."""
