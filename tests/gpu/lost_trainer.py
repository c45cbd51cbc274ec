#!/usr/bin/env python3
"""kill -9 of one of several trainers of a job, timed by phase, with the real programs on loopback.

    lost_trainer.py [--kind gpu|cpu] [--trainers 4] [--kills 3] [--steps 40]
    lost_trainer.py --offload 1 [--recipe fp8_tensor]  # trainers die before a chunk of an update on their hosts and in a second
                                                       # cluster within one, and nothing is timed

One daemon, whose first GPU all trainers share (ravel-worker --trainers-per-gpu; NCCL between them), or as many CPU devices. A job
runs once undisturbed and once with trainers killed; both must have the same losses, bit for bit, and the same state in the
steps that they committed. Times are those of events, logs
and step records that the programs write anyway. A JSON line for each kill, then one of all; seconds:

    detection   from the kill until the coordinator has ended the epoch
    abort       until all survivors are gone
    new_epoch   until devices are placed for the next one
    plan        until its plan is made and sent
    start       until the last trainer process is started
    join        until all have their device, their groups and their memory
    restore     until all have the state
    first_step  until a step of the new epoch is done

Standard library only. Exit code 0, 1, or 3 where there is no GPU.
"""
import argparse
import datetime
import json
import os
import pathlib
import re
import signal
import statistics
import sys
import tempfile
import time

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "testing"))
import cluster  # noqa: E402
import tiny_job  # noqa: E402

NO_DEVICE = 3
# A trainer updates a chunk of each of four groups per step, of seven with a recipe: it dies in some step after the tenth, also in
# later epochs. Chunks of several tensors have a half.
DEATHS_IN_OFFLOAD = ("offload.host_chunk@100:kill", "offload.host_chunk_half@75:kill")
PHASES = ("detection", "abort", "new_epoch", "plan", "start", "join", "restore", "first_step")


def fail(text):
    sys.exit(f"lost_trainer.py: {text}")


def wait_for(condition, what, seconds=120):
    end = time.monotonic() + seconds
    while not (found := condition()):
        if time.monotonic() > end:
            fail(f"waited in vain for {what}")
        time.sleep(0.005)
    return found


def lanes_for(trainers):
    """A power of two, at least two lanes for each trainer."""
    return 1 << (2 * trainers - 1).bit_length()


def submit(ravel, folder, name, arguments, offload=0.0):
    lanes = lanes_for(arguments.trainers)
    optimizer = {"lr": 1e-2, "offload": {"fraction": offload}} if offload else {"lr": 1e-2}
    recipe = {"precision": {"recipe": arguments.recipe}} if arguments.recipe else {}
    file = tiny_job.write_job(folder, name, arguments.kind, arguments.steps, devices=arguments.trainers, global_batch=lanes,
                              determinism={"mode": "exact", "virtualRanks": lanes},
                              restart={"backoff": "100ms", "maxBackoff": "200ms"}, detection={"time": "1s"}, optimizer=optimizer,
                              **recipe)
    ravel.ctl("submit", "-f", file)
    return ravel.job(name)["uid"]


def log_time(line):
    return datetime.datetime.fromisoformat(line["time"].replace("Z", "+00:00")).timestamp()


def trainers_of(ravel, uid, epoch):
    """{rank: (pid, time of its start)} by the daemon's log."""
    found = {}
    for line in ravel.worker_log():
        match = re.match(rf"started trainer (\d+): job {uid}, epoch {epoch}, rank (\d+)$", line["message"])
        if match:
            found[int(match[2])] = (int(match[1]), log_time(line))
    return found


def join_ends(ravel, name, attempt):
    """When each rank of an attempt began to restore its state, by the trainers' own logs."""
    ends = {}
    for row in ravel.ctl("logs", name, "-o", "jsonl").stdout.splitlines():
        row = json.loads(row)
        line = json.loads(row["text"]) if row["attempt"] == attempt and row["text"].startswith("{") else {}
        match = re.match(r"state of step \d+ is there after ([\d.]+) s$", line.get("message", ""))
        if match:
            ends[row["rank"]] = log_time(line) - float(match[1])
    return ends


def phases_of(killed, ravel, name, uid, epoch, trainers):
    """Seconds by phase, from the kill to the first step of `epoch`."""
    events = {}
    attempt = None
    for event in ravel.events(name):
        if int(event["epoch"]) == epoch:
            events.setdefault(event["type"], int(event["timeMs"]) / 1000)
            attempt = event["attempt"] if event["type"] == "Started" else attempt
    missing = {"EpochChanged", "Recovering", "Placed", "Launched", "Started"} - set(events)
    if missing:
        fail(f"epoch {epoch} has no event {', '.join(sorted(missing))}")
    started = trainers_of(ravel, uid, epoch)
    joined = wait_for(lambda: len(ends := join_ends(ravel, name, attempt)) == trainers and ends, f"logs of attempt {attempt}")
    first = min(row["time_ms"] for row in ravel.step_records(uid) if row["epoch"] == epoch) / 1000
    ends = (events["EpochChanged"], events["Recovering"], events["Placed"], events["Launched"], max(at for _, at in started.values()),
            max(joined.values()), events["Started"], first)
    seconds, at = {}, killed
    for phase, end in zip(PHASES, ends):
        seconds[phase] = round(max(0.0, end - at), 3)
        at = max(at, end)
    return seconds


def kill_one(ravel, name, uid, kill, arguments):
    """Kills a trainer in the middle of a step; what happened then."""
    step = arguments.steps * (kill + 1) // (arguments.kills + 1)
    wait_for(lambda: (rows := ravel.step_records(uid)) and rows[-1]["step"] >= step, f"step {step} of job {name}", 300)
    before = ravel.step_records(uid)[-1]
    rank = kill % arguments.trainers
    pid, _ = trainers_of(ravel, uid, before["epoch"])[rank]
    killed = time.time()
    os.kill(pid, signal.SIGKILL)
    after = wait_for(lambda: [row for row in ravel.step_records(uid) if row["epoch"] > before["epoch"]], "a step of the next epoch")[0]
    seconds = phases_of(killed, ravel, name, uid, after["epoch"], arguments.trainers)
    cause = next(event for event in ravel.events(name) if event["type"] == "EpochChanged" and int(event["epoch"]) == after["epoch"])
    # A survivor may say sooner that its peer is gone than the daemon that a process is.
    if (cause["reason"], int(cause["rank"])) != ("ProcessCrash", rank) and cause["reason"] != "CommError":
        fail(f"rank {rank} was killed; the coordinator says {cause['reason']} of rank {cause['rank']}: {cause['message']}")
    line = {"kill": kill, "rank": rank, "at_step": before["step"], "from_step": after["step"] - 1, "cause": cause["reason"], "epoch": after["epoch"],
            "trainers": after["world_size"], "total": round(sum(seconds.values()), 3), "seconds": seconds}
    print(json.dumps(line), flush=True)
    return line


def digests_of(ravel, name):
    """{step: digest of the state} of the committed checkpoints."""
    return {step: json.loads(ravel.ctl("checkpoints", "show", directory, "-o", "json").stdout)["stateDigest"]
            for step, directory in ravel.checkpoints(name).items()}


def train(ravel, folder, name, arguments, kills, offload=0.0):
    """The bits of the losses, the digests of the committed steps, and a line for each kill."""
    uid = submit(ravel, folder, name, arguments, offload)
    lines = [kill_one(ravel, name, uid, kill, arguments) for kill in range(kills)]
    job = wait_for(lambda: (job := ravel.job(name))["state"] in ("SUCCEEDED", "FAILED", "CANCELLED") and job, f"the end of job {name}", 300)
    if job["state"] != "SUCCEEDED":
        fail(f"job {name}: {job['state']}: {job['reason']}: {job['message']}")
    rows = [json.loads(row) for row in ravel.ctl("metrics", name, "-o", "jsonl").stdout.splitlines() if row.strip()]
    return [row["loss_bits"] for row in rows], digests_of(ravel, name), lines


def compare(folder, arguments, fault=None):
    """A job undisturbed and disturbed on a cluster of its own: lines of kills, deaths by the fault, and committed steps with equal
    state; None without a GPU."""
    environment = {"RAVEL_FAULTS": fault} if fault else {}
    option = "--trainers-per-gpu" if arguments.kind == "gpu" else "--cpu-devices"
    folder.mkdir()
    tiny_job.write_tokens(folder)
    with cluster.Cluster(folder / "cluster", 1, worker_options=[option, str(arguments.trainers)], environment=environment) as ravel:
        node = json.loads(ravel.ctl("nodes", "list", "-o", "json").stdout)["items"][0]
        if arguments.kind == "gpu" and node.get("message"):
            print(f"no GPU: {node['message']}")
            return None
        expected, states, _ = train(ravel, folder, "undisturbed", arguments, 0)
        losses, states_after, lines = train(ravel, folder, "disturbed", arguments, 0 if fault else arguments.kills, arguments.offload)
        deaths = [event for event in ravel.events("disturbed") if event["type"] == "EpochChanged" and event["reason"] == "ProcessCrash"]
    if losses != expected or len(losses) != arguments.steps:
        different = [step for step, (a, b) in enumerate(zip(losses, expected), 1) if a != b]
        fail(f"{len(losses)} and {len(expected)} of {arguments.steps} steps; losses differ at steps {different[:5]}")
    both = sorted(set(states) & set(states_after))
    different = [step for step in both if states[step] != states_after[step]]
    if different or arguments.steps not in both:
        fail(f"committed steps {both} in both runs; states differ at steps {different}")
    if fault and not deaths:
        fail(f"no trainer died of {fault}")
    return lines, len(deaths), len(both)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=("gpu", "cpu"), default="gpu")
    parser.add_argument("--trainers", type=int, default=4)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--offload", type=float, default=0.0, metavar="FRACTION")
    parser.add_argument("--recipe", default="")
    arguments = parser.parse_args()
    if arguments.offload and arguments.kind != "gpu":
        fail("--offload is about gpu devices; tests/e2e/offload_test has that of cpu devices")
    with tempfile.TemporaryDirectory() as name:
        for i, fault in enumerate(DEATHS_IN_OFFLOAD if arguments.offload else (None,)):
            found = compare(pathlib.Path(name) / str(i), arguments, fault)
            if found is None:
                return NO_DEVICE
            lines, deaths, equal_states = found
            if fault:
                print(json.dumps({"kind": arguments.kind, "trainers": arguments.trainers, "offload": arguments.offload, "recipe": arguments.recipe, "fault": fault,
                                  "deaths": deaths, "equal_losses": arguments.steps, "equal_states": equal_states}), flush=True)
    if arguments.offload:
        return 0
    medians = {phase: statistics.median(line["seconds"][phase] for line in lines) for phase in PHASES}
    print(json.dumps({"kind": arguments.kind, "trainers": arguments.trainers, "kills": len(lines), "equal_losses": arguments.steps,
                      "equal_states": equal_states, "median_total": statistics.median(line["total"] for line in lines), "median_seconds": medians}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
