"""The few endpoints of the Hub that a push calls, on this machine. It keeps what it receives."""

import base64
import json
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit


@dataclass
class Repo:
    """What was pushed, by path, and whether it was to be private."""

    private: bool
    files: dict[str, bytes] = field(default_factory=dict)


class HubServer(ThreadingHTTPServer):
    """
    A Hub for one user, `tester`. It holds repositories by their id.

    Two cannot be uploaded to: `tester/broken` answers with status 500, and once `tester/gone` is made the server ends.
    """

    def __init__(self):
        super().__init__(("127.0.0.1", 0), HubHandler)
        self.repos: dict[str, Repo] = {}
        self.requests: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def __enter__(self):
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.end()

    def end(self):
        self.shutdown()
        self.server_close()


class HubHandler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.record()
        path = urlsplit(self.path).path
        if path == "/api/whoami-v2":
            self.answer({"name": "tester", "type": "user", "orgs": []})
        elif path.startswith("/api/models/"):
            self.answer({"id": self.repo_id, "sha": "0" * 40, "siblings": []})
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
            is_private = bool(wishes.get("private")) or wishes.get("visibility") == "private"
            repo_id = f"tester/{wishes['name']}"
            self.server.repos[repo_id] = Repo(is_private)
            self.answer({"url": f"{self.server.url}/{repo_id}", "id": repo_id})
            if repo_id == "tester/gone":
                threading.Thread(target=self.server.end).start()
        elif path == "/api/validate-yaml":
            self.answer({"errors": [], "warnings": []})
        elif "/preupload/" in path:
            # "regular" has the client send every file within the commit
            files = [
                {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False}
                for file in json.loads(body)["files"]
            ]
            self.answer({"files": files})
        elif "/commit/" in path and self.repo_id == "tester/broken":
            self.answer({"error": "out of order"}, status=500)
        elif "/commit/" in path:
            files = self.server.repos[self.repo_id].files
            for line in body.splitlines():
                operation = json.loads(line)
                if operation["key"] == "file":
                    files[operation["value"]["path"]] = base64.b64decode(operation["value"]["content"])
            url = f"{self.server.url}/{self.repo_id}/commit/1"
            self.answer({"commitUrl": url, "commitOid": "1", "success": True})
        else:
            self.answer({"error": "not found"}, status=404)

    @property
    def repo_id(self) -> str:
        """That of a path like /api/models/tester/pushed/commit/main."""
        return "/".join(urlsplit(self.path).path.split("/")[3:5])

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
