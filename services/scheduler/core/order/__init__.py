"""Who goes before whom."""
