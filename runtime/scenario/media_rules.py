"""What has to fit where prompts have images: the engines that look at them, and the learner that looks again."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from penstock.backends.checkpoint.options import SEEING_MODEL
from penstock.backends.data.media import KEPT_FOLDER, media_columns
from penstock.backends.data.mixture import named_sources
from penstock.backends.data.options import MediaKeys
from penstock.backends.engines.spec import all_can, engines_that, unable
from penstock.backends.episodes.playing import ImageRules
from penstock.backends.learners.spec import LEARNERS
from penstock.backends.protocol import Capability

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.runtime.scenario.source import KeyPath
    from penstock.runtime.scenario.structure import Scenario


def has_images(s: Scenario) -> bool:
    """Whether some rows, those of an evaluation too, have images, videos or sounds, or episodes may show images."""
    if s.episode.images:
        return True
    given = _row_keys(s)
    given += [keys for each in s.evaluation.datasets if (keys := each.multimodal_keys) is not None]
    return any(media_columns(keys) for keys in given)


def _row_keys(s: Scenario) -> list[MediaKeys]:
    return [source.options.multimodal_keys for source in named_sources(s.data)]


def image_rules(s: Scenario, run_folder: str) -> ImageRules | None:
    """Of images in episodes; None: there are none."""
    if not has_images(s):
        return None
    folder = str(Path(run_folder).absolute() / KEPT_FOLDER)
    limit_gb = s.episode.max_images_gb
    return ImageRules(
        folder=folder,
        max_bytes=s.data.max_media_bytes,
        max_pixels=s.data.max_image_pixels,
        max_kept_bytes=None if limit_gb is None else round(limit_gb * 1e9),
    )


def are_placed_here(s: Scenario) -> bool:
    """Whether prompts hold all tokens of their images. Servers put them there by themselves, and may where nobody
    trains on what they saw and no episode goes on behind it."""
    nobody_goes_on = s.run.only in ("rollout", "evaluate") and s.episode.kind == "single"
    return all_can(s.engines, Capability.SEES) and not (nobody_goes_on and all_can(s.engines, Capability.MEDIA))


def media_rules(s: Scenario, key: KeyPath, keys: MediaKeys) -> Iterator[tuple[KeyPath, str]]:
    """Engines that do not take what the key asks for. (Also of an evaluation.)"""
    if blind := unable(s.engines, Capability.SEES):
        seeing = " or ".join(engines_that(Capability.SEES))
        yield key, f"engines of the backend {blind[0]} take text only; set engines.backend: {seeing}, or remove it"
    elif are_placed_here(s):
        if other := [kind for kind in media_columns(keys) if kind != "image"]:
            servers = " or ".join(engines_that(Capability.MEDIA))
            yield (
                key,
                f"learners and engines of the backend torch look at images, not at {other[0]}; collect samples with "
                f"engines.backend: {servers}, run.only: rollout and episode.kind: single",
            )
        if s.model.make not in (None, SEEING_MODEL):
            yield ("model", "make"), f"takes text only, and rows have images; set it to {SEEING_MODEL}"
        elif s.model.make is not None and (served := _served(s)):
            yield (
                ("model", "make"),
                f"engines of the backend {served[0]} look at patches of 14 pixels, which published models have, and "
                f"{SEEING_MODEL} has smaller ones; name a model (model.path), or set engines.backend: torch",
            )


def _served(s: Scenario) -> list[str]:
    """Kinds of engines of the run that have a server look at images."""
    return sorted({group.backend for group in (s.engines, *s.engines.more)} & {*engines_that(Capability.MEDIA)})


def shown_rules(s: Scenario) -> Iterator[tuple[KeyPath, str]]:
    """Of a run whose rows may have no images, and whose episodes show some."""
    key = ("episode", "images")
    if s.episode.images and s.episode.kind != "single":
        yield from media_rules(s, key, MediaKeys(image="images"))
        if all_can(s.engines, Capability.SEES) and not any(map(media_columns, _row_keys(s))):
            yield from training_rules(s)


def training_rules(s: Scenario) -> Iterator[tuple[KeyPath, str]]:
    """A learner that would not see what the engines saw."""
    if s.run.only in ("rollout", "evaluate") or not all_can(s.engines, Capability.SEES):
        return
    learner, has_rows = s.learner, any(map(media_columns, _row_keys(s)))
    who, key = ("rows", "data.multimodal_keys") if has_rows else ("episodes", "episode.images")
    seeing = " or ".join(LEARNERS.having(lambda spec: spec.sees_images))
    for found, path, remedy in (
        (
            not LEARNERS.spec(learner.backend).sees_images,
            ("learner", "backend"),
            f"{learner.backend} computes text only; set it to {seeing}",
        ),
        (
            learner.tensor_parallel > 1,
            ("learner", "tensor_parallel"),
            "no ranks compute a vision tower together; set it to 1 (parallel: fsdp divides its weights)",
        ),
        (learner.lora is not None, ("learner", "lora"), "is for text only; remove it (learner.freeze trains less)"),
        (learner.warm_start is not None, ("learner", "warm_start"), "its demonstrations have no images; remove it"),
        (learner.objective.critic == "own", ("learner", "objective", "critic"), "sees no images; set it to shared"),
        (
            learner.true_on_policy,
            ("learner", "true_on_policy"),
            "the bits of two vision towers differ; set it to false",
        ),
        (s.teacher is not None, ("teacher",), "sees no images; remove it"),
    ):
        if found:
            yield path, f"{who} have images ({key}), and {remedy}"
