"""Keys of a scenario whose value names a file, rows, a model or a function of the user's: their types say so.

Whatever has to know of them (paths that are made absolute, the rules, the checks before a run, schema and reference)
reads the types (:mod:`penstock.runtime.scenario.named`); nobody keeps a list of keys.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from msgspec import Meta


class Names(StrEnum):
    """What the value of a key names; of a function, as what it is loaded."""

    FILE = "file"
    """A file or a folder."""
    MODEL = "model"
    """The folder of a model, or its name on a hub."""
    ROWS = "rows"
    """A file or folder of rows, with or without a slice; rows on a hub; rows that are made."""
    REWARD = "reward"
    POLICY = "policy"
    OBJECTIVE = "objective"
    EPISODE_PART = "episode part"
    """What plays an episode, a tool, an environment."""
    EPISODE = "episode"
    FILTER = "filter"
    SAMPLE_FILTER = "sample filter"
    SAMPLES_HOOK = "hook"
    PRIORITY = "priority"
    ROUTING = "routing"
    DATA_SOURCE = "data source"
    EVALUATION_HOOK = "evaluation hook"
    TRAINING_HOOK = "training hook"
    TRACKER = "tracker"

    @property
    def is_function(self) -> bool:
        """Whether it is the user's function or class, ``file.py:name``."""
        return self not in (Names.FILE, Names.MODEL, Names.ROWS)

    @property
    def is_only_function(self) -> bool:
        """Whether no word stands for one that is built in."""
        words = (Names.REWARD, Names.POLICY, Names.ROUTING, Names.OBJECTIVE, Names.EPISODE_PART, Names.TRACKER)
        return self.is_function and self not in (*words, Names.DATA_SOURCE)


def _marked(names: Names) -> Meta:
    return Meta(extra={"names": names}, extra_json_schema={"pattern": r"\.py:"} if names.is_only_function else None)


def is_user_code(value: str) -> bool:
    """Whether this names something in a user's file (``file.py:name``) and not something built in."""
    return ".py:" in value


FileKey = Annotated[str, _marked(Names.FILE)]
ModelKey = Annotated[str, _marked(Names.MODEL)]
RowsKey = Annotated[str, _marked(Names.ROWS)]
RewardKey = Annotated[str, _marked(Names.REWARD)]
PolicyKey = Annotated[str, _marked(Names.POLICY)]
ObjectiveKey = Annotated[str, _marked(Names.OBJECTIVE)]
EpisodePartKey = Annotated[str, _marked(Names.EPISODE_PART)]
EpisodeKey = Annotated[str, _marked(Names.EPISODE)]
FilterKey = Annotated[str, _marked(Names.FILTER)]
SampleFilterKey = Annotated[str, _marked(Names.SAMPLE_FILTER)]
SamplesHookKey = Annotated[str, _marked(Names.SAMPLES_HOOK)]
DataSourceKey = Annotated[str, _marked(Names.DATA_SOURCE)]
EvaluationHookKey = Annotated[str, _marked(Names.EVALUATION_HOOK)]
PriorityKey = Annotated[str, _marked(Names.PRIORITY)]
RoutingKey = Annotated[str, _marked(Names.ROUTING)]
TrainingHookKey = Annotated[str, _marked(Names.TRAINING_HOOK)]
TrackerKey = Annotated[str, _marked(Names.TRACKER)]
