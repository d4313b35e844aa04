"""What is used of wandb, which need not be installed."""

from collections.abc import Mapping, Sequence

class Settings:
    def __init__(
        self,
        *,
        console: str,
        silent: bool,
        x_disable_stats: bool,
        disable_git: bool,
        save_code: bool,
        disable_code: bool,
    ) -> None: ...

class Summary:
    def update(self, d: Mapping[str, object]) -> None: ...

class Table:
    def __init__(self, *, columns: list[str], data: list[list[object]]) -> None: ...

class Artifact:
    def __init__(self, name: str, type: str) -> None: ...  # noqa: A002
    def add_file(self, local_path: str) -> object: ...

class Run:
    id: str
    summary: Summary
    def define_metric(self, name: str, step_metric: str) -> object: ...
    def log(self, data: Mapping[str, object]) -> None: ...
    def log_artifact(self, artifact_or_path: Artifact) -> object: ...
    def finish(self) -> None: ...

def init(
    *,
    project: str,
    entity: str | None,
    mode: str,
    group: str | None,
    tags: Sequence[str],
    dir: str,  # noqa: A002
    id: str,  # noqa: A002
    name: str,
    resume: str | None,
    config: Mapping[str, object],
    settings: Settings,
) -> Run: ...
def teardown() -> None: ...
