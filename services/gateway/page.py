"""The web pages: the gateway's own and that of its interface. Policies hold them to what the gateway serves."""

from __future__ import annotations

import base64
import hashlib
import re
from importlib import resources
from pathlib import Path

from fastapi.openapi.docs import get_swagger_ui_html

PAGE = resources.files("services.gateway").joinpath("web/index.html").read_text(encoding="utf-8")


def _hashes(tag: str, page: str = PAGE) -> str:
    """The content security policy's sources for a page's own inline scripts or styles."""
    bodies = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
    return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(b.encode()).digest()).decode()}'" for b in bodies)


CONTENT_SECURITY_POLICY = (
    f"default-src 'none'; script-src {_hashes('script')}; style-src {_hashes('style')}; "
    "connect-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)

DOCS_ASSETS_PATH = "/docs/assets"


def docs_assets_dir() -> Path:
    """Return the folder of swagger-ui's files, which fastapi-offline brings."""
    return Path(str(resources.files("fastapi_offline").joinpath("static")))


DOCS = bytes(
    get_swagger_ui_html(
        openapi_url="/openapi.json",
        title="trainbus: HTTP interface",
        swagger_js_url=f"{DOCS_ASSETS_PATH}/swagger-ui-bundle.js",
        swagger_css_url=f"{DOCS_ASSETS_PATH}/swagger-ui.css",
        swagger_favicon_url="data:,",
    ).body
).decode()
#: swagger-ui sets styles of its own; its scripts are the bundle and the lines that start it.
DOCS_CONTENT_SECURITY_POLICY = (
    f"default-src 'none'; script-src 'self' {_hashes('script', DOCS)}; style-src 'self' 'unsafe-inline'; "
    "connect-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
