#!/usr/bin/env python3
"""The programs of a bundle as a cluster on loopback: a CPU job trains; `nodes list` says what devices there are; a GPU job trains
where there is one and else stays queued with the reason. Standard library only. Exit code 0 or 1.
"""
import json
import pathlib
import sys
import tempfile
import time

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "testing"))
import cluster  # noqa: E402
import tiny_job  # noqa: E402

STEPS = 20


def expect(condition, text):
    if not condition:
        sys.exit(f"services_test.py: {text}")


def expect_trained(ravel, folder, name, kind):
    history = ravel.train(tiny_job.write_job(folder, name, kind, STEPS), name)
    losses = [row["loss"] for row in history]
    expect(len(losses) == STEPS and losses[-1] < losses[0], f"{kind} job: expected {STEPS} falling losses, got {losses}")
    print(f"{kind} job: loss {losses[0]:.4f} to {losses[-1]:.4f} in {STEPS} steps", flush=True)


def expect_queued(ravel, folder, reason):
    ravel.ctl("submit", "-f", tiny_job.write_job(folder, "waits", "gpu", STEPS))
    end = time.monotonic() + 20
    while reason not in (job := ravel.job("waits")).get("message", ""):
        expect(time.monotonic() < end, f"gpu job: expected the reason '{reason}', got {job.get('message')!r}")
        time.sleep(0.1)
    expect(job["state"] == "QUEUED", f"gpu job: expected QUEUED, got {job['state']}")
    print(f"gpu job: queued: {job['message']}", flush=True)


def expect_gemms_kept(ravel):
    """The first GPU job timed its gemms, and the second one read what was kept of that."""
    work = ravel.folder / "worker-0"
    tables = list((work / "gemms").glob("gemm-*.txt"))
    expect(len(tables) == 1, f"gemms: expected a table in {work}/gemms, got {tables}")
    lines = [line for log in work.glob("logs/*/*/rank-0.log") for line in log.read_text().splitlines() if " by measuring" in line]
    expect(len(lines) == 2, f"gemms: expected a line in the log of each GPU job, got {lines}")
    measured = sorted(int(line.split(" by measuring")[0].split()[-1]) for line in lines)
    expect(measured[0] == 0 < measured[1], f"gemms: expected one job to measure, got {measured}")
    print(f"gemms: {measured[1]} measured by the first job, none by the second", flush=True)


def main():
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        tiny_job.write_tokens(folder)
        with cluster.Cluster(folder / "cluster", 1) as ravel:
            node = json.loads(ravel.ctl("nodes", "list", "-o", "json").stdout)["items"][0]
            print(f"node: {node['devices']} devices, {node.get('deviceKind', '')} {node.get('deviceModel', '')} {node.get('message', '')}".rstrip(), flush=True)
            expect_trained(ravel, folder, "on-cpu", "cpu")
            if node.get("message"):
                expect_queued(ravel, folder, node["message"])
            else:
                expect_trained(ravel, folder, "on-gpu", "gpu")
                expect_trained(ravel, folder, "on-gpu-again", "gpu")
                expect_gemms_kept(ravel)


if __name__ == "__main__":
    main()
