#!/usr/bin/env python3
"""A proxy before an S3 server that fails on purpose; needs nothing but Python 3.9.

    s3_proxy.py PORT_FILE UPSTREAM_PORT EVERY [PORT]

Of each EVERY changing requests one is answered 503 and not passed on, and one is passed on and its answer dropped, as a
time-out after success looks to the client. Of the conditional ones another is answered 409, as if two came at once and
none won, and of completions one 200 with an error in it; both are not passed on. Prints its port into PORT_FILE.
"""
import http.client
import http.server
import os
import sys
import threading

PORT_FILE, UPSTREAM, EVERY = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
PORT = int(sys.argv[4]) if len(sys.argv) > 4 else 0
LOCK = threading.Lock()
COUNT = 0


class Proxy(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def serve(self):
        global COUNT
        length = int(self.headers.get("content-length") or 0)
        body = self.rfile.read(length) if length else b""
        turn = -1
        if self.command in ("PUT", "POST", "DELETE"):
            with LOCK:
                COUNT += 1
                turn = COUNT % EVERY
        if turn == 1:
            self.send_response(503)
            self.send_header("content-length", "0")
            self.end_headers()
            return
        if turn == 3 and self.headers.get("if-none-match"):
            self.refuse(409, "ConditionalRequestConflict")
            return
        if turn == 4 and self.command == "POST" and "uploadId=" in self.path:
            self.refuse(200, "InternalError")
            return
        upstream = http.client.HTTPConnection("127.0.0.1", UPSTREAM, timeout=30)
        upstream.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
        for name, value in self.headers.items():
            upstream.putheader(name, value)
        upstream.endheaders(body)
        answer = upstream.getresponse()
        content = answer.read()
        if turn == 2:
            self.close_connection = True
            self.connection.close()
            return
        self.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in ("transfer-encoding", "connection", "content-length", "server", "date"):
                self.send_header(name, value)
        if self.command == "HEAD":
            self.send_header("content-length", answer.getheader("content-length") or "0")
            self.end_headers()
            return
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def refuse(self, status, code):
        content = f'<?xml version="1.0" encoding="UTF-8"?><Error><Code>{code}</Code></Error>'.encode()
        self.send_response(status)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = serve

    def log_message(self, *arguments):
        pass


server = http.server.ThreadingHTTPServer(("127.0.0.1", PORT), Proxy)
with open(PORT_FILE + ".part", "w") as file:
    file.write(f"{server.server_port}\n")
os.rename(PORT_FILE + ".part", PORT_FILE)
server.serve_forever()
