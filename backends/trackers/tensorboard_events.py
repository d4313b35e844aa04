"""The tracker ``tensorboard``: event files in the run's folder, read by ``tensorboard --logdir runs``."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.compat.proto.types_pb2 import DT_STRING
from tensorboard.plugins.text.metadata import create_summary_metadata
from tensorboard.summary.writer.event_file_writer import EventFileWriter

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path
    from typing import Any

    from penstock.backends.trackers.protocol import TrackedRun, TrackedSample


class TensorBoardTracker:
    """Implements :class:`~penstock.backends.trackers.protocol.Tracker`."""

    def __init__(self, run: TrackedRun) -> None:
        self._writer = EventFileWriter(str(run.folder))
        self._version = 0
        if not run.resumes:
            self._text("scenario", 0, json.dumps(run.scenario, indent=2, ensure_ascii=False))

    def metrics(self, version: int, metrics: Mapping[str, float]) -> None:
        """Each figure is a scalar under its name."""
        self._version = max(version, self._version)
        self._add(version, [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()])
        self._writer.flush()

    def samples(self, version: int, samples: Sequence[TrackedSample]) -> None:
        """They are a text, as JSON."""
        self._text("samples", version, json.dumps([each._asdict() for each in samples], indent=2, ensure_ascii=False))

    def finish(self, summary: Mapping[str, Any], files: Sequence[Path]) -> None:
        """The summary is a text, as is where the files are; of these, event files hold pictures only."""
        self._text("summary", self._version, json.dumps(summary, indent=2, ensure_ascii=False))
        self._text("files", self._version, "\n".join(map(str, files)))
        pictures = [_picture(file) for file in files if file.suffix == ".png"]
        self._add(self._version, pictures)
        self._writer.close()

    def _text(self, tag: str, version: int, text: str) -> None:
        # The page takes texts for Markdown, in which what is indented by four is shown as it is.
        body = "\n".join(f"    {line}" for line in text.splitlines())
        tensor = TensorProto(
            dtype=DT_STRING,
            string_val=[body.encode(errors="replace")],
            tensor_shape=TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)]),
        )
        # As TensorBoard's own text summaries are:
        metadata = create_summary_metadata(display_name=None, description=None)
        self._add(version, [Summary.Value(tag=f"{tag}/text_summary", metadata=metadata, tensor=tensor)])
        self._writer.flush()

    def _add(self, version: int, values: list[Summary.Value]) -> None:
        self._writer.add_event(Event(wall_time=time.time(), step=version, summary=Summary(value=values)))


def _picture(file: Path) -> Summary.Value:
    """A PNG under the name of its file; its size in pixels stands in its first chunk."""
    data = file.read_bytes()
    width, height = (int.from_bytes(data[start : start + 4]) for start in (16, 20))
    image = Summary.Image(height=height, width=width, colorspace=3, encoded_image_string=data)
    return Summary.Value(tag=file.stem, image=image)
