#!/usr/bin/env python3
"""A cable that delays: frames of one network interface come out of another, and the other way round, that much later. For kernels without netem.

    delay_link.py FIRST SECOND MILLISECONDS READY_FILE

Frames keep what the kernel knows of their checksums and segments (PACKET_VNET_HDR), so nothing has to be told of it.
"""
import collections
import pathlib
import select
import socket
import sys
import time

ETH_P_ALL = 3
SOL_PACKET = 263
PACKET_VNET_HDR = 15
PACKET_OUTGOING = 4
LONGEST_FRAME = 80000
BUFFER_BYTES = 16 << 20


def interface(name):
    made = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL))
    made.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
    made.bind((name, ETH_P_ALL))
    made.setblocking(False)
    return made


def main():
    first, second = interface(sys.argv[1]), interface(sys.argv[2])
    delay = float(sys.argv[3]) / 1000
    others = {first: second, second: first}
    waiting = collections.deque()  # (when it is due, where it goes, frame)
    pathlib.Path(sys.argv[4]).write_text("ready")
    while True:
        limit = max(0, waiting[0][0] - time.monotonic()) if waiting else None
        for source in select.select([first, second], [], [], limit)[0]:
            while True:
                try:
                    frame, address = source.recvfrom(LONGEST_FRAME)
                except BlockingIOError:
                    break
                if address[2] != PACKET_OUTGOING:
                    waiting.append((time.monotonic() + delay, others[source], frame))
        while waiting and waiting[0][0] <= time.monotonic():
            _, sink, frame = waiting.popleft()
            try:
                sink.send(frame)
            except OSError:
                pass  # a queue is full: as on a cable, it is lost


if __name__ == "__main__":
    main()
