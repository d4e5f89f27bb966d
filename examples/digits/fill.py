"""Put the handwritten digits of scikit-learn into the lake: python examples/digits/fill.py [--data-dir D]"""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path

from trainbus.client.address import find_address
from trainbus.operate.stack_settings import read_settings

sys.path.insert(0, str(Path(__file__).parents[2]))

from examples.demo.lake import draw_scans, fill_lake


async def fill(data_dir: Path | None = None) -> str:
    """Store the scans that are not in the lake yet and return a line about them."""
    scans = draw_scans()
    await fill_lake(read_settings(find_address(data_dir)), "lake", scans, lambda done: None)
    return f"{len(scans)} files in s3://lake/digits/"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", type=Path, help="data folder of the stack; default: the one that runs here")
    print(asyncio.run(fill(parser.parse_args().data_dir)))
