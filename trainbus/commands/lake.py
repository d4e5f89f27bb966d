"""``trainbus put`` and ``trainbus ls``: raw data in the stack's store."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from contracts.formats import plural
from trainbus.commands import render
from trainbus.commands.options import DataDir, Json, StackName, choose_data_dir
from trainbus.commands.progress import byte_bar

if TYPE_CHECKING:
    from trainbus.client.address import StackAddress
    from trainbus.client.lake import ObjectList
    from trainbus.client.lake_transfer import PutResult

app = typer.Typer()
PANEL = "Data"
#: Names that are shown of what was left out.
MAX_NAMES = 5


@app.command(rich_help_panel=PANEL)
def put(
    path: Annotated[Path, typer.Argument(help="The folder or file to send.")],
    uri: Annotated[str, typer.Argument(metavar="ADDRESS", help="Where to: s3://lake/NAME.")],
    data_dir: DataDir = None,
    stack: StackName = None,
    as_json: Json = False,
) -> None:
    """Put a folder or file into the store; what is there with the same content is not sent again."""
    from trainbus.client.address import find_address
    from trainbus.client.lake_transfer import put_files

    address = find_address(choose_data_dir(data_dir, stack))
    with byte_bar("sending", quiet=as_json) as advance:
        found = asyncio.run(put_files(address, path, uri, advance))
    if as_json:
        print(render.as_json(found))
    else:
        _print_result(found)


def _print_result(found: PutResult) -> None:
    if found.left_out:
        names = ", ".join(found.left_out[:MAX_NAMES]) + (", ..." if len(found.left_out) > MAX_NAMES else "")
        print(f"left out (hidden, or a link to a folder): {render.visible(names)}", file=sys.stderr)
    sent = f"{render.size(found.sent_bytes)} sent" if found.sent else "all was there"
    if found.sent and (there := found.files - found.sent):
        sent += f", {there:,} of them there"
    print(f"{found.uri}: {plural(found.files, 'file')}, {render.size(found.size_bytes)} ({sent})")


@app.command(rich_help_panel=PANEL)
def ls(
    uri: Annotated[str | None, typer.Argument(metavar="ADDRESS", help="s3://lake/NAME; default: the lake.")] = None,
    recursive: Annotated[bool, typer.Option("--recursive", "-r", help="Also what lies in folders.")] = False,
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="Only the first N.")] = None,
    cursor: Annotated[str, typer.Option("--cursor", help="Go on where a list with --limit ended.")] = "",
    data_dir: DataDir = None,
    stack: StackName = None,
    as_json: Json = False,
) -> None:
    """List raw data in the store, with sizes and times."""
    from trainbus.client.address import find_address

    address = find_address(choose_data_dir(data_dir, stack))
    asyncio.run(_list(address, uri, recursive, limit, cursor, as_json))


async def _list(
    address: StackAddress, uri: str | None, recursive: bool, limit: int | None, cursor: str, as_json: bool
) -> None:
    from trainbus.client.lake import list_objects

    pages: list[ObjectList] = []
    async for page in list_objects(address, uri, recursive=recursive, limit=limit, cursor=cursor):
        pages.append(page)
        if not as_json:
            _print_page(page)
    objects = [each for page in pages for each in page.objects]
    following = pages[-1].next_cursor
    if as_json:
        folders = [each for page in pages for each in page.folders]
        print(render.as_json({"folders": folders, "objects": objects, "next_cursor": following or None}))
        return
    if len(objects) > 1:
        size_bytes = sum(each.size_bytes for each in objects)
        print(f"{plural(len(objects), 'file')}, {render.size(size_bytes)}", file=sys.stderr)
    if following:
        print(f"there is more: --cursor {following}", file=sys.stderr)


def _print_page(page: ObjectList) -> None:
    """Print folders and objects in the order of their addresses."""
    rows = [(folder, f"{'':16}  {'':>9}  {folder}") for folder in page.folders]
    rows += [
        (each.uri, f"{each.modified_at:%Y-%m-%d %H:%M}  {render.size(each.size_bytes):>9}  {each.uri}")
        for each in page.objects
    ]
    for _, row in sorted(rows):
        print(render.visible(row))
