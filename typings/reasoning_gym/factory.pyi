from collections.abc import Callable

from reasoning_gym.dataset import ProceduralDataset

DATASETS: dict[str, tuple[type[ProceduralDataset], Callable[[], object]]]
