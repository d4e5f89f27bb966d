"""Credentials of the object store, and requests signed with them by botocore's own signer."""

from __future__ import annotations

import functools
from typing import Any

from services.kit.settings import Settings


def aws_session(settings: Settings) -> Any:
    """Return an aioboto3 session with the credentials of the settings, else those that boto finds by itself."""
    import aioboto3

    secret = settings.s3_secret_key
    session = aioboto3.Session(
        aws_access_key_id=settings.s3_access_key,
        aws_secret_access_key=secret.get_secret_value() if secret else None,
        region_name=settings.s3_region,
    )
    _share_descriptions(session._session)
    return session


def _share_descriptions(session: Any) -> None:
    """Have a session of botocore read the description of S3, megabytes of JSON, once in a process."""
    session.register_component("data_loader", _loader(session.get_config_variable("data_path")))


@functools.cache
def _loader(data_path: str | None) -> Any:
    from botocore.loaders import create_loader

    return create_loader(data_path)


def sign_request(credentials: Any, region: str, method: str, url: str, body: bytes = b"") -> dict[str, str]:
    """Return the headers that authorise one request. ``url`` is percent-encoded, and must go out exactly so.

    ``credentials`` are botocore's: access_key, secret_key and token.
    """
    from botocore.auth import S3SigV4Auth
    from botocore.awsrequest import AWSRequest

    request = AWSRequest(method, url, data=body)
    S3SigV4Auth(credentials, "s3", region).add_auth(request)
    return dict(request.headers.items())
