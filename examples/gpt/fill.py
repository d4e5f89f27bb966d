"""Put the Python standard library's own source into the lake: python examples/gpt/fill.py [--data-dir D] [--most N]"""

from __future__ import annotations

import argparse
import asyncio
import sysconfig
from pathlib import Path

from services.kit.store.objects import ObjectStore
from trainbus.client.address import find_address
from trainbus.operate.stack_settings import read_settings

LAKE = "s3://lake/python-stdlib/"
PARALLEL = 8


async def fill(data_dir: Path | None, most: int | None) -> int:
    """Store the modules at the library's top level, the largest first; return how many there are."""
    library = Path(sysconfig.get_path("stdlib"))
    modules = sorted(library.glob("*.py"), key=lambda path: (-path.stat().st_size, path.name))[:most]
    gate = asyncio.Semaphore(PARALLEL)
    async with ObjectStore(read_settings(find_address(data_dir))) as objects:

        async def store(path: Path) -> None:
            async with gate:
                await objects.put(LAKE + path.name, path.read_bytes())

        await asyncio.gather(*(store(path) for path in modules))
    return len(modules)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", type=Path, help="data folder of the stack; default: the one that runs here")
    parser.add_argument("--most", type=int, help="so many files at most")
    options = parser.parse_args()
    print(f"{asyncio.run(fill(options.data_dir, options.most))} files in {LAKE}")
