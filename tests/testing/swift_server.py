#!/usr/bin/env python3
"""OpenStack Swift of one node with its S3 API, from Debian's packages (swift-proxy and so on), for tests of s3://.

    swift_server.py FOLDER

Below FOLDER, on a file system with user attributes, lie its devices, rings and configuration. Three servers keep accounts,
containers and objects; proxies lead to them. `shipped` is Swift as it is: it answers writes with If-None-Match by 501.
`conditional` passes the condition on to Swift's own PUT of objects, which honours it, one such PUT at a time; completions
of uploads stay without it. `late` is the first with a clock that is an hour late. A proxy goes on to ask a server that failed:
after ten failures it would leave it alone for a minute. FOLDER/servers says for each server its port and process. A server
that dies is started again at its port, whose socket this program holds, and has another process then. All end with this
program.
"""
import ctypes
import os
import pathlib
import signal
import sys
import time
import urllib.request

import eventlet.semaphore
from swift.common import utils
from swift.common.middleware.s3api.utils import S3Timestamp
from swift.common.ring import RingBuilder
from swift.common.storage_policy import reload_storage_policies
from swift.common.swob import Request
from swift.common.wsgi import run_server

FOLDER = pathlib.Path(sys.argv[1])
DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG
PAGE = 7  # entries of a listing: small ones have pages, too
KEEPERS = ("account", "container", "object")
PIPELINES = {"shipped": "catch_errors gatekeeper memory s3api tempauth slo proxy-server",
             "late": "catch_errors gatekeeper memory s3api tempauth slo proxy-server",
             "conditional": "catch_errors gatekeeper memory condition_in s3api tempauth condition_out slo proxy-server"}
PROXY = """[DEFAULT]
swift_dir = {folder}
bind_port = {port}
[pipeline:main]
pipeline = {pipeline}
[app:proxy-server]
use = egg:swift#proxy
account_autocreate = true
conn_timeout = 0.5
node_timeout = 0.5
recoverable_node_timeout = 0.5
error_suppression_limit = 1000
[filter:catch_errors]
use = egg:swift#catch_errors
[filter:gatekeeper]
use = egg:swift#gatekeeper
[filter:s3api]
use = egg:swift#s3api
max_bucket_listing = {page}
max_upload_listing = {page}
[filter:tempauth]
use = egg:swift#tempauth
user_test_tester = hush-hush .admin
[filter:slo]
use = egg:swift#slo
[filter:memory]
paste.filter_factory = swift_server:memory
[filter:condition_in]
paste.filter_factory = swift_server:condition_in
[filter:condition_out]
paste.filter_factory = swift_server:condition_out
"""
KEEPER = """[DEFAULT]
swift_dir = {folder}
devices = {folder}/devices
mount_check = false
fallocate_reserve = 0
bind_port = {port}
[pipeline:main]
pipeline = {name}-server
[app:{name}-server]
use = egg:swift#{name}
"""


class Memory:
    """What a proxy asks of memcached."""

    def __init__(self):
        self.kept = {}

    def get(self, key, **_):
        return self.kept.get(key)

    def set(self, key, value, **_):
        self.kept[key] = value

    def delete(self, key, **_):
        self.kept.pop(key, None)

    def incr(self, key, delta=1, **_):
        self.kept[key] = self.kept.get(key, 0) + delta
        return self.kept[key]


def memory(*_, **__):
    cache = Memory()

    def made(app):
        def serve(environ, start):
            environ["swift.cache"] = cache
            return app(environ, start)
        return serve
    return made


def condition_in(*_, **__):
    one = eventlet.semaphore.Semaphore()

    def made(app):
        def serve(environ, start):
            if environ["REQUEST_METHOD"] != "PUT" or "HTTP_IF_NONE_MATCH" not in environ:
                return app(environ, start)
            environ["test.if_none_match"] = environ.pop("HTTP_IF_NONE_MATCH")
            with one:
                answer = Request(environ).get_response(app)
                answer.body  # all of it, within the lock
            return answer(environ, start)
        return serve
    return made


def condition_out(*_, **__):
    def made(app):
        def serve(environ, start):
            if environ["REQUEST_METHOD"] == "PUT" and "test.if_none_match" in environ:
                environ["HTTP_IF_NONE_MATCH"] = environ["test.if_none_match"]
            return app(environ, start)
        return serve
    return made


def make_folder(sockets):
    (FOLDER / "devices" / "disk").mkdir(parents=True)
    (FOLDER / "swift.conf").write_text("[swift-hash]\nswift_hash_path_suffix = tests\n")
    for name, made in sockets.items():
        port = made.getsockname()[1]
        if name in KEEPERS:
            builder = RingBuilder(1, 1, 1)
            builder.add_dev({"region": 1, "zone": 1, "ip": "127.0.0.1", "port": port, "device": "disk", "weight": 1})
            builder.rebalance()
            builder.get_ring().save(str(FOLDER / f"{name}.ring.gz"))
            text = KEEPER.format(folder=FOLDER, port=port, name=name)
        else:
            text = PROXY.format(folder=FOLDER, port=port, pipeline=PIPELINES[name], page=PAGE)
        (FOLDER / f"{name}.conf").write_text(text)


def serve(name, listener):
    utils.eventlet_monkey_patch()
    if name == "late":
        S3Timestamp.now = classmethod(lambda kind: kind(time.time() - 3600))
    kind = f"{name}-server" if name in KEEPERS else "proxy-server"
    conf = utils.readconf(str(FOLDER / f"{name}.conf"), f"app:{kind}")
    run_server(conf, utils.get_logger(conf, name, log_to_console=True, log_route=name), listener)


def start(name, sockets):
    parent = os.getpid()
    child = os.fork()
    if child != 0:
        return child
    ctypes.CDLL(None).prctl(DEATH_SIGNAL, signal.SIGKILL)
    try:
        if os.getppid() == parent:
            serve(name, sockets[name])
    finally:
        os._exit(1)


def tell(sockets, pids):
    part = FOLDER / "servers.part"
    part.write_text("".join(f"{name} {made.getsockname()[1]} {pids[name]}\n" for name, made in sockets.items()))
    part.rename(FOLDER / "servers")


def make_bucket(port):
    """By Swift's own API: its requests need no signature."""
    base = f"http://127.0.0.1:{port}"
    login = {"X-Auth-User": "test:tester", "X-Auth-Key": "hush-hush"}
    with urllib.request.urlopen(urllib.request.Request(f"{base}/auth/v1.0", headers=login)) as answer:
        token = {"X-Auth-Token": answer.headers["X-Auth-Token"]}
    urllib.request.urlopen(urllib.request.Request(f"{base}/v1/AUTH_test/bucket", method="PUT", headers=token)).close()


def main():
    utils.SWIFT_CONF_FILE = str(FOLDER / "swift.conf")
    sockets = {name: eventlet.listen(("127.0.0.1", 0), backlog=512) for name in (*KEEPERS, *PIPELINES)}
    make_folder(sockets)
    reload_storage_policies()
    utils.validate_configuration()
    pids = {name: start(name, sockets) for name in sockets}
    make_bucket(sockets["shipped"].getsockname()[1])
    tell(sockets, pids)
    while True:
        dead, _ = os.wait()
        name = next(name for name, pid in pids.items() if pid == dead)
        pids[name] = start(name, sockets)
        tell(sockets, pids)


if __name__ == "__main__":
    main()
