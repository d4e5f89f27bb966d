"""Signing an S3 GET or PUT, at a tenth of what the general signer costs.

AWS Signature Version 4 for requests without a query:
https://docs.aws.amazon.com/AmazonS3/latest/API/sig-v4-header-based-auth.html
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass, field
from datetime import UTC, datetime

EMPTY_SHA256 = hashlib.sha256(b"").hexdigest()


@dataclass(slots=True)
class Signer:
    """Signs for one access key and region; the day's signing key is kept."""

    access_key: str
    secret_key: str = field(repr=False)
    region: str
    #: Of temporary credentials.
    token: str | None = field(default=None, repr=False)
    _day: str = ""
    _key: bytes = field(default=b"", repr=False)

    def headers(
        self, host: str, path: str, now: datetime, *, method: str = "GET", sha256: str = EMPTY_SHA256
    ) -> dict[str, str]:
        """The headers that authorise ``method path`` on ``host``. ``path`` is percent-encoded, without a query.

        ``sha256`` is the hash of the body.
        """
        moment = now.astimezone(UTC).strftime("%Y%m%dT%H%M%SZ")
        headers = {"host": host, "x-amz-content-sha256": sha256, "x-amz-date": moment}
        if self.token:
            headers["x-amz-security-token"] = self.token
        names = ";".join(headers)  # they are in the order of the alphabet
        lines = "".join(f"{name}:{value}\n" for name, value in headers.items())
        request = hashlib.sha256(f"{method}\n{path}\n\n{lines}\n{names}\n{sha256}".encode()).hexdigest()
        scope = f"{moment[:8]}/{self.region}/s3/aws4_request"
        signature = _hmac(self._signing_key(moment[:8]), f"AWS4-HMAC-SHA256\n{moment}\n{scope}\n{request}").hex()
        headers["authorization"] = (
            f"AWS4-HMAC-SHA256 Credential={self.access_key}/{scope}, SignedHeaders={names}, Signature={signature}"
        )
        return headers

    def _signing_key(self, day: str) -> bytes:
        if day != self._day:
            key = f"AWS4{self.secret_key}".encode()
            for part in (day, self.region, "s3", "aws4_request"):
                key = _hmac(key, part)
            self._day, self._key = day, key
        return self._key


def _hmac(key: bytes, text: str) -> bytes:
    return hmac.digest(key, text.encode(), "sha256")
