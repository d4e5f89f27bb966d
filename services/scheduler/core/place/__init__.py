"""Which slots a gang gets."""
