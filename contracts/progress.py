"""The layout of ``rank_<n>.ring``: what a rank says of its steps without a system call.

A file in the generation's folder that the rank maps into its memory and the agent reads. What was written survives
a SIGKILL of the rank, since the pages belong to the kernel. Everything is little-endian.

- The header: the magic word, sizes, ``head`` (records written, by the rank) and ``tail`` (records that are said and
  will not be read again, by the agent). The rank never writes over a record that ``tail`` has not passed.
- The beat, at a place of its own in the header: where the rank is, whether or not it has metrics to report.
- The names of metrics, in the order in which they came up: a length byte and UTF-8 each, NAME_BYTES apart.
- ``capacity`` records; record i lies in slot ``i % capacity``.

Beat and records end with a CRC-32 over what comes before it: on a processor that reorders stores, or after a loss
of power, what is not whole is taken for not written yet.
"""

from __future__ import annotations

import struct

MAGIC = b"TBRING\x00\x01"
#: magic, capacity, bytes a record, pid of the rank
FIXED = struct.Struct("<8sIIQ")
#: Number of records written; written after the record.
HEAD_AT = 64
#: Number of records that the agent is done with. A cache line of its own: another process writes it.
TAIL_AT = 128
COUNTER = struct.Struct("<Q")
#: How many names the table holds; written after the name.
NAMES_COUNT_AT = 192
#: mark (ticks so far), step, CLOCK_MONOTONIC in seconds; then the CRC
BEAT_AT = 256
BEAT = struct.Struct("<QQd")
CRC = struct.Struct("<I")

NAMES_AT = 512
NAME_BYTES = 64
NAMES_MAX = 55
HEADER_BYTES = 4096

#: Values a record has room for. What has more is written to the journal.
VALUES_MAX = 8
#: number, step, Unix time in seconds, samples consumed, total steps (0: not known), epoch, count; names; values
RECORD = struct.Struct("<QQdQQIB3x8B8d")
RECORD_BYTES = 128
CAPACITY = 65_536

assert NAMES_AT + NAMES_MAX * NAME_BYTES <= HEADER_BYTES
assert RECORD.size + CRC.size <= RECORD_BYTES


def ring_name(rank: int) -> str:
    return f"rank_{rank}.ring"
