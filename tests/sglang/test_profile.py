"""``engines.profile``: the passes of the versions that were asked for, by torch's profiler and by SGLang's own."""

from __future__ import annotations

import gzip
import json
from typing import TYPE_CHECKING

import msgspec
import pytest
from conformance_bench import EngineBench, context_of, perturbed
from served_engines import load, prompt_of

from penstock.backends.engines.options import EngineProfileOptions, SamplingOptions
from penstock.backends.profiling import profile_files

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.sglang
SAMPLING = SamplingOptions(max_response_tokens=24)


@pytest.mark.parametrize("kind", ["torch", pytest.param("sglang", marks=pytest.mark.slow)])
def test_the_versions_that_were_asked_for_are_profiled(
    kind: str, tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    folder = tiny_model()
    options = context_of(kind, folder, tmp_path, SAMPLING).options
    # The first of the two ends by itself, the second has fewer passes than it may have.
    asked = EngineProfileOptions(first_step=2, last_step=3, max_passes=12)
    bench = EngineBench(
        kind, folder, tmp_path, sampling=SAMPLING, options=msgspec.structs.replace(options, profile=asked)
    )
    try:
        model, found = load(folder), list[int]()
        for version, num_samples in enumerate((1, 1, 0, 1)):
            bench.serve(perturbed(model, version))
            for sample in range(num_samples):
                bench.ended(prompt_of(sample))
            found.append(len(profile_files(tmp_path)))
    finally:
        bench.close()
    files = profile_files(tmp_path)
    assert found[0] == 0
    assert found[1] == 1
    assert all("engine-0-step-000000" in str(path) for path in files)
    names: set[str] = set()
    for path in files:
        events = json.loads(gzip.decompress((tmp_path / path).read_bytes()))["traceEvents"]
        names |= {event.get("name", "") for event in events}
    assert "aten::mm" in names or "aten::addmm" in names or "aten::linear" in names
