"""What sharding decides: the order of samples, the bytes of a shard, the manifest. Pure."""
