"""Who may ask: tokens, rates and certificates, all from files, so that none is in a log, a process list or Ray."""

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

_LOOK_S = 1.0  # between two looks at the files
_logger = logging.getLogger(__name__)


class _Bucket:
    """So many requests a second, and those of one second at once."""

    def __init__(self, per_s: float) -> None:
        self._per_s = per_s
        self._left, self._at = max(per_s, 1.0), time.monotonic()

    def take(self) -> bool:
        now = time.monotonic()
        self._left = min(self._left + (now - self._at) * self._per_s, max(self._per_s, 1.0))
        self._at = now
        if self._left < 1:
            return False
        self._left -= 1
        return True


class Clients:
    """Those whose tokens are known; with none, everyone may ask. A token that is replaced in its file is read anew.

    Raises:
        ValueError: a file cannot be read or holds no token, or two clients have one token.
    """

    def __init__(self, configs: Sequence[ClientConfig] = ()) -> None:
        self._configs = tuple(configs)
        self._turn = threading.Lock()
        self._buckets = {one.name: _Bucket(one.requests_per_s) for one in configs if one.requests_per_s is not None}
        self._times, self._by_digest = self._files(), self._read()
        self._looked = time.monotonic()

    def admit(self, authorization: bytes, scores: bool = False) -> ClientConfig | None:
        """The client that a header `Authorization: Bearer TOKEN` names; None where everyone may ask.

        Args:
            scores: the request counts against the client's rate.

        Raises:
            RequestError: 401, or 429 where it asks too often.
        """
        if not self._configs:
            return None
        self._look()
        token = authorization.removeprefix(b"Bearer ")
        # by digest: how long the search takes says nothing of a token
        found = self._by_digest.get(_digest(token)) if token != authorization else None
        if found is None:
            raise RequestError(401, "send the service's token as `Authorization: Bearer TOKEN`")
        bucket = self._buckets.get(found.name)
        if scores and bucket is not None:
            with self._turn:
                allowed = bucket.take()
            if not allowed:
                text = f"client {found.name!r} asks more than {found.requests_per_s:g} times a second: ask again later"
                raise RequestError(429, text)
        return found

    def _look(self) -> None:
        """Reads tokens that were replaced; on any failure the known ones stay."""
        if time.monotonic() - self._looked < _LOOK_S:
            return
        self._looked = time.monotonic()
        try:
            times = self._files()
            if times != self._times:
                self._by_digest, self._times = self._read(), times
        except (OSError, ValueError) as error:
            _logger.warning("tokens are not read anew: %s", error)

    def _files(self) -> list[int]:
        return [Path(one.token_file).stat().st_mtime_ns for one in self._configs if Path(one.token_file).exists()]

    def _read(self) -> dict[bytes, ClientConfig]:
        found = {_digest(read_token(Path(one.token_file)).encode()): one for one in self._configs}
        if len(found) < len(self._configs):
            raise ValueError("two clients have one token: give each its own")
        return found


def check_model(client: ClientConfig | None, model: str) -> None:
    """
    Raises:
        RequestError: 403, the client may not ask for this model.
    """
    if client is not None and client.models is not None and model not in client.models:
        raise RequestError(403, f"client {client.name!r} may ask for {', '.join(client.models)} only, not {model!r}")


def read_token(path: Path) -> str:
    """The one word in a file.

    Raises:
        ValueError: the file cannot be read, or is empty.
    """
    try:
        token = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--token-file {path} cannot be read: {error}") from error
    if not token or not token.isascii() or len(token.split()) > 1:
        raise ValueError(f"--token-file {path} must hold one word of ASCII; write a long random one into it")
    return token


def check_tls(config: TlsConfig) -> None:
    """
    Raises:
        ValueError: a file cannot be read, or the key is another certificate's.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(config.cert_file, config.key_file)
    except (OSError, ssl.SSLError) as error:
        raise ValueError(f"tls: {config.cert_file} and {config.key_file} cannot be used: {error}") from error


def _digest(token: bytes) -> bytes:
    return hashlib.sha256(token).digest()
