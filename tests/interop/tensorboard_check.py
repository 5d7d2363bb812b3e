#!/usr/bin/env python3
"""Compares event files of a run with its metrics.jsonl, through TensorBoard's own reader.

tensorboard_check.py RUN [EVENTS]: EVENTS is the directory of the event files, RUN itself where it is not given. Every number of metrics.jsonl must
come back at its step as the float32 next to it. Needs the package tensorboard. Status 0 when all agree.
"""
import json
import math
import struct
import sys


def read_metrics(path):
    """(metric, step) -> value, the last where a step was taken again."""
    values = {}
    with open(path) as file:
        for line in file:
            record = json.loads(line)
            step = record.get("step", 0)
            for name, value in record.items():
                if name != "step" and isinstance(value, (bool, int, float)):
                    values[name, step] = float(value)
    return values


def read_events(directory):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    accumulator = EventAccumulator(directory, size_guidance={"scalars": 0})
    accumulator.Reload()
    return {(tag, event.step): event.value for tag in accumulator.Tags()["scalars"] for event in accumulator.Scalars(tag)}


def check(run, events=None):
    """How many scalars agree; raises AssertionError naming the first that does not."""
    expected = read_metrics(f"{run}/metrics.jsonl")
    got = {key: value for key, value in read_events(events or run).items() if not math.isnan(value)}
    assert expected.keys() == got.keys(), sorted(expected.keys() ^ got.keys())[:5]
    for key, value in expected.items():
        rounded, = struct.unpack("<f", struct.pack("<f", value))
        assert got[key] == rounded, (key, got[key], value)
    return len(expected)


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    print(f"{check(*sys.argv[1:])} scalars agree")
