"""How the ``data:`` block has to fit, in itself and with the others."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from penstock.backends.data.media import media_columns
from penstock.backends.data.mixture import named_sources
from penstock.backends.data.options import PUSHED
from penstock.backends.data.problems import DataError
from penstock.backends.data.row import retries_problem
from penstock.backends.data.sources import COMPRESSED_SUFFIXES, parse_source
from penstock.backends.engines.spec import some_can
from penstock.backends.protocol import Capability
from penstock.messages.option_keys import Names, is_user_code
from penstock.runtime.scenario.media_rules import are_placed_here, media_rules, training_rules
from penstock.runtime.scenario.named import MADE_DATA, named_values
from penstock.runtime.scenario.pushed_rules import pushed_rules
from penstock.runtime.scenario.row_metadata import metadata_blocks, unnamed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.backends.data.mixture import NamedSource
    from penstock.backends.data.options import DataOptions
    from penstock.runtime.scenario.source import KeyPath
    from penstock.runtime.scenario.structure import Scenario


DATA_PATH: KeyPath = ("data", "path")


def data_rules(s: Scenario) -> Iterator[tuple[KeyPath, str]]:
    """The key to change, and what is wrong with it."""
    broken = list(_sources(s.data)) + list(_paths(s))
    yield from broken
    if broken:
        return
    for source in named_sources(s.data):
        yield from _template(source)
        yield from _media(s, source)
    yield from _stream(s)
    yield from _own_source(s)
    yield from _retries(s)
    if s.data.media_hosts and are_placed_here(s):
        yield (
            ("data", "media_hosts"),
            "engines and learner of this run look at images themselves, and fetch none; remove it, and have the rows "
            "name files",
        )
    if s.data.sources and some_can(s.engines, Capability.FROM_ROWS):
        yield (
            ("data", "sources"),
            "engines that answer from rows know those of one file; put the rows into one and name it in data.path",
        )


def _sources(data: DataOptions) -> Iterator[tuple[KeyPath, str]]:
    if data.source is not None:
        if data.path is not None or data.sources:
            yield DATA_PATH, "the rows are those of data.source; remove this, or that"
        if data.source != PUSHED and not is_user_code(data.source):
            yield ("data", "source"), f"must be file.py:Class, or {PUSHED}; found '{data.source}'"
        return
    if data.path is None and not data.sources:
        yield DATA_PATH, "there are no rows; name a file here (rows.jsonl), or several under data.sources"
    if data.path is not None and data.sources:
        yield DATA_PATH, "the rows are named here and under data.sources; remove one, or make this one of the sources"
    weighted = sum(source.weight is not None for source in data.sources)
    if 0 < weighted < len(data.sources):
        index = next(i for i, source in enumerate(data.sources) if source.weight is None)
        yield (
            ("data", "sources", index, "weight"),
            "other sources have a weight and this one has none; give each one, or none",
        )


def _paths(s: Scenario) -> Iterator[tuple[KeyPath, str]]:
    is_good = True
    for each in named_values(s):
        try:
            if each.names is Names.ROWS:
                parse_source(each.value)
        except DataError as error:
            is_good = False
            yield each.path, str(error)
    if is_good and s.data.sources and s.data.path is None:
        names = Counter(source.name for source in named_sources(s.data))
        for index, source in enumerate(named_sources(s.data)):
            if names[source.name] > 1:
                yield ("data", "sources", index, "name"), f"two sources are called '{source.name}'; name each"
                return


def _template(source: NamedSource) -> Iterator[tuple[KeyPath, str]]:
    options = source.options
    if options.chat_template:
        return
    given = {
        "system_prompt": options.system_prompt,
        "tools_key": options.tools_key,
        "template_arguments": options.template_arguments,
    }
    for name, value in given.items():
        if value:
            yield (
                ("data", name),
                f"is for the chat template, and the rows of {source.path} are rendered without one; set chat_template: "
                "true, or remove it",
            )


def _media(s: Scenario, source: NamedSource) -> Iterator[tuple[KeyPath, str]]:
    if not media_columns(source.options.multimodal_keys):
        return
    key = ("data", "multimodal_keys")
    if not source.options.chat_template:
        yield key, "where images, videos and sounds stand is the chat template's to say; set data.chat_template: true"
    yield from media_rules(s, key, source.options.multimodal_keys)
    yield from training_rules(s)


def _retries(s: Scenario) -> Iterator[tuple[KeyPath, str]]:
    """Of rows that choose theirs. (What a row itself says is checked where it is read.)"""
    key = s.data.num_retries_key
    if key is None:
        return
    if problem := unnamed(s, key, "no row says how often"):
        yield ("data", "num_retries_key"), problem
    for path, block in metadata_blocks(s):
        if problem := retries_problem((block.metadata or {}).get(key)):
            yield (*path, "metadata", key), f"{problem} (data.num_retries_key names it)"


def _own_source(s: Scenario) -> Iterator[tuple[KeyPath, str]]:
    """What a class that makes rows leaves no room for."""
    data = s.data
    if data.source is None:
        if data.source_options:
            yield ("data", "source_options"), "are for the class that data.source names; name one, or remove them"
        return
    if data.num_epochs is not None:
        yield (
            ("data", "num_epochs"),
            "a class that makes rows has no end to count from; set run.num_steps, and this to null",
        )
    if data.source == PUSHED:
        yield from pushed_rules(s)
    for name, why in (
        ("stream", "nothing is read from a file"),
        (
            "skip_bad_rows",
            "each row has its number in the order in which the class makes them; leave bad ones out there",
        ),
        ("skip_long_prompts", "each row has its number; leave long ones out in the class"),
    ):
        if getattr(data, name):
            yield ("data", name), f"{why}; set it to false"
    for name in ("priority", "replay"):
        if getattr(s.prompt_source, name) is not None:
            yield ("prompt_source", name), "which row comes next is for the class of data.source to say; set it to null"
    if data.source != PUSHED and some_can(s.engines, Capability.FROM_ROWS):
        yield (
            ("data", "source"),
            "engines that answer from rows have to know these before the run; name a file in data.path",
        )


def _stream(s: Scenario) -> Iterator[tuple[KeyPath, str]]:
    if not s.data.stream:
        return
    key = ("data", "stream")
    if some_can(s.engines, Capability.FROM_ROWS):
        yield key, "engines that answer from rows keep them in memory; set it to false"
    for source in named_sources(s.data):
        path = parse_source(source.path).path
        if path.startswith(MADE_DATA):
            yield key, f"{source.path} is made, not read; set it to false"
        elif path.lower().endswith(COMPRESSED_SUFFIXES):
            yield (
                key,
                f"{source.path} is compressed, so no row of it can be read without all before it; unpack it, convert "
                "it to Parquet, or set it to false",
            )
