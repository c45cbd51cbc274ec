#!/usr/bin/env python3
"""Prints the golden bytes of event_file_test.cc, as TensorBoard's own writer makes them, or reads an event file.

    pip install tensorboard                         # 2.21.0 made the bytes that are kept
    tests/coordinator/ctl/golden/event_file.py      # hex
    tests/coordinator/ctl/golden/event_file.py DIR  # the last step and loss of an event file, by TensorBoard's own reader
"""
import io
import sys

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.compat.proto import event_pb2
from tensorboard.summary.writer.record_writer import RecordWriter

STEPS = [
    (1700000000.25, 300, [("loss", 3.6629536), ("grad_norm", 1.5), ("learning_rate", 0.003), ("tokens_per_second", 13200.5),
                          ("step_seconds", 0.31), ("workers", 3), ("epoch", 2), ("validation_loss", 4.0), ("loss_scale", 65536)]),
    (1700000001.0, 301, [("loss", float("nan")), ("grad_norm", float("inf")), ("learning_rate", 0), ("tokens_per_second", 0),
                         ("step_seconds", 0), ("workers", 0), ("epoch", 0)]),
]


def golden():
    out = io.BytesIO()
    writer = RecordWriter(out)
    writer.write(event_pb2.Event(wall_time=1700000000.25, file_version="brain.Event:2").SerializeToString())
    for wall_time, step, values in STEPS:
        event = event_pb2.Event(wall_time=wall_time, step=step)
        for tag, value in values:
            event.summary.value.add(tag=tag, simple_value=value)
        writer.write(event.SerializeToString())
    return out.getvalue().hex()


def main():
    if len(sys.argv) == 1:
        print(golden())
        return
    reader = EventAccumulator(sys.argv[1], size_guidance={"scalars": 0})
    reader.Reload()
    losses = reader.Scalars("loss")
    print(len(losses), "steps; last", losses[-1].step, losses[-1].value, "; tags", *sorted(reader.Tags()["scalars"]))


if __name__ == "__main__":
    main()
