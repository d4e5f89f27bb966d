"""Credentials of the object store, and requests signed with them by botocore's own signer."""

from __future__ import annotations

from typing import Any

from services.kit.settings import Settings


def aws_session(settings: Settings) -> Any:
    """Return an aioboto3 session with the credentials of the settings, else those that boto finds by itself."""
    import aioboto3

    secret = settings.s3_secret_key
    return aioboto3.Session(
        aws_access_key_id=settings.s3_access_key,
        aws_secret_access_key=secret.get_secret_value() if secret else None,
        region_name=settings.s3_region,
    )


def sign_request(credentials: Any, region: str, method: str, url: str, body: bytes = b"") -> dict[str, str]:
    """Return the headers that authorise one request. ``url`` is percent-encoded, and must go out exactly so.

    ``credentials`` are botocore's: access_key, secret_key and token.
    """
    from botocore.auth import S3SigV4Auth
    from botocore.awsrequest import AWSRequest

    request = AWSRequest(method, url, data=body)
    S3SigV4Auth(credentials, "s3", region).add_auth(request)
    return dict(request.headers.items())
