"""The node's cache: code packages, checkpoints and the shards of datasets."""
