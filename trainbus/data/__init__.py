"""Samples: which ones (sampler), from where (reader), as what (dataset, loader)."""
