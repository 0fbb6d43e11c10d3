"""A stand-in for the Hugging Face hub on this machine: it keeps what is created and committed."""

from __future__ import annotations

import base64
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Hub:
    """Serves until the end of a `with`; `refuse` answers every request with 403."""

    def __init__(self) -> None:
        self.created: list[dict[str, Any]] = []
        self.files: dict[str, dict[str, bytes]] = {}
        self.messages: list[str] = []
        self.tokens: set[str | None] = set()
        self.refuse = False
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Hub:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def answer(self, path: str, body: bytes) -> Any:
        """What the hub says to a POST."""
        if path == "/api/repos/create":
            asked = json.loads(body)
            private = asked.get("private") or asked.get("visibility") == "private"  # the client's versions differ
            self.created.append({"name": asked["name"], "organization": asked["organization"], "private": private})
            return {"url": f"{self.url}/{asked.get('organization')}/{asked['name']}"}
        kind, _, revision = path.removeprefix("/api/models/me/mine/").partition("/")
        if kind == "preupload":
            files = [file["path"] for file in json.loads(body)["files"]]
            return {"files": [{"path": name, "uploadMode": "regular", "shouldIgnore": False} for name in files]}
        if kind == "commit":
            kept = self.files.setdefault(revision, {})
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "header":
                    self.messages.append(line["value"]["summary"])
                else:
                    kept[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            return {"commitUrl": f"{self.url}/me/mine/commit/1", "commitOid": "1" * 40, "success": True}
        return {}

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                hub.tokens.add(self.headers.get("Authorization"))
                self._say(403 if hub.refuse else 200, {} if hub.refuse else hub.answer(self.path, body))

            def do_GET(self) -> None:
                self._say(404, {"error": "not found"})

            def _say(self, code: int, answer: Any) -> None:
                text = json.dumps(answer).encode()
                self.send_response(code)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, *_: object) -> None: ...

        return Handler
