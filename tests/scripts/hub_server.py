"""The few endpoints of the Hub that a push calls, on this machine. It keeps what it receives."""

import base64
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit


class HubServer(ThreadingHTTPServer):
    """A Hub for one user, `tester`. `files` holds what was pushed, by path; `private` what was asked for."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), HubHandler)
        self.files: dict[str, bytes] = {}
        self.private: bool | None = None
        self.requests: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def __enter__(self):
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.shutdown()
        self.server_close()


class HubHandler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.record()
        path = urlsplit(self.path).path
        if path == "/api/whoami-v2":
            self.answer({"name": "tester", "type": "user", "orgs": []})
        elif path.startswith("/api/models/"):
            self.answer({"id": "tester/pushed", "sha": "0" * 40, "private": bool(self.server.private), "siblings": []})
        else:
            self.answer({"error": "not found"}, status=404)

    def do_HEAD(self):
        self.record()
        self.answer({}, status=404)

    def do_POST(self):
        self.record()
        body = self.rfile.read(int(self.headers["Content-Length"]))
        path = urlsplit(self.path).path
        if path == "/api/repos/create":
            wishes = json.loads(body)  # older clients say private=True, newer ones visibility="private"
            self.server.private = bool(wishes.get("private")) or wishes.get("visibility") == "private"
            self.answer({"url": f"{self.server.url}/tester/pushed", "id": "tester/pushed"})
        elif path == "/api/validate-yaml":
            self.answer({"errors": [], "warnings": []})
        elif "/preupload/" in path:
            # "regular" has the client send every file within the commit
            files = [
                {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False}
                for file in json.loads(body)["files"]
            ]
            self.answer({"files": files})
        elif "/commit/" in path:
            for line in body.splitlines():
                operation = json.loads(line)
                if operation["key"] == "file":
                    self.server.files[operation["value"]["path"]] = base64.b64decode(operation["value"]["content"])
            self.answer({"commitUrl": f"{self.server.url}/tester/pushed/commit/1", "commitOid": "1", "success": True})
        else:
            self.answer({"error": "not found"}, status=404)

    def record(self):
        self.server.requests.append(f"{self.command} {self.path}")

    def answer(self, content: dict, status: int = 200):
        payload = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(payload)

    def log_message(self, *_):
        pass
