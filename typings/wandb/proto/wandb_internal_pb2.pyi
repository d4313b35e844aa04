from collections.abc import Sequence

class Item:
    key: str
    nested_key: Sequence[str]
    value_json: str

class Items:
    update: Sequence[Item]

class History:
    item: Sequence[Item]

class RunRecord:
    run_id: str
    project: str
    config: Items

class Entry:
    path: str

class Manifest:
    contents: Sequence[Entry]

class ArtifactRecord:
    name: str
    type: str
    manifest: Manifest

class Record:
    history: History
    run: RunRecord
    summary: Items
    artifact: ArtifactRecord
    def ParseFromString(self, serialized: bytes) -> int: ...  # noqa: N802
    def WhichOneof(self, oneof_group: str) -> str | None: ...  # noqa: N802
