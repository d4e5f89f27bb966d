"""The web page: one file without anything from elsewhere, and the policy that holds it to that."""

from __future__ import annotations

import base64
import hashlib
import re
from importlib import resources

PAGE = resources.files("services.gateway").joinpath("web/index.html").read_text(encoding="utf-8")


def _hashes(tag: str) -> str:
    """The content security policy's sources for the page's own inline scripts or styles."""
    bodies = re.findall(rf"<{tag}>(.*?)</{tag}>", PAGE, re.DOTALL)
    return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(b.encode()).digest()).decode()}'" for b in bodies)


CONTENT_SECURITY_POLICY = (
    f"default-src 'none'; script-src {_hashes('script')}; style-src {_hashes('style')}; "
    "connect-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
