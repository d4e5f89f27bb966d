"""The installer ``uv`` as a process, with the package index that this machine's settings name."""

from __future__ import annotations

import asyncio
import configparser
import os
import re
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from urllib.parse import unquote, urlsplit

import uv

from contracts.ranks import INHERITED
from services.kit.concurrency import run_in_thread

#: Variables that uv or a build reads, beside those that start with ``UV_``. Nothing else of the agent reaches it.
NETWORK_VARIABLES = (
    *("SSL_CERT_FILE", "SSL_CERT_DIR", "NETRC", "XDG_CONFIG_HOME", "XDG_CONFIG_DIRS", "CC", "CXX"),
    *("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "all_proxy", "no_proxy"),
)
#: Options of pip -> the variable of uv, and what parts a list there.
PIP_OPTIONS = {
    "index-url": ("UV_DEFAULT_INDEX", " "),
    "extra-index-url": ("UV_INDEX", " "),
    "find-links": ("UV_FIND_LINKS", ","),
    "trusted-host": ("UV_INSECURE_HOST", " "),
    "cert": ("SSL_CERT_FILE", " "),
}
#: Variables of uv with places, of which one that is not there would be an error. pip ignores it.
PLACES = ("UV_INDEX", "UV_FIND_LINKS")


class InstallerTimeoutError(Exception):
    """The installer did not end in time."""


def installer_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of uv: this machine's index as uv's or pip's settings name it, and no other secret."""
    names = (*INHERITED, *NETWORK_VARIABLES)
    found = {name: value for name, value in environment.items() if name in names or name.startswith("UV_")}
    found.pop("VIRTUAL_ENV", None)
    for option, values in _pip_options(environment).items():
        variable, separator = PIP_OPTIONS[option]
        if values and variable not in found:
            found[variable] = separator.join(values)
            if option == "extra-index-url":
                found.setdefault("UV_INDEX_STRATEGY", "unsafe-best-match")  # as pip chooses among its indexes
    for variable in PLACES:
        separator = "," if variable == "UV_FIND_LINKS" else " "
        places = [place for place in found.pop(variable, "").split(separator) if place and _is_there(place)]
        if places:
            found[variable] = separator.join(places)
    return found | {"UV_NO_PROGRESS": "1", "NO_COLOR": "1", "UV_PYTHON_DOWNLOADS": "never"}


def has_no_index(environment: Mapping[str, str]) -> bool:
    """Whether pip's settings forbid the index."""
    value = environment.get("PIP_NO_INDEX") or _read_pip_files(environment).get("no-index", "")
    return value.lower() in ("1", "true", "yes", "on")


async def run_installer(
    arguments: Sequence[str], *, folder: Path, environment: Mapping[str, str], timeout_s: float
) -> tuple[int, str, str]:
    """Run uv in ``folder``; return its exit code, output and errors. It is killed if this call is cancelled.

    Raises:
        InstallerTimeoutError: it did not end within ``timeout_s``.
    """
    process = await asyncio.create_subprocess_exec(
        uv.find_uv_bin(),
        *arguments,
        cwd=folder,
        env=dict(environment),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    try:
        async with asyncio.timeout(timeout_s):
            output, errors = await process.communicate()
    except TimeoutError as error:
        raise InstallerTimeoutError(f"the installer did not end within {timeout_s:.0f} s") from error
    finally:
        if process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
    return process.returncode or 0, output.decode(errors="replace"), errors.decode(errors="replace")


async def read_installer_environment(environment: Mapping[str, str]) -> tuple[dict[str, str], bool]:
    """Return uv's environment and whether pip's settings forbid the index, read anew: they may have changed."""
    return await run_in_thread(lambda: (installer_environment(environment), has_no_index(environment)))


def _pip_options(environment: Mapping[str, str]) -> dict[str, list[str]]:
    stored = _read_pip_files(environment)
    found = {}
    for option in PIP_OPTIONS:
        variable = f"PIP_{option.replace('-', '_').upper()}"
        found[option] = (environment.get(variable) or stored.get(option, "")).split()
    return found


def _read_pip_files(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the options of pip's files; later files, and the section of ``pip install``, win."""
    found: dict[str, str] = {}
    for path in _pip_files(environment):
        parser = configparser.RawConfigParser()
        with suppress(OSError, configparser.Error, UnicodeError):
            parser.read_string(path.read_text())
            for section in ("global", "install"):
                if parser.has_section(section):
                    found |= {name.replace("_", "-"): value for name, value in parser.items(section)}
    return found


def _pip_files(environment: Mapping[str, str]) -> Iterator[Path]:
    home = Path(environment.get("HOME") or "/")
    own = environment.get("PIP_CONFIG_FILE")
    if own == os.devnull:
        return
    yield Path("/etc/pip.conf")
    yield home / ".pip" / "pip.conf"
    yield Path(environment.get("XDG_CONFIG_HOME") or home / ".config") / "pip" / "pip.conf"
    yield Path(sys.prefix) / "pip.conf"
    if own:
        yield Path(own)


def _is_there(place: str) -> bool:
    """Whether a place of packages is remote, or a folder that exists here."""
    address = urlsplit(re.sub(r"^[\w.-]+=", "", place))  # an index may have a name: name=https://...
    if address.scheme not in ("", "file"):
        return True
    return Path(unquote(address.path)).exists()
