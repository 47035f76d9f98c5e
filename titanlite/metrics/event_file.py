"""TensorBoard's event files, written by the training thread. torch's SummaryWriter is not used: its own thread ends at
the first error, such as a full disk, and may leave part of a record, at which TensorBoard stops reading."""

import io
import os
import platform
import time
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter
from torch import Tensor
from torch.utils.tensorboard import summary

from titanlite.files.appended_file import AppendedFile


class EventFile:
    """Writes a run's events from `first_step` on into a new file. TensorBoard hides older events of the same steps."""

    def __init__(self, folder: Path, first_step: int):
        name = f"events.out.tfevents.{time.time_ns() // 10**9:010}.{platform.node()}.{os.getpid()}"
        self.file = AppendedFile(folder / name)
        self._write(Event(file_version="brain.Event:2"))
        self.begin(first_step)

    def begin(self, first_step: int) -> None:
        """Have TensorBoard hide all events of `first_step` and later steps that were written before."""
        self._write(Event(step=first_step, session_log=SessionLog(status=SessionLog.START)))

    def _write(self, event: Event) -> None:
        event.wall_time = time.time()
        record = io.BytesIO()
        RecordWriter(record).write(event.SerializeToString())
        self.file.append(record.getvalue())

    def add_scalars(self, values: dict[str, float], step: int) -> None:
        scalars = [Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        self._write(Event(step=step, summary=Summary(value=scalars)))

    def add_histogram(self, tag: str, values: Tensor, step: int) -> None:
        """Write the distribution of `values` as a histogram of 30 equal intervals."""
        self._write(Event(step=step, summary=summary.histogram(tag, values, bins=30)))

    def add_text(self, tag: str, text: str, step: int = 0) -> None:
        self._write(Event(step=step, summary=summary.text(tag, text)))
