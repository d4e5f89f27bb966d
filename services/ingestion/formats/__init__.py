"""How each format is read: bytes or a local file in, ``Sound`` and ``Broken`` records out. No store, no bus."""
