"""The layout of ``rank_<n>.ring``, through which a rank reports its steps without a system call.

The rank maps the file, in the generation's folder, into its memory; the agent reads it. What is written survives a
SIGKILL of the rank, since the pages belong to the kernel. Everything is little-endian.

- The header: the magic word, sizes, ``head`` (records written, by the rank) and ``tail`` (records that
  the agent has published). The rank never overwrites a record that ``tail`` has not passed.
- The heartbeat, at a fixed place in the header: which step the rank is at, with or without metrics to report.
- The names of metrics, in the order of their first use: a length byte and UTF-8 each, NAME_BYTES apart.
- ``capacity`` records; record i lies in slot ``i % capacity``.

The heartbeat and each record end with a CRC-32 of the bytes before it. A reader treats one whose CRC does not match as
not written yet: a processor may reorder stores, and power may fail.
"""

from __future__ import annotations

import struct

MAGIC = b"TBRING\x00\x01"
#: magic, capacity, bytes a record, pid of the rank
FIXED = struct.Struct("<8sIIQ")
#: Number of records written; written after the record.
HEAD_AT = 64
#: Number of records that the agent has published. It has its own cache line, since another process writes it.
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

#: Values that a record has room for. The journal takes what has more.
VALUES_MAX = 8
#: number, step, Unix time in seconds, samples consumed, total steps (0: unknown), epoch, count; names; values
RECORD = struct.Struct("<QQdQQIB3x8B8d")
RECORD_BYTES = 128
CAPACITY = 65_536

assert NAMES_AT + NAMES_MAX * NAME_BYTES <= HEADER_BYTES
assert RECORD.size + CRC.size <= RECORD_BYTES


def ring_name(rank: int) -> str:
    return f"rank_{rank}.ring"
