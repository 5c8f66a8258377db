"""Credentials in URIs: found, refused, and replaced by stars in texts and records.

Ray Train's controller imports this file, so it imports no pyarrow.
"""

from __future__ import annotations

import re
from typing import Any

# A secret may contain slashes. Digits and a slash after the colon are a port, as in hdfs://host:8020/a@b.
_USER_AND_SECRET = re.compile(r"(\b[a-z][\w+.-]*://)[^/:@\s]*:(?!\d+/)[^@\s]*@", re.IGNORECASE)
_SECRET_OPTION = re.compile(
    r"((?:(?<=\?)|(?<=&))[\w.-]*(?:secret|password|token|credential|access_?key|account_?key|api_?key|sig)[\w.-]*)=[^&\s'\"]*",
    re.IGNORECASE,
)
_CREDENTIALS = {
    "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (or AWS_PROFILE, or give the machines a role)",
    "gs": "set GOOGLE_APPLICATION_CREDENTIALS",
    "gcs": "set GOOGLE_APPLICATION_CREDENTIALS",
    "abfs": "set AZURE_STORAGE_ACCOUNT and AZURE_STORAGE_KEY",
    "abfss": "set AZURE_STORAGE_ACCOUNT and AZURE_STORAGE_KEY",
}


def without_secrets(text: str) -> str:
    """Replaces credentials in the URIs of a text by stars."""
    return _SECRET_OPTION.sub(r"\1=***", _USER_AND_SECRET.sub(r"\1***@", text))


def redacted(value: Any) -> Any:
    """A copy of nested dicts and lists with `without_secrets` applied to every text."""
    match value:
        case str():
            return without_secrets(value)
        case dict():
            return {key: redacted(item) for key, item in value.items()}
        case list() | tuple():
            return [redacted(item) for item in value]
        case _:
            return value


def secret_in(uri: str) -> str | None:
    """The problem and the fix for a URI with credentials, without repeating them; None if it has none.

    Configs, run folders, logs and reports contain URIs and must not contain secrets.
    """
    hidden = without_secrets(uri)
    if hidden == uri:
        return None
    scheme = uri.partition("://")[0]
    return (
        f"{hidden} was given with credentials, which would be written into the run folder and logs; leave them "
        f"out and {_CREDENTIALS.get(scheme, 'give them to the storage client in the environment')}, on every node"
    )


def without_credentials(uri: str) -> str:
    """Returns the URI unchanged.

    Raises:
        ValueError: the URI holds credentials.
    """
    if (problem := secret_in(uri)) is not None:
        raise ValueError(problem)
    return uri
