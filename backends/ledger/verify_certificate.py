"""Check the certificate of a Penstock run. It needs nothing but Python 3.9 or newer, and no Penstock.

    python -I -S verify_certificate.py certificate.json --ledger ledger.sqlite --weights weights.jsonl

Without the files it checks that the certificate agrees with itself: its digest, that every figure follows from the
samples that it lists, the bounds of age, and the chain of weights. With the files it makes every figure anew from them
and compares. Exit code 0: all agrees; 1: something does not, one line each; 2: a file cannot be read.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import sqlite3
import struct
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

    Json = dict[str, "Json"] | list["Json"] | str | int | None

Facts = dict[str, Any]

FORMAT = 1
MAX_SHOWN = 40
ORDINARY = ("completed", "truncated", "policy_error")
"""Outcomes of a sample that ended normally."""
NO_RESPONSE = "no_response"
"""It is counted, and no engine brought a response with an ordinary outcome."""
HAD_FAILED = "had_failed"
"""It is counted, though it was noted as failed (a time-out is noted so, too) and was not issued again."""
NO_DIGEST = ("", "none")
"""Of a publish that moves no weights."""
_ENTRIES = "SELECT sequence, epoch, kind, body FROM entries ORDER BY sequence"
_GROUPS = "SELECT group_id, version FROM groups UNION ALL SELECT group_id, evaluation FROM evaluation_groups"
_SAMPLES = """
SELECT s.group_id, s.sample_index, coalesce(s.state, 'in the system'), coalesce(s.cause, ''), coalesce(s.outcome, ''),
    s.engine IS NOT NULL AND s.attempt IS NOT NULL,
    r.noted_at IS NOT NULL AND s.attempt = 0 AND NOT EXISTS (SELECT 1 FROM claims c WHERE c.epoch % 1000 = 0
        AND c.claimed_at > r.noted_at AND c.claimed_at <= coalesce(g.admitted_at, e.ended_at)),
    s.num_tokens, s.num_given_tokens, s.oldest_version, s.newest_version
FROM samples s LEFT JOIN groups g USING (group_id) LEFT JOIN evaluation_groups e USING (group_id)
LEFT JOIN reasons r ON r.group_id = s.group_id AND r.sample_index = s.sample_index AND r.state = 'failed'
ORDER BY s.group_id, s.sample_index
"""
_STEPS = """
SELECT s.version, s.num_groups, s.num_trained_tokens, s.num_masked_tokens, s.max_staleness, b.max_staleness
FROM steps s LEFT JOIN batches b USING (version) ORDER BY s.version
"""
_WAITING = """
SELECT (SELECT count(*) FROM groups WHERE state = 'granted') * coalesce((SELECT samples_per_group FROM run), 0)
    + (SELECT coalesce(sum(num_samples), 0) FROM evaluation_groups WHERE state = 'granted')
"""
_HAS_REUSES = "SELECT count(*) FROM sqlite_master WHERE name = 'reuses'"
_REUSES = (
    "SELECT group_id, use, version, max_uses FROM reuses WHERE version IN (SELECT version FROM steps) ORDER BY 1, 2"
)
_EVALUATIONS = "SELECT number, version, is_pinned, state FROM evaluations ORDER BY number"


def digest_of(value: object) -> str:
    """SHA-256 of a value as canonical JSON: keys sorted, no spaces, ASCII."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def seal(certificate: Facts) -> str:
    """The digest that a certificate carries: of all of it but that digest."""
    return digest_of({key: value for key, value in certificate.items() if key != "digest"})


def links(start: str, publishes: list[list[Any]]) -> list[Any]:
    """The chain over the publishes: each link is the digest of the one before it and of what was published."""
    chain = [start]
    for publish in publishes:
        chain.append(digest_of([chain[-1], *publish]))
    return chain[1:]


def read_ledger(path: Path) -> Facts:
    """Every fact that a certificate states of a ledger, read in one transaction.

    Raises:
        sqlite3.Error: it is no ledger, or it cannot be read.
    """
    database = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, isolation_level=None, timeout=10.0)
    try:
        database.execute("PRAGMA query_only = ON")
        database.execute("BEGIN")
        return _facts_of(database)
    finally:
        database.close()


def _facts_of(database: sqlite3.Connection) -> Facts:
    num_entries, log = 0, hashlib.sha256()
    for num_entries, (sequence, epoch, kind, body) in enumerate(database.execute(_ENTRIES), 1):  # noqa: B007
        log.update(struct.pack(">qqqq", sequence, epoch, len(kind.encode()), len(body)) + kind.encode() + body)
    groups: dict[int, list[Any]] = {}
    kinds: dict[tuple[str, ...], int] = {}
    for group, index, state, cause, outcome, has_response, has_failed, *facts in database.execute(_SAMPLES):
        flaw = ""
        if state in ("trained", "evaluated"):
            flaw = NO_RESPONSE if not has_response or outcome not in ORDINARY else HAD_FAILED if has_failed else ""
        kind = kinds.setdefault((state, cause, outcome, flaw), len(kinds))
        groups.setdefault(group, []).append([index, kind, *facts])
    places = dict(database.execute(_GROUPS))
    found: Facts = {
        "sha256": log.hexdigest(),
        "num_entries": num_entries,
        "kinds": [list(kind) for kind in kinds],
        "groups": [[group, places.get(group), rows] for group, rows in groups.items()],
        "num_waiting": database.execute(_WAITING).fetchone()[0],
        "steps": [list(row) for row in database.execute(_STEPS)],
        "evaluations": [list(row) for row in database.execute(_EVALUATIONS)],
    }
    if database.execute(_HAS_REUSES).fetchone()[0] and (reuses := database.execute(_REUSES).fetchall()):
        found["reuses"] = [list(row) for row in reuses]  # of a run that uses nothing twice a certificate says nothing
    return {**found, **derived(found)}


def rows_of(facts: Facts) -> Iterator[tuple[int, int | None, list[Any], list[Any]]]:
    """Each sample: its group, the group's version or evaluation, its kind, and its row."""
    for group, place, rows in facts["groups"]:
        for row in rows:
            yield group, place, facts["kinds"][row[1]], row


def uses_of(facts: Facts) -> Iterator[tuple[int, int, list[Any]]]:
    """Each trained sample once for each further use of its group: the group, the version that it made, its row."""
    again: dict[int, list[int]] = {}
    for group, _, version, _ in facts.get("reuses", []):
        again.setdefault(group, []).append(version)
    for group, _, kind, row in rows_of(facts) if again else ():
        if kind[0] == "trained":
            for version in again.get(group, []):
                yield group, version, row


def derived(facts: Facts) -> Facts:
    """The figures that follow from the samples that are listed."""
    figures = _figures(facts)
    if "reuses" in facts:
        ages: dict[tuple[int, int], list[int]] = {}
        for _, version, (_, _, tokens, given, oldest, newest) in uses_of(facts):
            if oldest is not None:
                _add(ages, (version - 1 - oldest, version - 1 - newest), tokens - given)
        figures["ages_of_reuses"] = [[*age, *counts] for age, counts in sorted(ages.items())]
    return figures


def _figures(facts: Facts) -> Facts:
    ended: dict[tuple[str, str], list[int]] = {}
    ages: dict[tuple[int, int], list[int]] = {}
    measured: dict[int, list[Any]] = {row[0]: [row[0], 0, 0, None, None] for row in facts["evaluations"]}
    flaws: Counter[tuple[str, str]] = Counter()
    for group, place, (state, cause, _, flaw), (_, _, tokens, given, oldest, newest) in rows_of(facts):
        _add(ended, (state, cause), tokens)
        flaws[state, flaw] += 1
        if state == "trained" and oldest is not None and place is not None:
            _add(ages, (place - 1 - oldest, place - 1 - newest), tokens - given)
        if group < 0 and place in measured:
            _measure(measured[place], state, oldest, newest)
    num_samples = sum(count for count, _ in ended.values())
    in_system = sum(count for (state, _), (count, _) in ended.items() if state == "in the system")
    return {
        "num_issued": num_samples + facts["num_waiting"],
        "num_in_system": in_system + facts["num_waiting"],
        "ends": [[*end, *counts] for end, counts in sorted(ended.items())],
        "ages": [[*age, *counts] for age, counts in sorted(ages.items())],
        "measured": [measured[number] for number in sorted(measured)],
        "infrastructure_failures_trained": flaws["trained", NO_RESPONSE] + flaws["trained", HAD_FAILED],
        "infrastructure_failures_evaluated": flaws["evaluated", NO_RESPONSE] + flaws["evaluated", HAD_FAILED],
        "timed_out_counted": flaws["trained", HAD_FAILED] + flaws["evaluated", HAD_FAILED],
    }


def _add(counts: dict[Any, list[int]], key: object, tokens: int) -> None:
    count = counts.setdefault(key, [0, 0])
    count[0] += 1
    count[1] += tokens


def _measure(row: list[Any], state: str, oldest: int | None, newest: int | None) -> None:
    """Of an evaluation: samples with an answer and without one, and the versions that made the answers."""
    row[1 if state == "evaluated" else 2] += 1
    if state == "evaluated" and oldest is not None and newest is not None:
        row[3] = oldest if row[3] is None else min(row[3], oldest)
        row[4] = newest if row[4] is None else max(row[4], newest)


def findings_of(certificate: Facts) -> Iterator[str]:
    """What is wrong with a certificate by itself."""
    facts = certificate["ledger"]
    if certificate["digest"] != seal(certificate):
        yield f"digest: the certificate says {certificate['digest']}, its contents make {seal(certificate)}"
    for name, value in derived(facts).items():
        yield from differences(f"ledger.{name}", facts[name], value, "the samples that are listed make")
    for name in ("infrastructure_failures_trained", "infrastructure_failures_evaluated", "timed_out_counted"):
        if facts[name] != 0:
            yield f"ledger.{name}: {facts[name]}, it must be 0"
    yield from _wrong_uses(facts)
    yield from _wrong_ages(facts)
    yield from _wrong_evaluations(facts)
    yield from _wrong_weights(certificate)


def _wrong_uses(facts: Facts) -> Iterator[str]:
    first = {group: version for group, version, (state, *_), _ in rows_of(facts) if state == "trained"}
    last: dict[int, tuple[int, int]] = {group: (1, version) for group, version in first.items() if version is not None}
    for group, use, version, bound in facts.get("reuses", []):
        number, before = last.get(group, (0, 0))
        if not number or group < 0:
            yield f"ledger.reuses: group {group} is trained again to make {version}, and was not trained before"
        elif use != number + 1 or use > bound:
            yield f"ledger.reuses: use {use} of group {group} follows use {number}, at most {bound} are allowed"
        elif version <= before:
            yield f"ledger.reuses: use {use} of group {group} makes {version}, the one before it made {before}"
        last[group] = (use, version)


def _wrong_ages(facts: Facts) -> Iterator[str]:
    oldest: dict[int, int] = {}
    tokens: Counter[int] = Counter()
    for group, made, row in uses_of(facts):
        tokens[made] += row[2] - row[3]
        if row[4] is not None:
            oldest[made] = max(oldest.get(made, 0), made - 1 - row[4])
            if not 0 <= row[4] <= row[5] < made:
                yield f"group {group}: sample {row[0]} of versions {row[4]} to {row[5]} is trained to make {made}"
    for group, version, (state, _, _, _), row in rows_of(facts):
        if state != "trained":
            continue
        if version is None or group < 0:
            yield f"group {group}: sample {row[0]} is trained, and by no step"
            continue
        tokens[version] += row[2] - row[3]
        if row[4] is not None:
            oldest[version] = max(oldest.get(version, 0), version - 1 - row[4])
            if not 0 <= row[4] <= row[5] < version:
                yield f"group {group}: sample {row[0]} of versions {row[4]} to {row[5]} is trained to make {version}"
    for place, (version, _, trained, masked, age, bound) in enumerate(facts["steps"], 1):
        if version != place:
            yield f"ledger.steps: step {place} makes version {version}"
        if bound is None or age > bound:
            yield f"step {version}: trains a token of age {age}, its bound is {bound}"
        if age > oldest.get(version, 0) or (age < oldest.get(version, 0) and not masked):
            yield f"step {version}: the receipt says age {age}, the samples make it {oldest.get(version, 0)}"
        if trained + masked != tokens[version]:
            yield f"step {version}: the receipt says {trained + masked} tokens, the samples have {tokens[version]}"
    for version in sorted(set(tokens) - {step[0] for step in facts["steps"]}):
        yield f"ledger.steps: samples are trained by step {version}, which has no receipt"


def _wrong_evaluations(facts: Facts) -> Iterator[str]:
    asked = {number: (version, is_pinned) for number, version, is_pinned, _ in facts["evaluations"]}
    for number, _, _, oldest, newest in facts["measured"]:
        version, is_pinned = asked[number]
        if oldest is not None and (oldest < version or (is_pinned and newest != version)):
            yield f"evaluation {number}: is of version {version}, its answers are of {oldest} to {newest}"


def _wrong_weights(certificate: Facts) -> Iterator[str]:
    publishes, chain = certificate["weights"]["publishes"], certificate["weights"]["chain"]
    yield from differences("weights.chain", chain, links(certificate["scenario_sha256"], publishes), "the digests make")
    for before, after in zip(publishes, publishes[1:]):  # noqa: B905, RUF007 - Python 3.9 has neither
        if after[:2] <= before[:2] or (after[0] == before[0] and after[2] < before[2]):
            yield f"weights.publishes: {after[:3]} follows {before[:3]} (incarnation, publish, version)"
    known = {version for _, _, version, digest, _ in publishes if digest not in NO_DIGEST}
    made = {
        version
        for _, _, kind, row in rows_of(certificate["ledger"])
        if kind[0] in ("trained", "evaluated")
        for version in row[4:6]
        if version is not None
    }
    for version in sorted(made - known):
        yield f"weights.publishes: no digest of version {version}, which made tokens that were counted"


def differences(path: str, stated: Json, found: Json, source: str) -> Iterator[str]:
    """Where two values differ, down to the place."""
    if isinstance(stated, dict) and isinstance(found, dict):
        for key in sorted(
            {*stated, *found}, key=lambda key: (isinstance(found.get(key), list), key)
        ):  # short ones first
            yield from differences(f"{path}.{key}", stated.get(key), found.get(key), source)
    elif isinstance(stated, list) and isinstance(found, list) and len(stated) == len(found):
        for place, (one, other) in enumerate(zip(stated, found)):  # noqa: B905 - Python 3.9 has no strict
            yield from differences(f"{path}[{place}]", one, other, source)
    elif isinstance(stated, list) and isinstance(found, list):
        yield f"{path}: the certificate has {len(stated)} entries, {source} {len(found)}"
    elif stated != found or type(stated) is not type(found):
        yield f"{path}: the certificate says {ascii(stated)[:160]}, {source} {ascii(found)[:160]}"


def read_publishes(data: bytes) -> list[Any]:
    """The publishes in ``weights.jsonl``; a last line that a kill has torn is passed over."""
    rows = [json.loads(line) for line in data.split(b"\n")[:-1] if line]
    names = ("learner_epoch", "publish", "version", "digest", "size_bytes")
    return [[row[name] for name in names] for row in rows]


def main(arguments: list[str] | None = None) -> int:
    """Check what the command line names, and say what differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("certificate", type=Path)
    for name, file in (("ledger", "ledger.sqlite"), ("scenario", "scenario.yaml"), ("weights", "weights.jsonl")):
        parser.add_argument(f"--{name}", type=Path, help=f"{file} of the run, to compare with")
    given = parser.parse_args(arguments)
    try:
        found = _check(given)
    except (OSError, ValueError, RecursionError, sqlite3.Error) as error:
        sys.stderr.write(f"cannot be read: {str(error)!a}\n")
        return 2
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        sys.stderr.write(f"{str(given.certificate)!a}: is not a certificate of this form: {error!a}\n")
        return 2
    sys.stdout.writelines(f"{line}\n" for line in found[:MAX_SHOWN])
    against = [name for name in ("ledger", "scenario", "weights") if getattr(given, name)]
    with_what = ", ".join(["with itself", *against]) if against else "with itself; --ledger compares it with the run"
    verdict = f"{len(found)} differences in all" if found else f"verified: the certificate agrees {with_what}"
    sys.stdout.write(f"{verdict}\n")
    return 1 if found else 0


@contextlib.contextmanager
def _reading(path: Path) -> Generator[None]:
    """Errors name the file, which neither those of JSON nor those of SQLite do."""
    try:
        yield
    except (OSError, ValueError, RecursionError, sqlite3.Error) as error:
        raise ValueError(f"{path}: {getattr(error, 'strerror', None) or error}") from None


def _check(given: argparse.Namespace) -> list[str]:
    with _reading(given.certificate):
        certificate = json.loads(given.certificate.read_bytes())
    if certificate["penstock_certificate"] != FORMAT:
        raise ValueError(f"form {certificate['penstock_certificate']}, this verifier reads form {FORMAT}")
    found = list(findings_of(certificate))
    if given.ledger:
        with _reading(given.ledger):
            facts = read_ledger(given.ledger)
        found = [*differences("ledger", certificate["ledger"], facts, "the ledger file"), *found]
    if given.scenario:
        with _reading(given.scenario):
            digest = hashlib.sha256(given.scenario.read_bytes()).hexdigest()
        found += differences("scenario_sha256", certificate["scenario_sha256"], digest, "the scenario file")
    if given.weights:
        with _reading(given.weights):
            publishes = read_publishes(given.weights.read_bytes())
        found += differences("weights.publishes", certificate["weights"]["publishes"], publishes, "the file of weights")
    return found


if __name__ == "__main__":
    sys.exit(main())
