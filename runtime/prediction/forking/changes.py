"""What ``key=value`` of a fork means, and which keys cannot change in a run that goes on.

* The policy (:data:`POLICY_KEYS`): the Buffer is told, as by ``penstock policy``.
* ``engines.count`` of a run whose engines may join and leave: the Buffer is told, as by ``penstock scale``.
* Models (:data:`MODEL_BLOCKS`, :data:`MODEL_KEYS`): the backends take as long as they say.
* What an actor is built with (:data:`BUILT_KEYS`, ``prompt_source.*``): that actor is replaced, as when a run is
  resumed, in both futures, so that they differ in the value alone.

Everything else is refused with the reason.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from penstock.backends.engines.options import are_elastic
from penstock.backends.engines.spec import are_modelled
from penstock.backends.learners.spec import is_modelled
from penstock.messages.errors import UserFault
from penstock.messages.operator import EnginesAsked, PolicyChanged
from penstock.runtime.launch.resume import OTHER_REASON, REASONS
from penstock.runtime.observability.explain.measure import read_scenario
from penstock.runtime.observability.facts import SCENARIO_FILE
from penstock.runtime.prediction.calibrate import calibrate
from penstock.runtime.prediction.recorded import read_recording
from penstock.runtime.run.wiring import engine_names
from penstock.runtime.scenario.load import overridden_source
from penstock.runtime.scenario.modelled import load_modelled, modelled_from
from penstock.runtime.scenario.source import read_source

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from penstock.runtime.prediction.models import Models
    from penstock.runtime.scenario import Scenario
    from penstock.runtime.scenario.source import Source

POLICY: Final = "staleness.policy"
POLICY_KEYS: Final = (POLICY, "staleness.max_staleness", "staleness.update_mode", "staleness.on_stale")
COUNT: Final = "engines.count"
OPENING_KEYS: Final = ("engines.slots", "engines.progress_tokens")
"""Of what an engine is opened with."""
BUILT_KEYS: Final = (
    COUNT,
    *OPENING_KEYS,
    "staleness.target_outstanding",
    "staleness.max_concurrent",
    "run.num_steps",
)
BUILT_BLOCK: Final = "prompt_source"
MODEL_BLOCKS: Final = ("engines.simulated", "learner.simulated", "reward.simulated")
MODEL_KEYS: Final = ("engines.simulated_speed", "engines.simulated_fetch_s")
STATELESS: Final = ("runtime", "observability")
REQUEST: Final = 1 << 50
"""Of what the Buffer is asked at a fork; no operator of a run has asked under it."""


class Change(NamedTuple):
    """What is asked for at a fork."""

    overrides: tuple[str, ...]
    before: Scenario
    """As the run was, modelled."""
    after: Scenario
    """The same with the overrides."""
    events: tuple[PolicyChanged | EnginesAsked, ...]
    """Told to the Buffer."""
    engines: tuple[str, ...]
    """That the run is to have."""
    counts_engines: bool
    """Their number is said."""
    reopens_engines: bool
    """Engines are replaced, as they are opened with other values."""
    is_elastic: bool
    """Engines may join and leave, so their number is asked for."""
    doubts: tuple[str, ...]
    """In what either leaves what the models were fitted to."""
    own_models: bool
    """The run was simulated, and its own models go on."""


def read_change(folder: Path, overrides: Sequence[str], models: Models | None) -> Change:
    """The scenario of a run as models play it, with and without overrides.

    Args:
        folder: of the run.
        overrides: ``key=value``.
        models: of times and lengths; None: those of the scenario where it is simulated, else fitted to this run.

    Raises:
        UserFault: an override cannot be used; or the run cannot be fitted.
    """
    keys = tuple(text.partition("=")[0].strip() for text in overrides)
    for key in keys:
        _check_key(folder, key)
    file = folder / SCENARIO_FILE
    scenario = read_scenario(folder)
    if scenario.episode.kind != "single":
        raise UserFault(
            "--fork: this run has episodes, and where one stands with its tools is not recorded, so nothing can go on "
            "from there; simulate its scenario anew: penstock simulate SCENARIO --models FILE"
        )
    own_models = models is None and are_modelled(scenario.engines) and is_modelled(scenario.learner)
    if models is None and not own_models:
        try:
            models = calibrate([read_recording(folder)])
        except UserFault as error:
            raise UserFault(
                f"--fork: no models can be fitted to this run: {error}; name others with --models FILE"
            ) from None
    source = read_source(file)
    if models is not None:
        _set_models(source, models.applied(load_modelled(file)[0]))
    before = modelled_from(source)[0]
    asked = read_source(file)
    _set_models(asked, before)
    if POLICY in keys:  # what belongs to the old policy is the new one's own where nothing is said
        block = asked.data.setdefault("staleness", {})
        assert isinstance(block, dict), "it was read as a scenario above"
        block |= {"max_staleness": None, "update_mode": None}
    if before.engines.scale != "fixed":
        engines = asked.data["engines"]
        assert isinstance(engines, dict), "likewise"
        engines["scale"] = "fixed"  # so that a number of engines without room for others can be asked for
    after = modelled_from(overridden_source(asked, overrides))[0]
    elastic = are_elastic(before.engines)
    if COUNT in keys and before.engines.more:
        raise UserFault("--fork: engines.count: with engines.more the number of an engine says its kind, and would not")
    return Change(
        overrides=tuple(overrides),
        before=before,
        after=after,
        events=_events(keys, after, is_elastic=elastic),
        engines=engine_names(after),
        counts_engines=COUNT in keys,
        reopens_engines=any(key in OPENING_KEYS for key in keys),
        is_elastic=elastic,
        doubts=_doubts(before, after, models),
        own_models=own_models,
    )


def _check_key(folder: Path, key: str) -> None:
    block = key.partition(".")[0]
    is_known = (
        key in (*POLICY_KEYS, *BUILT_KEYS, *MODEL_KEYS)
        or block == BUILT_BLOCK
        or any(key == name or key.startswith(f"{name}.") for name in MODEL_BLOCKS)
    )
    if is_known:
        return
    if block in STATELESS:
        why = f"{block} decides nothing that a simulation shows"
    elif block == "engines":
        why = "the models say how engines behave, and this key does not enter them"
    else:
        why = REASONS.get(block, OTHER_REASON)
    can = (*POLICY_KEYS, *BUILT_KEYS, f"{BUILT_BLOCK}.*", *MODEL_KEYS, *(f"{name}.*" for name in MODEL_BLOCKS))
    raise UserFault(
        f"--fork: {key} cannot change in a run that goes on: {why}. What can: {', '.join(can)}; for a run of its own "
        f"from the start: penstock simulate {folder / SCENARIO_FILE} {key}=…"
    )


def _set_models(source: Source, scenario: Scenario) -> None:
    models = (scenario.engines.simulated, scenario.learner.simulated, scenario.reward.simulated)
    for path, model in zip(MODEL_BLOCKS, models, strict=True):
        name, key = path.split(".")
        block = source.data.setdefault(name, {})
        if isinstance(block, dict):
            block[key] = msgspec.to_builtins(model)
    runtime = source.data.setdefault("runtime", {})
    if isinstance(runtime, dict):
        shared = (
            ("simulated_cores", scenario.runtime.simulated_cores), ("simulated_hop_s", scenario.runtime.simulated_hop_s)
        )  # fmt: skip
        runtime |= {key: value for key, value in shared if value is not None}


def _doubts(before: Scenario, after: Scenario, models: Models | None) -> tuple[str, ...]:
    fitted = () if models is None else (*models.doubts(before), *models.doubts(after))
    follows = before.engines.scale == "by_bound"
    own = ("engines.scale: by_bound is not followed from the fork on: engines stay as they are there",) * follows
    return tuple(dict.fromkeys((*fitted, *own)))


def _events(keys: Sequence[str], after: Scenario, *, is_elastic: bool) -> tuple[PolicyChanged | EnginesAsked, ...]:
    events: list[PolicyChanged | EnginesAsked] = []
    if any(key in POLICY_KEYS for key in keys):
        staleness = after.staleness
        assert staleness.max_staleness is not None, "scenarios are resolved"
        assert staleness.update_mode is not None
        events.append(
            PolicyChanged(
                policy=staleness.policy,
                max_staleness=staleness.max_staleness,
                update_mode=staleness.update_mode,
                on_stale=staleness.on_stale,
                request=REQUEST,
            )
        )
    if COUNT in keys and is_elastic:
        events.append(EnginesAsked(engines=engine_names(after), request=REQUEST + 1))
    return tuple(events)
