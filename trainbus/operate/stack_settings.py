"""The settings of a stack's services, with the keys of its object store: for an operator's tools."""

from __future__ import annotations

import json

from pydantic import SecretStr

from services.kit.settings import Settings
from trainbus.client.address import StackAddress
from trainbus.embedded.launch import read_stack
from trainbus.embedded.layout import secrets_file


def read_settings(address: StackAddress) -> Settings:
    """Return the settings of an embedded stack; for any other, those of the environment."""
    stack = read_stack(address.data_dir) if address.data_dir is not None else None
    if address.data_dir is None or stack is None:
        return Settings()
    keys = json.loads(secrets_file(address.data_dir).read_text())
    return Settings(
        nats_url=stack.nats_url,
        s3_endpoint=stack.s3_endpoint,
        s3_access_key=keys["s3_access_key"],
        s3_secret_key=SecretStr(keys["s3_secret_key"]),
        instance="client",
    )
