"""The demo's data: the handwritten digits that ship with scikit-learn, as files in the lake."""

from __future__ import annotations

import asyncio
import csv
import gzip
import importlib.util
import io
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from trainbus.client.errors import TrainbusError

if TYPE_CHECKING:
    from services.kit.settings import Settings

PREFIX = "digits/"
SIDE = 8
#: Invalid files for the validation to quarantine: one truncated, one no image.
BROKEN = ("3/broken-cut-off.png", "7/broken-not-an-image.png")
PARALLEL = 16


def draw_scans() -> dict[str, bytes]:
    """Return ``<class>/<number>.png`` -> PNG of 8x8 grey pixels: the 1,797 real scans, and two broken files.

    Read from scikit-learn's data file; importing scikit-learn itself would take seconds.
    """
    from PIL import Image

    files: dict[str, bytes] = {}
    table = gzip.decompress(_data_file().read_bytes()).decode("ascii")
    for number, row in enumerate(csv.reader(io.StringIO(table))):
        *pixels, label = (int(float(value)) for value in row)
        image = Image.frombytes("L", (SIDE, SIDE), bytes(min(255, value * 16) for value in pixels))
        body = io.BytesIO()
        image.save(body, "PNG")
        files[f"{label}/{number:04d}.png"] = body.getvalue()
    some = next(iter(files.values()))
    files[BROKEN[0]] = some[: len(some) // 2]
    files[BROKEN[1]] = b"This is a note that somebody saved under the wrong name.\n"
    return files


def _data_file() -> Path:
    found = importlib.util.find_spec("sklearn")
    folders = list(found.submodule_search_locations or ()) if found else []
    path = Path(folders[0]) / "datasets" / "data" / "digits.csv.gz" if folders else None
    if path is None or not path.exists():
        raise TrainbusError("the demo's digits come with scikit-learn: pip install scikit-learn")
    return path


async def fill_lake(settings: Settings, bucket: str, files: dict[str, bytes], on_stored: Callable[[int], None]) -> int:
    """Store the files that are not in the lake yet; return how many those were.

    Signed by botocore, sent with aiohttp: boto's client spends more on a small file than everything else together.
    """
    import aiohttp
    from botocore.credentials import Credentials

    from services.kit.store.credentials import sign_request
    from services.kit.store.objects import ObjectStore

    async with ObjectStore(settings) as objects:
        there = {info.key: info.size_bytes async for info in objects.list(f"s3://{bucket}/{PREFIX}")}
    missing = [(name, body) for name, body in files.items() if there.get(PREFIX + name) != len(body)]
    done = len(files) - len(missing)
    queue = iter(missing)
    endpoint = settings.s3_endpoint or ""
    secret = settings.s3_secret_key.get_secret_value() if settings.s3_secret_key else ""
    credentials = Credentials(settings.s3_access_key or "", secret)

    async def store(session: aiohttp.ClientSession) -> None:
        nonlocal done
        for name, body in queue:
            url = f"{endpoint}/{bucket}/{PREFIX}{name}"
            headers = sign_request(credentials, settings.s3_region, "PUT", url, body)
            async with session.put(url, data=body, headers=headers) as answer:
                if answer.status != 200:
                    raise TrainbusError(f"S3 did not take {url}: {answer.status} {(await answer.text())[:300]}")
            done += 1
            on_stored(done)

    on_stored(done)
    async with aiohttp.ClientSession() as session:
        await asyncio.gather(*(store(session) for _ in range(PARALLEL)))
    return len(missing)
