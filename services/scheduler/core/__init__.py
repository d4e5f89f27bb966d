"""What the scheduler decides; pure: a fold over facts, and decisions out of it.

``fold`` adds facts up to the cluster in ``state``. ``decide`` makes ``decisions`` out of it: ``settle`` for each run
alone, ``order`` for the line, ``place`` for the slots, ``claims`` for who may have them; ``reasons`` says why the rest
waits. Beside it stand ``admit`` for new requests, ``explain`` for whoever asks, and ``capacity`` for the nodes that
are wanted. import-linter holds what may import what.
"""
