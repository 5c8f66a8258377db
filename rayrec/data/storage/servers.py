"""Which server of object storage is meant, for libraries that do not read the options of our URIs."""

from __future__ import annotations

import os
from dataclasses import dataclass
from urllib.parse import parse_qsl, urlencode


@dataclass(frozen=True, slots=True)
class Server:
    """Where `s3://` is.

    Args:
        endpoint: URL of a server of one's own; None is Amazon's.
        region: as it is known.
    """

    endpoint: str | None = None
    region: str | None = None

    @classmethod
    def of(cls, uri: str, endpoint: str | None = None, region: str | None = None) -> Server:
        """As it is known, or the options of a URI say, or else the environment."""
        given, environment = dict(parse_qsl(uri.partition("?")[2])), os.environ
        if endpoint is None and "endpoint_override" in given:
            endpoint = f"{given.get('scheme', 'https')}://{given['endpoint_override']}"
        endpoint = endpoint or environment.get("AWS_ENDPOINT_URL_S3") or environment.get("AWS_ENDPOINT_URL")
        region = region or given.get("region") or environment.get("AWS_REGION") or environment.get("AWS_DEFAULT_REGION")
        return cls(endpoint, region or ("us-east-1" if endpoint else None))

    def for_delta(self) -> dict[str, str]:
        """As `deltalake` takes it."""
        unencrypted = {"AWS_ALLOW_HTTP": "true"} if (self.endpoint or "").startswith("http://") else {}
        return _known(AWS_ENDPOINT_URL=self.endpoint, AWS_REGION=self.region) | unencrypted

    def for_iceberg(self) -> dict[str, str]:
        """As `pyiceberg` takes it."""
        return _known(**{"s3.endpoint": self.endpoint, "s3.region": self.region})

    def options(self) -> str:
        """As the options of a URI."""
        scheme, _, host = (self.endpoint or "").rpartition("://")
        return urlencode(_known(endpoint_override=host or None, scheme=scheme or None, region=self.region), safe=":/")


def _known(**values: str | None) -> dict[str, str]:
    return {name: value for name, value in values.items() if value is not None}
