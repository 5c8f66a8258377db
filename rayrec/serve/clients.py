"""Clients: tokens, rate limits and certificates.

Tokens are read from files, so that none appears in a log, a process list or Ray.
"""

from __future__ import annotations

import hashlib
import logging
import ssl
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from rayrec.serve.config import ClientConfig, TlsConfig
from rayrec.serve.errors import RequestError

_logger = logging.getLogger(__name__)


class _TokenBucket:
    """Rate limit; allows bursts of one second's requests."""

    def __init__(self, per_s: float) -> None:
        self._per_s = per_s
        self._available, self._updated_at = max(per_s, 1.0), time.monotonic()

    def take(self) -> bool:
        now = time.monotonic()
        self._available = min(self._available + (now - self._updated_at) * self._per_s, max(self._per_s, 1.0))
        self._updated_at = now
        if self._available < 1:
            return False
        self._available -= 1
        return True


class Clients:
    """Clients that may send requests; without any, anyone may. Token files are read again when they change.

    Args:
        check_files_s: Seconds between two looks at the times of the token files.

    Raises:
        ValueError: A token file cannot be read or is empty, or two clients have the same token.
    """

    def __init__(self, configs: Sequence[ClientConfig] = (), check_files_s: float = 1.0) -> None:
        self._configs, self._check_files_s = tuple(configs), check_files_s
        self._lock = threading.Lock()
        self._buckets = {
            config.name: _TokenBucket(config.requests_per_s) for config in configs if config.requests_per_s is not None
        }
        self._mtimes, self._by_digest = self._file_mtimes(), self._read_tokens()
        self._checked_at = time.monotonic()

    def admit(self, authorization: bytes, scores: bool = False) -> ClientConfig | None:
        """The client that a header `Authorization: Bearer TOKEN` identifies; None if anyone may send requests.

        Args:
            scores: Whether the request counts against the client's rate limit.

        Raises:
            RequestError: 401, or 429 if the client exceeds its rate limit.
        """
        if not self._configs:
            return None
        self._reload_changed()
        token = authorization.removeprefix(b"Bearer ")
        # Looked up by digest, so that the duration of the lookup reveals nothing about the tokens.
        client = self._by_digest.get(_digest(token)) if token != authorization else None
        if client is None:
            raise RequestError(401, "send the service's token as `Authorization: Bearer TOKEN`")
        bucket = self._buckets.get(client.name)
        if scores and bucket is not None:
            with self._lock:
                allowed = bucket.take()
            if not allowed:
                text = f"client {client.name!r} exceeds its rate limit of {client.requests_per_s:g} requests/s"
                raise RequestError(429, f"{text}: retry later")
        return client

    def _reload_changed(self) -> None:
        """Reads token files that changed; on failure, the current tokens stay valid."""
        if time.monotonic() - self._checked_at < self._check_files_s:
            return
        self._checked_at = time.monotonic()
        try:
            mtimes = self._file_mtimes()
            if mtimes != self._mtimes:
                self._by_digest, self._mtimes = self._read_tokens(), mtimes
        except (OSError, ValueError) as error:
            _logger.warning("changed tokens cannot be read, the current ones stay valid: %s", error)

    def _file_mtimes(self) -> list[int]:
        files = [Path(config.token_file) for config in self._configs]
        return [file.stat().st_mtime_ns for file in files if file.exists()]

    def _read_tokens(self) -> dict[bytes, ClientConfig]:
        by_digest = {_digest(read_token(Path(config.token_file)).encode()): config for config in self._configs}
        if len(by_digest) < len(self._configs):
            raise ValueError("two clients have the same token: tokens must be unique")
        return by_digest


def check_model(client: ClientConfig | None, model: str) -> None:
    """
    Raises:
        RequestError: 403, the client may not use this model.
    """
    if client is not None and client.models is not None and model not in client.models:
        raise RequestError(403, f"client {client.name!r} may only use {', '.join(client.models)}, not {model!r}")


def check_index_access(client: ClientConfig | None) -> None:
    """
    Raises:
        RequestError: 403, the client may not query the index.
    """
    if client is not None and not client.retrieves:
        raise RequestError(
            403, f"client {client.name!r} may not use /retrieve; `index: true` in its settings allows it"
        )


def read_token(path: Path) -> str:
    """
    Raises:
        ValueError: The file cannot be read, or does not hold a single ASCII word.
    """
    try:
        token = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--token-file {path} cannot be read: {error}") from error
    if not token or not token.isascii() or len(token.split()) > 1:
        raise ValueError(f"--token-file {path} must hold one ASCII word: write a long random one")
    return token


def check_tls(config: TlsConfig) -> None:
    """
    Raises:
        ValueError: A file cannot be read, or the key does not belong to the certificate.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(config.cert_file, config.key_file)
    except (OSError, ssl.SSLError) as error:
        raise ValueError(f"tls: {config.cert_file} and {config.key_file} cannot be used: {error}") from error


def _digest(token: bytes) -> bytes:
    return hashlib.sha256(token).digest()
