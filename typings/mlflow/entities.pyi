class Experiment:
    experiment_id: str

class Metric:
    key: str
    value: float
    step: int
    def __init__(self, key: str, value: float, timestamp: int, step: int) -> None: ...

class Param:
    def __init__(self, key: str, value: str) -> None: ...

class FileInfo:
    path: str

class RunInfo:
    run_id: str
    status: str

class RunData:
    params: dict[str, str]
    metrics: dict[str, float]

class Run:
    info: RunInfo
    data: RunData
