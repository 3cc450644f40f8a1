"""A web server on this machine that serves bytes, and can do so badly: cut, without ranges, or as a proxy."""

import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        server = self.server
        server.requests.append((self.path, self.headers.get("Range")))
        path = self.path.split("/", 3)[3] if self.path.startswith("http://") else self.path.lstrip("/")
        if server.broken:
            self.send_error(503)
            return
        if path not in server.files:
            self.send_error(404)
            return
        body = server.files[path]
        start = self._start()
        if start >= len(body) > 0 and start:
            self.send_response(416)
            self.send_header("Content-Range", f"bytes */{len(body)}")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
        self.send_header("Content-Length", str(len(body) - start))
        self.end_headers()
        part = body[start:]
        if server.cuts:
            part = part[: server.cuts.pop(0)]
        self.wfile.write(part)
        self.close_connection = True

    def _start(self):
        given = self.headers.get("Range")
        return int(given.removeprefix("bytes=").rstrip("-")) if given and self.server.ranges else 0

    def log_message(self, *arguments):
        pass


@contextmanager
def serve(files, ranges=True):
    """A server of {name: bytes}: `.url`, `.requests`, `.cuts` (bytes after which answers break off), `.broken`."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.files, server.ranges, server.cuts, server.broken, server.requests = files, ranges, [], False, []
    server.url = f"http://127.0.0.1:{server.server_address[1]}/"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
