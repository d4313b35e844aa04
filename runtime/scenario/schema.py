"""The JSON Schema of scenarios, with the docstring of every key, so that an editor completes and explains them."""

from __future__ import annotations

import inspect
import json
from typing import Any, Final

import msgspec

from penstock.backends.learners.options import LearnerOptions
from penstock.runtime.scenario.keys import block_paths, field_docs
from penstock.runtime.scenario.objective import KEY
from penstock.runtime.scenario.part_names import CHOICES
from penstock.runtime.scenario.structure import Scenario

DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"


def scenario_schema() -> dict[str, Any]:
    """The schema as plain data."""
    schema = msgspec.json.schema(Scenario)
    definitions: dict[str, Any] = schema["$defs"]
    for _, struct in block_paths():
        definition = definitions[struct.__name__]
        definition["description"] = inspect.cleandoc(struct.__doc__ or "")
        for key, text in field_docs(struct).items():
            definition["properties"][key]["description"] = text
    for choice in CHOICES:  # names that other packages bring are good as well
        for struct in (choice.struct, *choice.struct.__subclasses__()):
            named = definitions[struct.__name__]["properties"][choice.key]
            named["anyOf"] = [{"enum": list(choice.builtin())}, {"type": named.pop("type")}]
    # One word is short for a block with that name.
    objective = definitions[LearnerOptions.__name__]["properties"][KEY]
    reference = objective.pop("$ref")
    objective["anyOf"] = [{"$ref": reference}, {"type": "string"}]
    return {"$schema": DIALECT, "title": "A scenario of Penstock", **schema}


def schema_text() -> str:
    """The schema as JSON text."""
    return json.dumps(scenario_schema(), indent=2, ensure_ascii=False) + "\n"
