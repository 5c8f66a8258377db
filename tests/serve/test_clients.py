"""Tokens, rates and models by client; what is in a file is read anew, and none of it is shown."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rayrec.serve import App, ClientConfig, Clients, RequestError, Service
from tests.serve.server import GOOD, Server, clients_of

BODY = {"rows": [GOOD]}


def status(server: Server, token: str, path: str = "/score") -> int:
    return server.ask("POST", path, BODY, authorization=f"Bearer {token}")[0]


def test_each_client_has_its_token_rate_and_models(service: Service, tmp_path: Path) -> None:
    for name in ("fast", "slow", "other"):
        (tmp_path / name).write_text(f"{name}-token\n")
    configs = [
        ClientConfig(name="fast", token_file=str(tmp_path / "fast")),
        ClientConfig(name="slow", token_file=str(tmp_path / "slow"), requests_per_s=0.01),
        ClientConfig(name="other", token_file=str(tmp_path / "other"), models=("none",)),
    ]
    server = Server(App(service, Clients(configs)))
    try:
        assert [status(server, "fast-token") for _ in range(3)] == [200] * 3
        code, answer, headers = server.ask_all("POST", "/score", BODY, authorization="Bearer slow-token")
        assert code == 200
        code, answer, headers = server.ask_all("POST", "/score", BODY, authorization="Bearer slow-token")
        assert (code, headers["retry-after"]) == (429, "1")
        assert "client 'slow' exceeds its rate limit of 0.01" in answer["error"]
        assert server.ask("GET", "/schema", authorization="Bearer slow-token")[0] == 200
        code, answer = server.ask("POST", "/score", BODY, authorization="Bearer other-token")
        assert code == 403 and "may only use none, not 'ctr'" in answer["error"]
        for path in ("/schema", "/schema/ctr", "/v2/models/ctr", "/v2/models/ctr/ready"):
            codes = [server.ask("GET", path, authorization=f"Bearer {name}-token")[0] for name in ("fast", "other")]
            assert codes == [200, 403], path
        assert status(server, "fast-token ") == 401 and status(server, "") == 401
        assert server.ask("POST", "/score", BODY, authorization="fast-token")[0] == 401
    finally:
        server.close()


def test_a_replaced_token_is_read_anew_and_a_lost_file_changes_nothing(tmp_path: Path) -> None:
    clients = clients_of(tmp_path, check_files_s=0.0, one="before")
    assert clients.admit(b"Bearer before")
    (tmp_path / "one").write_text("after")
    os.utime(tmp_path / "one", ns=(1, 1))
    assert clients.admit(b"Bearer after")
    with pytest.raises(RequestError, match="send the service's token"):
        clients.admit(b"Bearer before")
    (tmp_path / "one").unlink()
    assert clients.admit(b"Bearer after")


def test_two_clients_have_two_tokens(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="two clients have the same token"):
        clients_of(tmp_path, one="same", two="same")
